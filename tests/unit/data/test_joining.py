"""Short texts are joined to longer ones, within a batch."""

from __future__ import annotations

from typing import Any

from distill_rl.config.schema import DataConfig
from distill_rl.data.loader import Joining, Loader, validation_batches
from distill_rl.types import DocumentBatch, TrainState
from tests.helpers.loading import loading


class Letters:
    """Row i is a text of i + 1 letters."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> dict:
        return {"row": index, "text": chr(97 + index) * (index + 1)}


def batches(**joining: Any) -> list[DocumentBatch]:
    return [*Loader(Letters(), loading(4, epochs=1, **joining), TrainState())]


def test_texts_are_joined_until_they_have_enough_characters():
    joined = Joining("-", 4).join([Letters()[i] for i in range(6)])
    assert [document["text"] for document in joined] == ["a-bb-ccc", "dddd", "eeeee", "ffffff"]
    assert [document["rows"] for document in joined] == [(0, 1, 2), (3,), (4,), (5,)]
    assert [document["row"] for document in joined] == [0, 3, 4, 5]


def test_what_is_left_is_a_shorter_text():
    joined = Joining("\n", 100).join([Letters()[i] for i in range(3)])
    assert [document["text"] for document in joined] == ["a\nbb\nccc"]
    assert Joining("\n", 100).join([]) == ()


def test_settings():
    assert Joining.of(DataConfig()) is None
    assert Joining.of(DataConfig(concatenate=True, max_length=10)) == Joining("\n", 40)
    assert Joining.of(DataConfig(concatenate=True, characters_per_sample=7, separator=" ")) == Joining(" ", 7)


def test_joining_changes_neither_the_rows_nor_the_cursor_of_a_batch():
    joined, apart = batches(concatenate=True, separator=" ", characters_per_sample=10), batches()
    assert [batch.row_numbers for batch in joined] == [batch.row_numbers for batch in apart]
    assert [batch.cursor for batch in joined] == [batch.cursor for batch in apart]
    assert len(joined[0].documents) < len(apart[0].documents) == 4


def test_validation_texts_are_joined_like_the_others():
    config = loading(9, concatenate=True, separator=" ", characters_per_sample=1000)
    (batch,) = validation_batches(Letters(), config)
    assert len(batch.documents) == 1
    assert batch.row_numbers == tuple(range(9))
