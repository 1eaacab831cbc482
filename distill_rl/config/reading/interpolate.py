"""Resolves `${section.key}` and `${oc.env:NAME}` in a configuration; evaluates no code and knows no other resolver."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from distill_rl.config.reading.walk import Findings, join

ENVIRONMENT = frozenset(
    {"HOME", "USER", "SCRATCH", "WORK", "TMPDIR", "HF_HOME", "HF_DATASETS_CACHE", "SLURM_JOB_ID", "SLURM_JOB_NAME"}
)
"""Environment variables that a configuration may read; any other might hold a secret."""
OF_A_JOB = frozenset({"TMPDIR", "SLURM_JOB_ID", "SLURM_JOB_NAME"})
"""Those that differ from job to job."""

_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_REFERENCE_OR_ESCAPE = re.compile(_REFERENCE.pattern + r"|\$\\(\\*)\{")
_KEY = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
_ENV = re.compile(r"oc\.env:\s*(\w+)\s*(?:,(.*))?")


class _Unresolved(Exception):
    pass


def resolve(node: Any, lookup: Callable[[str], Any], findings: Findings, path: str = "") -> Any:
    """A copy of nested dicts and lists in which every reference in a text is replaced by what it refers to.

    A text that is one reference takes the type of the value; within a longer text the value is inserted as text. A text
    with a reference that cannot be resolved (see `_text`) is reported in `findings` under its dotted key and left
    unchanged. Values that are not texts stay as they are.

    Args:
        lookup: dotted key → raw value, defaults included; raises KeyError.
        path: dotted key of the tree.
    """
    if isinstance(node, dict):
        return {key: resolve(value, lookup, findings, join(path, key)) for key, value in node.items()}
    if isinstance(node, list):
        return [resolve(value, lookup, findings, join(path, i)) for i, value in enumerate(node)]
    if isinstance(node, str):
        try:
            return _text(node, lookup, (path,))
        except _Unresolved as problem:
            findings.add(path, str(problem), node)
    return node


def _text(text: str, lookup: Callable[[str], Any], seen: tuple[str, ...]) -> Any:
    """A text with its references replaced, and those of the values inserted; an escaped `$\\{` becomes `${`.

    A text that is one single reference returns the value with its type, which may be None; otherwise the result is a
    text, with booleans in lower case.

    Args:
        seen: dotted keys that are being resolved, from the outermost on, to detect circles.

    Raises:
        _Unresolved: references that nest or are not closed, null inside a longer text, or anything that `_reference`
            refuses.
    """
    if text.count("${") != len(_REFERENCE.findall(text)):
        raise _Unresolved(
            "references do not nest and must be closed; only ${section.key} and ${oc.env:NAME} are understood"
        )
    only_reference = _REFERENCE.fullmatch(text)
    if only_reference:  # keeps the type of the value
        return _reference(only_reference[1].strip(), lookup, seen)

    def replacement(match: re.Match[str]) -> str:
        """The text that replaces one match: `${` for an escape, otherwise the value of the reference as text."""
        if match[1] is None:
            return "$" + match[2] + "{"
        value = _reference(match[1].strip(), lookup, seen)
        if value is None:
            raise _Unresolved(f"refers to {match[1].strip()}, which is null, inside a longer text")
        return str(value).lower() if isinstance(value, bool) else str(value)

    return _REFERENCE_OR_ESCAPE.sub(replacement, text)


def variables_in(text: str) -> set[str]:
    """The environment variables that a text refers to."""
    found = (_ENV.fullmatch(reference.strip()) for reference in _REFERENCE.findall(text))
    return {match[1] for match in found if match}


def escape(text: str) -> str:
    """The text with `${` written as `$\\{`, so that a file that contains it reads back unchanged.

    OmegaConf parses every text that contains `${`, so an escape must not contain it.
    """
    return re.sub(r"\$(\\*)\{", r"$\\\1{", text)


def _reference(name: str, lookup: Callable[[str], Any], seen: tuple[str, ...]) -> Any:
    """The resolved value of what stands between `${` and `}`: a dotted key, or `oc.env:NAME` with an optional fallback.

    Raises:
        _Unresolved: anything else, a circle, a key that does not exist, or a key of a section or list.
    """
    environment = _ENV.fullmatch(name)
    if environment:
        return _variable(environment[1], environment[2])
    if not _KEY.fullmatch(name):
        raise _Unresolved("only ${section.key} and ${oc.env:NAME} are understood")
    if name in seen:
        raise _Unresolved(f"the reference goes in a circle ({' -> '.join((*seen, name))})")
    try:
        value = lookup(name)
    except KeyError:
        raise _Unresolved(f"refers to {name}, which does not exist") from None
    if isinstance(value, dict | list):
        raise _Unresolved(f"refers to {name}, which is a section")
    return _text(value, lookup, (*seen, name)) if isinstance(value, str) else value


def _variable(name: str, fallback: str | None) -> str:
    """The value of an environment variable, or the stripped fallback where the variable is not set.

    An empty value counts as set.

    Raises:
        _Unresolved: a variable outside ENVIRONMENT, even with a fallback, or one that is not set and has no fallback
            (None).
    """
    if name not in ENVIRONMENT:
        allowed = ", ".join(sorted(ENVIRONMENT))
        raise _Unresolved(f"{name} may not be read from a configuration; the variables that may be are {allowed}")
    value = os.environ.get(name, None if fallback is None else fallback.strip())
    if value is None:
        raise _Unresolved(f"the environment has no {name}; write ${{oc.env:{name},FALLBACK}} or set it")
    return value
