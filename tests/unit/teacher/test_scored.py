"""Targets from scored prompts are those of the model behind the scorer, at the right places, and wrong answers are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from distill_rl.config.schema import Config
from distill_rl.errors import NumericsError
from distill_rl.parallel.mesh import World
from distill_rl.teacher.base import Scores
from distill_rl.teacher.scored import ScoredTeacher
from distill_rl.types import IGNORE_INDEX, RankBatch
from tests.helpers.engines import engine_config, random_documents, rank_batch, token_rows

VOCABULARY, WIDTH, TOP = 320, 48, 8


class Bigrams:
    """A scorer with a language model of its own: log-probs of a token given the one before it."""

    def __init__(self, change: Callable[[Scores], Scores] = lambda scores: scores):
        logits = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.table = (2 * logits).log_softmax(1)
        self.change, self.asked, self.closed = change, list[np.ndarray](), False

    def score(self, prompts: Sequence[np.ndarray], k: int) -> Iterator[tuple[int, Scores]]:
        self.asked += prompts
        for i in reversed(range(len(prompts))):  # a server answers in any order
            given = self.table[torch.from_numpy(prompts[i][:-1].astype(np.int64))]
            top = given.topk(k)
            following = torch.from_numpy(prompts[i][1:].astype(np.int64))
            scores = Scores(
                top.indices.numpy().astype(np.int32),
                top.values.numpy().astype(np.float32),
                given.gather(1, following[:, None])[:, 0].numpy().astype(np.float32),
            )
            yield i, self.change(scores)

    def close(self) -> None:
        self.closed = True


def config_of(**teacher: object) -> Config:
    config = engine_config("student", ["teacher"], loss__top_k=TOP, train__micro_batch_size=2)
    config.teachers[0] = replace(config.teachers[0], **teacher)
    return config


def teacher_of(scorer: Bigrams, world: World, vocabulary_size: int = VOCABULARY, **settings: object) -> ScoredTeacher:
    config = config_of(**settings)
    return ScoredTeacher(config, config.teachers[0], world, vocabulary_size=vocabulary_size, scorer=scorer)


@pytest.fixture
def batch() -> RankBatch:
    """Packed rows of several documents, one row with one, and one of padding only."""
    documents = random_documents(6, vocabulary=VOCABULARY)
    return rank_batch(token_rows([documents[:2], documents[2:4], documents[4:5], []], WIDTH))


def gathered(teacher: ScoredTeacher, batch: RankBatch) -> dict[str, torch.Tensor]:
    parts = list(teacher.forward(batch))
    assert [layout.first_row for layout, _ in parts] == [0, 2]
    return {name: torch.cat([tensors[name] for _, tensors in parts]) for name in parts[0][1]}


def test_targets_are_those_of_the_model_at_labelled_positions(batch: RankBatch, world: World) -> None:
    scorer = Bigrams()
    found = gathered(teacher_of(scorer, world), batch)
    ids, labels = (
        torch.from_numpy(each.reshape(-1).astype(np.int64)) for each in (batch.rows.input_ids, batch.rows.labels)
    )
    labelled = labels != IGNORE_INDEX
    assert labelled.sum() > 40
    table = scorer.table[ids[labelled]]
    top = table.topk(TOP)
    assert torch.equal(found["ids"][labelled].long(), top.indices)
    torch.testing.assert_close(found["logprobs"][labelled].double(), top.values, rtol=0, atol=1e-6)
    rest = table.scatter(1, top.indices, -torch.inf).logsumexp(1)
    torch.testing.assert_close(found["rest_logprob"][labelled].double(), rest, rtol=0, atol=1e-5)
    label = table.gather(1, labels[labelled][:, None])[:, 0]
    torch.testing.assert_close(found["label_logprob"][labelled].double(), label, rtol=0, atol=1e-6)


def test_every_target_is_a_distribution(batch: RankBatch, world: World) -> None:
    found = gathered(teacher_of(Bigrams(), world), batch)
    mass = found["logprobs"].double().exp().sum(1) + found["rest_logprob"].double().exp()
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0, atol=1e-6)
    assert (found["label_logprob"] <= 0).all()


def test_only_what_has_labels_is_asked_for(batch: RankBatch, world: World) -> None:
    labels = batch.rows.labels.copy()
    first = np.flatnonzero(labels[0] != IGNORE_INDEX)
    labels[0, first[3] :] = IGNORE_INDEX  # three labels remain in the first row
    labels[1] = IGNORE_INDEX
    scorer = Bigrams()
    list(teacher_of(scorer, world).forward(replace(batch, rows=replace(batch.rows, labels=labels))))
    assert [len(prompt) for prompt in scorer.asked] == [first[2] + 2, np.count_nonzero(labels[2] != IGNORE_INDEX) + 1]
    assert np.array_equal(scorer.asked[0], batch.rows.input_ids[0, : first[2] + 2])


def test_without_labels_nothing_is_asked_for(world: World) -> None:
    scorer = Bigrams()
    empty = rank_batch(token_rows([[], []], WIDTH))
    ((layout, tensors),) = teacher_of(scorer, world).forward(empty)
    assert (layout.num_rows, len(tensors["ids"])) == (2, 2 * layout.tokens_per_row)
    assert scorer.asked == []


def test_an_id_that_the_run_does_not_compare_is_part_of_the_rest(batch: RankBatch, world: World) -> None:
    whole, cut = (gathered(teacher_of(Bigrams(), world, size), batch) for size in (VOCABULARY, 200))
    known = whole["ids"] < 200
    assert not known.all()
    for row in range(len(known)):
        kept = known[row]
        assert torch.equal(cut["ids"][row, : kept.sum()], whole["ids"][row, kept])
        assert (cut["ids"][row, kept.sum() :] == -1).all()
        assert torch.equal(cut["logprobs"][row, : kept.sum()], whole["logprobs"][row, kept])
    mass = cut["logprobs"].double().exp().sum(1) + cut["rest_logprob"].double().exp()
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("score", "expected"), [("static", False), ("ce", True), ("entropy", True)])
def test_the_score_is_summed_over_labelled_positions(batch, world, score, expected):
    teacher = teacher_of(Bigrams(), world, score=score)
    found = gathered(teacher, batch)
    labelled = torch.from_numpy(batch.rows.labels.reshape(-1)) != IGNORE_INDEX
    columns = torch.cat([found["logprobs"], found["rest_logprob"][:, None]], 1).double()[labelled]
    sums = {"static": 0.0, "ce": float(-found["label_logprob"].double()[labelled].sum()),
            "entropy": float(-(columns.exp() * columns).sum())}  # fmt: skip
    assert teacher.score == pytest.approx(sums[score], rel=1e-6)
    assert (teacher.score > 0) == expected


def _nan(scores: Scores) -> Scores:
    logprobs = scores.logprobs.copy()
    logprobs[1, 2] = np.nan
    return replace(scores, logprobs=logprobs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_nan, "log-probs must not be NaN"),
        (lambda scores: replace(scores, next_logprobs=scores.next_logprobs * np.nan), "log-probs must not be NaN"),
        (lambda scores: replace(scores, logprobs=scores.logprobs + 1), "must not exceed 1 together"),
    ],
)
def test_wrong_answers_are_refused(batch, world, change, words):
    with pytest.raises(NumericsError, match=words):
        list(teacher_of(Bigrams(change), world).forward(batch))


def test_closing_closes_the_scorer(world: World) -> None:
    scorer = Bigrams()
    teacher_of(scorer, world).close()
    assert scorer.closed
