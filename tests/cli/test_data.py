"""Runs on data as people have them: folders of compressed files, weights, rows that cannot be read, long documents."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from distill_rl.config.load import load_config
from tests.helpers.command import Cluster, distill_rl, distill_rl_in_process
from tests.helpers.corpus import corpus_rows
from tests.helpers.one_process import train

pytestmark = pytest.mark.cli

BAD = [b"no JSON", b'{"text": null}', b'{"text": " "}']


def records(run: Path) -> dict[int, dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if "train/loss" in line}


def losses_after_resuming(run: Path, config: Path, settings: tuple[str, ...], cluster: Cluster) -> dict[int, float]:
    """The losses of another run that goes on from step 3 of this one."""
    resume = f"checkpoint.resume={run}/checkpoints/step-3"
    ended = distill_rl("train", "-c", config, *settings, "run.name=again", resume, cluster=cluster)
    assert ended.code == 0, ended.err
    return {step: record["train/loss"] for step, record in records(run.parent / "again").items()}


@pytest.mark.long_run
def test_mixed_sources_skip_bad_rows_and_resume(material, cluster, tmp_path):
    web = tmp_path / "web"
    web.mkdir()
    for i in range(2):
        rows = [json.dumps(row).encode() for row in corpus_rows(10, seed=i)]
        (web / f"train-{i}.jsonl.gz").write_bytes(gzip.compress(b"\n".join([*rows, *BAD])))
    books = tmp_path / "books.csv"
    books.write_text("text\n" + "".join(f'"{row["text"]}"\n' for row in corpus_rows(12, seed=9)))
    config = tmp_path / "mixed.yaml"
    config.write_text(
        f"extends: {material.config(tmp_path)}\n"
        f"data: {{path: null, sources: [{{path: {web}, weight: 3}}, {{path: {books}}}], bad_rows: skip}}\n"
    )
    settings = ("train.steps=6", "schedule.steps=6", "checkpoint.every=3", "data.validation.fraction=0.2")

    checked = distill_rl("check", "-c", config, *settings)
    assert checked.code == 0, checked.err
    assert "# data       web: 21 rows, text, 75 % of the documents" in checked.out
    assert "# data       books.csv: 10 rows, text, 25 % of the documents" in checked.out

    ended = distill_rl("train", "-c", config, *settings, cluster=cluster)
    assert ended.code == 0, ended.err
    assert "data      web: 21 rows, text, 75 % of the documents" in ended.out
    run = tmp_path / "runs" / "mixed"
    straight = records(run)
    for step, record in straight.items():
        assert record["data/documents/web"] + record["data/bad_rows"] == 6, step
        assert record["data/documents/books.csv"] == 2
    listed = [json.loads(line) for line in (run / "bad_rows.jsonl").read_text().splitlines()]
    assert {entry["row"] for entry in listed} <= {10, 11, 12, 23, 24, 25}
    assert listed
    assert all(entry["stage"] == "data" for entry in listed)

    assert losses_after_resuming(run, config, settings, cluster) == {s: straight[s]["train/loss"] for s in (4, 5, 6)}


def test_a_folder_of_compressed_texts_is_packed_and_split_across_tokenizers(material, cluster, tmp_path):
    """Every fourth text is longer than a row. The configuration sets paths, and nothing about rows."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(2):
        texts = [row["text"] for row in corpus_rows(40, seed=20 + i)]
        texts[::4] = [" ".join(texts[first : first + 6]) for first in range(0, 40, 4)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"part-{i}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    config = tmp_path / "split.yaml"
    config.write_text(f"extends: {material.config(tmp_path, 'foreign')}\ndata: {{path: {folder}}}\n")
    settings = ("checkpoint.every=3", "train.steps=6", "schedule.steps=6")

    checked = distill_rl_in_process("check", "-c", config, *settings)
    assert checked.code == 0, checked.err
    said = re.search(r"texts: 72 rows, text, .* of a sample: ([\d.]+) % of the documents split, .*", checked.out)
    assert said, checked.out
    assert 30 <= float(said[1]) <= 90
    assert re.search(r"# rows       about [\d,]+ positions per step, \d\d.* % of them with a token", checked.out)

    ended = distill_rl("train", "-c", config, *settings, cluster=cluster)
    assert ended.code == 0, ended.err
    assert said[0] in ended.out
    run = tmp_path / "runs" / "split"
    straight = records(run)
    assert sum(record["align/split"] for record in straight.values()) > 6
    assert all(record["align/truncated"] == 0 for record in straight.values())
    assert all(record["align/documents"] == 8 for record in straight.values())
    assert len({record["align/rows"] for record in straight.values()}) > 1, "as many rows as the documents need"
    assert all(record["align/exact"] == 1 for record in straight.values())
    assert "Share of positions that hold a token" in (run / "report.html").read_text()

    again = train(load_config(config, settings), tmp_path / "again", run / "checkpoints" / "step-3")
    assert dict(again.series("train/loss")) == {step: straight[step]["train/loss"] for step in (4, 5, 6)}
