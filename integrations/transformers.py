"""Hugging Face transformers on sequence shards, with ``attn_implementation="ringattn"``.

::

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation=register())
    batch = shard_batch(batch, "zigzag", group)
    with sharded(model, "zigzag", group):
        loss = model(**batch).loss  # this rank's part; the loss of the batch is the sum over the ranks
    loss.backward()  # the gradients are parts, too; sum them over the group

Embedding, norms, feed-forward and loss are computed per token, so only attention needs the other ranks' tokens.
Windows, chunks and packed documents are read from the model's mask functions in transformers. Sinks, softcap, scale and
dropout are arguments of each attention call.

Each forward checks once per mask type that ``attention_mask`` hides nothing and that positions and packed documents
match the layout. Each check synchronises a GPU, so CUDA graphs cannot capture a forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import transformers
from packaging.version import Version

from .. import Documents, Layout, LayoutLike, PrefixTree, Ring, Session, ring_attention
from ..comm import GroupLike, resolve_group

NAME = "ringattn"
MIN_VERSION = Version("5.22")
IGNORE_INDEX = -100  # transformers' losses skip this label

ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
"""Supported ``config.layer_types``: the layers that mix tokens in attention only."""

LEARNED_POSITIONS = ("biogpt", "gpt2", "opt")
"""``config.model_type`` of supported models without rotary embedding; their ``position_ids`` count from 0."""

NO_MASK_TENSOR = 'ringattn does not build mask tensors (use "eager" or "sdpa" on whole sequences)'

IGNORED_KEYWORDS = (
    "cache_position", "deterministic", "layer_idx", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "past_key_values", "position_embeddings", "return_dict", "shift_labels", "use_cache",
)  # fmt: skip
"""Keyword arguments of attention that do not change the result; a cache has already returned its keys and values."""

IGNORED_MASK_KEYWORDS = (
    "allow_is_bidirectional_skip", "allow_is_causal_skip", "allow_torch_fix", "batch_size", "config", "dtype",
    "local_size", "use_vmap",
)  # fmt: skip
"""Keyword arguments of mask functions that matter for dense mask tensors only."""


@dataclass
class Sharding:
    """Layout, ranks and documents that :func:`sharded` sets for the calls inside it; the default is a single rank."""

    layout: LayoutLike = None
    group: GroupLike = None
    ring: Ring | None = None
    cu_seqlens: tuple[int, ...] | None = None
    islands: tuple[tuple[int, int], ...] = ()
    tree: PrefixTree | None = None
    tokens: int = 0  # tokens of this rank in the last attention call, if there are several ranks
    has_islands: bool = False  # True if a mask of the model has shown images to themselves

    def resolve(self, tokens: int, device: torch.device) -> tuple[Session, Layout]:
        """Return the session, and the layout of a sequence of which this rank has ``tokens``.

        Raises:
            ValueError: There is no layout for several ranks, or the layout gives this rank another number of tokens.
        """
        session = _session(self.group, device, self.ring)
        if self.layout is None and session.size > 1:
            raise ValueError(
                f'layout is None with {session.size} ranks. Run the model in `with sharded(model, "zigzag", group):` '
                "with the group that shares a sequence, and pass the batch from shard_batch to the model."
            )
        total = self.layout.seqlen if isinstance(self.layout, Layout) else tokens * session.size
        layout = session.resolve_layout(self.layout, total)
        expected = layout.lengths[session.rank]
        if expected != tokens:
            raise ValueError(f"the model got {tokens} tokens, but the layout has {expected} for rank {session.rank}")
        if self.tree is not None and self.tree.tokens != total:
            raise ValueError(f"tree has {self.tree.tokens} tokens, but the layout has {total}")
        return session, layout

    def refusal(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a context for an error, which tells the other ranks why this rank does not join the call."""
        return nullcontext() if self.layout is None else _session(self.group, device, self.ring).call()

    def positions(self, tokens: int, device: torch.device) -> torch.Tensor:
        """Return the positions of this rank's tokens within their documents or on their paths, int64 ``[S]``."""
        session, layout = self.resolve(tokens, device)
        where = layout.positions(session.rank)
        if self.tree is not None:
            return self.tree.positions[where].to(device)
        start = 0 if self.cu_seqlens is None else Documents(self.cu_seqlens).document_bounds(where)[0]
        return (where - start).to(device)

    def check_islands(self, blocks: torch.Tensor, longest: int | None) -> None:
        """Raise unless the tokens that a model puts into blocks, ``blocks[b, s] >= 0``, are those of the islands.

        Raises:
            ValueError: A token is in a block and in no island, or the other way round.
            NotImplementedError: An island has more than ``longest`` tokens, the window that does not limit it.
        """
        session, layout = self.resolve(blocks.shape[1], blocks.device)
        where, self.has_islands = layout.positions(session.rank), True
        inside = torch.zeros(len(where), dtype=torch.bool)
        for begin, end in self.islands:
            inside |= (begin <= where) & (where < end)
        if len(differ := ((blocks >= 0).cpu() != inside).nonzero()):
            position = int(where[differ[0, 1]])
            with self.refusal(blocks.device):
                raise ValueError(
                    f"islands and the batch disagree on the token at position {position}: only one has it in an image. "
                    "Pass the ranges of all image tokens to sharded."
                )
        if longest is not None and any(end - begin > longest for begin, end in self.islands):
            raise NotImplementedError(
                f"an island is longer than {longest}, the window of a mask that does not limit islands"
            )


@dataclass
class MaskSpec:
    """Mask as arguments of ``ring_attention``, which a model passes to attention in place of a mask tensor.

    The mask carries the sharding, because activation checkpointing may recompute a layer after ``sharded`` has ended,
    or in an autograd thread that never entered ``sharded``.
    """

    sharding: Sharding
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    chunk_size: int | None = None
    has_islands: bool = False
    positions_checked: bool = False
    checked_config: Any = None  # the last config that passed `_check_config`

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"this model uses the attribute {name} of its mask, but {NO_MASK_TENSOR}")

    def __radd__(self, scores: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError(f"this model adds its mask to the scores, but {NO_MASK_TENSOR}")

    def check_positions(self, position_ids: torch.Tensor, tokens: int) -> None:
        """Raise ValueError if ``position_ids`` are not this rank's positions, which rotary embedding needs."""
        expected = self.sharding.positions(tokens, position_ids.device)
        differ = position_ids != expected
        if differ.any():
            row, first = differ.nonzero()[0].tolist()
            with self.sharding.refusal(position_ids.device):
                raise ValueError(
                    f"position_ids from token {first} are {position_ids[row, first : first + 4].tolist()}. They "
                    f"must be {expected[first : first + 4].tolist()}. Pass the batch from shard_batch, and for "
                    "documents the same cu_seqlens to sharded and shard_batch."
                )
        self.positions_checked = True

    def boundaries(self, seqlen: int) -> Iterable[int] | None:
        """Return the boundaries of documents, and of the chunks within documents."""
        documents = self.sharding.cu_seqlens
        if self.chunk_size is None:
            return documents
        edges = pairwise(documents or (0, seqlen))
        return [*(chunk for start, end in edges for chunk in range(start, end, self.chunk_size)), seqlen]


_sharding: ContextVar[Sharding] = ContextVar("ringattn_sharding")
_checked_models: WeakSet[torch.nn.Module] = WeakSet()  # models that have the output hook


@contextmanager
def sharded(
    model: torch.nn.Module,
    layout: LayoutLike,
    group: GroupLike = None,
    *,
    cu_seqlens: Iterable[int] | torch.Tensor | None = None,
    islands: Iterable[tuple[int, int]] = (),
    tree: PrefixTree | None = None,
    ring: Ring | None = None,
) -> Iterator[None]:
    """Run a model's forward on this rank's shard of a sequence; the backward may run outside the context.

    With several ranks the forward raises NotImplementedError for outputs that need the tokens of all ranks. Examples
    are a loss without ``shift_labels``, ``logits_to_keep``, a pooled output and the load-balancing loss of experts.

    Args:
        model: Model of transformers, or a module that contains one. A forward hook that checks the outputs remains.
        layout: Layout of the sequence, as in :func:`ringattn.ring_attention`.
        group: The ranks that share the sequence.
        cu_seqlens: Boundaries of documents packed into the whole sequence, as a list or a CPU tensor.
        islands: Ranges of positions of image tokens that see each other, as in :func:`ringattn.ring_attention`, for
            models that mark image tokens with ``token_type_ids``.
        tree: Prefix tree that the sequence holds. Windows of the model count positions on its paths.
        ring: Ring to use in place of the shared ring of ``group``.

    Raises:
        ValueError: ``cu_seqlens`` are not boundaries.
        RuntimeError: At the end, if no attention has used ringattn with several ranks, or no mask has ``islands``.
    """
    boundaries = None if cu_seqlens is None else Documents(cu_seqlens).boundaries
    sharding = Sharding(layout, group, ring, boundaries, tuple(islands), tree)
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel) and module not in _checked_models:
            # never remove the hook: a change of hooks recompiles a compiled model
            module.register_forward_hook(_check_output, with_kwargs=True)
            _checked_models.add(module)
    token = _sharding.set(sharding)
    try:
        yield
    finally:
        _sharding.reset(token)
    if not sharding.tokens and _session(group, None, ring).size > 1:
        raise RuntimeError(
            "no attention inside sharded() used ringattn. Load the model with attn_implementation="
            '"ringattn", or use a model that supports this argument.'
        )
    if sharding.islands and not sharding.has_islands:
        raise RuntimeError(
            "islands are given, but the model has made no mask with islands. Leave them out, or pass the entry of the "
            "batch that marks image tokens, such as token_type_ids."
        )


def _check_output(module: torch.nn.Module, args: Any, inputs: dict[str, Any], output: Any) -> None:
    """Raise if the output of a model inside ``sharded`` needs the tokens of all ranks (a forward hook)."""
    tokens, model = _sharding.get(Sharding()).tokens, type(module).__name__
    if not tokens or getattr(module, "main_input_name", "") != "input_ids":
        return
    named = output if isinstance(output, Mapping) else {"return_dict=False": output}
    local = {*named} & {"aux_loss", "pooler_output", "return_dict=False"}
    if "loss" in named and inputs.get("shift_labels") is None:
        local.add("loss without shift_labels")
    logits = named.get("logits")
    if logits is not None and (logits.dim() < 3 or logits.shape[1] != tokens):
        local.add(f"logits {list(logits.shape)}")
    if local:
        raise NotImplementedError(
            f"{', '.join(sorted(local))} of {model} would cover this rank's tokens only. Pass labels to shard_batch, "
            "leave out logits_to_keep and output_router_logits, and pool last_hidden_state over the ranks."
        )


def register() -> str:
    """Register the attention and mask interface "ringattn" with transformers, and return that name.

    Repeated calls have no further effect.

    Raises:
        ImportError: transformers is older than 5.22, or newer with different mask functions.
    """
    version = transformers.__version__
    if Version(version) < MIN_VERSION:
        raise ImportError(f"transformers is {version}: ringattn needs {MIN_VERSION} or newer")
    try:
        _check_masks()
        transformers.AttentionInterface.register(NAME, attention_interface)
        transformers.AttentionMaskInterface.register(NAME, mask_interface)
    except (AttributeError, KeyError, NotImplementedError, TypeError) as error:
        raise ImportError(
            f"transformers is {version}, whose mask functions ringattn cannot read ({error}). Install 5.22 or 5.23."
        ) from error
    return NAME


def _check_masks() -> None:
    """Raise TypeError if :func:`parse_mask_function` misreads a mask function of transformers."""
    masks, ids = transformers.masking_utils, torch.zeros(1, 1, dtype=torch.int64)
    packed = masks.packed_sequence_mask_function(ids)
    for function, fields in (
        (masks.causal_mask_function, {"causal": True}),
        (masks.bidirectional_mask_function, {}),
        (masks.sliding_window_causal_mask_function(4), {"causal": True, "window_size": (3, -1)}),
        (masks.sliding_window_bidirectional_mask_function(4), {"window_size": (4, 4)}),
        (masks.chunked_causal_mask_function(4, ids[0]), {"causal": True, "chunk_size": 4}),
        (masks.and_masks(masks.causal_mask_function, packed), {"causal": True, "packed": ids}),
        (masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(ids)), {"causal": True, "blocks": ids}),
    ):
        if parse_mask_function(function) != fields:
            raise TypeError(f"{function.__qualname__} is {parse_mask_function(function)}")


def parse_mask_function(mask_function: Callable[..., Any]) -> dict[str, Any]:
    """Convert a mask function of transformers to fields of :class:`MaskSpec`, and to ``packed`` document ids."""
    name = getattr(mask_function, "__qualname__", repr(mask_function))
    is_builtin = inspect.isfunction(mask_function) and mask_function.__module__ == transformers.masking_utils.__name__
    closure = inspect.getclosurevars(mask_function).nonlocals if is_builtin else {}
    match name.removesuffix(".<locals>.inner_mask") if is_builtin else None:
        case "causal_mask_function":
            return {"causal": True}
        case "bidirectional_mask_function":
            return {}
        case "sliding_window_overlay":
            return {"window_size": (closure["sliding_window"] - 1, -1)}
        case "sliding_window_bidirectional_overlay":
            return {"window_size": (closure["sliding_window"], closure["sliding_window"])}
        case "chunked_overlay":  # its left padding is 0, because `mask_interface` rejects padding
            return {"chunk_size": closure["chunk_size"]}
        case "packed_sequence_mask_function":
            return {"packed": closure["packed_sequence_mask"]}
        case "blockwise_overlay":
            return {"blocks": closure["block_sequence_ids"]}
        case "remap_positions_for_packed_sequence":
            return parse_mask_function(closure["mask_function"])
        case "and_masks.<locals>.and_mask":
            fields: dict[str, Any] = {}
            for part in map(parse_mask_function, closure["mask_functions"]):
                if repeated := fields.keys() & part.keys() - {"causal"}:
                    raise NotImplementedError(f"the mask sets {sorted(repeated)} twice, in {fields} and in {part}")
                fields |= part
            return fields
        case "or_masks.<locals>.or_mask":
            match [*map(parse_mask_function, closure["mask_functions"])]:
                case [{"causal": True, "window_size": (left, -1)} as causal, {"blocks": blocks}]:
                    return causal | {"blocks": blocks, "longest_island": left + 1}  # the window does not limit islands
                case [{"causal": True} as causal, {"blocks": blocks}] if "chunk_size" not in causal:
                    return causal | {"blocks": blocks}
    raise NotImplementedError(
        f"mask function {name} of {getattr(mask_function, '__module__', None)} is not supported. ringattn supports "
        'causal and full masks, windows, chunks and packed documents; for others use "sdpa" on whole sequences.'
    )


def mask_interface(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> MaskSpec:
    """Return the mask of a model's attention as a :class:`MaskSpec` (transformers' mask interface).

    Raises:
        NotImplementedError: The mask is not causal, full, windowed, chunked or packed, or there is a cache.
        ValueError: ``attention_mask`` hides tokens, or ``position_ids`` do not match the layout.
    """
    if refused := kwargs.keys() - {*IGNORED_MASK_KEYWORDS}:
        raise NotImplementedError(
            f'ringattn does not support masks with {", ".join(sorted(refused))}; use "eager" or "sdpa"'
        )
    if isinstance(q_offset, torch.Tensor) or q_offset or kv_offset or kv_length != q_length:
        raise NotImplementedError(
            f"the mask has {q_length} queries from position {q_offset} and {kv_length} keys from {kv_offset}. Both "
            "must be this rank's tokens, so attention_mask must cover only them. ringattn supports neither a cache "
            '(pass use_cache=False, or generate with "sdpa") nor cross-attention.'
        )
    sharding, device = _sharding.get(Sharding()), torch.device(device)
    if attention_mask is not None and not attention_mask.all():
        with sharding.refusal(device):
            raise ValueError(
                f"attention_mask hides {int((attention_mask == 0).sum())} tokens as padding. Pack the documents "
                "without padding and pass cu_seqlens to sharded and shard_batch."
            )
    fields = parse_mask_function(mask_function)
    # transformers numbers documents wherever position_ids are not consecutive, which also happens within a shard
    packed, blocks, longest = (fields.pop(name, None) for name in ("packed", "blocks", "longest_island"))
    if packed is not None and not (packed.diff() == (sharding.positions(q_length, device).diff() != 1)).all():
        with sharding.refusal(device):
            raise ValueError(
                "position_ids do not match the layout and cu_seqlens of sharded. Pass the batch from shard_batch, and "
                "the same layout and cu_seqlens to sharded and shard_batch."
            )
    if blocks is not None:
        sharding.check_islands(blocks, longest)
    return MaskSpec(sharding, has_islands=blocks is not None, **fields)


def _check_config(config: Any) -> None:
    """Raise NotImplementedError if parts of the model other than attention need the whole sequence."""
    config = config.get_text_config(decoder=True) if isinstance(config, transformers.PreTrainedConfig) else config
    kind, rope = getattr(config, "model_type", None), getattr(config, "rope_parameters", None) or {}
    rope_types = {entry.get("rope_type") for entry in (rope, *rope.values()) if isinstance(entry, dict)}
    layers = {*(getattr(config, "layer_types", None) or ())} - {*ATTENTION_LAYERS}
    reasons = {
        f"positions. Use rotary embedding or one of {', '.join(LEARNED_POSITIONS)}; other models may count tokens "
        "from the start of the shard.": not rope and kind not in LEARNED_POSITIONS,
        f"layer_types {sorted(layers)}, which mix tokens outside attention, but only within a shard": layers,
        "rope_type dynamic or longrope, whose frequencies depend on the last position, which differs between ranks. "
        "Use yarn, linear or llama3.": rope_types & {"dynamic", "longrope"},
        "attn_temperature_tuning, which counts positions from the start of the shard": getattr(
            config, "attn_temperature_tuning", False
        ),
    }
    for reason in filter(reasons.get, reasons):
        raise NotImplementedError(f"{kind} is not supported over several ranks because of its {reason}")


def attention_interface(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: MaskSpec | None,
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
    """Compute attention of ``[B, H, S, D]``, and return ``[B, S, H, D]`` and None (transformers' interface)."""
    model = type(module).__name__
    refused = {name for name, value in kwargs.items() if value is not None and value is not False} - {*IGNORED_KEYWORDS}
    if getattr(getattr(module, "config", None), "output_attentions", False):
        refused.add("output_attentions")
    if refused:
        raise NotImplementedError(
            f'ringattn does not support {", ".join(sorted(refused))} in {model}; use "eager" or "sdpa"'
        )
    if attention_mask is None:  # the model builds no mask; do as transformers' sdpa does
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        attention_mask = MaskSpec(_sharding.get(Sharding()), causal)
    if not isinstance(attention_mask, MaskSpec):
        raise ValueError(
            f"attention_mask in {model} is a {type(attention_mask).__name__} of shape {list(attention_mask.shape)}: it "
            "must be None, or all ones of shape [batch, tokens]. Pass packed documents as cu_seqlens."
        )
    if sliding_window is not None and attention_mask.window_size == (-1, -1):
        raise ValueError(f"sliding_window is {sliding_window} in {model}, but the model's mask has no window")
    tokens, sharding = query.shape[2], attention_mask.sharding
    if key.shape[2] != tokens:
        raise NotImplementedError(
            f"{key.shape[2]} keys for {tokens} queries in {model}: ringattn supports neither cache nor cross-attention"
        )
    session, layout = sharding.resolve(tokens, query.device)
    config = getattr(module, "config", None)
    if session.size > 1 and config is not attention_mask.checked_config:
        _check_config(config)
        attention_mask.checked_config = config
    if position_ids is not None and position_ids.dim() == 2 and not attention_mask.positions_checked:
        attention_mask.check_positions(position_ids, tokens)
    elif session.size > 1 and not attention_mask.positions_checked:
        raise NotImplementedError(
            f"{model} does not pass position_ids [B, S] to attention. Over several ranks ringattn needs them, because "
            "a model may otherwise count from the start of the shard."
        )
    sharding.tokens = tokens if session.size > 1 else 0
    if sharding.tree is not None and (not attention_mask.causal or attention_mask.chunk_size is not None):
        raise NotImplementedError(f"tree is given, but the mask of {model} is not causal or has chunks")
    out = ring_attention(
        *(x.transpose(1, 2) for x in (query, key, value)),
        layout=layout,
        ring=session.ring,
        causal=attention_mask.causal,
        window_size=attention_mask.window_size,
        softmax_scale=scaling,
        softcap=softcap or 0.0,
        learnable_sink=s_aux,
        dropout_p=dropout,
        cu_seqlens=attention_mask.boundaries(layout.seqlen),
        islands=sharding.islands if attention_mask.has_islands else None,
        intervals=None if sharding.tree is None else sharding.tree.intervals,
    )
    return out, None


PACKING_KEYS = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Entries that give the documents of a padding-free batch, for example TRL's."""

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
"""Entries that mark image tokens, for :func:`sharded` with islands."""

SHARDED_KEYS = ("input_ids", "inputs_embeds", "labels", "shift_labels", *TOKEN_TYPES)
"""Entries ``[B, S, ...]`` of a batch that :func:`shard_batch` splits."""

BATCH_KEYS = frozenset({*SHARDED_KEYS, *PACKING_KEYS, "attention_mask", "num_items_in_batch"})
"""Entries that :func:`shard_batch` accepts."""

TENSOR_DIMS = dict.fromkeys(
    ("attention_mask", "input_ids", "labels", "shift_labels", "position_ids", "seq_idx", *TOKEN_TYPES), 2
)
TENSOR_DIMS["inputs_embeds"] = 3
"""Entries that are tensors, with their number of dimensions."""

CHECK_EVERY = 100  # compare batches of known shapes in every 100th call of shard_batch
MAX_SHAPES = 4096  # shapes to remember


class ShardedBatch(dict[str, Any]):
    """This rank's part of a batch, as keyword arguments of a model.

    Attributes:
        cu_seqlens: Boundaries of the documents packed into the whole sequence, or None for one document. Pass them to
            :func:`sharded`, too.
    """

    cu_seqlens: tuple[int, ...] | None = None


@dataclass
class BatchHistory:
    """Calls of :func:`shard_batch` on one ring; equal on all ranks, because all ranks make the same calls."""

    calls: int = 0
    compared_shapes: set[str] = field(default_factory=set)


_histories: WeakKeyDictionary[Ring, BatchHistory] = WeakKeyDictionary()


def shard_batch(
    batch: Mapping[str, Any],
    layout: LayoutLike,
    group: GroupLike = None,
    *,
    cu_seqlens: Iterable[int] | torch.Tensor | None = None,
    tree: PrefixTree | None = None,
    check: bool | None = None,
) -> ShardedBatch:
    """Return this rank's part of a batch of whole sequences, which is equal on all ranks.

    Every rank of the group must call the function. The ranks wait for each other, compare shapes and documents, and
    raise if they differ. ``check`` decides when they also compare checksums of the contents.

    Args:
        batch: ``input_ids [B, S]`` or ``inputs_embeds [B, S, E]``. Optional are unshifted ``labels [B, S]`` or
            ``shift_labels``, an ``attention_mask`` of ones, and ``num_items_in_batch`` if it covers more than this
            batch. Padding-free collators may add the packed documents as ``position_ids [B, S]`` that count from 0 in
            each document, ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``seq_idx``, ``max_length_q`` and ``max_length_k``.
        layout: Layout, as for :func:`sharded`.
        group: The ranks that share the sequence.
        cu_seqlens: Boundaries of packed documents. The first token of a document is never a label.
        tree: Prefix tree that the batch holds, without labels: take the loss from ``tree.next_tokens``.
        check: None compares checksums for new shapes and in every 100th call, True in every call. False compares
            nothing and does not wait for other ranks; worker processes of a data loader need False.

    Returns:
        This rank's ids, and ``position_ids [1, s]`` within documents. The attribute ``cu_seqlens`` has the boundaries
        of packed documents for :func:`sharded`. With labels there are also ``shift_labels``, which are shifted before
        the split, and ``num_items_in_batch``, the number of labels of all ranks that divides the loss. ``labels`` are
        all -100. They make the model compute a loss, and a loss that ignores ``shift_labels`` has no labels left.

    Raises:
        ValueError: The batch has padding, or an argument or entry has a wrong value. If the batches differ between
            ranks, every rank raises.
        TransportError: A rank does not answer in time.
    """
    if check is not None and not isinstance(check, bool):
        raise ValueError(f"check is {check!r}: it must be True, False or None")
    entries = map(batch.get, SHARDED_KEYS) if isinstance(batch, Mapping) else ()
    session = _session(group, next((x.device for x in entries if isinstance(x, torch.Tensor)), None))
    comparing = session.size > 1 and check is not False
    if comparing and torch.utils.data.get_worker_info() is not None:  # a worker shares its parent's connections
        raise ValueError(f"check is {check} in a worker process of a data loader: it must be False there")
    history = _histories.setdefault(session.ring, BatchHistory())
    if comparing:
        history.calls += 1  # before the checks, so that a rank that rejects its batch still counts the call
    with session.call() if comparing else nullcontext():
        documents = _check_batch(batch, cu_seqlens)
        layout = session.resolve_layout(layout, documents.seqlen)
        if tree is not None and {"labels", "shift_labels"} & batch.keys():
            raise ValueError("labels cannot be used with tree, because a token at a branch has several next tokens")
        if comparing:
            _compare_batches(session, history, batch, layout, documents, bool(check), tree)
    return _cut(batch, layout, session, documents, tree)


def _session(group: GroupLike, device: torch.device | None, ring: Ring | None = None) -> Session:
    """Return the session of one ring, or raise ValueError for a mesh of two dimensions."""
    return Session(resolve_group(group) if ring is None else group, device=device, ring=ring)


def _check_batch(batch: Mapping[str, Any], cu_seqlens: Iterable[int] | torch.Tensor | None) -> Documents:
    """Return the documents of a batch, or raise ValueError if the batch cannot be sharded."""
    if not isinstance(batch, Mapping):
        raise ValueError(f"batch is {type(batch).__name__}: it must be a dict of tensors")
    for name, dims in TENSOR_DIMS.items():
        x = batch.get(name)
        if x is not None and not (isinstance(x, torch.Tensor) and x.dim() == dims):
            got = f"a tensor of shape {list(x.shape)}" if isinstance(x, torch.Tensor) else f"{x!r:.60}"
            raise ValueError(f"{name} is {got}: it must be a tensor with {dims} dimensions")
    for name in ("num_items_in_batch", "max_length_q", "max_length_k"):
        number = batch.get(name)
        is_number = isinstance(number, int) or (isinstance(number, torch.Tensor) and number.numel() == 1)
        if number is not None and not is_number:
            raise ValueError(f"{name} is {number!r:.60}: it must be an integer")
    if unknown := batch.keys() - BATCH_KEYS:
        raise ValueError(f"batch has {', '.join(sorted(unknown))}: it may contain only {', '.join(sorted(BATCH_KEYS))}")
    padding = batch.get("attention_mask")
    if padding is not None and not padding.all():
        raise ValueError(
            f"attention_mask of shape {list(padding.shape)} hides tokens as padding: it must be all ones. Pack the "
            "documents without padding and pass cu_seqlens to sharded and shard_batch."
        )
    inputs = {name: batch[name] for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None}
    if len(inputs) != 1:
        raise ValueError(
            f"batch has {' and '.join(inputs) or 'no input'}: it must have either input_ids or inputs_embeds"
        )
    ((name, whole),) = inputs.items()
    for other in ("labels", "shift_labels", *TOKEN_TYPES):
        if (labels := batch.get(other)) is not None and labels.shape != whole.shape[:2]:
            raise ValueError(
                f"{other} has shape {list(labels.shape)}: it must be {list(whole.shape[:2])}, like the tokens of {name}"
            )
    return _find_documents(batch, whole.shape[1], cu_seqlens)


def _find_documents(
    batch: Mapping[str, Any], tokens: int, cu_seqlens: Iterable[int] | torch.Tensor | None
) -> Documents:
    """Return the documents that ``cu_seqlens`` and the entries of a padding-free batch agree on."""
    given: dict[str, tuple[int, ...]] = {}
    if cu_seqlens is not None:
        given["cu_seqlens"] = Documents(cu_seqlens).boundaries
    if (positions := batch.get("position_ids")) is not None:
        given["position_ids"] = _boundaries_from_positions(positions, tokens)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if (boundaries := batch.get(name)) is not None:
            given[name] = Documents(torch.as_tensor(boundaries).tolist(), name).boundaries
    if (index := batch.get("seq_idx")) is not None:
        if index.shape != (1, tokens):
            raise ValueError(f"seq_idx has shape {list(index.shape)}: it must be [1, {tokens}]")
        given["seq_idx"] = (0, *(index[0].diff().nonzero()[:, 0] + 1).tolist(), tokens)
    for name, boundaries in given.items():
        if boundaries[-1] != tokens:
            raise ValueError(f"{name} ends at {boundaries[-1]}: it must end at {tokens}, the number of tokens")
    first, boundaries = next(iter(given.items()), ("", (0, tokens)))
    for name, others in given.items():
        if differ := {*boundaries} ^ {*others}:
            here, there = (name, first) if min(differ) in others else (first, name)
            raise ValueError(f"{here} begins a document at token {min(differ)}, but {there} does not; they must agree")
    longest = max((end - start for start, end in pairwise(boundaries)), default=0)
    for name in ("max_length_q", "max_length_k"):
        if (most := batch.get(name)) is not None and int(most) < longest:
            raise ValueError(
                f"{name} is {int(most)}: it must be at least {longest}, the length of the longest document"
            )
    return Documents(boundaries)


def _boundaries_from_positions(position_ids: torch.Tensor, tokens: int) -> tuple[int, ...]:
    """Return the boundaries of the documents, in each of which ``position_ids`` must count from 0, in every row."""
    if position_ids.dim() != 2 or position_ids.shape[1] != tokens or not len(position_ids):
        raise ValueError(f"position_ids has shape {list(position_ids.shape)}: it must be [batch, {tokens}]")
    rows = position_ids.cpu()
    boundaries = (0, *((rows[0, 1:] == 0).nonzero()[:, 0] + 1).tolist(), tokens)
    expected = torch.arange(tokens) - Documents(boundaries).document_bounds(torch.arange(tokens))[0]
    if (differ := rows != expected).any():
        row, token = differ.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids[{row}, {token}] is {int(rows[row, token])}: it must be {int(expected[token])}. "
            "position_ids must count from 0 in every document, with the same documents in every row."
        )
    return boundaries


def _compare_batches(
    session: Session,
    history: BatchHistory,
    batch: Mapping[str, Any],
    layout: Layout,
    documents: Documents,
    always: bool,
    tree: PrefixTree | None,
) -> None:
    """Raise ValueError on every rank if the ranks' batches differ in layout, shapes, documents or, if due, contents.

    Contents are due for a new shape, in every 100th call, and in every call with ``always``.
    """
    tensors = {name: batch[name] for name in SHARDED_KEYS if batch.get(name) is not None}
    # list missing entries, too, so that all ranks report the same first difference
    shapes = {f"the shape of {name}": None for name in SHARDED_KEYS} | {
        f"the shape of {name}": (list(x.shape), x.dtype) for name, x in tensors.items()
    }
    is_due = always or repr(shapes) not in history.compared_shapes or history.calls % CHECK_EVERY == 0
    contents: dict[str, object] = {"cu_seqlens": documents, "tree": tree and tree.intervals}
    if is_due:
        sums = torch.stack([checksum(x).to(session.device) for x in tensors.values()]).tolist()
        contents |= {f"the checksum of {name}": total for name, total in zip(tensors, sums, strict=True)}
        items = batch.get("num_items_in_batch")
        contents["num_items_in_batch"] = items.tolist() if isinstance(items, torch.Tensor) else items
    call = {"call": "shard_batch", "layout": layout, **shapes, "check": is_due}
    session.agree(call, contents, always=True)
    if is_due:
        if len(history.compared_shapes) >= MAX_SHAPES:
            history.compared_shapes.clear()
        history.compared_shapes.add(repr(shapes))


def _cut(
    batch: Mapping[str, Any], layout: Layout, session: Session, documents: Documents, tree: PrefixTree | None
) -> ShardedBatch:
    """Return this rank's part of a batch that :func:`_check_batch` has accepted."""
    name = "input_ids" if batch.get("input_ids") is not None else "inputs_embeds"
    sharding = Sharding(layout, ring=session.ring, cu_seqlens=documents.boundaries, tree=tree)
    positions = sharding.positions(layout.lengths[session.rank], batch[name].device)
    names = [name, *(key for key in TOKEN_TYPES if batch.get(key) is not None)]
    sharded_batch = ShardedBatch({key: layout.shard(batch[key], session.rank) for key in names})
    sharded_batch["position_ids"] = positions[None]
    sharded_batch.cu_seqlens = documents.boundaries if len(documents.boundaries) > 2 else None
    labels, shifted = batch.get("labels"), batch.get("shift_labels")
    if shifted is None and labels is not None:
        shifted = labels.roll(-1, 1)
        shifted[:, [end - 1 for end in documents.boundaries if end]] = IGNORE_INDEX
    if shifted is not None:
        items = batch.get("num_items_in_batch")
        sharded_batch["shift_labels"] = layout.shard(shifted, session.rank)
        sharded_batch["labels"] = torch.full_like(sharded_batch["shift_labels"], IGNORE_INDEX)
        sharded_batch["num_items_in_batch"] = (shifted != IGNORE_INDEX).sum() if items is None else items
    return sharded_batch


def checksum(x: torch.Tensor) -> torch.Tensor:
    """Return a checksum, int64 on the device of ``x``, that depends on the bits and the index of every element.

    The checksum is the sum modulo 2^64 of all elements, each added to a multiple of its index and mixed as in
    SplitMix64 (Steele, Lea and Flood, 2014). A change of one element always changes the checksum.
    """
    bits = x.detach().contiguous().flatten().view(WORDS[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, len(bits), CHECKSUM_CHUNK):
        mixed = bits[start : start + CHECKSUM_CHUNK].to(torch.int64, copy=True)
        mixed += torch.arange(start, start + len(mixed), device=x.device) * GOLDEN_GAMMA
        for shift, factor in MIXES:
            mixed ^= (mixed >> shift) & ((1 << 64 - shift) - 1)  # logical shift right
            mixed *= factor
        mixed ^= (mixed >> 31) & ((1 << 33) - 1)
        total += mixed.sum()
    return total


WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype for each element size in bytes."""
CHECKSUM_CHUNK = 1 << 20  # elements at a time, to limit the memory of intermediate results
GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
MIXES = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))
