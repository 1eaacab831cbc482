"""The engines under plain torchrun, without Ray and without a driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.models import write_tiny_model

pytestmark = pytest.mark.ranks

SCRIPT = """
import json, os, sys
from pathlib import Path

import torch, torch.distributed as dist

from distill_rl.parallel.mesh import close_world, open_world
from distill_rl.student.engine import StudentEngine
from distill_rl.teacher.engine import TeacherEngine
from tests.helpers.engines import engine_config, engine_targets, fixed_targets, random_documents, rank_batch, token_rows

torch.set_num_threads(1)
student, teacher, out = sys.argv[1:]
dist.init_process_group("gloo")
world = open_world(rank=dist.get_rank(), dp=1, tp=2)
config = engine_config(student, [teacher], optimizer__lr=1e-2)
rows = token_rows([[document] for document in random_documents(4)], 24)
batch = rank_batch(rows)
targets = engine_targets(TeacherEngine(config, config.teachers[0], world, vocabulary_size=320), batch)
engine = StudentEngine(config, world, vocabulary_size=320, total_steps=3)
history = [engine.train_step(batch, fixed_targets([targets], 24)) for _ in range(3)]
if world.rank == 0:
    losses = [metrics["train/kl_loss"].value for metrics in history]
    Path(out).write_text(json.dumps({"losses": losses, "ray": "ray" in sys.modules}))
else:
    assert history == [{}, {}, {}]
close_world(world)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_student_learns_under_torchrun_without_ray(tmp_path):
    student = write_tiny_model(tmp_path / "student", "llama", seed=1)
    teacher = write_tiny_model(tmp_path / "teacher", "llama", seed=2)
    script, out = tmp_path / "train.py", tmp_path / "out.json"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(student), str(teacher), str(out)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert result["losses"][2] < result["losses"][0]
    assert not result["ray"]
