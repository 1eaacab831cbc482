"""What a training step costs on one GPU, part by part: the page docs/benchmarks/gpu_model.md, and the same for a terminal.

Teacher and student share the card and run one after the other, so their times add up. The numbers are those of `scaling.model`.
Standard library only.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from distill_rl.scaling.model import (
    CARDS,
    KINDS,
    PHASES,
    Card,
    CostPart,
    Step,
    microseconds,
    student_parts,
    teacher_parts,
)
from distill_rl.system.environment import ROOT
from tests.bench.gpu.shapes import PAIRS, Pair

if TYPE_CHECKING:
    import torch


def parts(pair: Pair, step: Step, card: Card) -> list[CostPart]:
    """The parts of one step of teacher and student, in the order of `PHASES`.

    What costs less than a hundredth of a microsecond per token on an H200 is not modelled.
    """
    return [*teacher_parts(pair.teacher, step, card), *student_parts(pair.student, step, card, alone=True)]


PAGE = ROOT / "docs" / "benchmarks" / "gpu_model.md"

_INTRODUCTION = """\
# What a step should cost on one GPU

Written by `bash launch/bench.sh cost_model --write`; edit [cost_model.py](../../tests/bench/gpu/cost_model.py) instead.
These are predictions, not measurements. `bash launch/bench.sh engine_throughput` runs both engines on a GPU and prints what it
measures beside them.

Teacher and student share one {card} and run one after the other, so a token costs the sum of both. A step has {rows} rows of
{length:,} tokens in micro-batches of {micro_batch} rows, without activation checkpointing; the teacher reads as many tokens.
Kernels are those of transformers and torch. Rates ({source}):
{bandwidth:.1f} TB/s, read and written bytes counted, and {matmul:.0f} TFLOP/s in bf16. Attention is assumed to reach {forward:.0%} of the
latter forward and {backward:.0%} backward; it is the one rate here that nobody has measured on this card.

`ours` counts every pass of this package's code. `ideal` has the same matrix products, attention at the full rate, and a
fused kernel that reads its inputs and writes its results once for everything else.
"""
_LEFT_OUT = """\
## What is left out

- Matrix products of a layer's sizes run below the rate of a large square one, and kernels whose rows are not aligned
  below copy bandwidth. Both make a real step slower than `ours`.
- Kernel launches: a micro-batch launches a few thousand kernels, some 10 ms of CPU time against some 150 ms on the card. They are
  hidden unless micro-batches are small.
- A teacher with another tokenizer reads somewhat more or fewer tokens than the student. The loss over chunks (`hybrid`) makes
  the same passes over logits as the one over tokens; what it adds is small.
- Copies of weights and gradients run in streams of their own and may overlap with arithmetic.
- Reuse in the level-2 cache: a chunk of fp32 logits (128 MiB) does not fit, activations of a micro-batch do in part.
"""


def page() -> str:
    """The Markdown of docs/benchmarks/gpu_model.md: an H200, all pairs, the default step. Writes nothing."""
    card, step = CARDS["h200"], Step()
    introduction = _INTRODUCTION.format(
        card=card.name, rows=step.rows, length=step.length, micro_batch=step.micro_batch, source=card.source,
        bandwidth=card.bandwidth / 1e12, matmul=card.matmul / 1e12, forward=card.attention[0],
        backward=card.attention[1],
    )  # fmt: skip
    return "\n".join([introduction, *(_section(pair, step, card) for pair in PAIRS.values()), _LEFT_OUT])


def _section(pair: Pair, step: Step, card: Card) -> str:
    """The Markdown section of a pair: the summary, a table by kind of work, and one with the formula of every part."""
    found = parts(pair, step, card)
    lines = [f"## {pair.name}", "", _verdict(pair, step, card, found), ""]
    lines += ["| kind | µs per token, ours | ideal |", "|---|---:|---:|"]
    lines += [f"| {name} | {ours:.2f} | {ideal:.2f} |" for name, ours, ideal in _rows(found, card, by="kind")]
    lines += ["", "| phase | kind | µs, ours | ideal | FLOPs or bytes per token |", "|---|---|---:|---:|---|"]
    lines += [
        f"| {part.phase} | {part.kind} | {1e6 * part.seconds(card):.2f} | {1e6 * part.ideal_seconds(card):.2f} "
        f"| {part.formula} |"
        for part in found
    ]
    return "\n".join([*lines, ""])


def _verdict(pair: Pair, step: Step, card: Card, found: list[CostPart]) -> str:
    """A Markdown paragraph with the predicted µs per token and tokens per second of a pair, ours and ideal.

    Args:
        found: the parts of the pair.
    """
    ours, ideal = (sum(microseconds(found, card, by="kind", ideal=each).values()) for each in (False, True))
    by_phase = microseconds(found, card, by="phase")
    teacher = sum(by_phase[phase] for phase in PHASES[:2])
    flops = pair.flops_per_token(step.length)
    of_rate = 1e6 * flops / ours / card.matmul
    return (
        f"Teacher {teacher:.1f} + student {ours - teacher:.1f} = **{ours:.1f} µs per token, {1e6 / ours:,.0f} tokens/s**; "
        f"ideal {ideal:.1f} µs, {1e6 / ideal:,.0f} tokens/s. "
        f"The models' {flops / 1e9:.1f} GFLOP per token are then {of_rate:.0%} of the matrix-product rate."
    )


def _rows(found: list[CostPart], card: Card, *, by: str) -> list[tuple[str, float, float]]:
    """(name, our µs per token, ideal µs per token) for each phase or kind of work; last, `all` with the sums.

    Args:
        by: `phase` or `kind`.
    """
    ours, ideal = (microseconds(found, card, by=by, ideal=each) for each in (False, True))
    rows = [(name, ours[name], ideal[name]) for name in (KINDS if by == "kind" else PHASES)]
    return [*rows, ("all", sum(ours.values()), sum(ideal.values()))]


def table(pair: Pair, step: Step, card: Card) -> str:
    """A pair's prediction as text for a terminal: µs per token by phase and by kind of work, and the summary."""
    found = parts(pair, step, card)
    lines = [f"{pair.name} on one {card.name} ({card.source}), µs per token"]
    for by in ("phase", "kind"):
        lines += ["", f"{by:<24}{'ours':>9}{'ideal':>9}"]
        lines += [f"{name:<24}{ours:>9.2f}{ideal:>9.2f}" for name, ours, ideal in _rows(found, card, by=by)]
    return "\n".join([*lines, "", _verdict(pair, step, card, found).replace("**", "")])


def measure_card(device: torch.device) -> Card:
    """A card with the copy bandwidth and matrix-product rate measured on this device now.

    Attention's shares stay the assumed defaults. `nominal` is None for a CPU and for GPUs that are not in `CARDS`.
    """
    import torch

    from tests.bench.gpu.timing import copy_bandwidth, matmul_rate

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    nominal = next((card.nominal for key, card in CARDS.items() if key.upper() in name.upper()), None)
    return Card(name, copy_bandwidth(device), matmul_rate(device), nominal, "measured just now")


def main(argv: list[str] | None = None) -> int:
    """Prints the prediction for one or all pairs, or with --write writes the page instead.

    Returns the exit code: 0, or 2 with a line on standard error if the sizes do not fit each other.
    """
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--card", choices=(*CARDS, "cpu"), default="h200", help="cpu: its rates are measured first")
    parser.add_argument("--pair", choices=tuple(PAIRS), help="by its teacher; default: all")
    parser.add_argument("--rows", type=int, default=Step.rows, help="per optimizer step; %(default)s")
    parser.add_argument("--micro-batch", type=int, default=Step.micro_batch, help="rows; %(default)s")
    parser.add_argument("--length", type=int, default=Step.length, help="tokens per row; %(default)s")
    parser.add_argument("--write", nargs="?", type=Path, const=PAGE, metavar="FILE",
                        help="write the page (of an H200, all pairs, default sizes) instead; default: docs/benchmarks/gpu_model.md")  # fmt: skip
    options = parser.parse_args(argv)
    if options.write:
        options.write.write_text(page(), "utf-8")
        print(f"written: {options.write}")
        return 0
    if options.micro_batch < 1 or options.length < 1 or options.rows < 1 or options.rows % options.micro_batch:
        print(
            f"cost_model: error: --rows must be a multiple of --micro-batch, and all sizes positive; "
            f"got {options.rows} rows, micro-batches of {options.micro_batch}, {options.length} tokens",
            file=sys.stderr,
        )
        return 2
    step = Step(options.rows, options.micro_batch, options.length)
    if options.card == "cpu":
        import torch

        card = measure_card(torch.device("cpu"))
    else:
        card = CARDS[options.card]
    print("\n\n".join(table(PAIRS[name], step, card) for name in ([options.pair] if options.pair else PAIRS)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
