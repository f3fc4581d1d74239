"""One rank of a target, in a child process."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from .cases import Case, select_cases
from .oracle import GRADIENTS
from .protocol import Target, load_target

TIMEOUT = timedelta(minutes=30)  # the parent ends ranks that hang, by its own deadline
DEVICE = "RINGATTN_CONFORMANCE_DEVICE"  # set in child processes only

_forks = list[int]()


class MisuseError(Exception):
    """Raised if a target does not return what the protocol asks for."""


def run_case(target: Target, rank: int, case: Case, seed: int, probe: bool) -> dict[str, Any]:
    """Run one rank of a case; return ``positions``, the results of its tokens and ``notes`` on what else it did."""
    call = case.call(rank, probe=probe)
    positions, device = target.positions(call), _device(rank)
    whole = case.inputs(seed, probe=probe)
    shards = {name: x[:, :, positions] if name == "dlse" else x[:, positions] for name, x in whole.items()}
    shards = {name: x.to(device).contiguous() for name, x in shards.items()}
    needs_grad = case.gradients != "none" and not probe
    leaves = [shards[name].requires_grad_(needs_grad) for name in "qkv"]
    leaves += [] if call.sink is None else [call.sink.to(device).requires_grad_(needs_grad)]
    call = replace(call, positions=positions, sink=call.sink if call.sink is None else leaves[3])
    before, forks = [x.detach().clone() for x in leaves], len(_forks)
    results = _check_results(target.adapter.attend(*leaves[:3], call), leaves[0], call.needs_lse)
    inputs = zip("qkvs", leaves, before, strict=False)
    notes = [f"it changed {name}" for name, x, copy in inputs if not torch.equal(x, copy)]
    named = {name: x.detach().clone() for name, x in results.items()}
    if needs_grad:
        output_grads = {"out": shards["dout"], "lse": shards["dlse"]}
        outs = {name: x for name, x in results.items() if name == "out" or call.needs_lse}
        if not results["out"].requires_grad:
            raise MisuseError("out has no gradient: it is detached from q, k and v")
        grads = [output_grads[name].to(x.dtype) for name, x in outs.items()]
        gradients = torch.autograd.grad([*outs.values()], leaves, grads, materialize_grads=True)
        notes += ["the backward changed its output"] * any(not named[name].equal(x) for name, x in results.items())
        named |= zip(GRADIENTS, gradients, strict=False)
    notes += ["it forks processes"] * (len(_forks) > forks)
    return {"positions": positions, "notes": notes, **{name: x.detach().cpu() for name, x in named.items()}}


def _check_results(returned: object, q: Tensor, needs_lse: bool) -> dict[str, Tensor]:
    parts = [*returned][:2] if isinstance(returned, Sequence) else [returned]
    if not parts or not all(isinstance(x, Tensor) for x in parts):
        raise MisuseError(f"attend returned {type(returned).__name__}: it must return out or (out, lse)")
    if needs_lse and len(parts) < 2:
        raise MisuseError("attend returned no lse, though call.needs_lse is True. Leave `lse` out of its features.")
    named = dict(zip(("out", "lse"), parts, strict=False))
    for name, shape in (("out", q.shape[:3]), ("lse", (q.shape[0], q.shape[2], q.shape[1]))):
        if name in named and tuple(named[name].shape[:3]) != tuple(shape):
            raise MisuseError(f"{name} has shape {list(named[name].shape)}: it must start with {list(shape)}")
    return named


def _device(rank: int) -> torch.device:
    on_gpu = os.environ.get(DEVICE) == "cuda"
    return torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")


def describe(target: Target, rank: int, worlds: Sequence[int]) -> dict[str, Any]:
    """Return the version of a target, its cases and the reasons for those outside what it says it supports."""
    cases, refused = select_cases(target.refusal, worlds)
    return {"version": target.version, "cases": cases, "refused": refused}


def shard_positions(target: Target, rank: int, case: Case) -> list[list[int]]:
    """Return the positions of every rank's tokens."""
    return [target.positions(case.call(other)).tolist() for other in range(case.world)]


def serve(rank: int, world: int, port: int, pipe: Connection, log: str, path: str, device: str) -> None:
    """Join the process group as ``rank`` and answer requests, ``(work, *arguments)``, until the pipe closes.

    An answer is ``("ok", bytes)`` or ``("error", type, text)``. Output goes to the file ``log``. A copy of this process
    that the target forked ends when the target returns in it.
    """
    os.setsid()  # one signal ends this process and all that the target starts
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the parent
    own = os.getpid()
    for stream, name in ((1, log), (2, f"{log}.err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.register_at_fork(after_in_parent=lambda: _forks.append(1))
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCH_DIST_INIT_BARRIER": "1", DEVICE: device}
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
        reply: tuple[Any, ...]
        try:
            target = target or load_target(path)
            answer = io.BytesIO()
            torch.save(work(target, rank, *arguments), answer)
            reply = ("ok", answer.getvalue())
        except BaseException as error:  # SystemExit of a target, too
            reply = ("error", type(error).__name__, str(error))
        if os.getpid() != own:
            os._exit(0)
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.send(reply)
