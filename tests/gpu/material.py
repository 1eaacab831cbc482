"""Shared by the tests of engines: random models and rows, settings, and a plain fp64 version of a training step.

The engines are compared with the plain step: transformers' model and torch's AdamW on the CPU with whole logits, one
document at a time, so that padding and packing cannot affect it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distill_rl.config.schema import Config, StudentConfig, TeacherConfig
from distill_rl.data.batch.collate import BatchPlan, BatchSharding
from distill_rl.data.batch.tokenization import Encoded
from distill_rl.losses import TopKLogprobs, reference
from distill_rl.losses.targets import target_of
from distill_rl.scaling.shape import Shape
from distill_rl.teacher.engine import TeacherEngine
from distill_rl.types import IGNORE_INDEX, RankBatch
from tests.helpers.rows import laid_out

VOCABULARY = 320
"""Ids in use."""
PADDED_VOCABULARY = 352
"""Rows of embedding tables, which are more than the ids in use, like those of real models."""
TOP_K = 16


def small(family: str, hidden: int = 32, layers: int = 2, heads: int = 4) -> Shape:
    """The shape of a small decoder with two key-value heads and a padded embedding table; `family`: llama or qwen3."""
    return Shape(
        family, family, layers, hidden, 2 * hidden, heads, 2, hidden // heads, PADDED_VOCABULARY, VOCABULARY, tied=False
    )


def middle(family: str) -> Shape:
    """The shape of a model that is large enough to keep a GPU busy, and small enough for fp32 checks."""
    return small(family, hidden=384, layers=4, heads=6)


EVERY_MODEL = pytest.mark.parametrize(
    "shape",
    [pytest.param(make(name), id=f"{name}-{make.__name__}") for name in ("llama", "qwen3") for make in (small, middle)],
)
"""Tests that compare engines on models; the larger ones are only for a GPU (`skip_if_large`)."""


def skip_if_large(shape: Shape, tiny: bool) -> None:
    if tiny and shape.hidden > small(shape.family).hidden:
        pytest.skip("small sizes only")


def write_model(folder: Path, shape: Shape, seed: int, *, tied: bool = False) -> Path:
    """Writes a random fp32 model as a Hugging Face folder without a tokenizer, and returns the folder.

    Vectors, such as norm weights, are random too. torch's own random state stays as it was.

    Args:
        tied: whether the output layer is the embedding table; overrides `shape.tied`.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = replace(shape, tied=tied).config(
        max_position_embeddings=2048, initializer_range=max(0.02, 3.2 / shape.hidden), bos_token_id=0, eos_token_id=1
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def settings(student: Path, teacher: Path, *, dtype: str = "fp32", kernels: str = "torch") -> Config:
    """A configuration for engines, with one teacher: KD on TOP_K targets sent as fp32, plus half of the CE.

    Args:
        student, teacher: folders of the models.
        dtype: of both models.
        kernels: of the student.
    """
    config = Config(student=StudentConfig(model=str(student), dtype=dtype, kernels=kernels))  # type: ignore[arg-type]
    config.teachers = [TeacherConfig(model=str(teacher), dtype=dtype, wire_dtype="fp32")]  # type: ignore[arg-type]
    config.loss.top_k, config.loss.ce_weight = TOP_K, 0.5
    config.train.micro_batch_size = 2
    config.schedule.kind = "constant"
    # An epsilon well above the rounding errors of gradients, which AdamW would otherwise scale up to full steps.
    config.optimizer.lr, config.optimizer.eps = 1e-3, 1e-5
    return config


def documents(count: int, longest: int, seed: int = 0) -> list[Encoded]:
    """Documents of random ids, a quarter of `longest` to `longest` tokens each, with all tokens trained on.

    The same arguments always give the same documents.
    """
    draw = np.random.default_rng(seed)
    lengths = draw.integers(longest // 4, longest + 1, count)
    return [Encoded(draw.integers(2, VOCABULARY, size).astype(np.int32), np.ones(size, bool)) for size in lengths]


def batch_of(texts: Sequence[Encoded], max_length: int, *, packing: bool, index: int = 0) -> RankBatch:
    """The batch that the aligner builds from these documents for a single rank; its rows are a multiple of two.

    Args:
        max_length: most tokens in a row.
        packing: puts several documents into a row; otherwise one per row.
        index: of the batch.

    Raises:
        ValueError: with packing, a document that is too long.
    """
    rows = laid_out(
        texts, BatchPlan(BatchSharding(1, 2), (), max_length, packing, pad_id=5, on_gpu=torch.cuda.is_available())
    )
    return RankBatch(index, 0, rows, int((rows.labels != IGNORE_INDEX).sum()))


def exported(teacher: TeacherEngine, batch: RankBatch) -> dict[str, Tensor]:
    """Computes the targets of a batch, by name: those of all micro-batches, concatenated along the tokens of the rows.

    They are on the engine's device, in its wire dtype.
    """
    parts = [tensors for _, tensors in teacher.forward(batch)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def targets_from(teacher: TeacherEngine, batch: RankBatch) -> Any:
    """A target source for `StudentEngine` with the targets of a batch, which the teacher computes in this call."""
    return target_source(exported(teacher, batch), batch.rows.shape[1], teacher.config.loss.temperature)


def target_source(tensors: Mapping[str, Tensor], width: int, temperature: float) -> Any:
    """A target source for `StudentEngine` with a single teacher: a context manager that yields one target in a list.

    Args:
        tensors: the exported targets of a whole batch by name, [R · width, …], in the order of the flattened rows.
        width: tokens in a row of the batch.
        temperature: at which the targets were exported.
    """

    @contextmanager
    def source(first_row: int, num_rows: int) -> Iterator[list[Any]]:
        part = slice(first_row * width, (first_row + num_rows) * width)
        yield [target_of({name: tensor[part] for name, tensor in tensors.items()}, temperature)]

    return source


def plain_model(folder: Path) -> nn.Module:
    """The model loaded by transformers on the CPU in fp64."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")


def plain_hidden(model: nn.Module, texts: Sequence[Encoded]) -> Tensor:
    """The last hidden states [N, H] of all positions; every document gets a forward pass of its own, in order."""
    parts = []
    for text in texts:
        ids = torch.tensor(text.input_ids, dtype=torch.long)[None]
        parts.append(model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0])  # type: ignore[operator]
    return torch.cat(parts)


def plain_logits(model: nn.Module, texts: Sequence[Encoded]) -> Tensor:
    """Logits [N, VOCABULARY] of all positions, document by document, without the padded columns."""
    return model.lm_head(plain_hidden(model, texts))[:, :VOCABULARY]  # type: ignore[operator]


def plain_labels(texts: Sequence[Encoded]) -> Tensor:
    """int64 [N]: the next token in the document; the last position of a document has no label."""
    return torch.cat([torch.tensor([*text.input_ids[1:], IGNORE_INDEX], dtype=torch.long) for text in texts])


@torch.no_grad()
def plain_topk(model: nn.Module, texts: Sequence[Encoded]) -> TopKLogprobs:
    """The top TOP_K targets of all positions, document by document, by their definition; fp64 for `plain_model`."""
    logprobs = plain_logits(model, texts).log_softmax(1)
    top, ids = logprobs.topk(TOP_K, 1)
    return TopKLogprobs(ids, top, logprobs.scatter(1, ids, -torch.inf).logsumexp(1))


class PlainStudent:
    """Trains in fp64 on the CPU with the settings of a `Config`: forward KL to top-k targets, plus CE.

    The targets are given per step, for all positions of its documents (`plain_topk`).
    """

    def __init__(self, config: Config, targets: Sequence[TopKLogprobs]):
        """Loads the model of `config.student`; `targets` holds the targets of each step."""
        self.config, self.targets = config, targets
        self.model = plain_model(Path(config.student.model))
        optimizer = config.optimizer
        groups = [
            {"params": [p for p in self.model.parameters() if p.ndim > 1], "weight_decay": optimizer.weight_decay},
            {"params": [p for p in self.model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ]
        beta1, beta2 = optimizer.betas
        self.optimizer = torch.optim.AdamW(groups, lr=optimizer.lr, betas=(beta1, beta2), eps=optimizer.eps)

    def backward(self, step: int, texts: Sequence[Encoded]) -> tuple[float, float]:
        """Mean KD and mean CE of a step's documents; adds the gradient of KD + `loss.ce_weight` · CE to `.grad`.

        Args:
            step: index of the step's targets.
            texts: the documents to which these targets belong.
        """
        ce_weight, logits = self.config.loss.ce_weight, plain_logits(self.model, texts)
        # The reference computes r·KD + (1 - r)·CE, the engines KD + w·CE: equal for r = 1 / (1 + w), divided by r.
        kd_ratio = 1 / (1 + ce_weight)
        output = reference.kd_loss(logits, self.targets[step], labels=plain_labels(texts), kd_ratio=kd_ratio)
        (output.loss / kd_ratio).backward()
        assert output.ce_loss is not None
        return float(output.kd_loss), float(output.ce_loss)

    def update(self) -> None:
        """Clips the gradients, takes one optimizer step and clears the gradients, in plain torch."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.train.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """A full copy of the gradient of every parameter that has one, on the CPU, by name."""
    return {name: on_host(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A full copy of every parameter on the CPU, by name."""
    return {name: on_host(parameter.detach()) for name, parameter in model.named_parameters()}


def on_host(tensor: Tensor) -> Tensor:
    """A full copy on the CPU; a DTensor is gathered from all shards, which is collective."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.to("cpu", copy=True)


def largest(errors: Iterable[float]) -> float:
    """The largest of at least one error; NaN if any of them is, which `max` may drop."""
    return float(torch.tensor(list(errors), dtype=torch.float64).max())


def tensor_error(values: Tensor, truth: Tensor) -> float:
    """‖values - truth‖ / ‖truth‖ in fp64."""
    return relative_error({"": values}, {"": truth})


def relative_error(values: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """‖values - truth‖ / ‖truth‖ over all tensors together, in fp64.

    Raises:
        AssertionError: the two have different names.
    """
    assert values.keys() == truth.keys(), f"other parameters: {sorted(values.keys() ^ truth.keys())[:4]}"
    difference = sum((values[name].double() - truth[name].double()).square().sum() for name in truth)
    return float((difference / sum(tensor.double().square().sum() for tensor in truth.values())) ** 0.5)
