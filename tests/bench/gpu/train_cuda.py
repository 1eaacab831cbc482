"""Training steps with models of real shape on one GPU that teacher and student share: tokens/s, memory, waits, FLOP/s.

A student of the shape of Llama-3.2-1B learns from a teacher of the shape of Qwen3-4B, weights random, vocabularies of
their sizes: two small tokenizers are learnt from invented text and filled up with entries that never occur, most of
them common to both. The real command line trains on full rows. Memory is the most that the card reports in use above
what was before, contexts and caches of both processes included. FLOP/s count what the models need, forward and
backward, without what activation checkpointing computes again, and stand beside the rate of a large matrix product
measured just before.

`--device cpu` is the same with tiny models, to see that it works; its figures say nothing and are kept only where --out
says.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from distill_rl.scaling.shape import Shape, flops_per_token
from tests.bench import harness
from tests.bench.gpu.shapes import LLAMA_1B, QWEN3_4B, TINY_QWEN3, TINY_STUDENT
from tests.bench.gpu.timing import matmul_rate
from tests.bench.material import train_tokenizer, write_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


SHAPES = {"cuda": (LLAMA_1B, QWEN3_4B), "cpu": (TINY_STUDENT, TINY_QWEN3)}
SIZES = {"cuda": {"steps": 200, "batch": 8, "length": 2048}, "cpu": {"steps": 6, "batch": 2, "length": 64}}
LEARNT = {"cuda": (12_000, 9_000), "cpu": (500, 400)}
"""ids of either tokenizer that occur in text"""
GOAL = 14_000
"""tokens per second on one H200"""
PUBLISHED = {"tokens_per_second_per_gpu": 3000, "gib": 29.5, "gpus": 16}
"""NeMo-RL's figures for this pair"""
CONFIG = """\
run: {{name: train, dir: {root}/runs}}
student: {{model: {root}/student, dtype: {dtype}, activation_checkpointing: {checkpointing}}}
teachers: [{{name: teacher, model: {root}/teacher, dtype: {dtype}}}]
data: {{path: {root}/text.jsonl, max_length: {length}}}
loss: {{top_k: 64}}
optimizer: {{lr: 1.0e-5}}
train: {{steps: {steps}, global_batch_size: {batch}, micro_batch_size: {micro_batch}}}
prefetch: {{depth: {depth}}}
transport: {transport}
observe: {{tensorboard: false}}
"""


def fill_up(tokenizer: PreTrainedTokenizerFast, size: int) -> PreTrainedTokenizerFast:
    """A copy of the tokenizer, filled up to `size` ids with words that no merge makes; none if it has as many."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    for i in range(size - len(vocabulary)):
        vocabulary[f"Ġfilling{i}"] = len(vocabulary)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
    )


def write_material(root: Path, device: str, *, rows: int, length: int, one_tokenizer: bool) -> float:
    """Writes student/, teacher/ and text.jsonl below `root`; returns the teacher's tokens per token of the student.

    Documents are longer than a row. Both folders hold a tokenizer and a random model of the device's shape.

    Args:
        device: `cuda` or `cpu`; chooses the models of `SHAPES`.
        rows: documents.
        length: tokens per row.
        one_tokenizer: give the teacher the student's tokenizer.
    """
    texts = write_texts(root / "text.jsonl", rows=rows, words_per_row=length, vocabulary=8000)
    student, teacher = SHAPES[device]
    ends, counts = ("</s>", "<|end|>"), []
    for name, shape, learnt, end in zip(("student", "teacher"), (student, teacher), LEARNT[device], ends):
        if name == "student" or not one_tokenizer:
            tokenizer = fill_up(train_tokenizer(texts[:64], learnt, end), shape.tokens)
        tokenizer.save_pretrained(root / name)
        write_model(root / name, shape, tokenizer, device, length)
        counts.append(sum(len(ids) for ids in tokenizer(texts[:8])["input_ids"]))
    return counts[1] / counts[0]


def write_model(folder: Path, shape: Shape, tokenizer: PreTrainedTokenizerFast, device: str, length: int) -> None:
    """Writes a model with random weights to `folder`: bf16 if made on `cuda`, fp32 on a CPU.

    Args:
        device: where the weights are drawn.
        length: tokens per row; the model has at least 4,096 positions.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = shape.config(
        max_position_embeddings=max(4096, length),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    model.save_pretrained(folder)


def train(root: Path, device: str, settings: Mapping[str, Any]) -> tuple[list[dict[str, Any]], float | None]:
    """Trains once with the real command line; returns its step records, and the peak of the card's memory use in GiB.

    The peak is None on a CPU. The configuration is written to train.yaml below `root`.

    Args:
        root: the folder of the material.
        device: `cuda`, or `cpu`, which hides all GPUs from the run.
        settings: for the placeholders of `CONFIG`, without root and dtype.

    Raises:
        SystemExit: the run failed; with the end of its log.
    """
    path = root / "train.yaml"
    dtype = "bf16" if device == "cuda" else "fp32"
    path.write_text(CONFIG.format(root=root, dtype=dtype, **settings), "utf-8")
    environment = harness.OFFLINE if device == "cuda" else harness.OFFLINE | {"CUDA_VISIBLE_DEVICES": ""}
    with _watch_memory(device) as peak:
        harness.train(path, root / "runs" / "train", environment=environment)
    steps = harness.step_records(root / "runs" / "train" / "metrics.jsonl")
    return steps, round(max(peak), 2) if peak else None


@contextmanager
def _watch_memory(device: str) -> Iterator[list[float]]:
    """Yields a list that grows while the block runs: GiB in use on the card beyond those in use at its start.

    The card is sampled ten times a second, all processes included. On a CPU the list stays empty.
    """
    seen: list[float] = []
    if device != "cuda":
        yield seen
        return
    torch.cuda.empty_cache()
    before, ended = torch.cuda.mem_get_info()[0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            seen.append((before - torch.cuda.mem_get_info()[0]) / 2**30)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        ended.set()
        watcher.join()


def figures(steps: Sequence[Mapping[str, Any]], shapes: Sequence[Shape], length: int, ratio: float) -> dict[str, Any]:
    """Speed, waits, FLOP/s and losses of a run, from its steps after the warm-up.

    The warm-up is a twentieth of the steps, at least one. The losses are those of the first and the last step of the
    run.

    Args:
        steps: step records of metrics.jsonl.
        shapes: student and teacher.
        length: tokens per row.
        ratio: the teacher's tokens per token of the student.
    """
    warm_up = max(1, len(steps) // 20)
    before, counted = steps[warm_up - 1], steps[warm_up:]
    seconds = counted[-1]["time"] - before["time"]
    tokens = sum(one["train/tokens"] for one in counted)
    student, teacher = shapes
    per_token = flops_per_token(student, [(teacher, ratio)], length)
    parts = sorted({name for one in counted for name in one if name.startswith(("timing/", "transport/"))})
    waits = [one["timing/wait_teachers"] / one["timing/step"] for one in counted]
    return {
        "steps": len(counted),
        "tokens_per_step": round(tokens / len(counted), 1),
        "tokens_per_second": round(tokens / seconds, 1),
        "step_seconds": round(seconds / len(counted), 4),
        "teacher_wait": round(sum(waits) / len(waits), 4),
        "flops_per_second": tokens * per_token / seconds,
        "medians": {name: round(median(one.get(name, 0.0) for one in counted), 5) for name in parts},
        "losses": [steps[0]["train/loss"], steps[-1]["train/loss"]],
    }


def measure(
    folder: Path,
    *,
    device: str,
    sizes: Mapping[str, int],
    micro_batch: int = 2,
    depth: int = 1,
    transport: str = "auto",
    checkpointing: bool = False,
    one_tokenizer: bool = False,
) -> dict[str, Any]:
    """Trains once on invented material; returns the settings and the figures beside the card's matrix-product rate.

    Args:
        micro_batch: rows per forward and backward.
        depth: prefetch.depth.
        transport: the setting `transport`.
        checkpointing: student.activation_checkpointing.
        one_tokenizer: the teacher has the student's tokenizer.
    """
    settings: dict[str, Any] = {**sizes, "micro_batch": micro_batch, "depth": depth, "transport": transport}
    settings["checkpointing"] = str(checkpointing).lower()
    rate = matmul_rate(torch.device(device))
    rows, length = 40 * sizes["batch"], sizes["length"]
    ratio = write_material(folder, device, rows=rows, length=length, one_tokenizer=one_tokenizer)
    steps, peak = train(folder, device, settings)
    results = figures(steps, SHAPES[device], length, ratio)
    results |= {"peak_gib": peak, "matmul_flops_per_second": rate, "utilization": results["flops_per_second"] / rate}
    settings |= {"one_tokenizer": one_tokenizer, "goal": GOAL, "published": PUBLISHED}
    return {"settings": settings, "results": results}


main = harness.program("train_cuda", measure, sizes=SIZES)

if __name__ == "__main__":
    sys.exit(main())
