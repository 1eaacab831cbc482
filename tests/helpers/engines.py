"""Configs, batches and plain-torch references for tests that run engines without a driver."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill_rl.config.schema import Config, StudentConfig, TeacherConfig
from distill_rl.types import IGNORE_INDEX, RankBatch, TokenRows


def engine_config(student: str | Path, teachers: Sequence[str | Path] = (), **settings: Any) -> Config:
    """fp32 everywhere; `settings` are dotted keys with double underscores: `loss__top_k=8`, `train__micro_batch_size=1`."""
    config = Config(student=StudentConfig(model=str(student), dtype="fp32"))
    config.teachers = [TeacherConfig(name=f"t{i}", model=str(path), dtype="fp32") for i, path in enumerate(teachers)]
    config.loss.top_k = 16
    config.train.micro_batch_size = 2
    for key, value in settings.items():
        section, name = key.split("__")
        if not hasattr(getattr(config, section), name):
            raise AttributeError(f"no setting {section}.{name}")
        setattr(getattr(config, section), name, value)
    return config


def random_documents(count: int, *, seed: int = 0, vocabulary: int = 320, longest: int = 24) -> list[np.ndarray]:
    """Random ids, 4 to `longest` per document."""
    draw = np.random.default_rng(seed)
    return [draw.integers(5, vocabulary, draw.integers(4, longest + 1)).astype(np.int32) for _ in range(count)]


def token_rows(rows_of_documents: Sequence[Sequence[np.ndarray]], width: int, pad_id: int = 7) -> TokenRows:
    """Rows of one or several documents, each learnt in full; the rest of a row is padding that continues the last one.

    The padding is an ordinary token: the models' own padding token has no embedding, which makes all logits equal.
    """
    shape = (len(rows_of_documents), width)
    ids = np.full(shape, pad_id, np.int32)
    labels = np.full(shape, IGNORE_INDEX, np.int32)
    positions = np.tile(np.arange(width, dtype=np.int32), (shape[0], 1))
    for row, documents in enumerate(rows_of_documents):
        start = 0
        for document in documents:
            stop = start + len(document)
            ids[row, start:stop] = document
            labels[row, start : stop - 1] = document[1:]
            positions[row, start:] = np.arange(width - start)
            start = stop
    return TokenRows(ids, labels, positions)


def rank_batch(rows: TokenRows, dp_rank: int = 0, dp: int = 1, index: int = 0) -> RankBatch:
    """The contiguous part of a global batch that data-parallel rank `dp_rank` of `dp` sees."""
    share = rows.shape[0] // dp
    part = rows[dp_rank * share : (dp_rank + 1) * share]
    return RankBatch(index, dp_rank * share, part, int((rows.labels != IGNORE_INDEX).sum()))


@contextmanager
def no_targets(first_row: int, num_rows: int) -> Iterator[list[Any]]:
    """The target source of a run without teachers."""
    yield []


def fixed_targets(
    teachers: Sequence[dict[str, Tensor]],
    widths: int | Sequence[np.ndarray],
    *,
    first_row: int = 0,
    temperature: float = 1.0,
) -> Any:
    """A target source over tensors [N, …] that begin at global row `first_row`, one dict per teacher.

    `widths` is that of all rows, or for each teacher that of every row.
    """
    from distill_rl.losses.targets import target_of

    def start(teacher: int, row: int) -> int:
        return row * widths if isinstance(widths, int) else int(widths[teacher][:row].sum())

    @contextmanager
    def source(row: int, num_rows: int) -> Iterator[list[Any]]:
        parts = [slice(start(i, row - first_row), start(i, row - first_row + num_rows)) for i in range(len(teachers))]
        yield [
            target_of({name: tensor[part] for name, tensor in one.items()}, temperature)
            for one, part in zip(teachers, parts)
        ]

    return source


def engine_targets(teacher: Any, batch: RankBatch) -> dict[str, Tensor]:
    """All targets of a batch from a teacher engine, concatenated.

    Under sequence parallelism on all ranks of the rows, as a transport would bring them from the first.
    """
    parts = [tensors for _, tensors in teacher.forward(batch)]
    found = [{name: torch.cat([part[name] for part in parts]) for name in parts[0]}]
    group = getattr(getattr(teacher, "world", None), "sp_group", None)
    if group is not None:
        torch.distributed.broadcast_object_list(found, group=group, group_src=0)
    return found[0]


def plain_model(path: str | Path, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """The model as transformers loads it; of a mixture, each expert by itself, as the faster ways know no fp64."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager")


def plain_logits(model: torch.nn.Module, rows: TokenRows, vocabulary: int) -> Tensor:
    """Logits [R, S, vocabulary] document by document, so that no packing can leak into them; padding stays zero."""
    out = torch.zeros(*rows.shape, vocabulary, dtype=next(model.parameters()).dtype)
    parts = []
    for row in range(rows.shape[0]):
        starts = [*np.flatnonzero(rows.position_ids[row] == 0).tolist(), rows.shape[1]]
        for start, stop in itertools.pairwise(starts):
            ids = torch.tensor(rows.input_ids[row : row + 1, start:stop], dtype=torch.long)
            parts.append((row, start, stop, model(input_ids=ids, use_cache=False).logits[0, :, :vocabulary]))
    for row, start, stop, logits in parts:
        out[row, start:stop] = logits
    return out


def plain_topk(
    model: torch.nn.Module, rows: TokenRows, vocabulary: int, k: int, temperature: float = 1.0
) -> dict[str, Tensor]:
    """Top-k targets from the definition, flattened to [N, …]."""
    with torch.no_grad():
        return topk_of(plain_logits(model, rows, vocabulary), rows.labels, k, temperature)


def topk_of(logits: Tensor, labels: np.ndarray, k: int, temperature: float = 1.0) -> dict[str, Tensor]:
    """Top-k targets of logits [R, S, vocabulary] and labels [R, S] from the definition, flattened to [N, …]."""
    logprobs = torch.log_softmax(logits / temperature, dim=-1).flatten(0, 1)
    chosen = torch.tensor(labels, dtype=torch.long).flatten()
    top, ids = logprobs.topk(k, dim=-1)
    rest = logprobs.scatter(1, ids, float("-inf")).logsumexp(-1)
    label = logprobs.gather(1, chosen.clamp(min=0)[:, None])[:, 0]
    return {"ids": ids.int(), "logprobs": top, "rest_logprob": rest, "label_logprob": label}


def plain_losses(
    logits: Tensor, labels: np.ndarray, target: dict[str, Tensor] | None, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(KD, CE) summed over labelled tokens: forward KL over the teacher's k entries and one rest bucket, times T²."""
    flat, wanted = logits.flatten(0, 1), torch.tensor(labels, dtype=torch.long).flatten()
    valid = wanted != IGNORE_INDEX
    ce = torch.nn.functional.cross_entropy(flat, wanted, ignore_index=IGNORE_INDEX, reduction="sum")
    if target is None:
        return ce.new_zeros(()), ce
    student = torch.log_softmax(flat / temperature, dim=-1)
    ids = target["ids"].long()
    rest = student.scatter(1, ids, float("-inf")).logsumexp(-1)
    q = torch.cat([student.gather(1, ids), rest[:, None]], dim=1)
    p = torch.cat([target["logprobs"], target["rest_logprob"][:, None]], dim=1).to(q.dtype)
    kl = (p.exp() * (p - q)).sum(-1)
    return temperature**2 * kl[valid].sum(), ce


def whole_gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Every parameter's whole gradient as a plain tensor, by name; collective where the model is sharded."""
    return {name: _whole(parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None}


def whole_parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """Every whole parameter as a plain copy, by name; collective where the model is sharded."""
    return {name: _whole(parameter.detach()) for name, parameter in model.named_parameters()}


def relative_l2(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """‖found − wanted‖ / ‖wanted‖ over all tensors together; both must have the same names."""
    if found.keys() != wanted.keys():
        raise AssertionError(f"different parameters: {sorted(found.keys() ^ wanted.keys())[:4]}")
    difference = sum((found[name].double() - wanted[name].double()).square().sum() for name in wanted)
    return float((difference / sum(tensor.double().square().sum() for tensor in wanted.values())).sqrt())


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def uneven_packs(documents: Sequence[Any]) -> list[list[Any]]:
    """Twelve documents in eight rows of two, one or none, so that ranks differ in their number of labels."""
    sizes = (2, 2, 1, 0, 2, 1, 2, 2)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [list(documents[start : start + size]) for start, size in zip(starts, sizes)]


def halves(batch: RankBatch) -> tuple[RankBatch, RankBatch]:
    """A rank's batch as two calls get it whose targets do not fit into a ring at once."""
    half = batch.rows.shape[0] // 2
    second = replace(batch, first_row=batch.first_row + half, rows=batch.rows[half:])
    return replace(batch, rows=batch.rows[:half]), second
