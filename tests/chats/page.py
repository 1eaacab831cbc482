"""Writes docs/chat-templates.md: `python -m tests.chats.page`."""

from __future__ import annotations

from pathlib import Path

from tests.chats.cells import RIGHT, outcomes, tokenizers_of
from tests.chats.kinds import KINDS
from tests.chats.templates import TEMPLATES
from tests.chats.wrong_today import WRONG_TODAY

PAGE = Path(__file__).parents[2] / "docs" / "chat-templates.md"
_SYMBOLS = {
    "right": ("✓", RIGHT["right"]),
    "said": ("✓ⁿ", RIGHT["said"]),
    "template": ("t", RIGHT["template"]),
    "left out": ("o", RIGHT["left out"]),
    "no stop": ("s", RIGHT["no stop"]),
    "refused": ("**r**", "refused without need, since the labels follow from the template"),
    "wrong": ("**x**", "wrong labels or tokens, or a chat that should be refused"),
}
"""Outcome → symbol in the table, and its meaning"""
_HEAD = """\
# Chat templates

Which tokens of a chat are trained on follows from the chat template. The table says what comes of every kind of chat with
templates that have the constructs of public model families, with `data.loss_on=assistant` and `data.unrendered=fail`. A
token is trained on if it holds a character that the model generates: from the end of the generation prompt up to the token
that ends the turn. The tests compare every cell with labels that follow from the words of the chats alone.

This page is written by `python -m tests.chats.page`.
"""


def page() -> str:
    """The page."""
    table = [["", *map(str, range(1, len(KINDS) + 1))]]
    for name in TEMPLATES:
        table.append([name, *(_cell(name, kind) for kind in KINDS)])
    used = {symbol for row in table[1:] for cell in row[1:] for symbol in cell.split("/")}
    meanings = [f"- {symbol}: {meaning}" for symbol, meaning in _SYMBOLS.values() if symbol in used]
    kinds = [f"{i}. {kind.name}: {kind.shows}" for i, kind in enumerate(KINDS.values(), 1)]
    families = [[t.name, t.family, t.shows] for t in TEMPLATES.values()]
    return "\n".join(
        [
            _HEAD,
            "## Kinds of chats\n",
            *kinds,
            "\n## Outcomes\n",
            *meanings,
            "\nTwo outcomes in a cell are those with the template's special tokens, and with a tokenizer that knows none of",
            "them, so that headers are text and tokens reach across the borders of turns.\n",
            *_rows(table),
            *_wrong_today(),
            "\n## Templates\n",
            *_rows([["template", "as in", "constructs"], *families]),
            "",
        ]
    )


def _cell(template: str, kind: str) -> str:
    """The symbols of a template and a kind of chats; one if they are the same with all tokenizers."""
    found = (outcomes(tokenizer, template)[kind] for tokenizer in tokenizers_of(TEMPLATES[template]))
    return "/".join(dict.fromkeys(map(_symbol, found)))


def _symbol(outcome: str) -> str:
    """The symbol of an outcome."""
    if outcome not in RIGHT:
        outcome = "refused" if outcome.startswith("refused") else "wrong"
    return _SYMBOLS[outcome][0]


def _wrong_today() -> list[str]:
    """A section about the cells that are not as they should be: each reason and the templates that it concerns."""
    reasons: dict[str, dict[str, None]] = {}
    for by_reason in WRONG_TODAY.values():
        for reason, templates in by_reason.items():
            reasons.setdefault(reason, {}).update(dict.fromkeys(templates))
    lines = [f"- {reason}: {', '.join(sorted(names))}" for reason, names in sorted(reasons.items())]
    return ["\n## Why cells are wrong\n", *lines] if lines else []


def _rows(table: list[list[str]]) -> list[str]:
    """The lines of a table."""
    rows = [f"| {' | '.join(row)} |" for row in table]
    return [rows[0], f"|{'---|' * len(table[0])}", *rows[1:]]


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
