"""Whole runs from the command line with interpreted kernels: they train as runs without kernels do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.command import distill_rl, series
from tests.helpers.corpus import write_corpus
from tests.helpers.models import write_tiny_model

CONFIG = """\
student: {{model: {root}/student, dtype: fp32}}
teachers: [{{name: big, model: {root}/teacher, dtype: fp32, wire_dtype: fp32}}]
data: {{path: {root}/corpus.jsonl, max_length: 32}}
loss: {{top_k: 16, ce_weight: 0.5}}
optimizer: {{lr: 0.01}}
train: {{steps: 3, global_batch_size: 4, micro_batch_size: 2}}
checkpoint: {{every: 0}}
observe: {{tensorboard: false}}
run: {{dir: {root}/runs}}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("material")
    write_tiny_model(root / "teacher", hidden=32, seed=1)
    write_tiny_model(root / "student", hidden=16, seed=2)
    write_corpus(root / "corpus.jsonl", rows=12, seed=5)
    path = root / "tiny.yaml"
    path.write_text(CONFIG.format(root=root))
    return path


@pytest.mark.parametrize(("export", "fused"), [("topk", "off"), ("hidden", "on")])
def test_a_run_with_kernels_trains_as_one_without(config: Path, export: str, fused: str):
    settings = (f"teachers.0.export={export}", f"loss.fused={fused}")
    losses = []
    for backend in ("eager", "triton"):
        name = f"{export}-{backend}"
        ended = distill_rl("train", "-c", config, *settings, f"loss.backend={backend}", f"run.name={name}")
        assert ended.code == 0, ended.err
        run = config.parent / "runs" / name
        losses.append([[value for _, value in series(run, f"train/{part}_loss")] for part in ("kl", "nll")])
    assert [len(part) for part in losses[0]] == [3, 3]
    assert losses[1] == [pytest.approx(part, rel=1e-5) for part in losses[0]]
