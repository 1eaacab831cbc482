"""Puts `key=value` from the command line, and Python values, into the raw mapping, before anything is checked.

Keys are dotted, list entries are numbered from 0, and the number after the last appends an entry:
`teachers.0.model=x`, `teachers.1.model=y`, `optimizer.betas.1=0.98`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from os import PathLike, fspath
from typing import Any, Literal, get_origin

import yaml
from omegaconf import OmegaConf

from distill_rl.config.reading.walk import Findings, hints, item_kind, kind_at, unwrap
from distill_rl.config.schema import Config


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str], findings: Findings) -> None:
    """Puts `key=value` texts into the raw mapping, in place and in their order, so that later ones win.

    Sections and list entries that the mapping lacks are created. An override that does not fit is reported in
    `findings` and skipped. Unknown keys and wrong types are not noticed here, but by `walk.build`.
    """
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not key or any(not part for part in key.split(".")):
            findings.add(override, "an override is written key=value", remedy="for example train.steps=100")
            continue
        _place(raw, key, _parse(key, text.strip()), findings)
        findings.forget(key)
        with suppress(yaml.YAMLError):  # then it is a text
            findings.remember(text, key)


def apply_settings(raw: dict[str, Any], settings: Mapping[str, Any], findings: Findings) -> None:
    """Like `apply_overrides`, for Python values by dotted key; texts are taken as they are."""
    for key, value in settings.items():
        if not isinstance(key, str) or any(not part for part in key.split(".")):
            findings.add(repr(key), "the name of a setting is a text", remedy="for example train, or train.steps")
            continue
        _place(raw, key, _plain(value), findings)
        findings.forget(key)


def _plain(value: Any) -> Any:
    """A Python value as YAML would have given it: paths as texts, tuples as lists, sections of the schema as dicts."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return fspath(value) if isinstance(value, PathLike) else value


def _parse(key: str, text: str) -> Any:
    """The value of an override, by the type of its setting in the schema.

    Settings of text or choice take it as typed, without surrounding quotes; where null is allowed, `null`, `~` and an
    empty text are None. All other settings, and unknown ones, read it as YAML.
    """
    plain, optional = unwrap(kind_at(Config, key))
    if plain is str or get_origin(plain) is Literal:
        if optional and text in ("null", "~", ""):
            return None
        if not (len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"):
            return text
    return _scalar(text)


def _scalar(text: str) -> Any:
    """The text read as a YAML value; the text itself if it is not valid YAML."""
    try:
        parsed = OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=False)
    except Exception:  # not YAML: taken as text, which the type check rejects if it must
        return text
    return parsed["value"] if isinstance(parsed, dict) and list(parsed) == ["value"] else text


def _place(raw: dict[str, Any], key: str, value: Any, findings: Findings) -> None:
    """Sets one value at a dotted key of the raw mapping, in place, creating what is missing on the way.

    A list may grow by one entry; a section given as a value is merged into the one below it. A key that leads into a
    single value, or a list index that does not fit, is reported in `findings` and the value is not set.
    """
    parts = key.split(".")
    node: Any = raw
    for depth, part in enumerate(parts):
        here = ".".join(parts[:depth])
        last = depth == len(parts) - 1
        if isinstance(node, list):
            index = _index(node, part, here, key, findings)
            if index is None:
                return
            if index == len(node):
                node.append(None)
            slot: Any = index
        elif isinstance(node, dict):
            slot = part
        else:
            findings.add(key, f"{here} is a single value and has no parts", remedy=f"use {here}=...")
            return
        if last:
            node[slot] = merge(_get(node, slot), value, kind_at(Config, key)) if isinstance(value, dict) else value
            return
        if _get(node, slot) is None:
            node[slot] = _new_container(".".join(parts[: depth + 1]))
        node = node[slot]


def _get(node: Any, slot: Any) -> Any:
    """The child of a node: of a list by position, of a mapping by key; None if a mapping has no such key."""
    return node[slot] if isinstance(node, list) else node.get(slot)


def _index(node: list, part: str, here: str, key: str, findings: Findings) -> int | None:
    """The position in a list that a part of a dotted key names, which may be its length: an entry is to be added.

    None with the reason in `findings` if the part is no number or a larger one.

    Args:
        part: the part of the key, such as `0`.
        here: dotted key of the list.
        key: the whole dotted key of the override, under which a problem is reported.
    """
    if not part.isdecimal():
        findings.add(key, f"{here} is a list; its entries are numbered from 0", remedy=f"for example {here}.0")
        return None
    if int(part) > len(node):
        entries = "entry" if len(node) == 1 else "entries"
        findings.add(key, f"{here} has {len(node)} {entries}", remedy=f"the next one to add is {here}.{len(node)}")
        return None
    return int(part)


def _new_container(path: str) -> Any:
    """Start value for a dotted path that the file does not set: a list or an empty section.

    A list is a copy of the schema's default, with sections as dicts; within another list it is empty.
    """
    kind = kind_at(Config, path)
    if item_kind(kind) is None:
        return {}
    node: Any = Config()
    for part in path.split("."):
        if isinstance(node, list):
            return []
        node = getattr(node, part, None)
    return [asdict(entry) if is_dataclass(entry) else entry for entry in node or ()]  # type: ignore[arg-type]


def merge(below: Any, above: Any, kind: Any = None) -> Any:
    """`below` overridden by `above`: mappings key by key, everything else as a whole.

    Where `below` is a mapping, None in `above` changes nothing, unless the section may be null. Neither argument is
    modified, but the result shares parts with them.

    Args:
        kind: type of the section in the schema; None: not known.
    """
    section, optional = unwrap(kind)
    if isinstance(below, dict) and above is None and not optional:
        return below
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    merged = dict(below)
    for key, value in above.items():
        inner = hints(section).get(key) if is_dataclass(section) else None  # type: ignore[arg-type]
        merged[key] = merge(below[key], value, inner) if key in below else value
    return merged
