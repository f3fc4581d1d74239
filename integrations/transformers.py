"""Hugging Face transformers on shards: ``attn_implementation="ringattn"``, each rank with its part of the sequence.

::

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation=register())
    batch = shard_batch(batch, "zigzag", group)
    with sharded("zigzag", group):
        loss = model(**batch).loss  # this rank's part; the sum over the ranks is the loss of the whole batch
    loss.backward()  # gradients are parts too: sum them over the group

Rotary embedding, norms, feed-forward and loss work token by token; attention alone sees the other ranks. What a
model's mask shows is read from transformers' own mask functions, so that windows, chunks and documents are the
model's; sinks, softcap, scale and dropout come with each attention call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import transformers
from packaging.version import Version

from ..ring import GroupLike, Layout, Ring, ring_attention
from ..ring.ring import resolve_ring
from ..ring.schedule.layout import Documents, LayoutLike
from ..ring.shards import resolve_layout

NAME = "ringattn"
OLDEST = Version("5.22")
IGNORE_INDEX = -100  # of labels: what transformers' losses leave out

ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
"""Entries of ``config.layer_types`` whose tokens meet in attention alone."""

HARMLESS = {
    "cache_position",
    "deterministic",  # of flash-attention's backward: this one always is
    "layer_idx",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",  # key and value come out of it already
    "position_embeddings",
    "return_dict",
    "shift_labels",
    "use_cache",
}
"""What models hand to every attention function, and no result of attention depends on."""


@dataclass(frozen=True)
class Sharding:
    """Who holds which tokens, as :func:`sharded` says it."""

    layout: LayoutLike = None
    group: GroupLike = None
    ring: Ring | None = None
    cu_seqlens: tuple[int, ...] | None = None
    backend: str = "auto"
    calls: list[str] = field(default_factory=list)  # one entry per attention call

    def of(self, device: torch.device) -> Ring:
        """The ring of the group; ValueError where nobody said how several ranks share a sequence."""
        ring = resolve_ring(self.ring, self.group, device)
        if self.layout is None and ring.size > 1:
            raise ValueError(
                f'{ring.size} ranks and no layout: run the model inside `with sharded("zigzag", group):`, whose group '
                "is the ranks that share a sequence, and give it what shard_batch makes"
            )
        return ring

    def positions(self, tokens: int, device: torch.device) -> torch.Tensor:
        """Positions of this rank's ``tokens`` within their documents, int64 ``[S]``."""
        ring = self.of(device)
        total = self.layout.seqlen if isinstance(self.layout, Layout) else tokens * ring.size
        where = resolve_layout(self.layout, total, ring.size).positions(ring.rank)
        if len(where) != tokens:
            raise ValueError(f"the layout gives rank {ring.rank} {len(where)} tokens, the model got {tokens}")
        if self.cu_seqlens is not None:
            where = where - Documents(self.cu_seqlens).around(where)[0]
        return where.to(device)


@dataclass
class Mask:
    """What stands in for a mask tensor between a model's masks and its attention: arguments of ``ring_attention``.

    It holds the sharding itself: a layer that is checkpointed runs again in the backward, where ``sharded`` may be
    over, and in a thread of autograd's that never was inside of it.
    """

    sharding: Sharding
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    chunk_size: int | None = None
    positions_checked: bool = False

    def check_positions(self, position_ids: torch.Tensor, tokens: int) -> None:
        """Rotary embedding must know the tokens' places: once per forward, ValueError if it does not."""
        if self.positions_checked or position_ids.dim() != 2:  # several per token, of images: not the sequence's
            return
        expected = self.sharding.positions(tokens, position_ids.device)
        if not (position_ids == expected).all():
            raise ValueError(
                f"position_ids start with {position_ids[0, :4].tolist()}, this rank's tokens with "
                f"{expected[:4].tolist()}: pass the position_ids that shard_batch makes, and packed documents as "
                "cu_seqlens to both sharded and shard_batch"
            )
        self.positions_checked = True

    def boundaries(self, tokens: int) -> tuple[int, ...] | None:
        """The documents' boundaries, and those of chunks within them."""
        documents = self.sharding.cu_seqlens
        if self.chunk_size is None:
            return documents
        starts = (range(start, end, self.chunk_size) for start, end in pairwise(documents or (0, tokens)))
        return (*(start for each in starts for start in each), documents[-1] if documents else tokens)


_sharding: ContextVar[Sharding] = ContextVar("ringattn_sharding")


def register() -> str:
    """Add attention and mask interface "ringattn" to transformers; the name, for ``attn_implementation=``. Idempotent.

    Raises:
        ImportError: transformers is older than 5.22, or a newer one whose mask functions are not those that are read.
    """
    version = transformers.__version__
    if Version(version) < OLDEST:
        raise ImportError(f"transformers is {version}: ringattn needs {OLDEST} or newer")
    try:
        _check_masks()
        attention, masks = transformers.AttentionInterface, transformers.AttentionMaskInterface
    except (AttributeError, KeyError, NotImplementedError, TypeError) as error:
        raise ImportError(
            f"transformers is {version}, and its attention interface is not the one of 5.22 and 5.23 that "
            f"ringattn reads ({error}): use one of these"
        ) from error
    attention.register(NAME, attend)
    masks.register(NAME, mask_of)
    return NAME


def _check_masks() -> None:
    """Each mask function of transformers means what :func:`arguments` takes it for."""
    made, ids = transformers.masking_utils, torch.zeros(1, 1, dtype=torch.int64)
    packed = made.and_masks(made.packed_sequence_mask_function(ids), made.causal_mask_function)
    expected = [
        (made.causal_mask_function, {"causal": True}),
        (made.bidirectional_mask_function, {}),
        (made.sliding_window_causal_mask_function(4), {"causal": True, "window_size": (3, -1)}),
        (made.sliding_window_bidirectional_mask_function(4), {"window_size": (4, 4)}),
        (made.chunked_causal_mask_function(4, ids[0]), {"causal": True, "chunk_size": 4}),
        (packed, {"causal": True, "packed": ids}),
    ]
    for function, means in expected:
        if arguments(function) != means:
            raise TypeError(f"{function.__qualname__} reads as {arguments(function)}")


@contextmanager
def sharded(
    layout: LayoutLike,
    group: GroupLike = None,
    *,
    cu_seqlens: Iterable[int] | torch.Tensor | None = None,
    ring: Ring | None = None,
    backend: str = "auto",
) -> Iterator[None]:
    """Around a forward: the model's input is this rank's shard of a sequence. The backward may run outside of it.

    Args:
        layout: who holds which tokens, as in :func:`ringattn.ring_attention`.
        group: the ranks that share the sequence.
        cu_seqlens: boundaries of packed documents in the whole sequence; a list or a CPU tensor.
        ring, backend: as in :func:`ringattn.ring_attention`.

    Raises:
        ValueError: ``cu_seqlens`` are no boundaries.
        RuntimeError: several ranks, and the model never came to attention by "ringattn": each rank would have had its
            own shard alone.
    """
    boundaries = None if cu_seqlens is None else Documents(cu_seqlens).boundaries
    sharding = Sharding(layout, group, ring, boundaries, backend)
    token = _sharding.set(sharding)
    try:
        yield
    finally:
        _sharding.reset(token)
    if not sharding.calls and resolve_ring(ring, group, torch.device("cpu")).size > 1:
        raise RuntimeError(
            'no attention call inside sharded() was ringattn\'s: make the model with attn_implementation="ringattn"; '
            "a model whose code has an attention of its own cannot be sharded"
        )


def arguments(mask_function: Callable[..., Any]) -> dict[str, Any]:
    """What a mask function of transformers shows, as fields of :class:`Mask`; ``packed``: document ids that it saw.

    Raises:
        NotImplementedError: a function of somebody else, a union, or blocks of tokens that see each other.
    """
    name = getattr(mask_function, "__qualname__", repr(mask_function))
    if getattr(mask_function, "__module__", None) != transformers.masking_utils.__name__:
        name = f"{getattr(mask_function, '__module__', None)}.{name}"
    inside = inspect.getclosurevars(mask_function).nonlocals if inspect.isfunction(mask_function) else {}
    match name.removesuffix(".<locals>.inner_mask"):
        case "causal_mask_function":
            return {"causal": True}
        case "bidirectional_mask_function":
            return {}
        case "sliding_window_overlay":
            return {"window_size": (inside["sliding_window"] - 1, -1)}
        case "sliding_window_bidirectional_overlay":
            return {"window_size": (inside["sliding_window"], inside["sliding_window"])}
        case "chunked_overlay":  # its left padding is none, or the padding mask is refused
            return {"chunk_size": inside["chunk_size"]}
        case "packed_sequence_mask_function":
            return {"packed": inside["packed_sequence_mask"]}
        case "remap_positions_for_packed_sequence":
            return arguments(inside["mask_function"])
        case "and_masks.<locals>.and_mask":
            together: dict[str, Any] = {}
            for part in map(arguments, inside["mask_functions"]):
                for argument in together.keys() & part.keys() - {"causal"}:
                    raise NotImplementedError(f"a mask that has two of {argument}: {together} and {part}")
                together |= part
            return together
        case other:
            raise NotImplementedError(
                f"mask function {other}: ringattn takes causal and bidirectional masks, windows, chunks and packed "
                "documents; for another mask, sdpa on whole sequences"
            )


def mask_of(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    config: Any = None,
    device: torch.device | str = "cpu",
    **_: Any,  # batch size, dtype, and when sdpa may leave a mask out
) -> Mask:
    """The mask interface of transformers: all that a model says of a mask passes here.

    Raises:
        ValueError: padding; or packed ``position_ids`` of other documents than ``cu_seqlens``.
        NotImplementedError: queries behind a cache, a static cache, a mask that is no interval; with several ranks a
            config whose layers mix tokens outside of attention, or count positions by the shard.
    """
    if isinstance(q_offset, torch.Tensor):
        raise NotImplementedError("a static cache: pass use_cache=False, or generate with attn_implementation sdpa")
    if q_offset or kv_offset or kv_length != q_length:
        raise NotImplementedError(
            f"{kv_length} keys from {kv_offset} on for {q_length} queries from {q_offset} on: ringattn takes no "
            "queries behind a KV cache (use_cache=False, or generate with sdpa), no cross-attention, and an "
            "attention_mask of this rank's tokens alone"
        )
    if attention_mask is not None and not attention_mask.all():
        raise ValueError(
            f"attention_mask hides {int((~attention_mask).sum())} tokens as padding: pack the documents one after the "
            "other and pass cu_seqlens to sharded and shard_batch"
        )
    sharding, device = _sharding.get(Sharding()), torch.device(device)
    if sharding.of(device).size > 1:
        _check_token_by_token(config)
    shows = arguments(mask_function)
    packed = shows.pop("packed", None)
    if packed is not None:  # from position_ids that are not consecutive: a shard's, or documents'
        steps = sharding.positions(q_length, device).diff() != 1
        if not (packed.diff() == steps).all():
            raise ValueError(
                "position_ids of packed documents, or of another layout: pass the position_ids that shard_batch "
                "makes, and cu_seqlens to both sharded and shard_batch"
            )
    return Mask(sharding, **shows)


def _check_token_by_token(config: Any) -> None:
    """Refuse what would see a shard as if it were the sequence: NotImplementedError."""
    others = {*(getattr(config, "layer_types", None) or ())} - {*ATTENTION_LAYERS}
    if others:
        raise NotImplementedError(
            f"layers of type {sorted(others)} in {type(config).__name__}: their state goes from token to token outside "
            f"of attention; a sequence can be sharded where all are of {', '.join(ATTENTION_LAYERS)}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    types = {each["rope_type"] for each in (rope, *rope.values()) if isinstance(each, dict) and "rope_type" in each}
    if types & {"dynamic", "longrope"}:
        raise NotImplementedError(
            f"rope_type {sorted(types)} in {type(config).__name__}: its frequencies depend on the last position, which "
            "is another one on each rank; yarn, linear and llama3 do not"
        )
    if getattr(config, "attn_temperature_tuning", False):
        raise NotImplementedError(
            f"attn_temperature_tuning in {type(config).__name__}: it counts positions from the start of the shard"
        )


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    position_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention interface of transformers: ``[B, H, S, D]`` in, ``[B, S, H, D]`` out, and no weights.

    Raises:
        ValueError: a mask that is a tensor, or positions that are not this rank's.
        NotImplementedError: an argument that ``ring_attention`` has no equal of.
    """
    for name, given in kwargs.items():
        if name not in HARMLESS and given is not None and given is not False:
            raise NotImplementedError(
                f"{name} is {type(given).__name__} in a call of {type(module).__name__}: ringattn has nothing for it"
                + (" and makes no weights; use attn_implementation eager" if name == "output_attentions" else "")
            )
    if getattr(getattr(module, "config", None), "output_attentions", False):
        raise NotImplementedError("output_attentions in the config: ringattn makes no weights; use eager")
    if isinstance(attention_mask, torch.Tensor):
        raise ValueError(
            f"attention_mask is a tensor {list(attention_mask.shape)}: ringattn takes [batch, tokens] of ones, or "
            "none; pack documents with cu_seqlens"
        )
    tokens = query.shape[2]
    if attention_mask is None:  # the model makes no mask: what holds for sdpa
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        window = (-1, -1) if sliding_window is None else (sliding_window - 1, -1 if causal else sliding_window - 1)
        attention_mask = Mask(_sharding.get(Sharding()), causal, window)
    elif sliding_window is not None and attention_mask.window_size == (-1, -1):
        raise ValueError(f"sliding_window is {sliding_window} in {type(module).__name__}, and its mask has no window")
    if key.shape[2] != tokens:
        raise NotImplementedError(
            f"{key.shape[2]} keys for {tokens} queries in {type(module).__name__}: ringattn takes no KV cache "
            "(use_cache=False) and no cross-attention"
        )
    sharding = attention_mask.sharding
    ring = sharding.of(query.device)
    if position_ids is not None:
        attention_mask.check_positions(position_ids, tokens)
    total = sharding.layout.seqlen if isinstance(sharding.layout, Layout) else tokens * ring.size
    sharding.calls.append(type(module).__name__)
    out = ring_attention(
        *(x.transpose(1, 2) for x in (query, key, value)),
        layout=sharding.layout,
        ring=ring,
        causal=attention_mask.causal,
        window_size=attention_mask.window_size,
        softmax_scale=scaling,
        softcap=softcap or 0.0,
        learnable_sink=s_aux,
        dropout_p=dropout,
        cu_seqlens=attention_mask.boundaries(total),
        backend=sharding.backend,
    )
    return out, None


def shard_batch(
    batch: Mapping[str, Any],
    layout: LayoutLike,
    group: GroupLike = None,
    *,
    cu_seqlens: Iterable[int] | torch.Tensor | None = None,
) -> dict[str, Any]:
    """This rank's part of a batch of whole sequences, the same on every rank of the group, as arguments of a model.

    Args:
        batch: ``input_ids [B, S]`` or ``inputs_embeds [B, S, E]``; ``labels [B, S]`` as for transformers, not shifted,
            or ``shift_labels``; an ``attention_mask`` of ones alone; ``num_items_in_batch``, where it counts more than
            this batch, as over accumulated ones.
        layout: as for :func:`sharded`.
        group: the ranks that share the sequence.
        cu_seqlens: boundaries of packed documents. A document's first token is nobody's label.

    Returns:
        This rank's ``input_ids`` (or ``inputs_embeds``) and ``position_ids [1, s]``, within documents. With labels:
        ``shift_labels``, shifted before the split, which transformers' losses take as they are;
        ``num_items_in_batch``, the labels of all ranks, so that the losses of the ranks sum to the mean over the whole
        batch; and ``labels`` of -100 alone, which ask for a loss and, in a model that would shift them once more,
        give none.

    Raises:
        ValueError: padding, or an entry that it does not know how to shard.
    """
    known = {"input_ids", "inputs_embeds", "labels", "shift_labels", "attention_mask", "num_items_in_batch"}
    if unknown := batch.keys() - known:
        raise ValueError(f"batch has {sorted(unknown)}: shard_batch takes {', '.join(sorted(known))}")
    padding = batch.get("attention_mask")
    if padding is not None and (padding.dim() != 2 or not padding.all()):
        raise ValueError(
            f"attention_mask is {list(padding.shape)} and not ones alone: pack the documents one after the other and "
            "pass cu_seqlens to sharded and shard_batch"
        )
    names = [name for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None]
    if not names:
        raise ValueError("batch has neither input_ids nor inputs_embeds")
    tokens, device = batch[names[0]].shape[1], batch[names[0]].device
    boundaries = None if cu_seqlens is None else Documents(cu_seqlens).boundaries
    if boundaries and boundaries[-1] != tokens:
        raise ValueError(f"cu_seqlens ends at {boundaries[-1]}: it must end at {tokens}, the number of tokens")
    ring = resolve_ring(None, group, device)
    whole = resolve_layout(layout, tokens, ring.size)
    made = {name: whole.shard(batch[name], ring.rank) for name in names}
    where = Sharding(whole, group, cu_seqlens=boundaries).positions(whole.lengths[ring.rank], device)
    made["position_ids"] = where[None]
    shifted = batch.get("shift_labels")
    if shifted is None and batch.get("labels") is not None:
        labels = batch["labels"].clone()
        labels[:, list((boundaries or (0,))[:-1] or (0,))] = IGNORE_INDEX
        shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    if shifted is not None:
        made["shift_labels"] = whole.shard(shifted, ring.rank)
        made["labels"] = torch.full_like(made["shift_labels"], IGNORE_INDEX)
        count = batch.get("num_items_in_batch")
        made["num_items_in_batch"] = (shifted != IGNORE_INDEX).sum() if count is None else count
    return made
