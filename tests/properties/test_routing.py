"""Teachers that are chosen by row: a batch has the gradient of the weighted sum of its parts, however it is divided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distill_rl.config.schema import LossConfig
from distill_rl.losses import DenseLogits, TopKLogprobs, VocabularyProjection
from distill_rl.losses.cross_tokenizer import reference as reference_chunks
from distill_rl.observe.metrics import Metric, merge
from distill_rl.student.loss_sums import LossSums
from distill_rl.student.objective import Objective, flat_chunks
from distill_rl.types import IGNORE_INDEX, ChunkRows, TeacherPart, TokenWeights
from tests.helpers.engines import plain_losses
from tests.helpers.objective import batch_of, compared_teachers, output_of

ROWS, WIDTH, VOCABULARY, TOP = 4, 6, 11, 3
WEIGHTS = st.sampled_from([0.0, 0.0, 0.25, 1.0, 1.0, 3.0])


def targets_of(draw: torch.Generator) -> dict[str, torch.Tensor]:
    logprobs = torch.log_softmax(torch.randn(ROWS * WIDTH, VOCABULARY, generator=draw), -1)
    top, ids = logprobs.topk(TOP, dim=-1)
    rest = logprobs.scatter(1, ids, float("-inf")).logsumexp(-1)
    return {"ids": ids.int(), "logprobs": top, "rest_logprob": rest, "label_logprob": top[:, 0]}


def token_weights(of_rows: list[float], labels: np.ndarray) -> TokenWeights | None:
    of_tokens = np.where(labels == IGNORE_INDEX, 0, np.array(of_rows, dtype=np.float32)[:, None]).astype(np.float32)
    if (np.array(of_rows) == 1).all():
        return None  # as `RowShares` has it
    return TokenWeights(of_tokens, float(of_tokens.sum(dtype=np.float64)), int((of_tokens > 0).sum()))


def parts_of(size: int) -> list[slice]:
    return [slice(first, first + size) for first in range(0, ROWS, size)]


def case(seed: int, teachers: int, of_rows: list[list[float]]) -> tuple[Any, ...]:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, WIDTH, VOCABULARY, generator=draw)
    labels = torch.randint(0, VOCABULARY, (ROWS, WIDTH), generator=draw)
    labels[torch.rand(ROWS, WIDTH, generator=draw) < 0.3] = IGNORE_INDEX
    return (
        logits,
        labels,
        [targets_of(draw) for _ in range(teachers)],
        [token_weights(one, labels.numpy()) for one in of_rows],
    )


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_gradient_is_that_of_the_parts(data: st.DataObject):
    """KD = Σᵢ sᵢ·Wᵢ·KDᵢ / Σ sⱼ·Wⱼ with KDᵢ the plain fp64 loss of the rows of teacher i alone, in any division."""
    teachers = data.draw(st.integers(1, 3))
    of_rows = data.draw(st.lists(st.lists(WEIGHTS, min_size=ROWS, max_size=ROWS), min_size=teachers, max_size=teachers))
    sizes = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=teachers, max_size=teachers))
    ce, size = data.draw(st.sampled_from([0.0, 0.5])), data.draw(st.sampled_from([1, 2, 4]))
    logits, labels, targets, weights = case(data.draw(st.integers(0, 99)), teachers, of_rows)
    count = int((labels != IGNORE_INDEX).sum())

    exact = logits.double().requires_grad_()
    means, totals = [], []
    for target, one in zip(targets, of_rows):
        # Rows of one weight are a batch of their own: that is what "training on the parts" means.
        kd = exact.new_zeros(())
        for weight in set(one) - {0.0}:
            kept = torch.tensor([each == weight for each in one])
            own = torch.where(kept[:, None], labels, IGNORE_INDEX).numpy()
            kd = kd + weight * plain_losses(exact, own, target)[0]
        total = sum(weight * int((labels[row] != IGNORE_INDEX).sum()) for row, weight in enumerate(one))
        means.append(kd / total if total else kd)
        totals.append(total)
    taught = sum(s * total for s, total in zip(sizes, totals))
    wanted = sum(
        (s * total / taught * mean for s, total, mean in zip(sizes, totals, means) if taught), exact.new_zeros(())
    )
    loss = wanted + ce * plain_losses(exact, labels.numpy(), None)[1] / max(count, 1)
    (gradient,) = torch.autograd.grad(loss, exact) if loss.requires_grad else (torch.zeros_like(exact),)

    objective = Objective(LossConfig(ce_weight=ce, top_k=TOP), compared_teachers(*sizes))
    blend = objective.blend(asked=[count if one is None else one.total for one in weights])
    leaf, ranks, value = logits.clone().requires_grad_(), [], 0.0
    for part in parts_of(size):
        own = labels[part]
        tokens = slice(part.start * WIDTH, part.stop * WIDTH)
        sent = [TopKLogprobs.from_tensors({k: v[tokens] for k, v in one.items()}, 1.0) for one in targets]
        parts = [TeacherPart(None, one)[part] for one in weights]
        output = output_of(objective, leaf[part], own, sent, count, parts, blend)
        output.loss.backward()
        value += output.loss.item()
        sums = LossSums(teachers, logits.device)
        sums.add(output)
        ranks.append(sums.metrics("train", objective, blend, batch_of(own, parts, by_row=True)))
    torch.testing.assert_close(leaf.grad.double(), gradient, rtol=1e-4, atol=1e-6)
    assert value == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)

    found = merge(ranks)
    assert found["train/kl_loss"].value == pytest.approx(float(wanted.detach()), rel=1e-4, abs=1e-6)
    assert found["train/loss"].value == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    for i, (mean, total) in enumerate(zip(means, totals)):
        share = sum(int((labels[row] != IGNORE_INDEX).sum()) for row in range(ROWS) if of_rows[i][row] > 0)
        assert found[f"train/taught/t{i}"] == Metric(pytest.approx(share / max(count, 1)), "mean", count)
        if teachers > 1 and total:
            assert found[f"train/kl_loss/t{i}"].value == pytest.approx(float(mean.detach()), rel=1e-4)
            assert found[f"train/kl_loss/t{i}"].weight == pytest.approx(total)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_gradient_by_chunks_is_that_of_the_parts(data: st.DataObject):
    """A teacher of another tokenizer: its mean is one over chunks, weighted; its size is still counted in labels.

    Beside it is one that is asked for all rows, token by token.
    """
    method = data.draw(st.sampled_from(["hybrid", "gold", "strict", "uld"]))
    of_rows = data.draw(st.lists(WEIGHTS, min_size=ROWS, max_size=ROWS))
    ce, size = data.draw(st.sampled_from([0.0, 0.5])), data.draw(st.sampled_from([1, 2, 4]))
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    logits = torch.randn(ROWS, WIDTH, VOCABULARY, generator=draw)
    labels = torch.randint(0, VOCABULARY, (ROWS, WIDTH), generator=draw)
    dense = torch.randn(ROWS * WIDTH, VOCABULARY, generator=draw)
    sent = DenseLogits(dense, torch.log_softmax(dense, -1)[:, 3])
    target = targets_of(draw)
    numbers = [np.array([side] * ROWS, dtype=np.int32) for side in ([0, 1, 1, 2, -1, -1], [0, 1, 2, 2, 2, -1])]
    for side in numbers:
        side[np.array(of_rows) == 0] = -1
    asked_rows = sum(weight > 0 for weight in of_rows)
    whole = ChunkRows(*numbers, 3 * asked_rows, asked_rows, 4 * asked_rows)
    weights = token_weights(of_rows, labels.numpy())
    if weights is not None:
        whole = replace(whole, weighted=(3 * sum(of_rows), sum(of_rows)))
    identity = VocabularyProjection.from_arrays(
        range(VOCABULARY + 1), range(VOCABULARY), [1.0] * VOCABULARY, num_teacher=VOCABULARY,
        student_common=range(VOCABULARY), teacher_common=range(VOCABULARY),
    )  # fmt: skip

    exact, count = logits.double().requires_grad_(), ROWS * WIDTH
    kd, compared, size_of_chunks = exact.new_zeros(()), 0.0, WIDTH * sum(of_rows)
    for weight in set(of_rows) - {0.0}:
        kept = np.array(of_rows) == weight
        part = replace(
            whole, student=np.where(kept[:, None], numbers[0], -1), teacher=np.where(kept[:, None], numbers[1], -1)
        )
        output = reference_chunks.chunk_kd_loss(
            exact,
            sent,
            flat_chunks(part, exact.device),
            identity,
            method=method,
            labels=labels,
            top_k=TOP,
            tau=LossConfig().alm_tau,
        )
        kd = kd + weight * output.kd
        compared += weight * int(kept.sum()) * (1 if method == "strict" else 3)
    mean_of_chunks = kd / compared if compared else kd
    mean_of_tokens = plain_losses(exact, labels.numpy(), target)[0] / count
    wanted = (size_of_chunks * mean_of_chunks + 2 * count * mean_of_tokens) / (size_of_chunks + 2 * count)
    loss = wanted + ce * plain_losses(exact, labels.numpy(), None)[1] / count
    (gradient,) = torch.autograd.grad(loss, exact)

    objective = Objective(LossConfig(ce_weight=ce, top_k=TOP), compared_teachers(1.0, 2.0, cross=[(method, identity)]))
    blend = objective.blend(asked=[count if weights is None else weights.total, count])
    leaf = logits.clone().requires_grad_()
    for part in parts_of(size):
        tokens, own = slice(part.start * WIDTH, part.stop * WIDTH), labels[part]
        theirs = DenseLogits(sent.logits[tokens], sent.label_logprob[tokens])
        ours = TopKLogprobs.from_tensors({name: tensor[tokens] for name, tensor in target.items()}, 1.0)
        parts = [TeacherPart(whole, weights)[part], TeacherPart()]
        output = output_of(objective, leaf[part], own, [theirs, ours], count, parts, blend)
        output.loss.backward()
    torch.testing.assert_close(leaf.grad.double(), gradient, rtol=1e-4, atol=1e-6)
