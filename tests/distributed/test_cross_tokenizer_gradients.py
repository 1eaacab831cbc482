"""Across tokenizers, too, a global batch has one gradient: for every layout and micro-batch size, padded or packed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from distill_rl.align.projection import cached_projection, load_projection
from distill_rl.config.schema import AlignerConfig, Config, DataConfig, LossConfig
from distill_rl.data.batch.collate import BatchPlan, BatchSharding
from distill_rl.data.batch.cross_tokenizer_batch import BatchBuilder
from distill_rl.data.batch.document_aligner import CrossTokenizerTeacher
from distill_rl.data.batch.tokenization import Tokenization
from distill_rl.losses import DenseLogits, TopKLogprobs, VocabularyProjection
from distill_rl.losses.cross_tokenizer import reference as reference_chunks
from distill_rl.parallel.mesh import World, open_world
from distill_rl.student.engine import StudentEngine
from distill_rl.student.objective import flat_chunks
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
    relative_l2,
    topk_of,
    whole_gradients,
    whole_parameters,
)
from tests.helpers.models import write_tiny_model
from tests.helpers.tokenizers import tiny_tokenizer

pytestmark = pytest.mark.ranks

OURS, COLUMNS, DOCUMENTS, TOP, CE_WEIGHT = 320, 507, 8, 16, 0.5
THEIRS = (600, 420)
"""Ids of the teachers' tokenizers; most tests have the first teacher only."""
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
# (method, teacher's export) → (loss settings, micro-batch sizes)
CASES = {
    ("hybrid", "topk"): ({"temperature": 2.0}, (1, 4)),
    ("xtoken", "logits"): ({}, (2,)),
    ("xtoken", "hidden"): ({}, (1,)),
    ("gold", "logits"): ({"chunk_average": "chain"}, (1,)),
    ("gold", "hidden"): ({"chunk_average": "chain"}, (2,)),
    ("strict", "logits"): ({}, (4,)),
    ("hkl", "logits"): ({}, (2,)),
    ("uld", "hidden"): ({}, (2,)),
    ("alm", "topk"): ({}, (1,)),
}


def tokenizers() -> tuple:
    """The student's, and those of both teachers."""
    return tiny_tokenizer(OURS), tuple(tiny_tokenizer(size, seed=7 + i) for i, size in enumerate(THEIRS))


def build(
    dp: int, teacher_dp: int = 1, *, packing: bool = False, num_teachers: int = 1
) -> tuple[list[RankBatch], list[list[RankBatch]]]:
    """The documents as batches of the student's ranks and of each teacher's ranks. A quarter of them fill a row each."""
    student, others = tokenizers()
    plan = BatchPlan(BatchSharding(dp, 4), (BatchSharding(teacher_dp, 4),) * num_teachers, 40, packing, pad_id=7)
    teachers = [
        CrossTokenizerTeacher.of(f"t{i}", student, other, AlignerConfig())
        for i, other in enumerate(others[:num_teachers])
    ]
    texts = [row["text"] for row in corpus_rows(DOCUMENTS, seed=2)]
    short = [" ".join(text.split()[: 1 + i % 4]) for i, text in enumerate(texts)]
    documents = tuple({"row": i, "text": texts[i] if i % 4 == 0 else short[i]} for i in range(DOCUMENTS))
    tokenization = Tokenization(student, DataConfig(max_length=40), format="text")
    _, ours, theirs = BatchBuilder(tokenization, plan, teachers).build(DocumentBatch(0, documents, Cursor()))
    return ours, theirs


def settings_of(method: str, export: str, folders: dict[str, Path], num_teachers: int = 1, **settings) -> Config:
    loss, _ = CASES[method, export]
    config = engine_config(
        folders["student"], [folders[f"teacher{i}"] for i in range(num_teachers)], loss__ce_weight=CE_WEIGHT, loss__top_k=TOP,
        **{f"loss__{name}": value for name, value in loss.items()}, **settings,
    )  # fmt: skip
    for teacher in config.teachers:
        teacher.export = export
    return config


def engine_of(method: str, config: Config, world: World, folders: dict[str, Path]) -> StudentEngine:
    specs = [CrossTokenizerSpec(method, str(folders[f"projection{i}"])) for i in range(len(config.teachers))]
    return StudentEngine(config, world, vocabulary_size=OURS, total_steps=4, cross_tokenizer_specs=specs)


def targets_of(config: Config, world: World, theirs: list[list[RankBatch]]) -> list[dict]:
    """Each teacher's targets for this rank's part of its batch."""
    return [
        engine_targets(TeacherEngine(config, teacher, world, vocabulary_size=size), parts[world.dp_rank])
        for teacher, size, parts in zip(config.teachers, THEIRS, theirs)
    ]


def source_of(targets: list[dict], batch: RankBatch, temperature: float):
    widths = [part.chunks.widths[1] for part in batch.teachers]
    return fixed_targets(targets, widths, first_row=batch.first_row, temperature=temperature)


def gradients(dp: int, tp: int, folders: dict[str, Path], packings: tuple[bool, ...], num_teachers: int) -> dict:
    """Runs on a rank. The whole gradient per packing, method, export and micro-batch size, after an evaluation."""
    world = open_world(rank=ranks.rank(), dp=dp, tp=tp)
    batches = {packing: build(dp, dp, packing=packing, num_teachers=num_teachers) for packing in packings}
    results, known = {}, {}
    for (method, export), (_, sizes) in CASES.items():
        config = settings_of(method, export, folders, num_teachers)
        engine, temperature = engine_of(method, config, world, folders), config.loss.temperature
        for packing, (ours, theirs) in batches.items():
            if (packing, export, temperature) not in known:
                known[packing, export, temperature] = targets_of(config, world, theirs)
            batch = ours[world.dp_rank]
            source = source_of(known[packing, export, temperature], batch, temperature)
            for size in sizes:
                config.train.micro_batch_size = size
                if size == sizes[-1]:
                    engine.evaluate(batch, source)
                engine.forward_backward(batch, source)
                results[packing, method, export, size] = whole_gradients(engine.model)
                engine.optimizer.zero_grad()
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("cross")
    ours, others = tokenizers()
    # On two ranks an odd number of columns gives shards of unequal size, one of them mostly padding.
    student = write_tiny_model(root / "student", "qwen2", seed=20, vocab_size=COLUMNS, tie=True, tokenizer=ours)
    made = {"student": student}
    for i, theirs in enumerate(others):
        made[f"teacher{i}"] = write_tiny_model(
            root / f"teacher{i}", "llama", seed=30 + i, hidden=48, vocab_size=640, tokenizer=theirs
        )
        made[f"projection{i}"] = cached_projection(root, ours, theirs, student_columns=COLUMNS, teacher_columns=640)
    return made


def bridge_of(path: Path) -> VocabularyProjection:
    return VocabularyProjection.from_projection(load_projection(path))


@pytest.fixture(scope="module")
def references(folders) -> dict[tuple[str, str, int], dict[str, torch.Tensor]]:
    """fp64 gradients of the plain models through the plain losses, chunk by chunk, with a row for each document.

    By method, export and number of teachers, whose KD is averaged.
    """
    model = plain_model(folders["student"])
    teachers = [plain_model(folders[f"teacher{i}"]) for i in range(2)]
    wanted = {}
    for num_teachers in (1, 2):
        (ours,), theirs = build(1, num_teachers=num_teachers)
        labels = torch.tensor(ours.rows.labels, dtype=torch.int64)
        student = torch.nn.functional.pad(plain_logits(model, ours.rows, OURS), (0, COLUMNS - OURS), value=-torch.inf)
        with torch.no_grad():
            of_teachers = [
                plain_logits(teacher, part.rows, size) for teacher, size, (part,) in zip(teachers, THEIRS, theirs)
            ]
        for (method, export), (loss, _) in CASES.items():
            temperature, losses = loss.get("temperature", 1.0), []
            for i, (logits, (their_part,), part) in enumerate(zip(of_teachers, theirs, ours.teachers)):
                shared = part.chunks
                topk = topk_of(logits, their_part.rows.labels, TOP, temperature)
                target = TopKLogprobs.from_tensors(topk, temperature)
                if export != "topk":
                    padded = torch.nn.functional.pad(logits, (0, 640 - logits.shape[-1]), value=-torch.inf)
                    target = DenseLogits(padded.flatten(0, 1), topk["label_logprob"])
                output = reference_chunks.chunk_kd_loss(
                    student, target, flat_chunks(shared, torch.device("cpu")), bridge_of(folders[f"projection{i}"]),
                    method=method, labels=labels, top_k=TOP, tau=LossConfig().alm_tau, **loss,
                )  # fmt: skip
                compared = shared.num_one_to_one if method == "strict" else shared.num_chunks
                losses.append(output.kd / compared + CE_WEIGHT * output.ce / ours.num_labels)
            model.zero_grad()
            (sum(losses) / num_teachers).backward(retain_graph=True)
            wanted[method, export, num_teachers] = whole_gradients(model)
    return wanted


def documents_per_row(rows: TokenRows) -> np.ndarray:
    """Number of documents in each row; all have a label at their first position."""
    return np.count_nonzero((rows.position_ids == 0) & (rows.labels != IGNORE_INDEX), axis=1)


def test_packed_rows_are_fewer_and_hold_the_same_documents():
    (padded,), _ = build(1)
    (packed,), ((theirs,),) = build(1, packing=True)
    ours_per_row, theirs_per_row = (documents_per_row(part.rows) for part in (packed, theirs))
    assert ours_per_row.max() > 2
    assert padded.rows.shape[0] == ours_per_row.sum() == DOCUMENTS > packed.rows.shape[0]
    assert np.array_equal(ours_per_row, theirs_per_row)
    assert (padded.num_labels, padded.teachers[0].chunks.num_chunks) == (
        packed.num_labels,
        packed.teachers[0].chunks.num_chunks,
    )


@pytest.fixture(scope="module")
def found(folders) -> Callable[[int, int], dict]:
    """The gradients with one teacher on a layout, padded and packed."""
    return functools.cache(
        lambda dp, tp: ranks.run_ranks(dp * tp, gradients, dp, tp, folders, (False, True), 1, timeout=240)[0]
    )


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(("dp", "tp"), LAYOUTS, ids=[f"dp{dp}tp{tp}" for dp, tp in LAYOUTS])
def test_gradient_matches_the_plain_reference_on_every_layout(found, references, dp: int, tp: int, packing: bool):
    results = {tuple(case): gradient for (packed, *case), gradient in found(dp, tp).items() if packed == packing}
    assert {(method, export) for method, export, _ in results} == CASES.keys()
    for (method, export, size), gradient in results.items():
        error = relative_l2(gradient, references[method, export, 1])
        assert error < 1e-5, f"{method} of {export}, micro-batch {size}: {error:.1e}"


@pytest.mark.parametrize(("dp", "tp"), [LAYOUTS[0], LAYOUTS[-1]], ids=["dp1tp1", "dp2tp2"])
def test_gradient_of_two_teachers_is_their_mean(folders, references, dp: int, tp: int):
    results = ranks.run_ranks(dp * tp, gradients, dp, tp, folders, (True,), 2)[0]
    for (_, method, export, size), gradient in results.items():
        error = relative_l2(gradient, references[method, export, 2])
        assert error < 1e-5, f"{method} of {export}, micro-batch {size}: {error:.1e}"
        assert relative_l2(gradient, references[method, export, 1]) > 1e-3, "the second teacher changes it"


def train_projection(
    dp: int, tp: int, folders: dict[str, Path], folder: Path | None
) -> tuple[dict, torch.Tensor, list[float]]:
    """Three steps with a learned projection: (all parameters, values of the projection, losses).

    With a `folder`, the run is saved after two steps and resumed from there.
    """
    world = open_world(rank=ranks.rank(), dp=dp, tp=tp)
    config = settings_of(
        "xtoken", "logits", folders, projection__learnable=True, optimizer__lr=1e-2, loss__dynamic_scale="on"
    )
    (ours, theirs), engine = build(dp, dp), engine_of("xtoken", config, world, folders)
    batch = ours[world.dp_rank]
    source = source_of(targets_of(config, world, theirs), batch, 1.0)
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


@pytest.fixture(scope="module")
def learned(folders) -> tuple[dict, torch.Tensor, list[float]]:
    """What `train_projection` returns on one rank."""
    return ranks.run_ranks(1, train_projection, 1, 1, folders, None)[0]


def test_a_learned_projection_changes_and_resumes(folders, learned, tmp_path):
    whole, values, losses = learned
    bridge = bridge_of(folders["projection0"])
    sums = torch.zeros(COLUMNS).index_add_(0, bridge.entry_rows, values)
    torch.testing.assert_close(sums[:OURS], torch.ones(OURS))
    assert (values > 0).all()
    moved = (values - bridge.values).abs() > 1e-4
    assert moved.any(), "the projection did not change"
    again, resumed, series = ranks.run_ranks(1, train_projection, 1, 1, folders, tmp_path / "saved")[0]
    assert torch.equal(resumed, values)
    assert series == losses
    assert all(torch.equal(again[name], whole[name]) for name in whole)


@pytest.mark.parametrize(("dp", "tp"), LAYOUTS[1:], ids=[f"dp{dp}tp{tp}" for dp, tp in LAYOUTS[1:]])
def test_a_learned_projection_matches_on_every_layout(folders, learned, dp: int, tp: int):
    whole, values, _ = learned
    split, theirs, _ = ranks.run_ranks(dp * tp, train_projection, dp, tp, folders, None)[0]
    torch.testing.assert_close(theirs, values, rtol=1e-4, atol=1e-6)
    assert relative_l2(split, whole) < 1e-4


def exact_scales(dp: int, size: int, folders: dict[str, Path]) -> list[dict]:
    """Metrics of two steps, each with KD scaled by its own ratio of CE to KD."""
    world = open_world(rank=ranks.rank(), dp=dp, tp=1)
    config = settings_of(
        "hybrid", "topk", folders, loss__dynamic_scale="exact", optimizer__lr=1e-2, train__micro_batch_size=size
    )
    (ours, theirs), engine = build(dp, dp), engine_of("hybrid", config, world, folders)
    batch = ours[world.dp_rank]
    source = source_of(targets_of(config, world, theirs), batch, config.loss.temperature)
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
