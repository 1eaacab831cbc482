"""Real text that every machine has: the documentation of Python and of its standard library, by the interpreter's own files.

Two domains: the language reference (`pydoc_data.topics`, about 0.4 MB of prose) and the docstrings of the standard library (about
1.2 MB). Both change a little from one version of Python to the next, so results hold for one version.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from distill_rl.demo.real import pieces, unseen

REFERENCE, LIBRARY = DOMAINS = ("reference", "library")
PIECE = 400
"""Characters of a document, about: they end at the end of a paragraph, or of a line where a paragraph is long."""
HELD_OUT = 10
"""One part of a source in this many is held out for validation, another for the test."""
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
_SHORTEST = 200


@dataclass(frozen=True, slots=True)
class Texts:
    """Documents of one domain. Documents of one source, a topic or a module, are all in the same part."""

    train: tuple[str, ...]
    validation: tuple[str, ...]
    test: tuple[str, ...]


@cache
def texts(domain: str) -> Texts:
    """The documents of REFERENCE or LIBRARY, always in the same order."""
    sources = {REFERENCE: _topics, LIBRARY: _docstrings}[domain]()
    parts: tuple[list[str], list[str], list[str]] = ([], [], [])
    seen: set[str] = set()
    for name, text in sources:
        place = random.Random(name).randrange(HELD_OUT)
        parts[place if place in (1, 2) else 0].extend(pieces(unseen(text, seen), PIECE))
    for part in parts:
        random.Random(domain).shuffle(part)
    return Texts(*map(tuple, parts))


def _topics() -> Iterator[tuple[str, str]]:
    from pydoc_data.topics import topics

    yield from sorted(topics.items())


def _docstrings() -> Iterator[tuple[str, str]]:
    """Module → its docstrings of some length."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _SKIPPED.isdisjoint(name.parts) and (found := list(_docstrings_of(path))):
            yield name.as_posix(), "\n\n".join(found)


def _docstrings_of(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (SyntaxError, UnicodeDecodeError):  # files that show what Python must refuse
        return
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, documented) and len(text := ast.get_docstring(node) or "") >= _SHORTEST:
            yield text
