"""A teacher and a student engine in one process with real shapes and random weights; their batches and phase times.

No weight is drawn on the CPU or written to a disk: a model's folder holds a config and a sparse safetensors file, whose
zeros take no space; the engines load it like any other model, and the weights are drawn afterwards where they lie.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distill_rl.align.projection import Projection, save_projection
from distill_rl.config.schema import Config, DataConfig, LossConfig, StudentConfig, TeacherConfig, TrainConfig
from distill_rl.losses import TopKLogprobs, VocabularyProjection
from distill_rl.models.forward import inner_model
from distill_rl.parallel.mesh import World, close_world, open_world
from distill_rl.parallel.shards import local_part
from distill_rl.scaling.model import PHASES, Step
from distill_rl.scaling.shape import Shape
from distill_rl.student.engine import StudentEngine
from distill_rl.teacher.engine import TeacherEngine
from distill_rl.types import ChunkRows, CrossTokenizerSpec, RankBatch, TeacherPart, TokenRows
from tests.bench.gpu.shapes import LLAMA_1B, QWEN3_4B, Pair
from tests.bench.gpu.timing import Clock

KINDS = ((1, 1), (1, 1), (2, 1), (1, 1), (1, 1), (1, 2), (1, 1), (1, 1), (3, 2), (1, 1), (1, 1), (1, 1))
"""Tokens of student and teacher in a chunk of text, over and over: three quarters are one to one."""
BODY, HEAD, FORWARD, LOSS, BACKWARD, OPTIMIZER = PHASES


class Engines:
    """The teacher and the student engine of a pair, their batches, and one step of both.

    A teacher with the student's vocabulary is compared token by token. One with another vocabulary is compared chunk by
    chunk with the default loss, `hybrid`, over chunks and a vocabulary projection that are made up.

    Args:
        folder: an empty directory for the models' descriptions.
        total_steps: the largest number of calls of `step`.
    """

    def __init__(self, pair: Pair, step: Step, world: World, folder: Path, total_steps: int):
        for name, shape in (("student", pair.student), ("teacher", pair.teacher)):
            write_model(folder / name, shape, step.length)
        config = _config(folder, step)
        cross_tokenizer_specs: list[CrossTokenizerSpec | None] = []
        if not pair.one_tokenizer:
            path = folder / "projection.safetensors"
            save_projection(made_up_projection(pair), path)
            cross_tokenizer_specs = [CrossTokenizerSpec("hybrid", str(path))]
        self.student = StudentEngine(
            config,
            world,
            vocabulary_size=pair.student.tokens,
            total_steps=total_steps,
            cross_tokenizer_specs=cross_tokenizer_specs,
        )
        self.teacher = TeacherEngine(config, config.teachers[0], world, vocabulary_size=pair.teacher.tokens)
        torch.manual_seed(0)
        for model in (self.student.model, self.teacher.model):
            draw_weights(model)
        self.batch, self.teacher_batch = made_up_batches(pair, step)
        self.temperature = config.loss.temperature
        self._slots: dict[int, dict[str, Tensor]] = {}

    def teach(self) -> Iterator[None]:
        """Runs the teacher, one micro-batch per iteration, and copies its targets into slots that `targets` reads.

        Nothing runs until the generator is iterated; it yields None after each copy. Slots are allocated on first use.
        """
        for layout, tensors in self.teacher.forward(self.teacher_batch):
            if layout.first_row not in self._slots:
                self._slots[layout.first_row] = {name: torch.empty_like(each) for name, each in tensors.items()}
            for name, each in tensors.items():
                self._slots[layout.first_row][name].copy_(each)
            yield

    @contextmanager
    def targets(self, first_row: int, num_rows: int) -> Iterator[Sequence[TopKLogprobs]]:
        """Yields the student's targets for one micro-batch: the slot that `teach` filled for rows from `first_row`.

        `num_rows` is ignored: teacher and student have micro-batches of the same size.
        """
        yield [TopKLogprobs.from_tensors(self._slots[first_row], self.temperature)]

    def step(self) -> dict[str, Any]:
        """Runs the teacher over the batch, then the student's whole optimizer step; returns the student's metrics."""
        for _ in self.teach():
            pass
        return self.student.train_step(self.batch, self.targets)


def phase_seconds(engines: Engines, device: torch.device, steps: int) -> dict[str, float]:
    """Runs `steps` steps and returns the seconds per step of each of `PHASES`.

    Copies of weights and gradients run in FSDP2's own streams and may overlap with the phase they are counted in.
    """
    clock = Clock(device)
    clock.mark("start")
    with _marked(engines, clock):
        for _ in range(steps):
            for _ in engines.teach():
                clock.mark(HEAD)
            engines.student.forward_backward(engines.batch, engines.targets)
            clock.mark(BACKWARD)
            engines.student.optim_step()
            clock.mark(OPTIMIZER)
    sums = dict.fromkeys(PHASES, 0.0)
    for phase, seconds in clock.intervals():
        sums[phase] += seconds / steps
    return sums


@contextmanager
def _marked(engines: Engines, clock: Clock) -> Iterator[None]:
    """Inside the block, hooks on the modules mark the ends of the phases that lie within the engines' calls.

    These are the teacher's body; the forward pass of the student's body; its output layer and loss; and the backward pass of every
    micro-batch that another one follows. The caller marks the teacher's head, the last backward pass of a step and the optimizer.
    Output layer and loss end twice in a micro-batch: after their forward, and when the gradient of the hidden states is complete.
    """
    student = inner_model(engines.student.model)

    def before_student(*_: object) -> None:
        if clock.last == LOSS:  # the micro-batch before has ended with its backward
            clock.mark(BACKWARD)

    def after_student(_: object, __: object, output: Any) -> None:
        clock.mark(FORWARD)
        output.last_hidden_state.register_hook(lambda _: clock.mark(LOSS))

    handles = [
        engines.teacher.model.base_model.register_forward_hook(lambda *_: clock.mark(BODY)),
        student.register_forward_pre_hook(before_student, prepend=True),
        student.register_forward_hook(after_student),
        engines.student.objective.register_forward_hook(lambda *_: clock.mark(LOSS)),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _config(folder: Path, step: Step) -> Config:
    """The configuration of both engines: models in `folder`, unpacked rows of the step's length, top-k targets."""
    return Config(
        student=StudentConfig(model=str(folder / "student")),
        teachers=[TeacherConfig(model=str(folder / "teacher"))],
        data=DataConfig(max_length=step.length, packing=False),
        loss=LossConfig(top_k=step.top_k),
        train=TrainConfig(global_batch_size=step.rows, micro_batch_size=step.micro_batch),
    )


@contextmanager
def one_rank(device: torch.device) -> Iterator[World]:
    """Opens a world of one rank on the device; the end of the block closes it."""
    world = open_world(rank=0, dp=1, tp=1, device=device)
    try:
        yield world
    finally:
        close_world(world)


def write_model(folder: Path, shape: Shape, length: int) -> None:
    """Writes a model of this shape to `folder`: config.json, and model.safetensors with bf16 zeros.

    The weight file is sparse, so the zeros take no room on the disk.

    Args:
        folder: made if missing.
        length: the configuration's `max_position_embeddings`.
    """
    from transformers import AutoModelForCausalLM

    config = shape.config(max_position_embeddings=length)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = {name: each.shape for name, each in model.named_parameters() if name not in model.all_tied_weights_keys}
    header, end = {}, 0
    for name, size in sizes.items():
        start, end = end, end + 2 * prod(size)
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@torch.no_grad()
def draw_weights(model: nn.Module) -> None:
    """Draws the weights in place: matrices from N(0, 0.02²), vectors are set to 1.

    Works on any device and on sharded weights. Uses torch's global generator.
    """
    for parameter in model.parameters():
        local = local_part(parameter)
        if parameter.ndim > 1:
            local.normal_(std=0.02)
        else:
            local.fill_(1)


def made_up_batches(pair: Pair, step: Step) -> tuple[RankBatch, RankBatch]:
    """Batches of student and teacher: full rows of random ids, every token labelled. The same on every call.

    With one tokenizer both are the same object. Otherwise the student's batch also holds the chunks of
    `made_up_chunks`.
    """
    draw = np.random.default_rng(0)
    shape = (step.rows, step.length)
    positions = np.broadcast_to(np.arange(step.length, dtype=np.int32), shape)

    def rows(tokens: int) -> TokenRows:
        ids = draw.integers(0, tokens, (step.rows, step.length + 1), dtype=np.int32)
        return TokenRows(ids[:, :-1], ids[:, 1:], positions)

    student = rows(pair.student.tokens)
    if pair.one_tokenizer:
        batch = RankBatch(0, 0, student, step.tokens)
        return batch, batch
    chunks = made_up_chunks(step)
    return RankBatch(0, 0, student, step.tokens, (TeacherPart(chunks),)), RankBatch(
        0, 0, rows(pair.teacher.tokens), step.tokens
    )


def made_up_chunks(step: Step) -> ChunkRows:
    """Chunks of `KINDS` in turn until one side's row is full, the same in every row; leftover positions have -1."""
    sides = fill_chunks((step.length, step.length))
    count = sides[0][-1] + 1
    one_to_one = sum(KINDS[i % len(KINDS)] == (1, 1) for i in range(count))
    student, teacher = (
        np.tile(np.array(side + [-1] * (step.length - len(side)), np.int32), (step.rows, 1)) for side in sides
    )
    return ChunkRows(student, teacher, step.rows * count, step.rows * one_to_one, step.rows * len(sides[0]))


def fill_chunks(limits: tuple[int, int]) -> tuple[list[int], list[int]]:
    """The chunk number of each token of student and of teacher: chunks of `KINDS` in turn while both sides have room.

    Args:
        limits: the most tokens of the student and of the teacher.

    Returns:
        Two lists, which may be shorter than the limits: the first chunk that does not fit ends both.
    """
    sides: tuple[list[int], list[int]] = [], []
    for i, lengths in enumerate(cycle(KINDS)):
        if any(len(side) + length > limit for side, length, limit in zip(sides, lengths, limits)):
            break
        for side, length in zip(sides, lengths):
            side += [i] * length
    return sides


def random_projection(columns: int, teacher_columns: int) -> VocabularyProjection:
    """The `VocabularyProjection` of a `made_up_projection` between vocabularies of these sizes without padding.

    Args:
        columns: of the student.
    """
    student = replace(LLAMA_1B, columns=columns, tokens=columns)
    teacher = replace(QWEN3_4B, columns=teacher_columns, tokens=teacher_columns)
    return VocabularyProjection.from_projection(made_up_projection(Pair(student, teacher)))


def made_up_projection(pair: Pair) -> Projection:
    """A made-up W between the pair's vocabularies; the same on every call.

    As many tokens as two thirds of the smaller vocabulary are common to both. Each further student token is spread over
    two or three neighbouring teacher tokens. The student's padding columns are empty rows.
    """
    student, teacher = pair.student, pair.teacher
    draw = np.random.default_rng(0)
    common = 2 * min(student.tokens, teacher.tokens) // 3
    counterparts = draw.permutation(teacher.tokens)[:common]
    first = draw.integers(0, teacher.tokens - 3, student.columns)
    first[:common] = counterparts
    lengths = np.concatenate([np.ones(common, np.int64), np.arange(student.columns - common) % 2 + 2])
    lengths[student.tokens :] = 0
    indptr = np.concatenate([[0], lengths.cumsum()])
    place = np.arange(indptr[-1]) - indptr[:-1].repeat(lengths)
    weights = 0.9 * 0.1**place
    sums = np.bincount(np.arange(student.columns).repeat(lengths), weights, student.columns)
    return Projection(
        indptr, (first.repeat(lengths) + place).astype(np.int32), (weights / sums.repeat(lengths)).astype(np.float32),
        teacher.columns, np.arange(common, dtype=np.int32), counterparts.astype(np.int32),
        "made up", "made up", exact_rows=common,
    )  # fmt: skip
