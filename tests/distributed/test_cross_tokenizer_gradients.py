"""Across tokenizers, too, a global batch has one gradient: for every layout and micro-batch size, padded or packed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from distill_rl.align.projection import cached_projection, load_projection
from distill_rl.config.schema import AlignerConfig
from distill_rl.data.collate import BatchPlan, BatchSharding
from distill_rl.data.cross_tokenizer_batch import BatchBuilder
from distill_rl.data.document_aligner import CrossTokenizerTeacher
from distill_rl.data.tokenization import Tokenization
from distill_rl.losses import DenseLogits, TopKLogprobs, VocabularyProjection
from distill_rl.losses.cross_tokenizer import reference as reference_chunks
from distill_rl.parallel.mesh import World, open_world
from distill_rl.student.chunk_rows import flat_chunks
from distill_rl.student.engine import StudentEngine
from distill_rl.teacher.engine import TeacherEngine
from distill_rl.types import IGNORE_INDEX, CrossTokenizerSpec, Cursor, DocumentBatch, RankBatch, TokenRows
from tests.helpers import ranks
from tests.helpers.corpus import corpus_rows
from tests.helpers.engines import (
    engine_config,
    engine_targets,
    fixed_targets,
    plain_logits,
    plain_model,
    plain_topk,
    relative_l2,
    whole_gradients,
    whole_parameters,
)
from tests.helpers.models import write_tiny_model
from tests.helpers.tokenizers import tiny_tokenizer

pytestmark = pytest.mark.ranks

OURS, THEIRS, COLUMNS, TOP, CE_WEIGHT = 320, 600, 507, 16, 0.5
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
# (method, teacher's export) → (loss settings, micro-batch sizes)
CASES = {
    ("hybrid", "topk"): ({"temperature": 2.0}, (1, 2, 4)),
    ("xtoken", "logits"): ({}, (2,)),
    ("xtoken", "hidden"): ({}, (1,)),
    ("gold", "logits"): ({"chunk_average": "chain"}, (1,)),
    ("gold", "hidden"): ({"chunk_average": "chain"}, (2,)),
    ("strict", "logits"): ({}, (4,)),
    ("hkl", "logits"): ({}, (2,)),
    ("uld", "hidden"): ({}, (2,)),
    ("alm", "topk"): ({}, (1,)),
}


def build(dp: int, teacher_dp: int = 1, *, packing: bool = False) -> tuple[list[RankBatch], list[RankBatch]]:
    """Sixteen documents as batches of the student's ranks and of the teacher's ranks. Four fill a row each."""
    student, teacher = tiny_tokenizer(OURS), tiny_tokenizer(THEIRS, seed=7)
    plan = BatchPlan(BatchSharding(dp, 4), (BatchSharding(teacher_dp, 4),), 40, packing, pad_id=7)
    other = CrossTokenizerTeacher.of("t0", student, teacher, AlignerConfig())
    texts = [row["text"] for row in corpus_rows(16, seed=2)]
    short = [" ".join(text.split()[: 1 + i % 4]) for i, text in enumerate(texts)]
    documents = tuple({"row": i, "text": texts[i] if i % 4 == 0 else short[i]} for i in range(16))
    tokenization = Tokenization(student, format="text", loss_on="all", max_length=40)
    _, ours, (theirs,) = BatchBuilder(tokenization, plan, [other]).build(DocumentBatch(0, documents, Cursor()))
    return ours, theirs


def engine_for(
    method: str, export: str, world: World, folders: dict[str, Path], *, packing: bool = False, **settings
) -> tuple[StudentEngine, dict, RankBatch]:
    """The student's engine, the teacher's targets for this rank's part of the batch, and that part."""
    loss, _ = CASES[method, export]
    ours, theirs = build(world.dp, world.dp, packing=packing)
    batch, their_batch = ours[world.dp_rank], theirs[world.dp_rank]
    config = engine_config(
        folders["student"], [folders["teacher"]], loss__ce_weight=CE_WEIGHT, loss__top_k=TOP,
        **{f"loss__{name}": value for name, value in loss.items()}, **settings,
    )  # fmt: skip
    config.teachers[0].export = export
    teacher = TeacherEngine(config, config.teachers[0], world, vocabulary_size=THEIRS)
    cross_tokenizer_specs = [CrossTokenizerSpec(method, str(folders["projection"]))]
    engine = StudentEngine(
        config, world, vocabulary_size=OURS, total_steps=4, cross_tokenizer_specs=cross_tokenizer_specs
    )
    return engine, engine_targets(teacher, their_batch), batch


def source_of(targets: dict, batch: RankBatch, temperature: float):
    return fixed_targets([targets], batch.chunks[0].widths[1], first_row=batch.first_row, temperature=temperature)


def gradients(dp: int, tp: int, folders: dict[str, Path], packing: bool) -> dict:
    """Runs on a rank. The whole gradient per method, export and micro-batch size."""
    world = open_world(rank=ranks.rank(), dp=dp, tp=tp)
    results = {}
    for (method, export), (_, sizes) in CASES.items():
        engine, targets, batch = engine_for(method, export, world, folders, packing=packing)
        source = source_of(targets, batch, engine.config.loss.temperature)
        for size in sizes:
            engine.config.train.micro_batch_size = size
            engine.forward_backward(batch, source)
            results[method, export, size] = whole_gradients(engine.model)
            engine.evaluate(batch, source)
            engine.optimizer.zero_grad()
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("cross")
    ours, theirs = tiny_tokenizer(OURS), tiny_tokenizer(THEIRS, seed=7)
    # On two ranks an odd number of columns gives shards of unequal size, one of them mostly padding.
    student = write_tiny_model(root / "student", "qwen2", seed=20, vocab_size=COLUMNS, tie=True, tokenizer=ours)
    teacher = write_tiny_model(root / "teacher", "llama", seed=30, hidden=48, vocab_size=640, tokenizer=theirs)
    projection = cached_projection(root, ours, theirs, student_columns=COLUMNS, teacher_columns=640)
    return {"student": student, "teacher": teacher, "projection": projection}


def bridge_of(path: Path) -> VocabularyProjection:
    return VocabularyProjection.from_projection(load_projection(path))


@pytest.fixture(scope="module")
def references(folders) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """fp64 gradients of the plain models through the plain losses, chunk by chunk, with a row for each document."""
    (ours,), (theirs,) = build(1)
    shared, labels = ours.chunks[0], torch.tensor(ours.rows.labels, dtype=torch.int64)
    wanted = {}
    for (method, export), (loss, _) in CASES.items():
        temperature = loss.get("temperature", 1.0)
        teacher, model = plain_model(folders["teacher"]), plain_model(folders["student"])
        with torch.no_grad():
            logits = torch.nn.functional.pad(plain_logits(teacher, theirs.rows, THEIRS), (0, 40), value=-torch.inf)
        topk = plain_topk(teacher, theirs.rows, THEIRS, TOP, temperature)
        target = TopKLogprobs.from_tensors(topk, temperature)
        if export != "topk":
            target = DenseLogits(logits.flatten(0, 1), topk["label_logprob"])
        student = plain_logits(model, ours.rows, OURS)
        output = reference_chunks.chunk_kd_loss(
            torch.nn.functional.pad(student, (0, COLUMNS - OURS), value=-torch.inf), target,
            flat_chunks(shared, torch.device("cpu")), bridge_of(folders["projection"]),
            method=method, labels=labels, top_k=TOP, **loss,
        )  # fmt: skip
        compared = shared.num_one_to_one if method == "strict" else shared.num_chunks
        (output.kd / compared + CE_WEIGHT * output.ce / ours.num_labels).backward()
        wanted[method, export] = whole_gradients(model)
    return wanted


def documents_per_row(rows: TokenRows) -> np.ndarray:
    """Number of documents in each row; all have a label at their first position."""
    return np.count_nonzero((rows.position_ids == 0) & (rows.labels != IGNORE_INDEX), axis=1)


def test_packed_rows_are_fewer_and_hold_the_same_documents():
    (padded,), _ = build(1)
    (packed,), (theirs,) = build(1, packing=True)
    ours_per_row, theirs_per_row = (documents_per_row(part.rows) for part in (packed, theirs))
    assert ours_per_row.max() > 2
    assert padded.rows.shape[0] == ours_per_row.sum() == 16 > packed.rows.shape[0]
    assert np.array_equal(ours_per_row, theirs_per_row)
    assert (padded.num_labels, padded.chunks[0].num_chunks) == (packed.num_labels, packed.chunks[0].num_chunks)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(("dp", "tp"), LAYOUTS, ids=[f"dp{dp}tp{tp}" for dp, tp in LAYOUTS])
def test_gradient_matches_the_plain_reference_on_every_layout(folders, references, dp: int, tp: int, packing: bool):
    results = ranks.run_ranks(dp * tp, gradients, dp, tp, folders, packing)[0]
    for (method, export, size), gradient in results.items():
        error = relative_l2(gradient, references[method, export])
        assert error < 1e-5, f"{method} of {export}, micro-batch {size}: {error:.1e}"


def train_projection(
    dp: int, tp: int, folders: dict[str, Path], folder: Path | None
) -> tuple[dict, torch.Tensor, list[float]]:
    """Three steps with a learned projection: (all parameters, values of the projection, losses).

    With a `folder`, the run is saved after two steps and resumed from there.
    """
    world = open_world(rank=ranks.rank(), dp=dp, tp=tp)
    engine, targets, batch = engine_for(
        "xtoken", "logits", world, folders, projection__learnable=True, optimizer__lr=1e-2, train__micro_batch_size=1,
        loss__dynamic_scale="on",
    )  # fmt: skip
    source = source_of(targets, batch, 1.0)
    losses = []
    for step in range(3):
        if folder is not None and step == 2:
            engine.save(folder)
            for parameter in engine.parameters:  # so that loading has something to restore
                parameter.data.zero_()
            engine.kd_scale = 0.0
            engine.load(folder)
        metrics = engine.train_step(batch, source)
        losses += [metric.value for name, metric in metrics.items() if name in ("train/kl_loss", "train/kd_scale")]
    (projection,) = engine.objective.projections.values()
    return whole_parameters(engine.trained), projection().values.detach().clone(), losses


def test_a_learned_projection_matches_on_every_layout_and_resumes(folders, tmp_path):
    whole, values, losses = ranks.run_ranks(1, train_projection, 1, 1, folders, None)[0]
    bridge = bridge_of(folders["projection"])
    sums = torch.zeros(COLUMNS).index_add_(0, bridge.entry_rows, values)
    torch.testing.assert_close(sums[:OURS], torch.ones(OURS))
    assert (values > 0).all()
    moved = (values - bridge.values).abs() > 1e-4
    assert moved.any(), "the projection did not change"
    for dp, tp in ((1, 2), (2, 2)):
        split, theirs, _ = ranks.run_ranks(dp * tp, train_projection, dp, tp, folders, None)[0]
        torch.testing.assert_close(theirs, values, rtol=1e-4, atol=1e-6)
        assert relative_l2(split, whole) < 1e-4
    again, resumed, series = ranks.run_ranks(1, train_projection, 1, 1, folders, tmp_path / "saved")[0]
    assert torch.equal(resumed, values)
    assert series == losses
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def exact_scales(dp: int, size: int, folders: dict[str, Path]) -> list[dict]:
    """Metrics of two steps, each with KD scaled by its own ratio of CE to KD."""
    world = open_world(rank=ranks.rank(), dp=dp, tp=1)
    engine, targets, batch = engine_for(
        "hybrid", "topk", world, folders, loss__dynamic_scale="exact", optimizer__lr=1e-2, train__micro_batch_size=size
    )
    source = source_of(targets, batch, engine.config.loss.temperature)
    return [engine.train_step(batch, source) for _ in range(2)]


def test_an_exact_scale_is_its_own_steps_ratio_for_any_split(folders):
    whole = ranks.run_ranks(1, exact_scales, 1, 4, folders)[0]
    halves = ranks.run_ranks(2, exact_scales, 2, 1, folders)
    for step, metrics in enumerate(whole):
        kd, ce, scale, loss = (metrics[f"train/{name}"].value for name in ("kl_loss", "nll_loss", "kd_scale", "loss"))
        assert scale == pytest.approx(ce / kd, rel=1e-5)
        assert loss == pytest.approx(2 * ce, rel=1e-5)
        for half in halves:
            assert half[step]["train/kd_scale"].value == pytest.approx(scale, rel=1e-4)
    assert whole[0]["train/kd_scale"] != whole[1]["train/kd_scale"]
