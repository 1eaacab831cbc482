"""Finds suites: the built-in ones by name, a user's own by the path of their file."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import reprlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from distill_rl.errors import ConfigError, DistillError
from distill_rl.evals.suites import published
from distill_rl.evals.suites.base import Item, Questions, Suite
from distill_rl.evals.suites.exact_match import ExactMatch
from distill_rl.system.files import MAX_NAME_BYTES, name_problem, sha256

_ALL: tuple[Suite, ...] = (*published.MATH_SUITES, *published.MMLU_SUITES, *published.GSM8K_SUITES, ExactMatch())
SUITES: Mapping[str, Suite] = {suite.name: suite for suite in _ALL}

MAX_PROBLEMS = 20
"""Problems in the items of a user's suite that are reported."""

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def _is_number(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(_NAME.fullmatch(value)) and not name_problem(value) and value not in SUITES


def _tuple_of(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, tuple) and all(isinstance(member, kind) for member in value)


def _is_prompt(value: object) -> bool:
    """Whether a value is a text, or a non-empty tuple of messages {role, content} whose values are texts."""
    if not isinstance(value, tuple):
        return isinstance(value, str)
    messages = [message if isinstance(message, Mapping) else {} for message in value]
    return bool(messages) and all(isinstance(one.get(key), str) for one in messages for key in ("role", "content"))


_Rules = Mapping[str, tuple[str, Callable[[object], bool]]]
"""Attribute → (rule, as it completes "must be …"; check)."""
_TEXT = "a text", lambda value: isinstance(value, str)
_OF_SUITE: _Rules = MappingProxyType({
    "name": (f"letters, digits, _, - and ., {MAX_NAME_BYTES} bytes at most, and not the name of a built-in suite", _is_name),
    "title": _TEXT,
    "num_fewshot": ("a whole number, 0 or more", _is_number),
    "max_fewshot": ("a whole number, 0 or more", _is_number),
    "chat": ("True or False", lambda value: isinstance(value, bool)),
    "max_new_tokens": ("a whole number, 1 or more, or None", lambda value: value is None or _is_number(value, 1)),
    "stop": ("a tuple of non-empty texts", lambda value: _tuple_of(str)(value) and "" not in cast(tuple, value)),
    "load": ("a function", callable),
    "judge": ("a function", callable),
})  # fmt: skip
_OF_QUESTIONS: _Rules = MappingProxyType({
    "items": ("a tuple of Item", _tuple_of(Item)),
    "files": ("a tuple of Path", _tuple_of(Path)),
    "content_sha256": _TEXT,
    "warnings": ("a tuple of texts", _tuple_of(str)),
})  # fmt: skip
_OF_ITEM: _Rules = MappingProxyType({
    "id": _TEXT,
    "prompt": ("a text, or a tuple of messages {role, content}", _is_prompt),
    "answer": _TEXT,
    "task": _TEXT,
    "prefix": _TEXT,
    "choices": ("a tuple of texts", _tuple_of(str)),
})  # fmt: skip


def find(name: str) -> Suite:
    """The suite of that name, or the object `SUITE` of a Python file if the name is a path that ends in .py.

    The file is executed, so the user must trust it. An unchanged file is executed once per process.

    Raises:
        ConfigError: an unknown name; a file that is missing, fails, or defines no suite.
    """
    if name.endswith(".py"):
        return _from_file(Path(name).expanduser())
    if name not in SUITES:
        raise _unknown(name)
    return SUITES[name]


def find_all(names: Sequence[str]) -> dict[str, Suite]:
    """The suites for these names (see `find`), in this order and without repetition; the keys are the names as given.

    Raises:
        ConfigError: no name, unknown names, files without a suite, or two suites with the same name; all at once.
    """
    if not names:
        raise ConfigError("suites", "must name at least one", "none", f"choose from {', '.join(SUITES)}")
    unknown = [name for name in dict.fromkeys(names) if not name.endswith(".py") and name not in SUITES]
    problems = [str(_unknown(", ".join(unknown)))] if unknown else []
    suites: dict[str, Suite] = {}
    for name in [name for name in dict.fromkeys(names) if name not in unknown]:
        try:
            suite = find(name)
        except ConfigError as error:
            problems += error.problems
            continue
        if same := [other for other in suites if suites[other].name == suite.name]:
            rule = "must have different names, because their results are named after them"
            problems.append(str(ConfigError("suites", rule, f"{same[0]} and {name} are both {suite.name!r}")))
        else:
            suites[name] = suite
    ConfigError.raise_all(problems)
    return suites


def load(name: str, suite: Suite, data: Path, num_fewshot: int) -> Questions:
    """Loads the questions of the suite that `find` returned for this name, and checks those of a user's own suite.

    Args:
        name: as given to `find`; a path ending in .py marks a user's own suite, whose errors name that file.
        data, num_fewshot: as `Suite.load` takes them.

    Raises:
        DataError: as `Suite.load`.
        ConfigError: a user's `load` fails or returns invalid questions, one line per attribute; or only some of the
            items have choices.
    """
    if not name.endswith(".py"):
        return suite.load(data, num_fewshot)
    path = Path(name).expanduser()
    try:
        questions: Any = suite.load(data, num_fewshot)
    except DistillError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(path, "load() must work", error) from error
    ConfigError.raise_all(_question_problems(f"suite {path}", questions))
    return questions


def source_sha256(name: str) -> str | None:
    """SHA-256 of the file of a user's own suite, without what it imports; None for a built-in suite.

    Args:
        name: as given to `find`; a path ending in .py marks a user's own suite.

    Raises:
        ConfigError: the file cannot be read.
    """
    if not name.endswith(".py"):
        return None
    path = Path(name).expanduser()
    try:
        return sha256(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def _from_file(path: Path) -> Suite:
    """The object `SUITE` of a Python file, which is executed again only if it has changed."""
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise _unreadable(path, error) from error
    return _run_file(path.resolve(), changed)


@lru_cache(maxsize=64)
def _run_file(path: Path, changed: int) -> Suite:
    """Executes a suite file and returns its object `SUITE`, after checking its attributes."""
    # The module stays in `sys.modules` under a name of its own. Results are cached.
    name = f"distill_rl_suite_{hashlib.sha256(f'{path} {changed}'.encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"suite {path}", "must be a Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module by name while the file is still running.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failed(path, "must run", error) from error
    what, suite = f"suite {path}", getattr(module, "SUITE", None)
    if suite is None or isinstance(suite, type):
        raise ConfigError(what, "must end with `SUITE = MySuite()`", "no object of that name")
    try:
        missing = [name for name in _OF_SUITE if not hasattr(suite, name)]
        problems = _problems(what, suite, {name: rule for name, rule in _OF_SUITE.items() if name not in missing})
    except Exception as error:  # raised by a property
        raise _failed(path, "the attributes of SUITE must be readable", error) from error
    if missing:
        rule = "SUITE must have all attributes of a suite"
        problems.insert(0, str(ConfigError(what, rule, f"no {', '.join(missing)}")))
    ConfigError.raise_all(problems)
    return cast(Suite, suite)


def _question_problems(what: str, questions: object) -> list[str]:
    """Checks what a user's `load` returned; returns one error line per problem, an empty list if there is none."""
    if not isinstance(questions, Questions):
        return [str(ConfigError(what, "load() must return Questions", _shown(questions)))]
    if problems := _problems(f"{what}, questions", questions, _OF_QUESTIONS):
        return problems
    for i, item in enumerate(questions.items, start=1):
        problems += _problems(f"{what}, item {i}", item, _OF_ITEM)
        if len(problems) >= MAX_PROBLEMS:
            return [*problems[:MAX_PROBLEMS], f"{what}: stopped after {MAX_PROBLEMS} problems in its items"]
    without = [item.id for item in questions.items if not item.choices]
    if not problems and 0 < len(without) < len(questions.items):
        value = f"{len(without)} of {len(questions.items)} without, such as {without[0]}"
        problems.append(str(ConfigError(what, "all items must have choices, or none", value, "make it two suites")))
    return problems


def _problems(what: str, instance: object, rules: _Rules) -> list[str]:
    """Returns an error line, which begins with `what`, for each attribute of `instance` that breaks its rule."""
    values = {name: getattr(instance, name) for name in rules}
    return [
        str(ConfigError(what, f"`{name}` must be {rule}", _shown(values[name])))
        for name, (rule, holds) in rules.items()
        if not holds(values[name])
    ]


def _shown(value: object) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"


def _failed(path: Path, rule: str, error: BaseException) -> ConfigError:
    """The error of a user's suite file, with the last line of it in the traceback."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path.resolve()]
    remedy = f"see line {frames[-1].lineno} of the file" if frames else ""
    return ConfigError(f"suite {path}", rule, f"{type(error).__name__}: {error}", remedy)


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"suite {path}", "must be a Python file", error.strerror or "unreadable")


def _unknown(name: str) -> ConfigError:
    return ConfigError("suites", f"must be among {', '.join(SUITES)}, or the path of a .py file", name)
