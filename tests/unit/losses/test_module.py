"""The loss as a module: it refuses bad settings when it is made, and takes logits of a teacher as they are."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distill_rl.losses import DenseLogits, KDLoss, kd_loss, vocab_parallel_topk
from distill_rl.losses.kd import KDKeywords

DRAW = torch.Generator().manual_seed(0)
STUDENT, TEACHER = (torch.randn(6, 40, generator=DRAW) for _ in range(2))
LABELS = torch.tensor([3, -100, 0, 39, 7, -100])


@pytest.mark.parametrize(("settings", "message"), [
    ({"temperature": 0.0}, "temperature: must be positive and finite; got 0.0"),
    ({"divergence": "kl"}, "divergence: must be one of"),
    ({"divergence": "jsd", "beta": 2.0}, "beta: must lie in"),
    ({"tail": "all"}, "tail: must be one of"),
    ({"reduction": "avg"}, "reduction: must be one of"),
    ({"kd_ratio": -0.1}, "kd_ratio: must lie in"),
    ({"chunk_size": 0}, "chunk_size: must be at least 1"),
])  # fmt: skip
def test_a_bad_setting_is_refused_when_the_module_is_made(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KDLoss(**settings)


@pytest.mark.parametrize("name", ["labels", "temprature"])
def test_what_belongs_to_a_batch_or_is_unknown_is_no_setting(name: str) -> None:
    with pytest.raises(TypeError, match=f"KDLoss has no setting {name}; there are backend, beta, chunk_size"):
        KDLoss(**{name: 1})


def test_logits_of_a_teacher_are_a_dense_target() -> None:
    found = KDLoss(kd_ratio=0.4)(STUDENT, TEACHER, LABELS, tp_group=None).loss
    assert torch.equal(found, kd_loss(STUDENT, DenseLogits(TEACHER), labels=LABELS, kd_ratio=0.4).loss)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(40, 40)
        self.loss = KDLoss(kd_ratio=0.4)

    def forward(self, states: Tensor) -> Tensor:
        top = vocab_parallel_topk(TEACHER, 5)
        return 2 * self.loss(self.head(states).tanh(), top, LABELS).loss


def test_a_compiled_model_has_one_graph_break_at_each_call_and_no_warning() -> None:
    torch.manual_seed(0)
    model = Model()
    explained = torch._dynamo.explain(model)(STUDENT)
    assert explained.graph_break_count <= 2, explained.break_reasons
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.compile(model, backend="aot_eager")(STUDENT)
    found.backward()
    gradient = model.head.weight.grad.clone()
    model.zero_grad()
    expected = model(STUDENT)
    expected.backward()
    assert torch.equal(found, expected)
    assert torch.equal(gradient, model.head.weight.grad)


def test_entries_keep_their_signatures() -> None:
    assert list(inspect.signature(kd_loss).parameters)[:3] == ["student_logits", "teacher", "labels"]


def test_what_passes_keywords_on_knows_those_of_the_loss() -> None:
    _, _, *keywords = inspect.signature(kd_loss).parameters
    assert set(KDKeywords.__annotations__) == set(keywords)
