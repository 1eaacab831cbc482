"""A global batch has one gradient: that of a single process, on every layout."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from distill_rl.models import forward
from distill_rl.models.parallelize import GradientReduction, reshard
from distill_rl.parallel.mesh import close_world, data_mesh, open_world
from distill_rl.student.optim import clip_gradients
from tests.helpers import ranks
from tests.helpers.engines import relative_l2, whole_gradients
from tests.helpers.load import load_model
from tests.helpers.ranks import run_ranks
from tests.helpers.zoo import write_model

pytestmark = pytest.mark.ranks

VOCABULARY = 507
"""Odd, so that tensor-parallel and data-parallel shards of the embeddings are uneven."""
FIRST = 5
"""Length of the first document of every packed row."""
LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2), (4, 1, 2), (2, 2, 2)]
SPLIT = ["llama", "qwen2", "qwen3", "mistral", "gpt2", "phi3", "llama-biased", "qwen3-wide-heads", "mistral-window"]
WHOLE = ["gemma2"]
SHARDED = ["llama", "gpt2-tied", "phi3"]
"""Models for layouts without tensor parallelism and for those with replicas, which treat all families alike."""
TIED = ["llama", "qwen2", "qwen3", "mistral", "gpt2"]


@dataclass
class Step:
    """Results of a step with two micro-batches on one rank; gradients are whole."""

    gradients: dict[str, Tensor]
    norm: Tensor
    clipped: dict[str, Tensor]
    problems: list[str]


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """8 rows of two documents: ids, position ids, labels [8, 12]."""
    ids = torch.randint(5, VOCABULARY, (8, 12), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(FIRST), torch.arange(12 - FIRST)]).repeat(8, 1)
    labels = ids.roll(-1, 1)
    labels[:, [FIRST - 1, -1]] = -100
    return ids, positions, labels


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="sum") / 40


def steps(dp: int, tp: int, replicas: int, cases: list[tuple[str, bool]]) -> list[Step]:
    """One step of every model: two micro-batches, an evaluation in between, then clipping."""
    world = open_world(rank=ranks.rank(), dp=dp, tp=tp, replicas=replicas, store=ranks.store(), timeout_s=60)
    share = slice(world.dp_rank * 8 // dp, (world.dp_rank + 1) * 8 // dp)
    results = [step(world, path, recompute, share, once=i % 2 == 0) for i, (path, recompute) in enumerate(cases)]
    close_world(world)
    return results


def step(world, path: str, recompute: bool, share: slice, once: bool) -> Step:
    model = load_model(path, world, role="student", dtype="fp32", activation_checkpointing=recompute)
    ids, positions, labels = (part[share] for part in batch())
    problems = [
        f"{name} is on {parameter.device_mesh.mesh_dim_names}"
        for name, parameter in model.named_parameters()
        if world.world_size > 1 and parameter.device_mesh.size() != world.world_size
    ]
    half = len(ids) // 2
    reduction = GradientReduction(model, data_mesh(world.mesh), once=once)
    for rows in (slice(0, half), slice(half, None)):
        reduction.before_micro_batch(last=rows.stop is None)
        logits = forward.logits(model, ids[rows], positions[rows])
        if isinstance(logits, DTensor) != (world.tp > 1) or logits.shape != (half, 12, VOCABULARY):
            problems.append(f"logits {type(logits)} {tuple(logits.shape)}")
        loss(logits, labels[rows]).backward()
        if rows.stop is not None:
            with torch.no_grad():
                forward.logits(model.eval(), ids[rows], positions[rows])
            model.train()
    reshard(model)
    gradients = whole_gradients(model)
    norm = clip_gradients([*model.parameters()], 0.5)
    return Step(gradients, norm, whole_gradients(model), problems)


def single_process_gradients(path: str) -> dict[str, Tensor]:
    """The reference: plain transformers in fp64, one document at a time."""
    from transformers import AutoModelForCausalLM

    # sdpa would leave out the soft cap of Gemma 2
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    ids, _, labels = batch()
    for document in (slice(0, FIRST), slice(FIRST, None)):
        loss(model(input_ids=ids[:, document], use_cache=False).logits, labels[:, document]).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, dict[str, Tensor]]]:
    """Name → (folder, reference gradient)."""
    models = {}
    for name in SPLIT + WHOLE:
        for tie in (False, True) if name in TIED else (False,):
            folder = tmp_path_factory.mktemp("model")
            write_model(folder, name, vocab_size=VOCABULARY, **({"tie": tie} if name in TIED else {}))
            models[f"{name}{'-tied' if tie else ''}"] = (str(folder), single_process_gradients(str(folder)))
    return models


@pytest.mark.parametrize(("dp", "tp", "replicas"), LAYOUTS)
def test_every_family_has_the_gradient_of_a_single_process(models, dp: int, tp: int, replicas: int) -> None:
    names = [name for name in models if dp * tp == 1 or name not in WHOLE]
    if replicas > 1:
        names = SHARDED
    elif dp > 1 and tp == 1:
        names = SHARDED + WHOLE
    cases = [(models[name][0], name.startswith(("qwen", "phi3", "gpt2-"))) for name in names]
    for rank, results in enumerate(run_ranks(dp * tp, steps, dp, tp, replicas, cases, group=False, timeout=240)):
        for name, step in zip(names, results, strict=True):
            where = f"{name} on rank {rank} of dp {dp}, tp {tp}, replicas {replicas}"
            wanted = models[name][1]
            norm = torch.cat([gradient.flatten() for gradient in wanted.values()]).norm()
            assert step.problems == [], where
            assert relative_l2(step.gradients, wanted) < 1e-5, where
            assert abs(step.norm / norm - 1) < 1e-5, where
            assert norm > 0.5, where
            clipped = {key: gradient * (0.5 / norm) for key, gradient in wanted.items()}
            assert relative_l2(step.clipped, clipped) < 1e-5, where
