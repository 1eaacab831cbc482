"""Which teachers a row is for: values, weights, and what is wrong with a column."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distill_rl.config.schema import Config, DataConfig, TeacherConfig
from distill_rl.data.reading import files
from distill_rl.data.reading.cache import Cache
from distill_rl.data.reading.source import MixedSource, Mixture
from distill_rl.data.reading.sources import open_source, split_validation
from distill_rl.data.routing import WEIGHTS, Routing, plain_value
from distill_rl.errors import DataError

ROWS: list[dict[str, Any]] = [
    {"text": "one", "domain": "maths", "level": 1, "use": 0.5},
    {"text": "two", "domain": "code", "level": 2, "use": 0},
    {"text": "three", "domain": "maths", "level": 2, "use": 1},
    {"text": "four", "domain": "other", "level": 1, "use": 3},
]


def routing(*teachers: Mapping[str, Any]) -> Routing | None:
    settings = [TeacherConfig(name=f"t{i}", model="m", **teacher) for i, teacher in enumerate(teachers)]
    return Routing.of(Config(teachers=settings))


def written(folder: Path, name: str, rows: list[dict[str, Any]] = ROWS) -> str:
    """A file of some format with the rows."""
    path = folder / name
    folder.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    elif path.suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_without_settings_nothing_is_read():
    assert routing({}, {}) is None
    assert Routing.of(Config(teachers=[TeacherConfig(model="m", where={"a": 1})])) is not None


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (1, "1"), (1.0, "1"), ("1", "1"), ("1.0", "1"), ("1e0", "1"), (0.5, "0.5"), ("0.50", "0.5"), (-0.0, "0"),
        ("007", "007"), ("", ""), ("Maths", "Maths"), (True, "true"), ("true", "true"), (None, None),
        (2**70, str(2**70)), ("9" * 5000, "9" * 5000), (" 1", " 1"),
    ],
)  # fmt: skip
def test_values_are_compared_as_people_read_them(value, plain):
    assert plain_value(value, "") == plain


@pytest.mark.parametrize("large", [False, True], ids=["in memory", "by block"])
@pytest.mark.parametrize("name", ["c.jsonl", "c.csv", "c.parquet"])
def test_every_format_gives_the_weights(tmp_path, monkeypatch, name, large):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    if large:
        monkeypatch.setattr(files, "SMALL_BYTES", 0)
    chosen = routing(
        {"where": {"domain": ["maths", "code"], "level": "1"}},
        {},
        {"where": {"level": 2}, "weight_column": "use"},
        {"weight_column": "use"},
    )
    path = written(tmp_path / "data", name)
    source = open_source(DataConfig(path=path), cache=Cache(say=lambda line: None), routing=chosen)
    assert [source[i][WEIGHTS] for i in range(4)] == [(1, 1, 0, 0.5), (0, 1, 0, 0), (0, 1, 1, 1), (0, 1, 0, 3)]
    assert source[2] == {"row": 2, "text": "three", WEIGHTS: (0, 1, 1, 1)}
    plain = open_source(DataConfig(path=path), cache=Cache(say=lambda line: None))
    assert plain[2] == {"row": 2, "text": "three"}
    assert plain.fingerprint == source.fingerprint, "the data are the same"
    assert [plain.order(7)(i) for i in range(4)] == [source.order(7)(i) for i in range(4)]


def test_weights_come_with_chats_mixtures_and_held_out_rows(tmp_path):
    chats = [{"messages": [{"role": "user", "content": row["text"]}], **row} for row in ROWS]
    path = written(tmp_path, "chats.jsonl", chats)
    chosen = routing({"where": {"domain": "maths"}})
    data = DataConfig(sources=[], path=path, format="messages")
    data.validation.fraction = 0.5
    training, held_out = split_validation(open_source(data, routing=chosen), data, 0, routing=chosen)
    assert held_out is not None
    found = {part[i]["row"]: part[i][WEIGHTS] for part in (training, held_out) for i in range(2)}
    assert found == {0: (1,), 1: (0,), 2: (1,), 3: (0,)}
    mixture = Mixture([MixedSource(open_source(data, routing=chosen), 1.0, name) for name in "ab"])
    assert mixture[6][WEIGHTS] == (1,)


@pytest.mark.parametrize(
    ("teacher", "changed", "words"),
    [
        ({"where": {"domian": "maths"}}, {}, ("column 'domian'", "teachers.0.where names", "did you mean 'domain'?")),
        ({"weight_column": "used"}, {}, ("column 'used'", "teachers.0.weight_column names", "did you mean 'use'?")),
        ({"where": {"domain": "maths"}}, {"domain": ["maths"]}, ("column 'domain'", "row 2", "true or false", "list")),
        ({"weight_column": "use"}, {"use": -1}, ("column 'use'", "row 2", "finite number of 0 or more", "-1")),
        ({"weight_column": "use"}, {"use": None}, ("column 'use'", "row 2", "number of 0 or more", "null")),
        ({"weight_column": "use"}, {"use": "many"}, ("column 'use'", "row 2", "number of 0 or more", "'many'")),
        ({"weight_column": "use"}, {"use": "nan"}, ("column 'use'", "row 2", "number of 0 or more", "'nan'")),
        ({"weight_column": "use"}, {"use": 1e39}, ("column 'use'", "row 2", "finite number", "1e+39")),
        ({"weight_column": "use"}, {"use": True}, ("column 'use'", "row 2", "number of 0 or more", "rue")),
    ],
)
def test_bad_columns_name_file_row_and_rule(tmp_path, teacher, changed, words):
    path = written(tmp_path, "c.jsonl", [*ROWS[:2], {**ROWS[2], **changed}])
    with pytest.raises(DataError) as error:
        open_source(DataConfig(path=path), routing=routing(teacher))
    assert all(word in str(error.value) for word in (path, *words)), str(error.value)


def test_a_weight_is_read_for_rows_that_match_only(tmp_path):
    path = written(tmp_path, "c.jsonl", [ROWS[0], {**ROWS[1], "use": None}, {**ROWS[2], "domain": None}])
    chosen = routing({"where": {"domain": "maths"}, "weight_column": "use"})
    source = open_source(DataConfig(path=path), routing=chosen)
    assert [source[i][WEIGHTS] for i in range(3)] == [(0.5,), (0,), (0,)]


def test_a_row_without_the_column_is_bad(tmp_path):
    without = {key: value for key, value in ROWS[1].items() if key != "domain"}
    path = written(tmp_path, "c.jsonl", [ROWS[0], without])
    chosen = routing({"where": {"domain": "maths"}})
    with pytest.raises(DataError, match="has the column 'domain', like the first row"):
        open_source(DataConfig(path=path), routing=chosen)
    source = open_source(DataConfig(path=path, bad_rows="skip"), routing=chosen)
    assert source[0][WEIGHTS] == (1,)
    with pytest.raises(DataError, match="'domain'"):
        source[1]
