"""Allocations across processes, on a stand-in for the CUDA driver; and flags."""

from __future__ import annotations

import pytest
import torch

from ringattn.comm import TransportError
from ringattn.comm.transports.copy_engine.memory import SHARED_BYTES, Context, Exports, Imports, Offer, Staging

from ..support.cuda.driver import OPENED, Driver


def offer_of(exports: Exports, tensor: torch.Tensor) -> Offer:
    found = exports.locate(tensor.data_ptr())
    assert found is not None
    region, offset = found
    region.peers.add(1)
    return Offer(1, tensor.nbytes, offset, region.buffer, region.handle)


def test_views_of_one_arena_are_one_allocation() -> None:
    driver, arena = Driver(), torch.arange(100, dtype=torch.int32)
    driver.declare(arena.data_ptr() - 256, 1024)
    with Context(driver, torch.device("cpu")).current():
        exports, imports = Exports(driver), Imports(driver)
        first, second = offer_of(exports, arena[:10]), offer_of(exports, arena[10:])
        assert (first.offset, second.offset) == (256, 296)
        addresses = [imports.address(0, offer) for offer in (first, second, first)]
        assert addresses[0] >= OPENED and addresses == [addresses[0], addresses[0] + 40, addresses[0]]
        assert driver.resolve(addresses[1]) == arena[10:].data_ptr()
        assert driver.calls["cuIpcOpenMemHandle"] == driver.calls["cuIpcGetMemHandle"] == 1
        imports.address(2, first)  # the same allocation under another rank's number
        assert driver.calls["cuIpcOpenMemHandle"] == 2
        imports.close()
        imports.close()
    assert not driver.opened


def test_an_address_that_another_allocation_took() -> None:
    driver, arena, other = Driver(), torch.zeros(100), torch.zeros(100)
    driver.declare(arena.data_ptr(), arena.nbytes)
    driver.declare(other.data_ptr(), other.nbytes)
    with Context(driver, torch.device("cpu")).current():
        exports, imports = Exports(driver), Imports(driver)
        before = offer_of(exports, arena)
        offer_of(exports, other)
        imports.address(0, before)
        driver.declare(arena.data_ptr(), arena.nbytes)
        after = offer_of(exports, arena)
        assert before.buffer != after.buffer and before.handle != after.handle
        (gone,) = exports.retired()
        assert (gone.buffer, gone.peers) == (before.buffer, {1})
        assert exports.retired() == []
        imports.drop(0, gone.buffer)
        imports.drop(0, gone.buffer)
        assert not driver.opened
        assert driver.resolve(imports.address(0, after)) == arena.data_ptr()
        with pytest.raises(TransportError, match="cuIpcOpenMemHandle of rank 0 failed: CUDA_ERROR_MAP_FAILED"):
            imports.address(0, before)


def test_memory_without_a_handle() -> None:
    driver = Driver()
    driver.shareable = False
    with Context(driver, torch.device("cpu")).current():
        exports, staging, tensor = Exports(driver), Staging(driver), torch.zeros(3)
        assert exports.locate(tensor.data_ptr()) is None
        first, same, larger = (staging.reserve(nbytes) for nbytes in (64, SHARED_BYTES, SHARED_BYTES + 1))
        assert first == same != larger
        for place in (first, larger):  # peers may still read the first
            found = exports.locate(place + 8)
            assert found is not None and (found[0].base, found[1]) == (place, 8)
        staging.close()
        staging.close()
        assert not driver.allocated
        driver.fails.add("cuMemAlloc")
        with pytest.raises(TransportError, match=f"cuMemAlloc of {SHARED_BYTES} bytes failed"):
            staging.reserve(5)


def test_the_context_comes_and_goes() -> None:
    driver = Driver()
    context = Context(driver, torch.device("cpu", 3))
    driver.strangers |= {(3, 5), (4, 3)}
    assert context.pci_id() == "0000:03:00.0"
    assert context.problem() is None
    assert context.unreadable() == ("0000:05:00.0",)
    with pytest.raises(KeyError), context.current():
        raise KeyError
    assert driver.calls["cuCtxPushCurrent"] == driver.calls["cuCtxPopCurrent"] == 1
    context.release()
    assert not +driver.retained
