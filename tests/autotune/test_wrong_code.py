"""Tests of the checks for wrong code, each with a mutant that must be found."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringattn.autotune import assemblers, gate
from ringattn.autotune.assemblers import assemble, assembler_version, newest_assembler, triton_assembler
from ringattn.autotune.compile import RecordedLaunch, parse_variants
from ringattn.autotune.wrong_code import (
    KNOWN_MISCOMPILES,
    in_place_races,
    known_miscompiles,
    launch_tensors,
    wgmma_hazards,
)
from ringattn.kernels.device.tiles import StridedTensor

LISTING = Path(__file__).with_name("forward_sm_90.sass").read_text()
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def listing(*instructions: str) -> str:
    lines = [f"        /*{i:04x}*/                   {text} ;" for i, text in enumerate([*instructions, "EXIT"])]
    return "\n".join(lines)


def test_every_wait_of_a_binary_is_needed() -> None:
    assert wgmma_hazards(LISTING) == [] and LISTING.count(WAIT) == 2
    head, middle, tail = LISTING.split(WAIT)
    for mutant in (head + "NOP" + middle + WAIT + tail, head + WAIT + middle + "NOP" + tail):
        assert wgmma_hazards(mutant)


PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], R24"  # accumulator R24 to R55, A R4 to R7


@pytest.mark.parametrize(("instructions", "hazard"), [
    ((f"{PRODUCT}, gsb0", "FADD R7, R60, R61", WAIT), "A is overwritten by /*0001*/ FADD R7, R60, R61"),
    ((f"{PRODUCT}, gsb0", "CS2R R54, SRZ", WAIT), "an accumulator is used by /*0001*/ CS2R R54, SRZ"),
    ((f"{PRODUCT}, gsb0", "CS2R R6, SRZ", WAIT), "A is overwritten"),
    ((f"{PRODUCT}, gsb0", "FADD R3, R60, R61", "CS2R.32 R23, SRZ", "LDG.E.128 R20, desc[UR4][R60.64]", WAIT), ""),
    ((f"{PRODUCT}, gsb0", "LDG.E.64 R6, desc[UR4][R60.64]", WAIT), "A is overwritten"),
    ((f"{PRODUCT}, gsb0", "IMAD.WIDE.U32 R2, R60, R61, RZ", "IMAD.WIDE.U32 R54, R60, R61, RZ", WAIT),
     "an accumulator is used by /*0002*/"),
    ((f"{PRODUCT}, gsb0", "IMAD.WIDE.U32 R3, R60, R61, RZ", WAIT), "A is overwritten"),  # R4, the second of the pair
    ((f"{PRODUCT}, gsb0", "LDSM.16.M88.4 R20, [R60]", "LDSM.16.M88.2 R22, [R60]", "LDSM.16.M88 R23, [R60]", WAIT), ""),
    ((f"{PRODUCT}, gsb0", "SHFL.BFLY PT, R5, R60, 0x1, 0x1f", WAIT), "A is overwritten"),
    ((f"{PRODUCT}, gsb0", "STS.128 [R60], R20", WAIT), ""),
    ((f"{PRODUCT}, gsb0", "STS.128 [R60], R52", WAIT), "an accumulator is used"),
    ((f"{PRODUCT}, gsb0", "FADD R60, R4, R7", "ISETP.GE.AND P0, PT, R4, R5, PT", WAIT), ""),  # A may be read
    ((f"{PRODUCT}, gsb0", "@!PT FADD R7, R60, R61", WAIT), ""),
    ((PRODUCT, f"{PRODUCT}, gsb0", WAIT, "FADD R24, R24, R4"), ""),  # two steps of one product
    ((PRODUCT, WAIT, "FADD R24, R24, R4"), "an accumulator is used"),  # the wait does not cover an open group
    # the newer of two groups may stay in flight
    ((f"{PRODUCT}, gsb0", "HGMMA.64x64x16.F32.BF16 R80, gdesc[UR8], R80, gsb0", WAIT.replace("0x0", "0x1"),
      "FADD R24, R24, R4", "FADD R80, R80, R4"), "an accumulator is used by /*0004*/ FADD R80"),
    ((f"{PRODUCT}, gsb0", "HGMMA.64x64x16.F32.BF16 R80, R24, gdesc[UR8], R80, gsb0"), "an accumulator is used by"),
    ((f"{PRODUCT}, gsb0", "STSM.16.M88.4 [R60], R21", WAIT), "an accumulator is used by"),
    ((f"{PRODUCT}, gsb0", "LDG.E R60, desc[UR4][R23.64]", WAIT), "an accumulator is used by"),
    # an accumulator of 16 bits has half as many registers, R24 to R39
    ((f"{PRODUCT.replace('F32.BF16', 'F16')}, gsb0", "FADD R60, R40, R61", WAIT), ""),
])  # fmt: skip
def test_registers_in_flight(instructions: tuple[str, ...], hazard: str) -> None:
    found = wgmma_hazards(listing(*instructions))
    assert len(found) == bool(hazard) and all(hazard in text for text in found)


def test_a_hazard_is_found_across_the_back_edge_of_a_loop() -> None:
    loop = listing(".", f"{PRODUCT}, gsb0", "@P0 BRA `(.L_1)", WAIT).replace(
        "        /*0000*/", ".L_1:\n        /*0000*/"
    )
    assert wgmma_hazards(loop) == []
    assert len(wgmma_hazards(loop.replace(" . ;", " FADD R4, R60, R61 ;"))) == 1


PTX = """
.visible .entry kernel(.param .u64 kernel_param_0, .param .u32 kernel_param_1, .param .u64 kernel_param_2)
	ld.param.b64 	%rd1, [kernel_param_0];
	ld.param.b64 	%rd2, [kernel_param_2];
	add.s64 	%rd3, %rd1, 16;
	@%p1 bra 	$L__BB0_2;
	@%p2 ld.global.b32 { %r1 }, [ %rd3 + 0 ];
	bar.sync 	0;
$L__BB0_2:                              // comment
	mad.wide.s32 	%rd4, %r7, 4, %rd2;
	st.global.b32 [ %rd4 + 0 ], { %r1 };
	ret;
"""
TTGIR = 'tt.func public @kernel(%a: !tt.ptr<f32> loc("a"(#loc)), %a_0: i32 loc("a"(#loc)), %b: f32 loc("b"(#loc))) {'


def test_in_place_tensors_are_loaded_before_a_barrier() -> None:
    tensor = torch.empty(1)
    arguments = [StridedTensor(tensor, 1, 1, 1), tensor.view(1, 1)]
    tensors = launch_tensors(["a", "b"], arguments, TTGIR)
    assert tensors == {"a and b": ["kernel_param_0", "kernel_param_2"]}
    assert in_place_races(PTX, tensors) == []
    (race,) = in_place_races(PTX.replace("bar.sync", "bar.warp.sync"), tensors)
    assert race.startswith("a and b is stored before all threads have loaded it: st.global.b32 [ %rd4")
    moved = PTX.replace("	bar.sync 	0;\n", "").replace(
        "	ld.param.b64 	%rd1", "	bar.sync 	0;\n	ld.param.b64 	%rd1"
    )
    for op in ("st.global.b32", "red.global.add.f32", "atom.global.add.f32", "cp.reduce.async.bulk.global.shared::cta"):
        assert len(in_place_races(moved.replace("st.global.b32", op), tensors)) == 1
    for op in ("ld.global.b32", "prefetch.global"):
        assert in_place_races(moved.replace("st.global.b32", op), tensors) == []
    branch = "	@%p2 bra 	$L__BB0_9;\n"
    for guarded, found in ((branch, 1), (branch.replace("@%p2 ", ""), 0)):
        jumped = (
            moved.replace("$L__BB0_2:", f"{guarded}$L__BB0_3:").replace("$L__BB0_2", "$L__BB0_9")
            + "$L__BB0_9:\n	ret;\n"
        )
        assert len(in_place_races(jumped, tensors)) == found
    two = launch_tensors(["a", "b"], [tensor, torch.empty(1)], TTGIR)
    assert [*two] == ["a", "b"] and in_place_races(moved, two) == []


# Cut from two products that add to one accumulator, compiled for sm_100 with 2 stages by Triton 3.7.1.
CHAINED = """
    ttng.tc_gen5_mma %x1, %y1, %acc_33, %false, %acc_27, %acc_18[%true] {is_async} : !ttg.memdesc<128x64xbf16>
    ttng.wait_barrier %acc_18, %c0_i32, %acc_27 deps %x1_30, %y1_40 : !ttg.memdesc<1xi64>
    %acc_77 = ttng.tmem_load %acc_33 : !ttg.memdesc<128x64xf32, #tmem> -> tensor<128x64xf32, #linear>
    %acc_78 = arith.mulf %acc_77, %alpha : tensor<128x64xf32, #linear>
    ttng.tmem_store %acc_78, %acc, %acc_27 : tensor<128x64xf32, #linear> -> !ttg.memdesc<128x64xf32, #tmem>
    ttng.tc_gen5_mma %x2, %y2, %acc, %true, %acc_27, %acc_21[%true] {is_async} : !ttg.memdesc<128x64xbf16>
    %acc_88 = ttng.tmem_load %acc : !ttg.memdesc<128x64xf32, #tmem> -> tensor<128x64xf32, #linear>
    ttng.tmem_store %acc_88, %acc_33, %acc_44 : tensor<128x64xf32, #linear> -> !ttg.memdesc<128x64xf32, #tmem>
"""
# Cut from dot(trans(dot(a, b).to(bfloat16)), c), compiled for sm_90.
TRANSPOSED = """
#mma = #ttg.nvidia_mma<{versionMajor = 3, versionMinor = 0, warpsPerCTA = [4, 1], instrShape = [16, 64, 16]}>
    %s_30 = arith.truncf %s_29 : tensor<64x64xf32, #mma> to tensor<64x64xbf16, #mma>
    %s_31 = tt.trans %s_30 {order = array<i32: 1, 0>} : tensor<64x64xbf16, #mma> -> tensor<64x64xbf16, #linear>
    %0 = ttg.local_alloc %s_31 : (tensor<64x64xbf16, #linear>) -> !ttg.memdesc<64x64xbf16, #shared2, #smem>
"""


@pytest.mark.parametrize(("ttgir", "arch", "last", "change", "fixed"), [
    (CHAINED, 100, "3.8.0", ("tmem_store %acc_88, %acc_33", "tmem_store %cst, %acc_33"), "3.9.0"),
    (CHAINED, 100, "3.8.0", ("{is_async} : !ttg.memdesc<128x64xbf16>\n    %acc_88",
                             "{is_async} : !ttg.memdesc<128x64xbf16>\n    ttng.wait_barrier %acc_21 :\n    %acc_88"),
     "3.9.0"),
    (TRANSPOSED, 90, "3.7.0", ("#ttg.nvidia_mma", "#ttg.blocked"), "3.7.1"),
    (TRANSPOSED, 90, "3.7.0", ("local_alloc %s_31", "local_alloc %s_3"), "3.7.1"),
])  # fmt: skip
def test_known_miscompiles(
    ttgir: str, arch: int, last: str, change: tuple[str, str], fixed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton.__version__", last)
    (known,) = [known for known in KNOWN_MISCOMPILES if known.matches(ttgir)]
    (found,) = known_miscompiles(ttgir, arch)
    assert known.issue in found and change[0] in ttgir
    other = ttgir.replace("bf16", "f16").replace("local_alloc", "local_store")
    assert known_miscompiles(other, arch) == [found]
    assert known_miscompiles(ttgir.replace(*change), arch) == known_miscompiles(ttgir, 80) == []
    monkeypatch.setattr("triton.__version__", fixed)
    assert known_miscompiles(ttgir, arch) == []


def test_the_gate_checks_the_code_of_two_assemblers(monkeypatch: pytest.MonkeyPatch) -> None:
    (variant,) = parse_variants("90:bf16:128:middle:forward:full:mha")
    binary = SimpleNamespace(asm={"ptx": "wgmma\n.reqntid 128", "ttgir": TTGIR})
    launch = RecordedLaunch(SimpleNamespace(arg_names=["a"]), 1, (), {}, binary)
    monkeypatch.setattr(gate, "compile_launch", lambda launch, arch: launch)
    monkeypatch.setattr(type(variant), "launch", launch)
    monkeypatch.setattr(gate, "read_compiled", lambda launch, arch: gate.CompiledKernel(64, 0, 0, 0, (), arch=90))
    monkeypatch.setattr(gate, "assemble", lambda ptx, assembler: b"")
    monkeypatch.setattr(gate, "disassemble", lambda cubin: LISTING.replace(WAIT, "NOP"))
    newest = newest_assembler()
    for name in ("gate_problems", "hopper_problems", "in_place_races", "known_miscompiles"):
        with monkeypatch.context() as patch:
            patch.setattr(gate, name, lambda *_, name=name: [f"problem of {name}"])
            assert f"problem of {name}" in gate.compile_variant(variant)[1]
    monkeypatch.setattr(gate, "read_amdgcn", lambda launch, arch: gate.CompiledKernel(64, 0, 65_537, 0, (), arch=arch))
    assert "65537 bytes of shared memory" in gate.compile_variant(replace(variant, arch=0x942))[1][0]
    assert assembler_version(newest) >= assembler_version(triton_assembler(90)) > (12,)
    problems = [gate.compile_variant(variant, assembler)[1] for assembler in (None, newest)]
    (extra,) = {*problems[1]} - {*problems[0]}
    assert re.match(r"\d+ instructions from ptxas \d+\.\d+\.\d+ use registers", extra)


def test_the_newest_assembler_is_chosen_by_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = [tmp_path / f"cu{major}" / "bin" / "ptxas" for major in (12, 13)]
    for wheel in wheels:
        wheel.parent.mkdir(parents=True)
        wheel.touch()
    versions = {wheels[0]: (12, 9, 8), wheels[1]: (12, 10, 1), Path("triton-80"): (12, 9), Path("triton-100"): (9, 99)}
    monkeypatch.setattr(assemblers, "triton_assembler", lambda arch: Path(f"triton-{arch}"))
    monkeypatch.setattr(assemblers, "assembler_version", versions.__getitem__)
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    for spec, newest in ((package, wheels[1]), (SimpleNamespace(submodule_search_locations=None), Path("triton-80"))):
        monkeypatch.setattr(assemblers, "find_spec", lambda name, spec=spec: spec)
        assert newest_assembler() == newest
    versions[Path("triton-100")] = (13, 0)
    assert newest_assembler() == Path("triton-100")


def test_an_assembler_refuses_wrong_ptx_and_skips_newer_ptx(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: Any = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **how: commands.append(command) or run(command, **how))
    ptx = ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry kernel() { ret; }\n"
    newest = newest_assembler()
    assert assemble(ptx, newest)
    assert commands[-1][1:3] == ["--regAllocOptLevel=2", "--gpu-name=sm_90a"], "as Triton calls it"
    assert assemble(ptx.replace("8.0", "99.0"), newest) is None
    with pytest.raises(RuntimeError, match="rejects the kernel"):
        assemble(ptx.replace("ret", "rot"), newest)
