"""The benchmark of packing measures real rows and real steps, and knows its targets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench import packing
from tests.helpers.corpus import corpus_rows
from tests.helpers.tokenizers import tiny_tokenizer


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """The options of a small run, with two tokenizers of different size."""
    for name, tokenizer in (("ours", tiny_tokenizer()), ("theirs", tiny_tokenizer(600, seed=7))):
        tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "text.txt").write_text(" ".join(row["text"] for row in corpus_rows(200)))
    sizes = ["--documents", "24", "--mean", "32", "--longest", "128", "--speed-documents", "4", "--rounds", "1"]
    folders = [str(tmp_path / "ours"), str(tmp_path / "theirs")]
    return ["--tokenizers", *folders, "--text", str(tmp_path / "text.txt"), *sizes]


def test_packed_rows_compute_less_and_figures_are_written(arguments: list[str], tmp_path: Path) -> None:
    out = tmp_path / "packing.json"
    packing.main([*arguments, "--out", str(out)])  # 0 or 1: so few documents may miss a target
    written = json.loads(out.read_text())
    pair, speed = written["pairs"]["theirs"], written["speed"]
    positions = pair["positions_per_token"]
    assert 1 <= positions["packed"] < positions["one_width"]
    assert 1 <= positions["padded"] < positions["one_width"]
    assert 0 < max(pair["occupancy"].values()) <= 1
    assert speed["tokens"]["same"] > 0 < speed["tokens"]["other"]
    assert speed["speed"] > 0


def test_without_tokenizers_it_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert packing.main([]) == 2
    assert "needs --tokenizers STUDENT TEACHER" in capsys.readouterr().err


def test_each_target_can_be_missed() -> None:
    good = {"positions_per_token": {"packed": 1.1}, "occupancy": {"student": 0.8, "teacher": 0.94}}
    assert packing.verdict({"pairs": {"a": good}, "speed": {"speed": 0.85}}) == []
    bad = {"positions_per_token": {"packed": 1.11}, "occupancy": {"student": 0.93, "teacher": 0.9}}
    assert len(packing.verdict({"pairs": {"a": bad}, "speed": {"speed": 0.84}})) == 3
