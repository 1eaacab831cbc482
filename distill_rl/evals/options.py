"""What an evaluation is asked for, and the questions that follow from it."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from distill_rl.errors import ConfigError, DataError
from distill_rl.evals.backends.base import BackendName, Settings
from distill_rl.evals.suites import registry
from distill_rl.evals.suites.base import Item, Questions, Suite, with_fewshot


@dataclass(frozen=True, slots=True)
class Options:
    """How suites are run; the same for every model that is compared."""

    num_fewshot: int | None = None
    """worked examples, for suites that take any; None: as many as each suite is known by"""
    max_new_tokens: int | None = None
    """limit of a completion; None: the suite's own"""
    limit: int | None = None
    """at most so many items per suite, drawn by `seed`"""
    seed: int = 0
    strict: bool = False
    """warnings about the data are errors"""
    clean: bool = False
    """results that are there already are thrown away; else the run goes on where it stopped"""
    replace_others: bool = False
    """results of other settings that are there are thrown away; else they are an error"""
    backend: BackendName = "hf"
    settings: Settings = field(default_factory=Settings)


@dataclass(frozen=True)
class LoadedSuite:
    """A suite with its questions in hand."""

    suite: Suite
    name: str
    """as `registry.find` takes it"""
    num_fewshot: int
    questions: Questions

    @property
    def items(self) -> tuple[Item, ...]:
        return self.questions.items

    @property
    def choose(self) -> bool:
        """Whether choices are compared; else the model writes. All items of a suite are alike in that."""
        return bool(self.items[0].choices)

    @cached_property
    def prompts_sha256(self) -> str:
        """Over all that a model is given, and what is right."""
        digest = hashlib.sha256(json.dumps(self.suite.stop).encode())
        for item in self.items:
            given = (item.id, item.prefix, item.prompt, item.choices, item.answer)
            digest.update(json.dumps(given, default=dict).encode())
        return digest.hexdigest()


def load_questions(names: Sequence[str], data: Path, options: Options) -> list[LoadedSuite]:
    """The suites with their items.

    Raises:
        ConfigError: sizes below 1; unknown suites, all of them, with the list; none named.
        DataError: the bad rows of all suites; with `strict` also what only is a warning else.
    """
    _require_sizes(options)
    found: list[LoadedSuite] = []
    problems: list[str] = []
    for name, suite in registry.find_all(names).items():
        num_fewshot = with_fewshot(suite, options.num_fewshot)
        try:
            questions = registry.load(name, suite, data, num_fewshot)
        except (ConfigError, DataError) as error:
            problems += error.problems
            continue
        problems += _repeated(suite, questions)
        if options.strict:
            problems += questions.warnings
        drawn = _draw(questions.items, options.limit, options.seed)
        found.append(LoadedSuite(suite, name, num_fewshot, replace(questions, items=drawn)))
    if problems:
        raise DataError.many(dict.fromkeys(problems))
    return found


def chat_suites(asked: Sequence[LoadedSuite]) -> list[str]:
    """Names of the suites that ask in chat messages."""
    return [each.suite.name for each in asked if any(not isinstance(item.prompt, str) for item in each.items)]


def chat_problem(chats: Sequence[str], what: str) -> str:
    """What to say of a model without a chat template; one line."""
    rule = f"{', '.join(chats)} asks in chat messages, which need a tokenizer with a chat template"
    remedy = "choose suites of plain text (mmlu, minerva_math, gsm8k), or add chat_template.jinja to the folder"
    return str(ConfigError(what, rule, "none", remedy))


def _require_sizes(options: Options) -> None:
    sizes = {"limit": options.limit, "batch_size": options.settings.batch_size}
    sizes |= {"max_new_tokens": options.max_new_tokens, "tensor_parallel": options.settings.tensor_parallel}
    problems = [
        str(ConfigError(name, "must be 1 or more", number))
        for name, number in sizes.items()
        if number is not None and number < 1
    ]
    if options.num_fewshot is not None and options.num_fewshot < 0:
        problems.append(str(ConfigError("num_fewshot", "must be 0 or more", options.num_fewshot)))
    if problems:
        raise ConfigError.many(problems)


def _repeated(suite: Suite, questions: Questions) -> list[str]:
    """Rows are told apart by their ids, also after a stop."""
    counts = Counter(item.id for item in questions.items)
    twice = [name for name, count in counts.items() if count > 1]
    if not questions.items:
        return [str(DataError(f"suite {suite.name}", "must have at least one item", "none"))]
    return [str(DataError(f"suite {suite.name}", "ids must be unique", ", ".join(twice[:5])))] if twice else []


def _draw(items: Sequence[Item], limit: int | None, seed: int) -> tuple[Item, ...]:
    """Drawn among the sorted ids: the same items in whatever order the data are stored."""
    if limit is None or limit >= len(items):
        return tuple(items)
    chosen = set(random.Random(seed).sample(sorted(item.id for item in items), limit))
    return tuple(item for item in items if item.id in chosen)
