"""The kernels, interpreted, against the fp64 oracle: odd shapes, dtypes, targets, temperatures, masks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from distill_rl.losses import (
    DenseLogits,
    StudentHidden,
    TeacherHidden,
    TopKLogprobs,
    kd_loss,
    reference,
    vocab_parallel_logprobs,
)
from tests.helpers.losses import DIVERGENCES, TAILS, top_k

SHAPES = ((1, 1), (3, 17), (2, 4096), (5, 4097), (2, 9001))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOP_K = (
    ((3, 17), 4, torch.float32),
    ((2, 97), 97, torch.float32),
    ((4, 5003), 64, torch.bfloat16),
    ((2, 9000), 300, torch.float16),
)
TEMPERATURES = (1.0, 0.5, 2.5)


def logits(seed: int, shape: tuple[int, int], dtype: torch.dtype, masked: bool) -> Tensor:
    """Random logits around 30 [N, V]; with `masked` about a tenth of the columns, but not the first, are −inf."""
    draw = torch.Generator().manual_seed(seed)
    z = (30 + 3 * torch.randn(shape, generator=draw)).to(dtype)
    columns = torch.rand(shape[1], generator=torch.Generator().manual_seed(99)) < 0.1
    columns[0] = False
    return z.masked_fill(columns, -torch.inf) if masked else z


def relative(value: Tensor, truth: Tensor) -> float:
    """L2 distance, relative to the norm of the truth where that is above 1e-6."""
    value, truth = value.detach().double(), truth.detach()
    return float((value - truth).norm() / truth.norm().clamp_min(1e-6))


def assert_right(student: Tensor, target: DenseLogits | TopKLogprobs | None, **keywords) -> None:
    """Value and gradient of the kernels agree with the fp64 oracle as far as the dtype of the logits allows."""
    leaf, truth = student.clone().requires_grad_(), student.double().requires_grad_()
    output = kd_loss(leaf, target, backend="triton", **keywords)
    expected = reference.kd_loss(truth, target, **keywords)
    output.loss.sum().backward()
    expected.loss.sum().backward()
    for name in ("loss", "kd_loss", "ce_loss", "teacher_mass", "student_mass"):
        found, right = getattr(output, name), getattr(expected, name)
        if right is not None:
            assert ((found - right).abs() <= 1e-5 * right.abs().clamp_min(1)).all(), name
    assert leaf.grad.dtype == leaf.dtype
    if leaf.dtype == torch.bfloat16:  # the interpreter cuts it off; a GPU rounds to the nearest (`test_compiled`)
        assert ((leaf.grad - truth.grad).abs() <= 1.001 * 2**-7 * truth.grad.abs() + 1e-7).all()
    else:
        rounding = relative(truth.grad.to(leaf.dtype), truth.grad)
        assert relative(leaf.grad, truth.grad) <= max(3e-6, 1.01 * rounding)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_dense_kl_with_cross_entropy(divergence: str, shape: tuple[int, int], dtype: torch.dtype, temperature: float):
    masked = shape[1] % 2 == 1
    student, teacher = (logits(seed, shape, dtype, masked) for seed in (0, 1))
    labels = torch.zeros(shape[0], dtype=torch.int64)
    labels[-1] = shape[1] - 1 if not masked else 0
    keywords = {"temperature": temperature, "divergence": divergence, "labels": labels, "kd_ratio": 0.7}
    assert_right(student, DenseLogits(teacher), **keywords)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_block_that_only_one_side_masks_is_infinite(divergence: str):
    """The first block is masked on the side that must have mass there, so that no maximum is known yet."""
    student, teacher = (logits(seed, (2, 5000), torch.float32, masked=False) for seed in (0, 1))
    (student if divergence == "forward_kl" else teacher)[:, :2048] = -torch.inf
    assert kd_loss(student, DenseLogits(teacher), divergence=divergence, backend="triton").loss > 1e30
    both = [side.masked_fill(torch.arange(5000) < 2048, -torch.inf) for side in (student, teacher)]
    assert_right(both[0], DenseLogits(both[1]), divergence=divergence)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(("shape", "k", "dtype"), TOP_K, ids=str)
def test_top_k_with_cross_entropy(
    shape: tuple[int, int], k: int, dtype: torch.dtype, divergence: str, tail: str, temperature: float
):
    masked = shape[1] % 2 == 1
    student, teacher = (logits(seed, shape, dtype, masked) for seed in (0, 1))
    target = top_k(teacher.float(), k, temperature)
    labels = torch.zeros(shape[0], dtype=torch.int64)
    labels[0] = target.ids[0, 0]
    keywords = {"temperature": temperature, "divergence": divergence, "tail": tail, "labels": labels}
    assert_right(student, target, **keywords, kd_ratio=0.7, reduction="sum")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cross_entropy_alone(shape: tuple[int, int], dtype: torch.dtype):
    student = logits(0, shape, dtype, masked=shape[1] % 2 == 1)
    assert_right(student, None, labels=torch.zeros(shape[0], dtype=torch.int64), kd_ratio=0.0)


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("target", ["dense", "topk", "none"])
def test_ignored_rows_weights_and_reductions(target: str, validate: bool, reduction: str):
    student, teacher = (logits(seed, (6, 300), torch.float32, masked=True) for seed in (0, 1))
    student[2] = torch.nan
    targets = {"dense": DenseLogits(teacher), "topk": top_k(teacher, 9, 2.0), "none": None}[target]
    labels = torch.tensor([0, 5, -100, 7, -100, 0])
    student[:, [5, 7]] = student[:, :1]
    keywords = {"labels": labels, "temperature": 2.0, "kd_ratio": 0.0 if target == "none" else 0.4}
    keywords |= {"token_weights": torch.tensor([1.0, 0.5, 3.0, 0.0, 1.0, 2.0]), "reduction": reduction}
    leaf = student.clone().requires_grad_()
    output = kd_loss(leaf, targets, backend="triton", validate=validate, **keywords)
    output.loss.sum().backward()
    known = student.double().nan_to_num(0).requires_grad_()
    expected = reference.kd_loss(known, targets, **keywords)
    expected.loss.sum().backward()
    assert relative(output.loss, expected.loss) <= 1e-5
    assert relative(leaf.grad, known.grad) <= 3e-6
    assert torch.equal(leaf.grad[[2, 4]], torch.zeros(2, 300))


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("target", ["dense", "topk", "hidden", "none"])
def test_no_row_counts(target: str, validate: bool):
    student, teacher = (logits(seed, (3, 300), torch.float32, masked=False) for seed in (0, 1))
    hidden = TeacherHidden(torch.ones(3, 2), torch.ones(300, 2))
    targets = {"dense": DenseLogits(teacher), "topk": top_k(teacher, 9, 1.0), "hidden": hidden, "none": None}[target]
    keywords = {"labels": torch.full((3,), -100), "kd_ratio": 0.0 if target == "none" else 0.5, "validate": validate}
    leaf, states, layer = (tensor.requires_grad_() for tensor in (student, torch.ones(3, 4), torch.ones(300, 4)))
    for given, leaves in ((leaf, [leaf]), (StudentHidden(states, layer), [states, layer])):
        output = kd_loss(given, targets, backend="triton", **keywords)
        assert output.loss == 0
        assert all(not gradient.any() for gradient in torch.autograd.grad(output.loss, leaves))


def test_inplace_gradient_is_written_over_the_logits():
    student, teacher = (logits(seed, (4, 5000), torch.bfloat16, masked=False) for seed in (0, 1))
    target = top_k(teacher.float(), 16, 1.0)
    leaf = student.clone().requires_grad_()
    kd_loss(leaf, target, backend="triton").loss.backward()
    base = student.clone().requires_grad_()
    copy = base.clone()
    kd_loss(copy, target, backend="triton", inplace_backward=True).loss.backward()
    assert torch.equal(base.grad, leaf.grad)
    assert torch.equal(copy, leaf.grad)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_label_logprobs(temperature: float):
    student = logits(0, (5, 4099), torch.float32, masked=False)
    labels = torch.arange(5) * 1000
    leaf, truth = student.clone().requires_grad_(), student.double().requires_grad_()
    found = vocab_parallel_logprobs(leaf, labels, temperature=temperature, backend="triton")
    right = (truth / temperature).log_softmax(1).gather(1, labels[:, None])[:, 0]
    weights = torch.linspace(-1, 2, 5)
    (found * weights).sum().backward()
    (right * weights).sum().backward()
    assert relative(found, right) <= 1e-6
    assert relative(leaf.grad, truth.grad) <= 3e-6


def test_row_that_is_masked_everywhere_is_as_without_kernels():
    z = logits(0, (3, 300), torch.float32, masked=False)
    z[1] = -torch.inf
    labels = torch.tensor([0, 5, 7])
    found, plain = (vocab_parallel_logprobs(z, labels, backend=backend) for backend in ("triton", "eager"))
    torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("target", ["topk", "hidden", "none"])
def test_logits_that_are_computed_on_the_way(target: str, reduction: str, softcap: float | None):
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 8, generator=draw), torch.randn(301, 8, generator=draw)
    bias = torch.randn(301, generator=draw).masked_fill(torch.arange(301) > 295, -torch.inf)
    given = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
    true = [each.double().requires_grad_() for each in (hidden, weight, bias)]
    z = 0.7 * true[0] @ true[1].T + true[2]
    z = z if softcap is None else (softcap * (z / softcap).tanh()).masked_fill(bias.isinf(), -torch.inf)
    states, layer = torch.randn(9, 5, generator=draw), torch.randn(301, 5, generator=draw)
    targets = {
        "topk": top_k(logits(1, (9, 301), torch.float32, masked=False)[:, :296], 12, 2.0),
        "hidden": TeacherHidden(states, layer, bias=torch.zeros(301).masked_fill(bias.isinf(), -torch.inf)),
        "none": None,
    }[target]
    labels = torch.tensor([0, 5, -100, 7, 200, 0, 3, -100, 9])
    keywords = {"labels": labels, "temperature": 2.0, "kd_ratio": 0.6 if targets else 0.0, "reduction": reduction}
    output = kd_loss(StudentHidden(*given, softcap, 0.7), targets, backend="triton", chunk_size=4, **keywords)
    expected = reference.kd_loss(z, targets, **keywords)
    output.loss.sum().backward()
    expected.loss.sum().backward()
    assert relative(output.loss, expected.loss) <= 1e-5
    for found, right in zip(given, true):
        assert relative(found.grad, right.grad) <= 1e-5


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_teacher_that_sends_hidden_states(divergence: str, validate: bool, ignored: bool):
    draw = torch.Generator().manual_seed(0)
    states, layer = torch.randn(7, 5, generator=draw), torch.randn(4099, 5, generator=draw)
    target = TeacherHidden(states, layer, softcap=20.0, logit_scale=1.5)
    student = logits(0, (7, 4099), torch.float32, masked=False)
    labels = torch.tensor([0, 5, -100 if ignored else 4, 7, 4098, 0, -100 if ignored else 3])
    keywords = {"labels": labels, "divergence": divergence, "temperature": 2.0, "kd_ratio": 0.6}
    leaf, truth = student.clone().requires_grad_(), student.double().requires_grad_()
    output = kd_loss(leaf, target, backend="triton", chunk_size=3, validate=validate, **keywords)
    expected = reference.kd_loss(truth, target, **keywords)
    output.loss.backward()
    expected.loss.backward()
    assert relative(output.loss, expected.loss) <= 1e-5
    assert relative(leaf.grad, truth.grad) <= 3e-6


@pytest.mark.parametrize(
    ("logits_of", "target_of", "keywords", "line"),
    [
        (torch.float64, "dense", {}, "backend: triton computes in fp32 and has no fp64"),
        (torch.float32, "dense", {"divergence": "jsd"}, "backend: triton has kernels for top-k targets"),
        (torch.float32, "dense", {"backend": "cuda"}, "backend: must be eager, triton or None; got 'cuda'"),
    ],
)
def test_what_has_no_kernel_is_refused(logits_of: torch.dtype, target_of: str, keywords: dict, line: str):
    student = torch.zeros(2, 5, dtype=logits_of)
    with pytest.raises(ValueError, match=line):
        kd_loss(student, DenseLogits(student), **({"backend": "triton"} | keywords))
