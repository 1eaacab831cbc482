"""What the checks find in the data: every source, rows that will be left out, files that are not converted yet."""

from __future__ import annotations

import gzip
import json

import pytest

from distill_rl.data.reading import files, sources
from distill_rl.preflight import gather

ROWS = [json.dumps({"text": f"row {i}"}) for i in range(40)]


def test_sources_are_listed_with_rows_and_shares(material, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(ROWS))
    pairs = [json.dumps({"instruction": "Add.", "output": f"{i}"}) for i in range(20)]
    (tmp_path / "b.jsonl").write_text("\n".join(pairs))
    chats = [
        "data.path=null",
        f"data.sources.0={{path: {material}/chat.jsonl, weight: 3}}",
        f"data.sources.1={{path: {tmp_path}/b.jsonl}}",
    ]
    checked = gather(material / "run.yaml", chats)
    assert checked.problems == []
    assert [str(source).partition(", about")[0] for source in checked.facts.sources] == [
        "chat.jsonl: 64 rows, chats, 75 % of the documents",
        "b.jsonl: 20 rows, chats in Alpaca's form (data.format=auto), 25 % of the documents",
    ]
    assert (checked.facts.num_documents, checked.facts.data_kind) == (84, "messages")
    mixed = [*chats[:2], f"data.sources.1={{path: {tmp_path}/a.jsonl}}"]
    (line,) = gather(material / "run.yaml", mixed).problems
    assert line.startswith(
        "data.sources.1.path: all sources have the same form, chats like the first; got rows of text"
    )


def test_one_source_or_several_must_be_given(material):
    (line,) = gather(material / "run.yaml", ["data.path=null"]).problems
    assert line == "data.path: missing value; set it in the file or add data.path=PATH; or give data.sources"
    (line,) = gather(material / "run.yaml", ["data.path=null", "data.sources.0.weight=2"]).problems
    assert line.startswith("data.sources.0.path: missing value")


@pytest.mark.parametrize(
    ("training", "held_out", "said"),
    [
        (ROWS, None, None),
        (ROWS[:5] * 8, None, "12 of 12 documents are also trained on; "),
        (ROWS, ROWS[:10] + ['{"text": "another"}'] * 10, "10 of 20 documents are also trained on; "),
        (ROWS, ['{"text": "another"}'] * 10, None),
        ([*ROWS, "no JSON"], ROWS, "40 of 40 documents are also trained on; "),
    ],
)
def test_documents_on_both_sides_of_validation_are_counted(material, tmp_path, training, held_out, said):
    (tmp_path / "train.jsonl").write_text("\n".join(training))
    settings = [f"data.path={tmp_path}/train.jsonl", "data.bad_rows=skip", "train.global_batch_size=2"]
    if held_out is None:
        settings.append("data.validation.fraction=0.3")
    else:
        (tmp_path / "other.jsonl").write_text("\n".join(held_out))
        settings.append(f"data.validation.path={tmp_path}/other.jsonl")
    checked = gather(material / "run.yaml", settings)
    assert checked.problems == []
    found = [note for note in checked.notes if note.startswith("data.validation: ")]
    assert len(found) == (said is not None)
    assert all(said in note for note in found)


def test_rows_that_will_be_left_out_are_noted(material, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join([*ROWS, '{"text": null}', "no JSON", '{"text": " "}']))
    (line,) = gather(material / "run.yaml", [f"data.path={path}"]).problems
    assert "row 40" in line
    checked = gather(material / "run.yaml", [f"data.path={path}", "data.bad_rows=skip"])
    assert checked.problems == []
    (note,) = [note for note in checked.notes if note.startswith("data.path")]
    assert note.startswith("data.path: 3 of 43 rows of a sample will be left out; the first: ")
    path.write_text('{"text": ""}\n' * 20)
    lines = gather(material / "run.yaml", [f"data.path={path}", "data.bad_rows=skip"]).problems
    assert lines[0].startswith(
        "data.path: some row must be readable; got 20 bad rows; the first: row 0: the text is empty"
    )


def test_a_file_that_disappears_while_it_is_checked_is_no_bad_row(material, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SMALL_BYTES", 0)
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(ROWS))
    opening = sources.open_one

    def open_and_delete(*arguments, **options):
        source = opening(*arguments, **options)
        path.unlink()
        return source

    monkeypatch.setattr(sources, "open_one", open_and_delete)
    (line,) = gather(material / "run.yaml", [f"data.path={path}", "data.bad_rows=skip"]).problems
    assert line.startswith(f"data.path: {path}")
    assert "bad rows" not in line


def test_compressed_files_are_checked_by_their_first_rows(material, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "SMALL_BYTES", 0)
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(ROWS).encode()))
    settings = [f"data.path={path}", "train.steps=null", "train.epochs=1"]
    checked = gather(material / "run.yaml", settings, download=False)
    assert checked.problems == []
    assert (checked.facts.num_documents, checked.facts.total_steps) == (None, None)
    assert any("are converted to Parquet when a run first reads them" in note for note in checked.notes)
    assert not (tmp_path / "cache").exists()
    said: list[str] = []
    assert gather(material / "run.yaml", settings, say=said.append).facts.num_documents == 40
    assert str(path) in said[0]
