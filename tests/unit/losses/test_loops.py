"""Every loss in other people's training loops: value and gradient against fp64, written here in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from distill_rl.losses import (
    METHODS,
    DenseLogits,
    KDLoss,
    SampledTokens,
    StudentHidden,
    TeacherHidden,
    TopKLogprobs,
    chunk_kd_loss,
    fused_linear_kd_loss,
    fused_linear_logprobs,
    kd_loss,
    vocab_parallel_logprobs,
)
from distill_rl.losses.core.logits import enlargement
from tests.helpers.chunks import documents

ROWS, VOCABULARY, WIDTH, K, RATIO = 12, 40, 6, 5, 0.6
WHOLE, PARTS = 2, (0, 1)
"""Numbers of the batch and of its two micro-batches."""
SLICES = (slice(0, 4), slice(4, ROWS), slice(0, ROWS))

DRAW = torch.Generator().manual_seed(0)


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=DRAW, dtype=torch.float64)


LABELS = torch.randint(VOCABULARY, (ROWS,), generator=DRAW).index_fill_(0, torch.tensor([1, 2, 5]), -100)
COUNTED = LABELS >= 0
COUNT = int(COUNTED.sum())
HEAD = randn(VOCABULARY, WIDTH, scale=0.1), randn(VOCABULARY, scale=0.1)
TEACHER_HIDDEN, TEACHER_HEAD = randn(ROWS, 4), randn(VOCABULARY, 4, scale=0.5)
TEACHER = TEACHER_HIDDEN @ TEACHER_HEAD.T
DRAWN, DRAWS = torch.arange(3).expand(ROWS, 3) * 7, torch.tensor([[3, 1, 4]]).expand(ROWS, 3)


@dataclass(frozen=True)
class Loss:
    """A loss and its truth, both a scalar that is already divided by the count of the whole batch."""

    leaves: tuple[Tensor, ...]
    """In fp64."""
    ours: Callable[..., Tensor]
    """(number of the batch or micro-batch, count, *leaves in any dtype)"""
    truth: Callable[..., Tensor]
    """(count, *leaves) of the whole batch"""
    count: int = COUNT
    bound: float = 1e-5


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return hidden @ weight.T + bias


# Rows of one tokenizer


def target_of(kind: str, temperature: float, rows: slice) -> Any:
    log_p = (TEACHER[rows] / temperature).log_softmax(1)
    if kind == "topk":
        top, ids = log_p.topk(K, 1)
        return TopKLogprobs(ids, top, log_p.scatter(1, ids, -torch.inf).logsumexp(1), temperature)
    if kind == "sampled":
        mean = (DRAWS[rows] / 8 * log_p.gather(1, DRAWN[rows])).sum(1)
        return SampledTokens(DRAWN[rows], DRAWS[rows], mean, temperature)
    if kind == "hidden":
        return TeacherHidden(TEACHER_HIDDEN[rows], TEACHER_HEAD)
    return DenseLogits(TEACHER[rows])


def divergence_of(kind: str, temperature: float, divergence: str, logits: Tensor) -> Tensor:
    """T²·D per row."""
    log_p, log_q = (TEACHER / temperature).log_softmax(1), (logits / temperature).log_softmax(1)
    if kind == "sampled":
        return temperature**2 * (DRAWS / 8 * (log_p - log_q).gather(1, DRAWN)).sum(1)
    if kind == "topk":
        ids = log_p.topk(K, 1).indices
        log_p, log_q = (
            torch.cat([side.gather(1, ids), side.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)], 1)
            for side in (log_p, log_q)
        )
    if divergence == "jsd":
        middle = ((log_p.exp() + log_q.exp()) / 2).log()
        terms = (log_p.exp() * (log_p - middle) + log_q.exp() * (log_q - middle)) / 2
    else:
        terms = log_p.exp() * (log_p - log_q)
    return temperature**2 * terms.sum(1)


def kd(
    kind: str, entry: str, temperature: float = 2.0, divergence: str = "forward_kl", reduction: str = "mean"
) -> Loss:
    def ours(number: int, count: float, *leaves: Tensor) -> Tensor:
        rows = SLICES[number]
        target = None if kind == "none" else target_of(kind, temperature, rows)
        keywords: dict[str, Any] = {
            "kd_ratio": 0.0 if kind == "none" else RATIO, "temperature": temperature, "divergence": divergence,
            "reduction": reduction,
        }  # fmt: skip
        batch: dict[str, Any] = {"labels": LABELS[rows]}
        if reduction == "mean":
            batch["num_items_in_batch"] = count
        first, *layer = leaves
        if entry == "logits":
            output = kd_loss(first[rows], target, **batch, **keywords)
        elif entry == "fused":
            output = fused_linear_kd_loss(
                first[rows], layer[0], target, bias=layer[1], chunk_size=3, **batch, **keywords
            )
        elif entry == "one chunk":
            output = kd_loss(StudentHidden(first[rows], *layer), target, **batch, **keywords)
        else:
            named = dict(zip(("lm_head_weight", "bias"), layer))
            output = KDLoss(**keywords)(first[rows], target, **batch, **named)
        return output.loss if reduction == "mean" else output.loss.sum() / count

    def truth(count: float, *leaves: Tensor) -> Tensor:
        logits = leaves[0] if len(leaves) == 1 else logits_of(*leaves)
        ce = -logits.log_softmax(1).gather(1, LABELS.clamp_min(0)[:, None])[:, 0]
        mixed = (
            ce if kind == "none" else RATIO * divergence_of(kind, temperature, divergence, logits) + (1 - RATIO) * ce
        )
        return mixed[COUNTED].sum() / count

    leaves = (
        (randn(ROWS, VOCABULARY),)
        if entry in ("logits", "module of logits")
        else (randn(ROWS, WIDTH, scale=0.1), *HEAD)
    )
    return Loss(leaves, ours, truth)


def logprobs(fused: bool, entropy: bool) -> Loss:
    def ours(number: int, count: float, *leaves: Tensor) -> Tensor:
        rows = SLICES[number]
        first, *layer = leaves
        settings: dict[str, Any] = {"temperature": 1.5, "return_entropy": entropy}
        if fused:
            found = fused_linear_logprobs(first[rows], layer[0], LABELS[rows], bias=layer[1], chunk_size=3, **settings)
        else:
            found = vocab_parallel_logprobs(first[rows], LABELS[rows], **settings)
        terms = found[0] - 0.1 * found[1] if entropy else found
        return -(terms * COUNTED[rows]).sum() / count

    def truth(count: float, *leaves: Tensor) -> Tensor:
        log_q = ((logits_of(*leaves) if fused else leaves[0]) / 1.5).log_softmax(1)
        terms = log_q.gather(1, LABELS.clamp_min(0)[:, None])[:, 0]
        if entropy:
            terms = terms + 0.1 * (log_q.exp() * log_q).sum(1)
        return -terms[COUNTED].sum() / count

    return Loss((randn(ROWS, WIDTH, scale=0.1), *HEAD) if fused else (randn(ROWS, VOCABULARY),), ours, truth)


# Chunks of two tokenizers

KINDS = ((1, 1), (1, 2), (3, 1), (1, 1), (2, 2), (1, 1))
TWO = documents(KINDS, student=33, teacher=45)
TWO = replace(TWO, bridge=replace(TWO.bridge, student_stops=LABELS[:0], teacher_stops=LABELS[:0]))
TEXTS = (TWO.part(slice(0, 2)), TWO.part(slice(2, None)))
LABELLED = [(part.chunks.student >= 0) for part in (*TEXTS, TWO)]
LATER = [int((TWO.chunks.student >= number).nonzero()[0, 0]) for number in (0, 2)]
SETTINGS = {"top_k": K, "uncommon_top_k": 7}


def chunked(method: str, *, hidden: bool) -> Loss:
    """Half of the cross-entropy of the rows in chunks, and KD, divided by the count of the chunks."""

    def ours(number: int, count: float, *leaves: Tensor) -> Tensor:
        text = (*TEXTS, TWO)[number]
        start = 0 if number == WHOLE else LATER[number]
        rows = slice(start, start + len(text.student))
        student: Any = leaves[0][rows] if not hidden else StudentHidden(leaves[0][rows], *leaves[1:])
        labels = torch.where(LABELLED[number], text.labels, -100)
        output = chunk_kd_loss(
            student,
            text.target("dense"),
            text.chunks,
            text.bridge,
            method=method,
            labels=labels,
            chunk_size=4,
            **SETTINGS,
        )
        return (output.kd + 0.5 * output.ce) / count

    def truth(count: float, *leaves: Tensor) -> Tensor:
        logits = logits_of(*leaves) if hidden else leaves[0]
        log_q, log_p = logits.log_softmax(1), TWO.teacher.log_softmax(1)
        labels = [
            log.gather(1, ids.clamp_min(0)[:, None])[:, 0]
            for log, ids in ((log_q, TWO.labels), (log_p, TWO.teacher_labels))
        ]
        ce = -labels[0].gather(0, (TWO.chunks.student >= 0).nonzero()[:, 0]).sum()
        total = 0.5 * ce
        for chunk in range(len(KINDS)):
            rows = [numbers == chunk for numbers in (TWO.chunks.student, TWO.chunks.teacher)]
            total = total + chunk_truth(
                method, log_q[rows[0]], log_p[rows[1]], *(one[row] for one, row in zip(labels, rows))
            )
        return total / count

    leaves = (randn(len(TWO.student), WIDTH, scale=0.1), randn(33, WIDTH, scale=0.1), randn(33, scale=0.1))
    return Loss(leaves if hidden else (TWO.student,), ours, truth, len(KINDS))


def chunk_truth(method: str, log_q: Tensor, log_p: Tensor, q_label: Tensor, p_label: Tensor) -> Tensor:
    """D of one chunk, from the log-probabilities [n, V] of its rows and those of its own tokens [n] on either side."""
    bridge, one = TWO.bridge, len(log_q) == len(log_p) == 1
    if method == "alm" or (method == "hybrid" and not one):
        q, p = q_label.sum().exp(), p_label.sum().exp()
        return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    if method == "strict" and not one:
        return log_q.new_zeros(())
    student, teacher = bridge.student_common, bridge.teacher_common
    q, p = log_q.exp().mean(0), log_p.mean(0).softmax(0)
    if (
        method == "strict"
    ):  # reverse KL given the common vocabulary, at the student's 16 most likely tokens and the rest
        q, p = (side / side.sum() for side in (q[student], p[teacher]))
        top = q.topk(16).indices
        q, p = (torch.cat([side[top], (side.sum() - side[top].sum())[None]]) for side in (q, p))
        return (q * (q / p).log()).sum()
    if method == "hybrid":
        top = [i for i in range(len(student)) if teacher[i] in p.topk(K).indices]
        q, p = (
            torch.cat([side[ids[top]], (1 - side[ids[top]].sum())[None]]) for side, ids in ((q, student), (p, teacher))
        )
        return (p * (p / q).log()).sum()
    if method == "xtoken":
        dense = torch.zeros(bridge.num_student, bridge.num_teacher, dtype=torch.float64)
        dense[torch.arange(bridge.num_student).repeat_interleave(bridge.indptr.diff()), bridge.indices] = (
            bridge.values.double()
        )
        reached = torch.where(dense.sum(0) > 0, p, -1)
        top = reached.topk(K).indices
        q, p = (torch.cat([side[top], (1 - side[top].sum())[None]]) for side in (q @ dense, p))
        return (p * (p / q).log()).sum()
    if method == "uld":
        common, others = q.new_zeros(()), [q, p]
    else:
        common = (p[teacher] * (p[teacher] / q[student]).log()).sum()
        if method == "gold":
            common = common + (q[student] - p[teacher]).sum()
        others = [
            side[torch.ones(len(side), dtype=torch.bool).index_fill_(0, ids, False)]
            for side, ids in ((q, student), (p, teacher))
        ]
    length = min(SETTINGS["uncommon_top_k"], *(len(side) for side in others)) if method != "uld" else 7
    left, right = (side.sort(descending=True).values[:length] for side in others)
    return common + (left - right).abs().sum()


FUSED: dict[str, Loss] = {
    "fused, dense": kd("dense", "fused"),
    "fused, topk": kd("topk", "fused"),
    "fused, sampled": kd("sampled", "fused"),
    "fused, teacher's hidden states, jsd": kd("hidden", "fused", divergence="jsd"),
    "fused, cross-entropy": kd("none", "fused"),
    "fused, one chunk": kd("topk", "one chunk"),
    "fused, none": kd("topk", "fused", reduction="none"),
    "fused, sum": kd("dense", "fused", reduction="sum"),
    "module, fused": kd("topk", "module"),
    "log-probabilities, fused": logprobs(fused=True, entropy=True),
    **{f"{method}, fused": chunked(method, hidden=True) for method in METHODS},
}
LOSSES: dict[str, Loss] = FUSED | {
    "dense": kd("dense", "logits"),
    "dense, jsd": kd("dense", "logits", divergence="jsd"),
    "topk": kd("topk", "logits"),
    "sampled": kd("sampled", "logits"),
    "hidden": kd("hidden", "logits", temperature=1.0),
    "cross-entropy": kd("none", "logits"),
    "none": kd("dense", "logits", reduction="none"),
    "module": kd("dense", "module of logits"),
    "log-probabilities": logprobs(fused=False, entropy=False),
    "log-probabilities and entropies": logprobs(fused=False, entropy=True),
    **{method: chunked(method, hidden=False) for method in METHODS},
}


def whole(loss: Loss, leaves: list[Tensor]) -> Tensor:
    """The loss of the whole batch; its inputs are results of an operation, as a model's are."""
    return loss.ours(WHOLE, loss.count, *(1 * each for each in leaves))


def plain(loss: Loss, leaves: list[Tensor]) -> Tensor:
    value = whole(loss, leaves)
    value.backward()
    return value


def checkpointed(loss: Loss, leaves: list[Tensor]) -> Tensor:
    value = checkpoint(lambda *inputs: whole(loss, list(inputs)), *leaves, use_reentrant=False)
    value.backward()
    return value


def on_cpu(loss: Loss, leaves: list[Tensor]) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return plain(loss, leaves)


def hooked(loss: Loss, leaves: list[Tensor]) -> Tensor:
    """Saved tensors are moved away and brought back, once each."""
    kept: list[Tensor | None] = []

    def pack(tensor: Tensor) -> int:
        kept.append(tensor.detach().clone())
        return len(kept) - 1

    def unpack(number: int) -> Tensor:
        tensor, kept[number] = kept[number], None
        assert tensor is not None, "read twice"
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return plain(loss, leaves)


def autocast(loss: Loss, leaves: list[Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        value = whole(loss, leaves)
    value.backward()
    return value


def compiled(loss: Loss, leaves: list[Tensor]) -> Tensor:
    torch._dynamo.reset()
    value = torch.compile(whole, backend="aot_eager")(loss, leaves)
    value.backward()
    return value


def accumulated(loss: Loss, leaves: list[Tensor]) -> Tensor:
    values = [loss.ours(number, loss.count, *(1 * each for each in leaves)) for number in PARTS]
    for value in values:
        value.backward()
    return sum(values)


def scaled(loss: Loss, leaves: list[Tensor]) -> Tensor:
    value = whole(loss, leaves)
    (1024 * value).backward()
    for each in leaves:
        each.grad /= 1024
    return value


LOOPS = (plain, checkpointed, on_cpu, hooked, autocast, compiled, accumulated, scaled)


def truth_of(loss: Loss, leaves: list[Tensor], count: float) -> tuple[Tensor, list[Tensor]]:
    exact = [each.detach().double().requires_grad_() for each in leaves]
    value = loss.truth(count, *exact)
    return value.detach(), list(torch.autograd.grad(value, exact))


def assert_true(name: str, value: Tensor, truth: Tensor, bound: float) -> None:
    error = float((value.detach().double() - truth).norm() / truth.norm())
    assert error <= bound, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_has_its_value_and_gradient_in_every_loop(name: str) -> None:
    loss = LOSSES[name]
    value, gradients = truth_of(loss, [each.float() for each in loss.leaves], loss.count)
    for loop in LOOPS:
        leaves = [each.float().requires_grad_() for each in loss.leaves]
        found = loop(loss, leaves)
        assert found.dtype == torch.float32
        assert_true(f"value, {loop.__name__}", found, value, loss.bound)
        for i, (leaf, gradient) in enumerate(zip(leaves, gradients)):
            assert_true(f"gradient {i}, {loop.__name__}", leaf.grad, gradient, loss.bound)


@pytest.mark.parametrize("count", [1, 32_768, 1_000_000])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 1e-3), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("name", FUSED)
def test_a_loss_scaler_saves_the_gradients_of_16_bits(name: str, dtype: torch.dtype, bound: float, count: int) -> None:
    """With the first factor of a GradScaler, before which a mean over many tokens has gradients below fp16's range."""
    loss, factor = FUSED[name], 2.0**16
    leaves = [each.to(dtype).requires_grad_() for each in loss.leaves]
    value, gradients = truth_of(loss, leaves, count)
    found = loss.ours(WHOLE, count, *leaves)
    (factor * found).backward()
    assert_true("value", found, value, 1e-5)
    for i, (leaf, gradient) in enumerate(zip(leaves, gradients)):
        assert leaf.grad.dtype == dtype
        fits = float(gradient.abs().max()) * factor < torch.finfo(dtype).max
        if fits:
            assert_true(f"gradient {i}", leaf.grad.double() / factor, gradient, bound)
        else:
            assert not leaf.grad.isfinite().all()  # which a scaler sees


@pytest.mark.parametrize("chunk_size", [3, ROWS])
@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)],
)
def test_only_gradients_of_fp16_wait_in_fp32(dtype: torch.dtype, kept: torch.dtype, chunk_size: int) -> None:
    saved: list[Tensor] = []
    leaves = [each.to(dtype).requires_grad_() for each in (randn(ROWS, WIDTH), *HEAD)]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        fused_linear_kd_loss(*leaves[:2], target_of("topk", 1.0, SLICES[WHOLE]), bias=leaves[2], chunk_size=chunk_size)
    waiting = [each for each in saved if each.numel()]
    assert [(each.shape, each.dtype) for each in waiting] == [(leaf.shape, kept) for leaf in leaves]


@pytest.mark.parametrize("largest", [1.0, 1e-6, 3e-8, 12.0])
def test_the_largest_weight_of_fp16_is_brought_near_sixteen(largest: float) -> None:
    half, weights = torch.zeros(1, dtype=torch.float16), [None, torch.tensor([-largest, largest / 3, 0])]
    factor = enlargement((half.float(), half, None), weights)
    assert factor is not None
    assert 8 <= float(factor) * largest < 16
    assert enlargement((half.float(), half.bfloat16(), None), weights) is None


@pytest.mark.parametrize("weights", [[torch.zeros(3)], [torch.zeros(0)], [torch.full((1,), torch.inf)]])
def test_weights_of_nothing_bring_no_infinite_factor(weights: list[Tensor]) -> None:
    factor = enlargement((torch.zeros(1, dtype=torch.float16),), weights)
    assert factor is not None
    assert 0 < float(factor) < torch.inf
