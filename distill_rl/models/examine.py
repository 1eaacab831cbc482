"""Asks a model's class what only the class knows: attention, positions, packing and tensors. No weight is read.

The class is made on the meta device, as a worker will make it. That takes torch and the family's module, so `check`,
which does without torch where it can, asks in a process of its own (`python -m distill_rl.models.examine`).
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from distill_rl.errors import ConfigError, first_line, problem
from distill_rl.models.facts import read_headers
from distill_rl.models.hub import read_config
from distill_rl.models.tensors import compare

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_TIMEOUT_S = 300


def examine(key: str, folder: Path, *, attention: str, packing: bool, weights: bool) -> list[str]:
    """Returns what a model's class has against the settings and its files, one line each; empty if nothing.

    Args:
        key: `student` or `teachers.0`, for the lines.
        attention: transformers' name of the implementation.
        packing: whether rows may hold several documents.
        weights: whether the files are there, so that their tensors can be compared.

    Raises:
        ConfigError: as in `read_config`, or the model cannot be made from its config at all.
    """
    if find_spec("torch") is not None:
        return list(_examine(key, folder, attention, packing, weights))
    arguments = json.dumps([key, str(folder), attention, packing, weights])
    done = subprocess.run(
        [sys.executable, "-m", "distill_rl.models.examine", arguments],
        capture_output=True, text=True, timeout=_TIMEOUT_S, env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return [problem(f"{key}.model", "transformers must be able to make the model", last)]
    return json.loads(done.stdout.splitlines()[-1])


def _examine(key: str, folder: Path, attention: str, packing: bool, weights: bool) -> Iterator[str]:
    """Yields the lines of `examine`; raises ConfigError where the model cannot be made at all."""
    config = read_config(folder)
    family = config.model_type
    try:
        model = _made(config, attention)
    except ConfigError:
        if attention == "eager":
            raise
        model = _made(config, "eager")
        rule = f"transformers has no {attention} attention for {family}"
        yield problem(f"{key}.attention", rule, None, f"set {key}.attention=eager")
    yield from _packing_problems(model, packing=packing)
    if weights:
        shapes = {name: tuple(entry["shape"]) for name, entry in read_headers(folder).items()}
        yield from compare(f"{key}.model", model, shapes)


def _made(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """The model on the meta device.

    Raises:
        ConfigError: the class cannot be made with this config and attention; any exception of its constructor.
    """
    from distill_rl.models.load import DTYPES, skeleton

    try:
        return skeleton(config, dtype=DTYPES["fp32"], attention=attention)
    except ConfigError:
        raise
    except Exception as error:  # a config can hold values that only the class looks at
        what = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"transformers cannot make {config.model_type} from config.json", "", what) from error


def _packing_problems(model: PreTrainedModel, *, packing: bool) -> Iterator[str]:
    """Yields at most one line: the family cannot keep packed documents apart, but `data.packing` is true.

    Restarting positions separate documents. A class that takes none, or carries a state from token to token, cannot
    follow them.
    """
    if not packing:
        return
    family, remedy = model.config.model_type, "set data.packing=false"
    if model._is_stateful:
        yield problem("data.packing", f"{family} carries a state from one packed document to the next", "true", remedy)
    elif "position_ids" not in inspect.signature(model.forward).parameters:
        yield problem("data.packing", f"{family} takes no positions, which separate packed documents", "true", remedy)


if __name__ == "__main__":
    name, where, *options = json.loads(sys.argv[1])
    print(json.dumps(list(_examine(name, Path(where), *options))))
