"""What `distill-rl store` prints, finds, copies and exports."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from distill_rl.errors import StoreError
from distill_rl.store import maintain
from distill_rl.store.store import FILE, SHARDS, TEACHER, Store, describe_teacher
from tests.helpers.kill_at_call import Killer
from tests.helpers.stores import ENTRIES, ids, labels, make_store, piece_of, record_of

BFLOAT16_ERROR = 2.0**-7
"""bfloat16 has eight bits of precision; the lowest are cut off here, not rounded."""


def records() -> list:
    return [
        record_of("one", range(6)),
        record_of("two", range(4), number=50, whole=False),
        record_of("two", ids(9, 4, 5), number=70, first=4, prefix=1),
    ]


@pytest.fixture
def store(tmp_path) -> Store:
    """Three pieces of two documents in two shards, with a description of the teacher."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    folder = tmp_path / "store"
    return make_store(folder, records()[:2], records()[2:], files=describe_teacher(folder, [model]), revision="v2")


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.unlink()  # it may be mapped
    path.write_bytes(content)


# ------------------------------------------------------------------ info


def test_info_describes_teacher_contents_and_size(store):
    lines = list(maintain.info(store.folder))
    total = sum(shard.num_bytes for shard in store.shards)
    assert lines[0] == "teacher    org/teacher at v2, weights aaaaaaaaaaaa, tokenizer bbbbbbbbbbbb"
    assert lines[1] == f"targets    top {ENTRIES} of 320 ids at temperature 1, fp32, format exact"
    assert lines[2] == "documents  2 in 3 pieces, 1 of them whole documents"
    assert lines[3] == "tokens     13 in 2 files of 0.0 MiB"
    assert lines[4].startswith(f"size       {total / 13:.1f} bytes per token (tokens 4.0, ids 12.0, logprobs 12.0, ")


def test_info_shows_how_much_of_the_probability_is_retained(store):
    lines = list(maintain.info(store.folder))
    retained = np.concatenate([-np.expm1(shard.targets(i)["rest_logprob"].values.astype(float))
                               for shard in store.shards for i in range(len(shard))])  # fmt: skip
    (summary,) = [line for line in lines if line.startswith("retained")]
    assert f"{retained.mean():.4f} of the probability on average, median {np.median(retained):.4f}" in summary
    assert "a sample of 13 tokens" in summary
    bars = [line for line in lines if " to " in line and "%" in line]
    shares = [float(line.split()[3]) for line in bars]
    assert len(bars) == 8
    assert sum(shares) == pytest.approx(100, abs=0.5)
    below = 100 * np.mean(retained < 0.5)
    assert shares[0] == pytest.approx(below, abs=0.06)
    assert bars[0].count("#") == round(40 * below / 100)


def test_info_counts_pieces_that_are_there_twice(tmp_path):
    store = make_store(tmp_path / "store", records(), records()[:1])
    assert "twice      1 pieces; `distill-rl store merge` leaves them out" in maintain.info(store.folder)


def test_info_of_an_empty_store_has_no_sizes(tmp_path):
    store = make_store(tmp_path / "store")
    assert list(maintain.info(store.folder))[-1] == "tokens     0 in 0 files of 0.0 MiB"


# ------------------------------------------------------------------ verify


def test_a_sound_store_is_verified(store):
    summary, problems = maintain.verify(store.folder)
    assert problems == []
    assert summary == "verified   2 files, 3 pieces, 13 tokens: every checksum matches"


def test_every_kind_of_damage_is_found_at_once(store):
    first, second = (shard.path for shard in store.shards)
    content = first.read_bytes()
    of_ids = content.index(store.shards[0].targets(1)["ids"].values.tobytes())
    of_tokens = content.index(store.shards[0].tokens(0).tobytes())
    flip(first, of_ids)
    flip(first, of_tokens)
    second.write_bytes(second.read_bytes()[:-1])
    (store.folder / TEACHER / "config.json").write_text("changed")
    (store.folder / SHARDS / "more.safetensors").write_bytes(b"something else")
    _, problems = maintain.verify(store.folder)
    assert len(problems) == 5, problems
    for words in (
        (f"{first}, bytes {of_ids:,} to {of_ids + 4 * ENTRIES * 4:,}", "ids of record 1"),
        (f"{first}, bytes {of_tokens:,} to {of_tokens + 24:,}", "tokens of record 0"),
        (f"{second}, bytes", "cut off", "copy the store again, or delete this file"),
        (f"{store.folder}/teacher/config.json, byte 0", "sha256", "copy it again"),
        ("more.safetensors, bytes 0 to 8", "not a safetensors file"),
    ):
        assert len([line for line in problems if all(word in line for word in words)]) == 1, (words, problems)


def test_a_damaged_manifest_stops_verification(store):
    flip(store.folder / FILE, 20)
    with pytest.raises(StoreError, match=FILE):
        maintain.verify(store.folder)


# ------------------------------------------------------------------ merge


def test_merge_copies_every_piece_once_with_its_targets(tmp_path):
    one = make_store(tmp_path / "one", records()[:2])
    two = make_store(tmp_path / "two", records()[1:], [record_of("three", range(3), number=90)])
    out = tmp_path / "out"
    line = maintain.merge([one.folder, two.folder], out)
    assert line == f"merged     4 pieces into {out}; 1 were there already"
    merged = Store(out)
    for record in (*records(), record_of("three", range(3), number=90)):
        found = merged.find(record.piece, record.tokens)
        assert labels(merged, found) == record.targets["label_logprob"].values.tolist()
        assert not found.in_context
    assert maintain.verify(out)[1] == []
    assert maintain.merge([one.folder, two.folder], out).startswith("merged     0 pieces"), "it has all of them"


@pytest.mark.parametrize("format", ["exact", "compact"])
def test_a_merged_piece_is_stored_as_in_its_source(tmp_path, format):
    source = make_store(tmp_path / "source", records(), format=format)
    maintain.merge([source.folder], tmp_path / "out")
    (before,), (after,) = source.shards, Store(tmp_path / "out").shards
    for i in range(len(records())):
        theirs, ours = before.targets(i), after.targets(i)
        assert theirs.keys() == ours.keys()
        for name, column in theirs.items():
            assert (ours[name].dtype, ours[name].values.tobytes()) == (column.dtype, column.values.tobytes())


def test_merge_keeps_the_longer_piece_and_drops_its_beginning(tmp_path):
    store = make_store(tmp_path / "store", [record_of("one", range(6))], [record_of("one", range(3), whole=False)])
    assert maintain.merge([store.folder], tmp_path / "out").startswith("merged     1 pieces")
    tokens = ids(*range(6))
    assert labels(Store(tmp_path / "out"), Store(tmp_path / "out").find(piece_of("one", tokens), tokens)) is not None


def test_merge_keeps_what_was_computed_without_context(tmp_path):
    """A later piece is not dropped because a record has it with the text before it: a cache needs the piece itself."""
    later = record_of("one", range(3, 6), number=50, first=3)
    store = make_store(tmp_path / "store", [record_of("one", range(6)), later])
    assert maintain.merge([store.folder], tmp_path / "out").startswith("merged     2 pieces")
    merged = Store(tmp_path / "out")
    assert labels(merged, merged.find(later.piece, later.tokens)) == [-50, -51, -52]


def test_merge_keeps_documents_of_one_name_with_other_tokens(tmp_path):
    store = make_store(tmp_path / "store", [record_of("one", ids(1, 2)), record_of("one", ids(1, 3), number=50)])
    assert maintain.merge([store.folder], tmp_path / "out").startswith("merged     2 pieces")


def test_merge_copies_the_description_of_the_teacher(store, tmp_path):
    out = tmp_path / "out"
    maintain.merge([store.folder], out)
    assert (out / TEACHER / "config.json").read_text() == "{}"
    assert maintain.verify(out)[1] == []
    assert "teacher    org/teacher at v2" in next(maintain.info(out))


@pytest.mark.parametrize("into", [False, True], ids=["of two stores", "into a store"])
def test_merge_refuses_other_targets(tmp_path, into):
    one = make_store(tmp_path / "one", records())
    other = make_store(tmp_path / "other", temperature=2.0, entries=9)
    sources, out = ([one.folder], other.folder) if into else ([one.folder, other.folder], tmp_path / "out")
    with pytest.raises(
        StoreError, match=r"one store holds the targets of one teacher.*entries per token .*temperature "
    ):
        maintain.merge(sources, out)
    assert into or not out.exists()
    assert len(Store(other.folder)) == 0


def test_merge_reports_a_damaged_source_and_a_target_that_is_a_file(store, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file: must be writable"):
        maintain.merge([store.folder], tmp_path / "file")
    path = store.shards[0].path
    flip(path, path.read_bytes().index(store.shards[0].targets(0)["ids"].values.tobytes()))
    with pytest.raises(StoreError, match="ids of record 0"):
        maintain.merge([store.folder], tmp_path / "out")


# ------------------------------------------------------------------ export


@pytest.mark.parametrize("group", [1, 256])
@pytest.mark.parametrize(("wire_dtype", "dtype"), [("fp32", "F32"), ("fp16", "F16"), ("bf16", "BF16")])
def test_parquet_files_have_the_contents_of_the_store(tmp_path, monkeypatch, wire_dtype, dtype, group):
    monkeypatch.setattr(maintain, "_ROW_GROUP", group)
    shards = [[record_of("empty", [], dtype=dtype), record_of("one", range(6), dtype=dtype)],
              [record_of("two", ids(9, 4, 5), number=70, dtype=dtype, first=4, prefix=1, whole=False)]]  # fmt: skip
    store = make_store(tmp_path / "store", *shards, wire_dtype=wire_dtype)
    out = tmp_path / "out" / "parquet"
    line = maintain.export(store.folder, out)
    assert line == f"exported   3 pieces, 9 tokens to 2 Parquet files in {out}"
    assert sorted(path.name for path in out.iterdir()) == ["00000.parquet", "00001.parquet"]
    for path, written in zip(sorted(out.iterdir()), shards):
        rows = parquet.read_table(path).to_pylist()
        assert len(rows) == len(written)
        for row, record in zip(rows, written):
            piece = record.piece
            assert (row["document"], row["first"], row["prefix"], row["whole"]) == (
                piece.name.hex(), piece.first, piece.prefix, piece.whole,
            )  # fmt: skip
            assert row["tokens"] == record.tokens.tolist()
            for name in ("ids", "rest_logprob", "label_logprob"):
                assert row[name] == record.targets[name].values.tolist()
            exact = record_of("", record.tokens, number=0).targets["logprobs"].values
            error = {"F32": 0, "F16": 2.0**-10, "BF16": BFLOAT16_ERROR}[dtype]
            for found, wanted in zip(row["logprobs"], exact.tolist()):
                assert all(math.isclose(x, y, rel_tol=error) for x, y in zip(found, wanted, strict=True))


PROGRAM = """\
import sys
from pathlib import Path
from distill_rl.store import maintain
store, out = map(Path, sys.argv[2:])
maintain.export(store, out) if sys.argv[1] == "export" else maintain.merge([store], out)
"""


def test_an_export_that_is_killed_at_any_call_is_there_whole_or_not_at_all(store, tmp_path):
    killer, found = Killer(tmp_path), set()
    for place, killed in killer.every_kill(lambda place: ["-c", PROGRAM, "export", store.folder, place / "out"]):
        found.add((place / "out").exists())
        if not (place / "out").exists():
            maintain.export(store.folder, place / "out")
        rows = [parquet.read_metadata(path).num_rows for path in sorted((place / "out").iterdir())]
        assert rows == [2, 1], killed.calls[-1]
    assert found == {False, True}


def test_a_merge_that_is_killed_at_any_call_is_completed_by_the_next(store, tmp_path):
    for place, killed in Killer(tmp_path).every_kill(
        lambda place: ["-c", PROGRAM, "merge", store.folder, place / "out"]
    ):
        out = place / "out"
        if (out / FILE).exists():
            assert maintain.verify(out)[1] == [], killed.calls[-1]
        maintain.merge([store.folder], out)
        assert maintain.verify(out)[1] == []
        merged = Store(out)
        assert all(merged.find(record.piece, record.tokens) for record in records())
        assert len(merged) == 3
        assert not list(out.rglob(".*"))


def test_export_needs_a_new_folder(store, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(StoreError, match="out: must be a new folder; got it exists; choose another one with --out"):
        maintain.export(store.folder, tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="must be writable"):
        maintain.export(store.folder, tmp_path / "file" / "out")
