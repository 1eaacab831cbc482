"""What a training step costs on one GPU, part by part, from the models' shapes and the card's two rates.

A part is either arithmetic (FLOPs over the card's measured rate) or memory traffic (bytes read and written over its
measured copy bandwidth). Both are those of this package's code, pass by pass; beside them stands what a fused
implementation would need. Teacher and student share the card and run one after the other, so their times add up.

Bytes per element below are counted operation by operation; tests/bench/test_cost_model.py counts them again while the
code runs. What the model leaves out makes a real step slower: launch gaps, memory-bound kernels below copy bandwidth,
matrix products below the rate of a large square one. `page` writes docs/benchmarks/gpu_model.md. Standard library only.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distill_rl.bench.gpu.shapes import PAIRS, Pair, Shape

if TYPE_CHECKING:
    import torch

# Bytes per element of bf16 activations, as transformers' modules run without fused kernels.
NORM = (36, 92)
"""RMSNorm, forward and backward. It computes in fp32: cast 6, square 8, mean 4, scale 8, cast back 6, weight 4."""
ROTARY = (20, 32)
"""Per element of queries and keys: two products, a rotated half that is concatenated anew, a sum."""
SWIGLU = (10, 18)
"""Per element of the intermediate size: silu, then the product."""
RESIDUAL = (12, 30)
"""Per element of the hidden size: two sums; backward also sums where several products read one tensor."""
FUSED_NORM, FUSED_ROTARY, FUSED_SWIGLU, FUSED_RESIDUAL = (4, 6), (4, 4), (6, 10), (12, 12)
"""The same as one kernel each that reads its inputs and writes its results once."""

# Bytes per bf16 logit.
KD = 84
"""Forward 40: centre 2, to fp32 less it 6, clamp 8, maximum 4, difference 8, exponential 8, sum 4. Backward 44: the same 6, clamp 8,
difference 8, exponential 8, factor 8, gradient to bf16 6."""
FUSED_KD = 6
"""Forward reads the logits; backward reads them again and writes the gradient."""
TOP_K = 44
"""Centre 2, to fp32 less it 6, clamp 8, top-k's own reading 4, maximum 4, difference 8, exponential 8, sum 4."""
TOP_K_KERNEL = 24
"""What torch's CUDA top-k moves beyond one reading: a contiguous copy of its input 8, then radix selection by four
digits of 8 bits and a gathering pass, five readings of 4."""
FUSED_TOP_K = 2

# Bytes per parameter of the student, fp32 master weights and bf16 compute, data-parallel size 1.
GATHER = 10
"""Once per step: fp32 to bf16 6, into the gathered parameter 4."""
FIRST_GRADIENT, MORE_GRADIENT = 6, 10
"""A micro-batch's bf16 gradient becomes the fp32 sum 6, or is added to it 10."""
REDUCE = 16
"""Once per step, on one rank: the fp32 sum into a flat buffer 8, from there into the sharded gradient 8."""
CLIP = 12
"""The norm reads 4, the factor 8."""
ADAMW = 28
"""The fused kernel reads weight, gradient and both moments 16, writes all but the gradient 12."""


@dataclass(frozen=True)
class Card:
    """Rates of a device that real kernels reach."""

    name: str
    bandwidth: float
    """bytes per second of a copy, read and written bytes counted"""
    matmul: float
    """FLOP/s of a large bf16 matrix product"""
    nominal: float | None
    """the data sheet's dense bf16 FLOP/s"""
    source: str
    attention: tuple[float, float] = (0.45, 0.35)
    """share of `matmul` that causal attention reaches at 2,048 positions, forward and backward; an assumption, from
    published figures of FlashAttention-2 and cuDNN on Hopper"""


CARDS = {
    "h200": Card("H200", 4.3e12, 790e12, 989e12, "measured: copy bandwidth, large matrix product"),
    "h100": Card("H100 SXM", 3.0e12, 790e12, 989e12, "scaled from H200 by the data sheets (3.35 of 4.8 TB/s)"),
}


@dataclass(frozen=True)
class Step:
    """One optimizer step of full rows on one GPU."""

    rows: int = 8
    micro_batch: int = 2
    length: int = 2048
    top_k: int = 64

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def micro_batches(self) -> int:
        return self.rows // self.micro_batch


PHASES = ("teacher body", "teacher head, top-k", "student forward", "loss", "student backward", "optimizer")
"""What a program can time from outside, in the order of a step. The loss includes its gradient."""
KINDS = ("GEMM", "attention", "elementwise", "KD", "top-k", "copies", "accumulation", "optimizer")


@dataclass(frozen=True)
class Part:
    """Work per token of the student's batch, in one phase and of one kind: FLOPs or bytes, ours and the ideal's."""

    phase: str
    kind: str
    formula: str
    flops: float = 0.0
    share: float = 1.0
    """of the matrix-product rate that the FLOPs reach"""
    bytes: float = 0.0
    ideal_bytes: float = 0.0

    def seconds(self, card: Card) -> float:
        """The time of this part's arithmetic and of its memory traffic on `card`, one after the other."""
        return self.flops / (self.share * card.matmul) + self.bytes / card.bandwidth

    def ideal_seconds(self, card: Card) -> float:
        """The time on `card` of the same FLOPs at the full matrix-product rate and of the ideal's bytes."""
        return self.flops / card.matmul + self.ideal_bytes / card.bandwidth


def parts(pair: Pair, step: Step, card: Card) -> list[Part]:
    """The parts of one step of teacher and student, in the order of `PHASES`.

    What costs less than a hundredth of a microsecond per token on an H200 is not modelled.
    """
    return [*_teacher(pair.teacher, step, card), *_student(pair.student, step, card)]


def _teacher(shape: Shape, step: Step, card: Card) -> list[Part]:
    """The parts of the teacher's forward pass, per token: those of the model's body, then output layer and top k."""
    body, head, top_k = *PHASES[:2], shape.columns
    return [
        Part(body, "GEMM", "2 · body parameters", flops=2.0 * shape.body_parameters),
        Part(body, "attention", "layers · 2 · heads · head size · S, causal", shape.attention_flops(step.length),
             card.attention[0]),
        _elementwise(body, shape, 0),
        Part(head, "GEMM", "2 · head parameters", flops=2.0 * shape.head_parameters),
        Part(head, "top-k", f"({TOP_K} + {TOP_K_KERNEL}) bytes · columns; ideal {FUSED_TOP_K}",
             bytes=(TOP_K + TOP_K_KERNEL) * top_k, ideal_bytes=FUSED_TOP_K * top_k),
        # int64 ids and fp32 log-probabilities are put together, narrowed to 4 + 2 bytes, and copied into the slot
        Part(head, "copies", "slot: 54 bytes · k; ideal 6", bytes=54.0 * step.top_k, ideal_bytes=6.0 * step.top_k),
    ]  # fmt: skip


def _student(shape: Shape, step: Step, card: Card) -> list[Part]:
    """The parts of the student's step, per token: forward, loss, backward and optimizer.

    What happens once per step or per micro-batch is divided by its tokens.
    """
    forward, loss, backward, optimizer = PHASES[2:]
    multiplied = shape.body_parameters + shape.head_parameters
    per_step = shape.parameters / step.tokens
    more = step.micro_batches - 1
    # The gradient of a single micro-batch goes into the flat buffer as it is, 6, and there is no sum.
    first, reduce = (FIRST_GRADIENT, REDUCE) if more else (0, REDUCE - 2)
    # Each micro-batch writes the table's whole gradient; where it is tied, that of the output layer is added: 6.
    table = (8 if shape.tied else 2) * shape.head_parameters / (step.micro_batch * step.length)
    return [
        Part(forward, "GEMM", "2 · parameters that multiply", flops=2.0 * multiplied),
        Part(forward, "attention", "layers · 2 · heads · head size · S, causal", shape.attention_flops(step.length),
             card.attention[0]),
        _elementwise(forward, shape, 0),
        Part(forward, "copies", f"weights to bf16: {GATHER} bytes · parameters / tokens per step; ideal 6",
             bytes=GATHER * per_step, ideal_bytes=6 * per_step),
        Part(loss, "KD", f"{KD} bytes · columns; ideal {FUSED_KD}",
             bytes=KD * shape.columns, ideal_bytes=FUSED_KD * shape.columns),
        Part(backward, "GEMM", "4 · parameters that multiply", flops=4.0 * multiplied),
        Part(backward, "attention", "2.5 · forward: the scores are computed again", 2.5 * shape.attention_flops(step.length),
             card.attention[1]),
        _elementwise(backward, shape, 1),
        Part(backward, "accumulation",
             f"({first} + {MORE_GRADIENT} · (micro-batches − 1)) bytes · parameters / tokens per step, "
             f"and {8 if shape.tied else 2} bytes · embedding / tokens per micro-batch; ideal 8 for each further micro-batch",
             bytes=(first + MORE_GRADIENT * more) * per_step + table, ideal_bytes=8 * more * per_step),
        Part(backward, "copies", f"gradient to its shard: {reduce} bytes · parameters / tokens per step; ideal 0",
             bytes=reduce * per_step),
        Part(optimizer, "optimizer", f"clipping {CLIP} and AdamW {ADAMW} bytes · parameters / tokens per step; ideal 32",
             bytes=(CLIP + ADAMW) * per_step, ideal_bytes=(4 + ADAMW) * per_step),
    ]  # fmt: skip


def _elementwise(phase: str, shape: Shape, backward: int) -> Part:
    """The memory-bound part of all layers and the last norm: norms, rotary embedding, SwiGLU and residual sums.

    Args:
        phase: of the part that is returned.
        backward: index into the pairs of constants: 0 for forward, 1 for backward.
    """
    ours = [NORM[backward], ROTARY[backward], SWIGLU[backward], RESIDUAL[backward]]
    ideal = [FUSED_NORM[backward], FUSED_ROTARY[backward], FUSED_SWIGLU[backward], FUSED_RESIDUAL[backward]]
    formula = "norms {}, rotary {}, SwiGLU {}, sums {} bytes per element; ideal {}, {}, {}, {}".format(*ours, *ideal)
    return Part(phase, "elementwise", formula, bytes=_elements(shape, *ours), ideal_bytes=_elements(shape, *ideal))


def _elements(shape: Shape, norm: float, rotary: float, swiglu: float, residual: float) -> float:
    """Bytes per token of all layers and the last norm.

    Args:
        norm: bytes per element of a normed vector; Qwen3 also norms queries and keys.
        rotary: bytes per element of queries and keys.
        swiglu: bytes per element of the intermediate size.
        residual: bytes per element of the hidden size.
    """
    normed = 2 * shape.hidden + (shape.query_and_key if shape.family == "qwen3" else 0)
    layer = norm * normed + rotary * shape.query_and_key + swiglu * shape.intermediate + residual * shape.hidden
    return shape.layers * layer + norm * shape.hidden


def microseconds(found: list[Part], card: Card, *, by: str, ideal: bool = False) -> dict[str, float]:
    """Predicted µs per token, summed by phase or by kind of work; all names of `PHASES` or `KINDS` in that order.

    Args:
        found: what `parts` returned.
        by: `phase` or `kind`.
        ideal: give the ideal times instead of ours.
    """
    sums = dict.fromkeys(PHASES if by == "phase" else KINDS, 0.0)
    for part in found:
        seconds = part.ideal_seconds(card) if ideal else part.seconds(card)
        sums[part.phase if by == "phase" else part.kind] += 1e6 * seconds
    return sums


PAGE = Path(__file__).parents[3] / "docs" / "benchmarks" / "gpu_model.md"

_INTRODUCTION = """\
# What a step should cost on one GPU

Written by `bash launch/bench.sh cost_model --write`; edit [cost_model.py](../../distill_rl/bench/gpu/cost_model.py) instead.
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


def _verdict(pair: Pair, step: Step, card: Card, found: list[Part]) -> str:
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


def _rows(found: list[Part], card: Card, *, by: str) -> list[tuple[str, float, float]]:
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

    from distill_rl.bench.gpu.timing import copy_bandwidth, matmul_rate

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
