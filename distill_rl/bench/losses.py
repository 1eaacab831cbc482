"""Memory and time of the losses, beside what is commonly used, on one machine in one run.

Memory is measured: every allocation that torch makes during forward and backward is recorded, and the peak above what
was there before is given per element of the student's logits, the gradient included. Times are ratios to plain torch,
`F.log_softmax` and `F.kl_div` with autograd on the same inputs: the best of rounds that take turns.

TRL and torchtune are measured as installed; where they are not, their published formulas are written down here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from distill_rl.bench import record
from distill_rl.losses import DenseLogits, TopKLogprobs, fused_linear_kd_loss, kd_loss, vocab_parallel_topk

TOP_K = 64
HIDDEN = 256
Step = Callable[[Tensor], Tensor]
"""Student logits → loss."""
Name = tuple[str, str]
"""(loss, by whom)"""


@dataclass(frozen=True)
class Figures:
    """Of one way to compute a loss."""

    loss: str
    by: str
    bytes_per_element: float
    time_fp32: float
    """over plain torch's, forward and backward"""
    time_bf16: float


def peak_bytes(step: Callable[[], Any]) -> int:
    """Bytes allocated by torch on the CPU at the worst moment of `step`, above what was allocated before."""
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
    """Standard error is closed to the profiler, which writes a line for every start and stop past every setting."""
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
    """A run on a fresh leaf that shares the logits' storage."""

    def run() -> None:
        step(logits.detach().requires_grad_()).backward()

    return run


def best_times(runs: dict[Name, Callable[[], None]], rounds: int) -> dict[Name, float]:
    """Seconds of the best of `rounds` for each; they take turns, so that a slow moment hits all."""
    best = dict.fromkeys(runs, float("inf"))
    for number in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if number > 0:  # the first is a warm-up
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def plain(divergence: str, teacher: Tensor) -> Step:
    """What one writes without a library: fp32 copies, two log_softmax, kl_div."""

    def step(student: Tensor) -> Tensor:
        p, q = F.log_softmax(teacher.float(), -1), F.log_softmax(student.float(), -1)
        first, second = (q, p) if divergence == "forward_kl" else (p, q)
        return F.kl_div(first, second, reduction="batchmean", log_target=True)

    return step


def trl(beta: float, teacher: Tensor) -> tuple[str, Step]:
    """TRL's generalized JSD (GKD trainer)."""
    try:
        from trl.experimental.gkd import GKDTrainer
    except ImportError:
        return "TRL (formula)", lambda student: _generalized_jsd(student, teacher, beta)
    return f"TRL {importlib.metadata.version('trl')}", lambda student: GKDTrainer.generalized_jsd_loss(
        student, teacher, beta=beta
    )


def _generalized_jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """β·KL(p‖m) + (1 − β)·KL(q‖m) over log-probabilities; the KLs themselves at the ends."""
    q, p = student.log_softmax(-1), teacher.log_softmax(-1)
    if beta in (0, 1):
        terms = F.kl_div(*((q, p) if beta == 0 else (p, q)), reduction="none", log_target=True)
    else:
        share = torch.tensor(beta, dtype=q.dtype)
        m = torch.stack([q + torch.log1p(-share), p + share.log()]).logsumexp(0)
        terms = share * F.kl_div(m, p, reduction="none", log_target=True)
        terms = terms + (1 - share) * F.kl_div(m, q, reduction="none", log_target=True)
    return terms.sum() / len(terms)


def torchtune(teacher: Tensor) -> tuple[str, Step]:
    """torchtune's ForwardKLLoss; its file is loaded alone, for the package needs more than a loss should."""
    labels = torch.zeros(len(teacher), dtype=torch.int64)
    try:
        files = importlib.metadata.files("torchtune") or []
        path = next(file.locate() for file in files if str(file).endswith("modules/loss/kd_losses.py"))
    except (importlib.metadata.PackageNotFoundError, StopIteration):
        return "torchtune (formula)", lambda student: _cross_entropy_of_teacher(student, teacher)
    spec = importlib.util.spec_from_file_location("torchtune_kd_losses", str(path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    loss = module.ForwardKLLoss()
    return f"torchtune {importlib.metadata.version('torchtune')}", lambda student: loss(student, teacher, labels)


def _cross_entropy_of_teacher(student: Tensor, teacher: Tensor) -> Tensor:
    """−Σ p·log q with infinite logits left out, which has forward KL's gradient."""
    p, q = teacher.softmax(-1, dtype=torch.float32), student.log_softmax(-1, dtype=torch.float32)
    return -(p * q).masked_fill(student.isinf(), 0).sum(-1).mean()


def ours(divergence: str, teacher: Any, chunk: int | None = None) -> Step:
    return lambda student: kd_loss(student, teacher, divergence=divergence, beta=0.5, chunk_size=chunk).loss


def contenders(teacher: Tensor, chunk: int) -> dict[Name, Step]:
    """Everything that is compared."""
    dense = DenseLogits(teacher)
    steps: dict[Name, Step] = {}
    for divergence in ("forward_kl", "reverse_kl"):
        steps[divergence, "plain torch"] = plain(divergence, teacher)
        steps[divergence, "distill_rl"] = ours(divergence, dense)
        steps[divergence, "distill_rl, chunk N/64"] = ours(divergence, dense, chunk)
    by, step = torchtune(teacher)
    steps["forward_kl", by] = step
    by, step = trl(0.0, teacher)
    steps["forward_kl", by] = step
    by, step = trl(0.5, teacher)
    steps["jsd", by] = step
    steps["jsd", "distill_rl"] = ours("jsd", dense)
    top = vocab_parallel_topk(teacher, TOP_K)
    steps[f"forward_kl, top {TOP_K} + rest", "distill_rl"] = ours("forward_kl", top)
    steps[f"forward_kl, top {TOP_K} + rest", "distill_rl, chunk N/64"] = ours("forward_kl", top, chunk)
    return steps


def compare(rows: int, vocabulary: int, rounds: int) -> list[Figures]:
    """All contenders on the same random logits."""
    draw = torch.Generator().manual_seed(0)
    student, teacher = (2 * torch.randn(rows, vocabulary, generator=draw) for _ in range(2))
    chunk, times = max(1, rows // 64), {}
    for dtype in (torch.float32, torch.bfloat16):
        narrow = student.to(dtype)
        steps = contenders(teacher.to(dtype), chunk)
        runs = {name: forward_backward(narrow, step) for name, step in steps.items()}
        best = best_times(runs, rounds)
        times[dtype] = {name: seconds / best["forward_kl", "plain torch"] for name, seconds in best.items()}
    memory = {name: peak_bytes(run) / narrow.numel() for name, run in runs.items()}
    return [Figures(*name, round(memory[name], 3), *(round(times[dtype][name], 3) for dtype in times)) for name in runs]


def fused_bytes(rows: int, vocabulary: int, hidden: int, chunk: int) -> int:
    """Peak of the fused loss in bf16, top-k targets."""
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(rows, hidden, generator=draw).to(torch.bfloat16)
    weight = (torch.randn(vocabulary, hidden, generator=draw) / hidden**0.5).to(torch.bfloat16)
    ids = torch.arange(TOP_K).expand(rows, TOP_K)
    target = TopKLogprobs(ids, torch.full(ids.shape, 0.5 / TOP_K).log(), torch.full((rows,), 0.5).log())

    def run() -> None:
        leaves = states.detach().requires_grad_(), weight.detach().requires_grad_()
        fused_linear_kd_loss(*leaves, target, chunk_size=chunk).loss.backward()

    return peak_bytes(run)


def measure_fused(rows: int, vocabulary: int) -> list[dict[str, Any]]:
    """The fused loss at N, 2N and 4N rows: the peak follows the inputs, not N·V."""
    measured = []
    for factor in (1, 2, 4):
        peak = fused_bytes(rows * factor, vocabulary, HIDDEN, 64)
        measured.append(
            {
                "rows": rows * factor,
                "peak_mib": round(peak / 2**20, 1),
                "bytes_per_element": round(peak / (rows * factor * vocabulary), 3),
            }
        )
    return measured


def show(figures: list[Figures], fused: list[dict[str, Any]], title: str) -> None:
    table = Table("loss", "by", "bytes/element", "time, fp32", "time, bf16", title=title)
    for line in figures:
        table.add_row(
            line.loss, line.by, f"{line.bytes_per_element:.2f}", f"{line.time_fp32:.2f}×", f"{line.time_bf16:.2f}×"
        )
    console = Console(width=120)
    console.print(table)
    table = Table("rows", "peak MiB", "bytes/element", title=f"fused_linear_kd_loss, bf16, H = {HIDDEN}, chunk 64")
    for entry in fused:
        table.add_row(*(str(value) for value in entry.values()))
    console.print(table)


def main() -> None:
    parser = record.parser("Memory and time of the losses beside other implementations")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments: argparse.Namespace = parser.parse_args()
    figures = compare(arguments.rows, arguments.vocabulary, arguments.rounds)
    fused = measure_fused(arguments.rows // 4, arguments.vocabulary)
    title = f"N = {arguments.rows}, V = {arguments.vocabulary}; times over plain torch's forward KL"
    show(figures, fused, title)
    settings = {name: getattr(arguments, name) for name in ("rows", "vocabulary", "rounds")}
    settings["threads"] = torch.get_num_threads()
    path = record.write(
        "losses", {"settings": settings, "results": [asdict(line) for line in figures], "fused": fused}, arguments.out
    )
    print(f"written: {path}")


if __name__ == "__main__":
    main()
