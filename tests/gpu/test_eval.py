"""Evaluation on a GPU: beside the same on CPUs, spread over actors, and next to a training."""

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
    """Gives later tests the whole GPU again."""
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def choose(generator: HfBackend, questions: Sequence[Item]) -> list[Output]:
    found = dict(generator.choose(questions))
    return [found[index] for index in range(len(questions))]


def letters(outputs: Sequence[Output]) -> list[str]:
    return [LETTERS[output.logprobs.index(max(output.logprobs))] for output in outputs]


@pytest.mark.parametrize("shots", [5, 0])
def test_the_same_letters_as_on_cpus(trained: Path, shots: int) -> None:
    questions = items(200, shots=shots, space=True)
    cpu = choose(HfBackend(trained, Settings(dtype="fp32", device="cpu")), questions)
    generator = HfBackend(trained, Settings(dtype="fp32"))
    assert generator.device.type == "cuda"
    gpu = choose(generator, questions)
    for left, right in zip(cpu, gpu):
        assert left.logprobs == pytest.approx(right.logprobs, abs=1e-3)
    assert letters(gpu) == letters(cpu), "no two choices of this model are that close"
    short = letters(choose(HfBackend(trained, Settings(dtype="bf16")), questions))
    assert sum(ours == theirs for ours, theirs in zip(letters(cpu), short)) >= 0.95 * 200
    assert len(set(short)) == 4


def test_the_dtype_of_the_files_is_taken(tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        folder = write_tiny_model(tmp_path / str(dtype), dtype=str(dtype).removeprefix("torch."))
        assert HfBackend(folder).model.dtype == dtype


def test_a_model_takes_no_more_than_its_share_of_the_memory(trained: Path, whole_gpu: None) -> None:
    generator = HfBackend(trained, Settings(gpu_share=0.05))
    total = torch.cuda.get_device_properties(0).total_memory
    assert len(choose(generator, items(8, shots=1, space=True))) == 8
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(int(0.06 * total), dtype=torch.uint8, device=generator.device)
    HfBackend(trained, Settings())
    torch.empty(int(0.06 * total), dtype=torch.uint8, device=generator.device)


def test_two_shards_of_one_gpu_give_what_one_gives(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", hidden=64, seed=1)
    suite = write_suite(tmp_path, count=80)
    rows = []
    for shards in (1, 2):
        out = tmp_path / str(shards)
        given = ("--model", model, "--suites", suite, "--data", tmp_path, "--dtype", "fp32", "--batch-size", "8")
        ended = distill_rl("eval", *given, "--shards", str(shards), "--out", out)
        assert ended.code == 0, ended.err
        assert json.loads((out / "own.json").read_text())["device"].startswith("cuda")
        rows.append([json.loads(line) for line in (out / "own.items.jsonl").read_text().splitlines()])
    assert len(rows[0]) == 80
    assert rows[0] == rows[1]


def test_evaluation_on_the_gpu_of_a_training_changes_no_bit_of_it(tmp_path: Path) -> None:
    for name, seed in (("teacher", 1), ("student", 2)):
        write_tiny_model(tmp_path / name, hidden=64, seed=seed)
    write_corpus(tmp_path / "corpus.jsonl", rows=80, seed=5)
    suite = write_suite(tmp_path, count=24)
    inline = (f"evaluate.suites=[{suite}]", f"evaluate.data={tmp_path}", "evaluate.suites_every=2")
    for name, settings in (("alone", ()), ("evaluated", inline)):
        config = tmp_path / f"{name}.yaml"
        config.write_text(CONFIG.format(root=tmp_path, runs=tmp_path / "runs", teacher="teacher"))
        ended = distill_rl("train", "-c", config, "train.deterministic=true", *settings)
        assert ended.code == 0, ended.err
    assert_equal_runs(tmp_path / "runs" / "alone", tmp_path / "runs" / "evaluated")
    run = tmp_path / "runs" / "evaluated"
    assert [step for step, _ in series(run, "eval/own")] == [2, 4, 6, 8]
    assert json.loads((run / "evals" / "step-2" / "own.json").read_text())["device"].startswith("cuda")


def test_two_engines_of_vllm_on_one_gpu_give_what_hf_gives(trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vllm is not installed here")
    suite = write_suite(tmp_path, count=80)
    completions = {}
    for backend in ("hf", "vllm"):
        out = tmp_path / backend
        given = ("--model", trained, "--suites", suite, "--data", tmp_path, "--dtype", "bf16", "--out", out)
        ended = distill_rl("eval", *given, "--backend", backend, "--shards", "2")
        assert ended.code == 0, ended.err
        rows = [json.loads(line) for line in (out / "own.items.jsonl").read_text().splitlines()]
        completions[backend] = [row["completion"] for row in rows]
    same = sum(ours == theirs for ours, theirs in zip(completions["hf"], completions["vllm"], strict=True))
    assert same >= 0.8 * 80, "bf16 has ties"
