"""A tile that takes more of a GPU than there is: refused before anything is launched or sent, with one that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from triton.runtime.errors import OutOfResources

from ringattn.kernels import (
    KernelConfig,
    Scores,
    Tile,
    attention,
    attention_backward,
    attention_forward,
    choice,
    launch,
)
from ringattn.kernels.experimental import gradients
from ringattn.ring.args import check_tiles
from ringattn.ring.schedule.mask import Mask

from ..support.kernel_cases import Sizes, inputs
from ..support.tile_tables import H200, folders

__all__ = ["folders"]

SMALL, LARGE = Tile(16, 16, 4, 1), Tile(256, 256, 8, 8)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, folders: object) -> list[str]:
    """The CPU passes for an H200 where a tile is chosen; the kernels that were launched."""
    made: list[str] = []
    monkeypatch.setattr(choice, "gpu_of", lambda device: H200)
    for module in (attention, gradients):
        monkeypatch.setattr(module, "launch", lambda kernel, *given, **how: made.append(kernel.__name__))
    return made


@pytest.mark.parametrize(
    ("field", "config"),
    [
        ("forward", KernelConfig(LARGE, SMALL, SMALL)),
        ("dq", KernelConfig(SMALL, LARGE, SMALL)),
        ("dkdv", KernelConfig(SMALL, SMALL, LARGE)),
        ("single_pass", KernelConfig(SMALL, SMALL, SMALL, backward="single_pass", single_pass=LARGE)),
    ],
)
def test_a_tile_that_does_not_fit_is_refused_with_one_that_does(
    field: str, config: KernelConfig, launched: list[str]
) -> None:
    """By the entry that launches it, a whole backward included, and by a ring before its first hop."""
    x = inputs(Sizes(24, 30, head_dim=64, head_dim_v=64))
    lse = torch.zeros(1, 1, 24)
    entries: dict[str, Callable[[], object]] = {
        "ring": lambda: check_tiles(Mask(), Scores(), "triton", config, x.q, x.v),
        "forward": lambda: attention_forward(x.q, x.k, x.v, config=config),
        "backward": lambda: attention_backward(x.dout, x.q, x.k, x.v, x.dout, lse, config=config),
    }
    fits = r"at least [\d,]+ bytes of shared memory, a block of sm_90 has 232,448; Tile\(.*\) fits"
    for entry in ("ring", "forward" if field == "forward" else "backward"):
        with pytest.raises(ValueError, match=rf"config\.{field} is Tile\(block_q=256, .*\): it takes {fits}"):
            entries[entry]()
    assert launched == []


def test_no_tile_of_another_kernel_is_looked_at(launched: list[str]) -> None:
    x = inputs(Sizes(24, 30, head_dim=64, head_dim_v=64))
    attention_forward(x.q, x.k, x.v, config=KernelConfig(SMALL, LARGE, LARGE))
    assert launched == ["forward_kernel"]


class Kernel:
    """Takes the place of a compiled kernel: a launch is a call."""

    __name__ = "forward_kernel"

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return self.run


def test_what_triton_finds_too_large_is_told_with_its_options() -> None:
    """Registers, or what a pipeline takes beyond the least: known once it is compiled."""

    def run(*arguments: object, **options: object) -> None:
        raise OutOfResources(300_000, 232_448, "shared memory")

    told = "forward_kernel with BLOCK_Q=64, BLOCK_K=32, num_warps=4, num_stages=2 takes 300,000 of shared memory"
    with pytest.raises(ValueError, match=f"{told}, this GPU has 232,448"):
        launch.launch(Kernel(run), 1, torch.device("cpu"), **launch.options(Tile(64, 32, 4, 2)))


def test_a_launch_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current one, which need not be theirs."""
    current = [torch.device("cuda", 0)]

    @contextmanager
    def device(asked: torch.device) -> Iterator[None]:
        current.append(asked)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    launched: list[torch.device] = []
    launch.launch(Kernel(lambda: launched.append(current[-1])), 1, torch.device("cuda", 1))
    assert launched == [torch.device("cuda", 1)] and len(current) == 1
