"""Kernels that are compiled before the first hop: exactly those that the call launches, once for all processes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import triton

from ringattn import Layout
from ringattn.autotune.compile import _compiler_view
from ringattn.kernels import PLAIN, KernelConfig, Scores, warm_up
from ringattn.kernels.gpu import assumed_gpu
from ringattn.ring import ops
from ringattn.ring import warm_up as warm_up_module
from ringattn.ring.local.fused import TritonAttention
from ringattn.ring.warm_up import record_phase
from ringattn.ring.wire import RoundedWire

from ..support.ring_cases import inputs, run_ring

GPU = assumed_gpu(90)
CALLS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window_size": (20, 0)},
    "documents": {"causal": True, "cu_seqlens": [0, 10, 40, 96]},
    "fp32": {"causal": True, "dtype": torch.float32},
    "chunks": {"causal": True, "ring": {"chunks": 2}},
    "runs of tokens": {"causal": True, "ring": {"chunks": 3}},
    "wire": {"causal": True, "ring": {"wire_dtype": "float8_e4m3fn", "grad_wire_dtype": "bfloat16"}},
    "sink and softcap": {"softcap": 3.0, "learnable_sink": torch.zeros(4)},
    "dropout": {"causal": True, "dropout_p": 0.5, "dropout_seed": 3},
    "single pass": {"causal": True, "config": KernelConfig(backward="single_pass_deterministic")},
    "splits": {"causal": True, "config": KernelConfig(dkdv_splits=2)},
}


def signature(kernel: Any, args: Any, options: dict[str, Any]) -> str:
    name = getattr(kernel, "__name__", None) or kernel.fn.__name__
    return f"{name} {_compiler_view(args)} {sorted(options.items())}"


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("name", CALLS)
def test_recorded_kernels_are_those_that_a_call_launches(
    name: str, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: dict[str, set[str]] = defaultdict(set)
    recorded: dict[str, set[str]] = defaultdict(set)
    lock = threading.Lock()

    def record(call: Any, running: Any, q: Any, k: Any, v: Any, start: Any) -> None:
        with lock:
            launches = record_phase(GPU, call, running, running.phase, q, k, v, start)
            recorded[running.phase].update(signature(x.kernel, x.arguments, x.options) for x in launches)

    original = sys.modules["ringattn.kernels.launch"].launch

    def launch(kernel: Any, grid: int, device: Any, *args: Any, **options: Any) -> None:
        if device.type == "meta":
            original(kernel, grid, device, *args, **options)
        elif grid:
            with lock:
                launched["all"].add(signature(kernel, args, options))

    monkeypatch.setattr(ops, "compile_kernels", record)
    for module in [m for n, m in sys.modules.items() if n.startswith("ringattn.kernels.") and hasattr(m, "launch")]:
        if module.__name__ != "ringattn.kernels.launch":
            monkeypatch.setattr(module, "launch", launch)
    for module in [m for n, m in sys.modules.items() if n.startswith("ringattn.kernels.")]:
        for name_of_gpu in {"gpu_specs", "gpu_or_interpreter"} & vars(module).keys():
            monkeypatch.setattr(module, name_of_gpu, lambda device: GPU)
    arguments = dict(CALLS[name])
    whole = inputs(96, (4, 2), dtype=arguments.pop("dtype", torch.float16))
    del whole["dlse"]
    run_ring(Layout.zigzag(96, world), whole, backend="triton", **arguments)
    compiled = recorded["forward"] | recorded["backward"]
    quantized = {text for text in compiled if "quantize" in text}  # PyTorch quantizes on the CPU
    assert bool(quantized) == (name == "wire" and world > 1)
    assert launched["all"] and compiled - quantized == launched["all"]


CALL: dict[str, Any] = {
    "phase": "forward", "has_backward": True, "max_logits": False, "config": None, "scores": PLAIN, "wire": None,
    "grad_wire": None, "masks": (("full",),), "hops": 3, "chunks": 1, "start": None, "dtype": torch.float16,
    "tokens": 32, "dim": 16, "kernel": TritonAttention(), "gpu": GPU, "device": torch.device("cuda", 0),
}  # fmt: skip
BFLOAT16 = RoundedWire(torch.bfloat16)
OTHERS: dict[str, tuple[Any, ...]] = {
    "phase": ("backward",), "has_backward": (False,), "max_logits": (True,), "config": (KernelConfig(dkdv_splits=2),),
    "scores": (Scores(softcap=2.0), Scores(dropout_p=0.5), Scores(alibi_slopes=torch.ones(2))), "wire": (BFLOAT16,),
    "grad_wire": (BFLOAT16,), "masks": ((("rows",),),), "hops": (1, 2), "chunks": (2,), "start": (torch.ones(1),),
    "dtype": (torch.bfloat16,), "tokens": (40,), "dim": (32,), "device": (torch.device("cuda", 1),),
}  # fmt: skip
"""Per property, other values whose kernels differ."""
SAME: dict[str, Any] = {"scores": Scores(first_head=1), "hops": 9, "tokens": 48}
NONE: dict[str, Any] = {"kernel": object(), "gpu": None, "device": torch.device("cpu")}


def test_each_kind_of_call_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward compiles the backward too if it has one; ranks of one machine begin with different kernels."""
    monkeypatch.setattr(warm_up_module, "_COMPILED", set())
    monkeypatch.setattr(warm_up_module, "record_phase", lambda gpu, call, running, phase, *_: [phase])
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    seen: list[tuple[list[str], float]] = []
    monkeypatch.setattr(warm_up_module, "compile_launches", lambda phases, share: seen.append((phases, share)))

    def compiled(**changes: Any) -> list[str]:
        """Return the phases that a call on rank 1 of 4 compiles."""
        given = SimpleNamespace(**CALL | changes)
        monkeypatch.setattr(warm_up_module, "gpu_specs", lambda _: given.gpu)
        x = torch.empty(1, given.tokens, 2, given.dim, dtype=given.dtype)
        q = Mock(device=given.device, shape=x.shape, dtype=x.dtype, **{"stride.return_value": x.stride()})
        call: Any = SimpleNamespace(
            backend=given.kernel, has_backward=given.has_backward, config=given.config,
            args=SimpleNamespace(return_max_logits=given.max_logits), ring=SimpleNamespace(rank=1, size=4),
        )  # fmt: skip
        running: Any = SimpleNamespace(
            phase=given.phase, scores=given.scores, wire=given.wire, grad_wire=given.grad_wire,
            chunks=[0] * given.chunks, plan=SimpleNamespace(mask_kinds=given.masks, hops=[0] * given.hops),
        )  # fmt: skip
        seen.clear()
        warm_up_module.compile_kernels(call, running, q, q, q, given.start)
        assert all(share == 0.25 for _, share in seen)
        return [phase for phases, _ in seen for phase in phases]

    assert compiled() == ["forward", "backward"] and compiled() == []
    for name, values in OTHERS.items():
        for value in values:
            phases = {"phase": ["backward"], "has_backward": ["forward"]}.get(name, ["forward", "backward"])
            assert compiled(**{name: value}) == phases, (name, value)
            assert compiled(**{name: value}) == [], (name, value)
    assert not any(compiled(**{name: value}) for name, value in (SAME | NONE).items())


def hold_lock(folder: str, held: Any, seconds: float) -> None:
    triton.knobs.cache.dir = folder

    def compile_slowly() -> str:
        held.set()
        time.sleep(seconds)
        return "compiled"

    warm_up._compile_locked("kernel", compile_slowly)


def test_a_kernel_that_another_process_compiles_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    context = multiprocessing.get_context("fork")
    held = context.Event()
    other = context.Process(target=hold_lock, args=(str(tmp_path), held, 1.0))
    other.start()
    assert held.wait(60)
    begin = time.monotonic()
    assert warm_up._compile_locked("another kernel", lambda: 1) == 1
    assert time.monotonic() - begin < 0.8
    assert warm_up._compile_locked("kernel", lambda: 2) == 2
    waited = time.monotonic() - begin
    other.join()
    assert 0.2 < waited < 30


def test_a_kernel_is_compiled_without_a_lock_if_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache may be read-only, and another process may hang while it compiles."""
    monkeypatch.setattr(warm_up, "LOCK_SECONDS", 0.05)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    assert warm_up._compile_locked("kernel", lambda: warm_up._compile_locked("kernel", lambda: 1)) == 1
    (tmp_path / "file").touch()
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "file" / "cache"))
    assert warm_up._compile_locked("kernel", lambda: 2) == 2


def test_a_kernel_that_does_not_compile_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch of the kernel raises the error."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    made: list[float] = []
    with ThreadPoolExecutor(1) as executor, warm_up._SharedCompileMode(executor) as mode:
        mode.submit("broken", lambda: 1 / 0, made.append)
        mode.submit("kernel", lambda: 1.0, made.append)
    assert made == [1.0] and len(mode.future_kernels) == 2


COMPILES = """
import sys
from unittest.mock import patch
import torch
from triton.runtime import driver
from ringattn.autotune.compile import StandInDriver
from ringattn.kernels.attention import attention_delta
from ringattn.kernels.gpu import assumed_gpu
from ringattn.kernels.warm_up import collect_launches, compile_launches

def run():
    for dim in (16, 32):
        x = torch.empty(1, 8, 2, dim, dtype=torch.float16, device="meta")
        attention_delta(x, x)
        attention_delta(x, x)

launches = collect_launches(assumed_gpu(90), run)
with patch.object(driver, "_active", StandInDriver(90, device=1090)):
    print(len(launches), compile_launches(launches, share=0.5), compile_launches(launches))
    for x in launches:
        assert len(x.kernel.warmup(*x.arguments, grid=(x.grid,), **x.options).asm["cubin"]) > 0
"""


@pytest.mark.compiles("kernels/warm_up.py", "ring/warm_up.py")
def test_launches_are_compiled_once_and_loaded_from_the_cache(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    cached: list[set[str]] = []
    for _ in range(2):
        command = [sys.executable, "-c", COMPILES]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.stdout == "4 2 0\n", done.stderr
        cached.append({str(path) for path in tmp_path.rglob("*.cubin")})
    assert len(cached[0]) == 2 and cached[0] == cached[1]
