"""Which way of training is chosen for two models and the memory of a GPU, by the estimates of `check`."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from distill_rl.config.facts import Facts, ModelFacts, TeacherFacts
from distill_rl.trial import pair
from distill_rl.trial.choose import Fit, Known

SHAPES = {
    "1B": (2048, 8192, 16, 32),
    "3B": (3072, 8192, 28, 24),
    "8B": (4096, 14336, 32, 32),
    "14B": (5120, 13824, 48, 40),
}
"""Hidden size, intermediate size, layers and heads of Llamas of so many parameters."""
VOCABULARY, KEY_VALUE_HEADS = 128_256, 8
SMALL = Fit(1, checkpointing=True, adapters=True)


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
        ("1B", "3B", 80, True, Fit(8)),
        ("1B", "8B", 80, True, Fit(4)),
        ("1B", "3B", 24, True, SMALL),
        ("8B", "14B", 80, True, SMALL),
        ("8B", "14B", 24, True, Fit(1, checkpointing=True, adapters=True, four_bits=True)),
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
    expected: Fit,
) -> None:
    monkeypatch.setattr(pair, "gpu_bytes", lambda: (gib * 2**30,))
    monkeypatch.setattr(pair, "total_bytes", lambda: 64 * 2**30)
    models = write_config(tmp_path / "student", student), write_config(tmp_path / "teacher", teacher)
    known = Known(
        gpus=1,
        cores=16,
        student_parameters=models[0].parameters,
        teacher_parameters=models[1].parameters,
        positions=8192,
        vocabulary=VOCABULARY,
        documents=10_000,
        tokens_per_document=400.0,
        chats=False,
        turns_known=True,
        minutes=5.0,
        quantizes=quantizes,
    )
    teachers = (TeacherFacts(model=models[1], vocabulary_size=VOCABULARY),)
    facts = Facts(gpus=1, cpus=16, student=models[0], teachers=teachers, vocabulary_size=VOCABULARY)
    folders = str(tmp_path / "student"), str(tmp_path / "teacher")
    request = pair.Request(*folders, text="text.jsonl", minutes=5.0, seed=0, out=tmp_path / "out")
    assert pair._fit(request, known, facts) == expected
