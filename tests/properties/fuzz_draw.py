"""Random calls of the public API as literals, which `fuzz_ranks` runs.

A line is ``{"run": ..., "world": ..., "calls": [...]}``. A call has arguments of ``ring_attention`` by name and the
fields that BASE explains.
"""

from __future__ import annotations

import math
from random import Random
from typing import Any

Literals = dict[str, Any]

BASE: Literals = {
    "seed": 0,  # of all tensors' values
    "tokens": 8,  # for layouts without lengths of their own; counted in blocks if there are blocks
    "layout": ["contiguous"],
    "later": 0,  # blocks before the queries, if keys have their own layout
    "block": 1,
    "short": 0,  # positions missing from the last block
    "batch": 1,
    "heads": [1, 1],
    "dims": [16, 16],
    "dtype": "float32",
    "strides": "contiguous",
    "host": "list",  # type of cu_seqlens and seqused_k
    "lse": False,  # also differentiate through lse
    "return_max_logits": False,
    "grads": "qkvs",
    "backend": "aten",
    "causal": False,
    "named": False,  # pass the layout by name if shards are equal
    "ring": {},
    "mesh": None,  # ranks of the ring and the Ulysses dimension
    "align": None,  # the align argument; both layouts then count from 0
    "key_tokens": None,  # number of keys with align
    "kept": False,  # use the ring that group= calls share
    "late": -1,  # this rank calls 20 ms later
    "wait": 0,  # the backward runs this many calls later
    "rows": False,  # mask arguments differ by batch row
    "unshard": None,  # (dim, grad) of a shard and unshard round trip instead of attention
    "move": None,  # (call, dim, numbers) of a relayout, roll or halo instead of attention
    "target": None,  # of a relayout
    "spoil": None,  # (argument, value, rank); rank -1 means all
}

WRONG: dict[str, list[Any]] = {
    "q": ["three dims", "int32", "float64", "strided", "other batch", "other tokens", "meta"],
    "k": ["three dims", "other dtype", "other batch", "other dim", "other heads", "meta"],
    "v": ["three dims", "other dtype", "other batch", "other tokens", "meta"],
    "causal": [1, None, "yes"],
    "return_max_logits": [1, None, "yes"],
    "window_size": [(-2, 0), (1, 2, 3), 4, (0.5, 1)],
    "softmax_scale": [0.0, -1.0, 1e999, "x"],
    "softcap": [-1.0, 1e999, "x"],
    "learnable_sink": [1.0, "two dims", "int32"],
    "alibi_slopes": [1.0, "two dims", "float64"],
    "dropout_p": [1.0, -0.5, None],
    "first_head": [-1, 0.5, 2**31, None],
    "align": ["left", 3],
    "cu_seqlens": [[1, 8], [0], [0, 5, 4], [0, 4.5], 3],
    "seqused_k": [[-1], [10**6], [0.5], [1] * 9, 3],
    "prefix_length": [-1, 10**6, 1.5],
    "islands": [3, [(3, 2)], [(0, 10**6)]],
    "intervals": [3, [], [(3, 4)]],
    "block_mask": ["all", 3],
    "layout": ["ring", 3],
    "kv_layout": ["ring", 3],
    "backend": ["cuda", None],
    "config": [3],
    "ring": ["ring"],  # both on all ranks, because the error cannot reach other ranks without them
    "group": ["group"],
}
"""Values without a meaning, whatever the call. For tensors: the change that makes them wrong."""

POSITIONS = ("cu_seqlens", "seqused_k", "prefix_length", "islands", "intervals")
"""Arguments that refer to positions, other than block masks."""


def draw_line(rng: Random) -> Literals:
    """Draw calls in one world on two rings, some of them on the ring that ``group=`` calls share."""
    run = rng.choices(["threads", "processes", "alone", "kernels"], [8, 3, 2, 2])[0]
    world = {"processes": rng.choice([2, 2, 3]), "alone": 1, "kernels": rng.randint(1, 3)}.get(run, rng.randint(1, 6))
    rings = [draw_ring(rng, world), draw_ring(rng, world)]
    calls: list[Literals] = []
    for _ in range(1 if run == "kernels" else rng.choice([1, 1, 2, 3, 5])):
        calls.append(draw_next(rng, run, world, rings, calls))
    if run != "kernels" and rng.random() < 0.25:
        spoilt = draw_next(rng, run, world, rings, calls)
        if not {"unshard", "move"} & {*spoilt}:
            # No rank expects this call, so all ranks compare it before any of them sends.
            spoilt |= {"softmax_scale": rng.uniform(0.1, 1.0)}
            spoilt |= {"spoil": draw_spoil(rng, spoilt, world)}
        calls += [spoilt, draw_call(rng, run, world, rng.choice(rings))]  # the ring must still work
    return {"run": run, "world": world, "calls": [tidy(call) for call in calls]}


def draw_next(rng: Random, run: str, world: int, rings: list[Literals], calls: list[Literals]) -> Literals:
    """Draw another call, or repeat the last one with other numbers or another mask."""
    draw = rng.choices([draw_unshard, draw_move, draw_call], [0.12, 0.12, 0.76])[0] if run != "kernels" else draw_call
    call = draw(rng, run, world, rng.choice(rings))
    if calls and not {"unshard", "move", "rows", "align"} & {*calls[-1]} and rng.random() < 0.4:
        call = calls[-1] | rng.choice([{}, draw_mask(rng, calls[-1])]) | {"seed": rng.randrange(1000)}
    return call | {"wait": rng.choice([0, 0, 1, 2]), "late": rng.choice([-1] * 4 + [rng.randrange(world)])}


def features(call: Literals) -> set[str]:
    """Return the fields of a call, and the kinds of its layouts, intervals and move."""
    return {
        *call,
        *(value[0] for name in ("layout", "kv_layout", "target", "intervals", "move") if (value := call.get(name))),
    }


def tidy(call: Literals) -> Literals:
    """Drop fields that equal their default."""
    return {name: value for name, value in call.items() if value is not None and value != BASE.get(name)}


def draw_ring(rng: Random, world: int) -> Literals:
    """Draw any combination of ring settings."""
    slots, order = rng.randint(2, 5), rng.sample(range(world), world)
    settings = {
        "slots": slots,
        "prefetch": rng.randrange(2),
        "chunks": rng.choice([1, 2, 3, 4]),
        "direction": -1,
        "topology": [order[:2], order[2:]] if world == 4 else [order],
        "wire_dtype": rng.choice(["bfloat16", "float8_e4m3fn"]),
        "grad_wire_dtype": "bfloat16",
    }
    often = rng.choice([0.0, 0.25, 0.5])
    return {name: value for name, value in settings.items() if rng.random() < often}


def draw_layout(rng: Random, tokens: int, world: int, *, holes: bool = True) -> list[Any]:
    """Draw a layout by name or token by token."""
    kinds: list[list[Any]] = [
        ["contiguous"],
        ["zigzag"],
        ["striped"],
        ["documents", sorted(rng.randint(0, tokens) for _ in range(rng.randint(0, 3)))],
        ["packed_layout", sorted(rng.randint(0, tokens) for _ in range(rng.randint(0, 3))), rng.choice([1, 0.4])],
        ["uneven", [rng.choice([0, 1, rng.randint(0, 2 * tokens // world)]) for _ in range(world)]],
        ["balanced", [*(rng.choice([0.0, 1.0, 2.5, 1 / 3]) for _ in range(world - 1)), 1.0], rng.random() < 0.5],
        ["spans", [[rng.randint(0, max(tokens // 4, 1)), rng.choice([1, world])] for _ in range(3)]],
        ["owners", [rng.randrange(world + (holes and rng.random() < 0.1)) for _ in range(tokens)]],
    ]
    return rng.choice(kinds)


def draw_mask(rng: Random, call: Literals) -> Literals:
    """Draw any combination of mask arguments."""
    call = BASE | call
    reach, causal = call["tokens"] * call["block"], rng.random() < 0.5
    sides = [-1, None, 0, rng.randint(0, reach), rng.randint(0, reach)]
    window = [rng.choice(sides), rng.choice(sides)] if rng.random() < 0.35 else None
    pattern = call.get("block_mask")
    return {
        "causal": causal,
        "prefix_length": rng.randint(0, reach) if causal and rng.random() < 0.3 else None,
        "window_size": None if pattern and pattern[0] == "longformer" else window,
        "cu_seqlens": rng.choice([None, None, sorted(rng.randint(0, reach) for _ in range(rng.randint(0, 4)))]),
        "seqused_k": rng.choice([None, None, None, [rng.randint(0, reach) for _ in range(call["batch"])]]),
        "islands": draw_ranges(rng, reach) if causal and rng.random() < 0.3 else None,
        "intervals": [rng.choice(["pairs", "tree", "slices"]), rng.randrange(1000)] if rng.random() < 0.2 else None,
    }


def draw_ranges(rng: Random, positions: int) -> list[tuple[int, int]]:
    """Draw ascending, disjoint ranges."""
    edges = sorted(rng.sample(range(positions + 1), rng.choice([0, 2, 2, 4]) if positions > 2 else 0))
    return [*zip(edges[::2], edges[1::2], strict=True)]


def draw_pattern(rng: Random, blocks: int, block: int) -> list[Any]:
    """Draw a block mask: random blocks, or a builder and its arguments."""
    stride = rng.randint(1, max(blocks // 2, 1))
    sizes: dict[str, Literals] = {
        "random": {"share": rng.choice([0.1, 0.5, 0.9])},
        "strided": {"stride": stride * block},
        "fixed": {"stride": stride * block, "summary": rng.randint(1, stride) * block},
        "bigbird": {"window": rng.choice([1, 3]), "global_": rng.randint(0, 2), "random": rng.randint(0, 2)},
    }
    return [*rng.choice([*sizes.items()])]


def draw_longformer(rng: Random, tokens: int) -> list[Any]:
    """Draw a window and some ranges of global tokens."""
    return ["longformer", {"window": 2 * rng.randint(0, tokens), "global_tokens": draw_ranges(rng, tokens)}]


def draw_call(rng: Random, run: str, world: int, ring: Literals) -> Literals:
    """Draw one call of ``ring_attention`` or of the kernels, small if the interpreter runs it."""
    triton = run == "kernels" or rng.random() < 0.12
    large = not triton and rng.random() < 0.04
    tokens = rng.choice([1, *[rng.randint(1, 20 if triton else 48)] * 7, rng.randint(1, 4)])
    tokens = rng.randint(100, 400) if large else tokens
    block, pattern = 1, None
    if not large and run != "kernels" and rng.random() < 0.2:
        block = 16 if triton else rng.randint(2, 5)
        tokens = -(-tokens // block)
        pattern = draw_pattern(rng, tokens, block)
    elif not large and run != "kernels" and rng.random() < 0.1:
        pattern = draw_longformer(rng, min(tokens, 12) if triton else tokens)
    chunks = ring.get("chunks", 1)
    heads, batch = rng.choice([chunks, chunks, chunks + 1, 1]), rng.choice([1, 1, 2, 2, 3])
    small = [(16, 16), (16, 16), (16, 8), (8, 16), (24, 5), (1, 1)]
    dims = [*small, (64, 64), (3, 70), (192, 128), (256, 256), (512, 320)]
    share = rng.choice([None, None, None, None, 0.1, 0.5, 0.9])
    call: Literals = {
        "seed": rng.randrange(1000),
        "tokens": tokens,
        "layout": draw_layout(rng, tokens, world),
        "block": block,
        "block_mask": pattern,
        "short": rng.randrange(block),
        "batch": 0 if rng.random() < 0.02 else batch,
        "heads": [heads * rng.choice([1, 1, 2, 3]), heads],
        "dims": [rng.randint(1, 512), rng.randint(1, 512)] if rng.random() < 0.06 else [*rng.choice(dims)],
        "dtype": rng.choice(["float32", "float16", "float16" if triton else "bfloat16"]),
        "strides": rng.choice(["contiguous", "packed", "transposed"]),
        "host": rng.choice(["list", "int32", "int64"]),
        "softmax_scale": rng.choice([None, None, 0.1, 0.6]),
        "softcap": rng.choice([None, None, 0.5, 3.0, 30.0]),
        "alibi_slopes": rng.choice([None, None, None, "heads", "rows"]),
        "dropout_p": share,
        "dropout_seed": share and rng.choice([0, 1, 2**32, 2**63 + 5, 2**64 - 1]),
        "first_head": rng.choice([None, None, None, 1, 2**31 - 1]),
        "learnable_sink": rng.choice([None, None, ["float32", False], ["float32", True], ["float16", False]]),
        "lse": rng.random() < 0.5,
        "return_max_logits": run != "kernels" and rng.random() < 0.2,
        "grads": "qkvs" if run == "kernels" else rng.choice(["qkvs", "qkvs", "qkvs", "", "q", "kv", "qs"]),
        "backend": "triton" if triton else rng.choice(["aten", "aten", "auto"]),
        "config": rng.choice([None, [16, 16], [64, 32]]) if triton and block == 1 else None,
        "ring": {} if run == "kernels" else ring,
        "kept": not ring and rng.random() < 0.5,
        "named": rng.random() < 0.3,
    }
    if rng.random() < 0.25:
        call |= {"kv_layout": draw_layout(rng, tokens, world), "later": rng.choice([0, 1, 2])}
    call |= draw_mask(rng, call)
    call |= {"intervals": None} if run == "kernels" else {}  # several launches
    if run in ("threads", "processes") and rng.random() < 0.2:
        call |= draw_mesh(rng, world)
    if run != "kernels" and block == 1 and not pattern and rng.random() < 0.15:
        return call | draw_align(rng, call, world)
    return call | (draw_rows(rng, call) if run != "kernels" and rng.random() < 0.2 else {})


def draw_mesh(rng: Random, world: int) -> Literals:
    """Draw a mesh of all ranks with fitting heads. Its ring has default settings."""
    ulysses = rng.choice([size for size in range(1, world + 1) if world % size == 0])
    kv_heads = rng.choice([1, ulysses, 2 * ulysses])
    heads = math.lcm(kv_heads, ulysses) * rng.choice([1, 1, 2])
    return {
        "mesh": [world // ulysses, ulysses],
        "heads": [heads, kv_heads],
        "first_head": rng.choice([None, 1, 2**31 - heads]),
        "ring": {},
        "kept": False,
    }


def draw_align(rng: Random, call: Literals, world: int) -> Literals:
    """Draw more or fewer keys than queries, without arguments that refer to positions."""
    align, tokens = rng.choice(["top-left", "bottom-right"]), call["tokens"]
    key_tokens = rng.choice([tokens, rng.randint(1, 2 * tokens)])
    return {
        "align": align,
        "layout": draw_layout(rng, tokens, world, holes=False),
        "kv_layout": draw_layout(rng, key_tokens, world, holes=False),
        "key_tokens": key_tokens,
        "later": 0,
        **(dict.fromkeys(POSITIONS) if align == "bottom-right" else {}),
    }


def draw_rows(rng: Random, call: Literals) -> Literals:
    """Draw arguments that differ by batch row, without arguments that conflict with them."""
    reach, rows = call["tokens"], range(call["batch"])
    if not rows or call["block_mask"]:
        return {}
    return {
        "rows": True,
        "ring": {name: value for name, value in call["ring"].items() if name != "wire_dtype"},
        "cu_seqlens": rng.choice([None, [sorted(rng.choices(range(reach + 1), k=rng.randint(0, 3))) for _ in rows]]),
        "leftpad_k": rng.choice([None, [rng.randint(0, reach) for _ in rows]]),
        "key_mask": rng.choice([None, 0.3, 0.9, 1.0]),
        "prefix_length": None,
        "islands": None,
        "intervals": None,
        "dropout_p": None,
        "dropout_seed": None,
        "alibi_slopes": call["alibi_slopes"] and "heads",
    }


def draw_unshard(rng: Random, run: str, world: int, ring: Literals) -> Literals:
    """Draw a round trip through ``shard`` and ``unshard``."""
    tokens = rng.choice([1, rng.randint(1, 40)])
    return {
        "unshard": [rng.choice([0, 1, 2, -1, -3]), rng.choice(["slice", "sum"])],
        "seed": rng.randrange(1000),
        "tokens": tokens,
        "layout": draw_layout(rng, tokens, world, holes=False),
        "dtype": rng.choice(["float32", "float16", "bfloat16", "float64"]),
        "named": rng.random() < 0.3,
        "mesh": draw_mesh(rng, world)["mesh"] if run in ("threads", "processes") and rng.random() < 0.3 else None,
    }


def draw_move(rng: Random, run: str, world: int, ring: Literals) -> Literals:
    """Draw a ``relayout``, ``roll`` or ``halo``."""
    call, tokens = rng.choice(["relayout", "roll", "halo"]), rng.choice([1, rng.randint(1, 40)])
    numbers = {"relayout": [], "roll": [rng.randint(-50, 50)], "halo": [rng.randint(0, 5), rng.choice([0, 1, 45])]}
    return {
        "move": [call, rng.choice([0, 1, 2, -1, -3]), *numbers[call]],
        "seed": rng.randrange(1000),
        "tokens": tokens,
        "batch": rng.choice([0, 1, 2, 2, 2]),
        "layout": draw_layout(rng, tokens, world, holes=call == "relayout"),
        "target": draw_layout(rng, tokens, world, holes=False) if call == "relayout" else None,
        "cu_seqlens": rng.choice([None, sorted(rng.choices(range(tokens + 1), k=3))]) if call != "relayout" else None,
        "strides": rng.choice(["contiguous", "transposed"]),
        "dtype": rng.choice(["float32", "float16", "bfloat16", "float64", "int64"]),
        "named": rng.random() < 0.3,
        "mesh": draw_mesh(rng, world)["mesh"] if run in ("threads", "processes") and rng.random() < 0.3 else None,
    }


def draw_spoil(rng: Random, call: Literals, world: int) -> list[Any]:
    """Draw a meaningless value for one rank or all, or a valid value that differs on one rank."""
    rank = rng.randrange(world)
    if world > 1 and rng.random() < 0.4:
        others: Literals = {"softmax_scale": 0.77, "softcap": 7.5, "window_size": (5, 3), "causal": not call["causal"]}
        others["return_max_logits"] = not call.get("return_max_logits", False)
        others["seqused_k"] = [0] * call["batch"] if call["seqused_k"] is None else None
        if call["dropout_p"]:
            others |= {"dropout_p": 0.7, "dropout_seed": 12345}
        name = rng.choice([*others])
        return [name, others[name], rank]
    name = rng.choice([*WRONG])
    everywhere = name in ("ring", "group") or rng.random() < 0.5
    return [name, rng.choice(WRONG[name]), -1 if everywhere else rank]
