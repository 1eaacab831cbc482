"""A teacher that is asked for some rows computes those alone, and every micro-batch keeps its layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from distill_rl.losses.targets import target_of
from distill_rl.models import forward
from distill_rl.store.store import Store, StoreWriter
from distill_rl.teacher.base import Scores
from distill_rl.teacher.build import RoutedTeacher, build_teacher, unrouted
from distill_rl.teacher.engine import TeacherEngine
from distill_rl.teacher.scored import ScoredTeacher
from distill_rl.teacher.stored import StoredTeacher
from distill_rl.types import IGNORE_INDEX, RankBatch
from tests.helpers.engines import engine_config, random_documents
from tests.helpers.models import write_tiny_model
from tests.helpers.stores import batch_of, make_store

VOCABULARY, WIDTH, TOP = 320, 24, 16
ASKED = np.array([True, False, False, False, True, True])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "teacher", "llama", seed=2, vocab_size=352)


@pytest.fixture(scope="module")
def batch() -> RankBatch:
    """Six rows in micro-batches of two: of the first the first is asked for, of the second none, of the third both."""
    documents = random_documents(7, seed=7, longest=WIDTH // 2)
    whole = batch_of([documents[:2], *([document] for document in documents[2:])], WIDTH)
    return replace(whole, first_row=8, asked=ASKED)


def engine(world, folder, export: str = "topk") -> TeacherEngine:
    config = engine_config("unused", [folder], loss__top_k=TOP)
    config.teachers[0].export = export
    return TeacherEngine(config, config.teachers[0], world, vocabulary_size=VOCABULARY)


@pytest.mark.parametrize("export", ["topk", "sampled", "hidden", "logits"])
def test_asked_rows_have_the_models_targets(world, folder, batch, export, monkeypatch):
    teacher = engine(world, folder, export)
    computed, body = [], forward.body

    def counted(model, ids, *others):
        computed.extend(ids.tolist())
        return body(model, ids, *others)

    monkeypatch.setattr(forward, "body", counted)
    found = list(RoutedTeacher(teacher).forward(batch))
    assert computed == batch.rows.input_ids[ASKED].tolist(), "no row that it is not asked for is computed"
    plain = list(teacher.forward(replace(batch, asked=None)))
    assert [layout for layout, _ in found] == [layout for layout, _ in plain]
    for part, ((_, routed), (_, whole)) in enumerate(zip(found, plain)):
        asked = np.repeat(ASKED[2 * part : 2 * part + 2], WIDTH)
        assert routed.keys() == whole.keys()
        for name, tensor in routed.items():
            assert (tensor.shape, tensor.dtype) == (whole[name].shape, whole[name].dtype), name
            torch.testing.assert_close(tensor[asked], whole[name][asked], rtol=1e-5, atol=1e-5)
            assert not tensor.isnan().any()
        assert sum(tensor.nbytes for tensor in routed.values()) <= 2 * WIDTH * teacher.bytes_per_token
        target = target_of(routed, 1.0)
        if export == "topk":
            torch.testing.assert_close(target.logprobs.exp().sum(1) + target.rest_logprob.exp(), torch.ones(2 * WIDTH))
        if export == "logits":
            assert (target.logits[:, VOCABULARY:] == -torch.inf).all()


def test_all_rows_are_those_of_the_backend(world, folder, batch):
    teacher = engine(world, folder)
    for asked in (None, np.ones(6, dtype=bool)):
        every = replace(batch, asked=asked)
        for (_, found), (_, wanted) in zip(RoutedTeacher(teacher).forward(every), teacher.forward(every)):
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    nothing = list(RoutedTeacher(teacher).forward(replace(batch, asked=np.zeros(6, dtype=bool))))
    assert [layout.first_row for layout, _ in nothing] == [8, 10, 12]


class Script:
    """Scores prompts by their tokens, and keeps what it was asked."""

    def __init__(self):
        self.calls: list[list[list[int]]] = []

    def score(self, prompts: Sequence[np.ndarray], k: int) -> Iterator[tuple[int, Scores]]:
        self.calls.append([prompt.tolist() for prompt in prompts])
        for i, prompt in enumerate(prompts):
            count = len(prompt) - 1
            ids = np.tile(np.arange(k, dtype=np.int32), (count, 1))
            yield i, Scores(ids, np.full((count, k), -5.0, np.float32), -prompt[1:].astype(np.float32))

    def close(self) -> None:
        pass


def test_a_scorer_gets_the_prompts_of_asked_rows_at_once(world, folder, batch):
    config = engine_config("unused", [folder], loss__top_k=TOP)
    scorer = Script()
    teacher = ScoredTeacher(config, config.teachers[0], world, vocabulary_size=VOCABULARY, scorer=scorer)
    found = [tensors["label_logprob"] for _, tensors in RoutedTeacher(teacher).forward(batch)]
    (prompts,) = scorer.calls
    assert len(prompts) == 4, "two documents in the first row, one in each of the last two"
    labels = torch.from_numpy(batch.rows.labels).flatten()
    labelled = (labels != IGNORE_INDEX) & torch.from_numpy(np.repeat(ASKED, WIDTH))
    assert torch.equal(torch.cat(found)[labelled], -labels[labelled].float())


def test_a_store_holds_what_was_asked_for(world, folder, batch, tmp_path):
    live = engine(world, folder)
    store = make_store(tmp_path / "store", entries=TOP)
    cached = StoredTeacher(live.config, live.teacher, world, store, live, StoreWriter(store, write_every_s=0))
    teacher = RoutedTeacher(cached)
    first = [tensors for _, tensors in teacher.forward(batch)]
    teacher.close()
    held = [piece for row, pieces in enumerate(batch.pieces) for piece in pieces if ASKED[row]]
    assert cached.use.computed == sum(piece.length for piece in held)
    reader = RoutedTeacher(StoredTeacher(live.config, live.teacher, world, Store(store.folder)))
    again = [tensors for _, tensors in reader.forward(batch)]
    for part, (one, other) in enumerate(zip(first, again)):
        asked = np.repeat(ASKED[2 * part : 2 * part + 2], WIDTH) & (
            batch.rows.labels[2 * part : 2 * part + 2].ravel() != IGNORE_INDEX
        )
        for name in one:
            assert torch.equal(one[name][asked], other[name][asked])
    assert unrouted(reader) is not reader


def test_only_chosen_teachers_are_routed(world, folder):
    config = engine_config("unused", [folder])
    assert isinstance(build_teacher(config, config.teachers[0], world, vocabulary_size=VOCABULARY), TeacherEngine)
    for settings in ({"where": {"domain": "maths"}}, {"weight_column": "use"}):
        teacher = replace(config.teachers[0], **settings)
        assert isinstance(build_teacher(config, teacher, world, vocabulary_size=VOCABULARY), RoutedTeacher)
