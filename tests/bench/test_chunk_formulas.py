"""Published formulas across tokenizers beside ours, on chunks whose right answer is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distill_rl.config.schema import LossConfig
from tests.bench.losses import chunk_formulas
from tests.bench.losses.chunk_formulas import (
    LOSSES,
    WORDS,
    ambiguous,
    case_of,
    learnt,
    p_kl,
    properties,
    same_vocabulary,
)


@pytest.fixture
def fewer_steps(monkeypatch):
    monkeypatch.setattr(chunk_formulas, "STEPS", 300)
    monkeypatch.setattr(chunk_formulas, "RATE", 0.2)


def test_tau_is_that_of_a_run():
    assert LossConfig().alm_tau == chunk_formulas.TAU


@pytest.mark.parametrize("name", ["hybrid", "alm"])
def test_likelihoods_of_chunks_teach_words_that_the_teacher_divides(name, fewer_steps):
    found = learnt(case_of(["ab"]), LOSSES[name])[WORDS.index("ab")]
    assert float(found) == pytest.approx(chunk_formulas.SURE**2, abs=0.01)


def test_only_alm_ignores_pieces_that_the_student_never_writes(fewer_steps):
    """After the same text either `ab` or `c` comes, which are tokens of the student, as `a` is."""
    right = chunk_formulas.SURE**2 / 2
    found = {name: learnt(ambiguous(), LOSSES[name], same_text=True) for name in ("alm", "hybrid")}
    ab, a = WORDS.index("ab"), WORDS.index("a")
    assert float(found["alm"][ab]) == pytest.approx(right, abs=0.01)
    assert found["alm"][a] < 0.01
    assert found["hybrid"][ab] < right - 0.1
    assert found["hybrid"][a] > 0.3


@pytest.mark.parametrize(
    "name", ["xtoken, mean", "xtoken, chain", "NeMo-RL P-KL (formula)", "TRL GOLD, hybrid, β = 0 (formula)"]
)
def test_distributions_of_chunks_do_not(name, fewer_steps):
    assert learnt(case_of(["ab"]), LOSSES[name])[WORDS.index("ab")] < 0.2


@pytest.mark.parametrize(
    ("published", "own"), [("NeMo-RL P-KL (formula)", "xtoken, mean"), ("NeMo-RL H-KL (formula)", "hkl")]
)
@pytest.mark.parametrize("num_common", [6, 3])
def test_published_formulas_are_ours_where_chunks_are_single_tokens(published, own, num_common):
    draw = torch.Generator().manual_seed(3)
    case = same_vocabulary(torch.randn(4, 6, generator=draw, dtype=torch.float64), 1)
    ids = torch.arange(num_common)
    case = replace(case, projection=replace(case.projection, student_common=ids, teacher_common=ids, _made={}))
    student = torch.randn(4, 6, generator=draw, dtype=torch.float64)
    gradients = []
    for name in (published, own):
        leaf = student.clone().requires_grad_()
        LOSSES[name](case, leaf).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-8)


def test_only_columns_of_a_whole_micro_batch_make_it_matter(fewer_steps, monkeypatch):
    monkeypatch.setattr(chunk_formulas, "STEPS", 1)
    assert properties(p_kl)["changed by another micro-batch"] > 0.01
    assert all(
        properties(LOSSES[name])["changed by another micro-batch"] < 1e-12 for name in ("hybrid", "xtoken, mean")
    )
