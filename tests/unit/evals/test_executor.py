"""Chunks of items, and models loaded one after another in this process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from distill_rl.errors import ConfigError
from distill_rl.evals.backends.base import Output, Settings
from distill_rl.evals.backends.hf import HfBackend
from distill_rl.evals.executor import BATCHES_PER_CHUNK, VLLM_CHUNK, LocalExecutor, SuiteTask, chunks
from distill_rl.evals.suites.base import Item
from distill_rl.workers.evaluation import RayExecutor, Shards
from tests.helpers.models import ask_otherwise, write_tiny_model

ITEMS = [Item(str(n), "q" * (1 + n * 7 % 13), "a", prefix=f"subject {n % 3}: ") for n in range(40)]


@pytest.mark.parametrize("choose", [True, False])
@pytest.mark.parametrize("backend", ["hf", "vllm"])
def test_every_item_is_in_one_chunk(choose: bool, backend: str) -> None:
    cut = chunks(ITEMS, SuiteTask(choose), backend, 4)
    assert sorted(index for chunk in cut for index in chunk) == list(range(40))


def test_chunks_hold_one_prefix_longest_prompts_first() -> None:
    for chunk in chunks(ITEMS, SuiteTask(False), "hf", 4):
        assert len({ITEMS[index].prefix for index in chunk}) == 1
        assert len(chunk) <= 4
        lengths = [len(ITEMS[index].prompt) for index in chunk]
        assert lengths == sorted(lengths, reverse=True)


def test_likelihood_chunks_hold_several_batches() -> None:
    assert max(map(len, chunks(ITEMS, SuiteTask(True), "hf", 2))) == 2 * BATCHES_PER_CHUNK


def test_vllm_chunks_are_larger_than_a_batch() -> None:
    many = [Item(str(n), "q", "a", prefix=str(n)) for n in range(VLLM_CHUNK + 1)]
    assert [len(chunk) for chunk in chunks(many, SuiteTask(False), "vllm", 4)] == [VLLM_CHUNK, 1]


def test_chats_are_as_long_as_their_messages() -> None:
    def chat(text: str) -> Item:
        return Item(text, ({"role": "user", "content": text},), "a")

    assert chunks([chat("a"), chat("aaa"), chat("aa")], SuiteTask(False), "hf", 9) == [[1, 2, 0]]


@pytest.mark.parametrize(
    ("count", "each", "gpus", "backend", "tp", "expected"),
    [
        (1, None, 0, "hf", 2, 0),  # a copy divided over ranks on CPUs
        (2, None, 4, "hf", 2, 2),
        (2, None, 4, "vllm", 2, 2),
        (2, None, 4, "hf", 1, 1),
        (3, None, 2, "hf", 1, 0.5),
        (3, None, 0, "hf", 1, 0),
        (2, 0.25, 4, "hf", 1, 0.25),
    ],
)
def test_gpus_are_shared_by_the_copies(count, each, gpus, backend, tp, expected) -> None:
    assert RayExecutor(Shards(count, each))._gpus_each(gpus, backend, tp) == expected


@pytest.mark.parametrize(("backend", "gpus"), [("hf", 3), ("vllm", 0)])
def test_copies_that_need_more_gpus_than_there_are_are_refused(backend, gpus) -> None:
    with pytest.raises(ConfigError, match=rf"--tp: 2 shards x 2 GPUs are asked, the cluster has {gpus}; lower"):
        RayExecutor(Shards(2))._gpus_each(gpus, backend, 2)


CPU = Settings(device="cpu", dtype="fp32")
CHATS = [Item(str(n), ({"role": "user", "content": "ka lo " * n},), "a") for n in range(1, 4)]


@pytest.fixture
def executor() -> Iterator[LocalExecutor]:
    executor = LocalExecutor()
    yield executor
    executor.close()


def answers(executor: LocalExecutor) -> dict[int, Output]:
    return dict(pair for part in executor.run(SuiteTask(False, max_new_tokens=12), CHATS) for pair in part)


@pytest.mark.parametrize("change", ["chat template", "ends of text", "tokenizer", "weights"])
def test_reloading_replaces_every_part_of_the_model(executor: LocalExecutor, tmp_path: Path, change: str) -> None:
    first = write_tiny_model(tmp_path / "first")
    other = shutil.copytree(first, tmp_path / "other")
    executor.load(first, "hf", CPU)
    before = answers(executor)
    if change in ("chat template", "ends of text", "tokenizer"):
        ask_otherwise(other, change)
    else:
        write_tiny_model(other, seed=1)
    assert (first / "config.json").read_bytes() == (other / "config.json").read_bytes()
    executor.load(other, "hf", CPU)
    answered = answers(executor)
    assert answered == dict(HfBackend(other, CPU).generate(CHATS, max_new_tokens=12))
    assert answered != before
    executor.load(first, "hf", CPU)
    assert answers(executor) == before


def test_other_settings_are_taken(executor: LocalExecutor, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    for dtype in ("fp32", "bf16"):
        executor.load(folder, "hf", Settings(device="cpu", dtype=dtype))
        assert executor._backend.settings.dtype == dtype
        assert (executor.device, str(executor._backend.model.dtype)) == (
            "cpu",
            {"fp32": "torch.float32"}.get(dtype, "torch.bfloat16"),
        )


def test_executor_recovers_from_a_failed_load(executor: LocalExecutor, tmp_path: Path) -> None:
    good, bad = (write_tiny_model(tmp_path / name) for name in ("good", "bad"))
    (bad / "generation_config.json").write_text("{")
    executor.load(good, "hf", CPU)
    before = answers(executor)
    with pytest.raises(ConfigError, match=r"generation_config\.json must be JSON"):
        executor.load(bad, "hf", CPU)
    executor.load(good, "hf", CPU)
    assert answers(executor) == before
