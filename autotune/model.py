"""What is tuned for: a GPU, the attention of a model, by numbers or its ``config.json``, and the points they make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ..kernels.config import SHARED_LIMIT
from ..kernels.strict import load_json, read_text, shown
from ..kernels.tables import DTYPES, TUNED, Gpu, Point

MOST_BYTES = 4 << 20
HEADS = ("num_attention_heads", "n_head", "n_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model")
HEAD_DIM = ("head_dim", "kv_channels", "attention_head_dim")
DTYPE = ("dtype", "torch_dtype")
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
DEFAULT_DTYPE = "bf16"


def gpu_of_arch(name: str) -> Gpu:
    """What a table without a GPU is for, ``sm_90``: a compute capability, not a product.

    Raises:
        ValueError: not the name of a supported compute capability.
    """
    known = {f"sm_{arch}": arch for arch in SHARED_LIMIT}
    if name not in known:
        raise ValueError(f"arch is {name!r}: it must be one of {', '.join(known)}")
    return Gpu(name, known[name])


@dataclass(frozen=True)
class Shape:
    """The attention of a model, as one GPU computes it.

    Raises:
        ValueError: heads that are not a multiple of the key heads, a head dim or dtype that no kernel has.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}: it must be a multiple of the {self.kv_heads} heads of keys")
        for name in ("head_dim", "value_dim"):
            if not 1 <= getattr(self, name) <= 256:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be 1 to 256")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}: it must be one of {', '.join(DTYPES)}")

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads


def points_of(shape: Shape, lengths: list[int], *, causal: bool, kernels: Iterable[str] = TUNED) -> list[Point]:
    """Every kernel at every length; with ``causal`` also with bounds: most hops of a causal ring have none.

    Raises:
        ValueError: no length, or one that is not positive.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"seqlen is {lengths}: it takes at least one length, and each at least 1")
    masks = ("full", "bounded") if causal else ("full",)
    return [
        Point(kernel, shape.dtype, shape.head_dim, shape.value_dim, shape.group, mask, length)
        for kernel, mask, length in product(kernels, masks, sorted({*lengths}))
    ]


def shape_of_config(path: Path, dtype: str | None = None) -> Shape:
    """Heads, head dims and dtype of a model's attention; of a multimodal model, of its text part.

    Multi-head latent attention is told as training computes it: keys of ``qk_nope_head_dim + qk_rope_head_dim``, values
    of ``v_head_dim``, for every head.

    Args:
        dtype: in place of the file's.

    Raises:
        ValueError: no such file, not JSON, or a name is missing; the message has the path, and what it takes.
    """
    try:
        data = load_json(read_text(path, MOST_BYTES))
        if not isinstance(data, dict):
            raise ValueError(f"it is {shown(data)}: it must be an object")
        return _shape(data | (data["text_config"] if isinstance(data.get("text_config"), dict) else {}), dtype)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} does not say an attention: {error}") from error


def _shape(data: dict[str, Any], dtype: str | None) -> Shape:
    heads = _whole(data, HEADS)
    if "qk_rope_head_dim" in data:
        key_dim = _whole(data, ("qk_nope_head_dim",)) + _whole(data, ("qk_rope_head_dim",))
        return Shape(heads, heads, key_dim, _whole(data, ("v_head_dim",)), dtype or _dtype(data))
    if data.get("multi_query") is True and not any(data.get(name) is not None for name in KV_HEADS):
        kv_heads = 1
    else:
        kv_heads = _whole(data, KV_HEADS, heads)
    hidden = None if any(data.get(name) is not None for name in HEAD_DIM) else _whole(data, HIDDEN)
    head_dim = _whole(data, HEAD_DIM, hidden and hidden // heads)
    return Shape(heads, kv_heads, head_dim, head_dim, dtype or _dtype(data))


def _whole(data: dict[str, Any], names: tuple[str, ...], default: int | None = None) -> int:
    """The first of ``names`` that has a value."""
    for name in names:
        if (value := data.get(name)) is not None:
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {shown(value)}: it must be a positive whole number")
            return value
    if default is None:
        raise ValueError(f"it has none of {', '.join(names)}")
    return default


def _dtype(data: dict[str, Any]) -> str:
    """The short name of the weights' dtype; what is stored in 8 bits or less computes in bf16."""
    told = next((data[name] for name in DTYPE if isinstance(data.get(name), str)), None)
    return DEFAULT_DTYPE if told is None else SHORT.get(told.removeprefix("torch."), DEFAULT_DTYPE)
