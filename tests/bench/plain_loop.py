"""A step of the quickstart with pretrained models (`--real`) beside a loop in plain PyTorch and Transformers: the same student (half of
SmolLM2 135M), teacher, documents and optimizer, in fp32 and one process each, in alternating order.

The plain loop reads a document at a time, has the teacher's and the student's logits as a whole, and compares them by
`torch.nn.functional.kl_div`. Its losses are an independent check of ours on all logits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from distill_rl.config.load import load_config
from distill_rl.system.files import read_json_lines, write_json_lines
from tests.bench import harness, record
from tests.bench.methods.settings import TARGETS

if TYPE_CHECKING:
    from distill_rl.config.schema import Config

PLAIN, EXACT = "plain loop", "all logits"
WAYS = (PLAIN, EXACT, "top 64, bucket", "hidden states")
TOLERANCE = 1e-4
"""Largest relative difference between the losses of the plain loop and ours on all logits."""
RATE = 1e-4
DOCUMENTS = 4
"""The data, all of which every step reads, so that their order is of no account."""
_CONFIG = Path(__file__).parent / "methods" / "tasks" / "pretrained.yaml"
_WORKER = "import json, sys; from tests.bench.plain_loop import work; work(*json.loads(sys.argv[1]))"


def compare(
    folder: Path, *, steps: int = 4, rounds: int = 2, material: Path = Path(".cache/quickstart")
) -> dict[str, Any]:
    """Runs every way in turn, several times.

    Args:
        steps: measured steps of a process, after a first one that is not.
        rounds: processes of each way.
        material: folder of models and text, made when needed.
    """
    from distill_rl.demo.real import make_real

    made = make_real(material.absolute())
    write_json_lines(folder / "documents.jsonl", islice(read_json_lines(made.train), DOCUMENTS))
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            found[way].append(_measured(way, steps, made.root, folder))
            print(way, found[way][-1], flush=True)
    rows = [
        {
            "way": way,
            "tokens_per_second": round(median(run["tokens"] / run["seconds"] for run in runs), 1),
            "peak_mib": max(run["peak_mib"] for run in runs),
            "losses": runs[0]["losses"],
        }
        for way, runs in found.items()
    ]
    return {"steps": steps, "rounds": rounds, "threads": os.cpu_count(), "rows": rows}


def verdict(figures: dict[str, Any]) -> list[str]:
    """Steps whose loss on all logits is another than that of the plain loop."""
    plain, ours = ([*row["losses"]] for way in (PLAIN, EXACT) for row in figures["rows"] if row["way"] == way)
    return [
        f"step {i}: the loss is {ours[i]}, in the plain loop {plain[i]}"
        for i in range(len(plain))
        if abs(ours[i] / plain[i] - 1) > TOLERANCE
    ]


def _measured(way: str, steps: int, material: Path, folder: Path) -> dict[str, Any]:
    arguments = json.dumps([way, steps, os.fspath(material), os.fspath(folder)])
    done = subprocess.run([sys.executable, "-c", _WORKER, arguments], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def work(way: str, steps: int, material: str, folder: str) -> None:
    """Of a process: prints the tokens with a label, the seconds and losses of its steps, and its peak memory."""
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    config = _config(way, steps, Path(material), Path(folder))
    stepping = _plain(config) if way == PLAIN else _ours(config)
    next(stepping)
    began = time.perf_counter()
    done = [*stepping]
    seconds = time.perf_counter() - began
    tokens, losses = sum(count for count, _ in done), [loss for _, loss in done]
    print(
        json.dumps({"tokens": tokens, "seconds": seconds, "losses": losses, "peak_mib": record.peak_bytes() // 2**20})
    )


def _config(way: str, steps: int, material: Path, folder: Path) -> Config:
    settings = [
        f"run.dir={folder / 'runs'}",
        f"student.model={material / 'student'}",
        "student.dtype=fp32",
        f"teachers.0.model={material / 'SmolLM2-135M-Instruct'}",
        "teachers.0.dtype=fp32",
        "teachers.0.wire_dtype=fp32",
        f"data.path={folder / 'documents.jsonl'}",
        "data.long_documents=cut",
        f"optimizer.lr={RATE}",
        "schedule.kind=constant",
        "schedule.warmup_steps=0",
        f"train.steps={steps + 1}",
        f"train.global_batch_size={DOCUMENTS}",
        *TARGETS[EXACT if way == PLAIN else way],
    ]
    return load_config(_CONFIG, settings)


def _ours(config: Config) -> Iterator[tuple[int, float]]:
    """Per step the number of tokens with a label, and the loss."""
    from distill_rl.parallel.mesh import close_world, open_world
    from tests.helpers.one_process import OneProcess

    world = open_world(rank=0, dp=1, tp=1)
    try:
        run = OneProcess(config, world)
        for batch in run.batches():
            yield batch.info.num_labels, run.step(batch)["train/loss"].value
    finally:
        close_world(world)


def _plain(config: Config) -> Iterator[tuple[int, float]]:
    """The same by PyTorch and Transformers alone."""
    import torch
    from torch.nn.functional import kl_div
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.student.model)
    texts = [row["text"] for row in read_json_lines(Path(config.data.path or ""))]
    ids = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    rows = [torch.tensor(row[: config.data.max_length])[None] for row in ids]
    count = sum(row.shape[1] - 1 for row in rows)
    teacher, student = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (config.teachers[0].model, config.student.model)
    )
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=RATE, betas=tuple(config.optimizer.betas), weight_decay=config.optimizer.weight_decay
    )
    for _ in range(config.train.steps or 0):
        total = 0.0
        for row in rows:
            with torch.no_grad():
                wanted = teacher(input_ids=row).logits[0, :-1].log_softmax(-1)
            logprobs = student(input_ids=row).logits[0, :-1].log_softmax(-1)
            loss = kl_div(logprobs, wanted, reduction="sum", log_target=True) / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(student.parameters(), config.train.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield count, total


main = harness.program("plain_loop", compare, verdict, columns=("way", "tokens_per_second", "peak_mib"))

if __name__ == "__main__":
    sys.exit(main())
