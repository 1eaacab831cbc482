"""Which way of training is chosen for two models and the memory of a GPU, by the estimates of `check`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from transformers import LlamaConfig

from distill_rl.config.facts import Facts, ModelFacts, TeacherFacts
from distill_rl.config.load import read_config
from distill_rl.demo import trial_setup
from distill_rl.demo.trial_setup import ADAPTERS, FOUR_BITS, ONE_ROW, Known, Settings
from distill_rl.errors import ConfigError, problems_of
from distill_rl.preflight import Checked

SHAPES = {
    "1B": (2048, 8192, 16, 32),
    "3B": (3072, 8192, 28, 24),
    "8B": (4096, 14336, 32, 32),
    "14B": (5120, 13824, 48, 40),
}
"""Hidden size, intermediate size, layers and heads of Llamas of so many parameters."""
VOCABULARY, KEY_VALUE_HEADS = 128_256, 8
CARD = Known(
    gpus=1,
    cores=16,
    student_parameters=10**9,
    teacher_parameters=10**10,
    positions=8192,
    vocabulary=VOCABULARY,
    documents=10_000,
    tokens_per_document=400.0,
    chats=False,
    turns_known=True,
    minutes=5.0,
)
SMALL = ONE_ROW | ADAPTERS


def rows(number: int) -> Settings:
    """So many rows at a time, and nothing to need less memory."""
    return {"train.micro_batch_size": number}


def write_config(folder: Path, size: str) -> ModelFacts:
    """Writes the config.json of a model; its facts are what `check` would read of its weights."""
    hidden, intermediate, layers, heads = SHAPES[size]
    tied = size in ("1B", "3B")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=KEY_VALUE_HEADS,
        tie_word_embeddings=tied,
    )
    config.save_pretrained(folder)
    attention = 2 * hidden * hidden + 2 * hidden * KEY_VALUE_HEADS * (hidden // heads)
    layer = attention + 3 * hidden * intermediate + 2 * hidden
    parameters = (1 if tied else 2) * VOCABULARY * hidden + layers * layer + hidden
    sizes = (parameters, hidden, intermediate, layers, heads, KEY_VALUE_HEADS, VOCABULARY)
    return ModelFacts("llama", *sizes, tied=tied, bytes_on_disk=2 * parameters, known_head=True)


@pytest.mark.parametrize(
    ("student", "teacher", "gib", "quantizes", "expected"),
    [
        ("1B", "3B", 80, True, rows(8)),
        ("1B", "8B", 80, True, rows(8)),
        ("1B", "3B", 24, True, SMALL),
        ("8B", "14B", 80, True, SMALL),
        ("8B", "14B", 24, True, SMALL | FOUR_BITS),
        ("8B", "14B", 24, False, SMALL),  # which does not fit, and is refused
    ],
)
def test_the_fastest_way_that_fits_is_chosen(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    student: str,
    teacher: str,
    gib: int,
    quantizes: bool,
    expected: Settings,
) -> None:
    assert fit_of(tmp_path, monkeypatch, student, teacher, gib, quantizes=quantizes) == expected


def fit_of(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    student: str,
    teacher: str,
    gib: int,
    *,
    quantizes: bool = True,
    overrides: tuple[str, ...] = (),
) -> Settings:
    monkeypatch.setattr(trial_setup, "gpu_bytes", lambda: (gib * 2**30,))
    monkeypatch.setattr(trial_setup, "total_bytes", lambda: 64 * 2**30)
    models = write_config(tmp_path / "student", student), write_config(tmp_path / "teacher", teacher)
    known = replace(
        CARD, student_parameters=models[0].parameters, teacher_parameters=models[1].parameters, quantizes=quantizes
    )
    teachers = (TeacherFacts(model=models[1], vocabulary_size=VOCABULARY),)
    facts = Facts(gpus=1, cpus=16, student=models[0], teachers=teachers, vocabulary_size=VOCABULARY)
    return trial_setup._fit(request_for(tmp_path, *overrides), known, facts)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("train.global_batch_size=6",), 2),  # which neither eight nor four rows divide
        (("train.global_batch_size=12",), 4),
        (("train.global_batch_size=5",), 1),
        (("train.micro_batch_size=3", "train.global_batch_size=6"), 8),  # as the user says, whatever is chosen
    ],
)
def test_rows_divide_the_batch_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], expected: int
) -> None:
    assert fit_of(tmp_path, monkeypatch, "1B", "3B", 80, overrides=overrides) == rows(expected)


@pytest.mark.parametrize(
    ("override", "fit", "times"),
    [
        ("student.lora={}", rows(8), 10),
        ("student.lora=null", SMALL, 1),
        ("optimizer.lr=0.5", rows(8), 1),
        ("optimizer.lr=0.5", SMALL, 10),
    ],
)
def test_the_rate_is_for_what_is_trained(tmp_path: Path, override: str, fit: Settings, times: int) -> None:
    chosen = trial_setup._chosen(request_for(tmp_path, override), CARD, fit)
    assert chosen["optimizer.lr"] == times * trial_setup.learning_rate(CARD.student_parameters)


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (("data.validation.fraction=0",), True),
        (("data.validation.fraction=-1",), True),
        (("data.validation.fraction=0.2",), False),
        (("data.validation.fraction=0", "data.validation.path=other.jsonl"), False),
        (("data.validation.fraction=none",), False),  # reported as no number
        ((), False),
    ],
)
def test_something_must_be_held_out(tmp_path: Path, overrides: tuple[str, ...], refused: bool) -> None:
    lines = [*trial_setup._request_problems(request_for(tmp_path, *overrides))]
    assert len(lines) == refused
    assert all(line.startswith("data.validation.fraction: must be greater than 0: ") for line in lines)


def test_weights_are_fetched_only_for_what_can_be_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = read_config(trial_setup.settings_of(request_for(tmp_path), {}))
    checked = Checked(config, [], [], Facts(num_documents=5))
    monkeypatch.setattr(trial_setup, "gather", lambda *arguments, **options: checked)
    monkeypatch.setattr(trial_setup, "resolve", lambda *arguments, **options: pytest.fail("weights are fetched"))
    with pytest.raises(ConfigError) as raised:
        trial_setup.examine(request_for(tmp_path, "train.minutes=3"))
    reserved, few = raised.value.problems
    assert reserved == "train.minutes=3: is set by --minutes; use --minutes"
    assert few.startswith("TEXT: must have at least 16 documents")


@pytest.mark.parametrize(("gib", "problems"), [(24, 0), (16, 1)])
def test_a_student_in_few_bits_must_fit_whole_where_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: int, problems: int
) -> None:
    monkeypatch.setattr(trial_setup, "gpu_bytes", lambda: (gib * 2**30,))
    model, request = write_config(tmp_path / "student", "8B"), request_for(tmp_path)
    for quantization, expected in ((None, 0), ("int4", problems)):
        config, _ = read_config(trial_setup.settings_of(request, {"student.quantization": quantization}))
        assert config is not None
        lines = problems_of(partial(trial_setup._require_room_to_measure, request, config, model, on_gpu=True))
        assert len(lines) == expected
        assert all("STUDENT: is measured with its whole weights" in line for line in lines)


def request_for(tmp_path: Path, *overrides: str) -> trial_setup.TrialRequest:
    folders = str(tmp_path / "student"), str(tmp_path / "teacher")
    return trial_setup.TrialRequest(
        *folders, text="text.jsonl", minutes=5.0, seed=0, out=tmp_path / "out", overrides=overrides
    )
