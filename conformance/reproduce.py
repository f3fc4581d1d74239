"""Reproductions: one file per wrong case that needs only torch and the target."""

from __future__ import annotations

import re
from pathlib import Path

from torch import Tensor

from .cases import Case
from .protocol import resolve_path

PROGRAM = '''\
"""{title}

Run with: python {name}
It compares every rank with plain attention of the whole sequence in float64, and prints the largest errors.
"""
import os, sys, tempfile
from types import SimpleNamespace
import torch, torch.distributed as dist, torch.multiprocessing as mp

{standalone}


{target}


CALL = {call}
POSITIONS = {positions}  # of the tokens of every rank


def run(rank, store):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{{store}}", rank=rank, world_size=CALL["world"])
    at = torch.tensor(POSITIONS[rank])
    call = SimpleNamespace(rank=rank, positions=at, group=None, **CALL)
    whole = draw_whole(call, {seed})
    exact, (results, notes) = attend_plainly(whole, call), run_target({attend}, whole, call)
    for name in [name for name in results if name != "dsink"]:
        x, right = results[name], exact[name].index_select(token_dim(name), at)
        off = (x.double() - right).abs().masked_fill(x == right, 0).max().item()
        largest = right[right.isfinite()].abs().max().item()
        notes.append(f"{{name}} is off by {{off:.3g}}, where the largest value is {{largest:.3g}}")
    print("\\n".join(f"rank {{rank}}: {{note}}" for note in notes))


if __name__ == "__main__":
    mp.spawn(run, args=(os.path.join(tempfile.mkdtemp(), "store"),), nprocs=CALL["world"])
'''


def write_reproduction(folder: Path, target: str, title: str, case: Case, positions: list[list[int]]) -> Path:
    """Write the program that repeats a case, and return its path.

    The program contains the file of a ready adapter, and imports any other target.
    """
    name = f"{target.replace('.', '_').replace(':', '_')}-{case.id.replace('/', 'x')}.py"
    module, _, attribute = resolve_path(target).partition(":")
    if module.startswith(f"{__package__}.adapters."):
        source = _read_source(f"adapters/{module.rpartition('.')[2]}.py")
        attend = f"{attribute}.attend" if attribute else "attend"
    else:
        statement = f"from {module} import {attribute} as target" if attribute else f"import {module} as target"
        source, attend = f"sys.path.append(os.getcwd())\n{statement}", 'getattr(target, "attend", target)'
    call = case.call()
    values = {name: x for name, x in vars(call).items() if name not in ("rank", "group", "positions")}
    literals = {name: f"torch.tensor({x.tolist()})" if isinstance(x, Tensor) else repr(x) for name, x in values.items()}
    fields = "".join(f"    {name}={literal},\n" for name, literal in literals.items())
    program = PROGRAM.format(
        title=title.replace("\\", "/").replace('"""', "'''"), name=name, target=source, attend=attend,
        standalone=_read_source("standalone.py"), call=f"dict(\n{fields})", positions=positions,
        seed=case.input_seed,
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(program)
    return folder / name


def _read_source(name: str) -> str:
    """Return a file of this folder without the imports that the program does not need."""
    text = (Path(__file__).parent / name).read_text()
    return re.sub(r"from (__future__|\.\.standalone) import .*\n", "", text)
