"""Code snippets of all documentation pages, and the names that each section's Python assumes.

The Python blocks of a section run one after the other in one namespace. ``SETUPS`` provides the names that the reader
is assumed to have; a section that is not listed has none.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from ringattn.comm import GroupLike, unregister_transport

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not {".venv", ".tox", "build", "node_modules"} & {*path.relative_to(ROOT).parts}
)
DATED_PAGES = {"LOG.md"}  # dated logs, which keep the file names and commands of their time

LANGUAGES = {"python", "sh", "console", "json", "c", "text"}
"""Languages of fences; ``console`` is a command after ``$`` with its output, ``text`` is no code."""

PLACEHOLDERS = {"DIR": "folder", "FILE": "file.json", "SECONDS": "480", "FLAGS": "", "…": "", "...": ""}
"""Words of a command that stand for the reader's own values."""


class Snippet(NamedTuple):
    """One fenced block of a page."""

    page: str  # path of the page from the root
    section: str  # the anchor of the heading above it
    line: int
    language: str
    text: str


class Command(NamedTuple):
    """One command of a page, in a fence or in an inline code span."""

    page: str
    line: int
    text: str
    fenced: bool


def anchor(heading: str) -> str:
    """Return a heading's link anchor: lower case, dashes for spaces, no punctuation."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def parse(page: str, text: str) -> tuple[list[Snippet], list[tuple[int, str]]]:
    """Return the fenced blocks of a page, and its other lines with their numbers.

    Raises:
        ValueError: a fence is never closed.
    """
    blocks: list[Snippet] = []
    others: list[tuple[int, str]] = []
    section, fence, block = "", None, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.match(r" *(```+|~~~+)(.*)$", line)
        if mark and fence is None:
            fence, block = (mark[1], mark[2].strip(), number), []
        elif mark and fence is not None and mark[1].startswith(fence[0]) and not mark[2].strip():
            blocks.append(Snippet(page, section, fence[2], fence[1], "".join(f"{text_line}\n" for text_line in block)))
            fence = None
        elif fence is not None:
            block.append(line)
        else:
            others.append((number, line))
            if heading := re.match(r"#+ (.+)$", line):
                section = anchor(heading[1])
    if fence is not None:
        raise ValueError(f"{page}:{fence[2]}: this fence is never closed")
    return blocks, others


@cache
def snippets() -> tuple[Snippet, ...]:
    texts = ((str(path.relative_to(ROOT)), path.read_text()) for path in PAGES)
    return tuple(snippet for page, text in texts for snippet in parse(page, text)[0])


def python_sections() -> dict[str, list[Snippet]]:
    """Return the Python blocks of every section, by ``page#section``."""
    blocks = [snippet for snippet in snippets() if snippet.language == "python"]
    return {
        f"{page}#{section}": [*group] for (page, section), group in groupby(blocks, key=lambda snippet: snippet[:2])
    }


def commands() -> Iterator[Command]:
    """Yield every command of every page: lines of ``sh`` and ``console`` fences, and inline code spans."""
    for snippet in snippets():
        if snippet.language in ("sh", "console"):
            text = snippet.text.replace("\\\n", " ")
            for line in text.splitlines():
                if snippet.language == "console" and not line.startswith("$ "):
                    continue
                for part in line.removeprefix("$ ").split(" && "):
                    yield Command(snippet.page, snippet.line, part, fenced=True)
    for path in PAGES:
        if path.name in DATED_PAGES:
            continue
        page = str(path.relative_to(ROOT))
        _, lines = parse(page, path.read_text())
        # a span may continue on the next line
        for span in re.finditer(
            r"`((?:ringattn|python -m|torchrun|srun|mpirun) [^`]+)`", "\n".join(x for _, x in lines)
        ):
            number = lines[span.string[: span.start()].count("\n")][0]
            for part in span[1].replace("\\|", "|").split(" && "):
                yield Command(page, number, " ".join(part.split()), fenced=False)


def own_arguments(command: str) -> list[str] | None:
    """Return the arguments of our command line without launcher and placeholders, or None for other programs."""
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(command, comments=True)]
    words = [word for word in words if word]
    for start, word in enumerate(words):
        program = word.rpartition("/")[2]
        if program == "ringattn":
            return words[start + 1 :]
    return None


# Names that the Python of a section assumes.


@dataclass(frozen=True)
class SectionSetup:
    """The names that a section assumes, and the ranks it runs on."""

    names: Callable[[GroupLike], Iterator[dict[str, Any]]]  # yields the names on every rank, then cleans up
    virtual: int = 0  # number of virtual ranks, each with its member as `group`; 0 for none
    processes: int = 0  # number of processes over gloo; 0 for none
    replaced: tuple[str, str] = ("", "")  # text that needs a GPU, and its replacement on the CPU
    nightly: bool = False


def provide_nothing(group: GroupLike) -> Iterator[dict[str, Any]]:
    yield {}


def provide_counting_transport(group: GroupLike) -> Iterator[dict[str, Any]]:
    yield {}
    unregister_transport("counting")


def provide_qkv(group: GroupLike) -> Iterator[dict[str, Any]]:
    from ringattn import ring_attention

    q, k, v = (torch.randn(1, 16, heads, 16, requires_grad=True) for heads in (8, 4, 4))
    yield {"q": q, "k": k, "v": v, "group": group, "ring_attention": ring_attention}


def provide_masks(group: GroupLike) -> Iterator[dict[str, Any]]:
    from ringattn import Layout, ring

    for names in provide_qkv(group):
        yield names | {"torch": torch, "ring": ring, "layout": Layout.contiguous(16, 1)}


def provide_training(group: GroupLike) -> Iterator[dict[str, Any]]:
    yield execute("docs/training.md#train-your-model")


def provide_model(group: GroupLike) -> Iterator[dict[str, Any]]:
    """Yield a tiny Llama in a folder, and a batch."""
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, Trainer

    from ringattn.integrations.transformers import register, shard_batch, sharded

    from .hf_models import build_model, token_ids

    with TemporaryDirectory() as name:
        model = build_model("llama")
        model.save_pretrained(name)
        ids = token_ids()[:, :40]  # a zigzag layout of two ranks divides 40 tokens evenly
        batch = {"input_ids": ids, "labels": ids}
        yield {
            "name": name, "model": model, "batch": batch, "group": group, "AutoModelForCausalLM": AutoModelForCausalLM,
            "register": register, "shard_batch": shard_batch, "sharded": sharded, "Trainer": Trainer,
            "DataLoader": DataLoader,
        }  # fmt: skip


def provide_readme(group: GroupLike) -> Iterator[dict[str, Any]]:
    """Yield the names of `provide_model`, for a script."""
    for names in provide_model(group):
        yield names | {"__name__": "__main__"}


def provide_accelerate(group: GroupLike) -> Iterator[dict[str, Any]]:
    """Yield the names of `provide_model`, with accelerate's mesh of the processes."""
    from accelerate.utils import ParallelismConfig

    for names in provide_model(group):
        mesh = ParallelismConfig(cp_size=2).get_device_mesh("cpu")
        yield names | {"accelerator": SimpleNamespace(torch_device_mesh=mesh)}


def provide_diffusers(group: GroupLike) -> Iterator[dict[str, Any]]:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    with patch("torch.accelerator.device_count", lambda: 1):  # diffusers divides by it; on a CPU it is 0
        yield {"model": model}


def provide_sdpa(group: GroupLike) -> Iterator[dict[str, Any]]:
    def model(tokens: torch.Tensor) -> torch.Tensor:
        x = tokens.view(1, 1, -1, 1).expand(-1, 4, -1, 16).float().requires_grad_()
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    yield {"model": model, "tokens": torch.arange(16), "group": group}


def provide_documents(group: GroupLike) -> Iterator[dict[str, Any]]:
    """Yield document boundaries, and restore ``flash_attention_2`` afterwards."""
    import transformers

    interfaces = transformers.AttentionInterface, transformers.AttentionMaskInterface
    before = [interface()["flash_attention_2"] for interface in interfaces]
    try:
        yield {"cu_seqlens": torch.tensor([0, 9, 16], dtype=torch.int32), "group": group}
    finally:
        for interface, function in zip(interfaces, before, strict=True):
            interface.register("flash_attention_2", function)


def provide_lucidrains(group: GroupLike) -> Iterator[dict[str, Any]]:
    """Yield nothing, and restore lucidrains' module afterwards."""
    import ring_attention_pytorch.ring_attention as theirs

    with patch.object(theirs, "ring_flash_attn", theirs.ring_flash_attn):
        yield {}


def provide_kernels(group: GroupLike) -> Iterator[dict[str, Any]]:
    """Yield every public name of the kernels, tensors, and the keys in two shards."""
    from ringattn import kernels
    from ringattn.kernels import FULL, KernelConfig

    names = {name: getattr(kernels, name) for name in kernels.__all__}
    q, k, v, dout = (torch.randn(1, 32, heads, 16) for heads in (4, 2, 2, 4))
    shards = [(k[:, :16], v[:, :16], FULL), (k[:, 16:], v[:, 16:], FULL)]
    yield names | {
        "torch": torch, "q": q, "k": k, "v": v, "dout": dout, "x": k, "out": torch.empty_like(k),
        "dq": torch.zeros_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(v), "shards": shards, "last": 1,
        "config": KernelConfig(backward="single_pass"),
    }  # fmt: skip


def provide_tuning(group: GroupLike) -> Iterator[dict[str, Any]]:
    """Yield the sizes, the device and the group of a ring."""
    from ringattn import Ring, autotune, kernels

    yield {
        "autotune": autotune, "Ring": Ring, "kernels": kernels, "device": torch.device("cpu"), "group": group,
        "world": 2, "heads": 8, "kv_heads": 8, "head_dim": 64, "tokens": 1024,
    }  # fmt: skip


SETUPS = {
    "README.md#example": SectionSetup(provide_readme),
    "docs/ring.md#configure-a-ring": SectionSetup(provide_qkv, virtual=8, replaced=("Limits(ctas=16)", "Limits()")),
    **{f"docs/masks.md#{name}": SectionSetup(provide_masks) for name in ("islands", "intervals", "prefix-trees")},
    "docs/ring.md#bring-your-own-transport": SectionSetup(provide_counting_transport),
    "docs/ring.md#ulysses-x-ring": SectionSetup(provide_qkv, processes=8, replaced=('"cuda"', '"cpu"'), nightly=True),
    "docs/training.md#rollouts": SectionSetup(provide_training),
    "docs/integrations.md#hugging-face-transformers": SectionSetup(provide_model),
    "docs/integrations.md#trainer": SectionSetup(provide_model),
    "docs/integrations.md#accelerate": SectionSetup(provide_accelerate, processes=2, nightly=True),
    "docs/integrations.md#diffusers": SectionSetup(provide_diffusers, processes=4, nightly=True),
    "docs/integrations.md#pytorchs-scaled_dot_product_attention": SectionSetup(provide_sdpa, virtual=2),
    "docs/integrations.md#adapter-for-hugging-face": SectionSetup(provide_documents, virtual=2),
    "docs/integrations.md#ring-attention-pytorch": SectionSetup(provide_lucidrains, nightly=True),
    "docs/integrations.md#megatron-core": SectionSetup(provide_nothing, nightly=True),
    "kernels/README.md#entries": SectionSetup(provide_kernels),
    "kernels/README.md#state-attention-over-several-shards": SectionSetup(provide_kernels),
    "kernels/README.md#fp8-keys-and-values": SectionSetup(provide_kernels),
    "autotune/README.md#tune-a-ring---ring": SectionSetup(provide_tuning, virtual=2),
}


def execute(key: str, group: GroupLike = None) -> dict[str, Any]:
    """Run the Python of a section on this rank and return its names."""
    setup = SETUPS.get(key, SectionSetup(provide_nothing))
    source, instead = setup.replaced
    assert source in "".join(snippet.text for snippet in python_sections()[key])
    names: dict[str, Any]
    with contextmanager(setup.names)(group) as names:
        for snippet in python_sections()[key]:
            text = snippet.text.replace(source, instead) if source else snippet.text
            # leading newlines, so that a traceback shows the page's line number
            exec(compile("\n" * snippet.line + text, str(ROOT / snippet.page), "exec"), names)
        return names
