"""How rows become a loss; what a call may and may not do."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distill_rl.losses import (
    DenseLogits,
    KDLoss,
    TeacherHidden,
    TopKLogprobs,
    fused_linear_kd_loss,
    kd_loss,
    vocab_parallel_logprobs,
    vocab_parallel_topk,
)
from distill_rl.losses.agreement import token_agreement, top_tokens
from tests.helpers.losses import assert_close, batch

DATA = batch(6, 40)
TARGET = vocab_parallel_topk(DATA.teacher, 8)
KEYWORDS = {"labels": DATA.labels, "token_weights": DATA.weights, "kd_ratio": 0.3}


def test_a_mean_divides_by_rows_that_count_and_never_by_weights() -> None:
    rows = kd_loss(DATA.student, TARGET, reduction="none", **KEYWORDS)
    assert rows.loss.shape == (6,)
    assert rows.loss[1] == 0
    total = kd_loss(DATA.student, TARGET, reduction="sum", **KEYWORDS)
    mean = kd_loss(DATA.student, TARGET, **KEYWORDS)
    assert int(mean.num_tokens) == 5
    assert_close(total.loss, rows.loss.sum())
    assert_close(mean.loss, total.loss / 5)
    assert_close(mean.kd_loss, total.kd_loss / 5)


@pytest.mark.parametrize("count", [50, 50.0, torch.tensor(50)])
def test_micro_batches_with_the_global_count_add_up_to_the_whole(count: int | float | torch.Tensor) -> None:
    whole = kd_loss(DATA.student, TARGET, num_items_in_batch=count, **KEYWORDS).loss
    parts = []
    for rows in (slice(0, 2), slice(2, 6)):
        parts.append(
            kd_loss(
                DATA.student[rows], TARGET.select(torch.arange(6)[rows]), labels=DATA.labels[rows],
                token_weights=DATA.weights[rows], kd_ratio=0.3, num_items_in_batch=count,
            ).loss
        )  # fmt: skip
    assert_close(sum(parts), whole)


def test_the_loss_is_the_mixture_of_what_is_reported() -> None:
    output = kd_loss(DATA.student, TARGET, **KEYWORDS)
    assert_close(output.loss, 0.3 * output.kd_loss + 0.7 * output.ce_loss)
    assert_close(kd_loss(DATA.student, TARGET, labels=DATA.labels, kd_ratio=0).loss, plain_cross_entropy())
    assert kd_loss(DATA.student, TARGET).ce_loss is None


def test_without_a_teacher_the_loss_is_the_cross_entropy() -> None:
    student = DATA.student.requires_grad_()
    output = kd_loss(student, None, labels=DATA.labels, kd_ratio=0, temperature=3.0)
    output.loss.backward()
    truth = DATA.student.requires_grad_()
    torch.nn.functional.cross_entropy(truth, DATA.labels).backward()
    assert_close(output.loss, plain_cross_entropy())
    assert_close(student.grad, truth.grad)
    assert output.kd_loss == output.teacher_mass == 0


def plain_cross_entropy() -> torch.Tensor:
    return torch.nn.functional.cross_entropy(DATA.student, DATA.labels)


def test_a_soft_cap_leaves_masked_columns_masked() -> None:
    data, cap = batch(6, 40, padding=7), 2.0
    target = vocab_parallel_topk(data.teacher, 8)
    hidden = [data.hidden.clone().requires_grad_() for _ in range(2)]
    logits = (((hidden[0] @ data.head.T)[:, :33] + data.bias[:33]) / cap).tanh() * cap
    logits = torch.nn.functional.pad(logits, (0, 7), value=-torch.inf)
    kd_loss(logits, target, **KEYWORDS).loss.backward()
    fused_linear_kd_loss(hidden[1], data.head, target, bias=data.bias, softcap=cap, **KEYWORDS).loss.backward()
    assert_close(hidden[1].grad, hidden[0].grad)


def test_batch_and_sequence_dimensions_are_flattened() -> None:
    flat = kd_loss(DATA.student, TARGET, **KEYWORDS)
    shaped = kd_loss(
        DATA.student.view(2, 3, 40), TARGET, labels=DATA.labels.view(2, 3), token_weights=DATA.weights.view(2, 3),
        kd_ratio=0.3,
    )  # fmt: skip
    assert torch.equal(flat.loss, shaped.loss)
    hidden = fused_linear_kd_loss(
        DATA.hidden.view(2, 3, -1), DATA.head, TARGET, bias=DATA.bias, labels=DATA.labels.view(2, 3),
        token_weights=DATA.weights.view(2, 3), kd_ratio=0.3,
    )  # fmt: skip
    assert_close(hidden.loss, flat.loss)
    logprobs = vocab_parallel_logprobs(DATA.student.view(2, 3, 40), DATA.labels.view(2, 3))
    assert logprobs.shape == (2, 3)


def test_another_ignore_index_may_be_a_token_of_the_vocabulary() -> None:
    labels = torch.where(DATA.labels < 0, 7, DATA.labels.clamp_min(0))
    labels[3] = 7
    output = kd_loss(DATA.student, TARGET, labels=labels, kd_ratio=0.5, ignore_index=7, reduction="none")
    assert output.loss[[1, 3]].eq(0).all()
    assert int(output.num_tokens) == int((labels != 7).sum())


def test_masses_are_those_of_the_k_columns_and_one_for_a_dense_teacher() -> None:
    output = kd_loss(DATA.student, TARGET, reduction="none")
    assert_close(output.teacher_mass, TARGET.logprobs.exp().sum(1))
    assert_close(output.student_mass, DATA.student.softmax(1).gather(1, TARGET.ids).sum(1))
    assert kd_loss(DATA.student, DenseLogits(DATA.teacher)).teacher_mass == 1


def test_everything_but_the_loss_is_detached() -> None:
    output = kd_loss(DATA.student.requires_grad_(), TARGET, **KEYWORDS)
    fields = ("kd_loss", "ce_loss", "num_tokens", "teacher_mass", "student_mass")
    assert output.loss.requires_grad
    assert not any(getattr(output, name).requires_grad for name in fields)


def test_targets_of_the_wire_are_read_and_never_written() -> None:
    sent = {name: tensor.clone() for name, tensor in TARGET.to_tensors(torch.float16).items()}
    kept = {name: tensor.clone() for name, tensor in sent.items()}
    assert sent["ids"].dtype == torch.int32
    assert sent["rest_logprob"].dtype == torch.float32
    received = TopKLogprobs.from_tensors(sent, 1.0)
    assert received.ids is sent["ids"]
    kd_loss(DATA.student.requires_grad_(), received, **KEYWORDS).loss.backward()
    assert all(torch.equal(sent[name], kept[name]) for name in sent)


def test_the_module_picks_the_entry_by_what_it_is_given() -> None:
    criterion = KDLoss(divergence="jsd", beta=0.2, kd_ratio=0.3)
    keywords = {"labels": DATA.labels, "token_weights": DATA.weights, "num_items_in_batch": 9}
    plain = criterion(DATA.student, TARGET, **keywords)
    fused = criterion(DATA.hidden, TARGET, lm_head_weight=DATA.head, bias=DATA.bias, **keywords)
    assert_close(plain.loss, fused.loss)
    assert_close(plain.loss, kd_loss(DATA.student, TARGET, **keywords, **criterion.settings).loss)
    assert "divergence='jsd'" in repr(criterion)
    assert not list(criterion.parameters())


class _Waits(TorchDispatchMode):
    """Operations that make the host wait for a GPU: their result is a number, or a shape that depends on values."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "item")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[1]
        by_mask = name == "index" and any(index is not None and index.dtype == torch.bool for index in args[1])
        if name in self.NAMES or by_mask:
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("kind", ["dense", "topk", "none"])
def test_the_hot_path_never_waits_for_a_gpu(kind: str, divergence: str) -> None:
    target = {"dense": DenseLogits(DATA.teacher), "topk": TARGET, "none": None}[kind]
    keywords = {**KEYWORDS, "divergence": divergence, "validate": False, "kd_ratio": 0.0 if target is None else 0.3}
    kd_loss(DATA.student, target, **keywords)  # constants of a divergence are worked out once, on the CPU
    student = DATA.student.requires_grad_()
    with _Waits() as waits:
        kd_loss(student, target, **keywords).loss.backward()
        vocab_parallel_topk(DATA.teacher, 5, labels=DATA.labels)
        vocab_parallel_logprobs(student, DATA.labels, return_entropy=True)[0].sum().backward()
    assert waits.seen == []


def test_the_fused_loss_waits_once_for_the_number_of_rows() -> None:
    with _Waits() as waits:
        fused_linear_kd_loss(
            DATA.hidden.clone().requires_grad_(), DATA.head, TARGET, validate=False, **KEYWORDS
        ).loss.backward()
    assert waits.seen == ["nonzero"]


class _Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function._schema.name in ("aten::mm", "aten::addmm")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
def test_a_product_makes_the_logits_of_many_rows(divergence: str) -> None:
    """Each of them reads the whole output layer, which is large where the vocabulary is."""
    rows, columns = 128, 50_000
    student = torch.randn(rows, columns).requires_grad_()
    teacher = TeacherHidden(torch.randn(rows, 4), torch.randn(columns, 4))
    with _Products() as products:
        kd_loss(student, teacher, divergence=divergence).loss.backward()
        token_agreement(student.detach(), teacher, labels=torch.zeros(rows, dtype=torch.long))
        top_tokens(teacher, torch.arange(rows))
    assert products.count <= 2 * (3 + 2 + 1), "two chunks, of which each pass, there and back, may make the logits"


def test_the_library_needs_torch_and_nothing_else_of_this_package() -> None:
    script = (
        "import sys, distill_rl.losses;"
        "ours = {m for m in sys.modules if m.startswith('distill_rl.')} - {'distill_rl.losses'};"
        "assert all(m.startswith('distill_rl.losses.') for m in ours), ours;"
        "assert not {'ray', 'transformers', 'omegaconf', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
