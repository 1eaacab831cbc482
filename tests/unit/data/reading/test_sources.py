"""Sources return the rows that were written, in every form; errors name file, row and column."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distill_rl.config.schema import DataConfig, ValidationConfig
from distill_rl.data.reading import files, sources
from distill_rl.data.reading.cache import Cache
from distill_rl.data.reading.sources import HubError, is_hub_name, open_source, split_validation
from distill_rl.errors import DataError
from tests.helpers.corpus import FORMS, corpus_rows, write_corpus


def config(path: object, **settings: object) -> DataConfig:
    return DataConfig(path=str(path), **settings)  # type: ignore[arg-type]


def sha256_of(*contents: bytes) -> str:
    """The hash of whole files: of each its size in eight bytes, then its content."""
    return hashlib.sha256(b"".join(len(each).to_bytes(8, "little") + each for each in contents)).hexdigest()


def problem(path: object, **settings: object) -> str:
    """The error message of opening the source and reading every row, which must fail."""

    def read_all() -> None:
        source = open_source(config(path, **settings))
        for row in range(len(source)):
            source[row]

    with pytest.raises(DataError) as caught:
        read_all()
    text = str(caught.value)
    assert "\n" not in text
    return text


def numbered(rows: list[dict]) -> list[dict]:
    return [{"row": index, **row} for index, row in enumerate(rows)]


def write_lines(path: Path, lines: list[bytes]) -> Path:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def write_column(path: Path, values: list, name: str = "text", kind: pa.DataType | None = None) -> Path:
    return write_table(path, pa.table({name: pa.array(values, kind)}))


class TestForms:
    @pytest.mark.parametrize("messages", [False, True])
    @pytest.mark.parametrize("form", FORMS)
    def test_every_form_returns_the_written_rows(self, tmp_path, form, messages):
        name = "corpus" if form == "folder" else f"corpus.{form}"
        path = write_corpus(tmp_path / name, rows=20, seed=3, messages=messages, form=form)
        source = open_source(config(path))
        assert source.kind == ("messages" if messages else "text")
        assert [source[row] for row in range(len(source))] == numbered(corpus_rows(20, 3, messages))

    def test_json_list_blank_lines_and_random_access_arrow(self, tmp_path):
        rows = corpus_rows(5)
        as_list = tmp_path / "list.json"
        as_list.write_text("\ufeff\n" + json.dumps(rows, indent=1), encoding="utf-8")
        lines = tmp_path / "lines.jsonl"
        lines.write_text("\n\n".join(json.dumps(row) for row in rows).replace("\n", "\r\n"), encoding="utf-8")
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(tmp_path / "file.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        for path in (as_list, lines, tmp_path / "file.arrow"):
            source = open_source(config(path))
            assert [source[row] for row in range(len(source))] == numbered(rows)

    def test_glob_joins_files_of_several_forms_in_sorted_order(self, tmp_path):
        write_corpus(tmp_path / "b.parquet", rows=3, seed=1, form="parquet")
        write_corpus(tmp_path / "a.jsonl", rows=2, seed=0)
        write_corpus(tmp_path / "sub" / "c.arrow", rows=4, seed=2, form="arrow")
        (tmp_path / "notes.txt").write_text("not data")
        source = open_source(config(tmp_path / "**" / "*"))
        expected = corpus_rows(2, 0) + corpus_rows(3, 1) + corpus_rows(4, 2)
        assert [source[row] for row in range(len(source))] == numbered(expected)

    def test_glob_of_arrow_folders(self, tmp_path):
        for seed in range(2):
            write_corpus(tmp_path / f"shard-{seed}", rows=3, seed=seed, form="folder")
        expected = numbered(corpus_rows(3, 0) + corpus_rows(3, 1))
        # The last two patterns also match the Arrow and JSON files inside the folders, which must not be read as well.
        for pattern in ("shard-*", "shard-*/*", "**/*"):
            source = open_source(config(tmp_path / pattern))
            assert [source[row] for row in range(len(source))] == expected

    def test_dataset_dict_folder_reads_the_configured_split(self, tmp_path):
        splits = {
            "train": datasets.Dataset.from_list(corpus_rows(3)),
            "test": datasets.Dataset.from_list(corpus_rows(5, 1)),
        }
        datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "both"))
        assert len(open_source(config(tmp_path / "both"))) == 3
        assert open_source(config(tmp_path / "both", split="test"))[4]["text"] == corpus_rows(5, 1)[4]["text"]
        assert "['test', 'train']" in problem(tmp_path / "both", split="dev")

    def test_format_and_keys_choose_the_column(self, tmp_path):
        path = tmp_path / "two.jsonl"
        chat = [{"role": "user", "content": "hi", "name": "extra keys are kept"}]
        path.write_text(json.dumps({"text": "plain", "chat": chat}))
        assert open_source(config(path))[0] == {"row": 0, "text": "plain"}
        both = open_source(config(path, messages_key="chat"))
        assert both[0] == {"row": 0, "messages": chat}
        assert open_source(config(path, messages_key="chat", format="text"))[0] == {"row": 0, "text": "plain"}

    @pytest.mark.parametrize("form", ["jsonl", "parquet"])
    @pytest.mark.parametrize("messages", [False, True])
    def test_large_files_are_read_in_place(self, tmp_path, monkeypatch, form, messages):
        monkeypatch.setattr(files, "SMALL_BYTES", 0)
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
        path = write_corpus(tmp_path / f"c.{form}", rows=30, messages=messages, form=form)
        for _ in range(2):
            source = open_source(config(path))
            assert [source[row] for row in range(30)] == numbered(corpus_rows(30, 0, messages))
        kept = list((tmp_path / "cache").rglob("*.*"))
        assert sum(file.stat().st_size for file in kept) < 1000  # the index of the lines, or nothing
        assert {file.suffix for file in kept} == ({".npy"} if form == "jsonl" else set())
        write_corpus(path, rows=31, seed=5, messages=messages, form=form)
        assert open_source(config(path))[30][source.kind] == corpus_rows(31, 5, messages)[30][source.kind]

    def test_bad_rows_of_large_files_are_named_when_read(self, tmp_path, monkeypatch):
        monkeypatch.setattr(files, "SMALL_BYTES", 0)
        path = write_lines(tmp_path / "c.jsonl", [b'{"text": "a"}'] * 5000 + [b'{"text": 1}'])
        source = open_source(config(path), cache=Cache(write=False))
        assert source[4999] == {"row": 4999, "text": "a"}
        with pytest.raises(DataError, match="row 5000: text; got int"):
            source[5000]

    def test_nothing_is_written_without_leave(self, tmp_path, monkeypatch):
        monkeypatch.setattr(files, "SMALL_BYTES", 0)
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
        for form in FORMS:
            path = write_corpus(tmp_path / form / ("c" if form == "folder" else f"c.{form}"), rows=9, form=form)
            assert len(open_source(config(path), cache=Cache(write=False))) == 9
        assert not (tmp_path / "cache").exists()

    def test_fingerprint_is_the_same_in_another_process(self, tmp_path):
        path = write_corpus(tmp_path / "c.jsonl", rows=4)
        code = (
            "import sys; from distill_rl.config.schema import DataConfig; from distill_rl.data.reading.sources import open_source;"
            "print(open_source(DataConfig(path=sys.argv[1])).fingerprint)"
        )
        other = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
        assert other.stdout.strip() == open_source(config(path)).fingerprint

    def test_index_outside_the_rows_raises(self, tmp_path):
        source = open_source(config(write_corpus(tmp_path / "c.jsonl", rows=4)))
        for index in (-1, 4):
            with pytest.raises(IndexError):
                source[index]


class TestFingerprint:
    @pytest.mark.parametrize("form", FORMS)
    def test_depends_on_content_and_not_on_the_path(self, tmp_path, form):
        name = "c" if form == "folder" else f"c.{form}"
        first = open_source(config(write_corpus(tmp_path / "x" / name, rows=8, form=form))).fingerprint
        shutil.move(tmp_path / "x", tmp_path / "y")
        assert open_source(config(tmp_path / "y" / name)).fingerprint == first
        changed = open_source(config(write_corpus(tmp_path / "z" / name, rows=8, seed=1, form=form)))
        assert changed.fingerprint != first
        assert len(first) == 64

    def test_depends_on_the_column(self, tmp_path):
        path = tmp_path / "c.jsonl"
        path.write_text(json.dumps({"text": "a", "other": "b"}))
        assert open_source(config(path)).fingerprint != open_source(config(path, text_key="other")).fingerprint

    def test_large_data_are_hashed_by_samples(self, tmp_path, monkeypatch):
        monkeypatch.setattr(files, "HASH_WHOLE_BYTES", 0)
        content = bytearray(64 * (64 << 10) * 3)
        path = tmp_path / "big"
        hashes = set()
        for place in (None, 0, len(content) - 1, (len(content) - (64 << 10)) * 10 // 63 + 5):
            edited = bytearray(content)
            if place is not None:
                edited[place] = 1
            path.write_bytes(edited)
            hashes.add(files.content_hash([path]))
        path.write_bytes(content + b"\0")
        hashes.add(files.content_hash([path]))
        assert len(hashes) == 5

    def test_every_byte_below_the_limit_is_hashed(self, tmp_path):
        content = bytearray(8 << 20)  # larger than the samples of a large file together
        content[100_000] = 1  # between the first two samples
        path = tmp_path / "data"
        path.write_bytes(content)
        assert files.content_hash([path]) == sha256_of(bytes(content))

    def test_small_files_are_hashed_whole_beside_large_ones(self, tmp_path, monkeypatch):
        monkeypatch.setattr(files, "HASH_WHOLE_BYTES", 0)
        contents = (b"small", b"", b"x" * 70_000)
        paths = [tmp_path / str(number) for number in range(3)]
        for path, content in zip(paths, contents):
            path.write_bytes(content)
        assert files.content_hash(paths) == sha256_of(*contents)


class TestValidationSplit:
    def source(self, tmp_path, rows=50):
        return open_source(config(write_corpus(tmp_path / "c.jsonl", rows=rows)))

    @pytest.mark.parametrize(("fraction", "held_out"), [(0.1, 5), (0.001, 1), (0.999, 49), (0.5, 25)])
    def test_parts_are_disjoint_complete_and_never_empty(self, tmp_path, fraction, held_out):
        source = self.source(tmp_path)
        train, validation = split_validation(source, config("", validation=ValidationConfig(fraction=fraction)), 7)
        rows = [[part[i]["row"] for i in range(len(part))] for part in (train, validation)]
        assert len(rows[1]) == held_out
        assert sorted(rows[0] + rows[1]) == list(range(50))
        assert all(train[i] == source[train[i]["row"]] for i in range(len(train)))

    def test_only_the_seed_decides_the_split(self, tmp_path):
        data = config("", validation=ValidationConfig(fraction=0.3))
        source = self.source(tmp_path)

        def held_out(seed):
            part = split_validation(source, data, seed)[1]
            return [part[i]["row"] for i in range(len(part))]

        assert held_out(1) == held_out(1) != held_out(2)

    def test_each_part_has_a_different_fingerprint(self, tmp_path):
        source = self.source(tmp_path)
        data = config("", validation=ValidationConfig(fraction=0.3))
        prints = [source.fingerprint, *(part.fingerprint for part in split_validation(source, data, 1))]
        prints += [part.fingerprint for part in split_validation(source, data, 2)]
        assert len(set(prints)) == 5

    def test_no_fraction_and_no_path_means_no_validation(self, tmp_path):
        source = self.source(tmp_path)
        assert split_validation(source, config(""), 0) == (source, None)

    def test_validation_path_overrides_the_fraction(self, tmp_path):
        source = self.source(tmp_path)
        other = write_corpus(tmp_path / "v.jsonl", rows=3, seed=9)
        data = config(tmp_path / "c.jsonl", validation=ValidationConfig(path=str(other), fraction=0.5))
        train, validation = split_validation(source, data, 0)
        assert train is source
        assert validation[2]["text"] == corpus_rows(3, 9)[2]["text"]

    def test_validation_path_reads_the_validation_split(self, tmp_path):
        splits = {name: datasets.Dataset.from_list(corpus_rows(n)) for name, n in (("train", 4), ("validation", 2))}
        datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "both"))
        data = config(tmp_path / "both", validation=ValidationConfig(path=str(tmp_path / "both")))
        assert [len(part) for part in split_validation(open_source(data), data, 0)] == [4, 2]

    def test_one_row_cannot_be_split(self, tmp_path):
        data = config("", validation=ValidationConfig(fraction=0.5))
        with pytest.raises(DataError, match="at least two rows"):
            split_validation(self.source(tmp_path, rows=1), data, 0)


class TestBadPaths:
    def test_missing_path_suggests_the_nearest_name(self, tmp_path):
        write_corpus(tmp_path / "train.jsonl")
        assert f"did you mean {tmp_path}/train.jsonl?" in problem(tmp_path / "trian.jsonl")

    def test_missing_absolute_folder_is_not_a_hub_name(self, tmp_path):
        assert "data.path: an existing file" in problem(tmp_path / "nowhere" / "corpus")

    def test_glob_without_a_match(self, tmp_path):
        assert "a glob that matches" in problem(tmp_path / "*.parquet")

    def test_unknown_suffix(self, tmp_path):
        (tmp_path / "a.tsv").write_text("text\nx\n")
        assert ".parquet" in problem(tmp_path / "a.tsv")

    def test_folder_without_data(self, tmp_path):
        (tmp_path / "none").mkdir()
        (tmp_path / "none" / "notes.md").write_text("no data")
        assert "it holds no data files" in problem(tmp_path / "none")

    def test_unreachable_hub_name_raises_hub_error(self, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        with pytest.raises(HubError, match="HF_HUB_OFFLINE"):
            open_source(config("nobody-known/no-such-data"))

    def test_dead_hub_connection_fails_at_once(self, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(HubError, match=r"data\.path: .*nobody-known/no-such-data"):
            open_source(config("nobody-known/no-such-data"))

    def test_hub_names_differ_from_missing_files(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "data").mkdir()
        assert is_hub_name("owner/name")
        assert is_hub_name("imdb")
        for path in ("data/name", "data", "./x", "/x/y", "x.jsonl", "owner/x.parquet", "a/b/c", "../x", "x/*"):
            assert not is_hub_name(path)


class TestBadRows:
    @pytest.mark.parametrize("form", FORMS)
    def test_missing_column_lists_columns_and_the_closest(self, tmp_path, form):
        path = write_corpus(tmp_path / ("c" if form == "folder" else f"c.{form}"), rows=3, form=form)
        text = problem(path, text_key="txt")
        assert "column 'txt'" in text
        assert "['text']" in text
        assert "did you mean 'text'?" in text
        assert "set data.text_key" in text
        assert "column 'messages'" in problem(path, format="messages")

    def test_later_file_without_the_column(self, tmp_path):
        write_corpus(tmp_path / "a.jsonl", rows=2)
        write_column(tmp_path / "b.parquet", ["x"], name="body")
        assert f"{tmp_path}/b.parquet: column 'text'" in problem(tmp_path / "*")

    @pytest.mark.parametrize(
        ("value", "found"),
        [(b"7", "int '7'"), (b"null", "null"), (b'["x"]', "list"), (b'"\\ud83d!"', "lone surrogate")],
    )
    def test_json_row_without_text_is_named_with_its_line(self, tmp_path, value, found):
        path = write_lines(tmp_path / "c.jsonl", [b'{"text": "a"}', b"", b'{"text": %s}' % value])
        text = problem(path)
        assert f"{path}: row 1 (line 3), column 'text'" in text
        assert found in text

    def test_json_row_without_the_column(self, tmp_path):
        path = write_lines(tmp_path / "c.jsonl", [b'{"text": "a"}', b'{"txt": "b"}'])
        assert "row 1 (line 2)" in problem(path)

    @pytest.mark.parametrize("suffix", ["parquet", "arrow"])
    def test_null_and_other_types_in_columns(self, tmp_path, suffix):
        path = write_column(tmp_path / f"null.{suffix}", ["a"] * 5000 + [None])
        assert f"{path}, column 'text', row 5000: text; got null" in problem(path).replace(": column", ", column")
        path = write_column(tmp_path / f"int.{suffix}", [1, 2])
        assert "row 0: text; got the type int64" in problem(path)

    @pytest.mark.parametrize("suffix", ["parquet", "arrow"])
    @pytest.mark.parametrize("check_bytes", [0, 1 << 20])
    def test_invalid_utf8_in_columns(self, tmp_path, monkeypatch, suffix, check_bytes):
        """Columns too large to check on opening are checked row by row when read."""
        monkeypatch.setattr(sources, "CHECK_BYTES", check_bytes)
        values = pa.array([b"fine", b"\xc3\xa9", b"ab\xff"]).cast(pa.binary())
        broken = pa.Array.from_buffers(pa.string(), len(values), values.buffers())
        path = write_column(tmp_path / f"c.{suffix}", broken)
        text = problem(path)
        assert "row 2" in text
        assert "byte 0xff" in text

    def test_invalid_utf8_in_json(self, tmp_path):
        path = write_lines(tmp_path / "c.jsonl", [b'{"text": "a"}', b'{"text": "caf\xe9"}'])
        text = problem(path)
        assert "row 1 (line 2)" in text
        assert "byte 0xe9 at byte 13" in text

    @pytest.mark.parametrize("form", FORMS)
    def test_truncated_file_is_named(self, tmp_path, form):
        path = write_corpus(tmp_path / ("c" if form == "folder" else f"c.{form}"), rows=40, form=form)
        file = next(path.glob("*.arrow")) if form == "folder" else path
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        text = problem(path)
        assert str(path) in text
        assert "truncated" in text or "cut" in text

    def test_folder_with_a_missing_file(self, tmp_path):
        path = write_corpus(tmp_path / "c", form="folder")
        next(path.glob("*.arrow")).unlink()
        assert "a complete Arrow folder" in problem(path)

    @pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "arrow"])
    def test_empty_file(self, tmp_path, suffix):
        (tmp_path / f"c.{suffix}").write_bytes(b"")
        assert "at least one row" in problem(tmp_path / f"c.{suffix}")

    @pytest.mark.parametrize("suffix", ["parquet", "arrow"])
    def test_table_without_rows(self, tmp_path, suffix):
        path = write_column(tmp_path / f"c.{suffix}", [], kind=pa.string())
        assert "at least one row" in problem(path)

    def test_json_without_rows(self, tmp_path):
        (tmp_path / "c.json").write_text("[]")
        (tmp_path / "c.jsonl").write_text("\n\n")
        assert "at least one row" in problem(tmp_path / "c.json")
        assert "at least one row" in problem(tmp_path / "c.jsonl")

    def test_json_values_that_are_not_objects(self, tmp_path):
        assert "row 0 (line 1)" in problem(write_lines(tmp_path / "c.jsonl", [b'"just text"']))
        (tmp_path / "c.json").write_text('[{"text": "a"}, 3]')
        assert "row 1" in problem(tmp_path / "c.json")

    @pytest.mark.parametrize("line", [b'{"text": "a"', b'{"text": ' + b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}"])
    def test_invalid_json(self, tmp_path, line):
        assert "row 1 (line 2): is complete, valid JSON" in problem(
            write_lines(tmp_path / "c.jsonl", [b'{"text": "a"}', line])
        )

    def test_errors_survive_pickling(self, tmp_path):
        with pytest.raises(DataError) as caught:
            open_source(config(tmp_path / "none.jsonl"))
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


GOOD = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
BAD_CHATS = [
    ([], "at least one message"),
    (None, "null|NoneType"),
    ([{"role": "user", "content": None}], "content: text; got null"),
    ([*GOOD, {"role": None, "content": "a"}], "role: text; got null"),
]


class TestBadMessages:
    @pytest.mark.parametrize(("chat", "rule"), BAD_CHATS)
    @pytest.mark.parametrize("suffix", ["jsonl", "parquet", "arrow"])
    def test_bad_chat_is_named_by_its_row(self, tmp_path, chat, rule, suffix):
        rows = [{"messages": GOOD}, {"messages": GOOD}, {"messages": chat}]
        path = tmp_path / f"c.{suffix}"
        if suffix == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            write_column(path, [row["messages"] for row in rows], name="messages")
        with pytest.raises(DataError, match=rule) as caught:
            open_source(config(path))
        assert "row 2" in str(caught.value)

    @pytest.mark.parametrize(
        "chat", ["hello", {"role": "user"}, ["hello"], [{"role": "user"}], [{"role": 1, "content": "x"}]]
    )
    @pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
    def test_other_shapes_are_refused(self, tmp_path, chat, suffix):
        path = tmp_path / f"c.{suffix}"
        if suffix == "jsonl":
            path.write_text(json.dumps({"messages": chat}))
        else:
            write_column(path, [chat], name="messages")
        assert "row 0" in problem(path)


def test_numpy_rows_are_accepted(tmp_path):
    source = open_source(config(write_corpus(tmp_path / "c.jsonl", rows=4)))
    assert source[np.int64(2)]["row"] == 2


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL_CHAT = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "1", "tool_call_id": "x"},
]


class TestChats:
    @pytest.mark.parametrize("suffix", ["jsonl", "parquet", "arrow"])
    def test_all_keys_are_kept_and_padding_nulls_dropped(self, tmp_path, suffix):
        other = {"type": "function", "function": {"name": "neg", "arguments": {"b": 2}}}
        second = [{"role": "assistant", "content": "", "tool_calls": [other]}]
        rows = [{"messages": TOOL_CHAT, "tools": [CALL]}, {"messages": second, "tools": None}]
        path = tmp_path / f"c.{suffix}"
        if suffix == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            table = pa.Table.from_pylist(rows)  # fills up messages and arguments with nulls
            if suffix == "parquet":
                pq.write_table(table, path)
            else:
                with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                    writer.write_table(table)
        source = open_source(config(path))
        assert source[0] == {"row": 0, "messages": TOOL_CHAT, "tools": [CALL]}
        assert source[1] == {"row": 1, "messages": second}

    def test_columns_that_later_json_rows_have_and_json_text(self, tmp_path):
        rows = [{"messages": TOOL_CHAT}, {"messages": json.dumps(TOOL_CHAT), "tools": json.dumps([CALL])}]
        path = tmp_path / "c.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = open_source(config(path))
        assert "tools" not in source[0]
        assert source[1] == {"row": 1, "messages": TOOL_CHAT, "tools": [CALL]}

    @pytest.mark.parametrize("settings", [{"format": "sharegpt"}, {}])
    def test_sharegpt(self, tmp_path, settings):
        turns = [("human", "2 + 2?"), ("function_call", '{"name": "add", "arguments": {"a": 2}}'), ("observation", "4")]
        row = {"conversations": [{"from": role, "value": text} for role, text in turns], "system": "Add."}
        source = open_source(config(write_lines(tmp_path / "c.jsonl", [json.dumps(row).encode()]), **settings))
        assert source[0]["messages"] == [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": "2 + 2?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
            },
            {"role": "tool", "content": "4"},
        ]

    @pytest.mark.parametrize("settings", [{"format": "alpaca"}, {}])
    def test_alpaca(self, tmp_path, settings):
        rows = [
            {"instruction": "Add.", "input": "2 2", "output": "4"},
            {"instruction": "Hi", "input": "", "output": "Hello", "system": "Be kind.", "history": [["a", "b"]]},
        ]
        path = write_lines(tmp_path / "c.jsonl", [json.dumps(row).encode() for row in rows])
        source = open_source(config(path, **settings))
        assert [m["content"] for m in source[0]["messages"]] == ["Add.\n\n2 2", "4"]
        assert [(m["role"], m["content"]) for m in source[1]["messages"]] == [
            ("system", "Be kind."), ("user", "a"), ("assistant", "b"), ("user", "Hi"), ("assistant", "Hello"),
        ]  # fmt: skip


@pytest.mark.parametrize("check_bytes", [-1, 1 << 30])
@pytest.mark.parametrize("bad_rows", ["fail", "skip"])
def test_column_of_another_type_is_refused_when_opened(tmp_path, monkeypatch, check_bytes, bad_rows):
    """In an Arrow folder of any size, whether or not its rows are checked then."""
    monkeypatch.setattr(sources, "CHECK_BYTES", check_bytes)
    datasets.Dataset.from_dict({"text": [1, 2, 3]}).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(DataError, match="column 'text'"):
        open_source(config(tmp_path / "set", bad_rows=bad_rows))


def write_table(path: Path, table: pa.Table) -> Path:
    """Writes a table as Parquet or Arrow, by the suffix."""
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("small", [1 << 30, 0])
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
class TestColumns:
    @pytest.fixture(autouse=True)
    def size(self, monkeypatch, small):
        monkeypatch.setattr(files, "SMALL_BYTES", small)
        monkeypatch.setattr(sources, "CHECK_BYTES", small - 1)

    def test_one_that_is_there_twice_is_named(self, tmp_path, suffix):
        names = ["text", "text", "id", "id"]
        path = write_table(tmp_path / f"c.{suffix}", pa.table([pa.array(["a"])] * 4, names=names))
        expected = f"{path}: column 'text': a column that is read is there once; got 2 of that name; rename"
        assert problem(path).startswith(expected)
        once = write_table(tmp_path / f"d.{suffix}", pa.table([pa.array(["a"])] * 3, names=names[1:]))
        assert open_source(config(once))[0] == {"row": 0, "text": "a"}, "columns that are not read do not matter"

    def test_dictionaries_are_read(self, tmp_path, suffix):
        texts = pa.array(["a", "b", "a"]).dictionary_encode()
        source = open_source(config(write_table(tmp_path / f"t.{suffix}", pa.table({"text": texts}))))
        assert [source[i]["text"] for i in range(3)] == ["a", "b", "a"]
        roles = pa.array(["user", "assistant"] * 2).dictionary_encode()
        turns = pa.StructArray.from_arrays([roles, pa.array(list("abcd"))], names=["role", "content"])
        chats = pa.ListArray.from_arrays([0, 2, 4], turns)
        source = open_source(config(write_table(tmp_path / f"m.{suffix}", pa.table({"messages": chats}))))
        assert [message["role"] for message in source[1]["messages"]] == ["user", "assistant"]
        with_null = pa.table({"text": pa.array(["a", None]).dictionary_encode()})
        path = write_table(tmp_path / f"n.{suffix}", with_null)
        assert "row 1: text; got null" in problem(path)

    def test_maps_and_json_keep_their_nulls(self, tmp_path, suffix):
        kind = pa.map_(pa.string(), pa.int64())
        table = pa.table(
            {
                "messages": pa.array([json.dumps(TOOL_CHAT)], pa.json_()),
                "tools": [[json.dumps({"name": "f", "default": None})]],
                "chat_template_kwargs": pa.array([[("a", None), ("b", 1)]], kind),
            }
        )
        document = open_source(config(write_table(tmp_path / f"c.{suffix}", table)))[0]
        assert document["messages"] == TOOL_CHAT
        assert document["tools"] == [{"name": "f", "default": None}]
        assert document["chat_template_kwargs"] == {"a": None, "b": 1}
        broken = write_table(tmp_path / f"d.{suffix}", pa.table({"messages": pa.array(["[{"], pa.json_())}))
        assert "column 'messages': JSON, as the type of the column says; got text '[{'" in problem(broken)

    def test_a_struct_with_a_key_twice_is_named(self, tmp_path, suffix):
        roles = pa.array(["user"])
        turn = pa.StructArray.from_arrays([roles, roles, roles], names=["role", "content", "content"])
        table = pa.table({"messages": pa.ListArray.from_arrays([0, 1], turn)})
        path = write_table(tmp_path / f"c.{suffix}", table)
        assert "column 'messages', key 'content': a struct has every key once; got twice" in problem(path)


def test_json_that_datasets_writes_is_read(tmp_path):
    """It stores arguments of different types as JSON text, and says so."""
    given = [{"a": None}, {"b": [1, "x"]}]
    rows = [
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": arguments}}]}]}
        for arguments in given
    ]
    written = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    written.save_to_disk(str(tmp_path / "set"))
    written.to_parquet(str(tmp_path / "c.parquet"))
    for path in (tmp_path / "set", tmp_path / "c.parquet"):
        source = open_source(config(path))
        assert [source[i]["messages"] for i in range(2)] == [row["messages"] for row in rows]


@pytest.mark.parametrize("small", [True, False])
def test_images_in_a_later_row_are_refused(tmp_path, monkeypatch, small):
    chat = [{"role": "user", "content": "a"}]
    rows = [{"messages": chat}, {"messages": chat, "images": []}, {"messages": chat, "images": ["x"]}]
    path = write_lines(tmp_path / "c.jsonl", [json.dumps(row).encode() for row in rows])
    monkeypatch.setattr(files, "SMALL_BYTES", 1 << 30 if small else 0)
    assert "row 2" in problem(path)
    assert "column 'images'" in problem(path)


def test_prompts_and_completions_are_told_apart(tmp_path):
    chat = [{"role": "user", "content": "a"}]
    path = write_lines(tmp_path / "c.jsonl", [json.dumps({"prompt": chat, "completion": chat}).encode()])
    text = problem(path)
    assert "rename 'prompt' to 'instruction' and 'completion' to 'output', and set data.format=alpaca" in text
    assert "if both are lists of messages, write row['prompt'] + row['completion'] into a column 'messages'" in text
