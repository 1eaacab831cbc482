"""Memory and time of the losses, beside what is commonly used, on one machine in one run.

Memory is measured: every allocation that torch makes during forward and backward is recorded, and the peak above what
was there before is given per element of the student's logits, the gradient included. Times are ratios to plain torch,
`F.log_softmax` and `F.kl_div` with autograd on the same inputs: the best of rounds that take turns.

TRL and torchtune are measured as installed; where they are not, and for SkyRL and verl, their published formulas stand
in.

Plain torch allocates several tensors of the logits' size in every call, and glibc maps large ones anew each time: a page
fault per 4 KiB. That is a good part of its time, and differs with the settings of the allocator. So the ratios are also
measured at several numbers of rows in two child processes, with glibc's defaults and with memory that is kept (`KEPT`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from distill_rl.losses import (
    DenseLogits,
    TopKLogprobs,
    fused_linear_kd_loss,
    kd_loss,
    vocab_parallel_logprobs,
    vocab_parallel_topk,
)
from tests.bench import harness
from tests.bench.losses import peers

TOP_K = 64
HIDDEN = 256
LABELLED = 0.2
"""share of the rows that count where some are ignored, as in chats"""
FUSED_ROWS = (256, 512, 1024, 2048)
KEPT = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"), str(2**30))
"""Settings with which glibc neither maps tensors anew nor gives their memory back."""
PLAIN = "plain torch"
Step = Callable[[Tensor], Tensor]
"""Student logits → loss."""
Name = tuple[str, str]
"""(loss, by whom)"""


def peak_bytes(step: Callable[[], Any]) -> int:
    """Runs `step` and returns the most bytes that torch had allocated on the CPU at once, above those at the start."""
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events, seen = list(recorded.profiler.kineto_results.experimental_event_tree()), []
    while events:
        event = events.pop()
        events.extend(event.children)
        if event.tag == _EventType.Allocation:
            seen.append((event.start_time_ns, event.extra_fields.total_allocated, event.extra_fields.alloc_size))
    if not seen:
        return 0
    _, after, size = min(seen)
    return max(total for _, total, _ in seen) - (after - size)


@contextmanager
def _quiet() -> Iterator[None]:
    """Discards what this process writes to file descriptor 2 inside the block.

    The profiler writes a line to standard error at every start and stop, which no setting prevents.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def forward_backward(logits: Tensor, step: Step) -> Callable[[], None]:
    """Returns a function that runs `step` forward and backward on a fresh leaf that shares the logits' storage."""

    def run() -> None:
        step(logits.detach().requires_grad_()).backward()

    return run


def ours(divergence: str, teacher: Any, labels: Tensor | None = None, **settings: Any) -> Step:
    """A step of this package's `kd_loss`: it takes the student's logits and returns the loss.

    Args:
        teacher: the targets.
        settings: further keywords of `kd_loss`.
    """
    return lambda student: kd_loss(student, teacher, labels=labels, divergence=divergence, **settings).loss


def contenders(teacher: Tensor, chunk: int) -> dict[Name, Step]:
    """The step of each implementation of each loss, by (loss, by whom).

    Args:
        teacher: logits [N, V]; the steps take the student's logits of the same shape.
        chunk: rows per chunk of the contenders that work in chunks.
    """
    dense, top = DenseLogits(teacher), vocab_parallel_topk(teacher, TOP_K)
    rows = len(teacher)
    every = torch.arange(rows) % teacher.shape[1]
    some = torch.where(torch.arange(rows) < LABELLED * rows, every, -100)
    steps: dict[Name, Step] = {}

    def theirs(name: str, by: str, loss: peers.Loss, labels: Tensor = every) -> None:
        steps[name, by] = lambda student: loss(student, teacher, labels)

    for divergence in ("forward_kl", "reverse_kl"):
        theirs(divergence, PLAIN, peers.plain_torch(divergence))
        steps[divergence, "distill_rl"] = ours(divergence, dense)
        steps[divergence, "distill_rl, chunk N/64"] = ours(divergence, dense, chunk_size=chunk)
    theirs("forward_kl", *peers.torchtune())
    theirs("forward_kl", *peers.trl(0.0))
    theirs("jsd", PLAIN, peers.plain_torch("jsd"))
    theirs("jsd", *peers.trl(0.5))
    steps["jsd", "distill_rl"] = ours("jsd", dense)
    masked = f"forward_kl, {LABELLED:.0%} of the rows count"
    theirs(masked, PLAIN, peers.plain_torch(), some)
    theirs(masked, *peers.trl(0.0), some)
    steps[masked, "distill_rl"] = ours("forward_kl", dense, some)
    steps[f"forward_kl, top {TOP_K} + rest", "distill_rl"] = ours("forward_kl", top)
    steps[f"forward_kl, top {TOP_K} + rest", "distill_rl, chunk N/64"] = ours("forward_kl", top, chunk_size=chunk)
    steps[f"forward_kl, top {TOP_K}", "verl (formula)"] = lambda student: peers.top_k_kl(student, top)
    steps[f"forward_kl, top {TOP_K}", "distill_rl"] = ours("forward_kl", top, tail="truncate")
    steps["log-probabilities", PLAIN] = lambda student: F.cross_entropy(student.float(), every)
    steps["log-probabilities", "SkyRL (formula)"] = lambda student: (
        -peers.StreamedLogprobs.apply(student, every, chunk).mean()
    )
    steps["log-probabilities", "distill_rl"] = lambda student: -_logprobs(student, every).mean()
    return steps


def _logprobs(student: Tensor, labels: Tensor) -> Tensor:
    """The labels' log-probabilities [N] from logits [N, V]."""
    found = vocab_parallel_logprobs(student, labels)
    assert isinstance(found, Tensor)  # a pair with entropies, on request
    return found


def compare(rows: int, vocabulary: int, rounds: int) -> list[dict[str, Any]]:
    """Measures all contenders on the same random logits; one record per loss and implementation.

    Times are of forward and backward, in fp32 and in bf16, over that of plain torch's forward KL in the same dtype.
    Memory is in bytes per element of the bf16 logits.

    Args:
        rounds: timed rounds, of which the best counts.
    """
    draw = torch.Generator().manual_seed(0)
    student, teacher = (2 * torch.randn(rows, vocabulary, generator=draw) for _ in range(2))
    chunk, times = max(1, rows // 64), {}
    for dtype in (torch.float32, torch.bfloat16):
        narrow = student.to(dtype)
        steps = contenders(teacher.to(dtype), chunk)
        runs = {name: forward_backward(narrow, step) for name, step in steps.items()}
        best, _ = harness.best_times(runs, rounds, warm_up=True)
        times[dtype] = {name: seconds / best["forward_kl", PLAIN] for name, seconds in best.items()}
    memory = {name: peak_bytes(run) / narrow.numel() for name, run in runs.items()}
    return [
        {
            "vocabulary": vocabulary,
            "loss": loss,
            "by": by,
            "bytes_per_element": round(memory[loss, by], 3),
            "time_fp32": round(times[torch.float32][loss, by], 3),
            "time_bf16": round(times[torch.bfloat16][loss, by], 3),
        }
        for loss, by in runs
    ]


def pairs(teacher: Tensor, top: TopKLogprobs, labels: Tensor) -> dict[str, tuple[Step, Step]]:
    """Steps of this package and of plain torch for the same loss, by the name of the loss.

    Args:
        teacher: logits [N, V]; `top` are their largest.
        labels: int64 [N], of all rows.
    """

    def plain_kl(student: Tensor) -> Tensor:
        p, q = F.log_softmax(teacher.float(), -1), F.log_softmax(student.float(), -1)
        return F.kl_div(q, p, reduction="batchmean", log_target=True)

    return {
        "forward_kl": (ours("forward_kl", DenseLogits(teacher)), plain_kl),
        f"top_{TOP_K}": (ours("forward_kl", top), lambda student: peers.top_k_and_rest_kl(student, top)),
        "logprobs": (
            lambda student: -_logprobs(student, labels).mean(),
            lambda student: F.cross_entropy(student.float(), labels),
        ),
    }


def times_over_plain(vocabulary: int, rows: int, rounds: int) -> list[dict[str, Any]]:
    """CPU time of forward and backward over that of plain torch, the median of rounds that take turns, for each dtype."""
    draw = torch.Generator().manual_seed(0)
    student, teacher = (2 * torch.randn(rows, vocabulary, generator=draw) for _ in range(2))
    every, top = torch.arange(rows) % vocabulary, vocab_parallel_topk(teacher, TOP_K)
    records = []
    for dtype in (torch.float32, torch.bfloat16):
        narrow, steps = student.to(dtype), pairs(teacher.to(dtype), top, every)
        ratios: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(rounds + 1):
            for name, both in steps.items():
                mine, theirs = (_cpu_seconds(forward_backward(narrow, step)) for step in both)
                if number:  # the first is a warm-up
                    ratios[name].append(mine / theirs)
        figures = {name: round(median(each), 3) for name, each in ratios.items()}
        records.append({"vocabulary": vocabulary, "rows": rows, "dtype": str(dtype).partition(".")[2]} | figures)
    return records


def _cpu_seconds(run: Callable[[], None]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def by_allocator(vocabulary: int, rows: int, rounds: int) -> list[dict[str, Any]]:
    """`times_over_plain` of a process with each of the allocator's settings."""
    records = []
    for allocator, settings in (("default", {}), ("kept", KEPT)):
        with (
            patch.dict(os.environ, settings),
            ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process,
        ):
            measured = process.submit(times_over_plain, vocabulary, rows, rounds).result()
        records += [{"allocator": allocator} | record for record in measured]
    return records


def linear_loss_steps(rows: int, vocabulary: int) -> dict[str, Callable[[], None]]:
    """Functions that run a top-k loss forward and backward on the CPU: `unfused` and `fused`.

    Both start from the same random bf16 hidden states [rows, HIDDEN] and output layer, and compute the gradients of
    both. The unfused one makes all logits, and compares the k columns without the rest (`top_k_kl`).
    """
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(rows, HIDDEN, generator=draw).to(torch.bfloat16)
    weight = (torch.randn(vocabulary, HIDDEN, generator=draw) / HIDDEN**0.5).to(torch.bfloat16)
    ids = torch.arange(TOP_K).expand(rows, TOP_K)
    target = TopKLogprobs(ids, torch.full(ids.shape, 0.5 / TOP_K).log(), torch.full((rows,), 0.5).log())

    def plain(states: Tensor, weight: Tensor) -> Tensor:
        return peers.top_k_kl(states @ weight.T, target)

    def fused(states: Tensor, weight: Tensor) -> Tensor:
        return fused_linear_kd_loss(states, weight, target).loss

    def step(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
        return lambda: loss(states.detach().requires_grad_(), weight.detach().requires_grad_()).backward()

    return {"unfused": step(plain), "fused": step(fused)}


def measure_fused(vocabulary: int, rounds: int) -> list[dict[str, Any]]:
    """Peak MiB of the fused and the unfused loss, and the ratio of their times, for each of `FUSED_ROWS`."""
    measured = []
    for rows in FUSED_ROWS:
        steps = linear_loss_steps(rows, vocabulary)
        best, _ = harness.best_times(steps, rounds, warm_up=True)
        peaks = {name: round(peak_bytes(run) / 2**20, 1) for name, run in steps.items()}
        measured.append(
            {
                "vocabulary": vocabulary,
                "rows": rows,
                "peak_mib": peaks["fused"],
                "unfused_peak_mib": peaks["unfused"],
                "time_over_unfused": round(best["fused"] / best["unfused"], 3),
            }
        )
    return measured


def measure(
    _: Path,
    *,
    elements: int = 2**26,
    vocabularies: tuple[int, ...] = (32_000, 128_256),
    rows: tuple[int, ...] = (64, 512, 2048),
    rounds: int = 5,
) -> dict[str, Any]:
    """Compare the losses from logits, and the fused loss with the unfused, at every vocabulary.

    Args:
        elements: logits of a comparison.
        vocabularies: their sizes.
        rows: numbers of rows at which both settings of the allocator are compared.
        rounds: timed rounds.
    """
    settings = {
        "elements": elements,
        "vocabularies": vocabularies,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }
    results, fused, over_plain = [], [], []
    for vocabulary in vocabularies:
        results += compare(elements // vocabulary, vocabulary, rounds)
        fused += measure_fused(vocabulary, rounds)
        for count in rows:
            over_plain += by_allocator(vocabulary, count, rounds)
    return {"settings": settings, "results": results, "fused": fused, "time_over_plain": over_plain}


main = harness.program("losses", measure)

if __name__ == "__main__":
    sys.exit(main())
