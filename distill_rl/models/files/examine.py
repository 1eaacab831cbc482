"""Asks a model's class what only the class knows: attention, positions, packing and tensors. No weight is read.

The class is made on the meta device, as a worker will make it. That takes torch and the family's module. `check` does
without torch where it can (`system/without_torch.py`); Transformers then has no classes, and a process of its own is asked.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from distill_rl.errors import ConfigError, first_line, problem
from distill_rl.models.files.headers import read_headers, tied_problems
from distill_rl.models.files.hub import read_config
from distill_rl.models.files.tensors import compare
from distill_rl.system.processes import call_in_child

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_DEADLINE_S = 300.0
"""For a process that imports torch and one family: seconds on an idle machine, far longer from a cold network disk."""


def examine(
    key: str, folder: Path, *, attention: str, packing: bool, weights: bool, automatic: bool = False
) -> list[str]:
    """Returns what a model's class has against the settings and its files, one line each; empty if nothing.

    Args:
        key: `student` or `teachers.0`, for the lines.
        attention: transformers' name of the implementation.
        packing: whether rows may hold several documents.
        weights: whether the files are there, so that their tensors can be compared.
        automatic: whether the attention was chosen, and not named in the settings. A worker, which knows the class, chooses
            eager where transformers has no sdpa.

    Raises:
        ConfigError: as in `read_config`, or the model cannot be made from its config at all.
        WorkerError: the process that was asked died, or did not answer in time.
    """
    from transformers.utils import is_torch_available

    if is_torch_available():
        return _lines(key, folder, attention, packing, weights, automatic)
    arguments = key, folder, attention, packing, weights, automatic
    return call_in_child(f"{key}.model", _lines_elsewhere, *arguments, deadline_s=_DEADLINE_S)


def _lines(key: str, folder: Path, attention: str, packing: bool, weights: bool, automatic: bool) -> list[str]:
    """The lines of `examine`, asked in this process."""
    return list(_examine(key, folder, attention, packing, weights, automatic))


def _lines_elsewhere(
    key: str, folder: Path, attention: str, packing: bool, weights: bool, automatic: bool
) -> list[str]:
    """The lines of `examine`, asked in a process of its own, without the warnings that the caller has printed."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    read_config(folder)  # Transformers gives a warning about a config once per process
    logging.set_verbosity(verbosity)
    return _lines(key, folder, attention, packing, weights, automatic)


def _examine(key: str, folder: Path, attention: str, packing: bool, weights: bool, automatic: bool) -> Iterator[str]:
    """Yields the lines of `examine`; raises ConfigError where the model cannot be made at all."""
    from distill_rl.models.conversion import match
    from distill_rl.models.weights import stored_tensors

    config = read_config(folder)
    family = config.model_type
    try:
        model = _made(config, attention)
    except ConfigError:
        if attention == "eager":
            raise
        model = _made(config, "eager")
        if not automatic or attention != "sdpa":
            rule = f"transformers has no {attention} attention for {family}"
            yield problem(f"{key}.attention", rule, None, f"set {key}.attention=eager")
    yield from _packing_problems(model, packing=packing)
    if weights:
        shapes = {name: tuple(entry["shape"]) for name, entry in read_headers(folder).items()}
        lines = compare(f"{key}.model", model, shapes)
        yield from lines
        if not lines:
            found = match(model, stored_tensors(model), shapes)
            yield from tied_problems(f"{key}.model", folder, found.stored.values())


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
