"""A teacher in vLLM against one in transformers: tokens per second on a CPU, and what a token costs where.

Both compute the same top-k targets of the same rows with the same model in fp32. CPU seconds count all threads, so they
say more than the clock on a machine that others use. Needs vllm: `bash launch/bench.sh served` takes it from .venv-vllm.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distill_rl.config.schema import Config, StudentConfig, TeacherConfig
from distill_rl.models.attention import installed
from distill_rl.parallel.mesh import open_world
from distill_rl.teacher import scored, vllm
from distill_rl.teacher.base import TeacherBackend
from distill_rl.teacher.engine import TeacherEngine
from distill_rl.teacher.scored import ScoredTeacher
from distill_rl.teacher.vllm import VllmScorer
from distill_rl.types import IGNORE_INDEX, RankBatch, TokenRows
from tests.bench import harness

MOST_OURS_US = 50
"""CPU µs per token that our own part, from vLLM's answer to tensors, may take at k = 64."""


@dataclass(frozen=True)
class Sizes:
    """Of the model and its rows."""

    hidden: int = 512
    layers: int = 8
    heads: int = 8
    vocabulary: int = 32_000
    length: int = 512
    rows: int = 16


@dataclass
class Clock:
    """CPU seconds inside some calls, by name."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def around(self, name: str, owner: Any, function: str) -> Iterator[None]:
        """Counts the calls of a function of `owner` inside the block."""
        original: Callable[..., Any] = getattr(owner, function)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            start = time.process_time()
            try:
                return original(*arguments, **keywords)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - start

        setattr(owner, function, counted)
        try:
            yield
        finally:
            setattr(owner, function, original)


def write_model(folder: Path, sizes: Sizes) -> Path:
    """A Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=4 * sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        max_position_embeddings=2 * sizes.length,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def batch_of(sizes: Sizes) -> RankBatch:
    """Rows of one document each, with a label at every position but the last."""
    shape = (sizes.rows, sizes.length)
    ids = np.random.default_rng(0).integers(5, sizes.vocabulary, shape).astype(np.int32)
    labels = np.full(shape, IGNORE_INDEX, np.int32)
    labels[:, :-1] = ids[:, 1:]
    rows = TokenRows(ids, labels, np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1)))
    return RankBatch(0, 0, rows, labels.size - len(labels))


def settings(folder: Path, sizes: Sizes, backend: str, top_k: int) -> Config:
    """A run's settings with this teacher."""
    config = Config(student=StudentConfig(model=str(folder)))
    config.teachers = [TeacherConfig(model=str(folder), dtype="fp32", wire_dtype="fp32", backend=backend)]  # type: ignore[arg-type]
    config.loss.top_k, config.data.max_length, config.train.micro_batch_size = top_k, sizes.length, 4
    return config


def computed(teacher: TeacherBackend, batch: RankBatch, rounds: int) -> dict[str, float]:
    """Tokens per second, and per second of CPU time; the best of some rounds, after one that is not timed."""
    clock = cpu = float("inf")
    for i in range(rounds + 1):
        start, used = time.perf_counter(), time.process_time()
        for _ in teacher.forward(batch):
            pass
        if i:
            clock = min(clock, time.perf_counter() - start)
            cpu = min(cpu, time.process_time() - used)
    tokens = batch.rows.input_ids.size
    return {"tokens_per_s": round(tokens / clock), "tokens_per_cpu_s": round(tokens / cpu)}


def costs(teacher: ScoredTeacher, scorer: VllmScorer, batch: RankBatch) -> dict[str, float]:
    """CPU µs per token of a batch, by part."""
    engine = scorer._engine.llm.llm_engine
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    clock = Clock()
    with (
        clock.around("step", engine.engine_core, "get_output"),
        clock.around("log_probs", runner, "_get_prompt_logprobs_dict"),
        clock.around("vllm_lists", engine.output_processor, "process_outputs"),
        clock.around("our_arrays", vllm, "scores_of"),
        clock.around("our_targets", teacher, "_write"),
        clock.around("our_tensors", scored.TopKLogprobs, "from_tensors"),
    ):
        start = time.process_time()
        for _ in teacher.forward(batch):
            pass
        clock.seconds["all"] = time.process_time() - start
    clock.seconds["forward"] = clock.seconds.pop("step") - clock.seconds["log_probs"]
    tokens = batch.rows.input_ids.size
    names = ("all", "forward", "log_probs", "vllm_lists", "our_arrays", "our_targets", "our_tensors")
    return {f"{name}_us": round(1e6 * clock.seconds[name] / tokens, 2) for name in names}


def compare(
    folder: Path, sizes: Sizes = Sizes(), *, top_k: tuple[int, ...] = (20, 64), rounds: int = 2
) -> dict[str, Any]:
    """Measures both backends.

    Args:
        folder: for the model.
        sizes: of the model and its rows.
        top_k: entries per token.
        rounds: timed, after one that is not.
    """
    if not installed("vllm"):
        raise harness.Refused("vllm is not installed here: bash launch/setup-vllm.sh")
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    model, batch = write_model(folder / "model", sizes), batch_of(sizes)
    world = open_world(rank=0, dp=1, tp=1)
    throughput, parts = {}, {}
    for k in top_k:
        config = settings(model, sizes, "hf", k)
        hf = TeacherEngine(config, config.teachers[0], world, vocabulary_size=sizes.vocabulary)
        throughput[f"hf, k {k}"] = computed(hf, batch, rounds)
        del hf
    config = settings(model, sizes, "vllm", max(top_k))
    scorer = VllmScorer(config, config.teachers[0], threads=threads)
    try:
        for k in top_k:
            config = settings(model, sizes, "vllm", k)
            teacher = ScoredTeacher(config, config.teachers[0], world, vocabulary_size=sizes.vocabulary, scorer=scorer)
            throughput[f"vllm, k {k}"] = computed(teacher, batch, rounds)
            parts[f"k {k}"] = costs(teacher, scorer, batch)
    finally:
        scorer.close()
    return {"sizes": vars(sizes) | {"threads": threads}, "throughput": throughput, "vllm": parts}


def verdict(figures: dict[str, Any]) -> list[str]:
    """The missed targets."""
    lines = []
    for name, parts in figures["vllm"].items():
        ours = sum(value for part, value in parts.items() if part.startswith("our_"))
        lines += harness.missed((ours > MOST_OURS_US, f"our part takes {ours:.1f} µs per token at {name}"))
    return lines


main = harness.program("served", compare, verdict)

if __name__ == "__main__":
    sys.exit(main())
