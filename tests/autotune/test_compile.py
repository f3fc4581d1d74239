"""Tests of variants: the launches of each variant, and variants selected by name."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ringattn.autotune import device_trials
from ringattn.autotune.candidates import ranking_job
from ringattn.autotune.compile import (
    FEATURES,
    MEMORY_BOUND,
    META,
    CallSizes,
    KernelVariant,
    RecordedLaunch,
    compile_launch,
    feature_scores,
    parse_variants,
    record_launches,
)
from ringattn.autotune.device_trials import DeviceTrials, check_lengths
from ringattn.autotune.tile_space import ModelShape
from ringattn.bench.common.errors import ErrorJudge
from ringattn.kernels import KernelConfig, Tile, attention_forward
from ringattn.kernels.scores import PLAIN
from ringattn.kernels.tables import TUNED_KERNELS, TuningPoint, attach_options, tuned_options

TILE = Tile(64, 64, 4, 2)
MASKS = ("bounded", "full")
TILE_KERNEL = SimpleNamespace(fn=SimpleNamespace(__name__="k"))


def variant(kernel: str = "forward", **changed: Any) -> KernelVariant:
    return replace(KernelVariant(kernel, 90, "bf16", 128, 128, TILE), **changed)


@pytest.mark.parametrize("features", [(), FEATURES])
@pytest.mark.parametrize("kernel", TUNED_KERNELS)
def test_every_role_and_feature_of_a_kernel_is_launched(kernel: str, features: tuple[str, ...]) -> None:
    more: dict[str, Any] = {"features": features, "sizes": CallSizes(2, 256, 1024, 8, 4)}  # more blocks of keys
    roles = {role: variant(kernel, role=role, **more).launch for role in ("only", "first", "middle", "last")}
    assert len({launched.signature for launched in roles.values()}) == 4
    continued = {"forward": "HAS_STATE"}.get(kernel, "HAS_SUM")
    assert {role: launched.options[continued] for role, launched in roles.items()} == {
        "only": False, "first": False, "middle": True, "last": True
    }  # fmt: skip
    assert {launched.name for launched in roles.values()} == {variant(kernel).function}


def test_sizes_that_triton_specializes_change_the_signature() -> None:
    # Triton specializes arguments that are 1, are multiples of 16, or need 64 bits.
    sizes = CallSizes(1, 256, 512, 8, 4)
    same = variant(sizes=sizes).launch.signature
    assert variant(sizes=sizes._replace(queries=1024, keys=64)).launch.signature == same
    for other in ({"queries": 248}, {"kv_heads": 8}, {"heads": 64, "kv_heads": 4}, {"queries": 1}):
        assert variant(sizes=sizes._replace(**other)).launch.signature != same
    for number, text in ((1, "1"), (2**31 - 16, "i32/16"), (2**31 - 1, "i32"), (2**31, "i64/16"), (2**31 + 1, "i64")):
        assert RecordedLaunch(TILE_KERNEL, 1, (number,), {}).signature.endswith(f"({text}) {{}}")
    values = (True, 1.5, None, (torch.empty(1, dtype=torch.float16), 3))
    assert RecordedLaunch(TILE_KERNEL, 1, values, {"A": 1}).signature == "k (True float None (float16 i32)) {'A': 1}"
    far = variant(sizes=sizes._replace(queries=1 << 22), options=(("loads", "pointers"),)).launch
    assert far.arguments[0].stride_b == 1 << 32 and "i64/16" in far.signature and "i64" not in same


@pytest.mark.parametrize(("word", "changed", "message"), [
    ("hopper", {"arch": 80}, "supports only GPUs of compute capability 9.0"),
    ("hopper", {"features": ("seqused_k",)}, "needs hopper_kernel, but .* uses forward_kernel"),
    ("hopper_backward", {"head_dim": 256, "head_dim_v": 256}, "only head dim 64 or 128"),
])  # fmt: skip
def test_unsupported_hopper_variants(word: str, changed: dict[str, Any], message: str) -> None:
    (hopper,) = parse_variants(f"90:bf16:128:middle:{word}:full:gqa")
    assert hopper.launch.name == hopper.function == f"{word}_kernel"
    assert str(hopper).startswith(f"{word} sm_90 bf16 D128 ") and str(hopper).endswith("2s middle full gqa")
    with pytest.raises(ValueError, match=message):
        _ = replace(hopper, **changed).launch


def test_interpreted_and_meta_launches_do_not_compile() -> None:
    with pytest.raises(ValueError, match="TRITON_INTERPRET is set"):
        compile_launch(variant().launch, 90)
    q = torch.empty(1, 16, 2, 16, device=META)
    with pytest.raises(ValueError, match="without data"):
        attention_forward(q, q, q)


@pytest.mark.parametrize(
    ("arch", "target"), [(80, ("cuda", 80, 32)), (100, ("cuda", 100, 32)), (0x942, ("hip", "gfx942", 64))]
)
def test_a_launch_is_compiled_for_its_own_gpu(arch: int, target: tuple[Any, ...]) -> None:
    class Recorded(JITFunction):  # type: ignore[misc, type-arg]
        def __init__(self) -> None:
            pass

        def warmup(self, *arguments: Any, grid: Any, **options: Any) -> Any:
            there = driver.active.get_current_target()
            return (
                arguments,
                grid,
                options,
                (there.backend, there.arch, there.warp_size),
                driver.active.get_current_device(),
            )

    launch = RecordedLaunch(Recorded(), 7, (1, 2), {"A": 3})
    *compiled, device = compile_launch(launch, arch).binary
    assert compiled == [(1, 2), (7,), {"A": 3}, target] and device == 1000 + arch, "Triton caches by device"


@pytest.mark.parametrize(("feature", "named"), [
    ("softcap", {"softcap": 30.0}), ("alibi", {"alibi_slopes": 8}), ("dropout", {"dropout_p": 0.25}),
])  # fmt: skip
def test_a_feature_alone_is_launched(feature: str, named: dict[str, Any]) -> None:
    scores = feature_scores((feature, "seqused_k"), 64, 48, 8)
    values = {"softcap": scores.softcap, "alibi_slopes": scores.alibi_slopes, "dropout_p": scores.dropout_p}
    found = {name: len(x) if isinstance(x, torch.Tensor) else x for name, x in values.items()}
    assert {name: x for name, x in found.items() if x} == named
    assert [len(x) for x in (scores.q_positions, scores.k_positions)] == [64, 48]  # type: ignore[arg-type]
    assert feature_scores(("seqused_k", "block_sparse"), 64, 48, 8) is PLAIN


def test_launches_without_a_loop_feature() -> None:
    for role in ("only", "middle"):
        for word, has_max in (("", False), (":max_logits", True)):
            (forward,) = parse_variants(f"90:bf16:64:forward:{role}:full:gqa{word}")
            assert isinstance(forward.launch.arguments[-1], torch.Tensor) is has_max
    (named,) = parse_variants("90:bf16:192/128:dq:last:bounded:mha:softcap:seqused_k:order=longest:64x32x4x2")
    assert str(named) == "dq sm_90 bf16 D192/128 64x32 4w 2s last softcap seqused_k order=longest"
    (delta,) = parse_variants("90:bf16:64:delta")
    assert [x.dtype for x in delta.launch.arguments[2:4]] == [torch.float32] * 2, "with dlse"


@pytest.mark.parametrize(("kernel", "mask"), [*zip(TUNED_KERNELS, (*MASKS, *MASKS, "full"), strict=True)])
def test_timed_and_checked_launches_were_compiled(kernel: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Equal signatures mean that timing finds the binary in Triton's cache.

    monkeypatch.setattr(
        device_trials,
        "build_judge",
        lambda inputs, options: ErrorJudge((), (), {"out": inputs.dout, "lse": inputs.dlse}, {}, {}),
    )
    options: dict[str, list[dict[str, Any]]] = {
        "forward": [
            {},
            {"order": "longest"},
            {"pack_gqa": True},
            {"persistent": True, "sm_margin": 8},
            {"loads": "pointers"},
        ],
        "dq": [{}, {"order": "longest", "persistent": True}, {"loads": "pointers"}],
        "dkdv": [{}, {"dkdv_splits": 2}, {"dkdv_epilogue": "descriptors"}, {"order": "longest"}],
    }
    tiles = [attach_options(Tile(64, 32, 4, 2), choice) for choice in options.get(kernel, [{}])]
    if kernel == "forward":
        tiles.append(attach_options(Tile(128, 64, 8, 2), {"forward_kernel": "hopper"}))
    for shape in (ModelShape(32, 8, 64, 64), ModelShape(6, 2, 64, 64), ModelShape(16, 1, 64, 64)):
        point = TuningPoint(kernel, "bf16", 64, 64, shape.group, mask, 8192)
        trials = DeviceTrials(point, shape, META)
        checked = [(role, check_lengths(point)) for role in ("first", "middle", "last")]
        for tile in tiles:
            if shape.group % int(tuned_options(tile).get("dkdv_splits", 1)):
                continue
            jobs = [ranking_job(point, tile, 90, shape.heads, *launch) for launch in (("middle", None), *checked)]
            compiled_signatures = {job.launch.signature for job in jobs}
            for part, count in ((lambda: trials._launch(tile), 1), (lambda: trials._results(tile), 3)):  # noqa: B023
                launched = [
                    call for call in record_launches(part, 90) if call.name not in ("delta_kernel", "reduce_kernel")
                ]
                assert len(launched) == count, tile
                assert {call.signature for call in launched} <= compiled_signatures, tile


@pytest.mark.parametrize(("spec", "kernels", "count", "options"), [
    ("90:bf16:128", {*TUNED_KERNELS, *MEMORY_BOUND}, 5 * 4 * 2 * 2 + 2 * 4 * 2 + 1 + 2, None),
    ("90:bf16:256:middle:full:gqa", {"forward", "dq", "dkdv", "reduce"}, 5, None),  # no single-pass tile fits
    ("90:bf16:192/128:quantize", {"quantize"}, 2, ""),
    ("sm_90:bf16:128:middle:forward:64x64x4x1", {"forward"}, 4, ""),
    ("90:bf16:128:middle:full:gqa:64x64x4x1", {*TUNED_KERNELS}, 5, ""),  # no kernel without a tile
    ("90:bf16:128:softcap:only:full:gqa", {*TUNED_KERNELS}, 5, ""),
    ("90:bf16:128:middle:order=longest:persistent=True", {"forward", "dq", "dkdv"}, 12,
     "order=longest persistent=True"),
    ("90:bf16:128:pack_gqa=True", {"forward", "dq"}, 16, "pack_gqa=True"),
    ("90:bf16:128:middle:forward:order=heads", {"forward"}, 4, ""),  # the default is dropped
    ("90:bf16:128/64:dkdv_epilogue=descriptors", {"dkdv"}, 16, "dkdv_epilogue=descriptors"),
    ("90:bf16:128:hopper", {"forward"}, 16, "forward_kernel=hopper"),
    ("90:bf16:96:loads=pointers", {"forward", "dq"}, 32, "loads=pointers"),
    ("90:bf16:256:hopper_backward", {"single_pass"}, 16, "backward=hopper"),  # its entry point checks the head dim
    ("80:fp32:40:quantize", {"quantize"}, 1, ""),
])  # fmt: skip
def test_variants_by_name(spec: str, kernels: set[str], count: int, options: str | None) -> None:
    variants = parse_variants(spec)
    assert {variant.kernel for variant in variants} == kernels and len(variants) == len({*variants}) == count
    if options is not None:
        assert {" ".join(f"{name}={value}" for name, value in variant.options) for variant in variants} == {options}
    defaults = {field.name: field.default for field in fields(KernelConfig)}
    assert all(defaults[name] != value for variant in variants for name, value in variant.options)


@pytest.mark.parametrize(("spec", "message"), [
    ("h100:bf16:64", "arch is 'h100': it must be one of 80"),
    ("75:bf16:64", "arch is '75': it must be one of 80, 86"),
    *((spec, f"spec is '{spec}': it must be ARCH:DTYPE:D") for spec in ("90:bf16", ":bf16:64", "90:bf16:64/64/64")),
    *((spec, f"spec is '{spec}': it must be .* from 1 to 512") for spec in ("90:bf16:0", "90:bf16:64/513")),
    ("90:bf16:64:128x128", "tile is '128x128': it must be QxKxWARPSxSTAGES"),
    ("90:bf16:64:swath=2", "option is 'swath=2': it must be NAME=VALUE, where NAME is one of forward_kernel, loads"),
    ("90:bf16:64:order=best", "option order is 'best': it must be one of heads, longest"),
    ("90:bf16:64:only:mha:forward:pack_gqa=True", "it needs several query heads per key head, as with gqa"),
    ("80:bf16:128:dkdv_epilogue=descriptors", "it needs sm_90 or higher"),
    ("120:bf16:128:loads=pointers", "it needs 16 bits and one of sm_90, sm_100"),
    ("90:fp32:128:loads=pointers", "it needs 16 bits"),
    ("90:bf16:128:forward:dkdv_epilogue=descriptors", "it is an option of dkdv, not of forward"),
    ("90:bf16:128:delta:order=longest", "no kernel with a built-in tile takes"),
])  # fmt: skip
def test_invalid_specs_are_refused(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", r"\[").replace("(", r"\(")):
        parse_variants(spec)
