"""A student learns to stop when only a cross-tokenizer teacher tells it where a text ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distill_rl.align import Alignment
from distill_rl.align.projection import cached_projection
from distill_rl.config.schema import AlignerConfig, DataConfig
from distill_rl.data.batch.collate import BatchPlan, BatchSharding
from distill_rl.data.batch.cross_tokenizer_batch import BatchBuilder
from distill_rl.data.batch.document_aligner import CrossTokenizerTeacher
from distill_rl.data.batch.tokenization import Tokenization
from distill_rl.parallel.mesh import close_world, open_world
from distill_rl.student.engine import StudentEngine
from distill_rl.teacher.engine import TeacherEngine
from distill_rl.types import CrossTokenizerSpec, Cursor, DocumentBatch, RankBatch
from tests.helpers.engines import engine_config, engine_targets, fixed_targets
from tests.helpers.models import write_tiny_model
from tests.helpers.tokenizers import tiny_tokenizer

OURS, THEIRS = 320, 600
TEXTS = [f"{i} {word}" for i, word in enumerate(["kalo mi", "ter an sol", "be", "ru ing est und", "mi mi mi", "oo"])]


@pytest.fixture(scope="module")
def world():
    world = open_world(rank=0, dp=1, tp=1)
    yield world
    close_world(world)


def build() -> tuple[RankBatch, RankBatch]:
    student, teacher = tiny_tokenizer(OURS), tiny_tokenizer(THEIRS, seed=7)
    plan = BatchPlan(BatchSharding(1, 6), (BatchSharding(1, 6),), 32, packing=False, pad_id=7)
    tokenization = Tokenization(student, DataConfig(max_length=32), format="text")
    documents = tuple({"row": row, "text": text} for row, text in enumerate(TEXTS))
    teachers = [CrossTokenizerTeacher.of("t0", student, teacher, AlignerConfig())]
    _, (ours,), ((theirs,),) = BatchBuilder(tokenization, plan, teachers).build(DocumentBatch(0, documents, Cursor()))
    return ours, theirs


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A student with random weights, a teacher that has memorised the six texts, and their vocabulary projection."""
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("stop")
    ours, theirs = tiny_tokenizer(OURS), tiny_tokenizer(THEIRS, seed=7)
    write_tiny_model(root / "student", seed=1, tokenizer=ours)
    write_tiny_model(root / "teacher", seed=2, tokenizer=theirs)
    model = AutoModelForCausalLM.from_pretrained(root / "teacher")
    _, batch = build()
    ids = torch.tensor(batch.rows.input_ids, dtype=torch.long)
    lengths = [len(theirs(text).input_ids) + 1 for text in TEXTS]
    labels = torch.tensor(
        [[token if i < length else -100 for i, token in enumerate(row)] for row, length in zip(ids.tolist(), lengths)]
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(120):
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.5
    model.save_pretrained(root / "teacher")
    projection = cached_projection(root, ours, theirs, student_columns=OURS, teacher_columns=THEIRS)
    return {"student": root / "student", "teacher": root / "teacher", "projection": projection}


def chance_to_stop(world, folders, method: str) -> tuple[float, float]:
    """The student's mean probability of eos where a text ends, and elsewhere in it, after 120 steps of KD alone."""
    ours, theirs = build()
    config = engine_config(
        folders["student"], [folders["teacher"]], loss__ce_weight=0.0, loss__top_k=32, optimizer__lr=1e-2,
        optimizer__weight_decay=0.0, schedule__kind="constant", train__micro_batch_size=6,
    )  # fmt: skip
    config.teachers[0].export = "topk" if method in ("hybrid", "alm") else "logits"
    targets = engine_targets(TeacherEngine(config, config.teachers[0], world, vocabulary_size=THEIRS), theirs)
    source = fixed_targets([targets], [theirs.rows.widths])
    cross_tokenizer_specs = [CrossTokenizerSpec(method, str(folders["projection"]))]
    engine = StudentEngine(
        config, world, vocabulary_size=OURS, total_steps=120, cross_tokenizer_specs=cross_tokenizer_specs
    )
    for _ in range(120):
        engine.train_step(ours, source)
    with torch.no_grad():
        chance = engine.logits(ours.rows).float().softmax(-1)[..., tiny_tokenizer(OURS).eos_token_id]
    ends = torch.tensor(ours.rows.labels == tiny_tokenizer(OURS).eos_token_id)
    inside = torch.tensor(ours.rows.labels >= 0) & ~ends
    assert int(ends.sum()) == len(TEXTS)
    return chance[ends].mean().item(), chance[inside].mean().item()


@pytest.mark.parametrize("method", ["hybrid", "alm", "xtoken"])
def test_a_student_learns_to_stop_across_tokenizers(world, folders, method):
    at_end, inside = chance_to_stop(world, folders, method)
    assert at_end > 0.6
    assert inside < 0.1


def test_without_paired_stop_tokens_it_does_not_learn_to_stop(world, folders, monkeypatch):
    """Shows that the paired stop tokens are the cause of the result above."""
    original = Alignment.trainable
    monkeypatch.setattr(Alignment, "trainable", lambda alignment, mask: original(alignment, mask, stops=False))
    assert chance_to_stop(world, folders, "hybrid")[0] < 0.3
