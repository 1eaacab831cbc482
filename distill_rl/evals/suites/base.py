"""What a suite is. To add one, write a class like `exact_match.ExactMatch` and name it in `registry.SUITES`; or keep it in
a file of your own that ends with `SUITE = MySuite()`, and give that file's path where a name is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

Prompt = str | tuple[Mapping[str, str], ...]
"""Plain text that the model goes on from, or chat messages ({role, content}) that end with the user's turn."""


@dataclass(frozen=True, slots=True)
class Item:
    """One question of a suite."""

    id: str
    """unique in its suite; the same however the data are stored, so that runs can be compared item by item"""
    prompt: Prompt
    answer: str
    task: str = ""
    """for a break-down of the score; empty: none"""
    prefix: str = ""
    """of a text prompt: what stands in front of it and many items share (worked examples); work on it is done once"""
    choices: tuple[str, ...] = ()
    """continuations to choose from by their log-likelihood, such as " A"; the right one is `answer` with white space
    around it. Empty: the model writes freely. All items of a suite have some, or none has"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a suite makes of a completion."""

    score: float
    """0 to 1"""
    extracted: str | None
    """the answer as it was found in the completion; None: there was none"""


@dataclass(frozen=True, slots=True)
class Questions:
    """The items of a suite, as they were found."""

    items: tuple[Item, ...]
    files: tuple[Path, ...]
    """all that were read"""
    content_sha256: str
    """of the questions and answers, the same in whatever form and order they are stored"""
    warnings: tuple[str, ...] = ()
    """one line each: counts or contents that are not those of the published data"""


class Suite(Protocol):
    """Questions, and how an answer is judged."""

    name: str
    title: str
    """one line for lists: what is asked, how, and how it is scored"""
    num_fewshot: int
    """worked examples in front of each question, where nothing else is asked for"""
    max_fewshot: int
    """as many as there can be; 0 for a suite that takes none"""
    chat: bool
    """whether the prompts are chat messages, which need a chat template"""
    max_new_tokens: int | None
    """limit of a completion; None: a little more than the longest answer"""
    stop: tuple[str, ...]
    """texts that end a completion, and are not part of it"""

    def load(self, data: Path, num_fewshot: int) -> Questions:
        """The questions, from a suite's file or a folder that holds the data of suites.

        Raises:
            DataError: nothing there, columns missing, or bad rows, one line each; or more worked examples asked for
                than the data have.
        """
        ...

    def judge(self, item: Item, completion: str) -> Verdict:
        """Judges what the model wrote after the prompt (special tokens left out). Runs in a process of its own that is
        ended when it takes too long, so it may call what can hang on hostile text."""
        ...


def resolve_num_fewshot(suite: Suite, requested: int | None) -> int:
    """Worked examples for a suite: the requested number, or the default if none is requested or the suite takes none."""
    return suite.num_fewshot if requested is None or suite.max_fewshot == 0 else requested
