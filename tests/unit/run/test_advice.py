"""The hint that the first step gives: hidden states or draws, where a top k holds too little of the teacher's probability."""

import pytest

from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.observe.metrics import Metric
from distill_rl.run.advice import advice


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
