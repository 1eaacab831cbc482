"""Memory and time of a training step with the fused loss and without it, on a CPU, against the size of the vocabulary.

Two figures of memory, each the most bytes that torch had allocated at once beyond those at the start:

- of the loss alone in bf16 at the most rows, forward and backward, less the gradients that it returns and the fp32 sum of
  that of the head. Targets are top-k, and hidden states of a teacher of the same shape, compared by forward KL and by JSD.
- of the forward and backward of one micro-batch of a real student engine, in fp32, on made-up top-k targets. It trains a
  small Llama in one process.

Each figure of memory is taken in a process of its own, two at a time, because torch's profiler keeps memory. Where the logits
alone would take more than 3 GiB, the unfused loss is left out. Times are of the engine's whole optimizer
steps, fused over unfused, medians of rounds that take turns; the head of the model is at most half of its FLOPs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from distill_rl.config.schema import Config, DataConfig, LossConfig, StudentConfig, TeacherConfig, TrainConfig
from distill_rl.losses import StudentHidden, TeacherHidden, TopKLogprobs, kd_loss
from distill_rl.parallel.mesh import World
from distill_rl.scaling.shape import Shape
from distill_rl.student.engine import StudentEngine
from distill_rl.types import RankBatch, TokenRows
from tests.bench import harness
from tests.bench.gpu.engines import draw_weights, one_rank, write_model
from tests.bench.losses.losses import peak_bytes

LOSSES = {
    "loss_topk_mib": ("topk", "forward_kl"),
    "loss_hidden_mib": ("hidden", "forward_kl"),
    "loss_hidden_jsd_mib": ("hidden", "jsd"),
}
"""Figure → target and divergence."""
TOP_K = 64
MOST_LOGITS = 3 * 2**30
MOST_MIB = 256
"""The loss's memory beyond the gradients, at most, whatever the vocabulary."""
MOST_TIME = 1.1
MIB = 2**20


@dataclass(frozen=True)
class Sizes:
    """What is the same for every vocabulary and number of rows."""

    hidden: int = 512
    """Width of the student."""
    length: int = 512
    """Tokens of a row of its batches."""


def shape(columns: int, hidden: int) -> Shape:
    """A Llama of four layers; at 512 wide, its head multiplies as much as they do at 32,768 columns."""
    return Shape("small Llama", "llama", 4, hidden, 4 * hidden, 8, 8, hidden // 8, columns, columns, tied=True)


def made_up_targets(rows: int, columns: int) -> TopKLogprobs:
    """Random top-k targets [rows, TOP_K] over this many columns; half of the mass is in the rest."""
    draw = torch.Generator().manual_seed(0)
    apart = columns // TOP_K
    ids = torch.arange(TOP_K, dtype=torch.int32) * apart + torch.randint(0, apart, (rows, 1), generator=draw)
    logprobs = torch.randn(rows, TOP_K, generator=draw).log_softmax(1) - float(np.log(2))
    half = torch.full((rows,), -float(np.log(2)))
    tensors = {"ids": ids.int(), "logprobs": logprobs, "rest_logprob": half, "label_logprob": half}
    return TopKLogprobs.from_tensors(tensors, 1.0)


def loss_bytes(rows: int, columns: int, width: int, target: str, divergence: str) -> int:
    """Memory of the fused loss in bf16, beyond the gradients of hidden states and head and the head's fp32 sum.

    Args:
        width: of the hidden states.
        target: topk or hidden.
    """
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=draw).to(torch.bfloat16).requires_grad_()
    weight = (torch.randn(columns, width, generator=draw) / width**0.5).to(torch.bfloat16).requires_grad_()
    labels = torch.arange(rows) % columns
    teacher = made_up_targets(rows, columns) if target == "topk" else TeacherHidden(hidden.detach(), weight.detach())

    def step() -> None:
        student = StudentHidden(hidden, weight)
        kd_loss(student, teacher, labels=labels, divergence=divergence, kd_ratio=0.5, reduction="sum").loss.backward()

    return peak_bytes(step) - hidden.numel() * 2 - weight.numel() * (2 + 4)


def engine(world: World, folder: Path, columns: int, rows: int, length: int, *, fused: bool) -> StudentEngine:
    """A student with random weights that trains `rows` tokens in one micro-batch.

    Args:
        folder: of the model (`write_model`).
    """
    count = max(1, rows // length)
    config = Config(
        student=StudentConfig(model=str(folder), dtype="fp32"),
        teachers=[TeacherConfig(model=str(folder))],
        data=DataConfig(max_length=length),
        loss=LossConfig(top_k=TOP_K, kd_weight=0.5, ce_weight=0.5, fused="on" if fused else "off"),
        train=TrainConfig(global_batch_size=count, micro_batch_size=count),
    )
    student = StudentEngine(config, world, vocabulary_size=columns, total_steps=1000)
    torch.manual_seed(0)
    draw_weights(student.model)
    return student


def material(rows: int, columns: int, length: int) -> tuple[RankBatch, Callable[..., Any]]:
    """One micro-batch of full rows, and what `StudentEngine.train_step` takes its targets from."""
    draw = np.random.default_rng(0)
    size = (max(1, rows // length), min(rows, length))
    ids, labels = (draw.integers(0, columns, size).astype(np.int32) for _ in range(2))
    positions = np.broadcast_to(np.arange(size[1], dtype=np.int32), size).copy()
    targets = made_up_targets(ids.size, columns)

    @contextmanager
    def source(first_row: int, num_rows: int) -> Iterator[Sequence[TopKLogprobs]]:
        yield [targets]

    return RankBatch(0, 0, TokenRows(ids, labels, positions), num_labels=ids.size), source


def step_bytes(folder: Path, columns: int, rows: int, length: int, fused: bool) -> int:
    """Memory of the engine's forward and backward, in its second micro-batch, when there are gradients to add to."""
    with one_rank(torch.device("cpu")) as world:
        student = engine(world, folder, columns, rows, length, fused=fused)
        batch, source = material(rows, columns, length)
        student.forward_backward(batch, source)
        return peak_bytes(lambda: student.forward_backward(batch, source))


def step_seconds(folder: Path, columns: int, rows: int, length: int, rounds: int) -> tuple[float, float]:
    """Median seconds of an optimizer step: (fused, unfused), which take turns."""
    batch, source = material(rows, columns, length)
    seconds: list[list[float]] = [[], []]
    with one_rank(torch.device("cpu")) as world:
        engines = [engine(world, folder, columns, rows, length, fused=fused) for fused in (True, False)]
        for i in range(rounds + 1):
            for student, measured in zip(engines, seconds):
                start = perf_counter()
                student.train_step(batch, source)
                if i:
                    measured.append(perf_counter() - start)
    return median(seconds[0]), median(seconds[1])


def _processes(at_once: int) -> ProcessPoolExecutor:
    """Runs every call in a process of its own, `at_once` of them side by side, forked from one with the imports of these."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.bench.losses.fused"])
    return ProcessPoolExecutor(at_once, mp_context=context, max_tasks_per_child=1)


def compare(
    folder: Path,
    *,
    vocabularies: tuple[int, ...] = (32_768, 131_072, 262_144),
    rows: tuple[int, ...] = (512, 2048, 8192),
    rounds: int = 5,
    sizes: Sizes = Sizes(),
) -> dict[str, Any]:
    """Measures memory at every size and time at the smallest vocabulary.

    Args:
        vocabularies: columns of the student's output layer.
        rows: tokens of a micro-batch.
        rounds: timed steps of each.
        sizes: what is the same in all cases.
    """
    memory, time = [], []
    with _processes(2) as processes:
        for columns in vocabularies:
            model = folder / str(columns)
            write_model(model, shape(columns, sizes.hidden), sizes.length)
            for count in rows:
                case: dict[str, Any] = {}
                if count == max(rows):
                    for name, settings in LOSSES.items():
                        case[name] = processes.submit(loss_bytes, count, columns, sizes.hidden, *settings)
                for name, fused in (("step_mib", True), ("step_unfused_mib", False)):
                    if fused or 4 * columns * count <= MOST_LOGITS:
                        case[name] = processes.submit(step_bytes, model, columns, count, sizes.length, fused)
                memory.append({"vocabulary": columns, "rows": count} | case)
        for record in memory:
            record |= {name: _mib(figure.result()) for name, figure in record.items() if isinstance(figure, Future)}
            print(record, flush=True)
    columns = min(vocabularies)
    for count in rows[:2]:
        with _processes(1) as process:
            model = folder / str(columns)
            seconds, unfused = process.submit(step_seconds, model, columns, count, sizes.length, rounds).result()
        compared = {"seconds": round(seconds, 3), "unfused_seconds": round(unfused, 3)}
        time.append({"vocabulary": columns, "rows": count, **compared, "ratio": round(seconds / unfused, 3)})
    return {"settings": {**asdict(sizes), "top_k": TOP_K, "layers": 4}, "memory": memory, "time": time}


def _mib(count: int) -> float:
    return round(count / MIB, 1)


def verdict(figures: dict[str, Any]) -> list[str]:
    """The missed targets: the loss's memory and the time of a step."""
    memory = figures["memory"]
    worst = max(record[name] for record in memory for name in LOSSES if name in record)
    slowest = max(record["ratio"] for record in figures["time"])
    return harness.missed(
        (worst > MOST_MIB, f"the loss takes {worst} MiB beside its gradients; must be at most {MOST_MIB}"),
        *((True, line) for line in grown(memory)),
        (slowest > MOST_TIME, f"a fused step takes {slowest} of an unfused one; must be at most {MOST_TIME}"),
    )


def grown(memory: Sequence[Mapping[str, Any]]) -> list[str]:
    """What takes more memory at the largest vocabulary than at the smallest, at the most rows; one line each."""
    most = max(record["rows"] for record in memory)
    alike = sorted((record for record in memory if record["rows"] == most), key=lambda record: record["vocabulary"])
    smallest, *_, largest = alike
    return [
        f"{name} is {largest[name]} at {largest['vocabulary']} columns; must be at most {smallest[name]}, "
        f"as at {smallest['vocabulary']}"
        for name in LOSSES
        if largest[name] > smallest[name]
    ]


main = harness.program("fused", compare, verdict)

if __name__ == "__main__":
    sys.exit(main())
