"""Facts about the published data: row counts, content hashes, and the worked examples of the papers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from distill_rl.errors import DataError


@dataclass(frozen=True, slots=True)
class PublishedSplit:
    """A split as it was published."""

    name: str
    count: int
    content_sha256: str
    """As computed by `read.content_sha256`."""

    def warnings(self, count: int, content_sha256: str) -> tuple[str, ...]:
        """One line if the count or the content of the rows differs from the published split; otherwise none."""
        if count != self.count:
            return (f"{self.name}: {count} rows, the published data have {self.count}",)
        if content_sha256 != self.content_sha256:
            actual, published = content_sha256[:12], self.content_sha256[:12]
            return (f"{self.name}: the content differs from the published data (sha256 {actual}…, not {published}…)",)
        return ()


@dataclass(frozen=True, slots=True)
class WorkedExample:
    """A worked example."""

    question: str
    answer: str


@cache
def worked_examples(name: str) -> tuple[WorkedExample, ...]:
    """The worked examples of a paper, in its order; the file in `fewshot/` cites the paper."""
    text = (Path(__file__).parent / "fewshot" / f"{name}.json").read_text(encoding="utf-8")
    return tuple(WorkedExample(**example) for example in json.loads(text)["examples"])


def first_examples(name: str, count: int) -> tuple[WorkedExample, ...]:
    """The first `count` worked examples of a paper.

    Raises:
        DataError: the paper has fewer.
    """
    examples = worked_examples(name)
    if not 0 <= count <= len(examples):
        rule = f"must be 0 to {len(examples)}, the worked examples of its paper"
        raise DataError(f"num_fewshot of {name}", rule, count)
    return examples[:count]
