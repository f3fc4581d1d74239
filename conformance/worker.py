"""One rank of a target: in a child process, or in a thread of a ``LocalWorld``."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from .cases import Case, select_cases
from .protocol import Target, load_target

TIMEOUT = timedelta(minutes=30)  # the parent ends ranks that hang, by its own deadline

_forks = 0


class MisuseError(Exception):
    """Raised if a target does not do what its adapter says: its shards, or the shape of what it returns."""


def run_case(target: Target, case: Case, rank: int, seed: int, probe: bool, *, group: Any = None) -> dict[str, Any]:
    """Run one rank of a case; return ``positions``, the results of its tokens and ``notes`` on what it did besides.

    Raises:
        MisuseError: If the shard or the results do not have the shape that the adapter says.
    """
    call, device = case.call(rank, group, probe=probe), _device(rank)
    positions = target.positions(call)
    object.__setattr__(call, "positions", positions)
    whole = case.inputs(seed, probe=probe)
    shards = {name: x[:, :, positions] if name == "dlse" else x[:, positions] for name, x in whole.items()}
    shards = {name: x.to(device).contiguous() for name, x in shards.items()}
    needs_grad = case.gradients != "none" and not probe
    leaves = [shards[name].requires_grad_(needs_grad) for name in "qkv"]
    leaves += [] if call.sink is None else [call.sink.to(device).requires_grad_(needs_grad)]
    if call.sink is not None:
        object.__setattr__(call, "sink", leaves[3])
    before = [x.detach().clone() for x in leaves]
    forks = _forks
    returned = target.adapter.attend(*leaves[:3], call)
    results = _check_results(returned, leaves[0], call.needs_lse)
    notes = [f"it changed {name}" for name, x, y in zip(("q", "k", "v", "the sink"), leaves, before, strict=False)
             if not torch.equal(x.detach(), y)]  # fmt: skip
    named = {name: x.detach() for name, x in results.items()}
    if needs_grad:
        kept = [x.clone() for x in named.values()]
        gradients = [shards["dout"].to(results["out"].dtype)]
        gradients += [shards["dlse"].to(results["lse"].dtype)] if call.needs_lse else []
        outs = [*results.values()][: len(gradients)]
        if not outs[0].requires_grad:
            raise MisuseError("out has no gradient: it is detached from q, k and v")
        grads = torch.autograd.grad(outs, leaves, gradients, allow_unused=True)
        found = dict(zip(("dq", "dk", "dv", "dsink"), grads, strict=False))
        named |= {name: x for name, x in found.items() if x is not None}
        notes += [f"the sink has no gradient by {name}" for name, x in found.items() if x is None and name == "dsink"]
        for name, x in zip(("dq", "dk", "dv"), leaves, strict=False):
            if found[name] is None:
                named[name] = torch.zeros_like(x)
        if not all(map(torch.equal, kept, [x.detach() for x in results.values()])):
            notes.append("the backward changed its output")
    notes += ["it forks processes"] * (_forks > forks)
    return {"positions": positions, "notes": notes, **{name: x.detach().cpu() for name, x in named.items()}}


def _check_results(returned: object, q: Tensor, needs_lse: bool) -> dict[str, Tensor]:
    parts = list(returned) if isinstance(returned, Sequence) else [returned]
    if not parts or not all(isinstance(x, torch.Tensor) for x in parts[:2]):
        raise MisuseError(f"attend returned {type(returned).__name__}: it must return out or (out, lse)")
    if needs_lse and len(parts) < 2:
        raise MisuseError("attend returned no lse, though call.needs_lse is True. Leave `lse` out of its features.")
    named = dict(zip(("out", "lse"), parts, strict=False))
    shapes = {"out": q.shape, "lse": (q.shape[0], q.shape[2], q.shape[1])}
    for name, x in named.items():
        if x.shape[: len(shapes[name]) - (name == "out")] != tuple(shapes[name])[: len(shapes[name]) - (name == "out")]:
            raise MisuseError(f"{name} has shape {list(x.shape)}: it must be {list(shapes[name])}")
    return named


def _device(rank: int) -> torch.device:
    if os.environ.get("RINGATTN_CONFORMANCE_DEVICE") == "cuda":
        return torch.device("cuda", rank % torch.cuda.device_count())
    return torch.device("cpu")


def describe(target: Target, rank: int, worlds: Sequence[int]) -> dict[str, Any]:
    """Return the version of a target, its cases and the reasons for those outside what it says it supports."""
    cases, refused = select_cases(target.refusal, worlds)
    return {"version": target.version, "cases": cases, "refused": refused}


def shard_positions(target: Target, rank: int, case: Case) -> list[list[int]]:
    """Return the positions of every rank's tokens."""
    return [target.positions(case.call(other)).tolist() for other in range(case.world)]


def serve(rank: int, world: int, port: int, pipe: Connection, log: str, path: str, device: str) -> None:
    """Join the process group as ``rank`` and answer requests, ``(work, *arguments)``, until the pipe closes.

    An answer is ``("ok", bytes)`` or ``("error", type, text, traceback)``. Output goes to the file ``log``. A copy of
    this process that the target forked ends when the target returns in it.
    """
    os.setsid()  # one signal ends this process and all that the target starts
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the parent
    own = os.getpid()
    for stream, name in ((1, log), (2, f"{log}.err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.register_at_fork(after_in_parent=_count_fork)
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RINGATTN_CONFORMANCE_DEVICE": device}
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    if device == "cuda":
        torch.cuda.set_device(_device(rank))
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    target: Any = None
    while True:
        try:
            work, *arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            if target is None:
                target = load_target(path)
            answer = io.BytesIO()
            torch.save(work(target, rank, *arguments), answer)
            reply = ("ok", answer.getvalue())
        except BaseException as error:  # SystemExit of a target, too
            reply = ("error", type(error).__name__, str(error), traceback.format_exc())
        if os.getpid() != own:
            os._exit(0)
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.send(reply)


def _count_fork() -> None:
    global _forks
    _forks += 1


def run_case_request(target: Target, rank: int, case: Case, seed: int, probe: bool) -> dict[str, Any]:
    """Run :func:`run_case` with the order of arguments that :func:`serve` uses."""
    return run_case(target, case, rank, seed, probe)
