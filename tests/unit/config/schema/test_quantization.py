"""The rules of quantised teachers, without a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distill_rl.config.facts import AdapterFacts, ModelFacts
from distill_rl.config.memory import student_memory, teacher_memory
from distill_rl.config.save import decisive
from distill_rl.config.schema import Config, EvaluateConfig, LoraConfig, ParallelConfig, StudentConfig, TeacherConfig
from distill_rl.config.schema.models import backend_problems, quantization_problems

FACTS = ModelFacts("llama", 1_500_000, 256, 512, 4, 8, 4, 1000, False, 3_000_000)


def config_of(evaluate: EvaluateConfig | None = None, **settings: object) -> Config:
    return Config(teachers=[TeacherConfig(name="big", model="t", **settings)], evaluate=evaluate or EvaluateConfig())  # type: ignore[arg-type]


def lines_about_it(config: Config) -> list[str]:
    of_backend = [line for line in backend_problems(config) if line.startswith("teachers.0.quantization:")]
    return [*of_backend, *quantization_problems(config)]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"backend": "vllm"}, "teachers.0.quantization: is a setting of backend hf; vllm reads a quantised checkpoint"),
        ({"backend": "endpoint"}, "teachers.0.quantization: is a setting of backend hf; the server of an endpoint"),
        ({"quantization": "as_stored", "parallel": ParallelConfig(tp=2)}, "teachers.0.parallel.tp: must be 1"),
        ({"quantization": "as_stored", "export": "hidden"}, "teachers.0.export: hidden needs the output layer"),
        (
            {"evaluate": EvaluateConfig(suites=["mmlu"], teachers=True)},
            "evaluate.teachers: evaluates teachers with all",
        ),
    ],
)
def test_what_does_not_go_together_is_one_line(settings: dict, line: str) -> None:
    (found,) = lines_about_it(config_of(**{"quantization": "int8", **settings}))
    assert found.startswith(line), found
    assert lines_about_it(config_of(**{**settings, "quantization": None})) == []


@pytest.mark.parametrize("backend", ["hf", "store"])
def test_a_teacher_here_or_from_a_store_may_be_quantised_and_split(backend: str) -> None:
    config = config_of(backend=backend, quantization="int4", export="hidden", parallel=ParallelConfig(tp=2))
    assert lines_about_it(config) == []


def test_quantization_decides_a_runs_numbers_and_its_absence_is_no_setting() -> None:
    assert not any("quantization" in key for key in decisive(config_of()))
    assert decisive(config_of(quantization="int8"))["teachers.0.quantization"] == "int8"


def test_the_estimate_counts_the_bits_of_the_layers_alone() -> None:
    def weights(quantization: str | None, tp: int = 1) -> int:
        config = config_of(quantization=quantization, parallel=ParallelConfig(tp=tp))
        return teacher_memory(config, config.teachers[0], FACTS, on_gpu=True).weights

    tables, layers = 2 * 1000 * 256, 1_500_000 - 2 * 1000 * 256
    assert weights(None) == 2 * 1_500_000
    assert weights("int8") == weights("fp8") == 2 * tables + int(layers * (1 + 4 / 256))
    assert weights("int4") == 2 * tables + int(layers * (0.5 + 3 / 64))
    assert weights("int4", tp=2) == pytest.approx(weights("int4") / 2, abs=1)
    assert weights("as_stored") == FACTS.bytes_on_disk
    whole = config_of()
    made = teacher_memory(
        config_of(quantization="int8"), config_of(quantization="int8").teachers[0], FACTS, on_gpu=True
    )
    plain = teacher_memory(whole, whole.teachers[0], FACTS, on_gpu=True)
    assert made.scratch == 2 * 256 * 512
    assert replace(made, weights=plain.weights, scratch=0) == plain


def test_the_estimate_of_a_student_with_adapters_beside_four_bits() -> None:
    """Layers take 4 bits on every data-parallel rank; embeddings and output layer are sharded in the compute dtype."""
    facts = replace(FACTS, adapters=AdapterFacts(28, 50_000, FACTS.parameters))
    tables, layers = 2 * 1000 * 256, 1_500_000 - 2 * 1000 * 256
    for dp in (1, 2):
        config = Config(student=StudentConfig(lora=LoraConfig(), quantization="int4", parallel=ParallelConfig(dp=dp)))
        found = student_memory(config, facts, on_gpu=True)
        assert found.weights == 4 * 50_000 // dp + 2 * tables // dp + int(layers * (0.5 + 3 / 64))
        assert found.scratch == 2 * 256 * 512


def test_autograd_keeps_a_quantised_mixtures_experts() -> None:
    """Those of all layers, or of the one that is recomputed."""
    facts = replace(
        FACTS, adapters=AdapterFacts(16, 50_000, FACTS.parameters), expert_parameters=800_000, experts_per_token=2
    )
    config = Config(student=StudentConfig(lora=LoraConfig(), quantization="int8"))
    assert student_memory(config, facts, on_gpu=True).scratch == 2 * 256 * 512 + 2 * 800_000
    config.student.activation_checkpointing = True
    assert student_memory(config, facts, on_gpu=True).scratch == 2 * 256 * 512 + 2 * 200_000
