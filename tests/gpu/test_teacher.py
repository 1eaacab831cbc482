"""Targets of TeacherEngine on the device, against a plain fp64 computation on the CPU (`material`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from distill_rl.data.batch.tokenization import Encoded
from distill_rl.parallel.mesh import World
from distill_rl.scaling.shape import Shape
from distill_rl.teacher.engine import TeacherEngine
from distill_rl.types import IGNORE_INDEX, RankBatch
from tests.gpu.conftest import Figures
from tests.gpu.material import (
    EVERY_MODEL,
    VOCABULARY,
    batch_of,
    documents,
    exported,
    on_host,
    plain_hidden,
    plain_labels,
    plain_logits,
    plain_model,
    settings,
    skip_if_large,
    write_model,
)

pytestmark = pytest.mark.gpu

TARGET_BOUND = 5e-5
"""Absolute for log-probabilities, relative for hidden states. fp32 rounds by 6e-8, and logits of a few units go through a
few hundred roundings: CPUs reach 3e-6. TF32 would give 1e-2."""
FP16_BOUND = 2**-10
"""For log-probabilities sent as fp16, relative to max(1, size): half a unit in the last of eleven bits, doubled for the
error of fp32."""


@EVERY_MODEL
def test_every_export_matches_fp64(world: World, tiny: bool, figures: Figures, tmp_path: Path, shape: Shape) -> None:
    """Top-k in fp32 and in fp16, logits, and hidden states. Errors of hidden states and of fp16 are relative."""
    skip_if_large(shape, tiny)
    path = write_model(tmp_path / "model", shape, seed=3)
    texts = documents(5, 60)
    batch = batch_of(texts, 128, packing=True)
    order = _document_order(batch, texts)
    model = plain_model(path)
    with torch.no_grad():
        logits, true_hidden = plain_logits(model, texts), plain_hidden(model, texts)
    logprobs, labels = logits.log_softmax(1), plain_labels(texts)
    labelled = labels != IGNORE_INDEX

    top = _exported(path, world, batch, order, export="topk")
    ids = top["ids"].long()
    assert int(ids.max()) < VOCABULARY, "a padded column is among the top k"
    best = logprobs.topk(ids.shape[1], 1).values
    figures.within("top-k log-probs", _largest(top["logprobs"], best), TARGET_BOUND)
    figures.within("log-probs at the ids", _largest(top["logprobs"], logprobs.gather(1, ids)), TARGET_BOUND)
    rest = logprobs.scatter(1, ids, -torch.inf).logsumexp(1)
    figures.within("log of the rest", _largest(top["rest_logprob"], rest), TARGET_BOUND)
    label_logprobs = logprobs.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    figures.within("label log-probs", _largest(top["label_logprob"][labelled], label_logprobs[labelled]), TARGET_BOUND)

    half = _exported(path, world, batch, order, export="topk", wire_dtype="fp16")
    error = (half["logprobs"].double() - best).abs() / best.abs().clamp(min=1)
    figures.within("top-k log-probs in fp16", float(error.max()), FP16_BOUND)

    dense = _exported(path, world, batch, order, export="logits")["logits"]
    assert dense.shape[1] == shape.columns, f"logits have {dense.shape[1]} columns instead of {shape.columns}"
    assert bool((dense[:, VOCABULARY:] == -torch.inf).all()), "a padded column of the logits is not at -inf"
    figures.within("logits", _largest(dense[:, :VOCABULARY].double().log_softmax(1), logprobs), TARGET_BOUND)

    hidden = _exported(path, world, batch, order, export="hidden")
    (states,) = (tensor for tensor in hidden.values() if tensor.ndim == 2)
    figures.within("hidden states", float((states.double() - true_hidden).norm() / true_hidden.norm()), TARGET_BOUND)
    error = _largest(hidden["label_logprob"][labelled], label_logprobs[labelled])
    figures.within("label log-probs beside them", error, TARGET_BOUND)


def _exported(path: Path, world: World, batch: RankBatch, order: Tensor, **export: str) -> dict[str, Tensor]:
    """The targets of a new teacher engine for the documents' tokens, by name, on the CPU, document by document.

    Args:
        path: folder of the teacher's model.
        order: int64 [N]: positions of the documents' tokens in the flattened rows (`_document_order`).
        export: fields of `TeacherConfig` and their values.
    """
    config = settings(path, path)
    (teacher,) = config.teachers
    for name, value in export.items():
        setattr(teacher, name, value)
    engine = TeacherEngine(config, teacher, world, vocabulary_size=VOCABULARY)
    return {name: on_host(tensor)[order] for name, tensor in exported(engine, batch).items()}


def _document_order(batch: RankBatch, texts: Sequence[Encoded]) -> Tensor:
    """int64 [N]: the positions of all documents' tokens in the flattened rows, document by document.

    Raises:
        ValueError: the ids of a document occur in the rows more than once, or not at all.
    """
    flat = batch.rows.input_ids.reshape(-1)
    positions = []
    for text in texts:
        size = len(text.input_ids)
        (start,) = [i for i in range(len(flat) - size + 1) if (flat[i : i + size] == text.input_ids).all()]
        positions.append(torch.arange(start, start + size))
    return torch.cat(positions)


def _largest(values: Tensor, truth: Tensor) -> float:
    """The largest absolute difference of two tensors of one shape, in fp64."""
    return float((values.double() - truth).abs().max())
