"""What ``tune`` compiles: one candidate in a worker process, the gate it has to pass, and a bound of its main loop."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton

from ...kernels.device.tiles import Order, Shape
from ...kernels.tables import options_of, triton_version
from .. import Job, Verdict
from ..inspect.arguments import ast_source
from ..inspect.bound import bounds_of, loop_bound, main_bound
from ..inspect.gate import compile_and_ask
from ..inspect.names import OF_LAUNCHES
from ..inspect.variant import Variant
from ..ranking import ANY, ONE

ROOT = Path(__file__).resolve().parents[2]

UNIT = "percent of the tensor cores' peak"


def compile_job(job: Job) -> Verdict:
    """Compile a job and read what came out; runs in a worker process, which Triton's interpreter is off in."""
    compiled, found = compile_and_ask(variant_of(job), source_of(job))
    if found:
        return Verdict(tuple(found))
    best = main_bound(bounds_of(compiled))
    assert best is not None, "the gate asks for a loop with matrix products"
    return Verdict((), round(loop_bound(compiled), 2), f"{UNIT}, limited by {best.limiter}", compiled.folder)


def in_cache(verdict: Verdict) -> bool:
    """Whether Triton's cache still has the binary: a launch would compile it again, while the GPU waits."""
    return not verdict.folder or any((Path(triton.knobs.cache.dir) / verdict.folder).glob("*.cubin"))


def variant_of(job: Job) -> Variant:
    """What the gate is asked about."""
    options = tuple((name, value) for name, value in options_of(job.tile).items() if name not in OF_LAUNCHES)
    return Variant(
        job.kernel, job.arch, job.dtype, job.head_dim, job.head_dim_v, job.tile, job.role, job.full, job.grouped,
        options=options,
    )  # fmt: skip


def source_of(job: Job) -> Any:
    """As a launch specialises it, to the letter: what is compiled here lies in Triton's cache under a launch's key."""
    source = plain_source(variant_of(job))
    names = [parameter.name for parameter in source.fn.params]
    shape = names.index("shape")
    parts = "packed" if job.kernel in ("forward", "dq") else "splits"
    counts: dict[tuple[str, ...], str] = {("heads",): job.heads, ("group",): job.group, (parts,): job.parts}
    counts |= {("order", field): count for field, count in zip(Order._fields, job.order, strict=True)}
    for path, count in counts.items():
        place = shape, *place_of(path)
        if count == ANY and place in source.attrs:
            source.attrs[place] = []
        elif count == ONE and place in source.attrs:
            del source.attrs[place]
            source.constants[place] = 1
            source.signature["shape"] = constant_at(source.signature["shape"], path)
    return as_a_launch_says_it(source)


def as_a_launch_says_it(source: Any) -> Any:
    """From Triton 3.7 on a launch says of every constexpr that it has no attribute, and that is part of the key."""
    if triton_version() >= (3, 7):
        source.attrs |= {(i,): [] for i, parameter in enumerate(source.fn.params) if parameter.is_constexpr}
    return source


def place_of(path: Sequence[str]) -> list[int]:
    """Where a field of ``Shape``, or one of its ``order``, is among the arguments of a launch."""
    return [names.index(field) for names, field in zip((Shape._fields, Order._fields), path, strict=False)]


def constant_at(types: Any, path: Sequence[str]) -> Any:
    """The types of a tuple whose field is a constant."""
    field, *rest = path
    return types._replace(**{field: constant_at(getattr(types, field), rest) if rest else "constexpr"})


def plain_source(variant: Variant) -> Any:
    """Of any heads that 16 divides."""
    if dict(variant.options).get("forward_kernel") == "hopper":
        from ..inspect.hopper import gluon_source  # Gluon takes a while to import, and only this kernel needs it

        return gluon_source(variant)
    return ast_source(variant)


def digest(*also: str) -> str:
    """Of all that decides a verdict: kernels, what reads them, Triton; and of the modules of more folders."""
    made = hashlib.sha256(triton.__version__.encode())
    folders = "kernels", "autotune/inspect", *also
    for path in [*(path for folder in folders for path in sorted((ROOT / folder).glob("*.py"))), Path(__file__)]:
        made.update(path.read_bytes())
    return made.hexdigest()[:16]
