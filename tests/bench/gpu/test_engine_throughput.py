"""Engine-level throughput, as its tiny twin on a CPU: what is counted, what is timed, and what happens to failures."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distill_rl.config.schema import Config
from distill_rl.losses.cross_tokenizer.chunks import pair as pair_chunks
from distill_rl.parallel.mesh import World, close_world, open_world
from distill_rl.scaling.model import PHASES, Step
from distill_rl.student.objective import flat_chunks
from tests.bench.gpu import engine_throughput as bench
from tests.bench.gpu import engines as engines_module
from tests.bench.gpu.engines import Engines, made_up_chunks, made_up_projection, phase_seconds, write_model
from tests.bench.gpu.shapes import PAIRS, TINY_LLAMA, TINY_PAIRS, Pair
from tests.bench.gpu.timing import Clock
from tests.helpers.load import load_model

CPU = torch.device("cpu")
BODY, HEAD, FORWARD, LOSS, BACKWARD, OPTIMIZER = PHASES


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return bench.measure(CPU, tiny=True, budget_s=60.0)


@pytest.fixture
def world() -> Iterator[World]:
    opened = open_world(rank=0, dp=1, tp=1)
    yield opened
    close_world(opened)


def test_both_pairs_are_measured_and_every_token_counted(measured: dict[str, Any]) -> None:
    assert list(measured["pairs"]) == list(PAIRS)
    tokens = bench.TINY.rows * bench.TINY.length
    for name, found in measured["pairs"].items():
        assert found["status"] == "ok"
        assert found["labelled_tokens_per_step"] == tokens
        assert found["tokens_per_second"] * found["seconds_per_step"] == pytest.approx(tokens)
        assert found["microseconds"]["measured"] == pytest.approx(1e6 / found["tokens_per_second"])
        flops = TINY_PAIRS[name].flops_per_token(bench.TINY.length) * found["tokens_per_second"]
        assert found["mfu"] == pytest.approx(flops / measured["card"]["matmul"])
        assert 1 <= found["steps"] <= bench.MOST_STEPS
        # An untrained student knows nothing: KD of a nearly uniform teacher is near 0, and never negative.
        assert 0 <= found["loss"] < math.log(TINY_PAIRS[name].student.columns)
    assert "chunks" in measured["pairs"]["qwen3-4b"]["loss_over"]
    assert measured["pairs"]["llama-8b"]["loss_over"] == "tokens"


def test_every_phase_stands_beside_its_prediction(measured: dict[str, Any]) -> None:
    for found in measured["pairs"].values():
        assert list(found["phases"]) == list(PHASES)
        for row in (*found["phases"].values(), found["microseconds"]):
            assert row["measured"] > 0
            assert row["predicted"] > 0
            assert row["ratio"] == pytest.approx(row["measured"] / row["predicted"])
        predicted = sum(row["predicted"] for row in found["phases"].values())
        assert found["microseconds"]["predicted"] == pytest.approx(predicted)


def test_the_figures_are_json_and_the_report_shows_them(measured: dict[str, Any]) -> None:
    assert json.loads(json.dumps(measured, allow_nan=False)) == measured
    text = bench.report(measured)
    for found in measured["pairs"].values():
        assert found["pair"] in text
        assert f"{found['tokens_per_second']:,.0f} tokens/s" in text
    rows = [line.partition("  ")[0] for line in text.splitlines()]
    assert all(rows.count(phase) == 2 for phase in PHASES)


@pytest.mark.parametrize("fused", ["on", "off"])
def test_phases_are_marked_in_the_order_of_the_work(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, fused: str
) -> None:
    plain = engines_module._config
    monkeypatch.setattr(engines_module, "_config", lambda *arguments: with_loss(plain(*arguments), fused))
    step, marks = Step(rows=6, micro_batch=2, length=16, top_k=4), []
    mark = Clock.mark

    def listed(clock: Clock, name: str) -> None:
        marks.append(name)
        mark(clock, name)

    monkeypatch.setattr(Clock, "mark", listed)
    engines = Engines(TINY_PAIRS["qwen3-4b"], step, world, tmp_path, 4)
    phase_seconds(engines, CPU, steps=1)
    # The loss is marked twice: its value, and the gradient of the hidden states.
    expected = ["start", *[BODY, HEAD] * 3, *[FORWARD, LOSS, LOSS, BACKWARD] * 3, OPTIMIZER]
    assert marks == expected
    engines.step()
    assert marks == expected, "the hooks are gone"


def with_loss(config: Config, fused: str) -> Config:
    return replace(config, loss=replace(config.loss, fused=fused))


def test_models_are_loaded_without_files_of_their_size(tmp_path: Path, world: World) -> None:
    write_model(tmp_path, TINY_LLAMA, 64)
    model = load_model(tmp_path, world, role="teacher", dtype="bf16")
    assert sum(weight.numel() for weight in model.parameters() if weight.ndim > 1) == TINY_LLAMA.parameters
    stored = (tmp_path / "model.safetensors").stat()
    assert stored.st_size > 2 * TINY_LLAMA.parameters
    assert stored.st_blocks * 512 < stored.st_size / 4, "zeros are holes"


def test_weights_are_drawn_and_the_student_learns(tmp_path: Path, world: World) -> None:
    step = Step(rows=2, micro_batch=1, length=16, top_k=8)
    pair = TINY_PAIRS["llama-8b"]
    engines = Engines(Pair(pair.student, pair.teacher), step, world, tmp_path, 30)
    for engine in (engines.student, engines.teacher):
        for weight in engine.model.parameters():
            assert weight.std() > 0.01 if weight.ndim > 1 else torch.equal(weight, torch.ones_like(weight))
    engines.student.schedule.peak = 1e-2
    losses = [engines.step()["train/loss"].value for _ in range(20)]
    assert losses[-1] < losses[0] / 2


def test_made_up_chunks_and_projection_are_valid() -> None:
    step = Step(rows=3, micro_batch=1, length=100, top_k=4)
    chunks = made_up_chunks(step)
    flat = flat_chunks(chunks, CPU)
    pairing = pair_chunks(flat, 300, 300, validate=True)
    assert pairing.count == chunks.num_chunks
    assert len(pairing.one_to_one) == chunks.num_one_to_one
    assert int((flat.student >= 0).sum()) == chunks.num_covered
    assert 0.6 < chunks.num_one_to_one / chunks.num_chunks < 0.9
    pair = TINY_PAIRS["qwen3-4b"]
    projection = made_up_projection(pair)
    assert (projection.num_student, projection.num_teacher) == (pair.student.columns, pair.teacher.columns)
    assert np.allclose(np.add.reduceat(projection.values, projection.indptr[:-1]), 1)
    assert projection.indices.max() < pair.teacher.tokens


def test_a_pair_out_of_memory_leaves_the_other_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engines(bench.Engines):
        def __init__(self, pair: Pair, *rest: Any):
            if pair is TINY_PAIRS["qwen3-4b"]:
                raise RuntimeError("a layer failed") from torch.OutOfMemoryError("CUDA out of memory")
            super().__init__(pair, *rest)

    monkeypatch.setattr(bench, "Engines", Engines)
    found = bench.measure(CPU, tiny=True, budget_s=60.0)
    assert found["pairs"]["qwen3-4b"] == {"pair": "tiny Llama ← tiny Qwen3", "status": "out of memory"}
    assert found["pairs"]["llama-8b"]["status"] == "ok"
    assert "tiny Llama ← tiny Qwen3: out of memory" in bench.report(found)


def test_without_time_nothing_is_run_and_it_is_said() -> None:
    found = bench.measure(CPU, tiny=True, budget_s=0.0)
    assert [each["status"] for each in found["pairs"].values()] == ["no time left"] * 2


def test_a_failure_is_named_and_ends_with_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("a shape is wrong")

    monkeypatch.setattr(bench, "Engines", fail)
    found = bench.measure(CPU, tiny=True, budget_s=60.0, pairs=["llama-8b"])["pairs"]["llama-8b"]
    assert found["status"] == "failed: ValueError: a shape is wrong"
    assert "in fail" in found["traceback"]
    assert bench.main(["--device", "cpu", "--tiny", "--pair", "llama-8b"]) == 1
    assert "failed: ValueError: a shape is wrong" in capsys.readouterr().out


def test_the_program_writes_only_where_it_is_told_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    sizes = ["--rows", "2", "--micro-batch", "1", "--length", "16", "--top-k", "4"]
    assert bench.main(["--device", "cpu", "--tiny", "--pair", "llama-8b", *sizes, "--out", str(out)]) == 0
    written = json.loads(out.read_text("utf-8"))
    assert written["step"] == {"rows": 2, "micro_batch": 1, "length": 16, "top_k": 4}
    assert list(written["pairs"]) == ["llama-8b"]
    assert written["pairs"]["llama-8b"]["labelled_tokens_per_step"] == 32
    assert {"torch", "commit"} <= set(written["environment"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu"], "models of real shape need a GPU; add --tiny"),
        (["--device", "cpu", "--tiny", "--rows", "3"], "--rows must be a multiple of --micro-batch"),
        (["--device", "cpu", "--tiny", "--length", "-1"], "all sizes positive"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("engine_throughput: error: ")
    assert message in line
