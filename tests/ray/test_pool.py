"""The aligner pool on real actors: equal rows for any pool size, and rows and batches that cannot be aligned.

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

from distill_rl.config.schema import Config, StudentConfig, TeacherConfig
from distill_rl.data.batch.collate import BatchPlan, BatchSharding
from distill_rl.errors import AlignmentError, DataError, WorkerError
from distill_rl.types import BadRow, ChunkRows, Cursor, DocumentBatch, RankBatch
from distill_rl.workers.actors.aligner import AlignerWorker
from distill_rl.workers.cluster.calls import Calls
from distill_rl.workers.cluster.group import WorkerGroup
from distill_rl.workers.cluster.placement import place_actors, reserve
from distill_rl.workers.pipeline.aligner_pool import LEAST_BYTES, AlignerPool, BadRows
from tests.helpers.corpus import corpus_rows
from tests.helpers.tokenizers import tiny_tokenizer

pytestmark = pytest.mark.ray

LENGTH = 64


class Fragile(AlignerWorker):
    """An aligner with faults: the text of a document may tell the process that reads it to fail."""

    def align(self, documents, skip=()):
        if "log" in documents[0]:
            with Path(documents[0]["log"]).open("a") as log:
                log.write(f"{[document['row'] for document in documents]}\n")
        self._spoilt = False
        for document in documents:
            if document["row"] not in skip:
                self._maybe_fail(document)
        return super().align(documents, skip)

    def assemble(self, index, cursor, *parts):
        if self._spoilt:
            raise RuntimeError("this batch cannot be assembled")
        return super().assemble(index, cursor, *parts)

    def try_row(self, document):
        self._maybe_fail(document)
        if document["text"] == "SPOILS":
            raise RuntimeError("no batch with this row can be assembled")
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
        if word.startswith("SPOILS"):
            self._spoilt = True


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder / "student")
    tiny_tokenizer(600, seed=7).save_pretrained(folder / "teacher")
    config = Config(
        student=StudentConfig(model=str(folder / "student")),
        teachers=[TeacherConfig(name="big", model=str(folder / "teacher"))],
    )
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
        shardings = BatchSharding(2, 1), (BatchSharding(1, 2),)
        plan = BatchPlan(*shardings, LENGTH, packing=True, pad_id=2, rows_per_sub_batch=2)
        calls = Calls(interrupted=lambda: None)
        placing = place_actors(Config(student=config.student), max(size, 1), gpus=False)
        placement = reserve(lambda: placing, config.ray, "pool", interrupted=lambda: None)
        placements.append(placement)
        group = WorkerGroup(
            Fragile,
            [f"aligner-{i}" for i in range(size)],
            placing,
            placement.__enter__()[1],
            calls,
            config,
            data_format,
            plan,
            (True,),
        )
        groups.append(group)
        if size:
            group.identify(60)
            group.call("start", what="starting", timeout_s=60)
        local = None
        if not size:
            local = Fragile(0, config, data_format, plan, (True,))
            local.start()
        listed = tmp_path / "bad_rows.jsonl"
        settings = deepcopy(config)
        settings.aligner.deadline_s, settings.ray.start_timeout_s = deadline_s, 60.0
        pool = AlignerPool(group, calls, settings, local=local, num_ranks=3, bad_rows=BadRows(listed, budget))
        return Opened(pool, group, listed)

    yield open_pool
    for group in groups:
        group.kill()
    for placement in placements:
        placement.__exit__(None, None, None)


def batch(index: int, texts: dict[int, str] | None = None, **more: str) -> DocumentBatch:
    """A batch of eight documents, large enough to be cut into eight parts. `texts` replaces the text of some rows."""
    rows = [(8 * index + i, row["text"]) for i, row in enumerate(corpus_rows(8, seed=index))]
    size = {"not read": "x" * LEAST_BYTES} | more
    documents = tuple({"row": row, "text": (texts or {}).get(row, text)} | size for row, text in rows)
    return DocumentBatch(index, documents, Cursor(0, 8 * index + 8))


def settled(opened: Opened, *batches: DocumentBatch):
    """(BatchInfo, rows of every rank) of each batch; all batches are submitted before the first is awaited."""
    import ray

    pending = [opened.pool.submit(batch) for batch in batches]
    return [(opened.pool.settle(alignment), ray.get(alignment.rows, timeout=60)) for alignment in pending]


def chunks_of(part: RankBatch) -> list[ChunkRows]:
    return [teacher.chunks for teacher in part.teachers if teacher.chunks is not None]


def assert_same(results, wanted) -> None:
    assert len(results) == len(wanted)
    for (info, ranks), (other, others) in zip(results, wanted):
        assert replace(info, seconds=0.0, peak_gib=0.0) == replace(other, seconds=0.0, peak_gib=0.0)
        assert len(ranks) == len(others) == 3
        for rank, same_rank in zip(ranks, others):
            for part, same in zip(rank, same_rank, strict=True):
                assert (part.index, part.first_row, part.num_labels) == (same.index, same.first_row, same.num_labels)
                for name in ("input_ids", "labels", "position_ids"):
                    assert np.array_equal(getattr(part.rows, name), getattr(same.rows, name))
                for chunks, same_chunks in zip(chunks_of(part), chunks_of(same), strict=True):
                    assert np.array_equal(chunks.student, same_chunks.student)
                    assert np.array_equal(chunks.teacher, same_chunks.teacher)
                    assert chunks.num_chunks == same_chunks.num_chunks > 0


@pytest.fixture
def wanted(open_pool):
    return settled(open_pool(0), *(batch(index) for index in range(5)))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_pool_size_changes_no_row(open_pool, wanted, size):
    opened = open_pool(size)
    assert_same(settled(opened, *(batch(index) for index in range(5))), wanted)
    assert opened.pool.queue == 0
    assert opened.pool.awaited() == []


def test_a_batch_is_cut_over_all_aligners(open_pool, tmp_path):
    opened, log = open_pool(3), tmp_path / "log"
    settled(opened, batch(0, log=str(log)))
    assert sorted(log.read_text().splitlines()) == ["[0, 1, 2]", "[3, 4]", "[5, 6, 7]"]
    log.unlink()
    settled(opened, batch(0, log=str(log), **{"not read": ""}))
    assert log.read_text().splitlines() == ["[0, 1, 2, 3, 4, 5, 6, 7]"], "there is too little text for several calls"


def test_a_killed_aligner_costs_only_its_part(open_pool, tmp_path):
    texts = {3: f"ONCE {tmp_path / 'marker'}"}
    opened = open_pool(3)
    before = pids(opened.group)
    settled(opened, batch(0, texts, log=str(tmp_path / "log")))
    lines = (tmp_path / "log").read_text().splitlines()
    assert sorted(lines) == ["[0, 1, 2]", "[3, 4]", "[3, 4]", "[5, 6, 7]"]
    assert len(set(pids(opened.group)) & set(before)) == 3, "one has gone; pids() lists it still"
    assert opened.pool.restarts == 1


def test_a_batch_that_is_tried_again_goes_before_later_ones(open_pool, tmp_path):
    texts, log = {3: f"ONCE {tmp_path / 'marker'}"}, tmp_path / "log"
    settled(open_pool(1), batch(0, texts, log=str(log)), *(batch(index, log=str(log)) for index in (1, 2)))
    assert [line.partition(",")[0] for line in log.read_text().splitlines()] == ["[0", "[0", "[8", "[16"]


def test_a_row_that_spoils_its_batch_is_left_out(open_pool):
    opened = open_pool(1)
    results = settled(opened, batch(0, {5: "SPOILS"}), batch(1))
    assert opened.listed.read_text().count("no batch with this row") == 1
    assert_same(results, settled(open_pool(0), batch(0, {5: "SPOILS"}), batch(1)))


def test_batches_that_are_abandoned_leave_no_trace(open_pool, wanted):
    opened = open_pool(2)
    dropped = [opened.pool.submit(each) for each in (batch(7, {57: "RAISE"}), batch(8), batch(9))]
    opened.pool.abandon()
    assert opened.pool.queue == 0
    assert_same(settled(opened, *(batch(index) for index in range(5))), wanted)
    assert [pending.info for pending in dropped] == [None] * 3
    assert not opened.listed.exists()


def test_a_batch_that_fails_ends_the_run_after_those_before_it(open_pool):
    opened = open_pool(1)
    pending = [opened.pool.submit(each) for each in (batch(0), batch(1, {9: "SPOILS always"}), batch(2))]
    infos = [opened.pool.settle(each) for each in (pending[0], pending[2])]
    assert [info.index for info in infos] == [0, 2]
    with pytest.raises(WorkerError, match="aligning batch 2 failed; got RuntimeError: this batch cannot"):
        opened.pool.settle(pending[1])


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
