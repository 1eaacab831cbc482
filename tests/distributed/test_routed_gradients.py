"""A batch whose rows choose their teachers has the gradient of its parts, on every layout, with one tokenizer and two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distill_rl.align.projection import cached_projection
from distill_rl.config.schema import AlignerConfig, DataConfig, LossConfig
from distill_rl.data.batch.collate import BatchPlan, BatchSharding
from distill_rl.data.batch.cross_tokenizer_batch import BatchBuilder
from distill_rl.data.batch.document_aligner import CrossTokenizerTeacher
from distill_rl.data.batch.tokenization import Tokenization
from distill_rl.data.routing import WEIGHTS
from distill_rl.losses import DenseLogits, TopKLogprobs
from distill_rl.losses.cross_tokenizer import reference as reference_chunks
from distill_rl.parallel.mesh import open_world
from distill_rl.student.engine import StudentEngine
from distill_rl.student.objective import flat_chunks
from distill_rl.teacher.build import RoutedTeacher
from distill_rl.teacher.engine import TeacherEngine
from distill_rl.types import CrossTokenizerSpec, Cursor, DocumentBatch, RankBatch
from tests.distributed.test_cross_tokenizer_gradients import bridge_of
from tests.helpers import ranks
from tests.helpers.corpus import corpus_rows
from tests.helpers.engines import (
    engine_config,
    engine_targets,
    fixed_targets,
    plain_logits,
    plain_losses,
    plain_model,
    plain_topk,
    relative_l2,
    whole_gradients,
)
from tests.helpers.models import write_tiny_model
from tests.helpers.tokenizers import tiny_tokenizer

pytestmark = pytest.mark.ranks

OURS, COLUMNS, THEIRS, DOCUMENTS, TOP, WIDTH, CE_WEIGHT = 320, 507, 420, 12, 16, 40, 0.5
LAYOUTS = [(1, 1), (2, 1), (1, 2)]
WEIGHTS_OF = [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (0.5, 2.0), (3.0, 0.0), (0.0, 0.25)]
"""Of the documents in turn: for a teacher of the student's tokenizer, and one of another."""
SHARES = (1.0, 2.0)
CASES = {("topk", "hybrid", "topk"): (1, 4), ("hidden", "gold", "hidden"): (2,), ("logits", "hybrid", "topk"): (2,)}
"""(export of the first teacher, loss and export of the second) → micro-batch sizes"""


def build(
    dp: int, *, packing: bool = False, only: int | None = None
) -> tuple[list[RankBatch], list[list[RankBatch]], list[tuple[float, float]]]:
    """Batches of the student's and the teachers' ranks, and the weights of the documents.

    Args:
        only: the part of the documents of one combination of weights, by its index, without weights.
    """
    student = tiny_tokenizer(OURS)
    other = CrossTokenizerTeacher.of("t1", student, tiny_tokenizer(THEIRS, seed=8), AlignerConfig())
    texts = [" ".join(row["text"].split()[: 1 + i % 5]) for i, row in enumerate(corpus_rows(DOCUMENTS, seed=2))]
    kept = [i for i in range(DOCUMENTS) if only is None or i % len(WEIGHTS_OF) == only]
    documents = [{"row": i, "text": texts[i]} for i in kept]
    if only is None:
        documents = [document | {WEIGHTS: WEIGHTS_OF[document["row"] % len(WEIGHTS_OF)]} for document in documents]
    plan = BatchPlan(BatchSharding(dp, 4), (BatchSharding(dp, 4),) * 2, WIDTH, packing, pad_id=7)
    tokenization = Tokenization(student, DataConfig(max_length=WIDTH), format="text")
    builder = BatchBuilder(tokenization, plan, [None, other])
    _, ours, theirs = builder.build(DocumentBatch(0, tuple(documents), Cursor()))
    return ours, theirs, [WEIGHTS_OF[i % len(WEIGHTS_OF)] for i in kept]


def gradients(dp: int, tp: int, folders: dict[str, Path]) -> dict:
    """Runs on a rank. The whole gradient by case, packing and micro-batch size. An evaluation comes before the last."""
    world = open_world(rank=ranks.rank(), dp=dp, tp=tp)
    results = {}
    for (export, method, other_export), sizes in CASES.items():
        config = engine_config(
            folders["student"], [folders["same"], folders["other"]], loss__ce_weight=CE_WEIGHT, loss__top_k=TOP
        )
        for teacher, share, kind in zip(config.teachers, SHARES, (export, other_export)):
            teacher.weight, teacher.export = share, kind
        specs = [None, CrossTokenizerSpec(method, str(folders["projection"]))]
        engine = StudentEngine(config, world, vocabulary_size=OURS, total_steps=4, cross_tokenizer_specs=specs)
        teachers = [
            RoutedTeacher(TeacherEngine(config, teacher, world, vocabulary_size=size))
            for teacher, size in zip(config.teachers, (OURS, THEIRS))
        ]
        for packing in (False, True):
            ours, theirs, _ = build(dp, packing=packing)
            parts = [of_teacher[world.dp_rank] for of_teacher in theirs]
            batch = ours[world.dp_rank]
            source = fixed_targets(
                [engine_targets(teacher, part) for teacher, part in zip(teachers, parts)],
                [part.rows.widths for part in parts],
                first_row=batch.first_row,
            )
            for size in sizes:
                engine.config.train.micro_batch_size = size
                if packing and size == sizes[-1]:
                    engine.evaluate(batch, source)
                metrics = engine.forward_backward(batch, source)
                results[export, method, packing, size] = whole_gradients(engine.model), metrics
                engine.optimizer.zero_grad()
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("routed")
    ours, theirs = tiny_tokenizer(OURS), tiny_tokenizer(THEIRS, seed=8)
    # On two ranks an odd number of columns gives shards of unequal size, one of them mostly padding.
    return {
        "student": write_tiny_model(root / "student", "qwen2", seed=20, vocab_size=COLUMNS, tie=True, tokenizer=ours),
        "same": write_tiny_model(root / "same", "llama", seed=31, hidden=48, vocab_size=COLUMNS, tokenizer=ours),
        "other": write_tiny_model(root / "other", "llama", seed=32, hidden=48, vocab_size=640, tokenizer=theirs),
        "projection": cached_projection(root, ours, theirs, student_columns=COLUMNS, teacher_columns=640),
    }


@pytest.fixture(scope="module")
def references(folders) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """fp64 gradients: the plain losses of batches that hold one part of the documents each, added up with their weights."""
    wanted = {}
    for export, method, other_export in CASES:
        model, same, other = (plain_model(folders[name]) for name in ("student", "same", "other"))
        kd_sums, sizes = [0.0, 0.0], [0.0, 0.0]
        chunks, ce, labels = 0.0, 0.0, 0
        for i, weights in enumerate(WEIGHTS_OF):
            (ours,), ((_,), (theirs,)), _ = build(1, only=i)
            logits = torch.nn.functional.pad(
                plain_logits(model, ours.rows, OURS), (0, COLUMNS - OURS), value=-torch.inf
            )
            ce = ce + plain_losses(logits, ours.rows.labels, None)[1]
            labels += ours.num_labels
            sizes = [size + weight * ours.num_labels for size, weight in zip(sizes, weights)]
            k = TOP if export == "topk" else OURS - 1  # so many are the whole distribution
            target = plain_topk(same, ours.rows, OURS, k)
            kd_sums[0] = kd_sums[0] + weights[0] * plain_losses(logits[..., :OURS], ours.rows.labels, target)[0]
            with torch.no_grad():
                dense = torch.nn.functional.pad(
                    plain_logits(other, theirs.rows, THEIRS), (0, 640 - THEIRS), value=-torch.inf
                )
            topk = plain_topk(other, theirs.rows, THEIRS, TOP)
            sent = TopKLogprobs.from_tensors(topk, 1.0)
            if other_export != "topk":
                sent = DenseLogits(dense.flatten(0, 1), topk["label_logprob"])
            shared = ours.teachers[1].chunks
            output = reference_chunks.chunk_kd_loss(
                logits, sent, flat_chunks(shared, torch.device("cpu")), bridge_of(folders["projection"]), method=method,
                labels=torch.tensor(ours.rows.labels, dtype=torch.int64), top_k=TOP, tau=LossConfig().alm_tau,
            )  # fmt: skip
            kd_sums[1] = kd_sums[1] + weights[1] * output.kd
            chunks += weights[1] * shared.num_chunks
        means = kd_sums[0] / sizes[0], kd_sums[1] / chunks
        total = sum(share * size for share, size in zip(SHARES, sizes))
        kd = sum(share * size / total * mean for share, size, mean in zip(SHARES, sizes, means))
        (kd + CE_WEIGHT * ce / labels).backward()
        wanted[export, method] = whole_gradients(model), [float(mean.detach()) for mean in means], float(kd.detach())
    return wanted


@pytest.mark.parametrize(("dp", "tp"), LAYOUTS, ids=[f"dp{dp}tp{tp}" for dp, tp in LAYOUTS])
def test_gradient_is_that_of_the_parts_on_every_layout(folders, references, dp: int, tp: int):
    results = ranks.run_ranks(dp * tp, gradients, dp, tp, folders)
    for (export, method, packing, size), (gradient, metrics) in results[0].items():
        wanted, means, kd = references[export, method]
        error = relative_l2(gradient, wanted)
        assert error < 1e-5, f"{export}, {method}, packing {packing}, micro-batch {size}: {error:.1e}"
        if dp == 1:
            assert metrics["train/kl_loss"].value == pytest.approx(kd, rel=1e-4)
            found = [metrics[f"train/kl_loss/t{i}"].value for i in range(2)]
            assert found == pytest.approx(means, rel=1e-4)
