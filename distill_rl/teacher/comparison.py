"""How far a teacher with quantised weights is from the same teacher with all of its weights, on a sample of documents.

The two are loaded one after the other. What stays of the first are its last hidden states and its output layer, from which
its distributions are made again, a chunk of tokens at a time: all log-probabilities of a sample would be far larger.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from distill_rl.config.facts import row_width
from distill_rl.config.quantization import AS_STORED
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.data.batch.tokenization import Encoded
from distill_rl.models import forward
from distill_rl.models.forward import row_positions
from distill_rl.models.load import load_model
from distill_rl.models.quantization import weight_bytes
from distill_rl.parallel.mesh import World, close_world, open_world
from distill_rl.system.gpu_memory import gpu_phase
from distill_rl.system.memory import peak_gib, reset_peak
from distill_rl.teacher.engine import chunk_tokens


@dataclass(frozen=True, slots=True)
class Cost:
    """What one of the two teachers takes."""

    weight_bytes: int
    quantized_bytes: int
    """Of these, those of quantised weights; of a checkpoint that is loaded as it is stored this is not known, and 0."""
    peak_bytes: int
    """While it was loaded and run: on a GPU what torch allocated, otherwise the resident memory of the process."""
    tokens_per_s: float
    """Of forward passes without output layer, in micro-batches of the run's size; padding does not count."""


@dataclass(frozen=True, slots=True)
class TeacherComparison:
    """All per-token figures are means over the positions that the run trains on, at `loss.temperature`."""

    teacher: str
    quantization: str
    documents: int
    tokens: int
    """Positions that are compared."""
    kl_mean: float
    """KL(full ‖ quantised) over the whole vocabulary, in nats."""
    kl_p99: float
    """The same: 99 % of the positions are below it."""
    top1_agreement: float
    top_k: int
    mass_full: float
    """The full teacher's probability of its own top k."""
    mass_quantized: float
    """The full teacher's probability of the quantised teacher's top k."""
    full: Cost
    quantized: Cost


@dataclass(frozen=True, slots=True)
class _Run:
    """What is kept of a teacher that has read the sample."""

    hidden: Tensor
    """[N, H] on the CPU: of the compared positions, in order."""
    logits: Callable[[Tensor], Tensor]
    """Hidden states [n, H] → logits [n, V], on the device of `layer`."""
    layer: nn.Module
    """The output layer, on the CPU until both teachers have run; nothing else of the model is kept."""
    cost: Cost


def compare(
    config: Config,
    teacher: TeacherConfig,
    documents: Sequence[Encoded],
    *,
    vocabulary_size: int,
    device: torch.device,
    full: str | None = None,
) -> TeacherComparison:
    """Loads a teacher without and with its quantization, on one device, and compares what they say of the documents.

    Args:
        teacher: with `quantization` set.
        documents: at least one with a position that is trained on.
        vocabulary_size: ids of the tokenizer; further columns are padding.
        full: folder of the weights that were quantised, for a checkpoint that is loaded as it is stored.

    Raises:
        ConfigError: as for `load_model`.
    """
    whole = replace(teacher, quantization=None, model=teacher.model if full is None else full)
    if teacher.quantization == AS_STORED and full is not None:
        whole = replace(whole, revision=None)
    world = open_world(rank=0, dp=1, tp=1, device=device)
    try:
        first = _run(config, whole, documents, world)
        second = _run(config, teacher, documents, world)
        figures = _figures(config, first, second, vocabulary_size=vocabulary_size, device=world.device)
    finally:
        close_world(world)
    return TeacherComparison(
        teacher=teacher.name,
        quantization=str(teacher.quantization),
        documents=len(documents),
        tokens=len(first.hidden),
        **figures,
        full=first.cost,
        quantized=second.cost,
    )


@torch.no_grad()
@gpu_phase("comparison")
def _run(config: Config, teacher: TeacherConfig, documents: Sequence[Encoded], world: World) -> _Run:
    """Loads a teacher, and runs it on the documents; the model is freed before this returns."""
    gc.collect()
    reset_peak(str(world.device))
    model = load_model(teacher, world, packing=False)
    kept, seconds, tokens = [], 0.0, 0
    for i, (ids, lengths, wanted) in enumerate(_micro_batches(config, teacher, documents, world.device)):
        positions = row_positions(model.config, lengths, ids.shape[1], ids.device)
        if i == 0:
            forward.body(model, ids, positions)  # what is done once: kernels are chosen, buffers are made
        started = _now(world.device)
        hidden = forward.body(model, ids, positions)
        seconds += _now(world.device) - started
        tokens += sum(lengths)
        kept.append(hidden[wanted].cpu())
    inside, others = weight_bytes(model)
    peak = int(peak_gib(str(world.device)) * 2**30)
    cost = Cost(inside + others, inside, peak, tokens / max(seconds, 1e-9))
    return _Run(torch.cat(kept), forward.output_head(model), model.get_output_embeddings().cpu(), cost)


def _micro_batches(
    config: Config, teacher: TeacherConfig, documents: Sequence[Encoded], device: torch.device
) -> Iterator[tuple[Tensor, list[int], Tensor]]:
    """Yields ids [R, S] of a document per row, the documents' lengths, and bool [R, S]: what is trained on."""
    # A position is wanted if the token behind it is a label. Padding follows the document, which does not see it.
    size = config.rows_of(teacher)
    for start in range(0, len(documents), size):
        part = documents[start : start + size]
        lengths = [len(document.input_ids) for document in part]
        shape = (len(part), row_width(max(lengths), on_gpu=device.type == "cuda"))
        ids, wanted = np.zeros(shape, np.int64), np.zeros(shape, bool)
        for row, document in enumerate(part):
            ids[row, : lengths[row]] = document.input_ids
            wanted[row, : max(0, lengths[row] - 1)] = document.label_mask[1:]
        yield torch.tensor(ids, device=device), lengths, torch.tensor(wanted, device=device)


@torch.no_grad()
def _figures(config: Config, full: _Run, other: _Run, *, vocabulary_size: int, device: torch.device) -> dict:
    """The per-token figures of a `TeacherComparison`, by name."""
    divergences, agreed, mass_full, mass_other = [], 0, 0.0, 0.0
    for run in (full, other):
        run.layer.to(device)
    k, count = min(config.loss.top_k, vocabulary_size), len(full.hidden)
    for rows in torch.arange(count).split(chunk_tokens(2 * vocabulary_size)):
        p, q = (
            run.logits(run.hidden[rows].to(device))[:, :vocabulary_size].float().div_(config.loss.temperature)
            for run in (full, other)
        )
        p, q = p.log_softmax(-1), q.log_softmax(-1)
        divergences.append((p.exp() * (p - q)).sum(-1).cpu())
        own, others = p.topk(k).indices, q.topk(k).indices
        agreed += int((own[:, 0] == others[:, 0]).sum())
        mass_full += float(p.gather(1, own).exp().sum())
        mass_other += float(p.gather(1, others).exp().sum())
    divergence = torch.cat(divergences).double()
    return {
        "kl_mean": float(divergence.mean()),
        "kl_p99": float(np.percentile(divergence.numpy(), 99)),
        "top1_agreement": agreed / count,
        "top_k": k,
        "mass_full": mass_full / count,
        "mass_quantized": mass_other / count,
    }


def _now(device: torch.device) -> float:
    """Seconds, after all work on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
