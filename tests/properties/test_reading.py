"""What a row holds is decided by the file: not by its container, its size, or what is done with bad rows."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill_rl.config.schema import DataConfig
from distill_rl.data.reading import files, sources
from distill_rl.data.reading.sources import open_source

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=6)
numbers = st.integers(-(10**30), 10**30) | st.floats(allow_nan=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(texts, values, max_size=4)


@st.composite
def chats(draw: Callable[..., Any], turns: bool = False) -> dict[str, Any]:
    """A row with arguments, tools and variables of any shape; as messages, or as turns of ShareGPT."""
    arguments = draw(objects)
    row = {"tools": draw(st.lists(st.fixed_dictionaries({"name": texts, "parameters": objects}), max_size=2))}
    if draw(st.booleans()):
        row["chat_template_kwargs"] = {f"x{key}": value for key, value in draw(objects).items()}
    if turns:
        call = {"from": "function_call", "value": json.dumps({"name": "f", "arguments": arguments})}
        return {"conversations": [{"from": "human", "value": draw(texts)}, call], **row}
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "assistant", "content": draw(st.none() | texts), "tool_calls": [call]}
    return {"messages": [{"role": "user", "content": draw(texts)}, answer], **row}


rows_of_chats = st.lists(chats(), min_size=1, max_size=4) | st.lists(chats(turns=True), min_size=1, max_size=4)


def json_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def json_list(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(rows))


def zipped(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()))


def columns(rows: list[dict[str, Any]], kind: pa.DataType) -> pa.Table:
    """A table with a column of JSON text per key."""
    names = dict.fromkeys(name for row in rows for name in row)
    cells = {name: [json.dumps(row[name]) if name in row else None for row in rows] for name in names}
    return pa.table({name: pa.array(column, kind) for name, column in cells.items()})


def parquet_of_text(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(columns(rows, pa.string()), path, row_group_size=2)


def parquet_of_json(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(columns(rows, pa.json_()), path, row_group_size=2)


def arrow_of_text(path: Path, rows: list[dict[str, Any]]) -> None:
    write_arrow(path, columns(rows, pa.string()))


def write_arrow(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


CONTAINERS = {
    "a.jsonl": json_lines,
    "a.json": json_list,
    "a.jsonl.gz": zipped,
    "a.parquet": parquet_of_text,
    "b.parquet": parquet_of_json,
    "a.arrow": arrow_of_text,
}


@contextmanager
def sizes(large: bool, folder: Path):
    """Every file is large, or small; what is converted lies in the folder."""
    with (
        patch.object(files, "SMALL_BYTES", 0 if large else files.SMALL_BYTES),
        patch.object(sources, "CHECK_BYTES", -1 if large else sources.CHECK_BYTES),
        patch.object(files, "BLOCK_BYTES", 64 if large else files.BLOCK_BYTES),
        patch.dict(os.environ, HF_DATASETS_CACHE=str(folder)),
    ):
        yield


def read(path: Path, **settings: Any) -> list[str]:
    """The JSON of every document of a file."""
    source = open_source(DataConfig(path=str(path), **settings))
    return [json.dumps(source[i]) for i in range(len(source))]


def readings(path: Path, folder: Path) -> list[list[str]]:
    """The documents of a file, by its size and by what is done with bad rows."""
    found = []
    for large in (False, True):
        for bad_rows in ("fail", "skip"):
            with sizes(large, folder):
                found.append(read(path, bad_rows=bad_rows))
    return found


@settings(deadline=None, max_examples=60)
@given(rows_of_chats)
def test_a_row_is_what_json_says_in_every_container_of_any_size(rows):
    expected = [json.dumps(document) for document in map(documents_of, range(len(rows)), rows)]
    with TemporaryDirectory() as folder:
        for name, write in CONTAINERS.items():
            path = Path(folder, name)
            write(path, rows)
            for documents in readings(path, Path(folder, "cache")):
                assert documents == expected, name


def documents_of(number: int, row: dict[str, Any]) -> dict[str, Any]:
    """The document of a row: its values as they are, without empty columns."""
    messages = row.get("messages")
    if messages is None:
        question, call = row["conversations"]
        function = {"type": "function", "function": json.loads(call["value"])}
        messages = [
            {"role": "user", "content": question["value"]},
            {"role": "assistant", "content": "", "tool_calls": [function]},
        ]
    others = {key: row[key] for key in ("tools", "chat_template_kwargs") if row.get(key)}
    return {"row": number, "messages": messages, **others}


fields = st.fixed_dictionaries({}, optional={"city": st.none() | texts, "days": st.none() | st.integers(0, 9)})


@settings(deadline=None, max_examples=30)
@given(st.lists(fields, min_size=1, max_size=4))
def test_structs_lose_nulls_in_every_container_of_any_size(arguments):
    """In a struct, null and a missing key are the same."""
    kind = pa.list_(
        pa.struct(
            {
                "role": pa.string(),
                "content": pa.string(),
                "tool_calls": pa.list_(pa.struct({"arguments": pa.struct({"city": pa.string(), "days": pa.int64()})})),
            }.items()
        )
    )
    chats = [
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [{"arguments": given}]}]
        for given in arguments
    ]
    table = pa.table({"messages": pa.array(chats, kind)})
    with TemporaryDirectory() as folder:
        pq.write_table(table, Path(folder, "a.parquet"), row_group_size=2)
        write_arrow(Path(folder, "a.arrow"), table)
        for name in ("a.parquet", "a.arrow"):
            for documents in readings(Path(folder, name), Path(folder, "cache")):
                found = [json.loads(document)["messages"] for document in documents]
                assert [chat[1]["content"] for chat in found] == [None] * len(chats)
                kept = [
                    {key: given[key] for key in ("city", "days") if given.get(key) is not None} for given in arguments
                ]
                assert [chat[1]["tool_calls"][0]["arguments"] for chat in found] == kept


values_of_alpaca = st.none() | st.booleans() | st.just(0) | st.just([]) | st.just({}) | texts


@pytest.mark.parametrize("key", ["input", "system"])
@settings(deadline=None, max_examples=20)
@given(value=values_of_alpaca.filter(lambda value: not value or isinstance(value, str)))
def test_an_empty_value_of_an_optional_column_is_none(key, value):
    rows = [{"instruction": "a", "output": "b", key: value}]
    with TemporaryDirectory() as folder:
        for name in ("a.jsonl", "a.json", "a.jsonl.gz"):
            path = Path(folder, name)
            CONTAINERS[name](path, rows)
            for documents in readings(path, Path(folder, "cache")):
                chat = json.loads(documents[0])["messages"]
                assert [message["content"] for message in chat][-1] == "b"
                assert len(chat) == 2 + (key == "system" and bool(value))
                assert value or chat[0]["content"] == "a"


lines_of_text = st.lists(st.text(st.sampled_from("a\ufeff é"), min_size=1, max_size=4).filter(str.strip), min_size=1)


@settings(deadline=None, max_examples=40)
@given(lines_of_text, st.booleans(), st.sampled_from(["line", "document"]))
def test_only_the_mark_at_the_beginning_of_a_text_file_is_removed(rows, marked, sample_by):
    text = "\n".join(rows)
    content = text.encode("utf-8-sig" if marked else "utf-8")
    expected = text if marked else text.removeprefix("\ufeff")
    rows = expected.split("\n") if sample_by == "line" else [expected]
    with TemporaryDirectory() as folder:
        Path(folder, "a.txt").write_bytes(content)
        Path(folder, "a.txt.gz").write_bytes(gzip.compress(content))
        for name in ("a.txt", "a.txt.gz"):
            for large in (False, True):
                with sizes(large, Path(folder, "cache")):
                    found = [json.loads(document)["text"] for document in read(Path(folder, name), sample_by=sample_by)]
                assert found == rows, name
