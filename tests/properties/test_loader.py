"""Properties of the global order: epochs are complete, and resuming at any step changes nothing."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distill_rl.data.loader import Loader
from distill_rl.data.order import random_order
from distill_rl.types import Cursor, TrainState
from tests.helpers.loading import loading

rows = st.integers(1, 40)
seeds = st.integers(0, 2**63 - 1)
batch_sizes = st.integers(1, 50)
lengths = st.one_of(
    st.tuples(st.integers(1, 12), st.none()),
    st.tuples(st.none(), st.floats(0.05, 4.0)),
    st.tuples(st.integers(1, 12), st.floats(0.05, 4.0)),
)


class Numbers:
    """A source whose documents are their row numbers."""

    def __init__(self, rows: int):
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"row": index}


def loader(rows: int, seed: int, batch_size: int, length: tuple, start: TrainState = TrainState()) -> Loader:  # noqa: B008
    steps, epochs = length
    return Loader(Numbers(rows), loading(batch_size, seed=seed, steps=steps, epochs=epochs), start)


def flat(batches: list) -> list[int]:
    return [document["row"] for batch in batches for document in batch.documents]


@given(seeds, st.integers(0, 5), rows)
def test_each_epoch_is_a_permutation(seed, epoch, n):
    order = random_order(seed, (0, epoch), n)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(n))
    assert np.array_equal(order, random_order(seed, (0, epoch), n))


@given(rows, seeds, batch_sizes, lengths)
@settings(deadline=None)
def test_order_concatenates_epochs_for_any_batch_size(n, seed, batch_size, length):
    order = flat(list(loader(n, seed, batch_size, length)))
    epochs = -(-len(order) // n)
    straight = np.concatenate([random_order(seed, (0, epoch), n) for epoch in range(epochs)])
    assert order == straight[: len(order)].tolist()


@given(rows, seeds, batch_sizes, lengths, st.data())
@settings(deadline=None)
def test_resuming_anywhere_equals_the_straight_run(n, seed, batch_size, length, data):
    whole = loader(n, seed, batch_size, length)
    straight = list(whole)
    assert len(straight) == whole.total_steps
    done = data.draw(st.integers(0, len(straight)))
    state = TrainState(done, straight[done - 1].cursor) if done else TrainState()
    resumed = loader(n, seed, batch_size, length, state)
    assert resumed.total_steps == whole.total_steps
    assert list(resumed) == straight[done:]
    assert list(resumed) == straight[done:]  # a loader can be iterated again


@given(rows, seeds, batch_sizes, lengths)
@settings(deadline=None)
def test_batches_have_index_size_and_cursor(n, seed, batch_size, length):
    batches = list(loader(n, seed, batch_size, length))
    assert [batch.index for batch in batches] == list(range(len(batches)))
    assert all(len(batch.documents) == batch_size for batch in batches[:-1])
    assert 1 <= len(batches[-1].documents) <= batch_size
    read = 0
    for batch in batches:
        read += len(batch.documents)
        assert batch.cursor == Cursor(read // n, read % n)


@given(rows, seeds, batch_sizes, batch_sizes, st.integers(1, 4))
@settings(deadline=None)
def test_resuming_with_another_batch_size(n, seed, before, after, epochs):
    straight = list(loader(n, seed, before, (None, epochs)))
    done = (len(straight) + 1) // 2
    state = TrainState(done, straight[done - 1].cursor)
    resumed = loader(n, seed, after, (None, epochs), state)
    rest = list(resumed)
    assert flat(straight[:done]) + flat(rest) == flat(straight)
    assert [batch.index for batch in rest] == list(range(done, resumed.total_steps))


@given(rows, seeds, st.integers(1, 3))
@settings(deadline=None)
def test_n_epochs_read_each_row_n_times(n, seed, epochs):
    counts = Counter(flat(list(loader(n, seed, 3, (None, float(epochs))))))
    assert counts == dict.fromkeys(range(n), epochs)
