"""The estimated memory of all workers of a run."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from distill_rl.config.facts import Facts, ModelFacts
from distill_rl.config.memory.parts import ITEM_SIZE, WorkerMemory
from distill_rl.config.memory.student import student_memory
from distill_rl.config.memory.teacher import evaluator_memory, teacher_memory
from distill_rl.config.schema import Config


def worker_memory(config: Config, facts: Facts, slots: Sequence[int], rings: Sequence[int]) -> tuple[WorkerMemory, ...]:
    """Estimates for the student, the running teachers and, with suites, the evaluator, in this order.

    A worker whose model's facts are not known is left out, and teachers that vLLM runs, which takes what it is given.

    Args:
        slots: bytes of one slot, per running teacher.
        rings: bytes of all slots of one rank, per running teacher.
    """
    workers = []
    on_gpu, running = facts.gpus > 0, config.running_teachers
    if facts.student is not None:
        heads = _heads(config, facts, facts.student, on_gpu)
        # A student micro-batch reads at least one whole slot of each teacher, and several if it has more rows than a slot.
        rows = config.train.micro_batch_size
        read = sum(max(slot, slot * rows // config.rows_of(teacher)) for slot, teacher in zip(slots, running))
        workers.append(student_memory(config, facts.student, targets=read, heads=heads, on_gpu=on_gpu))
    # The ring is memory of the teacher's process, except with Ray's object store, which holds the slots itself.
    owned = config.transport in ("shared_memory", "cuda_ipc") or (on_gpu and config.transport == "auto")
    for (teacher, known), slot, ring in zip(facts.by_teacher(config), slots, rings):
        if known.model is not None and teacher.backend != "vllm":
            targets = ring + slot if owned else 2 * slot
            workers.append(teacher_memory(config, teacher, known.model, targets=targets, on_gpu=on_gpu))
    if facts.student is not None and config.evaluate.suites:
        evaluated = [facts.student]
        if config.evaluate.teachers:
            evaluated += [known.model for _, known in facts.by_teacher(config) if known.model is not None]
        memory = (evaluator_memory(config, model, on_gpu=on_gpu) for model in evaluated)
        workers.append(max(memory, key=lambda worker: worker.total))
    return tuple(workers)


def _heads(config: Config, facts: Facts, student: ModelFacts, on_gpu: bool) -> int:
    """Bytes of the teachers' output layers in one student process.

    Token by token, a rank needs the columns of its own vocabulary shard only; a cross-tokenizer loss needs all columns.
    CPUs keep the layers in fp32, the dtype they compute in. 0 without a teacher that exports hidden states.
    """
    total = 0
    for teacher, known in facts.by_teacher(config):
        model = known.model
        if teacher.export != "hidden" or model is None:
            continue
        item = ITEM_SIZE[teacher.dtype] if on_gpu else 4
        if known.cross_tokenizer_loss is not None:
            total += model.vocabulary_columns * model.hidden_size * item
        else:
            total += ceil(student.vocabulary_columns / config.student.parallel.tp) * model.hidden_size * item
    return total
