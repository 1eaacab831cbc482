"""What is known of the published data: how many questions, what they are, and the worked examples of papers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from distill_rl.errors import DataError


@dataclass(frozen=True, slots=True)
class PublishedSplit:
    """A split as it was published."""

    what: str
    count: int
    content_sha256: str
    """by `read.content_sha256`"""

    def warnings(self, count: int, content_sha256: str) -> tuple[str, ...]:
        """One line, where rows are missing or too many, or are not those that were published."""
        if count != self.count:
            return (f"{self.what}: {count} rows, the published data have {self.count}",)
        if content_sha256 != self.content_sha256:
            found, known = content_sha256[:12], self.content_sha256[:12]
            return (f"{self.what}: the content is not the published one (sha256 {found}…, not {known}…)",)
        return ()


@dataclass(frozen=True, slots=True)
class WorkedExample:
    """A worked example."""

    question: str
    answer: str


@cache
def worked_examples(name: str) -> tuple[WorkedExample, ...]:
    """Those of a paper, which its file in `fewshot/` cites, in the paper's order."""
    text = (Path(__file__).parent / "fewshot" / f"{name}.json").read_text(encoding="utf-8")
    return tuple(WorkedExample(**example) for example in json.loads(text)["examples"])


def first_examples(name: str, count: int) -> tuple[WorkedExample, ...]:
    """The first `count` of them.

    Raises:
        DataError: there are not so many.
    """
    examples = worked_examples(name)
    if not 0 <= count <= len(examples):
        rule = f"must be 0 to {len(examples)}, the worked examples of its paper"
        raise DataError(f"num_fewshot of {name}", rule, count)
    return examples[:count]
