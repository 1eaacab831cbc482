"""What a step costs on one GPU, part by part, from the models' shapes and the card's two rates.

A part is either arithmetic (FLOPs over the card's measured rate) or memory traffic (bytes read and written over its
measured copy bandwidth). Both are those of this package's code, pass by pass; beside them stands what a fused
implementation would need.

Bytes per element below are counted operation by operation; tests/bench/gpu/test_cost_model.py counts them again while the
code runs. What the model leaves out makes a real step slower: launch gaps, memory-bound kernels below copy bandwidth,
matrix products below the rate of a large square one. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from distill_rl.scaling.shape import NOMINAL, Shape

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
    "h200": Card("H200", 4.3e12, 790e12, NOMINAL["H200"], "measured: copy bandwidth, large matrix product"),
    "h100": Card("H100 SXM", 3.0e12, 790e12, NOMINAL["H100"], "scaled from H200 by the data sheets (3.35 of 4.8 TB/s)"),
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
"""What a program can time from outside, in the order of a step. The loss includes the output layer, and the gradients of both."""
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


def teacher_parts(shape: Shape, step: Step, card: Card) -> list[Part]:
    """The parts of the teacher's forward pass, per token: those of the model's body, then output layer and top k."""
    body, head, top_k = *PHASES[:2], shape.columns
    return [
        Part(body, "GEMM", "2 · body parameters", flops=shape.body_flops),
        Part(body, "attention", "layers · 2 · heads · head size · S, causal", shape.attention_flops(step.length),
             card.attention[0]),
        _elementwise(body, shape, 0),
        Part(head, "GEMM", "2 · head parameters", flops=shape.head_flops),
        Part(head, "top-k", f"({TOP_K} + {TOP_K_KERNEL}) bytes · columns; ideal {FUSED_TOP_K}",
             bytes=(TOP_K + TOP_K_KERNEL) * top_k, ideal_bytes=FUSED_TOP_K * top_k),
        # int64 ids and fp32 log-probabilities are put together, narrowed to 4 + 2 bytes, and copied into the slot
        Part(head, "copies", "slot: 54 bytes · k; ideal 6", bytes=54.0 * step.top_k, ideal_bytes=6.0 * step.top_k),
    ]  # fmt: skip


def student_parts(shape: Shape, step: Step, card: Card) -> list[Part]:
    """The parts of the student's step, per token: forward, loss, backward and optimizer.

    What happens once per step or per micro-batch is divided by its tokens.
    """
    forward, loss, backward, optimizer = PHASES[2:]
    per_step = shape.parameters / step.tokens
    more = step.micro_batches - 1
    # The gradient of a single micro-batch goes into the flat buffer as it is, 6, and there is no sum.
    first, reduce = (FIRST_GRADIENT, REDUCE) if more else (0, REDUCE - 2)
    # Each micro-batch writes the table's whole gradient; where it is tied, that of the output layer is added: 6.
    table = (8 if shape.tied else 2) * shape.head_parameters / (step.micro_batch * step.length)
    return [
        Part(forward, "GEMM", "2 · body parameters", flops=shape.body_flops),
        Part(forward, "attention", "layers · 2 · heads · head size · S, causal", shape.attention_flops(step.length),
             card.attention[0]),
        _elementwise(forward, shape, 0),
        Part(forward, "copies", f"weights to bf16: {GATHER} bytes · parameters / tokens per step; ideal 6",
             bytes=GATHER * per_step, ideal_bytes=6 * per_step),
        Part(loss, "GEMM", "6 · head parameters", flops=3 * shape.head_flops),
        Part(loss, "KD", f"{KD} bytes · columns; ideal {FUSED_KD}",
             bytes=KD * shape.columns, ideal_bytes=FUSED_KD * shape.columns),
        Part(backward, "GEMM", "4 · body parameters", flops=2 * shape.body_flops),
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
    """Norms, rotary embedding, SwiGLU and residual sums; `backward` is 0 or 1, the index into the pairs of constants."""
    ours = [NORM[backward], ROTARY[backward], SWIGLU[backward], RESIDUAL[backward]]
    ideal = [FUSED_NORM[backward], FUSED_ROTARY[backward], FUSED_SWIGLU[backward], FUSED_RESIDUAL[backward]]
    formula = "norms {}, rotary {}, SwiGLU {}, sums {} bytes per element; ideal {}, {}, {}, {}".format(*ours, *ideal)
    return Part(phase, "elementwise", formula, bytes=_elements(shape, *ours), ideal_bytes=_elements(shape, *ideal))


def _elements(shape: Shape, norm: float, rotary: float, swiglu: float, residual: float) -> float:
    """Bytes per token of all layers and the last norm, from the bytes per element of each kind of pass."""
    # Qwen3 also norms queries and keys.
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
