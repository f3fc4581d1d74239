"""Hugging Face transformers on shards: ``attn_implementation="ringattn"``, each rank with its part of the sequence.

::

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation=register())
    batch = shard_batch(batch, "zigzag", group)
    with sharded(model, "zigzag", group):
        loss = model(**batch).loss  # this rank's part: the loss of the batch is the sum over the ranks
    loss.backward()  # gradients are parts too: sum them over the group

Embedding, norms, feed-forward and loss work token by token; attention alone sees the other ranks' tokens. What a
model's mask shows is read from transformers' own mask functions, so that windows, chunks and documents are those of the
model; sinks, softcap, scale and dropout come with each call of attention.

What comes with a batch is checked once per forward and kind of mask: that ``attention_mask`` hides nothing, where the
packed documents and the tokens are. On a GPU the host waits for each of these: no CUDA graph can capture a forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import transformers
from packaging.version import Version

from .. import Documents, Layout, LayoutLike, Ring, Session, ring_attention
from ..comm import GroupLike, resolve_group

NAME = "ringattn"
OLDEST = Version("5.22")
IGNORE_INDEX = -100  # the label that transformers' losses leave out

ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
"""Entries of ``config.layer_types`` in whose layers tokens meet in attention alone."""

LEARNED_POSITIONS = ("biogpt", "gpt2", "opt")
"""Models without rotary embedding that take ``position_ids`` counted from 0, by ``config.model_type``."""

NO_TENSOR = 'ringattn makes no tensor of a mask (use "eager" or "sdpa" on whole sequences)'

HARMLESS = (
    "cache_position", "deterministic", "layer_idx", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "past_key_values", "position_embeddings", "return_dict", "shift_labels", "use_cache",
)  # fmt: skip
"""What models hand on to attention and its result does not depend on; key and value are what a cache returned."""

HARMLESS_OF_MASKS = (
    "allow_is_bidirectional_skip", "allow_is_causal_skip", "allow_torch_fix", "batch_size", "config", "dtype",
    "local_size", "use_vmap",
)  # fmt: skip
"""What the makers of masks hand on for dense ones: sizes, dtypes, and when there need be none."""


@dataclass
class Sharding:
    """Who holds which tokens, as :func:`sharded` says it; by itself: one rank alone."""

    layout: LayoutLike = None
    group: GroupLike = None
    ring: Ring | None = None
    cu_seqlens: tuple[int, ...] | None = None
    tokens: int = 0  # of this rank in the last call of attention, where there are several ranks

    def resolve(self, tokens: int, device: torch.device) -> tuple[Session, Layout]:
        """Return the session, and the layout of the whole sequence, of which this rank has ``tokens``.

        Raises:
            ValueError: there is no layout for several ranks, or it gives this rank another number of tokens.
        """
        session = _session(self.group, device, self.ring)
        if self.layout is None and session.size > 1:
            raise ValueError(
                f'{session.size} ranks and no layout: run the model inside `with sharded(model, "zigzag", group):`, '
                "whose group is the ranks that share a sequence, and give it what shard_batch makes"
            )
        total = self.layout.seqlen if isinstance(self.layout, Layout) else tokens * session.size
        layout = session.resolve_layout(self.layout, total)
        expected = layout.lengths[session.rank]
        if expected != tokens:
            raise ValueError(f"the layout gives rank {session.rank} {expected} tokens, got {tokens}")
        return session, layout

    def positions(self, tokens: int, device: torch.device) -> torch.Tensor:
        """Return the positions of this rank's tokens within their documents, int64 ``[S]``."""
        session, layout = self.resolve(tokens, device)
        where = layout.positions(session.rank)
        start = 0 if self.cu_seqlens is None else Documents(self.cu_seqlens).around(where)[0]
        return (where - start).to(device)


@dataclass
class Mask:
    """What goes from a model's mask to its attention in place of a tensor: arguments of ``ring_attention``.

    With the sharding in it: a layer that is checkpointed runs again in the backward, where ``sharded`` may be over, or
    in a thread of autograd that never was inside.
    """

    sharding: Sharding
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    chunk_size: int | None = None
    positions_checked: bool = False
    checked_config: Any = None  # of the layers before

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{NO_TENSOR}, and this model asks its mask for {name}")  # nothing else gets here

    def __radd__(self, scores: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError(f"{NO_TENSOR}, and this model adds its mask to scores of its own")

    def check_positions(self, position_ids: torch.Tensor, tokens: int) -> None:
        """Rotary embedding must know where the tokens are: ValueError if it does not. Once per forward."""
        expected = self.sharding.positions(tokens, position_ids.device)
        differ = position_ids != expected
        if differ.any():
            row, first = differ.nonzero()[0].tolist()
            session, _ = self.sharding.resolve(tokens, position_ids.device)
            with session.call():  # the other ranks hear why this one does not come
                raise ValueError(
                    f"position_ids of token {first} on are {position_ids[row, first : first + 4].tolist()}, the "
                    f"positions of this rank's tokens {expected[first : first + 4].tolist()}: pass what shard_batch "
                    "makes, and cu_seqlens of packed documents to both"
                )
        self.positions_checked = True

    def boundaries(self, seqlen: int) -> Iterable[int] | None:
        """Of documents, and of chunks within them."""
        documents = self.sharding.cu_seqlens
        if self.chunk_size is None:
            return documents
        ends = pairwise(documents or (0, seqlen))
        return [*(chunk for start, end in ends for chunk in range(start, end, self.chunk_size)), seqlen]


_sharding: ContextVar[Sharding] = ContextVar("ringattn_sharding")
_checked: WeakSet[torch.nn.Module] = WeakSet()  # models whose outputs are


@contextmanager
def sharded(
    model: torch.nn.Module,
    layout: LayoutLike,
    group: GroupLike = None,
    *,
    cu_seqlens: Iterable[int] | torch.Tensor | None = None,
    ring: Ring | None = None,
) -> Iterator[None]:
    """Around a forward: what the model gets is this rank's shard of a sequence. The backward may run outside of it.

    With several ranks the model's forward raises NotImplementedError for what it would make of this rank's tokens in
    place of all: a loss without ``shift_labels``, ``logits_to_keep``, a pooled output, the balance of experts.

    Args:
        model: of transformers, or what holds one; a hook that checks its outputs stays.
        layout: who holds which tokens, as in :func:`ringattn.ring_attention`.
        group: the ranks that share the sequence.
        cu_seqlens: boundaries of documents packed into the whole sequence; a list or a CPU tensor.
        ring: in place of ``group``, where it is not the ring that all calls share.

    Raises:
        ValueError: ``cu_seqlens`` are no boundaries.
        RuntimeError: at the end, with several ranks, if no attention was ringattn's: each rank saw its shard alone.
    """
    sharding = Sharding(layout, group, ring, None if cu_seqlens is None else Documents(cu_seqlens).boundaries)
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel) and module not in _checked:
            # for good: if a hook came and went, a compiled model would be compiled again
            module.register_forward_hook(_check_output, with_kwargs=True)
            _checked.add(module)
    token = _sharding.set(sharding)
    try:
        yield
    finally:
        _sharding.reset(token)
    if not sharding.tokens and _session(group, None, ring).size > 1:
        raise RuntimeError(
            'no attention inside sharded() was ringattn\'s: attn_implementation="ringattn", or a model that allows it'
        )


def _check_output(module: torch.nn.Module, args: Any, inputs: dict[str, Any], output: Any) -> None:
    """A hook: refuse what a model inside ``sharded`` made of one rank's tokens in place of all."""
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
            f"{', '.join(sorted(local))} of {model}: of this rank's tokens only; give labels to shard_batch, leave out "
            "logits_to_keep and output_router_logits, and pool last_hidden_state over the ranks"
        )


def register() -> str:
    """Add attention and mask interface "ringattn" to transformers, once or again; returns ``attn_implementation``.

    Raises:
        ImportError: transformers is older than 5.22, or newer and its mask functions are others than those read here.
    """
    version = transformers.__version__
    if Version(version) < OLDEST:
        raise ImportError(f"transformers is {version}: ringattn needs {OLDEST} or newer")
    try:
        _check_masks()
        transformers.AttentionInterface.register(NAME, attend)
        transformers.AttentionMaskInterface.register(NAME, mask_of)
    except (AttributeError, KeyError, NotImplementedError, TypeError) as error:
        raise ImportError(
            f"transformers is {version}, and its masks are not what ringattn reads ({error}): install 5.22 or 5.23"
        ) from error
    return NAME


def _check_masks() -> None:
    """Each mask function of transformers is what :func:`shown` takes it for: TypeError if not."""
    masks, ids = transformers.masking_utils, torch.zeros(1, 1, dtype=torch.int64)
    packed = masks.packed_sequence_mask_function(ids)
    for function, fields in (
        (masks.causal_mask_function, {"causal": True}),
        (masks.bidirectional_mask_function, {}),
        (masks.sliding_window_causal_mask_function(4), {"causal": True, "window_size": (3, -1)}),
        (masks.sliding_window_bidirectional_mask_function(4), {"window_size": (4, 4)}),
        (masks.chunked_causal_mask_function(4, ids[0]), {"causal": True, "chunk_size": 4}),
        (masks.and_masks(masks.causal_mask_function, packed), {"causal": True, "packed": ids}),
    ):
        if shown(function) != fields:
            raise TypeError(f"{function.__qualname__} is {shown(function)}")


def shown(mask_function: Callable[..., Any]) -> dict[str, Any]:
    """What a mask function of transformers shows, as fields of :class:`Mask`, and as ``packed`` document ids."""
    name = getattr(mask_function, "__qualname__", repr(mask_function))
    known = inspect.isfunction(mask_function) and mask_function.__module__ == transformers.masking_utils.__name__
    closure = inspect.getclosurevars(mask_function).nonlocals if known else {}
    match name.removesuffix(".<locals>.inner_mask") if known else None:
        case "causal_mask_function":
            return {"causal": True}
        case "bidirectional_mask_function":
            return {}
        case "sliding_window_overlay":
            return {"window_size": (closure["sliding_window"] - 1, -1)}
        case "sliding_window_bidirectional_overlay":
            return {"window_size": (closure["sliding_window"], closure["sliding_window"])}
        case "chunked_overlay":  # where its left padding is not 0, the padding is refused
            return {"chunk_size": closure["chunk_size"]}
        case "packed_sequence_mask_function":
            return {"packed": closure["packed_sequence_mask"]}
        case "remap_positions_for_packed_sequence":
            return shown(closure["mask_function"])
        case "and_masks.<locals>.and_mask":
            fields: dict[str, Any] = {}
            for part in map(shown, closure["mask_functions"]):
                if twice := fields.keys() & part.keys() - {"causal"}:
                    raise NotImplementedError(f"a mask with two of {sorted(twice)}: {fields} and {part}")
                fields |= part
            return fields
    raise NotImplementedError(
        f"mask function {name} of {getattr(mask_function, '__module__', None)}: ringattn takes causal and full masks, "
        'windows, chunks and packed documents; for others use "sdpa" on whole sequences'
    )


def mask_of(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Mask:
    """The mask interface: every mask that a model makes passes here."""
    if refused := kwargs.keys() - {*HARMLESS_OF_MASKS}:
        raise NotImplementedError(f'{sorted(refused)} of a mask: ringattn has nothing for it; use "eager" or "sdpa"')
    if isinstance(q_offset, torch.Tensor) or q_offset or kv_offset or kv_length != q_length:
        raise NotImplementedError(
            f"{kv_length} keys from {kv_offset} for {q_length} queries from {q_offset}: ringattn takes no static cache "
            'and no queries behind a cache (pass use_cache=False, or generate with "sdpa"), no cross-attention, and '
            "an attention_mask of this rank's tokens only"
        )
    if attention_mask is not None and not attention_mask.all():
        raise ValueError(
            f"attention_mask hides {int((attention_mask == 0).sum())} tokens as padding: pack the documents one after "
            "the other and pass cu_seqlens to sharded and shard_batch"
        )
    sharding, device = _sharding.get(Sharding()), torch.device(device)
    fields = shown(mask_function)
    packed = fields.pop("packed", None)  # made of position_ids that are not consecutive: a shard's, or of documents
    if packed is not None and not (packed.diff() == (sharding.positions(q_length, device).diff() != 1)).all():
        raise ValueError(
            "position_ids of other packed documents, or of another layout: pass what shard_batch makes, and cu_seqlens "
            "to both sharded and shard_batch"
        )
    return Mask(sharding, **fields)


def _check_config(config: Any) -> None:
    """Refuse what would take a shard for the sequence: NotImplementedError."""
    config = config.get_text_config(decoder=True) if isinstance(config, transformers.PreTrainedConfig) else config
    kind, rope = getattr(config, "model_type", None), getattr(config, "rope_parameters", None) or {}
    rope_types = {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)}
    layers = {*(getattr(config, "layer_types", None) or ())} - {*ATTENTION_LAYERS}
    reasons = {
        f"positions: ringattn takes rotary embedding, and {', '.join(LEARNED_POSITIONS)}; others may count tokens from "
        "the shard's start, or not from 0": not rope and kind not in LEARNED_POSITIONS,
        f"layer_types {sorted(layers)}: their tokens meet outside of attention, in this rank's shard only": layers,
        "rope_type dynamic or longrope: frequencies by the last position, another on each rank; take yarn, linear or "
        "llama3": rope_types & {"dynamic", "longrope"},
        "attn_temperature_tuning: positions from the shard's start": getattr(config, "attn_temperature_tuning", False),
    }
    for reason in filter(reasons.get, reasons):
        raise NotImplementedError(f"{kind} over several ranks, {reason}")


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
    """The attention interface: ``[B, H, S, D]`` in, ``[B, S, H, D]`` out, and no weights."""
    model = type(module).__name__
    refused = {name for name, value in kwargs.items() if value is not None and value is not False} - {*HARMLESS}
    if getattr(getattr(module, "config", None), "output_attentions", False):
        refused.add("output_attentions")
    if refused:
        raise NotImplementedError(
            f'{sorted(refused)} in {model}: ringattn has nothing for it, and makes no weights; use "eager" or "sdpa"'
        )
    if attention_mask is None:  # the model makes none: as in sdpa
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        attention_mask = Mask(_sharding.get(Sharding()), causal)
    if not isinstance(attention_mask, Mask):
        raise ValueError(
            f"attention_mask is a {type(attention_mask).__name__} {list(attention_mask.shape)} in {model}: ringattn "
            "takes none, or [batch, tokens] of ones; packed documents are cu_seqlens"
        )
    if sliding_window is not None and attention_mask.window_size == (-1, -1):
        raise ValueError(f"sliding_window is {sliding_window} in {model}, and its mask has no window")
    tokens, sharding = query.shape[2], attention_mask.sharding
    if key.shape[2] != tokens:
        raise NotImplementedError(f"{key.shape[2]} keys for {tokens} queries in {model}: no cache, no cross-attention")
    session, layout = sharding.resolve(tokens, query.device)
    config = getattr(module, "config", None)
    if session.size > 1 and config is not attention_mask.checked_config:
        _check_config(config)
        attention_mask.checked_config = config
    if position_ids is not None and position_ids.dim() == 2 and not attention_mask.positions_checked:
        attention_mask.check_positions(position_ids, tokens)
    elif session.size > 1 and not attention_mask.positions_checked:
        raise NotImplementedError(
            f"{model} does not hand position_ids [B, S] to attention: over several ranks ringattn takes those that do, "
            "since others may count from the shard's start"
        )
    sharding.tokens = tokens if session.size > 1 else 0
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
    )
    return out, None


PACKED = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Entries by which padding-free batches, TRL's for one, say where their documents are."""

CUT = ("input_ids", "inputs_embeds", "labels", "shift_labels")
"""Entries ``[B, S, ...]`` of a batch that :func:`shard_batch` cuts."""

BATCH = frozenset({*CUT, *PACKED, "attention_mask", "num_items_in_batch"})
"""Entries that :func:`shard_batch` takes."""

TENSORS = dict.fromkeys(("attention_mask", "input_ids", "labels", "shift_labels", "position_ids", "seq_idx"), 2)
TENSORS["inputs_embeds"] = 3
"""Entries that are tensors, and their dimensions."""

CHECK_EVERY = 100  # calls of shard_batch, of which one compares batches of known shapes
MOST_SHAPES = 4096  # that are remembered


class ShardedBatch(dict[str, Any]):
    """This rank's part of a batch, as keyword arguments of a model.

    Attributes:
        cu_seqlens: boundaries of the documents packed into the whole sequence, which :func:`sharded` must be given too;
            None if there is one document.
    """

    cu_seqlens: tuple[int, ...] | None = None


@dataclass
class BatchHistory:
    """Batches that :func:`shard_batch` has seen on one ring; equal on all ranks, which make the same calls."""

    calls: int = 0
    compared_shapes: set[str] = field(default_factory=set)


_histories: WeakKeyDictionary[Ring, BatchHistory] = WeakKeyDictionary()


def shard_batch(
    batch: Mapping[str, Any],
    layout: LayoutLike,
    group: GroupLike = None,
    *,
    cu_seqlens: Iterable[int] | torch.Tensor | None = None,
    check: bool | None = None,
) -> ShardedBatch:
    """Cut this rank's part out of a batch of whole sequences, which is the same on every rank.

    Every rank of the group calls it. They wait for each other and compare shapes and documents, and refuse batches
    that differ. Contents are compared by checksums, as ``check`` says.

    Args:
        batch: ``input_ids [B, S]`` or ``inputs_embeds [B, S, E]``; ``labels [B, S]``, not shifted, or ``shift_labels``;
            an ``attention_mask`` of ones; ``num_items_in_batch``, where it counts more than this batch. Packed
            documents may be given by ``position_ids [B, S]`` that count from 0 in each, ``cu_seq_lens_q``,
            ``cu_seq_lens_k`` and ``seq_idx``, with ``max_length_q`` and ``max_length_k``, as padding-free collators
            make them.
        layout: as for :func:`sharded`.
        group: the ranks that share the sequence.
        cu_seqlens: boundaries of packed documents, whose first tokens are nobody's label.
        check: None compares checksums for shapes that are new, and in every 100th call; True in every call. False
            compares nothing and does not wait for other ranks, as in a worker process of a data loader.

    Returns:
        This rank's ids and ``position_ids [1, s]``, within documents. With labels: ``shift_labels``, shifted before the
        split, which transformers' losses take as they are; ``num_items_in_batch``, of all ranks, by which they divide
        their sum; and ``labels`` of -100 only: they ask for a loss, and one that shifts them has none to give.
        Attribute ``cu_seqlens`` has the boundaries of packed documents, for :func:`sharded`.

    Raises:
        ValueError: padding, an entry that it cannot shard, arguments that do not fit, or, on every rank, batches that
            differ between ranks.
        TransportError: a rank did not come.
    """
    if check is not None and not isinstance(check, bool):
        raise ValueError(f"check is {check!r}: it must be True, False or None")
    entries = map(batch.get, CUT) if isinstance(batch, Mapping) else ()
    session = _session(group, next((x.device for x in entries if isinstance(x, torch.Tensor)), None))
    comparing = session.size > 1 and check is not False
    if comparing and torch.utils.data.get_worker_info() is not None:  # it shares the connections of its parent
        raise ValueError(f"check is {check} in a worker process of a data loader: pass check=False there")
    history = _histories.setdefault(session.ring, BatchHistory())
    if comparing:
        history.calls += 1  # first of all, so that a rank that refuses its batch counts as the others do
    with session.call() if comparing else nullcontext():
        documents = _check_batch(batch, cu_seqlens)
        layout = session.resolve_layout(layout, documents.seqlen)
        if comparing:
            _compare_batches(session, history, batch, layout, documents, bool(check))
    return _cut(batch, layout, session, documents)


def _session(group: GroupLike, device: torch.device | None, ring: Ring | None = None) -> Session:
    """Return the session of one ring; ValueError for a mesh of two dimensions."""
    return Session(resolve_group(group) if ring is None else group, device=device, ring=ring)


def _check_batch(batch: Mapping[str, Any], cu_seqlens: Iterable[int] | torch.Tensor | None) -> Documents:
    """Return the documents of a batch; ValueError if it cannot be sharded."""
    if not isinstance(batch, Mapping):
        raise ValueError(f"batch is {type(batch).__name__}: it must be a dict of tensors")
    for name, dims in TENSORS.items():
        x = batch.get(name)
        if x is not None and not (isinstance(x, torch.Tensor) and x.dim() == dims):
            got = f"a tensor {list(x.shape)}" if isinstance(x, torch.Tensor) else f"{x!r:.60}"
            raise ValueError(f"{name} is {got}: it must be a tensor of {dims} dimensions")
    for name in ("num_items_in_batch", "max_length_q", "max_length_k"):
        number = batch.get(name)
        is_number = isinstance(number, int) or (isinstance(number, torch.Tensor) and number.numel() == 1)
        if number is not None and not is_number:
            raise ValueError(f"{name} is {number!r:.60}: it must be a whole number")
    if unknown := batch.keys() - BATCH:
        raise ValueError(f"batch has {sorted(unknown)}: shard_batch takes {', '.join(sorted(BATCH))}")
    padding = batch.get("attention_mask")
    if padding is not None and not padding.all():
        raise ValueError(
            f"attention_mask {list(padding.shape)} is not [batch, tokens] of ones: instead of padding, pack the "
            "documents one after the other and pass cu_seqlens to sharded and shard_batch"
        )
    inputs = {name: batch[name] for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None}
    if len(inputs) != 1:
        raise ValueError(f"batch has {sorted(inputs)}: it must have input_ids or inputs_embeds")
    ((name, whole),) = inputs.items()
    for other in ("labels", "shift_labels"):
        if (labels := batch.get(other)) is not None and labels.shape != whole.shape[:2]:
            raise ValueError(f"{other} is {list(labels.shape)}: it must be {list(whole.shape[:2])}, as {name} is")
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
            raise ValueError(f"seq_idx is {list(index.shape)}: it must be [1, {tokens}]")
        given["seq_idx"] = (0, *(index[0].diff().nonzero()[:, 0] + 1).tolist(), tokens)
    for name, boundaries in given.items():
        if boundaries[-1] != tokens:
            raise ValueError(f"{name} ends at {boundaries[-1]}: it must end at {tokens}, the number of tokens")
    first, boundaries = next(iter(given.items()), ("", (0, tokens)))
    for name, others in given.items():
        if differ := {*boundaries} ^ {*others}:
            here, there = (name, first) if min(differ) in others else (first, name)
            raise ValueError(f"{here} begins a document at token {min(differ)}, and {there} does not: they must agree")
    longest = max((end - start for start, end in pairwise(boundaries)), default=0)
    for name in ("max_length_q", "max_length_k"):
        if (most := batch.get(name)) is not None and int(most) < longest:
            raise ValueError(f"{name} is {int(most)}: the longest document has {longest} tokens")
    return Documents(boundaries)


def _boundaries_from_positions(position_ids: torch.Tensor, tokens: int) -> tuple[int, ...]:
    """Return where documents begin and end whose tokens count from 0; ValueError if these do not, or rows differ."""
    if position_ids.dim() != 2 or position_ids.shape[1] != tokens or not len(position_ids):
        raise ValueError(f"position_ids is {list(position_ids.shape)}: it must be [batch, {tokens}]")
    rows = position_ids.cpu()
    boundaries = (0, *((rows[0, 1:] == 0).nonzero()[:, 0] + 1).tolist(), tokens)
    expected = torch.arange(tokens) - Documents(boundaries).around(torch.arange(tokens))[0]
    if (differ := rows != expected).any():
        row, token = differ.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids of row {row} is {int(rows[row, token])} at token {token}, where {int(expected[token])} was "
            "expected: it must count from 0 in every document, and have the same documents in every row"
        )
    return boundaries


def _compare_batches(
    session: Session,
    history: BatchHistory,
    batch: Mapping[str, Any],
    layout: Layout,
    documents: Documents,
    always: bool,
) -> None:
    """Raise ValueError on every rank if the batches differ between ranks."""
    tensors = {name: batch[name] for name in CUT if batch.get(name) is not None}
    # missing ones too, or the ranks that have them would meet another difference first
    shapes = {f"the shape of {name}": None for name in CUT} | {
        f"the shape of {name}": (list(x.shape), x.dtype) for name, x in tensors.items()
    }
    is_due = always or repr(shapes) not in history.compared_shapes or history.calls % CHECK_EVERY == 0
    contents: dict[str, object] = {"cu_seqlens": documents}
    if is_due:
        sums = torch.stack([checksum(x).to(session.device) for x in tensors.values()]).tolist()
        contents |= {f"the checksum of {name}": total for name, total in zip(tensors, sums, strict=True)}
        items = batch.get("num_items_in_batch")
        contents["num_items_in_batch"] = items.tolist() if isinstance(items, torch.Tensor) else items
    call = {"call": "shard_batch", "layout": layout, **shapes, "check": is_due}
    session.agree(call, contents, always=True)
    if is_due:
        if len(history.compared_shapes) >= MOST_SHAPES:
            history.compared_shapes.clear()
        history.compared_shapes.add(repr(shapes))


def _cut(batch: Mapping[str, Any], layout: Layout, session: Session, documents: Documents) -> ShardedBatch:
    """Return one rank's part of a batch that was checked."""
    name = "input_ids" if batch.get("input_ids") is not None else "inputs_embeds"
    sharding = Sharding(layout, ring=session.ring, cu_seqlens=documents.boundaries)
    positions = sharding.positions(layout.lengths[session.rank], batch[name].device)
    made = ShardedBatch({name: layout.shard(batch[name], session.rank), "position_ids": positions[None]})
    made.cu_seqlens = documents.boundaries if len(documents.boundaries) > 2 else None
    labels, shifted = batch.get("labels"), batch.get("shift_labels")
    if shifted is None and labels is not None:
        shifted = labels.roll(-1, 1)
        shifted[:, [end - 1 for end in documents.boundaries if end]] = IGNORE_INDEX
    if shifted is not None:
        items = batch.get("num_items_in_batch")
        made["shift_labels"] = layout.shard(shifted, session.rank)
        made["labels"] = torch.full_like(made["shift_labels"], IGNORE_INDEX)
        made["num_items_in_batch"] = (shifted != IGNORE_INDEX).sum() if items is None else items
    return made


def checksum(x: torch.Tensor) -> torch.Tensor:
    """Return one integer, int64 on the device of ``x``, that depends on every element's bits and on its place.

    Each element is added to a multiple of its index and mixed as in SplitMix64 (Steele, Lea and Flood, 2014); the sum
    is taken modulo 2^64. Another value of one element always gives another sum.
    """
    bits = x.detach().contiguous().flatten().view(WORDS[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, len(bits), CHECKSUM_CHUNK):
        mixed = bits[start : start + CHECKSUM_CHUNK].to(torch.int64, copy=True)
        mixed += torch.arange(start, start + len(mixed), device=x.device) * GOLDEN_GAMMA
        for shift, factor in MIXES:
            mixed ^= (mixed >> shift) & ((1 << 64 - shift) - 1)  # a shift without the sign
            mixed *= factor
        mixed ^= (mixed >> 31) & ((1 << 33) - 1)
        total += mixed.sum()
    return total


WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by bytes of an element."""
CHECKSUM_CHUNK = 1 << 20  # elements at a time, so that the memory for them stays small
GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
MIXES = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))
