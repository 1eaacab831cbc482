"""Writes docs/configuration.md: `python -m distill_rl.config.reference [FILE]`.

Without FILE the page is printed. The documentation of a setting is the string under its field in the schema.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import fields, is_dataclass
from inspect import getsource
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from distill_rl.config import schema, walk
from distill_rl.config.load import ENVIRONMENT
from distill_rl.config.schema import MISSING, Config, backends, data, models, slurm
from distill_rl.system.files import write_atomic

_INTRODUCTION = """\
# Configuration

A run is described by one YAML file. Settings that the file leaves out have the defaults listed below, so a recipe contains
only what differs from them. `distill-rl check -c FILE` prints the complete configuration, the sizes that follow from it and
every problem it finds, without starting anything.

**Base files.** `extends: base.yaml` takes all settings of another file as a base; the path is relative to the file that
contains the line, and the base may extend a further file. Sections are merged key by key; lists (`teachers`,
`optimizer.betas`) are replaced as a whole.

**Command line.** `key=value` overrides one setting: `train.steps=100`. List entries are numbered from 0, and the number
after the last one appends an entry: `teachers.0.model=PATH`, `teachers.1.model=PATH`, `optimizer.betas.1=0.98`.
Later sources override earlier ones: defaults, base files, the file itself, the command line.

**References.** `${{run.name}}` inserts the value of another key, and `${{oc.env:NAME}}` or `${{oc.env:NAME,FALLBACK}}` the
value of one of these environment variables: {environment}.
Nothing else is evaluated. Write `$\\{{` for a literal `${{`.

**Numbers.** What YAML 1.1 reads as another number than it looks like is refused: `010`, which is 8, and `1:30`, which is 90.

`{missing}` marks a setting that must be given. Where a value does not work in this version, the table says so.
"""

_FOREIGN_INTRODUCTION = """\
## Coming from NeMo-RL

The keys of NeMo-RL's cross-tokenizer off-policy distillation (pull request #2245, with the keys that its merged successor
#2508 and the multi-teacher follow-up #2797 renamed or added), and their counterparts here.
Keys of sections that repeat (`teacher.*` like `policy.*`, evaluation and logging back ends) are listed once.

| NeMo-RL | distill_rl | remark |
|---|---|---|
"""


def reference() -> str:
    """The whole of docs/configuration.md as Markdown.

    It has an introduction, a table of settings per section, and a table of the keys of NeMo-RL.
    """
    documentation = field_documentation()
    parts = [_INTRODUCTION.format(environment=", ".join(f"`{name}`" for name in sorted(ENVIRONMENT)), missing=MISSING)]
    for entry in fields(Config):
        title = f"{entry.name} (a list)" if walk.item_kind(walk.hints(Config)[entry.name]) else entry.name
        parts.append(_section(title, entry.name, documentation))
    parts.append(_FOREIGN_INTRODUCTION)
    for theirs, ours, remark in walk.FOREIGN:
        counterpart = f"`{walk.pattern_of(ours)}`" if ours else "–"
        parts[-1] += f"| `{theirs}` | {counterpart} | {remark} |\n"
    return "\n".join(parts)


def field_documentation() -> dict[tuple[str, str], str]:
    """(class, field) → the string under the field in the schema, on one line; fields without one are left out."""
    texts = {}
    trees = (ast.parse(getsource(module)) for module in (schema, backends, data, models, slurm))
    for node in (statement for tree in trees for statement in tree.body if isinstance(statement, ast.ClassDef)):
        for statement, following in zip(node.body, node.body[1:]):
            if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
                text = ast.literal_eval(following.value)
                texts[node.name, ast.unparse(statement.target)] = " ".join(text.split())
    return texts


def _section(title: str, section: str, documentation: dict[tuple[str, str], str]) -> str:
    """Markdown: a heading, and a table of all settings below the top-level key `section`, nested ones included."""
    lines = [f"## {title}\n", "| key | type | default | meaning |", "|---|---|---|---|"]
    for key, entry, kind in walk.leaves(Config):
        if key.partition(".")[0] != section:
            continue
        text = documentation[_owner(key), entry.name]
        default = walk.as_yaml(walk.default_of(entry)) or '""'
        cells = (f"`{walk.pattern_of(key)}`", _type(kind), f"`{default}`", text)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _owner(key: str) -> str:
    """Name of the dataclass of the schema that defines the last part of a dotted key, such as `teachers.0.model`."""
    kind: Any = Config
    for part in key.split(".")[:-1]:
        kind, _ = walk.unwrap(walk.item_kind(kind) if part.isdecimal() else walk.hints(kind)[part])
    return kind.__name__


def _type(kind: Any) -> str:
    """The type of a setting in words, as Markdown, with `null` where it is allowed."""
    # That is a number, text, a list, a section, or the choices of a Literal.
    plain, optional = walk.unwrap(kind)
    if get_origin(plain) is Literal:
        text = ", ".join(f"`{choice}`" for choice in get_args(plain))
    elif is_dataclass(plain):
        text = "section"
    elif walk.is_mapping(plain):
        text = "values or lists of values by name"
    elif walk.item_kind(plain) is not None:
        text = f"list of {_type(walk.item_kind(plain))}s"
    else:
        text = {str: "text", int: "whole number", float: "number", bool: "`true` or `false`"}[plain]
    return f"{text} or `null`" if optional else text


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write_atomic(Path(sys.argv[1]), reference())
    else:
        print(reference(), end="")
