"""Time and memory of the cross-tokenizer losses on a CUDA device, at the vocabularies of two real models.

Forward and backward of KD plus cross-entropy, from logits of the student and targets of the teacher: whole logits, and
for `hybrid` also its top k. Chunks are of all kinds, three quarters of them 1:1. Beside them, in the same run, stands
the loss for one tokenizer on the same student logits, against a teacher with the student's vocabulary; ratios are to
that. Times are medians by CUDA events after a warm-up, memory is the allocator's peak above what was there before, the
gradient included.

`--device cpu` is the same at small sizes in fp32, to see that it works; its figures say nothing and are kept only where
--out says.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill_rl.losses import (
    Chunks,
    DenseLogits,
    TopKLogprobs,
    chunk_kd_loss,
    kd_loss,
    vocab_parallel_topk,
)
from tests.bench import harness
from tests.bench.gpu.engines import fill_chunks, random_projection
from tests.bench.gpu.losses_cuda import OURS, Case, Figures, Step, measure, recorded, with_ratio

SIZES = {
    "cuda": {"rows": 4096, "columns": 128_256, "teacher_columns": 151_936},
    "cpu": {"rows": 128, "columns": 2048, "teacher_columns": 2560},
}
"""Student rows, student columns and teacher columns by default."""
TOP_K = 64
ONE_TOKENIZER = "kd_loss, one tokenizer"


def _chunks(rows: int, device: str) -> Chunks:
    """Made-up chunks of mixed lengths over `rows` student rows and as many teacher rows as the chunks need.

    Student rows that are left over at the end are in no chunk.
    """
    sides = fill_chunks((rows, sys.maxsize))
    count = sides[0][-1] + 1
    sides[0].extend([-1] * (rows - len(sides[0])))
    student, teacher = (torch.tensor(side, device=device) for side in sides)
    return Chunks(student, teacher, count)


def draw(sizes: Mapping[str, int], device: str) -> tuple[Tensor, list[Case]]:
    """The student's logits [rows, columns], random with standard deviation 2, and the cases to measure on them.

    The first case is `kd_loss` for one tokenizer; the others are every method on each kind of targets measured for it.
    The dtype is bf16 on `cuda` and fp32 otherwise; the seeds are fixed.

    Args:
        sizes: by name, as in `SIZES`.
    """
    rows, columns, teacher_columns = sizes["rows"], sizes["columns"], sizes["teacher_columns"]
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    chunks, projection = _chunks(rows, device), random_projection(columns, teacher_columns).to(device)

    def logits(shape: tuple[int, int]) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype).mul_(2)

    def tokens(shape: tuple[int, int]) -> Tensor:
        return torch.randint(0, shape[1], shape[:1], generator=generator, device=device)

    student_shape, teacher_shape = (rows, columns), (len(chunks.teacher), teacher_columns)
    student, teacher = logits(student_shape), logits(teacher_shape)
    labels = tokens(student_shape)
    top = vocab_parallel_topk(teacher, min(TOP_K, teacher_columns), labels=tokens(teacher_shape))
    dense = DenseLogits(teacher, top.label_logprob)
    own = vocab_parallel_topk(student.flip(0), min(TOP_K, columns))

    def one(student: Tensor) -> Tensor:
        return kd_loss(student, own, labels=labels, kd_ratio=0.5, reduction="sum").loss

    def step(method: str, target: DenseLogits | TopKLogprobs, **keywords: Any) -> Step:
        def loss(student: Tensor) -> Tensor:
            output = chunk_kd_loss(
                student,
                target,
                chunks,
                projection,
                method=method,
                labels=labels,
                top_k=TOP_K,
                **keywords,
            )
            return 0.5 * output.kd + 0.5 * output.ce

        return loss

    cases: list[Case] = [
        (Figures("logits", "forward_kl", ONE_TOKENIZER, f"top {TOP_K}"), one),
        (Figures("logits", "hybrid", OURS, f"top {TOP_K}"), step("hybrid", top)),
        (Figures("logits", "alm", OURS, "label log-probs"), step("alm", top)),
    ]
    for method in ("hybrid", "xtoken", "gold", "uld", "strict"):
        cases.append((Figures("logits", method, OURS, "logits"), step(method, dense)))
    for method in ("xtoken", "gold"):
        chained = step(method, dense, chunk_average="chain")
        cases.append((Figures("logits", f"{method}, chain", OURS, "logits"), chained))
    return student, cases


def compare(_: Path, *, device: str, sizes: Mapping[str, int], repeats: int = 5) -> dict[str, Any]:
    """Measures all cases on the same draw, with the ratio of each time to that of `kd_loss` for one tokenizer.

    Args:
        repeats: timed runs of each case.
    """
    student, cases = draw(sizes, device)
    measured = [measure(figures, step, [student], repeats) for figures, step in cases]
    base = next(line.milliseconds for line in measured if line.by == ONE_TOKENIZER)
    compared = [with_ratio(line, base) for line in measured]
    return recorded(compared, device=device, sizes=sizes, repeats=repeats, top_k=TOP_K)


main = harness.program("cross_tokenizer_cuda", compare, sizes=SIZES)

if __name__ == "__main__":
    sys.exit(main())
