"""Rows that TRL trains: its trainers run in an environment of their own, on the rows of a run of this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill_rl.config.derive import warmup_steps
from distill_rl.config.schema import Config
from distill_rl.models.files.hub import tokenizer_of
from distill_rl.preflight.job import prepare
from distill_rl.preflight.run_directory import paths_of
from tests.bench.harness import ONE_THREAD, Refused
from tests.bench.methods.training import Trained

PREFIX = "trl."
"""Of the overrides of a setting that TRL trains: `trl.trainer`, and options of the trainer's configuration."""
ENVIRONMENT = "PYTHON_TRL"
"""Variable with the interpreter that has TRL (launch/setup-trl.sh)."""
_PROGRAM = Path(__file__).with_name("trl_training.py")


class TrlError(Exception):
    """TRL's program ended with an error."""


def is_trl(overrides: Sequence[str]) -> bool:
    return any(override.startswith(PREFIX) for override in overrides)


def options_of(overrides: Sequence[str]) -> dict[str, Any]:
    """The options by name, with values as JSON."""
    pairs = (override.removeprefix(PREFIX).split("=", 1) for override in overrides)
    return {name: json.loads(value) for name, value in pairs}


def _arguments_of(config: Config, steps: int) -> dict[str, Any]:
    """Settings of a run in the words of TRL's configuration classes.

    Args:
        steps: of the run.
    """
    return {
        "seed": config.run.seed,
        "max_steps": steps,
        "per_device_train_batch_size": config.train.global_batch_size,
        "learning_rate": config.optimizer.lr,
        "adam_beta1": config.optimizer.betas[0],
        "adam_beta2": config.optimizer.betas[1],
        "adam_epsilon": config.optimizer.eps,
        "weight_decay": config.optimizer.weight_decay,
        "max_grad_norm": config.train.max_grad_norm,
        "lr_scheduler_type": config.schedule.kind,
        "warmup_steps": warmup_steps(config.schedule, steps),
        "max_length": config.data.max_length,
    }


def train(config: Config, overrides: Sequence[str], export: Path) -> Trained:
    """Trains with TRL on the rows of a run of `config`, in their order, and writes the student with its tokenizer to `export`.

    Args:
        config: models, data, order, steps, batch size and learning rate.
        overrides: as of a setting; all of them have PREFIX.

    Raises:
        Refused: there is no environment with TRL.
        TrlError: the program failed.
    """
    python = os.environ.get(ENVIRONMENT)
    if python is None:
        raise Refused(f"{ENVIRONMENT} must be an interpreter with TRL; launch/bench.sh sets it")
    options = options_of(overrides)
    trainer = options.pop("trainer")
    if trainer == "gold":
        options["teacher_tokenizer_name_or_path"] = config.teachers[0].model
    job = prepare(config, paths_of(config))
    loader = job.loader()
    with tempfile.TemporaryDirectory() as folder:
        rows, settings = Path(folder) / "rows.jsonl", Path(folder) / "settings.json"
        with rows.open("w", encoding="utf-8") as lines:
            for batch in loader:
                lines.writelines(json.dumps({"messages": row["messages"]}) + "\n" for row in batch.documents)
        known = {
            "trainer": trainer,
            "options": options,
            "student": config.student.model,
            "teacher": config.teachers[0].model,
            "export": os.fspath(export),
            "rows": os.fspath(rows),
            "arguments": _arguments_of(config, loader.total_steps),
        }
        settings.write_text(json.dumps(known), "utf-8")
        variables = os.environ | ONE_THREAD | {"TRL_EXPERIMENTAL_SILENCE": "1"}
        # Isolated: its own folder is not on the path, where this module would be found as `trl`.
        command = [python, "-I", str(_PROGRAM), str(settings)]
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        last = done.stderr.strip().rpartition("\n")[2]
        raise TrlError(f"TRL's {trainer} trainer ended with exit code {done.returncode}: {last}")
    measured = json.loads(done.stdout.splitlines()[-1])
    tokenizer_of(config.student).save_pretrained(export)
    return Trained(
        steps=measured["steps"],
        skipped_steps=0,
        labels=measured["labels"],
        seconds=measured["seconds"],
        one_to_one=None,
        peak_mib=measured["peak_mib"],
    )
