"""Evaluation on a GPU: against the CPU, spread over actors, and beside training."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from distill_rl.evals.backends.base import Output, Settings
from distill_rl.evals.backends.hf import HfBackend
from distill_rl.evals.suites.base import Item
from tests.cli.conftest import CONFIG
from tests.cli.test_train import assert_equal_runs
from tests.helpers.command import distill_rl, series
from tests.helpers.corpus import write_corpus
from tests.helpers.models import write_tiny_model
from tests.helpers.suites import write_suite
from tests.vllm.material import LETTERS, items, train

pytestmark = [pytest.mark.gpu, pytest.mark.cli]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def whole_gpu() -> Iterator[None]:
    """Give later tests the whole GPU again."""
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def choose(generator: HfBackend, questions: Sequence[Item]) -> list[Output]:
    outputs = dict(generator.choose(questions))
    return [outputs[i] for i in range(len(questions))]


def letters(outputs: Sequence[Output]) -> list[str]:
    return [LETTERS[output.logprobs.index(max(output.logprobs))] for output in outputs]


@pytest.mark.parametrize("shots", [5, 0])
def test_completions_match_the_cpu(trained: Path, shots: int) -> None:
    questions = items(200, shots=shots, space=True)
    cpu = choose(HfBackend(trained, Settings(dtype="fp32", device="cpu")), questions)
    generator = HfBackend(trained, Settings(dtype="fp32"))
    assert generator.device.type == "cuda"
    gpu = choose(generator, questions)
    for left, right in zip(cpu, gpu):
        assert left.logprobs == pytest.approx(right.logprobs, abs=1e-3)
    assert letters(gpu) == letters(cpu), "no two choices of this model are this close"
    bf16 = letters(choose(HfBackend(trained, Settings(dtype="bf16")), questions))
    assert sum(left == right for left, right in zip(letters(cpu), bf16)) >= 0.95 * 200
    assert len(set(bf16)) == 4


def test_model_uses_the_dtype_of_its_files(tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        folder = write_tiny_model(tmp_path / str(dtype), dtype=str(dtype).removeprefix("torch."))
        assert HfBackend(folder).model.dtype == dtype


def test_a_model_stays_within_its_memory_fraction(trained: Path, whole_gpu: None) -> None:
    generator = HfBackend(trained, Settings(gpu_share=0.05))
    total = torch.cuda.get_device_properties(0).total_memory
    assert len(choose(generator, items(8, shots=1, space=True))) == 8
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(int(0.06 * total), dtype=torch.uint8, device=generator.device)
    HfBackend(trained, Settings())
    torch.empty(int(0.06 * total), dtype=torch.uint8, device=generator.device)


def test_two_shards_on_one_gpu_match_one(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", hidden=64, seed=1)
    suite = write_suite(tmp_path, count=80)
    rows = []
    for shards in (1, 2):
        out = tmp_path / str(shards)
        options = ("--model", model, "--suites", suite, "--data", tmp_path, "--dtype", "fp32", "--batch-size", "8")
        result = distill_rl("eval", *options, "--shards", str(shards), "--out", out)
        assert result.code == 0, result.err
        assert json.loads((out / "own.json").read_text())["device"].startswith("cuda")
        rows.append([json.loads(line) for line in (out / "own.items.jsonl").read_text().splitlines()])
    assert len(rows[0]) == 80
    assert rows[0] == rows[1]


def test_evaluation_beside_training_changes_no_bit(tmp_path: Path) -> None:
    for name, seed in (("teacher", 1), ("student", 2)):
        write_tiny_model(tmp_path / name, hidden=64, seed=seed)
    write_corpus(tmp_path / "corpus.jsonl", rows=80, seed=5)
    suite = write_suite(tmp_path, count=24)
    inline = (f"evaluate.suites=[{suite}]", f"evaluate.data={tmp_path}", "evaluate.suites_every=2")
    for name, settings in (("alone", ()), ("evaluated", inline)):
        config = tmp_path / f"{name}.yaml"
        config.write_text(CONFIG.format(root=tmp_path, runs=tmp_path / "runs", teacher="teacher"))
        result = distill_rl("train", "-c", config, "train.deterministic=true", *settings)
        assert result.code == 0, result.err
    assert_equal_runs(tmp_path / "runs" / "alone", tmp_path / "runs" / "evaluated")
    run = tmp_path / "runs" / "evaluated"
    assert [step for step, _ in series(run, "eval/own")] == [2, 4, 6, 8]
    assert json.loads((run / "evals" / "step-2" / "own.json").read_text())["device"].startswith("cuda")


def test_two_vllm_engines_on_one_gpu_match_hf(trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vllm is not installed here")
    suite = write_suite(tmp_path, count=80)
    completions = {}
    for backend in ("hf", "vllm"):
        out = tmp_path / backend
        options = ("--model", trained, "--suites", suite, "--data", tmp_path, "--dtype", "bf16", "--out", out)
        result = distill_rl("eval", *options, "--backend", backend, "--shards", "2")
        assert result.code == 0, result.err
        rows = [json.loads(line) for line in (out / "own.items.jsonl").read_text().splitlines()]
        completions[backend] = [row["completion"] for row in rows]
    same = sum(left == right for left, right in zip(completions["hf"], completions["vllm"], strict=True))
    assert same >= 0.8 * 80, "bf16 has ties"
