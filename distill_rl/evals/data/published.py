"""Facts about the published data: row counts, content hashes, and the worked examples of the papers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from distill_rl.errors import DataError
from distill_rl.evals.data.read import ContentIds, content_sha256
from distill_rl.evals.suites.base import Item, Questions

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PublishedSplit:
    """A split as it was published."""

    name: str
    count: int
    content_sha256: str
    """As computed by `read.content_sha256`."""

    def warnings(self, count: int, content_sha256: str) -> tuple[str, ...]:
        """Compares rows as read with the published split; returns one line if their count or else their content
        differs, otherwise an empty tuple. `content_sha256` is computed by `read.content_sha256`."""
        if count != self.count:
            return (f"{self.name}: {count} rows, the published data have {self.count}",)
        if content_sha256 != self.content_sha256:
            actual, published = content_sha256[:12], self.content_sha256[:12]
            return (f"{self.name}: the content differs from the published data (sha256 {actual}…, not {published}…)",)
        return ()


def make_questions(
    rows: Sequence[T],
    content_of: Callable[[T], Sequence[str]],
    make_item: Callable[[str, T], Item],
    files: Iterable[Path],
    published: PublishedSplit,
) -> Questions:
    """The questions of a split in the order of its rows, with ids and a hash of their content, and with the differences
    from the published split as warnings.

    Args:
        content_of: row → the texts that identify it, from which ids and hash are made.
        make_item: (id, row) → item.
        files: those that were read.
    """
    contents = [content_of(row) for row in rows]
    content, ids = content_sha256(contents), ContentIds()
    items = tuple(make_item(ids(*texts), row) for texts, row in zip(contents, rows))
    return Questions(items, tuple(files), content, published.warnings(len(items), content))


@dataclass(frozen=True, slots=True)
class WorkedExample:
    """A worked example."""

    question: str
    answer: str


def first_examples(name: str, count: int) -> list[WorkedExample]:
    """The first `count` worked examples of a paper, from the JSON file `name` in the folder `fewshot`, which cites the
    paper.

    Raises:
        DataError: the paper has fewer, or `count` is negative.
    """
    text = (Path(__file__).parent / "fewshot" / f"{name}.json").read_text(encoding="utf-8")
    examples = json.loads(text)["examples"]
    if not 0 <= count <= len(examples):
        rule = f"must be 0 to {len(examples)}, the worked examples of its paper"
        raise DataError(f"num_fewshot of {name}", rule, count)
    return [WorkedExample(**example) for example in examples[:count]]
