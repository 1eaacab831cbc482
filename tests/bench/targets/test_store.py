"""The benchmark of stored targets trains its models, measures blocks and losses, and knows its targets."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.bench.targets import store
from tests.helpers.corpus import corpus_rows
from tests.helpers.tokenizers import tiny_tokenizer
from tests.helpers.top_k_targets import realistic


def test_figures_are_written_and_models_are_kept(tmp_path: Path) -> None:
    tiny_tokenizer(600).save_pretrained(tmp_path / "data" / "tokenizers" / "tiny")
    rows = [json.dumps({"text": row["text"]}) for row in corpus_rows(200)]
    (tmp_path / "data" / "text.jsonl").write_text("\n".join(rows))
    folders = ["--data", str(tmp_path / "data"), "--models", str(tmp_path / "models"), "--tokenizers", "tiny"]
    sizes = ["--k", "8", "64", "--tokens", "60", "--loss-rows", "30", "--cpu-seconds", "1"]
    out = tmp_path / "store.json"
    store.main([*folders, "--texts", "*.jsonl", *sizes, "--out", str(out)])  # 0 or 1: the targets are for larger data
    (kept,) = (tmp_path / "models").iterdir()
    written = json.loads(out.read_text())
    assert [(row["k"], row["mass"]) for row in written["compact"]] == [(8, None), (64, None), (64, 0.98)]
    for row in written["compact"]:
        assert row["kl"] > 0
        assert row["cosine"] > 0.99
        if not row["mass"]:
            assert sum(row["of_which"].values()) == pytest.approx(row["bytes"])
            assert min(row["of_which"].values()) > 0
            assert row["bytes"] < row["raw"]
            assert row["decode_per_s"] > 0
    before = kept.stat().st_mtime_ns
    store.main([*folders, "--texts", "*.jsonl", *sizes, "--out", str(out)])
    assert kept.stat().st_mtime_ns == before


def test_bound_is_the_entropy_without_context() -> None:
    """Two ids, equally frequent at both places, cost a bit each; all else is constant."""
    rows = 64
    targets = {
        "ids": np.array([[0, 1], [1, 0]] * (rows // 2), np.int32),
        "logprobs": np.full((rows, 2), -0.7, np.float32),
        "rest_logprob": np.full(rows, -9, np.float32),
        "label_logprob": np.full(rows, -0.7, np.float32),
    }
    assert store.bound_bytes([(np.zeros(rows, np.int32), targets)]) == pytest.approx(2 / 8 + store.TOKEN_BYTES)


def test_first_k_keeps_the_mass() -> None:
    _, targets = realistic(20, 500, 16)
    fewer = store.first_k(targets, 5)
    masses = [np.exp(each["logprobs"].astype(float)).sum(1) + np.exp(each["rest_logprob"]) for each in (targets, fewer)]
    assert fewer["ids"].shape == (20, 5)
    assert masses[1] == pytest.approx(masses[0], rel=1e-6)


def test_missed_targets_are_named() -> None:
    good = {"tokenizer": "t", "k": 64, "mass": None, "bytes": 99, "bound": 50, "decode_per_s": 300_000}
    good |= {"loss_error": 0.01, "cosine": 0.999}
    bad = good | {"bytes": 111, "bound": 100, "decode_per_s": 299_999, "loss_error": 0.02, "cosine": 0.9}
    assert store.verdict({"compact": [good, good | {"k": 128, "bytes": 999}]}) == []
    assert len(store.verdict({"compact": [bad]})) == 4


def test_without_data_it_says_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert store.main([]) == 2
    assert "needs --data FOLDER" in capsys.readouterr().err
    assert store.main(["--data", str(tmp_path)]) == 2
    assert "matches corpus/en/*.txt" in capsys.readouterr().err
