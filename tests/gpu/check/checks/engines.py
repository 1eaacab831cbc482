"""StudentEngine and TeacherEngine on the device, against plain fp64 computations on the CPU (`material`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from distill_rl.config.schema import Config
from distill_rl.data.batch.tokenization import Encoded
from distill_rl.parallel.mesh import World
from distill_rl.scaling.shape import Shape
from distill_rl.student.engine import StudentEngine
from distill_rl.teacher.engine import TeacherEngine
from distill_rl.types import IGNORE_INDEX, RankBatch
from tests.gpu.check.material import (
    VOCABULARY,
    PlainStudent,
    batch_of,
    documents,
    exported,
    gradients,
    largest,
    on_every_model,
    on_host,
    plain_hidden,
    plain_labels,
    plain_logits,
    plain_model,
    plain_topk,
    relative_error,
    settings,
    targets_from,
    weights,
    write_model,
)

STEPS = 4
LOSS_BOUND = 1e-5
GRADIENT_BOUND = 2e-5
"""fp32 rounds by 6e-8, and a gradient goes through a few hundred roundings in sums that partly cancel: CPUs reach 1e-6.
TF32, which must be off, would give 1e-3, and attention across documents 1e-1."""
WEIGHTS_BOUND = 1e-4
"""Relative to the change over four steps. AdamW divides a gradient by its size, which amplifies the rounding of small
gradients."""
BF16_GRADIENT_BOUND = 0.06
"""bf16 rounds by 4e-3, and a gradient goes through the layers twice; CPUs reach half of this."""
TARGET_BOUND = 5e-5
"""Absolute for log-probabilities, relative for hidden states. fp32 rounds by 6e-8, and logits of a few units go through a
few hundred roundings: CPUs reach 3e-6. TF32 would give 1e-2."""
FP16_BOUND = 2**-10
"""For log-probabilities sent as fp16, relative to max(1, size): half a unit in the last of eleven bits, doubled for the
error of fp32."""


def check_student(device: torch.device, tiny: bool) -> dict[str, float]:
    """Compares the student engine with plain fp64 code on every model: losses and gradient of a step, and four steps.

    Args:
        tiny: only the small models.

    Returns:
        The largest relative error over all models, by what was compared.

    Raises:
        AssertionError: an error above its bound; TF32 is on.
    """
    assert not torch.backends.cuda.matmul.allow_tf32, "TF32 must be off, but allow_tf32 is set"
    return on_every_model(device, tiny, _student_errors)


def _student_errors(folder: Path, shape: Shape, world: World) -> Iterator[tuple[str, float, float]]:
    """Yields (what, error, bound) for one model; the errors are relative, and the caller compares them with the bounds.

    Compared are loss and gradient in fp32 on padded and on packed rows, the gradient in bf16, and STEPS whole steps.

    Args:
        folder: an empty folder, in which a student and a teacher of this shape are written.
    """
    student = write_model(folder / "student", shape, seed=1, tied=True)
    teacher = write_model(folder / "teacher", shape, seed=2)
    config = settings(student, teacher)
    texts = [documents(5, 40, seed=step) for step in range(STEPS)]
    oracle = plain_model(teacher)
    plain = PlainStudent(config, [plain_topk(oracle, step_texts) for step_texts in texts])
    truth = plain.backward(0, texts[0])
    true_gradient = gradients(plain.model)
    for rows, packing in (("padded", False), ("packed", True)):
        losses, gradient = _first_gradient(config, world, texts[0], packing=packing)
        yield "loss", largest(abs(loss / expected - 1) for loss, expected in zip(losses, truth)), LOSS_BOUND
        yield f"gradient, {rows}", relative_error(gradient, true_gradient), GRADIENT_BOUND
    half = settings(student, teacher, dtype="bf16")
    _, gradient = _first_gradient(half, world, texts[0], packing=True)
    yield "gradient, bf16", relative_error(gradient, true_gradient), BF16_GRADIENT_BOUND
    yield from _steps(config, world, texts, plain)


def _first_gradient(
    config: Config, world: World, texts: Sequence[Encoded], *, packing: bool
) -> tuple[tuple[float, float], dict[str, Tensor]]:
    """(KD, CE) and the gradient by parameter of the first step of new engines; updates no weight.

    Args:
        packing: packs several texts into a row; otherwise one text per row.
    """
    batch = batch_of(texts, 96, packing=packing)
    teacher, engine = _engines(config, world)
    metrics = engine.forward_backward(batch, targets_from(teacher, batch))
    return (metrics["train/kl_loss"].value, metrics["train/nll_loss"].value), gradients(engine.model)


def _engines(config: Config, world: World) -> tuple[TeacherEngine, StudentEngine]:
    """A new teacher and a new student engine of one configuration, on this rank."""
    teacher = TeacherEngine(config, config.teachers[0], world, vocabulary_size=VOCABULARY)
    return teacher, StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=STEPS)


def _steps(
    config: Config, world: World, texts: Sequence[Sequence[Encoded]], plain: PlainStudent
) -> Iterator[tuple[str, float, float]]:
    """Trains a new engine and the plain student on packed rows; yields two (what, error, bound).

    The first is the largest relative error of the KD losses after the first step, the second the relative error of the
    change of the weights over all steps.

    Args:
        texts: the documents of each step.
        plain: the fp64 student; it already holds the gradient of the first step, and is trained on here.
    """
    teacher, engine = _engines(config, world)
    before = weights(plain.model)
    errors: list[float] = []
    for step, step_texts in enumerate(texts):
        batch = batch_of(step_texts, 96, packing=True, index=step)
        metrics = engine.train_step(batch, targets_from(teacher, batch))
        if step:
            kd, _ = plain.backward(step, step_texts)
            errors.append(abs(metrics["train/kl_loss"].value / kd - 1))
        plain.update()
    expected = {name: weight - before[name] for name, weight in weights(plain.model).items()}
    change = {name: weight.double() - before[name] for name, weight in weights(engine.model).items()}
    yield "loss, later steps", largest(errors), WEIGHTS_BOUND
    yield "change of weights", relative_error(change, expected), WEIGHTS_BOUND


def check_teacher(device: torch.device, tiny: bool) -> dict[str, float]:
    """Compares the targets of the teacher engine, in every kind of export, with plain fp64 code on every model.

    Args:
        tiny: only the small models.

    Returns:
        The largest error over all models, by what was compared: relative for hidden states and for log-probabilities in
        fp16, absolute otherwise.

    Raises:
        AssertionError: an error above its bound, probability on a padded column, or a wrong number of columns.
    """
    return on_every_model(device, tiny, _teacher_errors)


def _teacher_errors(folder: Path, shape: Shape, world: World) -> Iterator[tuple[str, float, float]]:
    """Yields (what, error, bound) for one model, of every export; the caller compares the errors with the bounds.

    The exports are top-k in fp32 and in fp16, logits, and hidden states; label log-probabilities are compared for top-k
    in fp32 and for hidden states.

    Args:
        folder: an empty folder, in which a model of this shape is written.

    Raises:
        AssertionError: a padded column is among the top k or above −inf, or the logits have a wrong number of columns.
    """
    path = write_model(folder / "model", shape, seed=3)
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
    yield "top-k log-probs", _largest(top["logprobs"], best), TARGET_BOUND
    yield "log-probs at the ids", _largest(top["logprobs"], logprobs.gather(1, ids)), TARGET_BOUND
    rest = logprobs.scatter(1, ids, -torch.inf).logsumexp(1)
    yield "log of the rest", _largest(top["rest_logprob"], rest), TARGET_BOUND
    label_logprobs = logprobs.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    yield "label log-probs", _largest(top["label_logprob"][labelled], label_logprobs[labelled]), TARGET_BOUND

    half = _exported(path, world, batch, order, export="topk", wire_dtype="fp16")
    error = (half["logprobs"].double() - best).abs() / best.abs().clamp(min=1)
    yield "top-k log-probs in fp16", float(error.max()), FP16_BOUND

    dense = _exported(path, world, batch, order, export="logits")["logits"]
    assert dense.shape[1] == shape.columns, f"logits have {dense.shape[1]} columns instead of {shape.columns}"
    assert bool((dense[:, VOCABULARY:] == -torch.inf).all()), "a padded column of the logits is not at -inf"
    yield "logits", _largest(dense[:, :VOCABULARY].double().log_softmax(1), logprobs), TARGET_BOUND

    hidden = _exported(path, world, batch, order, export="hidden")
    (states,) = (tensor for tensor in hidden.values() if tensor.ndim == 2)
    yield "hidden states", float((states.double() - true_hidden).norm() / true_hidden.norm()), TARGET_BOUND
    yield (
        "label log-probs beside them",
        _largest(hidden["label_logprob"][labelled], label_logprobs[labelled]),
        TARGET_BOUND,
    )


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
