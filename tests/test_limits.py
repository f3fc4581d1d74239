"""Limits that could be kept, and which transport keeps which."""

from __future__ import annotations

from typing import Any

import pytest

from ringattn.comm import Limits


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"channels": 3}, "channels is 3: it takes a power of two from 1 to 64, or None"),
        ({"ctas": 0}, "ctas is 0: it takes a power of two"),
        ({"ctas": 128}, "ctas is 128"),
        ({"channels": -2}, "channels is -2"),
        ({"channels": 8, "ctas": 4}, "channels is 8 and ctas 4: a channel takes a thread block"),
        ({"bytes_per_second": 0}, "bytes_per_second is 0: it takes a positive number"),
        ({"bytes_per_second": float("nan")}, "bytes_per_second is nan"),
    ],
)
def test_what_nothing_could_keep_is_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Limits(**given)


def test_who_keeps_what() -> None:
    assert Limits().refused_by("local") is None
    assert Limits(channels=4, ctas=64).refused_by("nccl", "channels", "ctas") is None
    limits = Limits(ctas=4, bytes_per_second=5.0)
    assert limits.refused_by("nccl", "channels", "ctas") == "limits.bytes_per_second is 5.0, and nccl cannot keep that"
    assert (
        limits.refused_by("process_group", "bytes_per_second") == "limits.ctas is 4, and process_group cannot keep that"
    )
