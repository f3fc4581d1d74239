"""The attention of a model, read from the ``config.json`` that Hugging Face's models come with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..kernels.strict import load_json, read_text, shown
from .cards import Shape

MOST_BYTES = 4 << 20
HEADS = ("num_attention_heads", "n_head", "n_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model")
HEAD_DIM = ("head_dim", "kv_channels", "attention_head_dim")
DTYPE = ("dtype", "torch_dtype")
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
DEFAULT_DTYPE = "bf16"


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
