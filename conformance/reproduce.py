"""Reproductions: one file per wrong case that needs only torch and the target."""

from __future__ import annotations

import re
import zlib
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from .cases import Case
from .protocol import resolve_path

PROGRAM = '''\
"""{title}

Run with: python {name}
It compares every rank with plain attention of the whole sequence in float64, and prints the largest errors.
"""
import math, os, sys, tempfile, traceback
from types import SimpleNamespace
import torch, torch.distributed as dist, torch.multiprocessing as mp

{target}

CALL = {call}
POSITIONS = {positions}  # of the tokens of every rank


def inputs():
    generator = torch.Generator().manual_seed({seed})
    heads = {{"q": CALL["heads"], "k": CALL["kv_heads"], "v": CALL["kv_heads"], "dout": CALL["heads"]}}
    shape = {{name: (CALL["batch"], CALL["tokens"], n, CALL["head_dim"]) for name, n in heads.items()}}
    whole = {{name: torch.randn(shape[name], generator=generator).to({dtype}) for name in shape}}
    return whole, torch.randn(CALL["batch"], CALL["heads"], CALL["tokens"], generator=generator)


def truth(whole, dlse):
    """Return out, lse, dq, dk and dv in float64."""
    q, k, v = leaves = [whole[name].double().requires_grad_() for name in "qkv"]
    at, call = torch.arange(CALL["tokens"]), SimpleNamespace(**CALL)
    i, j, see = at[:, None], at, torch.ones(1, len(at), len(at), dtype=torch.bool)
    if call.causal:
        see = see & ((j <= i) | (j < call.prefix_length))
    left, right = call.window_size
    see = see & (j >= i - left if left >= 0 else True) & (j <= i + right if right >= 0 else True)
    if call.cu_seqlens:
        document = torch.bucketize(at, torch.tensor(call.cu_seqlens), right=True)
        see = see & (document[:, None] == document)
    if call.seqused_k:
        see = see & (j < torch.tensor(call.seqused_k)[:, None, None])
    k, v = (x.repeat_interleave(call.heads // call.kv_heads, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (call.softmax_scale or q.shape[-1] ** -0.5)
    scores = call.softcap * torch.tanh(scores / call.softcap) if call.softcap else scores
    if call.alibi_slopes is not None:
        scores = scores - call.alibi_slopes.double()[:, None, None] * (i - j).abs()
    scores = scores.masked_fill(~see[:, None], -math.inf)
    if call.sink is not None:
        sink = call.sink.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    blind = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)[..., : len(at)]
    out = torch.einsum("bhij,bjhd->bihd", weights, v)
    lse = scores.masked_fill(blind, 0).logsumexp(-1)
    grads = whole["dout"].double(), dlse.double().masked_fill(blind[..., 0], 0) * call.needs_lse
    gradients = torch.autograd.grad((out, lse), leaves, grads)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse.masked_fill(blind[..., 0], -math.inf), *gradients)))


def run(rank, store):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{{store}}", rank=rank, world_size=CALL["world"])
    whole, dlse = inputs()
    exact, at = truth(whole, dlse), torch.tensor(POSITIONS[rank])
    leaves = [whole[name][:, at].clone().requires_grad_({gradients}) for name in "qkv"]
    call = SimpleNamespace(rank=rank, positions=at, group=None, dtype={dtype}, **CALL)
    parts = {attend}(*leaves, call)
    parts = list(parts)[:2] if isinstance(parts, (tuple, list)) else [parts]
    results = dict(zip(("out", "lse"), parts))
    if {gradients}:
        grads = [whole["dout"][:, at], dlse[:, :, at]][: 1 + CALL["needs_lse"]]
        grads = [grad.to(x.dtype) for grad, x in zip(grads, parts)]
        gradients = torch.autograd.grad(parts[: len(grads)], leaves, grads, materialize_grads=True)
        results |= zip(("dq", "dk", "dv"), gradients)
    for name, x in results.items():
        right = exact[name][:, :, at] if name == "lse" else exact[name][:, at]
        off = torch.where(x == right, 0.0, (x.detach().double() - right).abs()).max().item()
        largest = right[right.isfinite()].abs().max().item()
        print(f"rank {{rank}}: {{name}} is off by {{off:.3g}}, where the largest value is {{largest:.3g}}")


if __name__ == "__main__":
    folder = tempfile.mkdtemp()
    mp.spawn(run, args=(os.path.join(folder, "store"),), nprocs=CALL["world"])
'''


def write_reproduction(
    folder: Path, target: str, title: str, case: Case, seed: int, positions: list[list[int]]
) -> Path:
    """Write the program that repeats a case, and return its path.

    The program contains the file of a ready adapter, and imports any other target.
    """
    name = f"{target.replace('.', '_').replace(':', '_')}-{case.id.replace('/', 'x')}.py"
    left_out = ("rank", "group", "positions", "features", "dtype")
    call = case.call()
    values = {field.name: getattr(call, field.name) for field in fields(call) if field.name not in left_out}
    source, attend = _target_source(resolve_path(target))
    program = PROGRAM.format(
        title=title.replace("\\", "/").replace('"""', "'''"), name=name, target=source, attend=attend,
        call="dict(\n" + "".join(f"    {key}={_literal(value)},\n" for key, value in values.items()) + ")",
        positions=positions, seed=zlib.crc32(f"{case.id}{seed}".encode()), dtype=call.dtype,
        gradients=case.gradients != "none",
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(program)
    return folder / name


def _literal(value: Any) -> str:
    return f"torch.tensor({value.tolist()})" if isinstance(value, Tensor) else repr(value)


def _target_source(path: str) -> tuple[str, str]:
    """Return the lines that define or import a target, and the name of its function."""
    module, _, name = path.partition(":")
    package = f"{__package__}.adapters."
    if not module.startswith(package):
        statement = f"from {module} import {name} as target" if name else f"import {module} as target"
        return f"sys.path.append(os.getcwd())\n{statement}", 'getattr(target, "attend", target)'

    def read(name: str) -> str:
        text = (Path(__file__).parent / "adapters" / f"{name}.py").read_text()
        text = text.replace("from __future__ import annotations\n", "")
        return re.sub(r"from \.(\w+) import .*", lambda match: read(match[1]), text)

    return read(module.removeprefix(package)), f"{name}.attend" if name else "attend"
