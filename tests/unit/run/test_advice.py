"""Hints: hidden states or draws, where a top k holds too little of the teacher's probability; a learning rate that jumps."""

import json
from pathlib import Path
from typing import Any

import pytest

from distill_rl.config.schema import Config, ScheduleConfig, TeacherConfig
from distill_rl.observe.metrics import Metric
from distill_rl.run.steps import advice, moved_rate
from distill_rl.types import RunPaths


def configured(export: str = "topk", divergence: str = "forward_kl", **teacher: str) -> Config:
    config = Config(teachers=[TeacherConfig(name="big", export=export, **teacher)])
    config.loss.top_k, config.loss.divergence = 32, divergence
    return config


def test_a_top_k_with_little_of_the_probability_is_pointed_out():
    (line,) = advice(configured(), {"train/teacher_mass": Metric(0.74, "mean", 10)})
    assert "the top 32 of teacher big hold 74% of its probability" in line
    assert "teachers.0.export=hidden" in line
    assert "teachers.0.export=sampled loss.draws=32" in line


@pytest.mark.parametrize(
    ("config", "mass"),
    [
        (configured(), Metric(0.95, "mean", 10)),
        (configured(), Metric(0.0, "mean", 0)),
        (configured(), None),
        (configured("sampled"), Metric(0.5, "mean", 10)),
        (configured("logits"), Metric(1.0, "mean", 10)),
        (configured(backend="vllm"), Metric(0.5, "mean", 10)),
        (configured(backend="endpoint"), Metric(0.5, "mean", 10)),
        (configured(cache="targets"), Metric(0.5, "mean", 10)),
        (configured(divergence="reverse_kl"), Metric(0.5, "mean", 10)),
        (Config(), Metric(0.0, "mean", 10)),
    ],
)
def test_there_is_no_hint_where_it_would_not_help_or_not_work(config, mass):
    assert advice(config, {} if mass is None else {"train/teacher_mass": mass}) == []


@pytest.mark.parametrize(
    ("settings", "total", "said"),
    [
        ({}, 10, None),
        ({}, 20, "the learning rate was 0.0003 at step 8 and goes on at 0.0006: of 20 steps, step 8 has 0.00065 "),
        ({"steps": 10}, 20, None),
        ({"kind": "constant"}, 20, None),
        ({}, 8, None),
    ],
)
def test_a_rate_that_does_not_go_on_where_the_run_stopped_is_said(
    tmp_path: Path, settings: dict[str, Any], total: int, said: str | None
) -> None:
    """A run of ten steps is resumed after the eighth, by hand: 1e-3 falls linearly from the first step on."""
    config, paths = Config(), RunPaths(tmp_path)
    config.optimizer.lr = 1e-3
    config.schedule = ScheduleConfig(**{"kind": "linear", "warmup_steps": 0, "min_lr_ratio": 0.0, **settings})
    rate = 1e-3 if settings.get("kind") == "constant" else 1e-3 * (1 - 7 / 10)
    paths.metrics.write_text("".join(json.dumps({"step": step, "train/lr": rate}) + "\n" for step in (7, 8)))
    line = moved_rate(config, paths, 8, total)
    assert (line is None) == (said is None), line
    assert line is None or line.startswith(str(said))
