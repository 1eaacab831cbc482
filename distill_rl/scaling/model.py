"""What to expect of a cluster: the cost of a step, part by part, faults, and stages that overlap."""

from __future__ import annotations

import operator
import random
from dataclasses import dataclass
from math import ceil, exp, expm1, sqrt
from statistics import NormalDist

from distill_rl.config.facts import ModelFacts
from distill_rl.scaling.shape import NOMINAL, Shape

# GPUs, and what connects them.

MEMORY = {"h100": 80e9, "h200": 141e9}
"""Bytes of a card's memory, by the names of `CARDS`."""


@dataclass(frozen=True, slots=True)
class Cluster:
    gpus: int
    card: str = "h100"
    """A name of `CARDS`."""
    per_node: int = 8
    inside: float = 360e9
    """Bytes per second at which a GPU sends to others of its node, as collectives reach them: NVLink's 450 GB/s in one direction, of
    which NCCL reaches about four fifths."""
    between: float = 42e9
    """The same to other nodes: a port of 400 Gbit/s for every GPU, of which NCCL reaches about five sixths."""

    @property
    def rates(self) -> Card:
        return CARDS[self.card]

    def gather(self, num_bytes: float, ranks: int) -> float:
        """Seconds in which neighbouring ranks exchange their parts of `num_bytes`, or add up and keep a part each."""
        rate = self.inside if ranks <= self.per_node else self.between
        return (ranks - 1) / ranks * num_bytes / rate

    def all_reduce(self, num_bytes: float, ranks: int) -> float:
        """Seconds in which neighbouring ranks add up what each has, `num_bytes`."""
        return 2 * self.gather(num_bytes, ranks)


# What a step costs on one GPU, part by part, from the models' shapes and the card's two rates.
#
# A part is either arithmetic (FLOPs over the card's measured rate) or memory traffic (bytes read and written over its
# measured copy bandwidth). Both are those of this package's code, pass by pass; beside them stands what a fused
# implementation would need.
#
# Bytes per element below are counted operation by operation; tests/bench/gpu/test_cost_model.py counts them again while the
# code runs. What the model leaves out makes a real step slower: launch gaps, memory-bound kernels below copy bandwidth,
# matrix products below the rate of a large square one. Standard library only.

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
KD = 68
"""Forward 32: centre 2, to fp32 less it 6, maximum 4, difference 8, exponential 8, sum 4. Backward 36: the same 6, difference 8,
exponential 8, factor 8, gradient to bf16 6."""
FUSED_KD = 6
"""Forward reads the logits; backward reads them again and writes the gradient."""
TOP_K = 44
"""Centre 2, to fp32 less it 6, clamp 8, top-k's own reading 4, maximum 4, difference 8, exponential 8, sum 4."""
TOP_K_KERNEL = 24
"""What torch's CUDA top-k moves beyond one reading: a contiguous copy of its input 8, then radix selection by four
digits of 8 bits and a gathering pass, five readings of 4."""
FUSED_TOP_K = 2

# Bytes per parameter of the student, fp32 master weights and bf16 compute.
COPY = 6
"""Once per step on one rank: fp32 to bf16."""
GATHER = 10
"""Once per step on a shard of FSDP2: fp32 to bf16 6, into the gathered parameter 4."""
FIRST_GRADIENT, MORE_GRADIENT = 6, 10
"""A micro-batch's bf16 gradient becomes the fp32 sum 6, or is added to it 10."""
REDUCE = 16
"""Once per step on a shard of FSDP2: the fp32 sum into a flat buffer 8, from there into the sharded gradient 8."""
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
    """One optimizer step of full rows: of one GPU, or, where its ranks are named, of all."""

    rows: int = 8
    micro_batch: int = 2
    """Rows of the student's."""
    length: int = 2048
    """Tokens of a row."""
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
class CostPart:
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


def teacher_parts(shape: Shape, step: Step, card: Card) -> list[CostPart]:
    """The parts of the teacher's forward pass, per token: those of the model's body, then output layer and top k."""
    body, head, top_k = *PHASES[:2], shape.columns
    return [
        CostPart(body, "GEMM", "2 · body parameters", flops=shape.body_flops),
        CostPart(body, "attention", "layers · 2 · heads · head size · S, causal", shape.attention_flops(step.length),
             card.attention[0]),
        _elementwise(body, shape, 0),
        CostPart(head, "GEMM", "2 · head parameters", flops=shape.head_flops),
        CostPart(head, "top-k", f"({TOP_K} + {TOP_K_KERNEL}) bytes · columns; ideal {FUSED_TOP_K}",
             bytes=(TOP_K + TOP_K_KERNEL) * top_k, ideal_bytes=FUSED_TOP_K * top_k),
        # int64 ids and fp32 log-probabilities are put together, narrowed to 4 + 2 bytes, and copied into the slot
        CostPart(head, "copies", "slot: 54 bytes · k; ideal 6", bytes=54.0 * step.top_k, ideal_bytes=6.0 * step.top_k),
    ]  # fmt: skip


def student_parts(shape: Shape, step: Step, card: Card, *, alone: bool) -> list[CostPart]:
    """The parts of the student's step, per token: forward, loss, backward and optimizer.

    What happens once per step or per micro-batch is divided by its tokens.

    Args:
        alone: of a student on one rank, which does without FSDP2.
    """
    forward, loss, backward, optimizer = PHASES[2:]
    per_step = shape.parameters / step.tokens
    more = step.micro_batches - 1
    gather, first, reduce = (COPY, FIRST_GRADIENT, 0) if alone else (GATHER, FIRST_GRADIENT, REDUCE)
    if not more and not alone:
        # The gradient of a single micro-batch goes into the flat buffer as it is, 6, and there is no sum.
        first, reduce = 0, REDUCE - 2
    # Each micro-batch writes the table's whole gradient; where it is tied, that of the output layer is added: 6.
    table = (8 if shape.tied else 2) * shape.head_parameters / (step.micro_batch * step.length)
    return [
        CostPart(forward, "GEMM", "2 · body parameters", flops=shape.body_flops),
        CostPart(forward, "attention", "layers · 2 · heads · head size · S, causal", shape.attention_flops(step.length),
             card.attention[0]),
        _elementwise(forward, shape, 0),
        CostPart(forward, "copies", f"weights to bf16: {gather} bytes · parameters / tokens per step; ideal 6",
             bytes=gather * per_step, ideal_bytes=6 * per_step),
        CostPart(loss, "GEMM", "6 · head parameters", flops=3 * shape.head_flops),
        CostPart(loss, "KD", f"{KD} bytes · columns; ideal {FUSED_KD}",
             bytes=KD * shape.columns, ideal_bytes=FUSED_KD * shape.columns),
        CostPart(backward, "GEMM", "4 · body parameters", flops=2 * shape.body_flops),
        CostPart(backward, "attention", "2.5 · forward: the scores are computed again", 2.5 * shape.attention_flops(step.length),
             card.attention[1]),
        _elementwise(backward, shape, 1),
        CostPart(backward, "accumulation",
             f"({first} + {MORE_GRADIENT} · (micro-batches − 1)) bytes · parameters / tokens per step, "
             f"and {8 if shape.tied else 2} bytes · embedding / tokens per micro-batch; ideal 8 for each further micro-batch",
             bytes=(first + MORE_GRADIENT * more) * per_step + table, ideal_bytes=8 * more * per_step),
        CostPart(backward, "copies", f"gradient to its shard: {reduce} bytes · parameters / tokens per step; ideal 0",
             bytes=reduce * per_step),
        CostPart(optimizer, "optimizer", f"clipping {CLIP} and AdamW {ADAMW} bytes · parameters / tokens per step; ideal 32",
             bytes=(CLIP + ADAMW) * per_step, ideal_bytes=(4 + ADAMW) * per_step),
    ]  # fmt: skip


def _elementwise(phase: str, shape: Shape, backward: int) -> CostPart:
    """Norms, rotary embedding, SwiGLU and residual sums; `backward` is 0 or 1, the index into the pairs of constants."""
    ours = [NORM[backward], ROTARY[backward], SWIGLU[backward], RESIDUAL[backward]]
    ideal = [FUSED_NORM[backward], FUSED_ROTARY[backward], FUSED_SWIGLU[backward], FUSED_RESIDUAL[backward]]
    formula = "norms {}, rotary {}, SwiGLU {}, sums {} bytes per element; ideal {}, {}, {}, {}".format(*ours, *ideal)
    # Elements of a layer, by kind of pass. Qwen3 also norms queries and keys; one more norm follows the last layer.
    normed = 2 * shape.hidden + (shape.query_and_key if shape.family == "qwen3" else 0)
    elements = normed, shape.query_and_key, shape.intermediate, shape.hidden
    made, needed = (
        shape.layers * sum(map(operator.mul, costs, elements)) + costs[0] * shape.hidden for costs in (ours, ideal)
    )
    return CostPart(phase, "elementwise", formula, bytes=made, ideal_bytes=needed)


def microseconds(found: list[CostPart], card: Card, *, by: str, ideal: bool = False) -> dict[str, float]:
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


# How long teachers and student need for a batch, by how their ranks are divided.

BF16, FP32 = 2, 4
TEACHER_REDUCTIONS, STUDENT_REDUCTIONS = 2, 4
"""Sums over tensor-parallel ranks per layer: after attention and MLP, and the student's once more in its backward pass."""


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of a stage on one rank."""

    compute: float
    tensor_parallel: float
    """Collectives that nothing hides."""
    sharding: float = 0.0
    """FSDP's collectives, which run beside the computation."""

    @property
    def total(self) -> float:
        return max(self.compute + self.tensor_parallel, self.sharding)

    @property
    def waits_for_network(self) -> bool:
        """Whether FSDP's collectives take longer than what they run beside."""
        return self.sharding > self.compute + self.tensor_parallel


def teacher_time(model: ModelFacts, work: Step, cluster: Cluster, *, dp: int, tp: int) -> Time:
    """The time of a teacher's replica for its rows of a batch."""
    rows = ceil(work.rows / dp)
    step = Step(rows, rows, work.length, work.top_k)
    parts = teacher_parts(Shape.of(model), step, cluster.rates)
    reductions = _reductions(model, step.tokens, cluster, tp, TEACHER_REDUCTIONS)
    return Time(_seconds(parts, step, cluster, tp), reductions)


def student_time(model: ModelFacts, work: Step, cluster: Cluster, *, dp: int, tp: int) -> Time:
    """The time of a student rank for its rows of a batch, with the optimizer step.

    FSDP gathers the weights for the forward and for the backward pass of each micro-batch, and reduces the gradient once.
    """
    micro_batches = ceil(work.rows / (dp * work.micro_batch))
    step = Step(micro_batches * work.micro_batch, work.micro_batch, work.length, work.top_k)
    shard = model.parameters / tp
    sharding = 0.0
    if dp > 1:
        gathered = cluster.gather(BF16 * shard, dp * tp)
        sharding = 2 * micro_batches * gathered + cluster.gather(FP32 * shard, dp * tp)
    parts = [
        part if part.kind != "optimizer" else CostPart(part.phase, part.kind, part.formula, bytes=part.bytes / dp)
        for part in student_parts(Shape.of(model), step, cluster.rates, alone=dp * tp == 1)
    ]
    reductions = _reductions(model, step.tokens, cluster, tp, STUDENT_REDUCTIONS)
    return Time(_seconds(parts, step, cluster, tp), reductions, sharding)


def _seconds(parts: list[CostPart], step: Step, cluster: Cluster, tp: int) -> float:
    return sum(part.seconds(cluster.rates) for part in parts) * step.tokens / tp


def _reductions(model: ModelFacts, tokens: int, cluster: Cluster, tp: int, per_layer: int) -> float:
    """The time of the sums over tensor-parallel ranks for some tokens."""
    return model.num_layers * per_layer * cluster.all_reduce(BF16 * tokens * model.hidden_size, tp)


# What faults cost: goodput, the share of the time in which a run makes progress that it keeps.
#
# Two kinds of faults, both Poisson processes whose rate is proportional to the GPUs that they strike:
#
# - A fault of the student (process, GPU or node) takes the run back to its last checkpoint. The steps since then are done again, after the
#   time that recovery takes.
# - A fault of a teacher makes the run wait until a replacement has loaded the model. Nothing is lost.
#
# With a rate λ of the student's faults, recovery R and w seconds of work between two checkpoints, that with saving included, a segment takes
# (1/λ + R)(e^(λw) − 1) seconds on average (Daly 2006, with faults during recovery left out).

HOUR = 3600.0
LLAMA_3 = 419 / (54 * 24 * 16_384)
"""Interruptions per GPU and hour that were not planned, in 54 days of Llama 3's training on 16,384 H100s (arXiv 2407.21783)."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Of a cluster and a run. Times are in seconds."""

    per_gpu_hour: float = LLAMA_3
    student_gpus: int = 1
    teacher_gpus: int = 0
    student_recovery: float = 300.0
    """From the fault to the first step that is done again."""
    teacher_recovery: float = 120.0
    """From the fault to the next step."""

    @property
    def student_rate(self) -> float:
        """Faults per second."""
        return self.per_gpu_hour * self.student_gpus / HOUR

    @property
    def teacher_rate(self) -> float:
        return self.per_gpu_hour * self.teacher_gpus / HOUR


def goodput(faults: Faults, *, step: float, save: float, every: int) -> float:
    """The share of the time that goes into steps which count, from 0 to 1.

    Args:
        step: seconds of a step.
        save: seconds that a checkpoint holds the run up.
        every: steps between two checkpoints.
    """
    useful = step * every
    rate = faults.student_rate
    segment = useful + save
    if rate:
        try:
            segment = (1 / rate + faults.student_recovery) * expm1(rate * segment)
        except OverflowError:
            return 0.0
    # While a teacher is replaced, the run waits; the student's faults in that time are left out.
    return useful / (segment * (1 + faults.teacher_rate * faults.teacher_recovery))


def best_interval(faults: Faults, *, step: float, save: float) -> int:
    """The number of steps between checkpoints with the highest goodput.

    Found from Young's and Daly's √(2 · save / rate) by looking at the whole numbers around it; without faults, or if saving costs
    nothing, the widest or narrowest interval: a million steps, or one.
    """
    if not faults.student_rate:
        return 1_000_000
    seconds = sqrt(2 * save / faults.student_rate)
    around = max(1, round(seconds / step))
    candidates = {max(1, around * numerator // 20) for numerator in range(10, 41)}
    return max(sorted(candidates), key=lambda every: goodput(faults, step=step, save=save, every=every))


# How long steps take when the stages of a batch overlap: the rules of the pipeline, played through event by event.
#
# 1. A batch is submitted when the student begins the step that is `depth` steps earlier. Its alignment takes no time.
# 2. The teachers begin a batch when it is submitted, they are done with the one before, and their rings have room: the batch that is `ring`
#    batches earlier has been trained on.
# 3. The student begins a step when the teachers are done with it and the step before has ended.
#
# Where teachers and student share GPUs and both have work, each goes at half its speed: the GPU divides its time.

_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class Stages:
    """What a step consists of. Times are in seconds, of a rank that nothing delays."""

    teacher: float
    student: float
    between: float = 0.0
    """From one step of the student to the next: the driver's own work."""
    depth: int = 1
    """`prefetch.depth`"""
    ring: int | None = None
    """Batches for which the teachers' rings have room; None: depth + 1, as by default."""
    shared: bool = False
    """Whether teachers and student share their GPUs."""
    jitter: float = 0.0
    """Standard deviation of the logarithm of a rank's time, from step to step: 0.05 is about 5 %."""
    teacher_ranks: int = 1
    student_ranks: int = 1
    """A stage ends with its slowest rank."""


def step_seconds(stages: Stages, steps: int = 200, seed: int = 0) -> float:
    """The mean time of a step, once the pipeline is full.

    Args:
        steps: that are simulated; the first tenth is not counted.
        seed: of the jitter.
    """
    ends = simulate(stages, steps, seed)
    first = max(len(ends) // 10, 1)
    return (ends[-1] - ends[first - 1]) / (len(ends) - first)


def simulate(stages: Stages, steps: int, seed: int = 0) -> list[float]:
    """When the student ends each step, in seconds since the run's first batch was submitted."""
    draw = random.Random(seed)
    teacher = [stages.teacher * slowest(draw, stages.jitter, stages.teacher_ranks) for _ in range(steps)]
    student = [stages.student * slowest(draw, stages.jitter, stages.student_ranks) for _ in range(steps)]
    work = {"teacher": teacher, "student": [stages.between + seconds for seconds in student]}
    ring = stages.depth + 1 if stages.ring is None else stages.ring
    done = dict.fromkeys(work, 0)
    running: dict[str, float] = {}
    now, ends = 0.0, list[float]()

    def may_begin(stage: str) -> bool:
        batch = done[stage]
        if stage in running or batch == steps:
            return False
        if stage == "teacher":  # batch b is submitted when the student is about to begin step b - depth
            return batch < done["student"] + min(stages.depth + 1, ring)
        return done["teacher"] > batch

    while done["student"] < steps:
        for stage in work:
            if may_begin(stage):
                running[stage] = work[stage][done[stage]]
        speed = 0.5 if stages.shared and len(running) > 1 else 1.0
        passed = min(running.values()) / speed
        now += passed
        for stage in list(running):
            running[stage] -= passed * speed
            if running[stage] <= _EPSILON:
                del running[stage]
                done[stage] += 1
                if stage == "student":
                    ends.append(now)
    return ends


def slowest(draw: random.Random, jitter: float, ranks: int) -> float:
    """The time of the slowest of some ranks, whose times are log-normal around 1."""
    if not jitter:
        return 1.0
    # The largest of n uniform numbers is distributed as U^(1/n).
    largest = draw.random() ** (1 / ranks)
    return exp(NormalDist(sigma=jitter).inv_cdf(min(max(largest, _EPSILON), 1 - _EPSILON)))
