"""Writes docs/configuration.md from the schema: `python -m distill_rl.config.reference [FILE]`.

A setting's documentation is the string that stands under its field in schema.py.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import fields, is_dataclass
from inspect import getsource
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from distill_rl.config import schema
from distill_rl.config.foreign import FOREIGN
from distill_rl.config.interpolate import ENVIRONMENT
from distill_rl.config.schema import Config
from distill_rl.config.validate import NOT_AVAILABLE
from distill_rl.config.walk import MISSING, default_of, hints, item_kind, leaves, unwrap
from distill_rl.system.files import write_atomic

_INTRODUCTION = """\
# Configuration

One YAML file describes a run. Everything it leaves out has the default of the tables below, so a recipe
holds only what differs. `distill-rl check -c FILE` prints the whole configuration with the sizes that
follow from it, and every problem at once; nothing is started.

**Other files.** `extends: base.yaml`, relative to the file that says it, lays that file underneath, and so on
down the chain. Sections are merged key by key; a list (`teachers`, `optimizer.betas`) is replaced as a whole.

**On the command line**, `key=value` changes one value: `train.steps=100`. Entries of a list are numbered from 0, and the
number after the last one adds an entry: `teachers.0.model=PATH`, `teachers.1.model=PATH`,
`optimizer.betas.1=0.98`. The order is: defaults, extended files, the file, the command line.

**References.** `${{run.name}}` stands for another key's value and `${{oc.env:NAME}}` or `${{oc.env:NAME,FALLBACK}}` for an
environment variable out of {environment}. Nothing else is evaluated. `$\\{{` is a plain `${{`.

`{missing}` marks a value that must be given. Where only one value works in this version, the table says so.
"""

_FOREIGN_INTRODUCTION = """\
## Coming from NeMo-RL

Every key of the cross-tokenizer off-policy distillation of NeMo-RL (pull request #2245, and what its merged successor #2508
and multi-teacher follow-up #2797 call otherwise or add), and what it is here.
Keys of sections that repeat (`teacher.*` like `policy.*`, evaluation and logging back ends) are listed once.

| there | here | remark |
|---|---|---|
"""


def reference() -> str:
    """The whole page as Markdown."""
    documentation = field_documentation()
    parts = [_INTRODUCTION.format(environment=", ".join(f"`{name}`" for name in sorted(ENVIRONMENT)), missing=MISSING)]
    for entry in fields(Config):
        kind = hints(Config)[entry.name]
        section = item_kind(kind) or kind
        if is_dataclass(section):
            title = f"{entry.name} (a list)" if item_kind(kind) else entry.name
            parts.append(_section(title, entry.name, documentation))
        else:
            parts.append(_section(entry.name, entry.name, documentation))
    parts.append(_FOREIGN_INTRODUCTION + "".join(_foreign_row(*row) for row in FOREIGN))
    return "\n".join(parts)


def field_documentation() -> dict[tuple[str, str], str]:
    """(class, field) → the string under the field in schema.py."""
    found = {}
    for node in ast.parse(getsource(schema)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for statement, following in zip(node.body, node.body[1:]):
            if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
                text = ast.literal_eval(following.value)
                found[node.name, ast.unparse(statement.target)] = " ".join(text.split())
    return found


def _section(title: str, prefix: str, documentation: dict[tuple[str, str], str]) -> str:
    lines = [f"## {title}\n", "| key | type | default | meaning |", "|---|---|---|---|"]
    only = dict(NOT_AVAILABLE)
    for key, entry, kind in leaves(Config):
        if key.partition(".")[0] != prefix:
            continue
        text = documentation[_owner(key), entry.name]
        name = key.replace("teachers.0.", "teachers[].")
        if name in only:
            text += f" *Only `{_yaml(only[name])}` in this version.*"
        cells = (f"`{name}`", _type(kind), f"`{_yaml(default_of(entry))}`", text)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _owner(key: str) -> str:
    """Name of the dataclass that holds the last part of a key."""
    kind: Any = Config
    for part in key.split(".")[:-1]:
        kind = item_kind(kind) if part.isdigit() else hints(kind)[part]
    return kind.__name__


def _type(kind: Any) -> str:
    plain, optional = unwrap(kind)
    if get_origin(plain) is Literal:
        text = ", ".join(f"`{choice}`" for choice in get_args(plain))
    elif item_kind(plain) is not None:
        text = f"list of {_type(item_kind(plain))}"
    else:
        text = {str: "text", int: "whole number", float: "number", bool: "`true` or `false`"}[plain]
    return f"{text} or `null`" if optional else text


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return '""' if value == "" else str(value)


def _foreign_row(theirs: str, ours: str, remark: str) -> str:
    key = f"`{ours.replace('teachers.0.', 'teachers[].')}`" if ours else "–"
    return f"| `{theirs}` | {key} | {remark} |\n"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write_atomic(Path(sys.argv[1]), reference())
    else:
        print(reference(), end="")
