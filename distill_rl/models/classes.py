"""What only a model's class knows: attention, positions, packing and tensors, and which layers adapters get. The class is made on the
meta device, as a worker will make it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill_rl.config.facts import AdapterFacts
from distill_rl.config.schema import LoraConfig, StudentConfig
from distill_rl.errors import ConfigError, first_line, problem
from distill_rl.models.adapters import KEY, Outline, sizes
from distill_rl.models.files import Shapes, plainly_whole, read_config, read_headers, tied_problems
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
    return _with_classes(f"{key}.model", _examine, folder, key, attention, packing, weights, automatic)


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
    from distill_rl.models.weights import DTYPES, skeleton

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


def survey(folder: Path, student: StudentConfig, shapes: Shapes | None = None) -> AdapterFacts | None:
    """`adapters.sizes` of the model in a folder, of which no weight is read; None for a student without adapters.

    Args:
        shapes: of the tensors in its files, if they are there; they spare a Llama-like model's class from being imported.

    Raises:
        ConfigError: as `adapters.choose_layers`, or the model cannot be made.
        WorkerError: a process of its own was asked, because this one does without torch, and gave no answer.
    """
    if student.lora is None:
        return None
    config = read_config(folder)
    if shapes and plainly_whole(config, shapes):
        return sizes(Outline.of_files(config, shapes), student.lora)
    return _with_classes(KEY, _survey, folder, student.lora)


def _survey(folder: Path, lora: LoraConfig) -> AdapterFacts:
    from distill_rl.models.weights import DTYPES, skeleton

    model = skeleton(read_config(folder), dtype=DTYPES["fp32"], attention="eager")
    return sizes(Outline.of_model(model), lora)


def _with_classes(key: str, ask: Callable[..., Any], folder: Path, *arguments: Any) -> Any:
    """What `ask(folder, *arguments)` returns, which makes the class of the model in a folder."""
    # That takes torch and the family's module. `check` does without torch where it can (`system/without_torch.py`);
    # Transformers then has no classes, and a process of its own is asked.
    from transformers.utils import is_torch_available

    if is_torch_available():
        return ask(folder, *arguments)
    return call_in_child(key, _quietly, ask, folder, *arguments, deadline_s=_DEADLINE_S)


def _quietly(ask: Callable[..., Any], folder: Path, *arguments: Any) -> Any:
    """Asks without the warnings about the config that the caller has printed."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    read_config(folder)  # Transformers gives a warning about a config once per process
    logging.set_verbosity(verbosity)
    return ask(folder, *arguments)
