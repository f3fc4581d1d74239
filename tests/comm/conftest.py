"""Fixtures of the comm tests: fake CUDA streams, a fake NCCL, and a clock that the test sets."""

from __future__ import annotations

import pytest

from ..support.cuda.device import Device, install_streams
from ..support.cuda.nccl import Fabric, install_nccl
from ..support.watch_cases import ManualClock


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return install_streams(monkeypatch)


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Fabric:
    fabric = Fabric(install_streams(monkeypatch))
    install_nccl(monkeypatch, fabric)
    return fabric


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    return ManualClock(monkeypatch)
