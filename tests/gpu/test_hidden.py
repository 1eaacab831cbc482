"""Hidden states, and the teacher's output layer in the student, on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from distill_rl.parallel.mesh import close_world, open_world
from distill_rl.student.engine import StudentEngine
from distill_rl.teacher.engine import TeacherEngine
from tests.helpers.engines import (
    engine_config,
    engine_targets,
    fixed_targets,
    random_documents,
    rank_batch,
    relative_l2,
    token_rows,
    whole_gradients,
)
from tests.helpers.models import write_tiny_model

pytestmark = pytest.mark.gpu

VOCABULARY, WIDTH, DEVICE = 320, 24, "cuda"


# fp32: two orders of summation. bf16: the logits export rounds every logit by 2^-9 of itself, hidden states do not.
@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-4), ("bf16", 3e-2)])
def test_hidden_states_give_the_same_targets_as_logits(tmp_path, dtype: str, bound: float):
    student = write_tiny_model(tmp_path / "student", "llama", vocab_size=507, seed=1)
    teacher = write_tiny_model(tmp_path / "teacher", "qwen2", hidden=64, tie=True, vocab_size=352, seed=2)
    world = open_world(rank=0, dp=1, tp=1, device=DEVICE)
    try:
        batch = rank_batch(token_rows([[document] for document in random_documents(4, seed=3)], WIDTH))
        gradients = {}
        for export in ("hidden", "logits"):
            config = engine_config(student, [teacher])
            config.teachers[0].export, config.teachers[0].dtype, config.teachers[0].wire_dtype = export, dtype, "fp32"
            targets = engine_targets(
                TeacherEngine(config, config.teachers[0], world, vocabulary_size=VOCABULARY), batch
            )
            assert {tensor.device.type for tensor in targets.values()} == {DEVICE}
            engine = StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=4)
            engine.forward_backward(batch, fixed_targets([targets], WIDTH))
            gradients[export] = whole_gradients(engine.model)
            head = engine.objective.teachers[0].head
            assert head is None or head.weight.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        assert relative_l2(gradients["hidden"], gradients["logits"]) < bound
    finally:
        close_world(world)
