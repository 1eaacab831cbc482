"""The chat templates of `templates/*.jinja`: what they reproduce, and what the model generates of the text they write.

Each template stands for the public templates with the same constructs. It is written once, with `OPEN` before and `CLOSE`
behind every stretch that the model generates: from the end of the generation prompt up to the token that ends the turn.

- What the generation prompt writes is not generated if the turn begins with all of it. If the prompt opens or empties a
  thought and the turn does not begin so, the turn begins at the end of the role's header.
- White space behind the token that ends a turn is not generated.
- The token of the next role is generated where nothing else ends a turn. The last turn of such a template ends without
  one, and one of `ends` has to follow it.

The comment at the start of a file describes the template, one `key: value` a line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

OPEN, CLOSE = "⟦", "⟧"
FOLDER = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True)
class Template:
    """A chat template."""

    name: str
    family: str
    """The public models whose constructs it reproduces"""
    shows: str
    """Its constructs, in words"""
    marked: str
    """The template with `OPEN` and `CLOSE`"""
    special: tuple[str, ...]
    """Special tokens that it writes"""
    added: tuple[str, ...]
    """Tokens that are added to the vocabulary, but are not special"""
    eos: str
    header: str
    """What stands before an answer, without what a prompt writes of a thought"""
    stop: str
    """The token that ends an answer"""
    ends: tuple[str, ...]
    """The tokens that end a turn, for a template that writes none behind the last one"""
    arguments: Literal["object", "text", "either"]
    """The form of a call's arguments that it reads"""
    parts: bool
    """Whether it reads a content that is a list of text parts"""
    variables: Mapping[str, Any]
    """Variables of the template that all chats are written with"""
    no_stop: bool
    """Whether it writes nothing that ends a turn"""

    @property
    def text(self) -> str:
        """The template without the marks, as a tokenizer has it."""
        return unmarked(self.marked)


def unmarked(text: str) -> str:
    """A text without `OPEN` and `CLOSE`."""
    return text.replace(OPEN, "").replace(CLOSE, "")


def _read(file: Path) -> Template:
    """The template of one file."""
    described, _, body = file.read_text("utf-8").removeprefix("{#\n").partition("#}\n")
    entries = dict(line.split(": ", 1) for line in described.splitlines())
    stop = json.loads(entries.pop("stop"))
    template = Template(
        name=file.stem,
        family=entries.pop("family"),
        shows=entries.pop("shows"),
        marked=body,
        special=tuple(entries.pop("special").split()),
        added=tuple(entries.pop("added", "").split()),
        eos=entries.pop("eos", stop),
        header=json.loads(entries.pop("header")),
        stop=stop,
        ends=tuple(entries.pop("ends", "").split()),
        arguments=cast(Literal["object", "text", "either"], entries.pop("arguments", "either")),
        parts=entries.pop("parts", "no") == "yes",
        variables=json.loads(entries.pop("variables", "{}")),
        no_stop=entries.pop("no_stop", "no") == "yes",
    )
    if entries:
        raise ValueError(f"{file.name}: unknown keys {', '.join(entries)}")
    return template


TEMPLATES = {file.stem: _read(file) for file in sorted(FOLDER.glob("*.jinja"))}
