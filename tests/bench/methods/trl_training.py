"""A program for an environment with TRL and without this package: trains one student with one of TRL's trainers.

    python trl_training.py SETTINGS.json

Settings: `trainer` (gkd or gold), `arguments` and `options` of its configuration class (those of a run of this package, and what a
row compares), folders `student`, `teacher` and `export`, `rows` (JSON lines of chats, in the order in which they are trained on). Prints a line
of JSON: the number of steps and of trained tokens, the seconds of the steps, and the peak of the process's memory.

In fp32, on one thread, with the trainer's own AdamW; every batch has the rows that the run's has.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed


class _Clock(TrainerCallback):
    """Seconds from the first step's begin to the last one's end."""

    def __init__(self) -> None:
        self.begin = self.end = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begin = self.begin or time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.end = time.perf_counter()


def in_order(trainer: type) -> type:
    """The trainer, reading its rows in their order and counting the tokens that have a label."""

    class InOrder(trainer):  # type: ignore[misc, valid-type]
        num_labels = 0

        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
            self.num_labels += int((inputs["labels"] != -100).sum())
            return super().compute_loss(model, inputs, *arguments, **named)

        def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(self.train_dataset if dataset is None else dataset)

    return InOrder


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    torch.set_num_threads(1)
    set_seed(settings["arguments"]["seed"])
    if settings["trainer"] == "gkd":
        from trl.experimental.gkd import GKDConfig as Config
        from trl.experimental.gkd import GKDTrainer as Trainer
    else:
        from trl.experimental.gold import GOLDConfig as Config
        from trl.experimental.gold import GOLDTrainer as Trainer
    rows = [json.loads(line) for line in Path(settings["rows"]).read_text("utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(settings["student"])
    tokenizer.padding_side = "right"
    options = Config(
        output_dir=f"{settings['export']}-trainer",
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        logging_steps=100,
        disable_tqdm=True,
        dataloader_num_workers=0,
        **settings["arguments"],
        **settings["options"],
    )
    clock = _Clock()
    trainer = in_order(Trainer)(
        model=AutoModelForCausalLM.from_pretrained(settings["student"], dtype=torch.float32),
        teacher_model=AutoModelForCausalLM.from_pretrained(settings["teacher"], dtype=torch.float32),
        args=options,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    trainer.model.save_pretrained(settings["export"])
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    measured = {"steps": trainer.state.global_step, "labels": trainer.num_labels, "seconds": clock.end - clock.begin}
    print(json.dumps(measured | {"peak_mib": int(peak.split()[1]) / 1024}))


if __name__ == "__main__":
    main()
