"""The contract of teacher backends. A test class inherits it and defines `model` and `make`.

class TestHf(EveryBackend):
    @pytest.fixture
    def make(self, world, model): ...
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distill_rl.config.schema import Config
from distill_rl.transport.base import Layout
from distill_rl.types import IGNORE_INDEX, RankBatch
from tests.helpers.engines import engine_config, engine_targets, plain_model, plain_topk, random_documents
from tests.helpers.stores import batch_of, is_of_pieces

VOCABULARY, WIDTH, TOP = 320, 48, 16
TOLERANCE = 1e-4
"""Of log-probabilities in fp32, between programs that add in different orders."""


def contract_config(model, **teacher) -> Config:
    """The settings of a run with one teacher in fp32, whose own settings are `teacher`."""
    config = engine_config("unused", [model], loss__top_k=TOP, data__max_length=WIDTH)
    for name, value in teacher.items():
        setattr(config.teachers[0], name, value)
    return config


def assert_close_but_for_ties(found: dict, wanted: dict, at: torch.Tensor) -> None:
    """Top-k targets that agree at the positions `at`; where the ids differ, their probabilities are equal."""
    assert at.any()
    for name in ("logprobs", "rest_logprob", "label_logprob"):
        torch.testing.assert_close(found[name][at].double(), wanted[name][at].double(), rtol=0, atol=TOLERANCE)
    differ = (found["ids"] != wanted["ids"])[at]
    assert differ.float().mean() < 0.01
    for row in differ.any(1).nonzero()[:, 0]:
        ours, theirs = ({*part["ids"][at][row].tolist()} for part in (found, wanted))
        last = wanted["logprobs"][at][row, -1]
        for token in ours ^ theirs:  # only the least likely entry may be another token
            side = found if token in ours else wanted
            place = side["ids"][at][row].tolist().index(token)
            assert abs(side["logprobs"][at][row, place] - last) < TOLERANCE


class EveryBackend:
    """Holds for all backends. `make(vocabulary_size=…, **settings)` returns one for `model`, with teachers[] settings;
    it need not know other documents than those of `batch`."""

    @pytest.fixture
    def batch(self) -> RankBatch:
        """Four rows: two packed documents, one alone, three packed, and a row that only fills the batch. The last
        document of the first row is also the last of the third."""
        documents = random_documents(5, seed=7, longest=WIDTH // 3)
        return batch_of([documents[:2], documents[2:3], [*documents[3:], documents[1]], []], WIDTH)

    def test_micro_batches_come_in_order(self, make, batch):
        found = list(make().forward(replace(batch, index=5, first_row=12)))
        assert [layout for layout, _ in found] == [Layout(12, 2, WIDTH), Layout(14, 2, WIDTH)]
        assert {len(tensor) for _, tensors in found for tensor in tensors.values()} == {2 * WIDTH}

    def test_every_position_has_a_valid_target(self, make, batch):
        found = engine_targets(make(), batch)
        assert ((found["ids"] >= 0) & (found["ids"] < VOCABULARY)).all()
        assert all(len(set(row)) == TOP for row in found["ids"].tolist())
        assert (found["logprobs"][:, 1:] <= found["logprobs"][:, :-1]).all(), "most likely first"
        mass = found["logprobs"].double().exp().sum(1) + found["rest_logprob"].double().exp()
        torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0, atol=1e-5)

    def test_targets_are_those_of_the_model(self, make, model, batch):
        wanted = plain_topk(plain_model(model), batch.rows, VOCABULARY, TOP)
        labelled = torch.from_numpy(batch.rows.labels.reshape(-1) != IGNORE_INDEX)
        assert_close_but_for_ties(engine_targets(make(), batch), wanted, labelled)

    def test_the_same_rows_give_the_same_targets(self, make, batch):
        backend = make()
        first, second = engine_targets(backend, batch), engine_targets(backend, batch)
        at = torch.from_numpy(is_of_pieces(batch))
        assert all(torch.equal(first[name][at], second[name][at]) for name in first)

    def test_bytes_per_token_are_enough(self, make, batch):
        backend = make()
        for layout, tensors in backend.forward(batch):
            positions = layout.num_rows * layout.tokens_per_row
            assert sum(tensor.nbytes for tensor in tensors.values()) <= positions * backend.bytes_per_token

    def test_ids_that_the_run_does_not_compare_are_never_sent(self, make, batch):
        known = 200
        found = engine_targets(make(vocabulary_size=known), batch)
        assert found["ids"].max() < known
        mass = found["logprobs"].double().exp().sum(1) + found["rest_logprob"].double().exp()
        torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0, atol=1e-5)

    def test_the_score_is_summed_over_labels(self, make, batch):
        backend = make(score="ce")
        found = engine_targets(backend, batch)
        labelled = torch.from_numpy(batch.rows.labels.reshape(-1) != IGNORE_INDEX)
        assert backend.score == pytest.approx(-found["label_logprob"][labelled].double().sum().item(), rel=1e-6)

    def test_documents_do_not_see_each_other(self, make, batch):
        found = engine_targets(make(), batch)
        length = batch.pieces[0][-1].length
        places = [row * WIDTH + sum(piece.length for piece in batch.pieces[row][:-1]) for row in (0, 2)]
        one, other = ({name: values[place : place + length - 1] for name, values in found.items()} for place in places)
        assert_close_but_for_ties(one, other, torch.ones(length - 1, dtype=torch.bool))

    def test_closing_twice_is_harmless(self, make, batch):
        backend, labelled = make(), torch.from_numpy(batch.rows.labels.reshape(-1) != IGNORE_INDEX)
        wanted = engine_targets(backend, batch)
        backend.close()
        backend.close()
        assert_close_but_for_ties(engine_targets(make(), batch), wanted, labelled)
