"""The targets that TeacherEngine exports on the device, against their definition in fp64 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from distill_rl.data.collate import Encoded
from distill_rl.gpu_check.material import (
    VOCABULARY,
    Shape,
    batch_of,
    documents,
    exported,
    on_every_model,
    on_host,
    plain_labels,
    plain_logits,
    plain_model,
    settings,
    write_model,
)
from distill_rl.parallel.mesh import World
from distill_rl.teacher.engine import TeacherEngine
from distill_rl.types import IGNORE_INDEX, RankBatch

BOUND = 5e-5
"""Absolute for log-probabilities, relative for hidden states. fp32 rounds by 6e-8, and logits of a few units go through a
few hundred roundings: CPUs reach 3e-6. TF32 would give 1e-2."""
FP16_BOUND = 2**-10
"""For log-probabilities sent as fp16, relative to max(1, size): half a unit in the last of eleven bits, doubled for the
error of fp32."""


def check(device: torch.device, tiny: bool) -> dict[str, float]:
    """The largest errors over all models and exports.

    Raises:
        AssertionError: an error above its bound; probability on a padded column; top-k that are not the best k.
    """
    return on_every_model(device, tiny, _errors)


def _errors(folder: Path, shape: Shape, world: World) -> Iterator[tuple[str, float, float]]:
    """(what, error, bound)"""
    path = write_model(folder / "model", shape, seed=3)
    texts = documents(5, 60)
    batch = batch_of(texts, 128, packing=True)
    order = _document_order(batch, texts)
    model = plain_model(path)
    with torch.no_grad():
        logits = plain_logits(model, texts)
    logprobs, labels = logits.log_softmax(1), plain_labels(texts)
    labelled = labels != IGNORE_INDEX

    top = _exported(path, world, batch, order, export="topk")
    ids = top["ids"].long()
    assert int(ids.max()) < VOCABULARY, "a padded column is among the top k"
    best = logprobs.topk(ids.shape[1], 1).values
    yield "top-k log-probs", _largest(top["logprobs"], best), BOUND
    yield "log-probs at the ids", _largest(top["logprobs"], logprobs.gather(1, ids)), BOUND
    rest = logprobs.scatter(1, ids, -torch.inf).logsumexp(1)
    yield "log of the rest", _largest(top["rest_logprob"], rest), BOUND
    label_logprobs = logprobs.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    yield "label log-probs", _largest(top["label_logprob"][labelled], label_logprobs[labelled]), BOUND

    half = _exported(path, world, batch, order, export="topk", wire_dtype="fp16")
    error = (half["logprobs"].double() - best).abs() / best.abs().clamp(min=1)
    yield "top-k log-probs in fp16", float(error.max()), FP16_BOUND

    dense = _exported(path, world, batch, order, export="logits")["logits"]
    assert dense.shape[1] == shape.columns, f"logits have {dense.shape[1]} columns instead of {shape.columns}"
    assert bool((dense[:, VOCABULARY:] == -torch.inf).all()), "a padded column of the logits is not at -inf"
    yield "logits", _largest(dense[:, :VOCABULARY].double().log_softmax(1), logprobs), BOUND

    hidden = _exported(path, world, batch, order, export="hidden")
    expected = _plain_hidden(model, texts)
    (states,) = (tensor for tensor in hidden.values() if tensor.ndim == 2)
    yield "hidden states", float((states.double() - expected).norm() / expected.norm()), BOUND
    yield "label log-probs beside them", _largest(hidden["label_logprob"][labelled], label_logprobs[labelled]), BOUND


def _exported(path: Path, world: World, batch: RankBatch, order: Tensor, **export: str) -> dict[str, Tensor]:
    """An engine's targets for the documents' tokens, on the CPU, document by document."""
    config = settings(path, path)
    (teacher,) = config.teachers
    for name, value in export.items():
        setattr(teacher, name, value)
    engine = TeacherEngine(config, teacher, world, vocabulary_size=VOCABULARY)
    return {name: on_host(tensor)[order] for name, tensor in exported(engine, batch).items()}


def _document_order(batch: RankBatch, texts: Sequence[Encoded]) -> Tensor:
    """The positions of all documents' tokens in the flattened rows, document by document."""
    flat = batch.rows.input_ids.reshape(-1)
    positions = []
    for text in texts:
        size = len(text.input_ids)
        (start,) = [i for i in range(len(flat) - size + 1) if (flat[i : i + size] == text.input_ids).all()]
        positions.append(torch.arange(start, start + size))
    return torch.cat(positions)


@torch.no_grad()
def _plain_hidden(model: nn.Module, texts: Sequence[Encoded]) -> Tensor:
    parts = []
    for text in texts:
        ids = torch.tensor(text.input_ids, dtype=torch.long)[None]
        parts.append(model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0])  # type: ignore[operator]
    return torch.cat(parts)


def _largest(values: Tensor, truth: Tensor) -> float:
    return float((values.double() - truth).abs().max())
