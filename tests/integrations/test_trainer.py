"""The Trainer of docs/integrations.md on two ranks, against transformers' and TRL's own in one process."""

from __future__ import annotations

import os
import re
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn.integrations.transformers import register

from ..support import rank_processes
from ..support.hf_models import SIZES, VOCABULARY

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]
PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
TOKENS, ROWS, EVAL_ROWS = 24, 10, 7  # 10 rows, so that the last batch of 4 is incomplete
IMPORTS = 300  # seconds, because every process imports the frameworks


def ring_trainer(base: type[Any]) -> Any:
    """Return the recipe's class, derived from another base."""
    (source,) = re.findall(r"```python\n(from accelerate.data_loader.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {"Base": base}
    exec(compile(source.replace("(Trainer)", "(Base)"), str(PAGE), "exec"), names)
    return names["RingTrainer"]


def model(attention: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation=attention))


def environment(rank: int, world: int) -> None:
    """Set what torchrun sets. With several ranks a process group exists."""
    register()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT="1", HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="1")


OPTIONS: dict[str, Any] = {
    "use_cpu": True, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "num_train_epochs": 2,
    "optim": "sgd", "learning_rate": 0.1, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "seed": 5,
    "disable_tqdm": True, "max_grad_norm": 1.0,
}  # fmt: skip


def rows(count: int, seed: int) -> list[dict[str, Tensor]]:
    ids = torch.randint(1, VOCABULARY, (count, TOKENS), generator=torch.Generator().manual_seed(seed))
    labels = ids.masked_fill(torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.2, -100)
    return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]


def outcome(trainer: Any, model: Any) -> dict[str, Tensor]:
    """Return the training losses and the final weights."""
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = {name: x.detach().clone() for name, x in model.named_parameters()}
    return {"losses": torch.tensor(losses), **weights}


def trained(ring: bool, world: int, rank: int, **options: Any) -> dict[str, Any]:
    """Train, evaluate and predict, and return losses, weights, evaluation and predictions."""
    from transformers import Trainer, TrainingArguments

    environment(rank, world)
    trained_model = model("ringattn" if ring else "eager")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, **OPTIONS | options)
        trainer = (ring_trainer(Trainer) if ring else Trainer)(
            trained_model, arguments, train_dataset=rows(ROWS, 1), eval_dataset=rows(EVAL_ROWS, 2)
        )
        trainer.train()
        evaluation = trainer.evaluate()["eval_loss"]
        predicted = trainer.predict(rows(EVAL_ROWS, 3))
    losses = {"evaluation": torch.tensor(evaluation), "test": torch.tensor(predicted.metrics["test_loss"])}
    predictions, labels = torch.tensor(predicted.predictions), torch.tensor(predicted.label_ids)
    return losses | outcome(trainer, trained_model) | {"predictions": predictions, "labels": labels}


def compare(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        torch.testing.assert_close(x, theirs[name], rtol=1e-4, atol=1e-4, msg=f"{name}: {x}, not {theirs[name]}")


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"average_tokens_across_devices": False}])
def test_training_evaluation_and_prediction_equal_one_process(options: dict[str, Any]) -> None:
    (theirs,) = rank_processes.group_results(1, partial(trained, False, 1, **options), patience=IMPORTS)
    for ours in rank_processes.group_results(2, partial(trained, True, 2, **options), patience=IMPORTS):
        compare(ours, theirs)


def evaluated_by_the_loader_of_accelerate(rank: int) -> str:
    """Evaluate without the recipe's loaders, so that each rank gets different rows."""
    from transformers import Trainer, TrainingArguments

    environment(rank, 2)
    trainer_class = ring_trainer(Trainer)
    del trainer_class.create_accelerator_and_postprocess
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(model("ringattn"), TrainingArguments(folder, **OPTIONS), eval_dataset=rows(8, 2))
        return rank_processes.call_outcome(trainer.evaluate)[1]


def test_different_rows_on_each_rank_are_refused() -> None:
    for text in rank_processes.group_results(2, evaluated_by_the_loader_of_accelerate, patience=IMPORTS):
        assert "input_ids differs between ranks (rank 0" in text


def tokenizer() -> Any:
    """Return a tokenizer with one token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {name: index for index, name in enumerate(["<pad>", "<eos>", *(f"w{i}" for i in range(2, VOCABULARY))])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def texts(count: int, seed: int) -> Any:
    """Return documents of 3 to 20 tokens."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 21, (count,), generator=generator).tolist()
    words = (torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in lengths)
    return Dataset.from_dict({"text": [" ".join(f"w{word}" for word in each) for each in words]})


def fine_tuned(ring: bool, world: int, rank: int, **options: Any) -> dict[str, Any]:
    """Return losses, weights and evaluation of TRL's trainer."""
    from trl import SFTConfig, SFTTrainer

    environment(rank, world)
    trained_model = model("ringattn" if ring else "eager")
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(folder, **OPTIONS | {"max_length": TOKENS, "packing": True, "bf16": False} | options)
        trainer = (ring_trainer(SFTTrainer) if ring else SFTTrainer)(
            trained_model, arguments, train_dataset=texts(24, 1), eval_dataset=texts(9, 2), processing_class=tokenizer()
        )
        trainer.train()
        evaluation = trainer.evaluate()["eval_loss"]
    return {"evaluation": torch.tensor(evaluation), **outcome(trainer, trained_model)}


@pytest.mark.parametrize(("strategy", "rows"), [("wrapped", 1), ("bfd", 2)])
def test_packing_of_trl_equals_one_process(strategy: str, rows: int) -> None:
    options: dict[str, Any] = {
        "packing_strategy": strategy,
        "per_device_train_batch_size": rows,
        "per_device_eval_batch_size": rows,
    }
    (theirs,) = rank_processes.group_results(1, partial(fine_tuned, False, 1, **options), patience=IMPORTS)
    for ours in rank_processes.group_results(2, partial(fine_tuned, True, 2, **options), patience=IMPORTS):
        compare(ours, theirs)
