"""vLLM where users run it: in Ray actors of `distill-rl eval`, and beside a training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: bash launch/test.sh vllm")

from tests.cli.conftest import CONFIG
from tests.cli.test_train import assert_equal_runs
from tests.helpers.command import distill_rl, series
from tests.helpers.corpus import write_corpus
from tests.helpers.models import write_tiny_model
from tests.helpers.suites import write_suite
from tests.vllm.material import SHAPE

pytestmark = pytest.mark.cli


def completions(out: Path) -> dict[str, str]:
    rows = [json.loads(line) for line in (out / "own.items.jsonl").read_text().splitlines()]
    return {row["id"]: row["completion"] for row in rows}


def test_an_evaluation_in_ray_actors_gives_what_hf_gives(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", seed=1, **SHAPE)  # type: ignore[arg-type]
    suite = write_suite(tmp_path, count=40)
    for backend in ("vllm", "hf"):
        out = tmp_path / backend
        given = ("--model", model, "--suites", suite, "--data", tmp_path, "--dtype", "fp32", "--out", out)
        ended = distill_rl("eval", *given, "--backend", backend)
        assert ended.code == 0, ended.err
        assert json.loads((out / "own.json").read_text())["backend"] == backend
    ours, theirs = completions(tmp_path / "vllm"), completions(tmp_path / "hf")
    ties = [name for name in ours if ours[name] != theirs[name]]
    print("differ:", ties)
    assert len(ties) <= 2


def test_vllm_beside_a_training_takes_every_steps_weights_and_changes_no_bit(tmp_path: Path) -> None:
    for name, seed in (("teacher", 1), ("student", 2)):
        write_tiny_model(tmp_path / name, seed=seed, **SHAPE)  # type: ignore[arg-type]
    write_corpus(tmp_path / "corpus.jsonl", rows=80, seed=5)
    suite = write_suite(tmp_path, count=24)
    more = {"alone": (), "evaluated": (f"evaluate.suites=[{suite}]", f"evaluate.data={tmp_path}")}
    for name, settings in more.items():
        (tmp_path / f"{name}.yaml").write_text(
            CONFIG.format(root=tmp_path, runs=tmp_path / "runs", teacher="teacher")
        )
        inline = ("evaluate.suites_every=4", "evaluate.backend=vllm") if settings else ()
        ended = distill_rl("train", "-c", tmp_path / f"{name}.yaml", *settings, *inline)
        assert ended.code == 0, ended.err
    assert_equal_runs(tmp_path / "runs" / "alone", tmp_path / "runs" / "evaluated")
    assert [step for step, _ in series(tmp_path / "runs" / "evaluated", "eval/own")] == [4, 8]
    found = completions(tmp_path / "runs" / "evaluated" / "evals" / "step-4")
    assert found != completions(tmp_path / "runs" / "evaluated" / "evals" / "student")
