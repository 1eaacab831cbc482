"""Before it computes anything, a student rank opens all targets of a sub-batch that hold some of its rows."""

from contextlib import ExitStack, contextmanager

import pytest
import torch

from distill_rl.losses import TopKLogprobs
from distill_rl.transport.base import Layout, Ring, Slot
from distill_rl.transport.local import LocalTransport
from distill_rl.workers.actors.student import _FetchedTargets
from distill_rl.workers.actors.teacher import Published

TOKENS, K, ROWS_PER_SLOT, SLOTS = 3, 2, 2, 4


class CountingTransport(LocalTransport):
    """Counts the slots that are open at the same time."""

    open_now = most_open = 0

    @contextmanager
    def fetch(self, handle):
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        with super().fetch(handle) as tensors:
            yield tensors
        self.open_now -= 1


def published(writer: LocalTransport) -> Published:
    handles = []
    for i in range(SLOTS):
        first = i * ROWS_PER_SLOT
        ids = torch.arange(first * TOKENS * K, (first + ROWS_PER_SLOT) * TOKENS * K, dtype=torch.int32).view(-1, K)
        tensors = {"ids": ids, "logprobs": -ids.float()}
        handles.append(writer.publish(Slot(i, 2), tensors, Layout(first, ROWS_PER_SLOT, TOKENS)))
    return Published(tuple(handles))


@pytest.fixture
def opened():
    writer, reader = LocalTransport(Ring(SLOTS, 4096), node_id="here"), CountingTransport(node_id="here")
    writer.accept(reader.open(writer.offer(0)))
    return reader, published(writer)


def test_rows_are_read_from_open_slots_and_bytes_counted_once(opened):
    reader, sent = opened
    for node_id, far in (("here", 0), ("there", sum(handle.num_bytes for handle in sent.handles))):
        targets = _FetchedTargets({"local": reader}, node_id, 1.0, [[sent]])
        with ExitStack() as stack:
            targets.open(0, SLOTS * ROWS_PER_SLOT, stack)
            for first in range(SLOTS * ROWS_PER_SLOT):  # two micro-batches of the student read each slot
                with targets(first, 1) as (target,):
                    assert isinstance(target, TopKLogprobs)
                    tokens = range(first * TOKENS, (first + 1) * TOKENS)
                    assert target.ids[:, 0].tolist() == [2 * token for token in tokens]
            with targets(1, 2) as (target,):
                assert target.ids.shape == (2 * TOKENS, K)
        assert targets.far_bytes == far
    assert (reader.most_open, reader.open_now) == (SLOTS, 0)


def test_rank_opens_only_the_slots_of_its_rows(opened):
    reader, sent = opened
    with ExitStack() as stack:
        _FetchedTargets({"local": reader}, "here", 1.0, [[sent]]).open(ROWS_PER_SLOT, ROWS_PER_SLOT, stack)
    assert (reader.most_open, reader.open_now) == (1, 0)


def test_lost_teacher_has_no_target(opened):
    reader, sent = opened
    targets = _FetchedTargets({"local": reader}, "here", 1.0, [[], [sent]])
    with ExitStack() as stack:
        targets.open(0, 1, stack)
        with targets(0, 1) as (lost, target):
            assert lost is None
            assert isinstance(target, TopKLogprobs)
