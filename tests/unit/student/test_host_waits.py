"""How often a training step makes the host wait for the device: the lists of docs/architecture.md."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from distill_rl.align.projection import cached_projection
from distill_rl.config.schema import AlignerConfig, DataConfig
from distill_rl.data.batch.collate import BatchPlan, BatchSharding
from distill_rl.data.batch.cross_tokenizer_batch import BatchBuilder
from distill_rl.data.batch.document_aligner import CrossTokenizerTeacher
from distill_rl.data.batch.tokenization import Tokenization
from distill_rl.losses.core import checks
from distill_rl.parallel.mesh import World
from distill_rl.student.engine import StudentEngine
from distill_rl.student.optim import build_optimizer
from distill_rl.teacher.engine import TeacherEngine
from distill_rl.types import CrossTokenizerSpec, Cursor, DocumentBatch, RankBatch
from tests.helpers.corpus import corpus_rows
from tests.helpers.engines import engine_config, engine_targets, fixed_targets, random_documents, rank_batch, token_rows
from tests.helpers.host_waits import HostWaits
from tests.helpers.models import write_tiny_model
from tests.helpers.tokenizers import tiny_tokenizer

OURS, THEIRS, WIDTH = 320, 600, 40
PACKING = {("_local_scalar_dense", "masking_utils.py:find_packed_sequence_indices"): 1}
"""In every forward, transformers checks whether positions restart."""
CHUNKS = {
    ("nonzero", "losses/cross_tokenizer/chunks.py:of"): 2,
    ("nonzero", "losses/cross_tokenizer/loss.py:chunk_kd_loss"): 1,
}
"""Positions in a chunk on either side, and positions with a label: their numbers are shapes of later tensors."""
ONE_TO_ONE = {("nonzero", "losses/cross_tokenizer/chunks.py:one_to_one"): 1}
"""Chunks of one token on both sides."""
LABELLED_ROWS = {("nonzero", "losses/cross_tokenizer/task.py:labelled_rows"): 1}
"""The order of chunks, longer ones last."""
ENDS = {("tolist", "losses/cross_tokenizer/task.py:ends"): 1}
"""Where groups of chunks end."""
STOPS = {("_local_scalar_dense", "losses/cross_tokenizer/loss.py:with_stops"): 1}
"""How many of the chunks are stop tokens."""
MICRO_BATCH = {
    "/topk": {},
    "/sampled": {},
    "/hidden": {},
    "/logits": {},
    "hybrid/topk": CHUNKS | STOPS | ONE_TO_ONE,
    "alm/topk": CHUNKS | STOPS,
    "strict/logits": CHUNKS | STOPS | ONE_TO_ONE | LABELLED_ROWS | {("nonzero", "losses/cross_tokenizer/hybrid.py:strict"): 1},
    "uld/logits": CHUNKS | STOPS | ONE_TO_ONE | LABELLED_ROWS | ENDS,
    "gold/logits": CHUNKS | STOPS | ONE_TO_ONE | LABELLED_ROWS | ENDS
    | {("nonzero", "losses/cross_tokenizer/gold.py:_others"): 2, ("index", "losses/cross_tokenizer/gold.py:by_parts"): 3},
    "xtoken/logits": CHUNKS | STOPS | ONE_TO_ONE | LABELLED_ROWS | ENDS
    | {
        ("nonzero", "losses/cross_tokenizer/xtoken.py:_top_columns"): 1,
        ("_unique2", "losses/cross_tokenizer/xtoken.py:xtoken"): 1,
        ("nonzero", "losses/cross_tokenizer/projection.py:__init__"): 1,
    },
}  # fmt: skip
"""Of the loss, per micro-batch of the student, by cross-tokenizer method / export of the teacher."""
SUB_BATCH = {("tolist", "student/loss_sums.py:metrics"): 1}
STEP = {
    ("_local_scalar_dense", "student/engine.py:optim_step"): 1,  # the gradient's norm
    ("_local_scalar_dense", "student/loss_sums.py:total"): 1,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    ours, theirs = tiny_tokenizer(OURS), tiny_tokenizer(THEIRS, seed=7)
    return {
        "student": write_tiny_model(root / "student", "llama", seed=20, vocab_size=OURS, tokenizer=ours),
        "teacher": write_tiny_model(root / "teacher", "llama", seed=30, hidden=48, tokenizer=ours),
        "other": write_tiny_model(root / "other", "llama", seed=31, hidden=48, vocab_size=THEIRS, tokenizer=theirs),
        "projection": cached_projection(root, ours, theirs, student_columns=OURS, teacher_columns=THEIRS),
    }


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch) -> None:
    """Treats CPU tensors like a GPU's, whose values are not validated (`validate=None`)."""
    monkeypatch.setattr(checks, "looked_at", lambda validate, tensor: False)


def step(world: World, folders: dict[str, Path], case: str) -> tuple[StudentEngine, RankBatch, object]:
    method, _, export = case.rpartition("/")
    config = engine_config(folders["student"], [folders["other" if method else "teacher"]], loss__ce_weight=0.5)
    config.teachers[0].export = export
    if method:
        student, teacher = tiny_tokenizer(OURS), tiny_tokenizer(THEIRS, seed=7)
        plan = BatchPlan(BatchSharding(1, 4), (BatchSharding(1, 4),), WIDTH, packing=False, pad_id=7)
        other = CrossTokenizerTeacher.of("t0", student, teacher, AlignerConfig())
        documents = tuple({"row": n, **row} for n, row in enumerate(corpus_rows(8, seed=2)))
        tokenization = Tokenization(student, DataConfig(max_length=WIDTH), format="text")
        _, (batch,), ((theirs,),) = BatchBuilder(tokenization, plan, [other]).build(
            DocumentBatch(0, documents, Cursor())
        )
        cross_tokenizer_specs, width = (
            [CrossTokenizerSpec(method, str(folders["projection"]))],
            [batch.teachers[0].chunks.widths[1]],
        )
    else:
        documents = random_documents(8, seed=3)
        batch = theirs = rank_batch(token_rows([[each] for each in documents], WIDTH))
        cross_tokenizer_specs, width = [], WIDTH
    teacher = TeacherEngine(config, config.teachers[0], world, vocabulary_size=THEIRS if method else OURS)
    engine = StudentEngine(
        config, world, vocabulary_size=OURS, total_steps=4, cross_tokenizer_specs=cross_tokenizer_specs
    )
    return engine, batch, fixed_targets([engine_targets(teacher, theirs)], width)


def counted(engine: StudentEngine, batch: RankBatch, source: object, size: int) -> Counter:
    engine.config.train.micro_batch_size = size
    engine.train_step(batch, source)  # computes what is cached
    with HostWaits() as waits:
        engine.train_step(batch, source)
    return waits.counts


@pytest.mark.parametrize("case", MICRO_BATCH)
def test_step_waits_only_where_documented(world, folders, case: str):
    engine, batch, source = step(world, folders, case)
    # As on a GPU, where step counts are on the device. The foreach kernel reads them from host memory.
    engine.optimizer = build_optimizer(engine.trained, engine.config.optimizer, fused=True)
    for size, micro_batches in ((4, 2), (1, 8)):
        wanted = Counter(SUB_BATCH | STEP)
        for place, times in (PACKING | MICRO_BATCH[case]).items():
            wanted[place] = times * micro_batches
        assert counted(engine, batch, source, size) == wanted


@pytest.mark.parametrize("case", ["/topk", "/sampled", "/hidden", "/logits", "hybrid/topk"])
def test_validation_waits_no_more_than_the_losses(world, folders, case: str):
    engine, batch, source = step(world, folders, case)
    engine.evaluate(batch, source)  # computes what is cached
    with HostWaits() as waits:
        found = engine.evaluate(batch, source)
    wanted = Counter(SUB_BATCH)
    for place, times in (PACKING | MICRO_BATCH[case]).items():
        wanted[place] = 4 * times
    assert waits.counts == wanted
    shares = {"/topk": {"acceptance_low", "acceptance_high"}, "/hidden": {"acceptance"}, "/logits": {"acceptance"}}
    assert {name.partition("/")[2] for name in found if "acceptance" in name} == shares.get(case, set())


@pytest.mark.parametrize("export", ["topk", "sampled", "hidden", "logits"])
def test_teacher_waits_only_inside_transformers(world, folders, export: str):
    config = engine_config(folders["student"], [folders["teacher"]])
    config.teachers[0].export = export
    config.train.micro_batch_size = 2
    teacher = TeacherEngine(config, config.teachers[0], world, vocabulary_size=OURS)
    batch = rank_batch(token_rows([[each] for each in random_documents(8, seed=3)], WIDTH))
    with HostWaits() as waits:
        for _ in teacher.forward(batch):
            pass
    assert waits.counts == Counter({place: 4 * times for place, times in PACKING.items()})


def test_host_waits_are_counted():
    values = torch.arange(6.0)
    with HostWaits() as waits:
        if values[1]:
            values[values > 2].tolist()
        values[values > 2] = 0.0
        values.nonzero(), values.repeat_interleave(torch.arange(6)), values.cpu(), float(values.sum())
    assert {name: times for (name, _), times in waits.counts.items()} == {
        "_local_scalar_dense": 2, "index": 1, "tolist": 1, "nonzero": 1, "repeat_interleave": 1, "cpu": 1,
    }  # fmt: skip
