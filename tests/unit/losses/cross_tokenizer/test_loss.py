"""Cross-tokenizer losses: values and gradients of the oracle, refusals, projections and matches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from distill_rl.losses import (
    METHODS,
    Chunks,
    DenseLogits,
    LearnableProjection,
    StudentHidden,
    TeacherHidden,
    TopKLogprobs,
    VocabularyProjection,
    chunk_kd_loss,
    reference,
    vocab_parallel_topk,
)
from distill_rl.losses.core.rows import TopKRows, padded_width
from distill_rl.losses.core.shards import VocabularyShard
from distill_rl.losses.cross_tokenizer import hybrid
from distill_rl.losses.cross_tokenizer.projection import ColumnProduct
from tests.helpers import chunks as helpers
from tests.helpers.chunks import Documents, assert_gradient, assert_sums, documents, oracle

BASE = {"top_k": 7, "uncommon_top_k": 9, "tau": 1.3, "beta": 0.3}


def settings(method: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(kind of target, keywords): everything that this method looks at."""
    kinds = ("dense", "topk", "topk_no_rest") if "topk" in METHODS[method] else ("dense",)
    divergences = reference.LOG_DIVERGENCES if method not in ("uld", "strict") else ("forward_kl",)
    tails = ("bucket", "truncate", "renormalize") if method in ("hybrid", "xtoken") else ("bucket",)
    averages = ("mean", "chain") if method in ("xtoken", "gold", "uld") else ("mean",)
    relaxed = (False, True) if method == "gold" else (False,)
    for kind, divergence, tail, average, relax, temperature in itertools.product(
        kinds, divergences, tails, averages, relaxed, (1.0, 2.5)
    ):
        keywords = {"divergence": divergence, "tail": tail, "chunk_average": average, "relaxed": relax}
        yield kind, {"method": method, "temperature": temperature, **keywords, **BASE}


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
@pytest.mark.parametrize("method", METHODS)
def test_value_and_gradient_equal_the_oracle_for_every_setting(method: str, dtype: torch.dtype, bound: float) -> None:
    data = documents()
    for number, (kind, keywords) in enumerate(settings(method)):
        target = data.target(kind, keywords["temperature"])
        expected, gradient = oracle(data, target, (1.7, 0.6), **keywords)
        student = data.student.to(dtype, copy=True).requires_grad_()
        output = chunk_kd_loss(
            student,
            target,
            data.chunks,
            data.bridge,
            labels=data.labels,
            chunk_size=(3, None, 1, 6)[number % 4],
            **keywords,
        )
        (1.7 * output.kd + 0.6 * output.ce).backward()
        try:
            assert_sums(output, expected, bound)
            assert_gradient(student.grad, gradient, bound)
        except AssertionError as error:
            raise AssertionError(f"{kind} {keywords}: {error}") from None


@pytest.mark.parametrize("divergence", reference.LOG_DIVERGENCES)
@pytest.mark.parametrize("tau", [1.0, 100.0, 1e4])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-9), (torch.float32, 2e-5)])
@pytest.mark.parametrize("method", ["alm", "hybrid"])
def test_likelihoods_may_be_compared_near_their_logarithms(
    method: str, tau: float, divergence: str, dtype: torch.dtype, bound: float
) -> None:
    data = documents()
    bound *= max(1, tau / 100)  # 1 − coin loses digits as tau grows
    keywords = {"method": method, "tau": tau, "divergence": divergence}
    expected, gradient = oracle(data, data.target("dense"), **keywords)
    student = data.student.to(dtype, copy=True).requires_grad_()
    output = chunk_kd_loss(student, data.target("dense"), data.chunks, data.bridge, labels=data.labels, **keywords)
    (output.kd + output.ce).backward()
    assert_sums(output, expected, bound)
    assert_gradient(student.grad, gradient, bound)


@pytest.mark.parametrize("method", METHODS)
def test_logits_that_are_computed_on_the_way_give_the_oracles_gradients(method: str) -> None:
    """Both sides come as hidden states. The output layers are identities, so hidden states are logits."""
    data = documents()
    for number, (kind, keywords) in enumerate(settings(method)):
        target = data.target(kind, keywords["temperature"])
        expected, gradient = oracle(data, target, (1.7, 0.6), **keywords)
        hidden, weight = (tensor.clone().requires_grad_() for tensor in (data.student, torch.eye(53).double()))
        if isinstance(target, DenseLogits):
            target = TeacherHidden(target.logits, torch.eye(71).double(), label_logprob=target.label_logprob)
        output = chunk_kd_loss(
            StudentHidden(hidden, weight), target, data.chunks, data.bridge, labels=data.labels,
            chunk_size=(3, None, 1, 6)[number % 4], **keywords,
        )  # fmt: skip
        (1.7 * output.kd + 0.6 * output.ce).backward()
        try:
            assert_sums(output, expected, 1e-10)
            assert_gradient(hidden.grad, gradient, 1e-10)
            assert_gradient(weight.grad, gradient.T @ data.student, 1e-10)
        except AssertionError as error:
            raise AssertionError(f"{kind} {keywords}: {error}") from None


@pytest.mark.parametrize("method", ["hybrid", "alm"])
def test_no_more_rows_than_asked_for_have_logits_at_once(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, sizes = documents(), []
    collect = TopKRows.collect
    monkeypatch.setattr(
        TopKRows,
        "collect",
        lambda rows, part, *others: (sizes.append(part.stop - part.start), collect(rows, part, *others)),
    )
    student = StudentHidden(data.student, torch.eye(53).double())
    chunk_kd_loss(
        student, data.target("dense"), data.chunks, data.bridge, method=method, labels=data.labels, chunk_size=3
    )
    assert max(sizes) == 3


@pytest.mark.parametrize("sizes", [(71, 53), (40, 200), (200, 40)])
@pytest.mark.parametrize("method", METHODS)
def test_limits_larger_than_either_vocabulary(method: str, sizes: tuple[int, int]) -> None:
    """Nothing is left outside the k columns, and the sorted probabilities are filled up."""
    data = documents(student=sizes[0], teacher=sizes[1])
    for average in ("mean", "chain"):
        keywords = {"method": method, "top_k": 10_000, "uncommon_top_k": 10_000, "chunk_average": average}
        expected, gradient = oracle(data, data.target("dense"), **keywords)
        student = data.student.clone().requires_grad_()
        output = chunk_kd_loss(student, data.target("dense"), data.chunks, data.bridge, labels=data.labels, **keywords)
        (output.kd + output.ce).backward()
        assert_sums(output, expected, 1e-10)
        assert_gradient(student.grad, gradient, 1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_masked_columns_on_both_sides_are_no_number_anywhere(method: str) -> None:
    """Padding of the output layers: ids that W and the common vocabulary know nothing of."""
    data = documents()
    data.student[:, -3:] = -torch.inf
    unknown = ~data.bridge.reachable
    assert unknown.any()
    data.teacher[:, unknown] = -torch.inf
    data.teacher_labels = data.bridge.indices[data.teacher_labels]
    for average in ("mean", "chain"):
        keywords = {"method": method, "chunk_average": average, "top_k": 30, "uncommon_top_k": 40}
        expected, gradient = oracle(data, data.target("dense"), **keywords)
        student = data.student.float().requires_grad_()
        output = chunk_kd_loss(student, data.target("dense"), data.chunks, data.bridge, labels=data.labels, **keywords)
        (output.kd + output.ce).backward()
        assert_sums(output, expected, 1e-6)
        assert_gradient(student.grad, gradient, 1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_without_reduction_there_is_a_number_per_chunk_and_per_row(method: str) -> None:
    data = documents()
    keywords = {"method": method, "reduction": "none", **BASE}
    output = chunk_kd_loss(data.student, data.target("dense"), data.chunks, data.bridge, labels=data.labels, **keywords)
    expected, _ = oracle(data, data.target("dense"), **keywords)
    torch.testing.assert_close(output.kd, expected.kd, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(output.ce, expected.ce, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_without_a_chunk_the_zero_is_connected_to_the_graph(method: str) -> None:
    data = documents()
    nothing = Chunks(torch.full_like(data.chunks.student, -1), torch.full_like(data.chunks.teacher, -1), 0)
    student = data.student.clone().requires_grad_()
    labels = torch.full_like(data.labels, -100)
    output = chunk_kd_loss(student, data.target("dense"), nothing, data.bridge, method=method, labels=labels)
    (output.kd + output.ce).backward()
    assert [float(value.detach()) for value in (output.kd, output.ce, output.num_chunks)] == [0, 0, 0]
    assert torch.equal(student.grad, torch.zeros_like(student))


def test_masses_are_those_of_the_columns_compared() -> None:
    """Of the chunks of one token; of a pair of stop tokens, the first here, the probability to stop."""
    data = documents()
    target = data.target("topk")
    paired = [4, 7]
    rows = [int((data.chunks.teacher == chunk).nonzero()[0, 0]) for chunk in paired]
    known = data.bridge.to_student[target.ids[rows]] >= 0
    output = chunk_kd_loss(data.student, target, data.chunks, data.bridge, method="hybrid", labels=data.labels)
    stop = int((data.chunks.teacher == 0).nonzero()[0, 0])
    held = torch.isin(target.ids[stop], data.bridge.teacher_stops)
    stops = torch.maximum(target.logprobs[stop][held].exp().sum(), target.label_logprob[stop].exp())
    truth = torch.where(known, target.logprobs[rows].exp(), 0).sum() + stops
    torch.testing.assert_close(output.teacher_mass, truth)
    assert 0 < output.student_mass < 3
    gold = chunk_kd_loss(
        data.student, data.target("dense"), data.chunks, data.bridge, method="gold", labels=data.labels
    )
    rows = [int((data.chunks.student == chunk).nonzero()[0, 0]) for chunk in paired]
    stop = int((data.chunks.student == 0).nonzero()[0, 0])
    stops = data.student[stop].softmax(0)[data.labels[stop]]
    truth = data.student[rows].softmax(1)[:, data.bridge.student_common].sum() + stops
    torch.testing.assert_close(gold.student_mass, truth)


def without(field: str) -> Callable[[Documents], dict[str, Any]]:
    return lambda data: {"teacher": replace(data.target("dense"), **{field: None})}


def refused_bridge(data: Documents, **changes: Any) -> dict[str, Any]:
    return {"bridge": replace(data.bridge, _made={}, **changes)}


def renumbered(data: Documents, side: str, row: int, number: int) -> dict[str, Any]:
    numbers = getattr(data.chunks, side).clone()
    numbers[row] = number
    return {"chunks": replace(data.chunks, **{side: numbers})}


NONE = torch.zeros(0, dtype=torch.int64)


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        ("magic", lambda data: {}, "method: must be one of hybrid, xtoken, gold, hkl, uld, alm, strict; got 'magic'"),
        ("gold", lambda data: {"reduction": "mean"}, "reduction: must be one of sum, none; got 'mean'"),
        ("gold", lambda data: {"chunk_average": "max"}, "chunk_average: must be one of mean, chain; got 'max'"),
        ("gold", lambda data: {"uncommon_top_k": 0}, "uncommon_top_k: must be at least 1; got 0"),
        ("alm", lambda data: {"tau": 0.0}, "tau: must be positive and finite; got 0.0"),
        (
            "xtoken",
            lambda data: {"teacher": data.target("topk")},
            "teacher: must be DenseLogits or TeacherHidden for xtoken; got TopK",
        ),
        (
            "strict",
            lambda data: {"teacher": data.target("topk")},
            "teacher: must be DenseLogits or TeacherHidden for strict; got TopK",
        ),
        ("alm", without("label_logprob"), "teacher.label_logprob: needed for alm"),
        ("hybrid", without("label_logprob"), "teacher.label_logprob: needed for hybrid"),
        (
            "uld",
            lambda data: without("label_logprob")(data) | {"chunk_average": "chain"},
            "teacher.label_logprob: needed for uld with chunk_average chain",
        ),
        ("hybrid", lambda data: {"teacher": data.target("topk", 2.0)}, "temperature: must be that of the teacher's"),
        (
            "gold",
            lambda data: {"teacher": DenseLogits(data.teacher[:, 1:])},
            "teacher.logits: must have the bridge's 71",
        ),
        (
            "uld",
            lambda data: {"bridge": helpers.bridge(50, 71)},
            "bridge: must have a row for each of the student's 53",
        ),
        (
            "hybrid",
            lambda data: refused_bridge(data, student_common=NONE, teacher_common=NONE),
            "bridge: hybrid needs a common vocabulary; got an empty one",
        ),
        (
            "strict",
            lambda data: refused_bridge(data, student_common=NONE, teacher_common=NONE),
            "bridge: strict needs a common vocabulary; got an empty one",
        ),
        (
            "xtoken",
            lambda data: refused_bridge(data, indices=NONE, indptr=torch.zeros(54, dtype=torch.int64)),
            "bridge: xtoken needs a projection; got one without entries",
        ),
        (
            "alm",
            lambda data: {"labels": torch.full_like(data.labels, -100)},
            "labels: every row of a chunk must have one",
        ),
        ("alm", lambda data: renumbered(data, "student", 1, 8), r"chunks.student: must lie in \[-1, 8\).*got 8"),
        ("alm", lambda data: renumbered(data, "teacher", 1, -1), "chunks.teacher: every chunk must.*chunk 0 has none"),
        (
            "alm",
            lambda data: renumbered(data, "student", 4, 0),
            "chunks.student: a chunk's rows must follow one another",
        ),
        (
            "alm",
            lambda data: {"chunks": replace(data.chunks, student=NONE)},
            "chunks.student: must be integers, one per",
        ),
    ],
)
def test_bad_input_is_refused_with_argument_rule_and_value(
    method: str, change: Callable[[Documents], dict[str, Any]], message: str
) -> None:
    data = documents()
    given = {"teacher": data.target("dense"), "chunks": data.chunks, "bridge": data.bridge, "labels": data.labels}
    with pytest.raises(ValueError, match=message):
        chunk_kd_loss(data.student, **given | {"method": method} | change(data))


@pytest.mark.parametrize("method", ["uld", "alm"])
def test_methods_without_a_common_vocabulary_accept_an_empty_one(method: str) -> None:
    data = documents()
    bridge = replace(data.bridge, student_common=NONE, teacher_common=NONE, _made={})
    output = chunk_kd_loss(data.student, data.target("dense"), data.chunks, bridge, method=method, labels=data.labels)
    assert output.kd > 0


@pytest.mark.parametrize(("backend", "expected"), [("eager", "eager"), (None, None)])
def test_teachers_top_k_is_found_by_the_same_backend(monkeypatch, backend, expected) -> None:
    found: list[str | None] = []

    def recorded(*arguments: Any, **keywords: Any) -> TopKLogprobs:
        found.append(keywords["backend"])
        return vocab_parallel_topk(*arguments, **keywords)

    monkeypatch.setattr(hybrid, "vocab_parallel_topk", recorded)
    data = documents()
    chunk_kd_loss(
        data.student, data.target("dense"), data.chunks, data.bridge, labels=data.labels, method="hybrid", top_k=7,
        backend=backend,
    )  # fmt: skip
    assert set(found) == {expected}


def test_a_product_with_some_columns_is_that_of_the_dense_matrix() -> None:
    data = documents()
    bridge = data.bridge
    dense = torch.zeros(53, 71, dtype=torch.float64)
    dense[bridge.entry_rows, bridge.indices] = bridge.values.double()
    columns = torch.tensor([3, 5, 11, 60])
    rest = dense.sum(1) - dense[:, columns].sum(1) + (dense.sum(1) == 0)
    shard = VocabularyShard(20, 25, 53)
    product = ColumnProduct(bridge, shard, columns, torch.float64)
    x = torch.randn(4, padded_width(25), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    projected, remainder = product.project(x)
    torch.testing.assert_close(projected, x[:, :25] @ dense[20:45, columns])
    torch.testing.assert_close(remainder, x[:, :25] @ rest[20:45])
    back = product.project_back(projected, remainder)[:, :25]
    torch.testing.assert_close(back, projected @ dense[20:45, columns].T + remainder[:, None] * rest[20:45])


def test_relaxed_matches_prefer_weight_then_id_and_stay_one_to_one() -> None:
    #                   0: exact 2   1: 0.7→4, 0.3→2   2: 0.9→4, 0.1→0   3: 0.9→4, 0.1→1   4: 0.5→0, 0.5→3   5: 0.6→2, 0.4→0
    indptr, indices = [0, 1, 3, 5, 7, 9, 11], [2, 4, 2, 4, 0, 4, 1, 0, 3, 2, 0]
    values = [1.0, 0.7, 0.3, 0.9, 0.1, 0.9, 0.1, 0.5, 0.5, 0.6, 0.4]
    bridge = VocabularyProjection.from_arrays(
        indptr, indices, values, num_teacher=5, student_common=[0], teacher_common=[2]
    )
    student, teacher = bridge.matches(relaxed=True)
    assert list(zip(student.tolist(), teacher.tolist())) == [(0, 2), (2, 4)]
    assert bridge.matches(relaxed=False)[0].tolist() == [0]


def test_learnable_projection_starts_unchanged_with_the_oracle_gradient() -> None:
    data = documents()
    projection = LearnableProjection(data.bridge)
    torch.testing.assert_close(projection().values, data.bridge.values, rtol=1e-6, atol=1e-7)
    with torch.no_grad():
        projection.logits += torch.linspace(-1, 1, len(projection.logits))
    moved = projection()
    sums = torch.zeros(53).index_add(0, moved.entry_rows, moved.values.detach())
    filled = data.bridge.indptr.diff() > 0
    torch.testing.assert_close(sums[filled], torch.ones(int(filled.sum())))
    for tail, average in (("bucket", "mean"), ("renormalize", "mean"), ("bucket", "chain")):
        keywords = {"method": "xtoken", "tail": tail, "chunk_average": average, **BASE}
        gradients = []
        for compute in (chunk_kd_loss, helpers.reference_chunks.chunk_kd_loss):
            student = data.student.clone().requires_grad_()
            output = compute(student, data.target("dense"), data.chunks, projection(), labels=data.labels, **keywords)
            gradients.append(torch.autograd.grad(2 * output.kd + output.ce, [projection.logits, student]))
        for ours, truth in zip(*gradients):
            assert truth.abs().max() > 1e-3
            assert_gradient(ours, truth.double(), 1e-6)


def test_learning_the_projection_lowers_kd() -> None:
    data = documents()
    projection = LearnableProjection(data.bridge)
    optimizer = torch.optim.SGD(projection.parameters(), lr=0.5)
    values = []
    for _ in range(5):
        output = chunk_kd_loss(
            data.student, data.target("dense"), data.chunks, projection(), method="xtoken", labels=data.labels
        )
        optimizer.zero_grad()
        output.kd.backward()
        optimizer.step()
        values.append(float(output.kd.detach()))
    assert values == sorted(values, reverse=True)
    assert values[-1] < 0.99 * values[0]


def test_the_oracle_is_where_a_method_is_defined_to_be_a_plain_sum() -> None:
    """One chunk of two student tokens and one teacher token, written out by hand."""
    data = documents(((2, 1),))
    rows = (data.chunks.student == 0).nonzero()[:, 0]
    row = int((data.chunks.teacher == 0).nonzero()[0, 0])
    q = data.student[rows].softmax(1).mean(0).sort(descending=True).values
    p = data.teacher[row].softmax(0).sort(descending=True).values
    by_hand = (q - p[:53]).abs().sum() + p[53:].sum()
    output = chunk_kd_loss(
        data.student, DenseLogits(data.teacher), data.chunks, data.bridge, method="uld", labels=data.labels
    )
    torch.testing.assert_close(output.kd, by_hand)
    target = data.target("topk")
    assert isinstance(target, TopKLogprobs)
    x = data.student.log_softmax(1)[rows, data.labels[rows]].sum()
    y = target.label_logprob[row]
    by_hand = y.exp() * (y - x) + (1 - y.exp()) * ((1 - y.exp()).log() - (1 - x.exp()).log())
    output = chunk_kd_loss(data.student, target, data.chunks, data.bridge, method="alm", labels=data.labels)
    torch.testing.assert_close(output.kd, by_hand)


def test_large_tau_teaches_unlikely_text() -> None:
    """A chunk of two tokens, of probability 1e-3 for the teacher and 1e-6 for the student: the slope of forward KL by log Q."""
    logits = torch.zeros(2, 2, dtype=torch.float64)
    logits[:, 0] = torch.tensor(1e-3, dtype=torch.float64).logit()
    labels, numbers = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    one = VocabularyProjection.from_arrays(
        [0, 1, 2], [0, 1], [1.0, 1.0], num_teacher=2, student_common=[0, 1], teacher_common=[0, 1]
    )
    log_p = torch.full((2,), 1e-3, dtype=torch.float64).log() / 2
    slopes = {}
    for tau in (1.0, 100.0, 1e6):
        student = logits.clone().requires_grad_()
        teacher = DenseLogits(torch.zeros(2, 2, dtype=torch.float64), log_p)
        chunk_kd_loss(
            student, teacher, Chunks(numbers, numbers, 1), one, method="alm", labels=labels, tau=tau
        ).kd.backward()
        assert student.grad is not None
        slopes[tau] = float(student.grad[0, 0]) / (1 - 1e-3)
    assert slopes[1.0] == pytest.approx(-1e-3, rel=0.01)
    assert slopes[1e6] == pytest.approx(math.log(1e-3) / math.log(1e-6) - 1, rel=1e-4)
    assert slopes[100.0] == pytest.approx(slopes[1e6], rel=0.1)
