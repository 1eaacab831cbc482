"""KD on sharded vocabularies: value and gradient equal those of the whole on every rank, up to fp64 rounding."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from distill_rl.losses import (
    DenseLogits,
    KDOutput,
    TeacherHidden,
    TopKLogprobs,
    fused_linear_kd_loss,
    kd_loss,
    reference,
    vocab_parallel_logprobs,
    vocab_parallel_topk,
)
from tests.helpers.losses import Batch, Case, all_cases, assert_close, assert_same, batch, mask_of, oracle, sharded
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.ranks

FACTOR = 1.7
"""Factor of the loss before backward, so that the gradient of the output is not 1."""


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def local(whole: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    return sharded(whole, mesh, dim).to_local()


def shard_target(case: Case, data: Batch, mesh: DeviceMesh):
    target = data.target(case, k=min(9, len(data.bias)))
    if isinstance(target, DenseLogits):
        return DenseLogits(sharded(target.logits, mesh, 1))
    if isinstance(target, TeacherHidden):
        head, bias = sharded(target.lm_head_weight, mesh, 0), sharded(mask_of(data.bias), mesh, 0)
        return TeacherHidden(target.hidden, head, logit_scale=target.logit_scale, bias=bias)
    return target


def compare_logits(case: Case, data: Batch, mesh: DeviceMesh, truth: tuple[KDOutput, Tensor], chunk: int) -> None:
    expected, gradient = truth
    student = sharded(data.student, mesh, 1).requires_grad_()
    output = kd_loss(
        student, shard_target(case, data, mesh), labels=data.labels, token_weights=data.weights, chunk_size=chunk,
        **case.keywords,
    )  # fmt: skip
    (FACTOR * output.loss.sum()).backward()
    assert_same(output, expected)
    assert_close(student.grad.to_local(), local(gradient, mesh, 1), what="logits' gradient")


def compare_fused(case: Case, data: Batch, mesh: DeviceMesh, truth: tuple[KDOutput, Tensor], chunk: int) -> None:
    expected, gradient = truth
    hidden = data.hidden.clone().requires_grad_()
    head, bias = (sharded(whole, mesh, 0).requires_grad_() for whole in (data.head, data.bias))
    output = fused_linear_kd_loss(
        hidden, head, shard_target(case, data, mesh), bias=bias, labels=data.labels, token_weights=data.weights,
        chunk_size=chunk, tp_group=mesh.get_group(), **case.keywords,
    )  # fmt: skip
    (FACTOR * output.loss.sum()).backward()
    assert_same(output, expected)
    assert_close(hidden.grad, gradient @ data.head, what="hidden states' gradient")
    assert_close(head.grad.to_local(), local(gradient.T @ data.hidden, mesh, 0), what="weight's gradient")
    assert_close(bias.grad.to_local(), local(gradient.sum(0), mesh, 0), what="bias's gradient")


def compare_cases(vocabulary: int, padding: int, num_rows: int, cases: Sequence[Case]) -> int:
    """Compares both entry points with the oracle; returns the number of comparisons."""
    mesh, data = line(), batch(num_rows, vocabulary, padding)
    for i, case in enumerate(cases):
        truth = oracle(case, data, data.target(case, k=min(9, vocabulary)), FACTOR)
        for compare in (compare_logits, compare_fused):
            try:
                compare(case, data, mesh, truth, chunk=1 + i % 7)
            except AssertionError as error:
                raise AssertionError(f"{compare.__name__} {case} V={vocabulary}: {error}") from None
    return 2 * len(cases)


def extremes(vocabulary: int) -> list[Case]:
    """One case of every kind of arithmetic, for shapes on which all cases would take too long."""
    return [
        Case("forward_kl", "dense", "bucket", 2.5),
        Case("jsd", "hidden", "bucket", 1.0),
        Case("reverse_kl", "topk", "bucket", 2.5),
        Case("skewed_reverse_kl", "topk_no_rest", "bucket", 1.0),
        Case("tvd", "topk", "renormalize", 1.0, reduction="none"),
        Case("forward_kl", "sampled", "bucket", 2.5),
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_setting_matches_the_oracle_on_uneven_shards(ranks: int) -> None:
    cases = list(all_cases())
    assert run_ranks(ranks, compare_cases, 507, 11, 5, cases) == [2 * len(cases)] * ranks


@pytest.mark.parametrize(("vocabulary", "padding"), [(32003, 100), (5, 0), (3, 0), (2, 0)])
def test_large_and_empty_shards_match_the_oracle(vocabulary: int, padding: int) -> None:
    cases = extremes(vocabulary)
    assert run_ranks(4, compare_cases, vocabulary, padding, 3, cases) == [2 * len(cases)] * 4


def compare_plain_shards() -> None:
    """Compares equal plain shards in rank order, with a new group, with the oracle."""
    size, rank = dist.get_world_size(), dist.get_rank()
    members = list(range(size))
    group = dist.new_group(members)
    data = batch(4, 24 * size)
    part = slice(24 * rank, 24 * (rank + 1))
    for case in extremes(24 * size):
        target = data.target(case)
        expected, gradient = oracle(case, data, target)
        if isinstance(target, DenseLogits):
            target = DenseLogits(target.logits[:, part])
        if isinstance(target, TeacherHidden):
            target = TeacherHidden(target.hidden, target.lm_head_weight[part], logit_scale=target.logit_scale)
        student = data.student[:, part].clone().requires_grad_()
        output = kd_loss(
            student, target, labels=data.labels, token_weights=data.weights, tp_group=group, **case.keywords
        )
        output.loss.sum().backward()
        assert_same(output, expected)
        assert_close(student.grad, gradient[:, part])


def compare_on_two_dimensional_mesh() -> None:
    """Rows of a [B, S, V] DTensor over dp and columns over tp. Every dp rank has its own labels and targets."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data = batch(8, 101)
    rows = slice(4 * mesh.get_local_rank("dp"), 4 * mesh.get_local_rank("dp") + 4)
    for case in extremes(101):
        whole = data.target(case)
        if isinstance(whole, TeacherHidden):
            continue
        mine = DenseLogits(sharded(whole.logits[rows], mesh["tp"], 1)) if isinstance(whole, DenseLogits) else None
        target = mine or whole.select(torch.arange(8)[rows])
        expected, gradient = oracle(case, data, whole)
        columns = local(data.student[rows], mesh["tp"], 1)
        student = DTensor.from_local(
            columns.view(2, 2, -1), mesh, [Shard(0), Shard(2)], run_check=False, shape=torch.Size([4, 2, 101]),
            stride=(202, 101, 1),
        ).requires_grad_()  # fmt: skip
        output = kd_loss(
            student, target, labels=data.labels[rows].view(2, 2), token_weights=data.weights[rows],
            num_items_in_batch=int((data.labels >= 0).sum()), **case.keywords,
        )  # fmt: skip
        output.loss.sum().backward()
        assert_close(student.grad.to_local().reshape(4, -1), local(gradient[rows], mesh["tp"], 1))
        if case.reduction == "mean":
            total = output.loss.detach().clone()
            dist.all_reduce(total, group=mesh.get_group("dp"))
            assert_close(total, expected.loss.detach())


def compare_replicated_hidden() -> None:
    """A replicated DTensor of hidden states gets a replicated gradient, complete on every rank.

    Plain hidden states count as replicated because of the name of the mesh.
    """
    data, case = batch(5, 37), Case("forward_kl", "topk", "bucket", 1.0)
    _, gradient = oracle(case, data, data.target(case))
    named = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    unnamed = line()
    replicated = DTensor.from_local(data.hidden.clone(), unnamed, [Replicate()], run_check=False)
    for hidden, mesh in ((replicated, unnamed), (data.hidden.clone(), named)):
        output = fused_linear_kd_loss(
            hidden.requires_grad_(), sharded(data.head, mesh, 0), data.target(case), bias=sharded(data.bias, mesh, 0),
            labels=data.labels, token_weights=data.weights, **case.keywords,
        )  # fmt: skip
        output.loss.backward()
        if hidden is replicated:
            assert hidden.grad.placements == (Replicate(),)
        complete = hidden.grad.to_local() if hidden is replicated else hidden.grad
        assert_close(complete, gradient @ data.head)


def compare_saved_output() -> None:
    """The loss does not overwrite its input, which an upstream operation may have saved."""
    mesh, data, case = line(), batch(5, 37), Case("reverse_kl", "topk", "bucket", 1.0)
    target = data.target(case)
    whole = (data.student / 10).requires_grad_()
    source = sharded(whole.detach(), mesh, 1).requires_grad_()
    upstream, truth = source.exp(), whole.exp()
    before = upstream.to_local().clone()
    keywords = {"labels": data.labels, "token_weights": data.weights, **case.keywords}
    kd_loss(upstream, target, **keywords).loss.backward()
    assert torch.equal(upstream.to_local(), before)
    reference.kd_loss(truth, target, **keywords).loss.backward()
    assert_close(source.grad.to_local(), local(whole.grad, mesh, 1))


def refuse_a_weight_whose_ranks_have_rows_of_their_own() -> None:
    """A weight that FSDP has sharded over data-parallel ranks looks like a sharded vocabulary."""
    mesh, data, case = line(), batch(5, 37), Case("forward_kl", "topk", "bucket", 1.0)
    target, head = data.target(case), sharded(data.head, mesh, 0)
    rows = DTensor.from_local(data.hidden, mesh, [Shard(0)], run_check=False)
    for hidden in (data.hidden, rows):
        with pytest.raises(ValueError, match=r"^lm_head_weight: is sharded over ranks of which nobody has said"):
            fused_linear_kd_loss(hidden, head, target)
    layer = torch.nn.Linear(data.hidden.shape[1], 37, bias=False, dtype=data.hidden.dtype)
    with pytest.raises(ValueError, match=r"a weight that FSDP has sharded must be gathered$"):
        fused_linear_kd_loss(data.hidden, fully_shard(layer, mesh=mesh).weight, target)
    other = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    with pytest.raises(ValueError, match=r"^tp_group: must be the group over which lm_head_weight is sharded"):
        fused_linear_kd_loss(data.hidden, head, target, tp_group=other)


def refuse_labels_that_are_a_dtensor() -> None:
    mesh, data, case = line(), batch(5, 37), Case("forward_kl", "topk", "bucket", 1.0)
    labels = DTensor.from_local(data.labels, mesh, [Replicate()], run_check=False)
    with pytest.raises(ValueError, match=r"^labels: must be a plain tensor, this rank's rows; got a DTensor"):
        kd_loss(data.student, data.target(case), labels=labels)


def refuse_plain_shards_of_unequal_width() -> None:
    widths = [20 + rank for rank in range(dist.get_world_size())]
    logits = torch.randn(5, widths[dist.get_rank()])
    teacher = TopKLogprobs(torch.tensor([[0, 1]]).expand(5, 2), torch.full((5, 2), -1.0), torch.full((5,), -1.3))
    for call in (
        lambda: kd_loss(logits, teacher, tp_group=dist.group.WORLD),
        lambda: vocab_parallel_topk(logits, 4, tp_group=dist.group.WORLD),
        lambda: vocab_parallel_logprobs(logits, torch.zeros(5, dtype=torch.int64), tp_group=dist.group.WORLD),
    ):
        with pytest.raises(ValueError, match=f"equally wide on all ranks of tp_group; got 20 to {widths[-1]} columns"):
            call()
    equal = kd_loss(logits[:, :20], teacher, tp_group=dist.group.WORLD)  # the ranks are still in step
    assert equal.loss.isfinite()


def test_labels_that_are_a_dtensor_are_refused() -> None:
    assert run_ranks(2, refuse_labels_that_are_a_dtensor) == [None] * 2


def test_a_weight_sharded_over_data_parallel_ranks_is_refused() -> None:
    assert run_ranks(2, refuse_a_weight_whose_ranks_have_rows_of_their_own) == [None] * 2


@pytest.mark.parametrize("ranks", [2, 4])
def test_plain_shards_of_unequal_width_are_refused_by_all_ranks(ranks: int) -> None:
    assert run_ranks(ranks, refuse_plain_shards_of_unequal_width) == [None] * ranks


def test_plain_shards_with_a_group_match_the_oracle() -> None:
    assert run_ranks(2, compare_plain_shards) == [None] * 2


def test_the_group_is_inferred_on_a_two_dimensional_mesh() -> None:
    assert run_ranks(4, compare_on_two_dimensional_mesh) == [None] * 4


def test_replicated_hidden_states_get_a_complete_gradient() -> None:
    assert run_ranks(2, compare_replicated_hidden) == [None] * 2


def test_the_saved_output_of_an_upstream_operation_is_unchanged() -> None:
    assert run_ranks(2, compare_saved_output) == [None] * 2


def compare_least_values(divergence: str, temperature: float, dtype: torch.dtype) -> None:
    mesh, generator = line(), torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 3, 8, generator=generator)
    student[:, 4:] = teacher[:, 4:] = torch.finfo(dtype).min
    keywords = {"divergence": divergence, "temperature": temperature}
    whole, shard = student.clone().requires_grad_(), sharded(student, mesh, 1).requires_grad_()
    expected = kd_loss(whole, DenseLogits(teacher), **keywords)
    found = kd_loss(shard, DenseLogits(sharded(teacher, mesh, 1)), **keywords)
    for output in (expected, found):
        output.loss.backward()
    assert torch.isfinite(expected.loss)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(shard.grad.to_local(), local(whole.grad, mesh, 1))


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shard_that_is_masked_by_the_least_number_adds_nothing(divergence: str, dtype: torch.dtype) -> None:
    assert run_ranks(2, compare_least_values, divergence, 0.5, dtype) == [None] * 2
