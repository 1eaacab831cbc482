"""The real vLLM against the backend `hf`, in fp32 on the same ids; run by `bash launch/test.sh vllm`."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed here: bash launch/test.sh vllm")

from distill_rl.errors import ConfigError
from distill_rl.evals.backends.base import Backend, Output, Settings, choice_rows
from distill_rl.evals.backends.hf import HfBackend
from distill_rl.evals.backends.vllm import VllmBackend, _scoring
from distill_rl.evals.suites.base import Item
from tests.helpers.models import write_tiny_model
from tests.vllm.material import LETTERS, POSITIONS, SHAPE, items, train

FP32 = Settings(batch_size=32, dtype="fp32")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="session")
def hf(model: Path) -> HfBackend:
    return HfBackend(model, FP32)


@pytest.fixture(scope="session")
def engine(model: Path) -> Iterator[VllmBackend]:
    engine = VllmBackend(model, FP32)
    yield engine
    engine.close()


def choose(backend: Backend, questions: Sequence[Item]) -> list[Output]:
    return in_order(backend.choose(questions), len(questions))


def generate(backend: Backend, questions: Sequence[Item], limit: int, stop: Sequence[str] = ()) -> list[Output]:
    return in_order(backend.generate(questions, max_new_tokens=limit, stop=stop), len(questions))


def in_order(results: Iterator[tuple[int, Output]], count: int) -> list[Output]:
    outputs = list(results)
    assert sorted(index for index, _ in outputs) == list(range(count)), "every item once"
    return [output for _, output in sorted(outputs, key=lambda pair: pair[0])]


def letter(output: Output) -> str:
    return LETTERS[output.logprobs.index(max(output.logprobs))]


@pytest.mark.parametrize(("shots", "space"), [(5, True), (5, False), (0, False)])
def test_the_same_letters_as_hf(
    hf: HfBackend, engine: VllmBackend, shots: int, space: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = items(240, shots=shots, space=space)
    ours, theirs = choose(hf, questions), choose(engine, questions)
    letters = [letter(output) for output in theirs]
    histogram = Counter(letters)
    right = sum(letter == item.answer for letter, item in zip(letters, questions))
    different = [item.id for item, left, right in zip(questions, ours, theirs) if letter(left) != letter(right)]
    with capsys.disabled():
        counts = ", ".join(f"{name} {histogram[name]}" for name in LETTERS)
        print(
            f"\n{shots} shots: letters {counts}; right {right} of {len(letters)}; differ from hf: {different or 'none'}"
        )
    assert max(histogram.values()) <= 0.8 * len(letters)
    assert right > 0.5 * len(letters), "the model has learned something"
    assert len(different) <= 0.01 * len(letters)
    for left, right in zip(ours, theirs):
        assert replace(left, logprobs=(), run_tokens=0) == replace(right, logprobs=(), run_tokens=0)
        assert left.logprobs == pytest.approx(right.logprobs, abs=1e-3)


def test_choices_of_several_tokens_score_like_hf(hf: HfBackend, engine: VllmBackend) -> None:
    choices = (" ka lo", " A\nBecause", " sol be ru 42", " B")
    questions = [replace(item, choices=choices) for item in items(12, shots=1, space=True)]
    for left, right in zip(choose(hf, questions), choose(engine, questions)):
        assert left.logprobs == pytest.approx(right.logprobs, abs=1e-3)
        assert left.num_tokens == right.num_tokens


def limit_for_some(outputs: Sequence[Output]) -> int:
    """A number of tokens that ends some outputs, but not all."""
    lengths = [output.num_tokens for output in outputs]
    assert max(lengths) > min(lengths) + 1
    return (min(lengths) + max(lengths)) // 2


def stop_for_half(outputs: Sequence[Output]) -> str:
    """The three characters that most nearly half of the outputs without an end contain. Weights differ by machine."""
    texts = [output.text for output in outputs if output.truncated]
    counts = Counter(part for text in texts for part in {text[i : i + 3] for i in range(len(text) - 2)})
    return min(counts, key=lambda part: (abs(2 * counts[part] - len(texts)), part))


@pytest.mark.parametrize("with_stops", [False, True])
def test_the_same_completions_as_hf(
    hf: HfBackend, engine: VllmBackend, with_stops: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = items(120, shots=1, space=True, seed=2)
    limit = limit_for_some(generate(hf, questions, 24))
    stop = (stop_for_half(generate(hf, questions, limit)), "never written") if with_stops else ()
    ours, theirs = generate(hf, questions, limit, stop), generate(engine, questions, limit, stop)
    ties = [item.id for item, left, right in zip(questions, ours, theirs) if left != right]
    with capsys.disabled():
        ended = sum(not output.truncated for output in theirs)
        print(f"\nstop {stop}: {len(ties)} of {len(questions)} differ {ties}; {ended} ended by themselves")
    assert len(ties) <= 0.05 * len(questions)
    assert len({output.text for output in theirs}) >= 5
    assert {output.truncated for output in theirs} == {True, False}
    assert not any(text in output.text for output in theirs for text in stop)


def test_too_long_prompts_are_reported_and_others_are_limited(hf: HfBackend, engine: VllmBackend) -> None:
    lengths = (POSITIONS + 9, POSITIONS, POSITIONS - 1, POSITIONS - 5, 8)
    questions = [Item(f"row {count}", "\x01" * count, "") for count in lengths]
    ours, theirs = generate(hf, questions, 12), generate(engine, questions, 12)
    assert [output.too_long for output in theirs] == [True, True, False, False, False]
    assert ours == theirs
    questions = [replace(item, choices=("\x02", "\x03\x04")) for item in questions]
    assert [output.too_long for output in choose(engine, questions)] == [True, True, True, False, False]
    assert [output.too_long for output in choose(hf, questions)] == [True, True, True, False, False]


def test_shared_prefixes_are_taken_from_the_cache(engine: VllmBackend) -> None:
    questions = items(40, shots=5, space=False)
    rows = [row for item in questions for row in choice_rows(0, item.prefix, *engine.encoder.choices(item))]
    results = engine._engine.run([row.ids for row in rows], [_scoring(row) for row in rows])
    cached = sum(result.num_cached_tokens for _, result in results)
    assert cached > 0.5 * sum(len(row.ids) for row in rows)


def test_abandoned_iteration_aborts_its_requests(hf: HfBackend, engine: VllmBackend) -> None:
    questions = items(40, shots=0, space=True)
    results = engine.generate(questions, max_new_tokens=24)
    assert len(list(islice(results, 2))) == 2
    results.close()
    assert choose(engine, questions[:3])[0].logprobs == pytest.approx(choose(hf, questions[:3])[0].logprobs, abs=1e-3)


def test_running_engine_loads_new_weights(hf: HfBackend, engine: VllmBackend, model: Path, tmp_path: Path) -> None:
    questions = items(24, shots=5, space=False)
    other = write_tiny_model(tmp_path / "other", seed=5, **SHAPE)  # type: ignore[arg-type]
    before, running = choose(engine, questions), engine._engine
    engine.reload(shutil.copytree(model, tmp_path / "copy"))
    shutil.rmtree(tmp_path / "copy")  # like the copies of a student after their evaluation
    engine.reload(other)
    assert engine._engine is running, "no second engine"
    assert engine.folder == other
    for left, right in zip(choose(HfBackend(other, FP32), questions), choose(engine, questions)):
        assert left.logprobs == pytest.approx(right.logprobs, abs=1e-3)
    engine.reload(model)
    for left, right in zip(before, choose(engine, questions)):
        assert left.logprobs == pytest.approx(right.logprobs, abs=1e-5)


def test_engine_restarts_if_weights_cannot_be_reloaded(engine: VllmBackend, model: Path, tmp_path: Path) -> None:
    questions = items(8, shots=0, space=False)
    before = choose(engine, questions)
    deeper = write_tiny_model(tmp_path / "deeper", **SHAPE | {"layers": 3})  # type: ignore[arg-type]
    tied = [write_tiny_model(tmp_path / str(seed), seed=seed, tie=True, **SHAPE) for seed in (1, 2)]  # type: ignore[arg-type]
    for folder in (deeper, *tied, model):
        running = engine._engine
        engine.reload(folder)
        assert engine._engine is not running
        for left, right in zip(choose(HfBackend(folder, FP32), questions), choose(engine, questions)):
            assert left.logprobs == pytest.approx(right.logprobs, abs=1e-3)
    assert [output.logprobs for output in choose(engine, questions)] == [output.logprobs for output in before]


def test_a_device_of_another_build_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="device: "):
        VllmBackend(model, Settings(device="cuda:3"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs have attention for these heads")
def test_unsupported_heads_are_refused_before_any_prompt(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"vllm on CPUs needs attention heads of 32, 64.*; got 8; take the backend hf"
    ):
        VllmBackend(write_tiny_model(tmp_path))
