"""MMLU and GSM8K by `distill-rl eval` and by lm-evaluation-harness, whose tasks have the same prompts: equal answers, item by item."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from distill_rl.demo.real import RealMaterial
from distill_rl.evals.backends.base import Settings
from distill_rl.evals.executor import LocalExecutor
from distill_rl.evals.options import Options, load_questions
from distill_rl.evals.results import items_file
from distill_rl.evals.run import Model, evaluate_models
from distill_rl.system.files import read_json_lines, write_json_lines
from tests.helpers.align import DATA

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed here: bash launch/test.sh real")

SUBJECTS = ("astronomy", "high_school_computer_science", "nutrition")
QUESTIONS = 20
"""Of each subject."""
PROBLEMS = 12
NEW_TOKENS = 200


@pytest.fixture(scope="module")
def data() -> Path:
    if not (DATA / "evals").is_dir():
        pytest.skip(f"no questions: {DATA / 'evals'}")
    return DATA / "evals"


def ours(folder: Path, suite: str, data: Path, out: Path, max_new_tokens: int | None = None) -> list[dict[str, Any]]:
    """The items of an evaluation, in the order of the data."""
    options = Options(max_new_tokens=max_new_tokens, settings=Settings(batch_size=8, dtype="fp32"))
    with closing(LocalExecutor()) as executor:
        evaluate_models([Model("m", folder, out)], load_questions([suite], data, options), options, executor)
    return [*read_json_lines(items_file(out, suite))]


def theirs(folder: Path, group: str, task: str, rows: Mapping[str, Path], **changes: Any) -> list[dict[str, Any]]:
    """What lm-evaluation-harness logs of each document with a task of its own, the data of which are in `rows`, split → file."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    root = Path(lm_eval.__file__).parent / "tasks" / group
    config = yaml.safe_load((root / f"{task}.yaml").read_text("utf-8"))
    if base := config.pop("include", None):
        config = yaml.safe_load((root / base).read_text("utf-8")) | config
    config |= {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {name: str(file) for name, file in rows.items()}},
    }
    config |= {"dataset_name": None, **changes}
    model = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=8)
    done = lm_eval.simple_evaluate(
        model, tasks=[config], task_manager=TaskManager(), log_samples=True, bootstrap_iters=0
    )
    (samples,) = done["samples"].values()
    return sorted(samples, key=lambda sample: (sample["filter"], sample["doc_id"]))


def write_mmlu(data: Path, split: str, subject: str, count: int, file: Path) -> Path:
    rows = pq.read_table(data / "mmlu" / f"{split}.parquet").to_pylist()
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json_lines(file, [row for row in rows if row["subject"] == subject][:count])
    return file


@pytest.mark.parametrize("subject", SUBJECTS)
def test_mmlu(subject: str, material: RealMaterial, data: Path, tmp_path: Path) -> None:
    test = write_mmlu(data, "test", subject, QUESTIONS, tmp_path / "evals" / "mmlu" / "test.jsonl")
    dev = write_mmlu(data, "dev", subject, 5, test.with_name("dev.jsonl"))
    found = ours(material.smollm2, "mmlu", tmp_path / "evals", tmp_path / "out")
    expected = theirs(material.smollm2, "mmlu/default", f"mmlu_{subject}", {"test": test, "dev": dev}, num_fewshot=5)
    assert len(found) == len(expected) == QUESTIONS
    for mine, other in zip(found, expected):
        assert mine["choice_logprobs"] == pytest.approx([response[0][0] for response in other["resps"]], abs=1e-3)
    assert [row["score"] for row in found] == [sample["acc"] for sample in expected]


def test_gsm8k(material: RealMaterial, data: Path, tmp_path: Path) -> None:
    test = tmp_path / "evals" / "gsm8k" / "test.jsonl"
    test.parent.mkdir(parents=True)
    write_json_lines(test, islice(read_json_lines(data / "gsm8k" / "test.jsonl"), PROBLEMS))
    found = ours(material.smollm2, "gsm8k", tmp_path / "evals", tmp_path / "out", NEW_TOKENS)
    settings = {"until": ["\nQ:"], "do_sample": False, "max_gen_toks": NEW_TOKENS}
    samples = theirs(material.smollm2, "gsm8k", "gsm8k-cot", {"test": test}, generation_kwargs=settings)
    expected = [sample for sample in samples if sample["filter"] == "flexible-extract"]
    assert [row["completion"].strip() for row in found] == [sample["resps"][0][0].strip() for sample in expected]
    assert [row["score"] for row in found] == [sample["exact_match"] for sample in expected]
