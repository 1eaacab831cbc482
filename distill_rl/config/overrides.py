"""`key=value` from the command line, put into the raw mapping before anything is checked.

Keys are dotted, list entries are numbered, and the number after the last appends:
`teachers.0.model=x`, `teachers.1.model=y`, `optimizer.betas.1=0.98`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, Literal, get_origin

from omegaconf import OmegaConf

from distill_rl.config.schema import Config
from distill_rl.config.walk import Findings, item_kind, kind_at, unwrap


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str], found: Findings) -> None:
    """Changes `raw` in place; an override that cannot be placed is reported."""
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not key or any(not part for part in key.split(".")):
            found.add(override, "an override is written key=value", remedy="for example train.steps=100")
            continue
        _place(raw, key, _parse(key, text.strip()), found)


def _parse(key: str, text: str) -> Any:
    """The text as the schema's type wants it: a text setting takes it as typed, any other reads a YAML scalar."""
    plain, optional = unwrap(kind_at(Config, key))
    if plain is str or get_origin(plain) is Literal:
        if optional and text in ("null", "~", ""):
            return None
        if not (len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"):
            return text
    return _scalar(text)


def _scalar(text: str) -> Any:
    try:
        parsed = OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=False)
    except Exception:  # not YAML: a plain text, which the type check then judges
        return text
    return parsed["value"] if isinstance(parsed, dict) and list(parsed) == ["value"] else text


def _place(raw: dict[str, Any], key: str, value: Any, found: Findings) -> None:
    parts = key.split(".")
    node: Any = raw
    for depth, part in enumerate(parts):
        here = ".".join(parts[:depth])
        last = depth == len(parts) - 1
        if isinstance(node, list):
            index = _index(node, part, here, key, found)
            if index is None:
                return
            if index == len(node):
                node.append(None)
            slot: Any = index
        elif isinstance(node, dict):
            slot = part
        else:
            found.add(key, f"{here} is a single value and has no parts", remedy=f"use {here}=...")
            return
        if last:
            node[slot] = merge(_get(node, slot), value) if isinstance(value, dict) else value
            return
        if _get(node, slot) is None:
            node[slot] = _new_container(".".join(parts[: depth + 1]))
        node = node[slot]


def _get(node: Any, slot: Any) -> Any:
    return node[slot] if isinstance(node, list) else node.get(slot)


def _index(node: list, part: str, here: str, key: str, found: Findings) -> int | None:
    if not part.isdigit():
        found.add(key, f"{here} is a list; its entries are numbered from 0", remedy=f"for example {here}.0")
        return None
    if int(part) > len(node):
        entries = "entry" if len(node) == 1 else "entries"
        found.add(key, f"{here} has {len(node)} {entries}", remedy=f"the next one to add is {here}.{len(node)}")
        return None
    return int(part)


def _new_container(path: str) -> Any:
    """What stands at `path` when the file says nothing of it: the schema's list, or an empty section."""
    kind = kind_at(Config, path)
    if item_kind(kind) is None:
        return {}
    node: Any = Config()
    for part in path.split("."):
        if isinstance(node, list):
            return []
        node = getattr(node, part)
    return [asdict(entry) if is_dataclass(entry) else entry for entry in node]  # type: ignore[arg-type]


def merge(below: Any, above: Any) -> Any:
    """`above` laid over `below`: sections key by key, everything else replaced; an empty section changes nothing."""
    if isinstance(below, dict) and above is None:
        return below
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return {**below, **{key: merge(below.get(key), value) if key in below else value for key, value in above.items()}}
