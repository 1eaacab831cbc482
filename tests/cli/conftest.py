"""A tiny teacher, a tinier student and a small corpus, made once; a configuration that trains on them in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.corpus import write_corpus
from tests.helpers.models import write_tiny_model
from tests.helpers.tokenizers import tiny_tokenizer

CONFIG = """\
student: {{model: {root}/student, dtype: fp32}}
teachers:
  - {{name: big, model: {root}/{teacher}, dtype: fp32}}
data: {{path: {root}/corpus.jsonl, max_length: 64, validation: {{fraction: 0.1}}}}
loss: {{top_k: 16, kd_weight: 1.0, ce_weight: 0.5}}
optimizer: {{lr: 0.01}}
schedule: {{warmup_steps: 2, steps: 8}}
train: {{steps: 8, global_batch_size: 8, micro_batch_size: 2}}
observe: {{tensorboard: false}}
run: {{dir: {runs}, seed: 3}}
"""


@dataclass(frozen=True)
class Material:
    root: Path

    def config(self, folder: Path, teacher: str = "teacher") -> Path:
        """A configuration whose runs go to `folder`/runs; the teacher `foreign` has another tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "tiny.yaml"
        path.write_text(CONFIG.format(root=self.root, runs=folder / "runs", teacher=teacher))
        return path


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    root = tmp_path_factory.mktemp("material")
    write_tiny_model(root / "teacher", hidden=32, seed=1)
    write_tiny_model(root / "student", hidden=16, seed=2)
    write_tiny_model(root / "foreign", hidden=32, seed=4, tokenizer=tiny_tokenizer(600, seed=7))
    write_corpus(root / "corpus.jsonl", rows=80, seed=5)
    write_corpus(root / "chats.jsonl", rows=80, seed=6, messages=True)
    return Material(root)
