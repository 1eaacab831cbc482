"""Tiny models, a small corpus, a configuration that trains in seconds, a Ray cluster and a reference run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.command import Cluster, distill_rl
from tests.helpers.corpus import write_corpus
from tests.helpers.models import write_tiny_model
from tests.helpers.ray_nodes import ray_nodes
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
observe: {{tensorboard: false, every: 1}}
run: {{dir: {runs}, seed: 3}}
"""


@dataclass(frozen=True)
class Material:
    root: Path

    def config(self, folder: Path, teacher: str = "teacher") -> Path:
        """Writes a configuration whose runs go to `folder`/runs. The teacher `foreign` has another tokenizer."""
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


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A one-node Ray cluster, for tests that do not check how Ray starts or ends.

    The widest run takes six CPUs. Ray starts a worker process per CPU when the first driver joins.
    """
    folder = tmp_path_factory.mktemp("cluster")
    with pytest.MonkeyPatch.context() as patch, ray_nodes(folder, patch, nodes=1, cpus=8, forks=True) as address:
        variables = {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")}
        patch.undo()
        yield Cluster(address, variables)


@pytest.fixture(scope="session")
def straight(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference run: eight steps without interruption, with validation and checkpoints every four steps."""
    folder = tmp_path_factory.mktemp("straight")
    observe = ("observe.table_every=4", "observe.timeline=true")
    ended = distill_rl("train", "-c", material.config(folder), "evaluate.every=4", "checkpoint.every=4", *observe)
    assert ended.code == 0, ended.err
    assert "transport object_store: " in ended.out
    return folder / "runs" / "tiny"
