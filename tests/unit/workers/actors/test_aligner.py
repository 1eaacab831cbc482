"""The aligner actor, without Ray."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.helpers.tokenizers import tiny_tokenizer

PROGRAM = """
import sys

from distill_rl.config.schema import Config, StudentConfig, TeacherConfig
from distill_rl.data.batch.collate import BatchPlan, BatchSharding
from distill_rl.types import Cursor
from distill_rl.workers.actors.aligner import AlignerWorker

student, teacher, other_tokenizer = sys.argv[1], sys.argv[2], sys.argv[1] != sys.argv[2]
config = Config(student=StudentConfig(model=student), teachers=[TeacherConfig(name="big", model=teacher)])
config.data.max_length = 64
plan = BatchPlan(BatchSharding(1, 1), (BatchSharding(1, 1),), 64, packing=not other_tokenizer, pad_id=2)
worker = AlignerWorker(0, config, "text", plan, (other_tokenizer,))
worker.start()
shown = {}
worker._gauges.set = worker._gauges.add = shown.__setitem__
_, documents = worker.align([{"row": 0, "text": "kalomi ter"}])
info, *ranks = worker.assemble(0, Cursor(), documents)
assert info.num_documents == 1 and len(ranks) == 2, (info, ranks)
tokens = sum(len(piece.encoded.input_ids) for document in documents for piece in document.pieces)
assert shown["aligner_seconds"] > 0 and shown["aligner_tokens"] == tokens > 0, shown
print(" ".join(sorted({"torch", "datasets"} & sys.modules.keys())))
"""


@pytest.mark.parametrize("teacher", ["student", "foreign"])
def test_aligner_starts_without_torch(tmp_path: Path, teacher: str) -> None:
    """There may be many on a machine. With torch each would take twice as long to start, and 200 MB more."""
    if version("transformers") < "5.19":
        pytest.skip("this release of transformers imports torch with its tokenizers")
    tiny_tokenizer().save_pretrained(tmp_path / "student")
    tiny_tokenizer(600, seed=7).save_pretrained(tmp_path / "foreign")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "student"), str(tmp_path / teacher)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], done.stdout
