from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from distill_rl.config.schema import LossConfig
from distill_rl.losses import DenseLogits, HiddenStates, TopKLogprobs, VocabularyProjection
from distill_rl.models.load import OutputLayer
from distill_rl.observe.metrics import merge, values
from distill_rl.student.loss_sums import LossSums
from distill_rl.student.objective import Blend, Objective, flat_chunks
from distill_rl.types import IGNORE_INDEX, ChunkRows, TeacherPart
from tests.helpers.engines import plain_losses
from tests.helpers.objective import batch_of, compared_teachers, output_of

ROWS, WIDTH, VOCABULARY, TOP = 2, 5, 11, 4


def case(seed: int = 0, teachers: int = 1, temperature: float = 1.0):
    """Student logits (leaf), labels with two ignored, and top-k targets of random teachers."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, WIDTH, VOCABULARY, generator=draw, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (ROWS, WIDTH), generator=draw)
    labels[0, -1] = labels[1, 0] = IGNORE_INDEX
    targets = []
    for _ in range(teachers):
        logprobs = torch.log_softmax(torch.randn(ROWS * WIDTH, VOCABULARY, generator=draw) / temperature, -1)
        top, ids = logprobs.topk(TOP, dim=-1)
        rest = logprobs.scatter(1, ids, float("-inf")).logsumexp(-1)
        targets.append({"ids": ids.int(), "logprobs": top, "rest_logprob": rest, "label_logprob": top[:, 0]})
    return logits, labels, targets


def wire(targets, temperature: float = 1.0) -> list[TopKLogprobs]:
    return [TopKLogprobs.from_tensors(target, temperature) for target in targets]


@pytest.mark.parametrize(
    ("kd_weight", "ce_weight", "weights", "temperature"),
    [
        (1.0, 0.0, (1.0,), 1.0),
        (1.0, 1.0, (1.0,), 2.0),
        (0.3, 2.0, (5.0,), 1.0),
        (0.7, 0.4, (1.0, 3.0), 1.0),
        (0.5, 1.5, (0.0, 2.0), 2.0),
        (0.0, 1.5, (1.0,), 1.0),
    ],
)
def test_loss_is_weighted_sum_over_global_labels(kd_weight, ce_weight, weights, temperature):
    logits, labels, targets = case(3, len(weights), temperature)
    config = LossConfig(kd_weight=kd_weight, ce_weight=ce_weight, temperature=temperature)
    objective = Objective(config, compared_teachers(*weights))
    output = output_of(objective, logits, labels, wire(targets, temperature) if kd_weight else [], 40)
    output.loss.backward()
    exact = logits.detach().double().requires_grad_()
    kds = [plain_losses(exact, labels.numpy(), target, temperature)[0] for target in targets]
    kd = sum(kd * weight / sum(weights) for kd, weight in zip(kds, weights))
    ce = plain_losses(exact, labels.numpy(), None)[1]
    (wanted,) = torch.autograd.grad((kd_weight * kd + ce_weight * ce) / 40, exact)
    torch.testing.assert_close(logits.grad.double(), wanted, rtol=1e-5, atol=1e-7)
    assert output.loss.item() == pytest.approx((kd_weight * kd + ce_weight * ce).item() / 40, rel=1e-5)
    assert output.ce.item() == pytest.approx(ce.item(), rel=1e-5)
    if kd_weight:
        assert output.kd.item() == pytest.approx(kd.item(), rel=1e-5)
        assert [one.item() for one in output.kd_per_teacher] == pytest.approx([one.item() for one in kds], rel=1e-5)


def test_without_teachers_the_loss_is_cross_entropy():
    logits, labels, _ = case()
    output = output_of(Objective(LossConfig(kd_weight=0.0, ce_weight=2.0), []), logits, labels, [], 8)
    output.loss.backward()
    exact = logits.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(2.0 * plain_losses(exact, labels.numpy(), None)[1] / 8, exact)
    torch.testing.assert_close(logits.grad.double(), wanted, rtol=1e-5, atol=1e-7)
    assert output.kd_per_teacher == ()


def test_rows_without_labels_give_a_differentiable_zero():
    logits, labels, targets = case()
    objective = Objective(LossConfig(ce_weight=0.5), compared_teachers(1.0))
    output = output_of(objective, logits, torch.full_like(labels, IGNORE_INDEX), wire(targets), 8)
    output.loss.backward()
    assert output.loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_split_batch_sums_to_the_same_gradient():
    logits, labels, targets = case()
    objective = Objective(LossConfig(ce_weight=0.5), compared_teachers(1.0))
    output_of(objective, logits, labels, wire(targets), 8).loss.backward()
    whole = logits.grad.clone()
    logits.grad = None
    for row in range(ROWS):
        part = [
            {name: tensor[row * WIDTH : (row + 1) * WIDTH] for name, tensor in target.items()} for target in targets
        ]
        output_of(objective, logits[row : row + 1], labels[row : row + 1], wire(part), 8).loss.backward()
    torch.testing.assert_close(logits.grad, whole, rtol=1e-6, atol=1e-9)


def test_wrong_number_of_targets_is_refused():
    logits, labels, targets = case()
    with pytest.raises(ValueError, match="2 teachers need as many targets, got 1"):
        output_of(Objective(LossConfig(), compared_teachers(1.0, 1.0)), logits, labels, wire(targets), 8)


def test_hidden_states_need_the_head_of_their_teacher():
    logits, labels, _ = case(5)
    draw = torch.Generator().manual_seed(6)
    hidden, weight = torch.randn(ROWS * WIDTH, 3, generator=draw), torch.randn(VOCABULARY, 3, generator=draw)
    given, head = HiddenStates(hidden), OutputLayer(weight, None, scale=0.5)
    with_head = Objective(LossConfig(), compared_teachers(1.0, heads=[head]))
    without = Objective(LossConfig(), compared_teachers(1.0))
    found = output_of(with_head, logits, labels, [given], 8)
    wanted = output_of(without, logits, labels, [DenseLogits(0.5 * hidden @ weight.T)], 8)
    torch.testing.assert_close(found.loss, wanted.loss)
    assert wanted.loss > 0
    with pytest.raises(ValueError, match="hidden states: need the output layer of their teacher"):
        output_of(without, logits, labels, [given], 8)


def test_rank_means_merge_to_the_batch_mean():
    logits, labels, targets = case(5, 2)
    objective = Objective(LossConfig(kd_weight=0.5, ce_weight=0.25), compared_teachers(1.0, 3.0))
    parts = []
    for row in range(ROWS):
        sums = LossSums(2, torch.device("cpu"))
        part = [
            {name: tensor[row * WIDTH : (row + 1) * WIDTH] for name, tensor in target.items()} for target in targets
        ]
        sums.add(output_of(objective, logits[row : row + 1], labels[row : row + 1], wire(part), 8))
        batch = batch_of(labels[row : row + 1], (TeacherPart(),) * 2)
        parts.append(sums.metrics("train", objective, objective.blend(), batch))
    whole = output_of(objective, logits, labels, wire(targets), 8)
    got = values(merge(parts))
    assert got["train/kl_loss"] == pytest.approx(whole.kd.item() / 8, rel=1e-6)
    assert got["train/nll_loss"] == pytest.approx(whole.ce.item() / 8, rel=1e-6)
    assert got["train/loss"] == pytest.approx(whole.loss.item(), rel=1e-6)
    assert got["train/kl_loss/t1"] == pytest.approx(whole.kd_per_teacher[1].item() / 8, rel=1e-6)
    mass = torch.cat([t["logprobs"].exp().sum(-1)[labels.flatten() != IGNORE_INDEX] for t in targets[:1]]).mean()
    assert got["train/teacher_mass"] == pytest.approx(mass.item(), rel=1e-5)
    assert got["train/tokens"] == 8


def test_shares_fall_with_higher_scores():
    objective = Objective(LossConfig(kd_weight=0.7, ce_weight=0.4), compared_teachers(1.0, 3.0))
    assert objective.blend().shares == (0.25, 0.75)
    blend = objective.blend([1000.0, 1000.0 + math.log(3)])  # large scores must not vanish
    assert blend.shares == pytest.approx((0.5, 0.5))
    assert (blend.kd, blend.ce) == (0.7, 0.4)


def test_dynamic_scale_replaces_both_weights():
    objective = Objective(LossConfig(kd_weight=0.7, ce_weight=0.4, dynamic_scale="on"), compared_teachers(1.0))
    assert objective.blend(kd_scale=2.5) == Blend(2.5, 1.0, (1.0,))
    without = Objective(LossConfig(kd_weight=0.0, ce_weight=0.4, dynamic_scale="on"), compared_teachers(1.0))
    assert without.blend(kd_scale=2.5) == Blend(0.0, 0.4, ())


def test_dense_logits_ignore_different_padding():
    logits, labels, _ = case(4)
    draw = torch.Generator().manual_seed(9)
    theirs = torch.randn(ROWS * WIDTH, VOCABULARY, generator=draw)
    padded = logits.detach().clone()
    padded[..., -2:] = -torch.inf
    objective = Objective(LossConfig(ce_weight=0.5), compared_teachers(1.0))
    narrow = torch.cat([theirs[:, :-2], torch.full((ROWS * WIDTH, 2), -torch.inf)], 1)
    wide = torch.cat([narrow, torch.full((ROWS * WIDTH, 5), -torch.inf)], 1)
    labels = torch.where(labels >= VOCABULARY - 2, 0, labels)
    losses = [
        output_of(objective, padded, labels, [DenseLogits(each)], 9).loss for each in (theirs[:, :-2], narrow, wide)
    ]
    assert losses[0] == losses[1] == losses[2]


def test_chunks_are_numbered_consecutively_over_rows():
    rows = ChunkRows(
        np.array([[0, 0, 1, -1], [-1, -1, -1, -1], [-1, 0, -1, 1]]), np.array([[0, 1], [-1, -1], [0, 1]]), 9, 5, 5
    )
    flat = flat_chunks(rows, torch.device("cpu"))
    assert flat.student.tolist() == [0, 0, 1, -1, -1, -1, -1, -1, -1, 2, -1, 3]
    assert flat.teacher.tolist() == [0, 1, -1, -1, 2, 3]
    assert flat.count == 4


def test_chunks_and_labels_have_their_own_denominators():
    """Halves of a batch, computed with the counts of the whole batch, add up to the whole."""
    logits, labels, targets = case(5)
    labels[:] = torch.where(labels == IGNORE_INDEX, 0, labels)
    identity = VocabularyProjection.from_arrays(
        range(VOCABULARY + 1), range(VOCABULARY), [1.0] * VOCABULARY, num_teacher=VOCABULARY,
        student_common=range(VOCABULARY), teacher_common=range(VOCABULARY),
    )  # fmt: skip
    numbers = np.array([[0, 1, 2, -1, -1], [0, 1, -1, 2, 3]])
    shared = ChunkRows(numbers, numbers, 7, 7, 7)
    objective = Objective(LossConfig(ce_weight=0.5), compared_teachers(1.0, cross=[("hybrid", identity)]))
    whole = output_of(objective, logits, labels, wire(targets), 10, [TeacherPart(shared)])
    (wanted,) = torch.autograd.grad(whole.loss, logits)
    parts = []
    for row in range(ROWS):
        kept = slice(row * WIDTH, (row + 1) * WIDTH)
        part = wire([{name: tensor[kept] for name, tensor in targets[0].items()}])
        own = slice(row, row + 1)
        parts.append(output_of(objective, logits[own], labels[own], part, 10, [TeacherPart(shared[own])]))
    (found,) = torch.autograd.grad(sum(part.loss for part in parts), logits)
    torch.testing.assert_close(found, wanted)
    exact = [plain_losses(logits.detach(), np.where(numbers >= 0, labels, IGNORE_INDEX), targets[0])[0]]
    kd = whole.kd.item() / 10  # the logged mean over labels
    assert kd == pytest.approx(exact[0].item() / 7, rel=1e-5)
    assert whole.loss.item() == pytest.approx(kd + 0.5 * whole.ce.item() / 10, rel=1e-6)


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("ce_weight", [0.0, 0.5])
def test_lost_teacher_leaves_the_loss_of_the_others(lost, ce_weight):
    weights = (1.0, 3.0, 2.0)
    left = [number for number in range(3) if number != lost]
    config = LossConfig(kd_weight=0.7, ce_weight=ce_weight)
    found, gradients = [], []
    for numbers, all_of_them in ((left, False), (range(3), True)):
        logits, labels, targets = case(3, 3)
        sent = [target if number in left else None for number, target in enumerate(wire(targets))]
        objective = Objective(config, compared_teachers(*(weights[number] for number in numbers)))
        blend = objective.blend([math.inf if sent[number] is None else 0.0 for number in numbers])
        output = output_of(objective, logits, labels, [sent[number] for number in numbers], 8, blend=blend)
        output.loss.backward()
        gradients.append(logits.grad)
        found.append((output.loss.item(), output.kd.item(), output.ce.item(), output.teacher_mass.item()))
        sums = LossSums(len(numbers), logits.device)
        sums.add(output)
        metrics = sums.metrics("train", objective, blend, batch_of(labels, (TeacherPart(),) * len(numbers)))
        assert (f"train/kl_loss/t{lost}" in metrics) == (not all_of_them and lost < 2)
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_what_enters_the_loss_is_counted():
    rows = ChunkRows(
        np.zeros((1, 4), np.int32), np.zeros((1, 4), np.int32), num_chunks=3, num_one_to_one=2, num_covered=4
    )
    both = TeacherPart(rows), TeacherPart()
    for settings, labels, parts, expected in (
        ({"kd_weight": 0.0, "ce_weight": 1.0}, 5, (), 5),
        ({"ce_weight": 0.0}, 5, both, 3 + 5),
        ({"ce_weight": 1.0}, 0, both, 3),
        ({"ce_weight": 0.0, "dynamic_scale": "on"}, 5, both, 5 + 3 + 5),
    ):
        objective = Objective(LossConfig(**settings), compared_teachers(1.0, 1.0, cross=[("alm", None)]))
        assert objective.num_compared(labels, parts) == expected
    alone = Objective(LossConfig(ce_weight=0.0), compared_teachers(1.0, cross=[("strict", None)]))
    assert alone.num_compared(5, [TeacherPart(replace(rows, num_one_to_one=0))]) == 0, "labels alone train nothing"
    unused = Objective(LossConfig(ce_weight=0.0), compared_teachers(0.0, 1.0, cross=[None, ("alm", None)]))
    assert unused.num_compared(5, [TeacherPart(), TeacherPart(rows)]) == 3, "a teacher of weight 0 counts for nothing"


def test_chunks_must_be_given_for_a_teacher_of_another_tokenizer():
    logits, labels, targets = case()
    rows = ChunkRows(np.zeros((ROWS, WIDTH), np.int32), np.zeros((ROWS, WIDTH), np.int32), 3, 2, 4)
    for cross, part in (((), TeacherPart(rows)), ([("alm", None)], TeacherPart())):
        objective = Objective(LossConfig(), compared_teachers(1.0, cross=cross))
        with pytest.raises(
            ValueError, match="teacher t0: chunks must be given exactly for a teacher of another tokenizer"
        ):
            output_of(objective, logits, labels, wire(targets), 8, [part])
