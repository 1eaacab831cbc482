"""The aligner pool on real actors: equal rows for any pool size, and rows that cannot be aligned.

Processes that are killed or hang: tests/faults/test_aligner_pool.py.
"""

from __future__ import annotations

import os
import signal
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from distill_rl.config.schema import Config, StudentConfig
from distill_rl.data.collate import BatchPlan, BatchSharding
from distill_rl.errors import AlignmentError, DataError
from distill_rl.types import BadRow, Cursor, DocumentBatch
from distill_rl.workers.actors.aligner import AlignerWorker
from distill_rl.workers.cluster.calls import Calls
from distill_rl.workers.cluster.group import WorkerGroup
from distill_rl.workers.cluster.placement import place_actors, reserve
from distill_rl.workers.pipeline.aligner_pool import AlignerPool, BadRows
from tests.helpers.corpus import corpus_rows
from tests.helpers.tokenizers import tiny_tokenizer

pytestmark = pytest.mark.ray

LENGTH = 64


class Fragile(AlignerWorker):
    """An aligner with faults: the text of a document may tell the process that reads it to fail."""

    def build(self, batch, skip=()):
        for document in batch.documents:
            if document["row"] not in skip:
                self._maybe_fail(document)
        return super().build(batch, skip)

    def try_row(self, document):
        self._maybe_fail(document)
        super().try_row(document)

    def _maybe_fail(self, document):
        word, _, marker = document.get("text", "").partition(" ")
        if word == "HANG":
            signal.pause()
        if word == "DIE":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "RAISE":
            raise RuntimeError("this row cannot be aligned")
        if word == "ONCE" and not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    config = Config(student=StudentConfig(model=str(folder)))
    config.data.max_length = LENGTH
    return config


def pids(group: WorkerGroup) -> list[int]:
    return [process.pid for _, process in group.processes]


@dataclass
class Opened:
    pool: AlignerPool
    group: WorkerGroup
    listed: Path


@pytest.fixture
def open_pool(ray_cluster, config, tmp_path):
    groups, placements = [], []

    def open_pool(size: int, *, deadline_s: float = 60.0, budget: int = 2, data_format: str = "text") -> Opened:
        plan = BatchPlan(BatchSharding(2, 1), (), LENGTH, packing=True, pad_id=2)
        calls = Calls(interrupted=lambda: None)
        placing = place_actors(config, max(size, 1), gpus=False)
        placement = reserve(placing, timeout_s=60, interrupted=lambda: None)
        placements.append(placement)
        group = WorkerGroup(
            Fragile,
            [f"aligner-{i}" for i in range(size)],
            placing,
            placement.__enter__(),
            calls,
            config,
            data_format,
            plan,
        )
        groups.append(group)
        if size:
            group.identify(60)
            group.call("start", what="starting", timeout_s=60)
        local = None
        if not size:
            local = Fragile(0, config, data_format, plan)
            local.start()
        listed = tmp_path / "bad_rows.jsonl"
        settings = deepcopy(config)
        settings.aligner.deadline_s, settings.ray.start_timeout_s = deadline_s, 60.0
        pool = AlignerPool(group, calls, settings, local=local, num_parts=2, bad_rows=BadRows(listed, budget))
        return Opened(pool, group, listed)

    yield open_pool
    for group in groups:
        group.kill()
    for placement in placements:
        placement.__exit__(None, None, None)


def batch(index: int, texts: dict[int, str] | None = None) -> DocumentBatch:
    """A batch of eight documents. `texts` replaces the text of some rows."""
    rows = [(8 * index + i, row["text"]) for i, row in enumerate(corpus_rows(8, seed=index))]
    documents = tuple({"row": row, "text": (texts or {}).get(row, text)} for row, text in rows)
    return DocumentBatch(index, documents, Cursor(0, 8 * index + 8))


def settled(opened: Opened, *batches: DocumentBatch):
    """(BatchInfo, parts) of each batch; all batches are submitted before the first is awaited."""
    import ray

    pending = [opened.pool.submit(batch) for batch in batches]
    return [(opened.pool.settle(alignment)[0], ray.get(alignment.parts, timeout=60)) for alignment in pending]


def assert_same(results, wanted) -> None:
    assert len(results) == len(wanted)
    for (info, parts), (other, others) in zip(results, wanted):
        assert (info.index, info.num_labels, info.num_tokens) == (other.index, other.num_labels, other.num_tokens)
        for part, same in zip(parts, others, strict=True):
            for name in ("input_ids", "labels", "position_ids"):
                assert np.array_equal(getattr(part.rows, name), getattr(same.rows, name))


@pytest.fixture
def wanted(open_pool):
    return settled(open_pool(0), *(batch(index) for index in range(5)))


@pytest.mark.parametrize("size", [1, 3])
def test_pool_size_changes_no_row(open_pool, wanted, size):
    assert_same(settled(open_pool(size), *(batch(index) for index in range(5))), wanted)


@pytest.mark.parametrize("size", [0, 1])
def test_too_many_bad_rows_end_the_run_and_its_resume(open_pool, size):
    too_many = r"aligner\.max_bad_rows=1 may be left out; got 2"
    opened = open_pool(size, budget=1)
    with pytest.raises(AlignmentError, match=too_many):
        settled(opened, batch(0, {2: "RAISE", 5: "RAISE"}))
    with pytest.raises(AlignmentError, match=too_many):
        BadRows(opened.listed, 1)
    assert len(BadRows(opened.listed, 2).rows) == 2


def test_bad_training_rows_do_not_affect_validation_rows(open_pool):
    opened = open_pool(1)
    settled(opened, batch(0, {5: "RAISE"}))
    held_out = replace(batch(0), source="validation")
    assert_same(settled(opened, held_out), settled(open_pool(0), held_out))
    assert settled(opened, held_out)[0][0].num_labels > settled(opened, batch(0))[0][0].num_labels


def test_a_truncated_list_of_bad_rows_is_read_up_to_the_cut(tmp_path):
    path = tmp_path / "bad_rows.jsonl"
    BadRows(path, 2).add("train", BadRow(5, "why"))
    with path.open("a") as file:
        file.write('{"source": "tra')
    assert BadRows(path, 2).rows == {("train", 5)}


def test_an_aligner_that_raises_is_kept_even_while_busy(open_pool):
    opened = open_pool(1)
    before = pids(opened.group)
    settled(opened, batch(0, {5: "RAISE"}), batch(1), batch(2))
    assert pids(opened.group) == before


def test_a_user_error_is_raised_at_once(open_pool, config, monkeypatch):
    monkeypatch.setattr(config.data, "loss_on", "assistant")
    opened = open_pool(1, data_format="auto")
    with pytest.raises(DataError, match=r"data\.loss_on=assistant"):
        settled(opened, batch(0))
    assert not opened.listed.exists()
