"""Sources with weights: the schedule, the order of the mixture, what each source holds out; see also the properties."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from distill_rl.config.schema import DataConfig, SourceConfig, ValidationConfig
from distill_rl.data.loader import Loader
from distill_rl.data.reading.source import MixedSource, Mixture, MixtureSchedule
from distill_rl.data.reading.sources import names_of, open_source, split_validation
from distill_rl.errors import DataError
from distill_rl.types import TrainState
from tests.helpers.corpus import write_corpus
from tests.helpers.loading import loading


def write(path, name: str, rows: int):
    path.write_text("".join(json.dumps({"text": f"{name} {i}"}) + "\n" for i in range(rows)))
    return str(path)


def data(tmp_path, **settings) -> DataConfig:
    sources = [
        SourceConfig(path=write(tmp_path / "web.jsonl", "web", 50), weight=0.7),
        SourceConfig(path=write(tmp_path / "books.jsonl", "books", 5), weight=0.2),
        SourceConfig(path=write(tmp_path / "code.jsonl", "code", 20), weight=0.1),
    ]
    return DataConfig(sources=sources, **settings)


def test_the_schedule_is_the_same_on_all_machines():
    """Checkpoints store a position in it, so these values must never change."""
    schedule = MixtureSchedule([0.5, 0.3, 0.2])
    assert [schedule(i) for i in range(12)] == EXPECTED
    long = MixtureSchedule([1234.5, 333.25, 0.75])
    places = np.array([long(i) for i in range(5000)], dtype="<i8")
    assert hashlib.sha256(places.tobytes()).hexdigest() == SHA256


SHA256 = "d2f69706fffe81448496e045dd41f87a5ee9222e8679fbfb24d68024715a7746"
EXPECTED = [
    (0, 0), (1, 0), (0, 1), (2, 0), (0, 2), (1, 1), (0, 3), (1, 2), (0, 4), (2, 1), (0, 5), (1, 3),
]  # fmt: skip


def test_a_used_up_source_begins_again_in_another_order(tmp_path):
    mixture = open_source(data(tmp_path))
    order = mixture.order(0)
    texts = [mixture[order(i)]["text"] for i in range(100)]
    books = [text for text in texts if text.startswith("books")]
    assert len(books) == 20
    epochs = [books[i : i + 5] for i in range(0, 20, 5)]
    assert all(sorted(epoch) == [f"books {i}" for i in range(5)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert len(mixture) == 75


def test_rows_are_counted_over_all_sources(tmp_path):
    mixture = open_source(data(tmp_path))
    assert mixture[54] == {"row": 54, "text": "books 4"}
    assert mixture.count([0, 49, 50, 54, 55, 74]) == {"web.jsonl": 2, "books.jsonl": 2, "code.jsonl": 2}


def test_every_source_holds_out_its_fraction(tmp_path):
    settings = data(tmp_path, validation=ValidationConfig(fraction=0.2))
    training, held_out = split_validation(open_source(settings), settings, 0)
    validation = [held_out[i] for i in range(len(held_out))]
    assert (len(training), len(validation)) == (60, 15)
    assert [document["text"].split()[0] for document in validation[:9]].count("web") == 7
    order = training.order(0)
    trained = {training[order(i)]["row"] for i in range(600)}
    assert trained == set(range(75)) - {document["row"] for document in validation}


def test_another_weight_is_another_fingerprint(tmp_path):
    settings = data(tmp_path)
    before = open_source(settings).fingerprint
    assert open_source(settings).fingerprint == before
    settings.sources[0].weight = 0.6
    assert open_source(settings).fingerprint != before


def test_problems_of_all_sources_come_at_once(tmp_path):
    settings = data(tmp_path)
    settings.sources.append(SourceConfig(path=str(tmp_path / "none.jsonl")))
    settings.sources[1].text_key = "body"
    with pytest.raises(DataError) as caught:
        open_source(settings)
    first, second = caught.value.problems
    assert first.startswith("data.sources.1.path: ")
    assert "column 'body'" in first
    assert second.startswith("data.sources.3.path: an existing file")


def test_chats_beside_texts_are_refused(tmp_path):
    settings = data(tmp_path)
    settings.sources[2].path = str(write_corpus(tmp_path / "chats.jsonl", rows=4, messages=True))
    with pytest.raises(DataError, match=r"data\.sources\.2\.path: all sources have the same form.*got chats"):
        open_source(settings)


def test_names_of_sources_are_unique():
    paths = ["a/train.jsonl", "b/train.jsonl", "org/name", "/c/*.parquet", "*", "d/../."]
    settings = DataConfig(sources=[SourceConfig(path=path) for path in paths])
    assert names_of(settings) == ["train.jsonl.0", "train.jsonl.1", "name", "c", "files", "d"]
    collide = DataConfig(sources=[SourceConfig(path=path) for path in ("c/x.1", "a/x", "b/x")])
    assert len(set(names_of(collide))) == 3


def test_only_the_proportions_of_weights_enter_the_fingerprint(tmp_path):
    parts = [open_source(DataConfig(path=str(write_corpus(tmp_path / f"{i}.jsonl", rows=4)))) for i in range(2)]
    prints = [
        Mixture([MixedSource(parts[0], first, "a"), MixedSource(parts[1], second, "b")]).fingerprint
        for first, second in ((7, 3), (0.7, 0.3), (3, 7))
    ]
    assert prints[0] == prints[1] != prints[2]


def test_skipped_rows_are_left_out_of_their_batch(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "a"}\n{"text": ""}\nno JSON\n{"text": "b"}\n')
    opened = open_source(DataConfig(path=str(path), bad_rows="skip"))

    def batches(size: int, start: TrainState = TrainState()):  # noqa: B008
        return list(Loader(opened, loading(size, steps=3, epochs=1, bad_rows="skip"), start, opened.order(0)))

    (batch,) = batches(4)
    assert sorted(document["row"] for document in batch.documents) == [0, 3]
    assert sorted((bad.row, bad.reason[:9]) for bad in batch.bad_rows) == [(1, "the text "), (2, str(path)[:9])]
    assert batch.cursor.position in (0, 4)
    alone = batches(1)
    assert [len(batch.documents) + len(batch.bad_rows) for batch in alone] == [1, 1, 1]
    assert any(not batch.documents for batch in alone), "a batch of a bad row keeps its step"
