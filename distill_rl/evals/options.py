"""The options of an evaluation, and the suites loaded with their questions."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from distill_rl.config.schema import Config
from distill_rl.errors import ConfigError, DataError
from distill_rl.evals.backends.base import BackendName, Settings
from distill_rl.evals.suites import registry
from distill_rl.evals.suites.base import Item, Questions, Suite, resolve_num_fewshot


@dataclass(frozen=True, slots=True)
class Options:
    """How suites are run; the same for every model that is compared."""

    num_fewshot: int | None = None
    """Worked examples, for suites that take any; None: each suite's default."""
    max_new_tokens: int | None = None
    """Token limit of a completion; None: each suite's default."""
    limit: int | None = None
    """Maximum number of items per suite, drawn with `seed`; None: all. The items of a limit are among those of a larger
    one."""
    seed: int = 0
    strict: bool = False
    """Treat warnings about the data as errors."""
    clean: bool = False
    """Delete existing results; otherwise an interrupted evaluation continues where it stopped."""
    replace_others: bool = False
    """Delete existing results of other settings; otherwise they are an error."""
    backend: BackendName = "hf"
    settings: Settings = field(default_factory=Settings)


@dataclass(frozen=True)
class LoadedSuite:
    """A suite with its questions."""

    suite: Suite
    name: str
    """As `registry.find` takes it: a suite's name, or the path of a user's file."""
    num_fewshot: int
    questions: Questions
    drawn: tuple[str, ...] = ()
    """The ids of the items, in the order in which they were drawn: the first N are the items of limit N."""

    @property
    def items(self) -> tuple[Item, ...]:
        return self.questions.items

    @property
    def choose(self) -> bool:
        """Whether the log-likelihoods of choices are compared. Either all items of a suite have choices or none has."""
        return bool(self.items[0].choices)

    @cached_property
    def prompts_sha256(self) -> str:
        """SHA-256 of everything that the model is given, and of the answers: the stop texts, and per item its id,
        prefix, prompt, choices and answer, in the order of the items. Evaluations of the same suite with equal hashes
        asked the same questions.
        """
        digest = hashlib.sha256(json.dumps(self.suite.stop).encode())
        for item in self.items:
            content = (item.id, item.prefix, item.prompt, item.choices, item.answer)
            digest.update(json.dumps(content, default=dict).encode())
        return digest.hexdigest()


def evaluation_options(config: Config, *, final: bool = False) -> Options:
    """Returns how a run's suites are run: during training, or (`final`) on the export at the end."""
    evaluate = config.evaluate
    return Options(
        num_fewshot=evaluate.num_fewshot,
        max_new_tokens=evaluate.max_new_tokens,
        limit=evaluate.final_limit if final else evaluate.limit,
        seed=config.run.seed,
        replace_others=True,
        backend=evaluate.backend,
        settings=Settings(batch_size=evaluate.batch_size, tensor_parallel=evaluate.parallel.tp),
    )


def load_questions(names: Sequence[str], data: Path, options: Options) -> list[LoadedSuite]:
    """Loads every named suite's questions from `data`, in the order of the names, sampled down to `options.limit`
    items.

    Args:
        names: as `registry.find` takes them: built-in suites, or paths of .py files; a repeated name counts once.
        data: a folder with the data of all suites, or the file or folder of a single one.

    Raises:
        ConfigError: a size in `options` below its minimum; no suite, or unknown ones (all of them are listed).
        DataError: the problems of all suites in one error: missing data, bad rows, no items, repeated ids, a suite file
            whose `load` fails; with `options.strict`, also the warnings.
    """
    _require_valid_sizes(options)
    loaded: list[LoadedSuite] = []
    problems: list[str] = []
    for name, suite in registry.find_all(names).items():
        num_fewshot = resolve_num_fewshot(suite, options.num_fewshot)
        try:
            questions = registry.load(name, suite, data, num_fewshot)
        except (ConfigError, DataError) as error:
            problems += error.problems
            continue
        problems += _id_problems(suite, questions)
        if options.strict:
            problems += questions.warnings
        ids = sorted(item.id for item in questions.items)
        random.Random(options.seed).shuffle(ids)
        drawn = tuple(ids[: options.limit])  # a smaller limit takes the first part
        kept = set(drawn)
        items = tuple(item for item in questions.items if item.id in kept)
        loaded.append(LoadedSuite(suite, name, num_fewshot, replace(questions, items=items), drawn))
    if problems:
        raise DataError.many(dict.fromkeys(problems))
    return loaded


def without_effect(loaded: Sequence[LoadedSuite], options: Options) -> tuple[list[str], list[str]]:
    """Returns the options that none of the suites uses, as error lines, and a remark on each that only some of them use.

    Args:
        loaded: all suites of the evaluation.
    """
    unused, partial = [], []
    fewshot = [entry.suite.name for entry in loaded if entry.suite.max_fewshot]
    generating = [entry.suite.name for entry in loaded if not entry.choose]
    for name, value, users, rule in (
        ("num_fewshot", options.num_fewshot, fewshot, "is for suites that take worked examples"),
        ("max_new_tokens", options.max_new_tokens, generating, "is for suites that generate"),
    ):
        others = [entry.suite.name for entry in loaded if entry.suite.name not in users]
        if value is None or not others:
            continue
        if users:
            partial.append(f"{name} has no effect on {', '.join(others)}: it {rule}")
        else:
            unused.append(str(ConfigError(name, f"{rule}, unlike {', '.join(others)}", value, "leave it out")))
    return unused, partial


def chat_suites(loaded: Sequence[LoadedSuite]) -> list[str]:
    """Names of those suites that have at least one prompt of chat messages."""
    return [entry.suite.name for entry in loaded if any(not isinstance(item.prompt, str) for item in entry.items)]


def chat_problem(chats: Sequence[str], what: str) -> str:
    """Returns the error line for a model that has no chat template although suites need one.

    Args:
        chats: names of those suites, as `chat_suites` returns them.
        what: name of the model, with which the line begins.
    """
    rule = f"the chat prompts of {', '.join(chats)} need a tokenizer with a chat template"
    remedy = "choose suites of plain text (mmlu, minerva_math, gsm8k), or add chat_template.jinja to the folder"
    return str(ConfigError(what, rule, "none", remedy))


def _require_valid_sizes(options: Options) -> None:
    sizes = (
        ("limit", options.limit, 1),
        ("batch_size", options.settings.batch_size, 1),
        ("max_new_tokens", options.max_new_tokens, 1),
        ("tp", options.settings.tensor_parallel, 1),
        ("num_fewshot", options.num_fewshot, 0),
    )
    if problems := [
        str(ConfigError(name, f"must be {least} or more", size))
        for name, size, least in sizes
        if size is not None and size < least
    ]:
        raise ConfigError.many(problems)


def _id_problems(suite: Suite, questions: Questions) -> list[str]:
    """Returns an error line if a suite has no items or repeated ids (up to five are named); otherwise an empty list."""
    if not questions.items:
        return [str(DataError(f"suite {suite.name}", "must have at least one item", "none"))]
    repeated = [name for name, count in Counter(item.id for item in questions.items).items() if count > 1]
    return [str(DataError(f"suite {suite.name}", "ids must be unique", ", ".join(repeated[:5])))] if repeated else []
