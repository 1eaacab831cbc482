"""What a suite is.

To add one, write a class like `exact_match.ExactMatch` and list it in `registry._ALL`; or keep it in a file of your own
that ends with `SUITE = MySuite()`, and pass the path of that file in place of a suite's name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Prompt = str | tuple[Mapping[str, str], ...]
"""Plain text that the model continues, or chat messages ({role, content}) that end with a user turn."""


@dataclass(frozen=True, slots=True)
class Item:
    """One question of a suite."""

    id: str
    """Unique in its suite, so that runs can be compared item by item: where the suite's `content_sha256` is the same, so
    is the question of an id."""
    prompt: Prompt
    answer: str
    task: str = ""
    """Group for the breakdown of the score; empty: none."""
    prefix: str = ""
    """Text in front of a text prompt that many items share (worked examples); backends compute it once."""
    choices: tuple[str, ...] = ()
    """Continuations that are compared by log-likelihood, such as " A"; the right one equals `answer` except for white
    space at its ends. Empty: the model generates a completion. Either all items of a suite have choices or none has."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A suite's judgement of a completion."""

    score: float
    """0 to 1."""
    extracted: str | None
    """The answer found in the completion; None: no answer was found."""


@dataclass(frozen=True, slots=True)
class Questions:
    """The items of a suite, with their origin."""

    items: tuple[Item, ...]
    files: tuple[Path, ...]
    """All files that were read."""
    content_sha256: str
    """Hash of the questions and answers, independent of file format and row order."""
    warnings: tuple[str, ...] = ()
    """One line for each difference from the published data, in count or content."""


@dataclass(slots=True)
class Suite(ABC):
    """Loads questions and judges completions. A suite of a user's file need not be of this class."""

    name: str
    title: str
    """One line for lists: the questions, the prompt and the scoring."""
    num_fewshot: int = 0
    """Default number of worked examples in front of each question."""
    max_fewshot: int = 0
    """Maximum number of worked examples; 0: the suite takes none."""
    chat: bool = False
    """Whether the prompts are chat messages, which need a chat template."""
    max_new_tokens: int | None = None
    """Token limit of a completion; None: slightly more than the longest answer."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion and are not part of it."""

    @abstractmethod
    def load(self, data: Path, num_fewshot: int) -> Questions:
        """Loads the questions from a suite's file, or from a folder that holds the data of several suites.

        Args:
            num_fewshot: worked examples in front of each question; ignored by a suite that takes none.

        Raises:
            DataError: no data, missing columns, or bad rows, one line each; or more worked examples requested than the
                data contain.
        """

    @abstractmethod
    def judge(self, item: Item, completion: str) -> Verdict:
        """Judges the text that the model generated after the prompt, without special tokens; called only for items
        without choices.

        Runs in a child process with a deadline, so it may call code that hangs on hostile text. An exception costs this
        item only, which then scores 0.
        """


def resolve_num_fewshot(suite: Suite, requested: int | None) -> int:
    """Worked examples for a suite: the requested number, or the suite's default if none is requested (None) or it takes
    none."""
    return suite.num_fewshot if requested is None or suite.max_fewshot == 0 else requested
