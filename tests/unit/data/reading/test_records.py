"""Files that are read from the start: text, CSV and compressed files, small and converted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distill_rl.config.schema import DataConfig
from distill_rl.data.reading import files
from distill_rl.data.reading.cache import Cache
from distill_rl.data.reading.sources import open_source
from distill_rl.errors import DataError

TEXTS = [f'{i}: ä line, "quoted"\nand more' for i in range(300)]
JSONL = "".join(json.dumps({"text": text}) + "\n\n" for text in TEXTS).encode()


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def texts(path: Path, **settings: object) -> list[str]:
    source = open_source(DataConfig(path=str(path), **settings))  # type: ignore[arg-type]
    return [source[i]["text"] for i in range(len(source))]


COMPRESSED = {
    "c.jsonl.gz": gzip.compress(JSONL),
    "parts.jsonl.gz": gzip.compress(JSONL[:9000]) + gzip.compress(JSONL[9000:]),
    "c.jsonl.zst": zstd(JSONL),
    "c.json.gz": gzip.compress(json.dumps([{"text": text} for text in TEXTS]).encode()),
}


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_files_are_read(tmp_path, monkeypatch, cache, name, small):
    if not small:
        monkeypatch.setattr(files, "SMALL_BYTES", 0)
        monkeypatch.setattr(files, "_GROUP_ROWS", 64)
    (tmp_path / name).write_bytes(COMPRESSED[name])
    assert texts(tmp_path / name) == TEXTS
    kept = list(cache.rglob("*.parquet"))
    assert len(kept) == (0 if small else 1)
    assert texts(tmp_path / name) == TEXTS
    assert list(cache.rglob("*.parquet")) == kept


def test_conversion_is_announced_and_check_reads_the_first_rows(tmp_path, monkeypatch, cache):
    monkeypatch.setattr(files, "SMALL_BYTES", 0)
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(COMPRESSED["c.jsonl.gz"])
    lines: list[str] = []
    head = open_source(DataConfig(path=str(path)), cache=Cache(write=False, say=lines.append))
    assert (head.exact, len(head), lines) == (False, 128, [])
    assert not cache.exists()
    whole = open_source(DataConfig(path=str(path)), cache=Cache(say=lines.append))
    assert (whole.exact, len(whole)) == (True, 300)
    assert str(path) in lines[0]
    assert str(cache / "distill_rl") in lines[0]
    assert open_source(DataConfig(path=str(path)), cache=Cache(write=False)).exact  # converted by now


def test_a_refused_conversion_leaves_no_file(tmp_path, monkeypatch, cache):
    monkeypatch.setattr(files, "SMALL_BYTES", 0)
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(gzip.compress(JSONL + b'{"text": 1}\n'))
    with pytest.raises(DataError, match=r"row 300 \(line 601\), column 'text': text; got int"):
        texts(path)
    assert not list(cache.rglob("*.*"))


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SMALL_BYTES", 0)
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "file"))
    (tmp_path / "c.jsonl.gz").write_bytes(COMPRESSED["c.jsonl.gz"])
    with pytest.raises(DataError, match=r"file/distill_rl: is writable .* set HF_DATASETS_CACHE"):
        texts(tmp_path / "c.jsonl.gz")
    (tmp_path / "c.jsonl").write_bytes(JSONL)
    lines: list[str] = []
    source = open_source(DataConfig(path=str(tmp_path / "c.jsonl")), cache=Cache(say=lines.append))
    assert [source[i]["text"] for i in range(len(source))] == TEXTS
    (line,) = lines
    assert "made again at every start" in line


@pytest.mark.parametrize("name", ["c.jsonl.gz", "c.jsonl.zst"])
def test_truncated_compressed_files_are_named(tmp_path, name):
    (tmp_path / name).write_bytes(COMPRESSED[name][: len(COMPRESSED[name]) // 2])
    with pytest.raises(DataError, match=r"readable, complete|complete, valid JSON") as caught:
        texts(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("small", [True, False])
def test_text_has_a_row_per_line_or_per_file(tmp_path, monkeypatch, small):
    if not small:
        monkeypatch.setattr(files, "SMALL_BYTES", 0)
    (tmp_path / "a.txt").write_bytes(b"one\r\n \ntwo\n\nthree")
    (tmp_path / "b.txt").write_bytes(b"four\n")
    assert texts(tmp_path) == ["one", "two", "three", "four"]
    assert texts(tmp_path, sample_by="document") == ["one\r\n \ntwo\n\nthree", "four"]
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"b\.txt: row 0.*UTF-8"):
        texts(tmp_path)


@pytest.mark.parametrize("small", [True, False])
def test_csv_has_columns_and_quoted_line_breaks(tmp_path, monkeypatch, small):
    if not small:
        monkeypatch.setattr(files, "SMALL_BYTES", 0)
    long = "x" * 200_000
    path = tmp_path / "c.csv"
    path.write_text(f'\ufeffid,text\n1,"a ""b"",\nc"\n\n2,{long}\n', encoding="utf-8")
    assert texts(path) == ['a "b",\nc', long]
    path.write_text("id,text\n1,a\n2,b,c\n")
    with pytest.raises(DataError, match=r"row 1 \(to line 3\): has 2 cells, as the header has; got 3"):
        texts(path)


def test_folders_are_read_by_split_and_without_notes(tmp_path):
    for name, text in (("train-0", "a"), ("train-1", "b"), ("validation-0", "c"), ("dev-1", "d")):
        (tmp_path / "data" / f"{name}.jsonl").parent.mkdir(exist_ok=True)
        (tmp_path / "data" / f"{name}.jsonl").write_text(json.dumps({"text": text}))
    (tmp_path / "README.txt").write_text("no data")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "train.jsonl").write_text('{"text": "hidden"}')
    assert texts(tmp_path) == ["a", "b"]
    assert texts(tmp_path, split="validation") == ["d", "c"]
    with pytest.raises(DataError, match=r"has the split 'test'; got the splits \['train', 'validation'\]"):
        texts(tmp_path, split="test")


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.gz", "c.json", "c.csv", "c.parquet"])
def test_bad_rows_keep_their_places(tmp_path, monkeypatch, name, small):
    """With `bad_rows: skip` the data are opened, and only the bad rows raise when they are read."""
    if not small:
        monkeypatch.setattr(files, "SMALL_BYTES", 0)
    rows = [b'{"text": "a"}', b'{"text": null}', b'{"text": "b"']
    if name == "c.json":
        content, bad = b'[{"text": "a"}, {"text": null}, 3, {"text": "d"}]', {1, 2}
    elif name == "c.csv":
        content, bad = b"text,n\na,1\nb\nc,1,1\nd,1\n", {1, 2}
    elif name == "c.parquet":
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"text": ["a", None, "b", "d"]}), tmp_path / name)
        content, bad = (tmp_path / name).read_bytes(), {1}
    else:
        content, bad = b"\n".join([*rows, b'{"text": "d"}']), {1, 2}
        content = gzip.compress(content) if name.endswith(".gz") else content
    (tmp_path / name).write_bytes(content)
    source = open_source(DataConfig(path=str(tmp_path / name), bad_rows="skip"))
    for i in range(4):
        if i in bad:
            with pytest.raises(DataError, match=r"row|text"):
                source[i]
        else:
            assert source[i]["row"] == i
    assert source[3]["text"] == "d"
    with pytest.raises(DataError):
        texts(tmp_path / name)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.gz", "c.json"])
def test_a_text_of_another_type_is_a_bad_row_in_every_container(tmp_path, monkeypatch, name, small):
    if not small:
        monkeypatch.setattr(files, "SMALL_BYTES", 0)
    rows = [{"text": "a"}, {"text": 5}, {"text": ["x"]}, {"text": {"k": 1}}]
    content = json.dumps(rows) if name == "c.json" else "\n".join(map(json.dumps, rows))
    path = tmp_path / name
    path.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    source = open_source(DataConfig(path=str(path), bad_rows="skip"))
    assert source[0]["text"] == "a"
    for i in (1, 2, 3):
        with pytest.raises(DataError, match="text"):
            source[i]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("c.jsonl", b'{bad\n{"text": "b"}\n'),
        ("c.jsonl", b'{"x": 1}\n{"text": "b"}\n'),
        ("c.csv", b"text,n\na,1,1\nb,1\n"),
    ],
)
def test_a_bad_first_row_is_skipped_like_others(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    source = open_source(DataConfig(path=str(tmp_path / name), bad_rows="skip"))
    assert source[1]["text"] == "b"
    with pytest.raises(DataError):
        source[0]
    with pytest.raises(DataError):
        texts(tmp_path / name)


@pytest.mark.parametrize("empty", [b"", b"\n\n"])
def test_an_empty_shard_is_skipped_among_others(tmp_path, empty):
    for name, content in {"a": empty, "b": b'{"text": "b"}\n', "c": empty}.items():
        (tmp_path / f"{name}.jsonl").write_bytes(content)
    assert texts(tmp_path, bad_rows="skip") == ["b"]
    with pytest.raises(DataError, match="at least one row; got an empty file"):
        texts(tmp_path)
    with pytest.raises(DataError, match="at least one row; got an empty file"):
        texts(tmp_path / "a.jsonl", bad_rows="skip")


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b'text\n"open\nmore\nlast\n', "is valid CSV; got unexpected end of data"),
        (b"text,text\na,b\n", "names every column once; got 'text' twice"),
    ],
)
def test_csv_that_would_be_read_wrongly_is_refused(tmp_path, content, rule):
    (tmp_path / "c.csv").write_bytes(content)
    with pytest.raises(DataError, match=rule):
        texts(tmp_path / "c.csv")


@pytest.mark.parametrize("name", ["c.ndjson", "C.JSONL", "c.ndjson.GZ", "c.Parquet"])
def test_suffixes_of_json_lines_and_in_upper_case(tmp_path, name):
    path = tmp_path / "data" / name
    path.parent.mkdir()
    if name == "c.Parquet":
        pq.write_table(pa.table({"text": ["a", "b"]}), path)
    else:
        lines = b'{"text": "a"}\n{"text": "b"}\n'
        path.write_bytes(gzip.compress(lines) if name.endswith(".GZ") else lines)
    assert texts(path) == texts(path.parent) == texts(tmp_path / "data" / "*") == ["a", "b"]


def test_blank_lines_before_a_header_and_a_list(tmp_path):
    (tmp_path / "c.csv").write_bytes(b"\n\ntext\na\n")
    assert texts(tmp_path / "c.csv") == ["a"]
    (tmp_path / "c.json").write_bytes(b" " * 2000 + b'[{"text": "a"},\n {"text": "b"}]')
    assert texts(tmp_path / "c.json") == ["a", "b"]


@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.gz"])
def test_deep_nesting_is_named(tmp_path, name):
    depth = 100_000  # how deep JSON may be depends on the version of Python
    row = b'{"messages": [{"role": "user", "content": "a", "x": ' + b"[" * depth + b"]" * depth + b"}]}\n"
    (tmp_path / name).write_bytes(gzip.compress(row) if name.endswith(".gz") else row)
    with pytest.raises(DataError, match="row 0"):
        open_source(DataConfig(path=str(tmp_path / name)))[0]


def test_folders_of_arrow_folders_are_read_once(tmp_path):
    import datasets

    for name in ("a", "b"):
        datasets.Dataset.from_dict({"text": [name] * 5}).save_to_disk(str(tmp_path / "sets" / name))
        (tmp_path / "sets" / name / "cache-1.arrow").write_bytes(
            next((tmp_path / "sets" / name).glob("data-*.arrow")).read_bytes()
        )
    assert texts(tmp_path / "sets") == ["a"] * 5 + ["b"] * 5


def test_files_left_out_for_their_split_are_said_and_links_are_followed(tmp_path):
    for name in ("cooking", "train-stations"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "a.jsonl").write_text(json.dumps({"text": name}))
    lines: list[str] = []
    open_source(DataConfig(path=str(tmp_path / "data")), cache=Cache(say=lines.append))
    assert lines == [f"reading    1 of the 2 files in {tmp_path / 'data'}: those of its split train"]
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "in").symlink_to(tmp_path / "data" / "cooking")
    (linked / "back").symlink_to(linked)
    assert texts(linked) == ["cooking"]


def test_rows_of_text_enter_the_fingerprint(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    by_line, by_document = (
        open_source(DataConfig(path=str(tmp_path), sample_by=value)).fingerprint for value in ("line", "document")
    )
    assert by_line != by_document


def test_a_key_that_was_set_is_read_beside_chats(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"body": "a", "messages": [{"role": "user", "content": "b"}]}\n')
    assert texts(tmp_path / "c.jsonl", text_key="body") == ["a"]
    assert open_source(DataConfig(path=str(tmp_path / "c.jsonl"))).kind == "messages"


def test_many_writers_of_one_copy_do_not_disturb_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SMALL_BYTES", 0)
    (tmp_path / "c.jsonl.gz").write_bytes(COMPRESSED["c.jsonl.gz"])
    folder = tmp_path / "links"
    folder.mkdir()
    for i in range(6):
        (folder / f"{i}.jsonl.gz").symlink_to(tmp_path / "c.jsonl.gz")
    assert texts(folder) == TEXTS * 6


@pytest.mark.parametrize("damage", [b"", b"PAR1 cut"])
def test_a_damaged_copy_is_made_again(tmp_path, monkeypatch, cache, damage):
    monkeypatch.setattr(files, "SMALL_BYTES", 0)
    (tmp_path / "c.jsonl.gz").write_bytes(COMPRESSED["c.jsonl.gz"])
    assert texts(tmp_path / "c.jsonl.gz") == TEXTS
    (kept,) = cache.rglob("*.parquet")
    kept.write_bytes(damage)
    assert texts(tmp_path / "c.jsonl.gz") == TEXTS


def test_the_columns_are_those_of_the_first_row(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": "b", "more": 1}\n')
    assert files.column_names(tmp_path / "rows.jsonl") == ["text"]
    assert set(files.column_names(tmp_path / "rows.jsonl", strict=False)) == {"text", "more"}
