"""Top-1 agreement and acceptance on sharded vocabularies equal those of the whole on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from distill_rl.losses import DenseLogits, StudentHidden, TeacherHidden, TopKLogprobs, token_agreement
from tests.helpers.agreement import TARGETS, assert_measured, related
from tests.helpers.losses import Case, mask_of, sharded
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.ranks


def compare(vocabulary: int, padding: int) -> float:
    """Compares whole and fused students with all targets; returns the number of rows on which both sides agree."""
    mesh, data = init_device_mesh("cpu", (dist.get_world_size(),)), related(11, vocabulary, padding)
    head, bias = sharded(data.head, mesh, 0), sharded(data.bias, mesh, 0)
    students = [
        (sharded(data.student, mesh, 1), None),
        (StudentHidden(data.hidden, head, bias), mesh.get_group()),
    ]
    for kind in TARGETS:
        whole = data.target(Case("tvd", kind, "bucket", 1.0), k=min(9, vocabulary))
        target = whole
        if isinstance(whole, DenseLogits):
            target = DenseLogits(sharded(whole.logits, mesh, 1))
        if isinstance(whole, TeacherHidden):
            teacher_head, teacher_bias = sharded(whole.lm_head_weight, mesh, 0), sharded(mask_of(data.bias), mesh, 0)
            target = TeacherHidden(whole.hidden, teacher_head, logit_scale=1.5, bias=teacher_bias)
        for student, group in students:
            for labels in (data.labels, torch.full_like(data.labels, -100)):
                found = token_agreement(student, target, labels=labels, chunk_size=4, tp_group=group)
                assert_measured(found, data.student, whole, labels=labels)
                assert found.num_tokens == (labels >= 0).sum()
            top1 = token_agreement(student, target, tp_group=group).top1
    return float(top1)


def compare_ties() -> None:
    """The largest logit stands on every rank, at least once; the lowest id is on the first."""
    mesh, size = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_world_size()
    student = torch.tensor([[0.0, 1.0, 1.0]]).repeat(2, size)
    teacher = torch.zeros(2, 3 * size)
    teacher[0, 1:] = 2.0
    teacher[1, 3 * size - 1] = 2.0
    ids = torch.tensor([[1], [3 * size - 1]])
    targets = [DenseLogits(sharded(teacher, mesh, 1)), TopKLogprobs(ids, torch.full((2, 1), -1.0))]
    for target in targets:
        for row, same in enumerate((1, 0)):
            labels = torch.where(torch.arange(2) == row, 0, -100)
            assert token_agreement(sharded(student, mesh, 1), target, labels=labels).top1 == same


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("vocabulary", "padding"), [(507, 11), (3, 0), (97, 60)])
def test_sharded_agreement_equals_that_of_the_whole(ranks: int, vocabulary: int, padding: int) -> None:
    counts = run_ranks(ranks, compare, vocabulary, padding)
    assert counts == [counts[0]] * ranks
    assert 0 < counts[0] < 11


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ties_across_shards_go_to_the_lowest_id(ranks: int) -> None:
    run_ranks(ranks, compare_ties)
