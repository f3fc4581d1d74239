"""Local kernels of users: exact in a ring, refused for missing features, and checked for wrong results."""

from __future__ import annotations

import ast
import doctest
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import Layout, LocalWorld, RectangleAttention, Ring, Supports, register_backend, ring_attention
from ringattn.comm import LocalGroup, LocalTransport
from ringattn.kernels import FULL, PLAIN, KernelConfig, Tile, hopper_backward_launch, hopper_forward_launch, launch_plan
from ringattn.ring import BlockMask
from ringattn.ring.local import fused, protocol, registry
from ringattn.ring.local.protocol import FEATURES
from ringattn.validators import short_repr

from ..support import own_kernels
from ..support.mask_cases import check_case
from ..support.own_kernels import Dense, DenseShards, backward, forward, sdpa
from ..support.rank_processes import group_results
from ..support.ring_cases import check_results, check_ring, inputs, join_results, run_rank_of_ring, run_ranks
from .test_ring_masks import MASKS, PATTERNS, case_of

pytestmark = pytest.mark.usefixtures("one_core")
ZIGZAG, CPU = Layout.zigzag(96, 3), torch.device("cpu")


def test_example_kernels_import_public_names_only() -> None:
    tree = ast.parse(Path(own_kernels.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in modules if str(name).startswith("ringattn")} == {"ringattn", "ringattn.kernels"}


def test_the_docstring_example_of_the_protocol_runs() -> None:
    assert doctest.testmod(protocol) == (0, 8)


WIDE = RectangleAttention("wide", forward, backward, supports=Supports(devices=("cpu",)), dlse_columns=8)


@pytest.mark.parametrize("backend", ["sdpa", sdpa(), WIDE], ids=["name", "object", "more columns"])
def test_sdpa_is_exact_over_virtual_ranks(backend: Any) -> None:
    check_ring(ZIGZAG, inputs(96), causal=True, backend=backend)
    check_ring(ZIGZAG, inputs(96, dtype=torch.float32), causal=True, backend=backend, ring={"chunks": 2})


def test_sdpa_is_exact_over_gloo() -> None:
    whole = inputs(96)
    parts = group_results(3, partial(over_gloo, whole))
    check_results(join_results(ZIGZAG, [[torch.tensor(x) for x in part] for part in parts]), whole, causal=True)


def over_gloo(whole: dict[str, Tensor], rank: int) -> list[Any]:
    return [x.tolist() for x in run_rank_of_ring(ZIGZAG, whole, dist.group.WORLD, rank, causal=True, backend="sdpa")]


def reusing_memory(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Any]:
    """Return ``function`` with results in the same memory in every call, as a kernel with its own buffers has them."""
    buffers: dict[Any, tuple[Tensor, ...]] = {}

    def run(*given: Tensor, **how: Any) -> tuple[Tensor, ...]:
        results = function(*given, **how)
        kept = buffers.setdefault((threading.get_ident(), *(x.shape for x in results)), results)
        return tuple(buffer.copy_(x) for buffer, x in zip(kept, results, strict=True))

    return run


def test_kernels_may_reuse_the_memory_of_their_results() -> None:
    supports = Supports(devices=("cpu",))
    kernel = RectangleAttention("buffers", reusing_memory(forward), reusing_memory(backward), supports=supports)
    for causal in (True, False):
        check_ring(ZIGZAG, inputs(96), causal=causal, backend=kernel)
        check_ring(ZIGZAG, inputs(96, dtype=torch.float32), causal=causal, backend=kernel)


def test_kernels_may_return_their_inputs() -> None:
    q, k, v = torch.randn(3, 1, 8, 2, 8)
    before = v.clone()
    kernel = RectangleAttention(
        "values", lambda q, k, v, **_: (v, torch.zeros(1, 2, 8)), supports=Supports(devices=("cpu",))
    )
    ring_attention(q, k, v, backend=kernel).zero_()
    assert torch.equal(v, before)


NARROW = {"itself": {"window_size": (0, 0)}}


@pytest.mark.parametrize("name", [*MASKS, *PATTERNS, *NARROW])
def test_rectangle_kernels_serve_every_mask(name: str) -> None:
    call = (MASKS | NARROW)[name] if name not in PATTERNS else PATTERNS[name](4)
    layout = "striped" if name == "window" else "zigzag"
    check_case(
        case_of(2, layout if name not in PATTERNS else "contiguous", call | {"backend": "sdpa"}, sink=name == "prefix")
    )


@pytest.mark.parametrize("layout", ["striped", "zigzag"])
def test_results_of_kernels_without_a_state_are_merged(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    finals: Any = []
    fold = DenseShards.fold
    monkeypatch.setattr(DenseShards, "fold", lambda *given, **how: finals.append(how["final"]) or fold(*given, **how))
    made: Any = getattr(Layout, layout)(70, 3)
    whole = inputs(70, (2, 2))
    del whole["dlse"]
    ours = run_without_lse(made, whole, backend=Dense(), ring={"chunks": 2})
    expected = run_without_lse(made, whole, backend="aten")
    torch.testing.assert_close(ours, expected)
    assert finals and all(finals)  # each shard has a forward of its own


def run_without_lse(layout: Any, whole: dict[str, Tensor], **call: Any) -> list[Tensor]:
    sink = torch.tensor([0.5, -torch.inf])

    def on_rank(group: LocalGroup) -> list[Tensor]:
        return run_rank_of_ring(
            layout, whole, group, group.rank(), causal=True, learnable_sink=sink, leftpad_k=[30, 0], **call
        )

    return [*join_results(layout, run_ranks(layout.world, on_rank))]


@contextmanager
def nothing_sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def post(*_: Any, **__: Any) -> None:
        raise AssertionError("something was sent")

    with monkeypatch.context() as patched:
        patched.setattr(LocalTransport, "post", post)
        yield


def refusals(backend: Any, error: type[Exception] | tuple[type[Exception], ...], text: str, **call: Any) -> None:
    """Expect the error on both of two virtual ranks."""
    shape, value_dim = call.pop("shape", (1, 8, 2, 8)), call.pop("value_dim", None)

    def on_rank(group: LocalGroup) -> None:
        q, k, v = torch.randn(3, *shape, requires_grad=True).to(call.get("dtype", torch.float32)).detach()
        options = {name: value for name, value in call.items() if name != "dtype"}
        with Ring(group) as ring, pytest.raises(error, match=text):
            out = ring_attention(
                q.requires_grad_(), k, v[..., :value_dim], layout="zigzag", ring=ring, backend=backend, **options
            )
            (out[0].sum() + out[1].sum() if isinstance(out, tuple) else out.sum()).backward()

    run_ranks(2, on_rank)


LIMITED = Supports(devices=("cpu",), dtypes=(torch.float32,), head_dims=range(8, 65, 8))
BARE = RectangleAttention("bare", forward, supports=LIMITED)
NAMELESS, UNLIMITED, FULL_ONLY = Dense(), Dense(), Dense()
NAMELESS.name, UNLIMITED.supports = 3, None  # type: ignore[assignment]
FULL_ONLY.supports = Supports(dtypes=(torch.float32,))
STATEFUL = Dense()
STATEFUL.supports = Supports(features=("bounds", "state"))


@pytest.mark.parametrize(
    ("kernel", "call", "text"),
    [
        (BARE, {"dtype": torch.float16}, "torch.float16: it supports torch.float32"),
        (BARE, {"shape": (1, 8, 2, 12)}, r"head dim 12 for q and k: it supports range\(8, 65, 8\)"),
        (BARE, {"value_dim": 6}, r"'bare' does not support head dim 6 for v: it supports \(8,\) if q and k have 8"),
        (BARE, {}, "does not support gradients"),
        (BARE, {"softcap": 1.0}, "does not support softcap"),
        (BARE, {"alibi_slopes": torch.ones(2)}, "alibi_slopes"),
        (BARE, {"dropout_p": 0.5}, "dropout_p"),
        (sdpa(), {"return_max_logits": True}, "backend 'sdpa' does not support return_max_logits"),
        (sdpa(), {"config": KernelConfig()}, "config"),
        (FULL_ONLY, {"causal": True}, "masks with an interval of keys per query row"),
        (FULL_ONLY, {"key_mask": torch.tensor([[True, False] * 8])}, "masks with an interval of keys per query row"),
        (FULL_ONLY, {"seqused_k": [9]}, "different number of keys in each batch row"),
        (FULL_ONLY, {"block_mask": torch.ones(4, 4).tril().bool()}, "block-sparse"),
        (STATEFUL, {"learnable_sink": torch.zeros(2)}, "a start state before the first key"),
        (RectangleAttention("gpu", forward, supports=Supports(("cuda",))), {}, "q on cpu: it supports cuda"),
        ("aten", {"config": KernelConfig()}, "backend 'aten' does not support config"),
        ("triton", {"block_mask": torch.ones(4, 4).tril().bool()}, "the block mask has block size 4"),
        ("triton", {"config": KernelConfig(dkdv_splits=2)}, "config.dkdv_splits is 2: it must divide 1"),
        ("triton", {"dtype": torch.bfloat16}, "tensors are torch.bfloat16 on the CPU"),
        ("unheard of", {}, "backend is 'unheard of': it must be one of auto, triton, flash, .*, aten, sdpa"),
        (Dense, {}, "backend is .*: it must be a name or a LocalAttention"),
        (object(), {}, "backend is .*: it must be a name or a LocalAttention"),
        *((kernel, {}, "its name must be a string, and its supports a ringattn") for kernel in (NAMELESS, UNLIMITED)),
    ],
)  # fmt: skip
def test_unsupported_features_are_refused_before_anything_is_sent(
    kernel: Any, call: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nothing_sent(monkeypatch):
        refusals(kernel, (ValueError, NotImplementedError), text, **call)


def test_a_kernel_without_a_backward_computes_parameters_under_no_grad() -> None:
    q, k, v = torch.randn(3, 1, 8, 2, 8).requires_grad_().unbind()
    with torch.no_grad():
        torch.testing.assert_close(ring_attention(q, k, v, backend=BARE), ring_attention(q, k, v))


def test_a_sink_alone_may_need_the_backward() -> None:
    kernel, sink = Dense(), torch.zeros(2)
    kernel.supports = Supports(features=("learnable_sink", "state"))
    q, k, v = torch.randn(3, 1, 8, 2, 8)
    ring_attention(q, k, v, learnable_sink=sink, backend=kernel)
    with pytest.raises(ValueError, match="does not support gradients"):
        ring_attention(q, k, v, learnable_sink=sink.requires_grad_(), backend=kernel)


def test_the_check_of_a_kernel_gets_the_whole_call() -> None:
    given: Any = []
    kernel, config = Dense(), KernelConfig()
    kernel.supports = Supports(features=FEATURES)
    kernel.check = lambda q, v, **more: given.append((q, v, more))  # type: ignore[attr-defined]
    q, k, v = torch.randn(3, 1, 8, 2, 8)
    blocks = BlockMask(torch.ones(2, 2).bool(), 4)
    ring_attention(q, k, v, block_mask=blocks, softcap=2.0, backend=kernel, config=config)
    ((checked_q, checked_v, more),) = given
    assert checked_q.equal(q) and checked_v.equal(v)
    assert more.pop("scores").softcap == 2.0 and more == {"block": 4, "config": config}


def test_a_gradient_through_lse_is_refused() -> None:
    kernel = RectangleAttention("sdpa", forward, backward, supports=Supports(), dlse_columns=0)
    refusals(kernel, ValueError, "backend 'sdpa' does not support a gradient through lse", return_lse=True)


def changed(change: Callable[[Any, Any], Any]) -> RectangleAttention:
    def wrong(*given: Tensor, **how: Any) -> Any:
        return change(*forward(*given, **how))

    return RectangleAttention("wrong", wrong, backward, supports=Supports())


def raising(*_: Tensor, **__: Any) -> Any:
    raise NotImplementedError("no such kernel on Tuesdays")


class Wrong(Dense):
    """Kernel without a state whose results go through ``change``."""

    name = "wrong"

    def __init__(self, change: Callable[[Any], Any], features: tuple[str, ...] = ()) -> None:
        self.change = change
        self.supports = Supports(features=("bounds", "backward", *features))

    def forward(self, q: Tensor, **options: Any) -> Any:
        shards = super().forward(q, **options)
        shards.result = lambda: self.change(shards.results)  # type: ignore[method-assign]
        return shards


class WithoutAccum(Dense):
    """Kernel that drops the dK/dV of other ranks."""

    def backward(self, *given: Any, **options: Any) -> Any:
        shards = super().backward(*given, **options)
        shards.dkdv = lambda *kv, **how: DenseShards.dkdv(shards, *kv, **how | {"accum": None})  # type: ignore[method-assign]
        return shards


class WrongMax(Dense):
    supports = Supports(features=("backward", "return_max_logits"))

    def forward(self, q: Tensor, **options: Any) -> Any:
        shards: Any = super().forward(q, **options)
        shards.max_logits = lambda: torch.zeros(3)
        return shards


class WrongDelta(Dense):
    def delta(self, dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
        return torch.zeros(1)


class WrongDq(Dense):
    def backward(self, *given: Any, **options: Any) -> Any:
        shards = super().backward(*given, **options)
        shards.result = lambda: torch.zeros(1)  # type: ignore[method-assign]
        return shards


def nothing(*_: Any, **__: Any) -> Any:
    return None


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        (changed(lambda out, lse: (out[:, :-1], lse)), "backend 'wrong' returned out as torch.float32"),
        (changed(lambda out, lse: (out, lse.transpose(1, 2))), r"lse as torch.float32 .* it must be torch.float32"),
        (changed(lambda out, lse: (out, lse.double())), "returned lse as torch.float64"),
        (changed(lambda out, lse: (out, lse.log())), "returned NaN in lse"),
        (changed(lambda out, lse: (out, None)), "returned lse as None"),
        (changed(lambda out, lse: (out, lse, lse)), "backend 'wrong' returned tuple: it must be a tuple of 2 tensors"),
        (changed(lambda out, lse: (out.to("meta"), lse)), r"returned out as .* on meta: it must be .* on cpu"),
        (Wrong(lambda results: (results[0].half(), results[1])), "returned out as torch.float16"),
        (Wrong(lambda results: (results[0], results[1][:, :1]), ("state",)), "returned lse as torch.float32"),
        (Wrong(lambda results: (results[0], results[1] * torch.nan), ("state",)), "returned NaN in lse"),
        (Wrong(lambda results: None), "backend 'wrong' returned NoneType: it must be a tuple of 2 tensors"),
        (RectangleAttention("wrong", forward, nothing, supports=Supports()), "NoneType: it must be a tuple of 3"),
        (RectangleAttention("wrong", raising, backward, supports=Supports()), "no such kernel on Tuesdays"),
        (RectangleAttention("wrong", forward, raising, supports=Supports()), "no such kernel on Tuesdays"),
        (RectangleAttention("wrong", forward, lambda *given, **_: given[:3], supports=Supports()), "returned d[kv] as"),
    ],
)  # fmt: skip
def test_wrong_results_name_the_kernel_on_every_rank(kernel: Any, text: str) -> None:
    refusals(kernel, (RuntimeError, NotImplementedError), text, causal=True, shape=(1, 8, 2, 8))


def test_wrong_max_logits_are_refused() -> None:
    refusals(WrongMax(), RuntimeError, r"'dense' returned max_logits as .*\[3\].*\[2\]", return_max_logits=True)


def test_kernels_that_lose_gradients_are_refused() -> None:
    refusals(WithoutAccum(), RuntimeError, "dkdv did not call accum", causal=True)
    sink = torch.zeros(2, requires_grad=True)
    refusals(WrongDelta(), RuntimeError, r"backend 'dense' returned delta as .*\[1\]", learnable_sink=sink)
    refusals(WrongDq(), RuntimeError, r"backend 'dense' returned dq as .*\[1\]")


def test_a_nan_is_found_in_any_call() -> None:
    x, factors = torch.randn(1, 8, 2, 8), [1.0]
    kernel = changed(lambda out, lse: (out, lse * factors[0]))
    ring_attention(x, x, x, backend=kernel)
    factors[0] = torch.nan
    with pytest.raises(RuntimeError, match="backend 'wrong' returned NaN in lse"):
        ring_attention(x, x, x, backend=kernel)


def test_a_wrong_kernel_on_one_rank_stops_every_rank() -> None:
    kernels = [changed(lambda out, lse: (out, lse.double())), changed(lambda *results: results)]

    def on_rank(group: LocalGroup) -> str:
        q, k, v = torch.randn(3, 1, 8, 2, 8)
        with Ring(group) as ring:
            try:
                for _ in range(2):
                    ring_attention(q, k, v, layout="zigzag", ring=ring, backend=kernels[group.rank()])
            except Exception as error:
                return str(error)
        return ""

    texts = run_ranks(2, on_rank)
    assert all("backend 'wrong' returned lse as torch.float64" in text for text in texts), texts


def test_bad_backend_registrations_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in ("_FACTORIES", "_KERNELS", "_DEFAULTS"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    for name in ("aten", "sdpa", "auto", "", 3):
        with pytest.raises(ValueError, match=f"^name is {name!r}: it must be a string other than .*aten, sdpa"):
            register_backend(name, sdpa)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^factory is 3: it must be callable"):
        register_backend("three", 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^default_for is 'cpu', but backend='auto' already selects aten for it"):
        register_backend("mine", sdpa, default_for="cpu")
    with pytest.raises(ValueError, match=r"^features has sofcap: it may contain only bounds"):
        Supports(features=("sofcap",))
    with pytest.raises(ValueError, match=r"^features has softcap, which rectangles do not support"):
        RectangleAttention("mine", forward, supports=Supports(features=("softcap",)))
    fields: dict[str, tuple[Any, ...]] = {"devices": ("cpu",), "dtypes": (torch.float32, ["float32"])}
    fields |= {"features": ("state", iter(["state"])), "head_dims": (8, "8"), "value_dims": (8, "8")}
    for field, value in ((field, value) for field, values in fields.items() for value in values):
        with pytest.raises(ValueError, match=f"^{field} is {re.escape(short_repr(value))}: it must be a"):
            Supports(**{field: value})
    wrong: dict[str, tuple[Any, ...]] = {"forward": (None,), "backward": (3,), "supports": (None,)}
    wrong |= {"dlse_columns": (1, True, -1, 2.0)}
    for argument, value in ((argument, value) for argument, values in wrong.items() for value in values):
        with pytest.raises(ValueError, match=f"^{argument} is {value}: it must be"):
            RectangleAttention(**{"name": "mine", "forward": forward, "supports": Supports()} | {argument: value})  # type: ignore[arg-type]
    q = torch.randn(1, 4, 1, 8)
    with pytest.raises(ValueError, match=r"^backend is None: it must be a name or a LocalAttention"):
        ring_attention(q, q, q, backend=None)  # type: ignore[call-overload]
    for name, factory, text in [
        ("missing", lambda: __import__("flash_attn_9"), "backend 'missing' cannot be used here: ModuleNotFoundError"),
        ("empty", lambda: None, "the result of factory for backend 'empty' is None: it must be a LocalAttention"),
        ("other", sdpa, "the factory of backend 'other' returned a kernel named 'sdpa'"),
    ]:
        register_backend(name, factory)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=text):
            ring_attention(q, q, q, backend=name)
        assert name in registry.other_backends(q.device)  # one broken backend does not stop the measurement of others


def test_default_kernels_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in ("_FACTORIES", "_KERNELS", "_DEFAULTS"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    others = registry.other_backends()
    assert {"flash", "cudnn", "fa3", "fa4", "sdpa"} <= {*others} and not {"aten", "triton"} & {*others}
    mine = RectangleAttention("mine", forward, supports=Supports(("meta",)))
    register_backend("mine", lambda: mine, default_for="meta")
    assert registry.resolve_backend("auto", torch.device("meta")) is mine
    assert registry.other_backends() == others and "sdpa" not in registry.other_backends(torch.device("meta"))
    aten, triton = (registry.resolve_backend(registry._DEFAULTS[device], CPU) for device in ("cpu", "cuda"))
    dtypes = torch.float16, torch.bfloat16, torch.float32
    assert aten.supports == Supports(("cpu",), value_dims=range(1, 513), features=FEATURES.keys() - {"config"})
    assert triton.supports == Supports(("cpu", "cuda"), dtypes, range(1, 513), range(1, 513), FEATURES)
    assert Supports(features=["state", "bounds"]) == Supports(features=("bounds", "state"))
    assert Supports() == Supports(("cpu", "cuda"), dtypes, range(1, 513), None, ())


def test_the_triton_kernels_get_every_argument_and_sum_dq_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: Any = []
    calls: list[dict[str, Any]] = []
    launcher = SimpleNamespace(dq=lambda *given, **how: calls.append(how), dkdv=lambda *given, **how: calls.append(how))
    monkeypatch.setattr(fused, "ForwardLauncher", lambda *given: given)
    monkeypatch.setattr(fused, "BackwardLauncher", lambda *given: begun.append(given) or launcher)
    monkeypatch.setattr(fused, "attention_delta", lambda *given: given)
    q, kernel, config = torch.zeros(1, 2, 1, 16).half(), fused.TritonAttention(), KernelConfig(dkdv_splits=2)
    k, v, out, lse, dout, dlse, start = torch.zeros(7, 1)
    options: Any = {"softmax_scale": 2.0, "config": config}
    assert kernel.forward(q, start=start, max_logits=True, **options) == (q, 2.0, config, start, True)  # type: ignore[arg-type]
    back = kernel.backward(dout, q, out, lse, dlse, **options)
    assert begun == [(dout, q, lse, (dout, out, dlse), 2.0, config)]
    for final in (False, False, True):
        back.dq(k, v, FULL, local=False, final=final)
    back.dkdv(k, v, FULL, local=False, accum=lambda: (k,), out=(v,))
    *others, dkdv = calls
    assert [call["out"].dtype for call in others] == [torch.float32, torch.float32, q.dtype]
    first = others[0]["out"]
    assert [call["accum"] for call in others] == [None, first, first] and others[1]["out"] is first
    assert back.result() is others[2]["out"]
    assert dkdv == {"bounds": FULL, "scores": PLAIN, "accum": (k,), "out": (v,)}


def test_the_triton_kernels_check_every_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Any = []
    for home, name in (
        (fused, "check_cpu"),
        (launch_plan, "check_config"),
        (hopper_forward_launch, "check_hopper_forward"),
        (hopper_backward_launch, "check_hopper_backward"),
        (launch_plan, "check_tiles"),
    ):
        monkeypatch.setattr(home, name, lambda *given, name=name: seen.append((name, *given)))
    q, v = torch.arange(2.0)
    tiles: dict[str, Any] = {
        name: Tile(16 * 2**number, 64, 4, 2) for number, name in enumerate(("forward", "dq", "dkdv", "single_pass"))
    }
    config = KernelConfig(**tiles, forward_kernel="hopper", backward="hopper")
    fused.TritonAttention().check(q, v, scores=PLAIN, block=16, config=config)
    assert seen == [
        ("check_cpu", (q,)),
        ("check_config", config, q, v),
        ("check_hopper_forward", q, v, PLAIN, tiles["forward"]),
        ("check_hopper_backward", q, v, PLAIN, tiles["single_pass"]),
        ("check_tiles", config, q, v, 16),
    ]


def test_a_factory_runs_once_for_all_virtual_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in ("_FACTORIES", "_KERNELS"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    created = []

    def create() -> RectangleAttention:
        created.append(RectangleAttention("slow", forward, supports=Supports()))
        time.sleep(0.1)
        return created[-1]

    register_backend("slow", create)
    with LocalWorld(3, device="cpu") as world:
        world.run(lambda _: registry.resolve_backend("slow", torch.device("cpu")))
    assert len(created) == 1


def test_ranks_with_different_kernels_are_refused() -> None:
    backends: list[Any] = [sdpa(), "aten"]

    def on_rank(group: LocalGroup) -> None:
        q = torch.randn(1, 8, 2, 8)
        with Ring(group) as ring, pytest.raises(ValueError, match=r"backend differs .*rank 0: 'sdpa', rank 1: 'aten'"):
            ring_attention(q, q, q, layout="zigzag", ring=ring, backend=backends[group.rank()])

    run_ranks(2, on_rank)


def test_torch_compile_takes_a_kernel_by_name_only() -> None:
    q = torch.randn(1, 8, 2, 8)
    torch._dynamo.reset()  # graphs of other tests count towards the recompile limit
    compiled: Any = torch.compile(ring_attention, backend="eager")
    assert torch.equal(
        compiled(q, q, q, causal=True, backend="sdpa"), ring_attention(q, q, q, causal=True, backend="sdpa")
    )
    with pytest.raises(ValueError, match=r"only its registered name"):
        compiled(q, q, q, backend=sdpa())
