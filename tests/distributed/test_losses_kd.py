"""KD on sharded logits: value and gradient are those of the whole, on every rank, to fp64 rounding."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from distill_rl.losses import DenseLogits, TeacherHidden, kd_loss
from tests.helpers.losses import Batch, Case, all_cases, assert_close, assert_same, batch, oracle, sharded
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.ranks


def sharded_target(case: Case, data: Batch, mesh):
    target = data.target(case)
    if isinstance(target, DenseLogits):
        return DenseLogits(sharded(target.logits, mesh, 1))
    if isinstance(target, TeacherHidden):
        return TeacherHidden(target.hidden, sharded(target.lm_head_weight, mesh, 0), target.softcap, target.logit_scale)
    return target


def compare(case: Case, data: Batch, mesh, factor: float = 1.7, **keywords) -> None:
    expected, gradient = oracle(case, data, data.target(case), factor)
    student = sharded(data.student, mesh, 1).requires_grad_()
    target = sharded_target(case, data, mesh)
    output = kd_loss(student, target, labels=data.labels, token_weights=data.weights, **case.keywords, **keywords)
    (factor * output.loss.sum()).backward()
    assert_same(output, expected)
    assert_close(student.grad.to_local(), sharded(gradient, mesh, 1).to_local())


def every_case(vocabulary: int, padding: int, num_rows: int, targets: tuple[str, ...]) -> int:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    data = batch(num_rows, vocabulary, padding)
    cases = list(all_cases(targets))
    for number, case in enumerate(cases):
        try:
            compare(case, data, mesh, chunk_size=1 + number % 7)
        except AssertionError as error:
            raise AssertionError(f"{case}, V={vocabulary}: {error}") from None
    return len(cases)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_value_and_gradient_equal_the_oracle_for_every_setting_on_uneven_shards(ranks: int) -> None:
    kinds = ("dense", "topk", "topk_no_rest")
    assert run_ranks(ranks, every_case, 507, 11, 6, kinds) == [60] * ranks
