"""What only a model's class knows: attention, positions, packing and tensors. The class is made on the meta device, as a worker
will make it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING

from distill_rl.errors import ConfigError, first_line, problem
from distill_rl.models.files import read_config, read_headers, tied_problems, with_classes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


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
    return with_classes(f"{key}.model", _examine, folder, key, attention, packing, weights, automatic)


def _examine(folder: Path, key: str, attention: str, packing: bool, weights: bool, automatic: bool) -> list[str]:
    from distill_rl.models.weights import compare, match, stored_tensors

    config, lines = read_config(folder), list[str]()
    try:
        model = _made(config, attention)
    except ConfigError:
        if attention == "eager":
            raise
        model = _made(config, "eager")
        if not automatic or attention != "sdpa":
            rule = f"transformers has no {attention} attention for {config.model_type}"
            lines.append(problem(f"{key}.attention", rule, None, f"set {key}.attention=eager"))
    if packing:
        lines += _packing_problems(model)
    if weights:
        shapes = {name: tuple(entry["shape"]) for name, entry in read_headers(folder).items()}
        different = compare(f"{key}.model", model, shapes)
        if not different:
            found = match(model, stored_tensors(model), shapes)
            different = tied_problems(f"{key}.model", folder, found.stored.values())
        lines += different
    return lines


def _made(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    from distill_rl.models.skeleton import DTYPES, skeleton

    try:
        return skeleton(config, dtype=DTYPES["fp32"], attention=attention)
    except ConfigError:
        raise
    except Exception as error:  # a config can hold values that only the class looks at
        what = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"transformers cannot make {config.model_type} from config.json", "", what) from error


def _packing_problems(model: PreTrainedModel) -> list[str]:
    """At most one line: the family cannot keep packed documents apart."""
    # Restarting positions separate documents. A class that takes none, or carries a state from token to token, cannot
    # follow them.
    family, rule = model.config.model_type, ""
    if model._is_stateful:
        rule = f"{family} carries a state from one packed document to the next"
    elif "position_ids" not in inspect.signature(model.forward).parameters:
        rule = f"{family} takes no positions, which separate packed documents"
    return [problem("data.packing", rule, "true", "set data.packing=false")] if rule else []
