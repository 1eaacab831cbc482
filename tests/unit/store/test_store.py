"""A store finds targets by the document's name and the piece's tokens, and by nothing else."""

from __future__ import annotations

import os
import resource

import numpy as np
import pytest

from distill_rl.errors import StoreError
from distill_rl.store.store import FILE, SHARDS, Store, StoreWriter
from tests.helpers.stores import ids, labels, make_store, piece_of, record_of

BOS = 900
TOKENS = np.arange(10, 20, dtype=np.int32)
TEXT = "a document"


def find(store: Store, tokens: np.ndarray, text: str = TEXT, **extent) -> list[float] | None:
    """`label_logprob` of the positions of a piece that the store has."""
    return labels(store, store.find(piece_of(text, tokens, **extent), tokens))


@pytest.fixture
def whole(tmp_path) -> Store:
    """One document of ten tokens in one record; its position p has the label log-prob -p."""
    return make_store(tmp_path / "store", [record_of(TEXT, TOKENS)])


def test_a_piece_is_found_with_its_own_targets(whole):
    assert find(whole, TOKENS) == [-p for p in range(10)]


def test_a_shorter_beginning_is_found_in_a_longer_record(whole):
    found = whole.find(piece_of(TEXT, TOKENS[:4], whole=False), TOKENS[:4])
    assert labels(whole, found) == [0, -1, -2, -3]
    assert not found.in_context


def test_a_longer_piece_or_other_tokens_or_another_text_find_nothing(whole):
    assert find(whole, np.append(TOKENS, 20).astype(np.int32)) is None
    assert find(whole, ids(*TOKENS[:5], 99, *TOKENS[6:])) is None
    assert find(whole, ids(99, *TOKENS[1:])) is None
    assert find(whole, TOKENS, text="another document") is None


def test_a_later_piece_is_found_further_on_in_a_record(whole):
    found = whole.find(piece_of(TEXT, TOKENS[4:8], first=4, whole=False), TOKENS[4:8])
    assert labels(whole, found) == [-4, -5, -6, -7]
    assert (found.skip, found.in_context) == (0, True)


@pytest.mark.parametrize("prefix", [1, 2])
def test_the_last_token_of_a_prefix_predicts_the_first_of_the_text(whole, prefix):
    tokens = ids(*[BOS] * prefix, *TOKENS[4:8])
    found = whole.find(piece_of(TEXT, tokens, first=4, prefix=prefix, whole=False), tokens)
    assert labels(whole, found) == [-3, -4, -5, -6, -7], "from the position before the first token"
    assert (found.skip, found.count, found.in_context) == (prefix - 1, 5, True)


def test_a_later_piece_must_have_its_tokens_and_end_in_the_record(whole):
    assert find(whole, ids(14, 15, 99), first=4) is None
    assert find(whole, ids(14, 15, 16), first=5) is None
    assert find(whole, ids(18, 19, 20), first=8) is None
    assert find(whole, ids(BOS, 18, 19, 20), first=8, prefix=1) is None
    assert find(whole, ids(18, 19), first=8) == [-8, -9]


def test_a_later_piece_is_found_in_another_later_piece(tmp_path):
    tokens = ids(BOS, *TOKENS[2:])
    store = make_store(tmp_path / "store", [record_of(TEXT, tokens, first=2, prefix=1)])
    later = ids(BOS, *TOKENS[5:9])
    assert find(store, later, first=5, prefix=1) == [-3, -4, -5, -6, -7]
    assert find(store, TOKENS[5:9], first=5) == [-4, -5, -6, -7]
    assert find(store, TOKENS[:4]) is None, "what comes before the record is not in it"


def test_the_piece_itself_is_preferred_to_one_with_more_context(tmp_path):
    piece = record_of(TEXT, ids(BOS, *TOKENS[4:]), number=100, first=4, prefix=1)
    store = make_store(tmp_path / "store", [record_of(TEXT, TOKENS), piece])
    found = store.find(piece.piece, piece.tokens)
    assert labels(store, found) == [-100 - p for p in range(7)]
    assert not found.in_context


def test_a_piece_after_one_token_of_a_longer_prefix_was_seen_in_context(tmp_path):
    store = make_store(tmp_path / "store", [record_of(TEXT, ids(BOS, *TOKENS))])
    tokens = ids(BOS, BOS, *TOKENS[:3])
    found = store.find(piece_of(TEXT, tokens, first=1, prefix=2, whole=False), tokens)
    assert (found.start, found.skip, found.in_context) == (0, 1, True)


def test_documents_of_one_name_are_told_apart_by_their_tokens(tmp_path):
    other = TOKENS[::-1].copy()
    store = make_store(tmp_path / "store", [record_of(TEXT, TOKENS), record_of(TEXT, other, number=50)])
    assert find(store, TOKENS) == [-p for p in range(10)]
    assert find(store, other) == [-50 - p for p in range(10)]


def test_of_duplicates_the_first_is_read(tmp_path):
    twice = [record_of(TEXT, TOKENS)], [record_of(TEXT, TOKENS, number=50)]
    store = make_store(tmp_path / "store", *twice)
    assert len(store) == 2
    assert find(store, TOKENS) == [-p for p in range(10)]


def test_shards_that_are_written_later_are_found(whole):
    writer = StoreWriter(whole, write_every_s=0)
    record = record_of("new", ids(1, 2), number=30)
    assert find(whole, record.tokens, text="new") is None
    writer.add(record.piece, record.tokens, record.targets)
    assert find(whole, record.tokens, text="new") is None, "it is not written yet"
    writer.flush()
    for store in (whole, Store(whole.folder)):
        assert find(store, record.tokens, text="new") == [-30, -31]
        assert find(store, TOKENS) == [-p for p in range(10)]
        assert len(store) == 2


def test_many_shards_are_searched(tmp_path):
    shards = [[record_of(f"{i}.{j}", ids(i, j, 5), number=10 * i + j) for j in range(3)] for i in range(20)]
    store = make_store(tmp_path / "store", *shards)
    assert len(store.shards) == 20
    for i in range(20):
        for j in range(3):
            assert find(store, ids(i, j, 5), text=f"{i}.{j}")[0] == -10 * i - j
    assert [piece.length for piece in store.pieces()] == [3] * 60


def test_an_empty_store_and_one_without_its_folder_find_nothing(tmp_path):
    store = make_store(tmp_path / "store")
    assert len(store) == 0
    assert find(store, TOKENS) is None
    (store.folder / SHARDS).rmdir()
    assert find(Store(store.folder), TOKENS) is None


def test_a_shard_that_is_being_written_is_not_read(whole):
    (whole.folder / SHARDS / ".host-1.half.safetensors").write_bytes(b"half")
    assert len(Store(whole.folder)) == 1


@pytest.mark.parametrize("changed", [FILE, SHARDS, "shard"])
def test_a_store_that_others_can_write_is_refused(whole, changed):
    path = whole.shards[0].path if changed == "shard" else whole.folder / changed
    path.chmod(path.stat().st_mode | 0o020)
    with pytest.raises(
        StoreError, match=r"only this user and root may own or change a store.*can be written by others"
    ):
        Store(whole.folder)


def test_a_link_in_place_of_a_shard_is_refused(whole, tmp_path):
    path = whole.shards[0].path
    path.rename(tmp_path / path.name)
    path.symlink_to(tmp_path / path.name)
    with pytest.raises(StoreError, match="is a link"):
        Store(whole.folder)


def test_damage_is_reported_when_the_record_is_read(whole):
    path = whole.shards[0].path
    content = bytearray(path.read_bytes())
    content[content.index(TOKENS.tobytes())] ^= 1
    path.unlink()
    path.write_bytes(content)
    damaged = Store(whole.folder)
    assert find(damaged, TOKENS, text="another") is None
    with pytest.raises(StoreError, match="tokens of record 0 does not match its checksum"):
        find(damaged, TOKENS)


def test_a_piece_without_tokens_needs_no_targets(whole):
    nothing = TOKENS[:0]
    assert whole.has(piece_of("another document", nothing), nothing)
    assert whole.has(piece_of(TEXT, TOKENS), TOKENS)
    assert not whole.has(piece_of("another document", TOKENS), TOKENS)


def test_shards_of_other_processes_are_taken_in_on_request(whole):
    other = Store(whole.folder)
    record = record_of("new", ids(1, 2), number=30)
    writer = StoreWriter(other, write_every_s=0)
    writer.add(record.piece, record.tokens, record.targets)
    writer.flush()
    assert not whole.has(record.piece, record.tokens)
    for _ in range(2):
        whole.refresh()
        assert find(whole, record.tokens, text="new") == [-30, -31]
        assert len(whole) == 2


def test_more_shards_than_the_usual_limit_of_open_files_are_read(tmp_path):
    """A capture over night writes more than a thousand shards, and a process may often open 1024 files."""
    shards = [[record_of(f"{i}", ids(i, 5), number=i)] for i in range(60)]
    folder = make_store(tmp_path / "store", *shards).folder
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(folder, os.O_RDONLY)  # the smallest descriptor that is free
    os.close(free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 20, hard))
        store = Store(folder)
        assert find(store, ids(59, 5), text="59") == [-59, -60]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
