"""Models loaded one after another into the engine that an executor keeps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: bash launch/test.sh vllm")


from distill_rl.evals.backends.base import Output, Settings
from distill_rl.evals.backends.hf import HfBackend
from distill_rl.evals.executor import LocalExecutor, SuiteTask
from distill_rl.evals.suites.base import Item
from tests.helpers.models import ask_otherwise, write_tiny_model
from tests.helpers.tokenizers import seeded_words
from tests.vllm.material import SHAPE

FP32 = Settings(batch_size=32, dtype="fp32")
LIMIT = 16
CHATS = [
    Item(str(n), ({"role": "user", "content": word},), "", choices=(" ka", " lo"))
    for n, word in enumerate(seeded_words(9, 20))
]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("first"), seed=1, **SHAPE)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def executor() -> Iterator[LocalExecutor]:
    executor = LocalExecutor()
    yield executor
    executor.close()


def outputs(executor: LocalExecutor, task: SuiteTask) -> list[Output]:
    by_index = dict(pair for part in executor.run(task, CHATS) for pair in part)
    return [by_index[index] for index in range(len(CHATS))]


def assert_like_hf(executor: LocalExecutor, folder: Path) -> None:
    """Compares prompts, stop texts, stop tokens and scores with `hf`."""
    hf = HfBackend(folder, FP32)
    written = [output for _, output in sorted(hf.generate(CHATS, max_new_tokens=LIMIT))]
    stop = (max((output.text for output in written), key=len)[2:4],)
    for stops in ((), stop):
        ours = [output for _, output in sorted(hf.generate(CHATS, max_new_tokens=LIMIT, stop=stops))]
        theirs = outputs(executor, SuiteTask(False, LIMIT, stops))
        assert [output.prompt_tokens for output in theirs] == [len(hf.encoder.encode(item)) for item in CHATS]
        assert sum(left != right for left, right in zip(ours, theirs)) <= 1, "a tie at most"
    scores = [output for _, output in sorted(hf.choose(CHATS))]
    for left, right in zip(scores, outputs(executor, SuiteTask(True))):
        assert left.logprobs == pytest.approx(right.logprobs, abs=1e-3)
        context, _ = hf.encoder.choices(CHATS[scores.index(left)])
        assert left.prompt_tokens == right.prompt_tokens == len(context)


@pytest.mark.parametrize("change", ["chat template", "ends of text", "tokenizer", "rotation"])
def test_models_of_one_shape_that_differ_otherwise(
    executor: LocalExecutor, first: Path, tmp_path: Path, change: str
) -> None:
    other = shutil.copytree(first, tmp_path / "other")
    executor.load(first, "vllm", FP32)
    assert_like_hf(executor, first)
    before = outputs(executor, SuiteTask(False, LIMIT))
    running = executor._backend._engine  # type: ignore[union-attr]
    if change in ("chat template", "ends of text", "tokenizer"):
        ask_otherwise(other, change)
    else:
        config = json.loads((other / "config.json").read_text())
        config["rope_parameters"]["rope_theta"] = 50.0
        (other / "config.json").write_text(json.dumps(config))
    executor.load(other, "vllm", FP32)
    assert (executor._backend._engine is running) == (change in ("chat template", "ends of text"))  # type: ignore[union-attr]
    assert_like_hf(executor, other)
    assert outputs(executor, SuiteTask(False, LIMIT)) != before
    executor.load(first, "vllm", FP32)
    assert outputs(executor, SuiteTask(False, LIMIT)) == before
