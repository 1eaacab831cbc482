"""A student's step beside a loop in plain PyTorch and Transformers, and beside TRL's GKD trainer with lmbda 0: the same models, rows and
optimizer, in fp32 and one process each, in alternating order.

Random Llamas of 0.1M, 10M and 50M parameters, or with `--models pretrained` those of the quickstart with pretrained models
(`--real`): half of SmolLM2 135M, taught by the whole. The plain loop has the teacher's and the student's logits as a whole, and compares
them by `torch.nn.functional.kl_div`. Its losses are an independent check of ours on all logits. What the student's engine costs beside
the loss is seen where it trains with the loop's teacher and loss.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, cycle, islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from distill_rl.config.schema import Config, DataConfig, LossConfig, StudentConfig, TeacherConfig, TrainConfig
from distill_rl.system.files import read_json_lines, write_json
from tests.bench import harness, record

if TYPE_CHECKING:
    from torch import Tensor

PLAIN, LOOPS_LOSS, EXACT, TRL = "plain loop", "the loop's teacher and loss", "all logits", "TRL's GKD trainer"
EXPORTS = {EXACT: "logits", LOOPS_LOSS: "logits", "top 64, bucket": "topk", "hidden states": "hidden"}
"""What our teacher sends, by way."""
WAYS = (PLAIN, LOOPS_LOSS, EXACT, "top 64, bucket", TRL)
TOLERANCE = 1e-4
"""Largest relative difference between the losses of the plain loop and ours on all logits."""
RATE = 1e-4
ROWS = 4
"""The data, all of which every step reads, so that their order is of no account."""
PRETRAINED = "pretrained"
SHAPES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "0.1M": (
        {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3},
        {"vocab_size": 512, "hidden_size": 96, "intermediate_size": 288, "num_hidden_layers": 4},
    ),
    "10M": (
        {"vocab_size": 16_384, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 7},
        {"vocab_size": 16_384, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8},
    ),
    "50M": (
        {"vocab_size": 49_152, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8},
        {"vocab_size": 49_152, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 12},
    ),
}
"""Student and teacher, whose embeddings are tied, by the student's parameters."""
MORE_STEPS = {"0.1M": 16}
"""Steps in the place of one, of models whose steps take hundredths of a second."""
_WORKER = "import json, sys; from tests.bench.step import work; work(*json.loads(sys.argv[1]))"


def compare(
    folder: Path,
    *,
    models: tuple[str, ...] = tuple(SHAPES),
    ways: tuple[str, ...] = WAYS,
    steps: int = 4,
    rounds: int = 3,
    length: int = 512,
    micro_batch: int = 2,
    threads: int = 1,
    material: Path = Path(".cache/quickstart"),
) -> dict[str, Any]:
    """Runs every way in turn, several times.

    Args:
        models: sizes of random models, or `pretrained`.
        ways: contenders.
        steps: measured steps of a process, after a first one that is not; of the smallest models 16 times as many.
        rounds: processes of each way.
        length: tokens of a row; those of pretrained models have one document each, cut to this.
        micro_batch: rows that are computed together; of pretrained models one.
        threads: of torch.
        material: folder of the pretrained models and their text, made when needed.
    """
    found: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    if TRL in ways and importlib.util.find_spec("trl") is None:
        skipped[TRL] = "trl is not installed"
    ways = tuple(way for way in ways if way not in skipped)
    for name in models:
        setup = _pretrained(material, length) if name == PRETRAINED else _random(folder / name, name, length)
        setup |= {
            "folder": f"{folder}",
            "steps": steps * MORE_STEPS.get(name, 1),
            "micro_batch": 1 if name == PRETRAINED else micro_batch,
            "threads": threads,
        }
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way in ways:
                runs[way].append(_measured(way, setup))
                print(name, way, {key: value for key, value in runs[way][-1].items() if key != "losses"}, flush=True)
        found += [_row(name, way, runs) for way in ways]
    return {
        "steps": steps,
        "rounds": rounds,
        "threads": threads,
        "length": length,
        "micro_batch": micro_batch,
        "rows": found,
        "skipped": skipped,
    }


def _row(model: str, way: str, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The figures of a way; its cost is compared with that of the plain loop in the same round."""
    own = runs[way]
    ratios = [run["cpu_seconds"] / plain["cpu_seconds"] for run, plain in zip(own, runs.get(PLAIN, []))]
    return {
        "model": model,
        "way": way,
        "parameters": own[0]["parameters"],
        "tokens_per_cpu_second": round(median(run["tokens"] / run["cpu_seconds"] for run in own), 1),
        "tokens_per_second": round(median(run["tokens"] / run["seconds"] for run in own), 1),
        "of_plain_loop": round(median(ratios), 3) if ratios else None,
        "peak_mib": max(run["peak_mib"] for run in own),
        "losses": own[0]["losses"],
    }


def verdict(figures: dict[str, Any]) -> list[str]:
    """Steps whose loss on all logits is another than that of the plain loop."""
    losses = {(row["model"], row["way"]): row["losses"] for row in figures["rows"]}
    return [
        f"{model}, step {i}: the loss of {way} is {ours}, in the plain loop {plain}"
        for (model, way), of_way in losses.items()
        if way in (EXACT, LOOPS_LOSS, TRL) and (model, PLAIN) in losses
        for i, (ours, plain) in enumerate(zip(of_way, losses[model, PLAIN], strict=True))
        if abs(ours / plain - 1) > TOLERANCE
    ]


def _random(folder: Path, name: str, length: int) -> dict[str, Any]:
    """Writes a pair of models; returns what all ways read."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    for role, shape in zip(("student", "teacher"), SHAPES[name]):
        heads = shape["hidden_size"] // (64 if shape["hidden_size"] >= 256 else 16)
        config = LlamaConfig(
            **shape,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            tie_word_embeddings=True,
            initializer_range=0.1,
        )
        LlamaForCausalLM(config).save_pretrained(folder / role)
    vocabulary = SHAPES[name][0]["vocab_size"]
    rows = torch.randint(vocabulary, (ROWS, length)).tolist()
    return {"student": f"{folder / 'student'}", "teacher": f"{folder / 'teacher'}", "rows": rows, "tokens": vocabulary}


def _pretrained(material: Path, length: int) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from distill_rl.demo.real import make_real

    made = make_real(material.absolute())
    student, teacher = made.root / "student", made.root / "SmolLM2-135M-Instruct"
    tokenizer = AutoTokenizer.from_pretrained(student)
    texts = [row["text"] for row in islice(read_json_lines(made.train), ROWS)]
    rows = [(tokenizer(text)["input_ids"] + [tokenizer.eos_token_id])[:length] for text in texts]
    return {"student": f"{student}", "teacher": f"{teacher}", "rows": rows, "tokens": len(tokenizer)}


def _measured(way: str, setup: dict[str, Any]) -> dict[str, Any]:
    environment = os.environ | {"OMP_NUM_THREADS": str(setup["threads"]), "HF_HUB_OFFLINE": "1"}
    file = Path(setup["folder"], "setup.json")
    write_json(file, setup)
    command = [sys.executable, "-c", _WORKER, json.dumps([way, f"{file}"])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def work(way: str, file: str) -> None:
    """Of a process: prints the tokens with a label, the seconds and losses of its steps, and its peak memory."""
    import torch

    setup = json.loads(Path(file).read_text("utf-8"))
    torch.set_num_threads(setup["threads"])
    torch.manual_seed(0)
    stepping = (_plain if way == PLAIN else _trl if way == TRL else _ours)(way, setup)
    next(stepping)
    began, cpu = time.perf_counter(), time.process_time()
    losses = [*stepping]
    cpu_seconds, seconds = time.process_time() - cpu, time.perf_counter() - began
    assert len(losses) == setup["steps"]
    figures = {
        "tokens": len(losses) * _num_labels(setup),
        "cpu_seconds": cpu_seconds,
        "seconds": seconds,
        "losses": losses,
        "peak_mib": record.peak_bytes() // 2**20,
        "parameters": _parameters(Path(setup["student"])),
    }
    print(json.dumps(figures))


def _num_labels(setup: dict[str, Any]) -> int:
    return sum(len(row) - 1 for row in setup["rows"])


def _parameters(folder: Path) -> int:
    from math import prod

    from distill_rl.models.weights import WeightFiles

    return sum(map(prod, WeightFiles(folder).shapes.values()))


def _config(way: str, setup: dict[str, Any]) -> Config:
    config = Config(
        student=StudentConfig(model=setup["student"], dtype="fp32"),
        teachers=[
            TeacherConfig(model=setup["teacher"], dtype="fp32", wire_dtype="fp32", export=EXPORTS.get(way, "logits"))
        ],
        data=DataConfig(max_length=max(map(len, setup["rows"])), packing=False),
        loss=LossConfig(top_k=64, tail="bucket"),
        train=TrainConfig(global_batch_size=len(setup["rows"]), micro_batch_size=setup["micro_batch"]),
    )
    config.optimizer.lr, config.schedule.kind, config.schedule.warmup_steps = RATE, "constant", 0
    return config


def _ours(way: str, setup: dict[str, Any]) -> Iterator[float]:
    """The loss of every step of our engines, whose teacher computes a micro-batch when the student reads it."""
    import numpy as np

    from distill_rl.losses.targets import target_of
    from distill_rl.parallel.mesh import close_world, open_world
    from distill_rl.student.engine import StudentEngine
    from distill_rl.teacher.engine import TeacherEngine
    from distill_rl.types import IGNORE_INDEX, RankBatch, TokenRows

    config, lengths = _config(way, setup), np.array([len(row) for row in setup["rows"]], np.int32)
    shape = len(lengths), int(lengths.max())
    ids, labels = np.zeros(shape, np.int32), np.full(shape, IGNORE_INDEX, np.int32)
    for i, row in enumerate(setup["rows"]):
        ids[i, : len(row)], labels[i, : len(row) - 1] = row, row[1:]
    positions = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
    batch = RankBatch(0, 0, TokenRows(ids, labels, positions, lengths, lengths), _num_labels(setup))
    world = open_world(rank=0, dp=1, tp=1)
    try:
        tokens = setup["tokens"]
        student = StudentEngine(config, world, vocabulary_size=tokens, total_steps=setup["steps"] + 1)
        if way == LOOPS_LOSS:
            student.objective.forward = _loops_objective  # type: ignore[method-assign]
            taught = _loops_teacher(setup)
        else:
            teacher = TeacherEngine(config, config.teachers[0], world, vocabulary_size=tokens)
            parts = (tensors for _ in count() for _, tensors in teacher.forward(batch))
            taught = (target_of(tensors, config.loss.temperature) for tensors in parts)

        @contextmanager
        def targets(first_row: int, num_rows: int) -> Iterator[list[Any]]:
            yield [next(taught)]

        for _ in range(setup["steps"] + 1):
            yield student.train_step(batch, targets)["train/loss"].value
    finally:
        close_world(world)


def _loops_teacher(setup: dict[str, Any]) -> Iterator[Any]:
    """Its logits of the micro-batches, over and over."""
    import torch

    from distill_rl.losses import DenseLogits

    teacher = _loaded(setup["teacher"])
    for ids in cycle(_micro_batches(setup)):
        with torch.no_grad():
            logits = teacher(input_ids=ids, use_cache=False).logits
        yield DenseLogits(logits.flatten(0, 1))


def _micro_batches(setup: dict[str, Any]) -> list[Tensor]:
    import torch

    rows, size = setup["rows"], setup["micro_batch"]
    return [torch.tensor(rows[i : i + size]) for i in range(0, len(rows), size)]


def _loops_objective(student: Tensor, batch: Any, targets: Sequence[Any]) -> Any:
    """The loop's loss in the place of an `Objective`'s."""
    from distill_rl.student.objective import ObjectiveOutput

    rows, width, columns = student.shape
    loss = _divergence(student, targets[0].logits.view(rows, width, columns)) / batch.num_labels
    kd = (loss * batch.num_labels).detach()
    zero = kd.new_zeros(())
    return ObjectiveOutput(loss, kd, zero, (kd,), zero)


def _divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Forward KL, summed over all positions that have a next token; the gradient is the student's."""
    from torch.nn.functional import kl_div

    wanted, found = (logits[:, :-1].log_softmax(-1) for logits in (teacher, student))
    return kl_div(found, wanted, reduction="sum", log_target=True)


def _loaded(folder: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _plain(way: str, setup: dict[str, Any]) -> Iterator[float]:
    """The same by PyTorch and Transformers alone."""
    import torch

    optimizer_of = _config(way, setup).optimizer
    batches, num_labels = _micro_batches(setup), _num_labels(setup)
    teacher, student = _loaded(setup["teacher"]), _loaded(setup["student"])
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=RATE, betas=tuple(optimizer_of.betas), weight_decay=optimizer_of.weight_decay
    )
    for _ in range(setup["steps"] + 1):
        total = 0.0
        for ids in batches:
            with torch.no_grad():
                wanted = teacher(input_ids=ids, use_cache=False).logits
            loss = _divergence(student(input_ids=ids, use_cache=False).logits, wanted) / num_labels
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(student.parameters(), TrainConfig().max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield total


def _trl(way: str, setup: dict[str, Any]) -> Iterator[float]:
    """The same by `trl.experimental.gkd`, without its own generation (lmbda 0) and with forward KL (beta 0)."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    optimizer, steps, rows = _config(way, setup).optimizer, setup["steps"] + 1, setup["rows"]
    settings = GKDConfig(
        output_dir=setup["folder"],
        per_device_train_batch_size=setup["micro_batch"],
        gradient_accumulation_steps=len(rows) // setup["micro_batch"],
        max_steps=steps,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        weight_decay=optimizer.weight_decay,
        max_grad_norm=TrainConfig().max_grad_norm,
        optim="adamw_torch",
        lmbda=0.0,
        beta=0.0,
        temperature=1.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
    )

    def collate(examples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        ids = torch.tensor([example["input_ids"] for example in examples])
        labels = ids.clone()
        labels[:, 0] = -100  # nothing predicts it, and the trainer's denominator counts it
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

    core = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    trainer = GKDTrainer(
        model=_loaded(setup["student"]),
        teacher_model=_loaded(setup["teacher"]),
        args=settings,
        data_collator=collate,
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<pad>"),
    )
    yield from _steps_of(trainer, TrainerCallback)


def _steps_of(trainer: Any, callback: type) -> Iterator[float]:
    """Lets a trainer of Transformers run in a thread of its own, which waits after every step until the next is asked for."""
    import threading
    from queue import Queue

    done: Queue[float | None] = Queue()
    go = threading.Semaphore(0)

    class Pausing(callback):  # type: ignore[misc, valid-type]
        def on_log(self, arguments: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if "loss" in logs:
                done.put(logs["loss"])
                go.acquire()

    trainer.add_callback(Pausing())

    def run() -> None:
        try:
            trainer.train()
        finally:
            done.put(None)

    thread = threading.Thread(target=run)
    thread.start()
    while (loss := done.get()) is not None:
        yield float(loss)
        go.release()
    thread.join()


main: Callable[..., int] = harness.program(
    "step", compare, verdict, columns=("model", "way", "tokens_per_cpu_second", "of_plain_loop", "peak_mib")
)

if __name__ == "__main__":
    sys.exit(main())
