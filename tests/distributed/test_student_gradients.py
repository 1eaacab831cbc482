"""A global batch has one gradient, for every layout and micro-batch size, with evaluations in between, and one norm by
which it is clipped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from distill_rl.parallel.mesh import open_world
from distill_rl.student.engine import StudentEngine
from distill_rl.student.optim import clip_gradients
from distill_rl.teacher.engine import TeacherEngine
from tests.helpers import engines, ranks
from tests.helpers.models import write_tiny_model
from tests.helpers.routers import plain_balance

pytestmark = pytest.mark.ranks

VOCABULARY, TOP, WIDTH, TEMPERATURE, CE_WEIGHT = 320, 16, 40, 2.0, 0.5
MAX_NORM = 0.05
"""Less than the norm of any of the gradients."""
LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2), (4, 1, 2), (2, 2, 2)]
STUDENTS = {
    "llama-tied": {"family": "llama", "tie": True},
    # On two ranks an odd number of columns gives shards of unequal size, one of them mostly padding.
    "qwen2-padded": {"family": "qwen2", "vocab_size": 507, "tie": True},
    "qwen3": {"family": "qwen3"},
    "mistral": {"family": "mistral"},
    "phi3": {"family": "phi3"},
    "gpt2": {"family": "gpt2", "tie": True, "vocab_size": 507},
    "mixtral": {"family": "mixtral"},
}
ROUTER_WEIGHT = 0.3
"""Of the mixture, whose balance of the experts is then part of the loss."""
MIXTURES = ("mixtral",)
"""Students that are split by transformers' plan, and whose logits only their own forward makes. FSDP shards their experts."""
EVERYWHERE = ("llama-tied", "qwen2-padded", "gpt2", *MIXTURES)
"""Students for all layouts; the others, which differ in their tensor-parallel plan alone, run on SPLIT and on one rank."""
SPLIT = [(1, 1, 1), (1, 2, 1), (2, 2, 1)]
MICRO_BATCHES = {
    "llama-tied": (1, 4, 2),
    "qwen2-padded": (1,),
    "qwen3": (1,),
    "mistral": (2,),
    "phi3": (1,),
    "gpt2": (4,),
    "mixtral": (4, 1),
}
"""The last one is also that of the second engine on."""


def batch_rows():
    """Eight rows with two, one or no document, so that ranks differ in their number of labels."""
    documents = engines.random_documents(12, seed=11)
    return engines.token_rows([_fitting(pack) for pack in engines.uneven_packs(documents)], WIDTH)


def _fitting(pack):
    while sum(map(len, pack)) > WIDTH:
        pack = pack[:-1]
    return pack


def gradients(dp: int, tp: int, replicas: int, students: dict[str, Path], teacher: Path) -> dict:
    """Runs on a rank. The whole gradient, clipped, and its norm before, per student, micro-batch size, gradient_sync and loss.fused.

    The batch comes in two calls, like a batch whose targets do not fit into a ring, with an evaluation in between.
    """
    world = open_world(rank=ranks.rank(), dp=dp, tp=tp, replicas=replicas)
    batch = engines.rank_batch(batch_rows(), world.dp_rank, dp)
    first, second = engines.halves(batch)
    config = engines.engine_config("unused", [teacher], loss__temperature=TEMPERATURE, loss__ce_weight=CE_WEIGHT)
    targets = engines.engine_targets(
        TeacherEngine(config, config.teachers[0], world, vocabulary_size=VOCABULARY), batch
    )
    source = engines.fixed_targets([targets], WIDTH, first_row=batch.first_row, temperature=TEMPERATURE)
    # A single shard reduces once per step under either setting: test_student_collectives.py.
    syncs = ("step",) if dp == replicas else ("step", "micro_batch")
    results = {}
    for name, path in students.items():
        config.student.model = str(path)
        config.loss.router_weight = ROUTER_WEIGHT if name in MIXTURES else 0.0
        for i, (fused, sync) in enumerate(variants_of(name, syncs)):
            config.student.gradient_sync, config.loss.fused = sync, fused
            engine = StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=4)
            for size in MICRO_BATCHES[name][-1:] if i else MICRO_BATCHES[name]:
                config.train.micro_batch_size = size
                engine.forward_backward(first, source, last=False)
                # A forward pass without gradients must change neither parameters nor accumulated gradients.
                engine.evaluate(first, source)
                engine.forward_backward(second, source, last=True)
                norm = clip_gradients(engine.parameters, MAX_NORM).item()
                whole = engines.whole_gradients(engine.model)
                engine.optimizer.zero_grad()
                results[name, size, sync, fused] = (whole if world.rank == 0 else None, norm)
    return results


def variants_of(name: str, syncs: Sequence[str]) -> list[tuple[str, str]]:
    """Values of loss.fused and gradient_sync. The one does not depend on a family's plan, so only the first student has
    them all."""
    if name not in EVERYWHERE or name in MIXTURES:
        return [("off", sync) for sync in syncs]
    every = [(fused, sync) for sync in syncs for fused in ("off", "on")]
    return every if name == EVERYWHERE[0] else [every[0], every[-1]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[dict[str, Path], Path]:
    root = tmp_path_factory.mktemp("models")
    students = {
        name: write_tiny_model(root / name, seed=20 + i, **kind) for i, (name, kind) in enumerate(STUDENTS.items())
    }
    return students, write_tiny_model(root / "teacher", "llama", seed=30, hidden=48, vocab_size=352)


@pytest.fixture(scope="module")
def references(folders) -> dict[str, tuple[dict[str, torch.Tensor], float]]:
    """fp64 gradients of the plain models, one document at a time, with targets from plain log_softmax and top-k; clipped by
    torch, with their norms before."""
    students, teacher = folders
    rows = batch_rows()
    target = engines.plain_topk(engines.plain_model(teacher), rows, VOCABULARY, TOP, TEMPERATURE)
    wanted = {}
    for name, path in students.items():
        model = engines.plain_model(path)
        kd, ce = engines.plain_losses(engines.plain_logits(model, rows, VOCABULARY), rows.labels, target, TEMPERATURE)
        router = ROUTER_WEIGHT * plain_balance(model, rows) if name in MIXTURES else 0.0
        ((kd + CE_WEIGHT * ce + router) / engines.rank_batch(rows).num_labels).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()
        assert norm > 2 * MAX_NORM
        wanted[name] = engines.whole_gradients(model), norm
    return wanted


@pytest.mark.parametrize(("dp", "tp", "replicas"), LAYOUTS, ids=[f"dp{dp}tp{tp}r{r}" for dp, tp, r in LAYOUTS])
def test_gradient_matches_the_plain_reference_on_every_layout(folders, references, dp: int, tp: int, replicas: int):
    students, teacher = folders
    if (dp, tp, replicas) not in SPLIT:
        students = {name: students[name] for name in EVERYWHERE}
    results = ranks.run_ranks(dp * tp, gradients, dp, tp, replicas, students, teacher, timeout=240)
    assert {name for name, *_ in results[0]} == students.keys()
    for (name, *variant), (gradient, norm) in results[0].items():
        whole, wanted = references[name]
        error = engines.relative_l2(gradient, whole)
        assert error < 1e-5, f"{name}, {variant}: {error:.1e}"
        assert all(other[name, *variant][1] == norm for other in results), "every rank must scale by the same factor"
        assert norm == pytest.approx(wanted, rel=1e-5), f"{name}, {variant}"


def variants(dp: int, tp: int, student: Path, teacher: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Runs on a rank. Whole gradients, clipped, with activation checkpointing and with bf16."""
    world = open_world(rank=ranks.rank(), dp=dp, tp=tp)
    batch = engines.rank_batch(batch_rows(), world.dp_rank, dp)
    config = engines.engine_config(student, [teacher], loss__temperature=TEMPERATURE, loss__ce_weight=CE_WEIGHT)
    targets = engines.engine_targets(
        TeacherEngine(config, config.teachers[0], world, vocabulary_size=VOCABULARY), batch
    )
    source = engines.fixed_targets([targets], WIDTH, first_row=batch.first_row, temperature=TEMPERATURE)
    results = {}
    for name, checkpointing, dtype in (("checkpointed", True, "fp32"), ("bf16", False, "bf16")):
        config.student.activation_checkpointing, config.student.dtype = checkpointing, dtype
        engine = StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=4)
        engine.forward_backward(batch, source)
        clip_gradients(engine.parameters, MAX_NORM)
        results[name] = engines.whole_gradients(engine.model)
        engine.optim_step()
        assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.float32}
    return results


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2), (2, 2)])
def test_checkpointing_and_bf16_match_the_reference_on_a_mesh(folders, references, dp: int, tp: int):
    students, teacher = folders
    results, (wanted, _) = (
        ranks.run_ranks(dp * tp, variants, dp, tp, students["qwen3"], teacher)[0],
        references["qwen3"],
    )
    assert engines.relative_l2(results["checkpointed"], wanted) < 1e-5
    assert {tensor.dtype for tensor in results["bf16"].values()} == {torch.float32}
    # bf16 keeps 8 bits; a missing or doubled term would be off by a third at least.
    assert 1e-4 < engines.relative_l2(results["bf16"], wanted) < 0.05
