"""The loader by example; tests/properties/test_loader.py has properties for random sizes."""

from __future__ import annotations

import hashlib

import pytest

from distill_rl.config.schema import ValidationConfig
from distill_rl.data.loader import ENDLESS, Loader, validation_batches
from distill_rl.data.order import random_order
from distill_rl.errors import DataError
from distill_rl.types import Cursor, TrainState
from tests.helpers.loading import loading

EXPECTED = {
    (0, 0): [7, 6, 3, 2, 4, 1, 5, 0],
    (2**40, 3): [6, 2, 0, 1, 4, 5, 3, 7],
    "sha256": "2e6591883ee6a35495c70fa86921d6ff6118d3f96f9b61cd8a8be62ccead26ce",
}


class CountingSource:
    """A source of row numbers that counts reads."""

    def __init__(self, rows: int):
        self.rows, self.reads = rows, 0

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, int]:
        self.reads += 1
        return {"row": index}


def loader(rows=10, *, batch_size=4, steps=None, epochs=None, start=TrainState(), seed=0) -> Loader:  # noqa: B008
    return Loader(CountingSource(rows), loading(batch_size, seed=seed, steps=steps, epochs=epochs), start)


def sizes(loader: Loader) -> list[int]:
    return [len(batch.documents) for batch in loader]


def test_the_order_is_the_same_on_all_versions_and_machines():
    """Checkpoints store a cursor into this order, so these values must never change."""
    assert random_order(0, (0, 0), 8).tolist() == EXPECTED[(0, 0)]
    assert random_order(2**40, (0, 3), 8).tolist() == EXPECTED[(2**40, 3)]
    digest = hashlib.sha256(random_order(7, (0, 1), 100_000).astype("<i8").tobytes()).hexdigest()
    assert digest == EXPECTED["sha256"]


def test_seeds_epochs_and_streams_give_different_orders():
    orders = [
        random_order(0, (0, 0), 50),
        random_order(1, (0, 0), 50),
        random_order(0, (0, 1), 50),
        random_order(0, (1,), 50),
    ]
    assert len({tuple(order) for order in orders}) == 4


def test_negative_seeds_are_allowed():
    assert sorted(random_order(-1, (0, 0), 5)) == list(range(5))
    assert random_order(-1, (0, 0), 50).tolist() != random_order(1, (0, 0), 50).tolist()


@pytest.mark.parametrize(
    ("steps", "epochs", "expected"),
    [
        (3, None, [4, 4, 4]),
        (None, 1, [4, 4, 2]),
        (None, 2.0, [4, 4, 4, 4, 4]),
        (None, 1.5, [4, 4, 4, 3]),
        (2, 1, [4, 4]),
        (3, 1, [4, 4, 2]),
        (9, 1, [4, 4, 2]),
        (None, 0.01, [1]),
        (0, None, []),
    ],
)
def test_a_run_ends_at_the_earlier_of_steps_and_epochs(steps, epochs, expected):
    run = loader(steps=steps, epochs=epochs)
    assert sizes(run) == expected
    assert run.total_steps == len(expected)


def test_a_batch_may_be_larger_than_the_data():
    assert sizes(loader(rows=3, batch_size=8, steps=2)) == [8, 8]


def test_more_steps_extend_a_run():
    state = TrainState(3, Cursor(1, 2))
    assert [batch.index for batch in loader(steps=5, start=state)] == [3, 4]
    assert list(loader(steps=3, start=state)) == []
    assert list(loader(steps=2, start=state)) == []


def test_end_of_an_epoch_equals_start_of_the_next():
    at_end = list(loader(steps=3, start=TrainState(1, Cursor(0, 10))))
    assert at_end == list(loader(steps=3, start=TrainState(1, Cursor(1, 0))))


def test_rows_are_read_lazily():
    source = CountingSource(100)
    batches = iter(Loader(source, loading(4, steps=9), TrainState()))
    assert source.reads == 0
    next(batches)
    assert source.reads == 4


def test_an_end_that_is_set_later_ends_iterations_that_have_begun():
    run = loader()
    assert run.total_steps == ENDLESS
    batches = iter(run)
    assert next(batches).index == 0
    assert run.end_at(3) == 3
    assert [batch.index for batch in batches] == [1, 2]
    assert run.end_at(5) == 3, "a run is never made longer"


def test_no_rows_are_refused():
    with pytest.raises(DataError, match="at least one row"):
        loader(rows=0, steps=1)


def test_a_cursor_beyond_the_data_is_refused():
    with pytest.raises(DataError, match="row 11 of 10"):
        loader(steps=1, start=TrainState(1, Cursor(0, 11)))


@pytest.mark.parametrize(("limit", "expected"), [(512, [4, 4, 2]), (8, [4, 4]), (5, [4, 1]), (0, [])])
def test_validation_reads_rows_in_order_up_to_the_limit(limit, expected):
    config = loading(4, validation=ValidationConfig(max_documents=limit))
    batches = list(validation_batches(CountingSource(10), config))
    assert [len(batch.documents) for batch in batches] == expected
    assert [document["row"] for batch in batches for document in batch.documents] == list(range(min(limit, 10)))
    assert [batch.index for batch in batches] == list(range(len(expected)))
