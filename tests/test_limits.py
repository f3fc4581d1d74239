"""Limits that could be kept, and which transport keeps which."""

from __future__ import annotations

from ringattn.comm import Limits


def test_who_keeps_what() -> None:
    assert Limits().refused_by("local") is None
    assert Limits(channels=4, ctas=64).refused_by("nccl", "channels", "ctas") is None
    limits = Limits(ctas=4, bytes_per_second=5.0)
    assert limits.refused_by("nccl", "channels", "ctas") == "limits.bytes_per_second is 5.0, and nccl cannot keep that"
    assert (
        limits.refused_by("process_group", "bytes_per_second") == "limits.ctas is 4, and process_group cannot keep that"
    )
