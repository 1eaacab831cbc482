"""A pair of models and a configuration for them."""

from __future__ import annotations

import pytest

from distill_rl.config.facts import Facts, ModelFacts, TeacherFacts
from distill_rl.config.load import load_config

SMALL = ModelFacts("llama", 1_235_814_400, 2048, 8192, 16, 32, 8, 128_256, tied=True, bytes_on_disk=2_471_000_000)
LARGE = ModelFacts("llama", 8_030_000_000, 4096, 14_336, 32, 32, 8, 128_256, tied=False, bytes_on_disk=16_060_000_000)
FACTS = Facts(vocabulary_size=128_256, student=SMALL, teachers=(TeacherFacts(model=LARGE),))


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "student: {model: small}\nteachers: [{name: large, model: large}]\ndata: {path: text, max_length: 4096}\n"
        "train: {steps: 1000, global_batch_size: 512}\n"
    )
    return load_config(path)
