"""Problems with attention and with the width of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma2Config, GPT2Config, LlamaConfig

from distill_rl.config.schema import Config, ParallelConfig, StudentConfig, TeacherConfig
from distill_rl.models import attention
from distill_rl.models.files import read_config
from distill_rl.preflight.models import attention_problems, class_problems, stored_problems, width_problems
from distill_rl.run.opened import OpenedModel, OpenedTeacher
from tests.helpers.zoo import write_family

LLAMA = LlamaConfig(hidden_size=512, num_attention_heads=8)


def problems(
    student: str = "auto", teacher: str = "auto", *, gpus: int = 1, model: Any = LLAMA, **student_settings: Any
):
    models = [
        opened_student(model, attention=student, **student_settings),
        OpenedModel("teachers.0", "teacher t", TeacherConfig(model="t", attention=teacher), config=LLAMA),
    ]
    return list(attention_problems(Config(), models, gpus=gpus))


def opened_student(config: Any, **settings: Any) -> OpenedModel:
    return OpenedModel("student", "student", StudentConfig(model="s", **settings), config=config)


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The packages that count as installed."""
    names: set[str] = set()
    monkeypatch.setattr(attention, "installed", lambda name: name in names)
    return names


@pytest.mark.parametrize("name", ["auto", "sdpa", "eager"])
def test_attention_for_cpus_is_no_problem(name: str) -> None:
    assert problems(name, name, gpus=0) == []


def flash_attn(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package flash_attn for processes that this one starts, which runs `code` when it is imported."""
    package = folder / "flash_attn"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    attention.importable.cache_clear()


def test_flash_attention_must_work_and_not_only_be_there(
    packages: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages.add("flash_attn")
    flash_attn(tmp_path, "raise ImportError('undefined symbol: _ZN3c10')", monkeypatch)
    (line,) = problems("flash_attention_2")
    assert line == (
        "student.attention: needs the package flash_attn, which is installed but cannot be imported "
        "(ImportError: undefined symbol: _ZN3c10); got flash_attention_2; install the build for this torch and CUDA, "
        "or set student.attention=auto"
    )


def test_flash_attention_needs_its_package_and_bf16(
    packages: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash_attn(tmp_path, "", monkeypatch)
    wanted = (
        "{key}.attention: needs the package flash_attn, which is not installed; got flash_attention_2; "
        "pip install flash-attn, or set {key}.attention=auto"
    )
    lines = problems("flash_attention_2", "flash_attention_2")
    assert lines == [wanted.format(key=key) for key in ("student", "teachers.0")]
    packages.add("flash_attn")
    assert problems("flash_attention_2", "flash_attention_2") == []
    (line,) = problems("flash_attention_2", dtype="fp32")
    assert line.startswith("student.attention: needs student.dtype: bf16; got flash_attention_2")


def test_varlen_is_refused_on_cpus() -> None:
    (line,) = problems(teacher="varlen", gpus=0)
    assert line == "teachers.0.attention: needs a GPU; none is visible; got varlen; set teachers.0.attention=auto"


def test_varlen_is_allowed_with_a_cluster() -> None:
    config = Config()
    config.ray.address = "auto"
    assert list(attention_problems(config, [opened_student(LLAMA, attention="varlen")], gpus=0)) == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"dtype": "fp32"}, "not in fp32"),
        ({"model": Gemma2Config()}, "soft cap"),
        ({"model": GPT2Config()}, "attention dropout"),
        ({"model": LlamaConfig(hidden_size=80, num_attention_heads=8)}, "not of 10"),
    ],
)
def test_varlen_is_refused_for_unsupported_models(settings: dict[str, Any], expected: str) -> None:
    (line,) = problems("varlen", **settings)
    assert line.startswith("student.attention: ")
    assert expected in line
    assert line.endswith("got varlen; set student.attention=auto")


def test_sdpa_is_refused_for_a_soft_cap_unless_rows_are_divided() -> None:
    (line,) = problems("sdpa", model=Gemma2Config())
    assert line == (
        "student.attention: sdpa has no soft cap on attention scores, which the model needs (attn_logit_softcapping=50); "
        "got sdpa; set student.attention=auto"
    )
    assert problems("sdpa", model=Gemma2Config(), parallel=ParallelConfig(sp=2)) == []


@pytest.mark.parametrize(
    ("family", "settings", "longest", "named"),
    [
        ("llama4_text", {"attention_chunk_size": 64}, 64, "attention_chunk_size=64"),
        ("llama4_text", {"attention_chunk_size": 64, "no_rope_layers": [1, 0]}, 64, "attention_chunk_size=64"),
        (
            "llama4_text",
            {"attention_chunk_size": 64, "floor_scale": 64, "no_rope_layers": [1, 0]},
            63,
            "floor_scale=64",
        ),
        ("llama4_text", {"no_rope_layers": [1, 0]}, 8191, "floor_scale=8192"),
        (
            "llama4_text",
            {"no_rope_layers": [1, 0], "attn_temperature_tuning": False},
            8192,
            "attention_chunk_size=8192",
        ),
        ("minimax_m3_vl_text", {}, 128, "index_block_size=128"),
    ],
)
def test_documents_are_not_packed_beyond_what_counts_from_the_start_of_a_row(
    tmp_path: Path, family: str, settings: dict[str, Any], longest: int, named: str
) -> None:
    folder, config = write_family(tmp_path, family, **settings), Config()
    teacher = TeacherConfig(model="t", max_length=longest + 1)
    student, other = (
        OpenedModel(key, key, settings, config=read_config(folder), folder=folder)
        for key, settings in (("student", StudentConfig(model="s")), ("teachers.0", teacher))
    )
    config.data.packing, config.data.max_length = True, longest + 1
    rule = "counts positions from the start of a row, wherever packed documents begin"
    wanted = (
        f"data.packing: {{0}} {rule} ({named}); got true; set data.packing=false, or {{1}}.max_length={longest} or less"
    )
    assert list(class_problems(config, [student], gpus=0)) == [wanted.format("student", "data")]
    config.data.max_length = longest
    assert list(class_problems(config, [student, other], gpus=0)) == [wanted.format("teachers.0", "teachers.0")]
    # A checkpoint with quantised weights has the same code.
    other.config.quantization_config = {"quant_method": "bitsandbytes"}
    assert list(class_problems(config, [other], gpus=0)) == [wanted.format("teachers.0", "teachers.0")]
    config.data.packing = False
    assert list(class_problems(config, [student, other], gpus=0)) == []


@pytest.mark.parametrize(
    ("method", "missing", "verb"), [("hqq", ["hqq"], "is"), ("gptq", ["optimum", "gptqmodel"], "are")]
)
def test_packages_that_quantised_weights_need_are_named(
    tmp_path: Path, method: str, missing: list[str], verb: str
) -> None:
    settings, config = (
        TeacherConfig(model="t", quantization="as_stored"),
        LlamaConfig(quantization_config={"quant_method": method}),
    )
    teacher = OpenedTeacher("teachers.0", "teacher t", settings, config=config, folder=tmp_path)
    assert list(stored_problems([teacher], gpus=0)) == [
        f"teachers.0.quantization: {method} weights need {' and '.join(missing)}, which {verb} not installed; "
        f"got as_stored; pip install {' '.join(missing)}"
    ]


@pytest.mark.parametrize(
    ("length", "positions", "gpus", "expected"),
    [
        (1000, 1024, 1, None),
        (1001, 1100, 1, None),
        (1025, 1100, 1, "use 1024 or less"),
        (1025, 1100, 0, None),
        (1100, 1100, 0, "use 1096 or less"),
        (2000, 1100, 0, "use 1100 or less"),
        (100, 100, 1, "take another model"),
    ],
)
def test_rows_must_fit_a_table_of_positions(length: int, positions: int, gpus: int, expected: str | None) -> None:
    config = Config()
    config.data.max_length = length
    lines = list(width_problems(config, opened_student(GPT2Config(n_positions=positions)), gpus=gpus))
    assert len(lines) == (expected is not None)
    assert all(line.startswith("data.max_length: ") and line.endswith(str(expected)) for line in lines)
    if length <= positions:  # rotary positions go on
        other = LlamaConfig(max_position_embeddings=positions)
        assert list(width_problems(config, opened_student(other), gpus=gpus)) == []


def longer(kind: str) -> LlamaConfig:
    """A model of 64 positions with rotary frequencies for up to 256."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "dynamic":
        return LlamaConfig(max_position_embeddings=64, rope_parameters=rope)
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "original_max_position_embeddings": 64}
    return LlamaConfig(max_position_embeddings=256, rope_parameters={**rope, **factors})


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rows_may_be_as_long_as_the_frequencies_reach(kind: str) -> None:
    config = Config()
    config.data.max_length = 256
    assert list(width_problems(config, opened_student(longer(kind)), gpus=0)) == []
    config.data.max_length = 257
    (line,) = width_problems(config, opened_student(longer(kind)), gpus=0)
    assert line == "data.max_length: must not exceed the 256 positions of student; got 257; use 256 or less"


@pytest.mark.parametrize(
    ("kind", "length", "said"),
    [
        ("longrope", 63, None),
        (
            "longrope",
            64,
            "while texts of up to 64 tokens have another one (longrope); got vllm; use data.max_length=63",
        ),
        (
            "longrope",
            200,
            "while texts of up to 64 tokens have another one (longrope); got vllm; use data.max_length=63",
        ),
        (
            "dynamic",
            10,
            "those of the model (dynamic) follow from each text's length; got vllm; set teachers.0.backend=hf",
        ),
    ],
)
def test_a_teacher_in_vllm_has_the_frequencies_of_all_rows(kind: str, length: int, said: str | None) -> None:
    config = Config()
    config.data.max_length = length
    teacher = OpenedModel("teachers.0", "teacher t", TeacherConfig(model="t", backend="vllm"), config=longer(kind))
    lines = list(width_problems(config, teacher, gpus=1))
    assert len(lines) == (said is not None)
    assert all(line.startswith("teachers.0.backend: vLLM has one set of") and str(said) in line for line in lines)
