"""A writer's shards appear complete or not at all, when they are due, whoever else writes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from distill_rl.errors import StoreError
from distill_rl.store import store as store_module
from distill_rl.store.store import SHARDS, SUFFIX, Column, Record, Store, StoreWriter, process_home
from tests.helpers.command import until
from tests.helpers.stores import ids, labels, make_store, piece_of, record_of

NEVER = float("inf")


@pytest.fixture
def store(tmp_path) -> Store:
    return make_store(tmp_path / "store")


def add(writer: StoreWriter, record: Record) -> None:
    writer.add(record.piece, record.tokens, record.targets)


def files(store: Store) -> list[str]:
    return sorted(path.name for path in (store.folder / SHARDS).iterdir())


def test_targets_are_written_when_they_are_due(store):
    patient, eager = StoreWriter(store, write_every_s=NEVER), StoreWriter(store, write_every_s=0)
    for writer, name in ((patient, "one"), (eager, "two")):
        add(writer, record_of(name, range(4)))
        writer.flush_if_due()
    until(lambda: len(Store(store.folder)), "a shard")
    assert [piece.name for piece in Store(store.folder).pieces()] == [record_of("two", range(4)).piece.name]
    eager.flush()
    (shard,) = store.shards
    assert eager.bytes_written == shard.num_bytes > patient.bytes_written == 0
    patient.flush()
    assert len(Store(store.folder)) == 2


def test_what_is_being_written_is_held(store):
    writer = StoreWriter(store, write_every_s=0)
    for i in range(4):
        record = record_of(f"{i}", range(i, i + 4))
        add(writer, record)
        writer.flush_if_due()
        assert writer.holds(record.piece, record.tokens) != (store.find(record.piece, record.tokens) is not None)
    writer.flush()
    assert len(store) == len(Store(store.folder)) == 4


def test_nothing_is_written_when_nothing_waits(store):
    writer = StoreWriter(store, write_every_s=0)
    writer.flush()
    writer.flush_if_due()
    assert files(store) == []


def test_a_full_shard_is_written_without_being_due(store):
    writer = StoreWriter(store, write_every_s=NEVER)
    rows = store_module.SHARD_BYTES // 2 // 4096
    large = {"ids": Column("I32", np.ones((rows, 1024), np.int32))}
    for i in range(3):
        tokens = np.full(rows, i, np.int32)
        writer.add(piece_of("large", tokens), tokens, large)
        writer.flush_if_due()
        assert writer.holds(piece_of("large", tokens), tokens)
    until(lambda: len(Store(store.folder)), "a shard")
    assert len(Store(store.folder)) == 2, "the third waits"


def test_the_arrays_may_be_changed_afterwards(store):
    writer = StoreWriter(store, write_every_s=NEVER)
    record = record_of("one", range(4))
    add(writer, record)
    record.tokens[:] = 0
    record.targets["label_logprob"].values[:] = 7
    writer.flush()
    tokens = ids(0, 1, 2, 3)
    assert labels(store, store.find(piece_of("one", tokens), tokens)) == [0, -1, -2, -3]


def test_what_waits_is_held_with_all_beginnings(store):
    writer = StoreWriter(store, write_every_s=NEVER)
    tokens = ids(5, 6, 7, 8)

    def holds(tokens: np.ndarray, text: str = "one", **extent: int) -> bool:
        return writer.holds(piece_of(text, tokens, **extent), tokens)

    assert not holds(tokens)
    add(writer, record_of("one", tokens))
    assert holds(tokens)
    assert holds(tokens[:2])
    assert not holds(ids(5, 6, 7, 8, 9))
    assert not holds(tokens, text="two")
    assert not holds(tokens, first=1)
    assert not holds(tokens, prefix=1)
    writer.flush()
    assert not holds(tokens)


def test_other_tokens_of_the_same_document_are_not_held(store):
    """Two texts that differ only in Unicode's form have one name, and may have different tokens."""
    writer = StoreWriter(store, write_every_s=NEVER)
    composed, decomposed = record_of("caf\u00e9", ids(1, 2)), record_of("cafe\u0301", ids(1, 3), number=50)
    assert composed.piece.name == decomposed.piece.name
    add(writer, composed)
    assert not writer.holds(decomposed.piece, decomposed.tokens)
    add(writer, decomposed)
    assert all(writer.holds(record.piece, record.tokens) for record in (composed, decomposed))
    writer.flush()
    assert labels(store, store.find(decomposed.piece, decomposed.tokens)) == [-50, -51]


def test_a_shard_that_cannot_be_written_is_kept_for_another_try(store):
    writer = StoreWriter(store, write_every_s=NEVER)
    record = record_of("one", range(4))
    add(writer, record)
    shards = store.folder / SHARDS
    shards.rmdir()
    shards.write_text("a file in place of the folder")
    with pytest.raises(
        StoreError, match=r"shards: a shard of [\d,]+ bytes must be written; got Not a directory; .*start again"
    ):
        writer.flush()
    assert writer.holds(record.piece, record.tokens)
    shards.unlink()
    shards.mkdir()
    writer.flush()
    assert labels(store, store.find(record.piece, record.tokens)) == [0, -1, -2, -3]
    assert len(files(store)) == 1


def test_shards_are_closed_to_others_whatever_the_umask(store):
    before = os.umask(0o000)
    try:
        writer = StoreWriter(store, write_every_s=0)
        add(writer, record_of("one", range(4)))
        writer.flush()
    finally:
        os.umask(before)
    assert len(Store(store.folder)) == 1


def test_a_store_can_be_opened_while_another_process_writes_to_it(store, monkeypatch):
    """Its draft is closed to others from the start, and may be renamed while the folder is looked through."""
    opened = []
    monkeypatch.setattr(os, "fsync", lambda _: opened.append(len(Store(store.folder))))
    before = os.umask(0o000)
    try:
        writer = StoreWriter(store, write_every_s=0)
        add(writer, record_of("one", range(4)))
        writer.flush()
    finally:
        os.umask(before)
    assert opened == [0, 1], "the file, then its folder"
    monkeypatch.setattr(Path, "rglob", lambda folder, _: [folder / "renamed"] if folder.is_dir() else [])
    assert len(Store(store.folder)) == 1


def ended_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_half_shards_of_ended_processes_of_this_machine_are_removed(store):
    home = process_home()
    left = f".{home}-{ended_process()}.0001{SUFFIX}"
    kept = [f".{home}-{os.getpid()}.0002{SUFFIX}", f".another-{ended_process()}.0003{SUFFIX}", f"0004{SUFFIX}"]
    for name in (left, *kept):
        (store.folder / SHARDS / name).write_bytes(b"half a shard")
    StoreWriter(store, write_every_s=NEVER)
    assert files(store) == sorted(kept)


def write_many(folder: Path, writer: str, count: int) -> None:
    opened = StoreWriter(Store(folder), write_every_s=0)
    for i in range(count):
        add(opened, record_of(f"{writer} {i}", range(i + 1)))
        opened.flush_if_due()


def test_two_processes_that_write_at_once_lose_nothing(store):
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(store.folder, name, 30)) for name in ("one", "other")]
    for process in writers:
        process.start()
    for process in writers:
        process.join(120)
    assert [process.exitcode for process in writers] == [0, 0]
    written = Store(store.folder)
    assert len(written) == 60
    for name in ("one", "other"):
        for i in range(30):
            record = record_of(f"{name} {i}", range(i + 1))
            assert labels(written, written.find(record.piece, record.tokens)) == [-p for p in range(i + 1)]
    assert all(shard.problems() == [] for shard in written.shards)
