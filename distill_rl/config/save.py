"""`Config` → YAML without secrets, and the fingerprint of the settings that determine a run's numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from distill_rl.config.load import escape
from distill_rl.config.schema import Config
from distill_rl.config.schema.backends import FLAT, SECTIONS
from distill_rl.config.walk import join
from distill_rl.errors import ConfigError
from distill_rl.system.files import write_atomic
from distill_rl.system.redact import redact


def to_yaml(config: Config) -> str:
    """The whole configuration, defaults included and secrets redacted, as YAML that `load_config` reads back."""
    return OmegaConf.to_yaml(OmegaConf.create(escaped(redact(asdict(config)))))


def save_config(config: Config, path: str | Path) -> None:
    """Writes `to_yaml(config)` to `path` atomically."""
    write_atomic(path, to_yaml(config))


def require_no_secret(config: Config) -> None:
    """Checks a configuration that will run from a saved file, where a secret would be redacted.

    Raises:
        ConfigError: the configuration holds a secret.
    """
    tree = asdict(config)
    if redact(tree) != tree:
        rule = "must not hold a secret (a password in a URL, a token): it is written to a file that the cluster reads"
        remedy = "store it on the cluster's nodes instead, as `hf auth login` does"
        raise ConfigError("a submitted configuration", rule, remedy=remedy)


def escaped(tree: Any) -> Any:
    """A copy of nested dicts and lists in which every text reads back literally (see `interpolate.escape`)."""
    if isinstance(tree, dict):
        return {key: escaped(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [escaped(value) for value in tree]
    return escape(tree) if isinstance(tree, str) else tree


def decisive(config: Config) -> dict[str, Any]:
    """The settings that determine a run's numbers, by dotted key.

    Left out are output paths, look-ahead, transport, Ray, logging, SLURM, checkpoints, evaluation and the handling of dead
    workers; how the work is split and computed (dp, sp, tp, micro-batch sizes, attention, compilation, activation
    checkpointing and offload, determinism and the aligners' workers change rounding at most); and the length of the run
    (train.steps, train.epochs, train.minutes), so that a finished run can be extended.
    """
    tree = asdict(config)
    for section in ("prefetch", "transport", "checkpoint", "evaluate", "capture", "observe", "ray", "slurm"):
        del tree[section]
    del tree["run"]["name"], tree["run"]["dir"]
    for key in ("report_after_s", "stopped_s", "student_restarts", "teacher_restarts", "aligner_restarts"):
        del tree["faults"][key]
    for key in ("steps", "epochs", "minutes", "micro_batch_size", "deterministic"):
        del tree["train"][key]
    if not tree["schedule"]["hold_steps"]:
        del tree["schedule"]["hold_steps"]
    for model in (tree["student"], *tree["teachers"]):
        del model["parallel"]
    for key in ("activation_checkpointing", "activation_offload", "compile", "attention"):
        del tree["student"][key]
    for key in ("lora", "quantization"):
        if tree["student"][key] is None:
            del tree["student"][key]
    for teacher in tree["teachers"]:
        if teacher["backend"] == "store":  # a store may be copied; the fingerprint of its teacher is compared
            del teacher["model"]
        # Earlier checkpoints hold the fingerprint of settings that had no sections.
        sections = {name: teacher.pop(name) for name in SECTIONS}
        for key, place in FLAT.items():
            section, _, name = place.partition(".")
            teacher[key] = sections[section][name]
        del teacher["micro_batch_size"], teacher["attention"], teacher["backend"], teacher["store"], teacher["cache"]
        for key in sections["endpoint"]:
            del teacher[key]  # a server may move
        if teacher["missing"] != "skip":  # which documents are trained on
            del teacher["missing"]
        for key in ("weight_column", "quantization"):
            if teacher[key] is None:  # an empty `where` has no leaf either
                del teacher[key]
    for key in ("workers", "deadline_s", "fast_ids", "dp"):
        del tree["aligner"][key]
    return dict(flat(tree))


def flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every leaf of nested mappings and lists, depth first; a path is written `teachers.0.model`.

    Empty mappings and lists yield nothing.
    """
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from flat(value, join(path, key))
    else:
        yield path, tree


def fingerprint(config: Config) -> str:
    """sha256 (hex) of `decisive(config)`, equal for configurations that give the same numbers.

    A resumed run is compared with the original by it.
    """
    text = json.dumps(decisive(config), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
