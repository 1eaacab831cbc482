"""The suites by name, and those of a user by the path of their file."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import cast

from distill_rl.errors import ConfigError
from distill_rl.evals import gsm8k, math, mmlu
from distill_rl.evals.exact_match import ExactMatch
from distill_rl.evals.suite import Suite

_ALL: tuple[Suite, ...] = (*math.SUITES, *mmlu.SUITES, *gsm8k.SUITES, ExactMatch())
SUITES: Mapping[str, Suite] = {suite.name: suite for suite in _ALL}

_FACTS = ("name", "title", "num_fewshot", "max_fewshot", "chat", "max_new_tokens", "stop", "load", "judge")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def find(name: str) -> Suite:
    """The suite of that name, or the object `SUITE` of a Python file, where the name is a path that ends in .py.

    Such a file is run, so it must be one that the user trusts. The same unchanged file is run once per process.

    Raises:
        ConfigError: an unknown name; a file that is missing, fails, or holds no suite.
    """
    if name.endswith(".py"):
        return _from_file(Path(name).expanduser())
    if name not in SUITES:
        raise ConfigError("suites", f"must be among {', '.join(SUITES)}, or the path of a .py file", name)
    return SUITES[name]


def find_all(names: Sequence[str]) -> dict[str, Suite]:
    """The suites in the order of their names (`find`), each once; the keys are the names as given.

    Raises:
        ConfigError: none named; every name that is wrong, one line each; two suites that bear the same name.
    """
    if not names:
        raise ConfigError("suites", "must name at least one", "none", f"choose from {', '.join(SUITES)}")
    unknown = [name for name in dict.fromkeys(names) if not name.endswith(".py") and name not in SUITES]
    problems = []
    if unknown:
        rule = f"must be among {', '.join(SUITES)}, or the path of a .py file"
        problems.append(str(ConfigError("suites", rule, ", ".join(unknown))))
    found: dict[str, Suite] = {}
    for name in dict.fromkeys(names):
        if name in unknown:
            continue
        try:
            suite = find(name)
        except ConfigError as error:
            problems += error.problems
            continue
        same = next((other for other, one in found.items() if one.name == suite.name), None)
        if same is not None:
            rule = "must have different names, which their results bear"
            problems.append(str(ConfigError("suites", rule, f"{same} and {name} are both {suite.name!r}")))
            continue
        found[name] = suite
    if problems:
        raise ConfigError.many(problems)
    return found


def _from_file(path: Path) -> Suite:
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise ConfigError(f"suite {path}", "must be a Python file", error.strerror or "unreadable") from error
    return _run_file(path.resolve(), changed)


@lru_cache(maxsize=64)
def _run_file(path: Path, changed: int) -> Suite:
    """`changed` makes the cache forget a file that was written anew."""
    name = f"distill_rl_suite_{hashlib.sha256(f'{path} {changed}'.encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"suite {path}", "must be a Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name while the file is still running.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"suite {path}", "must run", f"{type(error).__name__}: {error}") from error
    suite = getattr(module, "SUITE", None)
    if suite is None or isinstance(suite, type):
        raise ConfigError(f"suite {path}", "must end with `SUITE = MySuite()`", "no object of that name")
    missing = [fact for fact in _FACTS if not hasattr(suite, fact)]
    if missing:
        raise ConfigError(f"suite {path}", "SUITE must have all that a suite has", f"no {', '.join(missing)}")
    if not isinstance(suite.name, str) or not _NAME.fullmatch(suite.name) or suite.name in SUITES:
        rule = "its name must be letters, digits, _, - and ., and not that of a suite that is here already"
        raise ConfigError(f"suite {path}", rule, suite.name)
    return cast(Suite, suite)
