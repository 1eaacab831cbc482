"""Runs suites on models: `evaluate` and `evaluate_models`."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distill_rl import __version__
from distill_rl.errors import ConfigError, DistillError, WorkerError
from distill_rl.evals.backends.base import BackendName, Output, Settings
from distill_rl.evals.executor import Executor, LocalExecutor, Task
from distill_rl.evals.grading.grader import Graded, Grader
from distill_rl.evals.options import LoadedSuite, Options, chat_problem, chat_suites, load_questions
from distill_rl.evals.progress import Progress, SilentProgress
from distill_rl.evals.results.result import Row, chosen, completed, summarise, worked_tokens
from distill_rl.evals.results.statistics import wilson
from distill_rl.evals.results.store import Store, locked
from distill_rl.evals.suites import registry
from distill_rl.evals.suites.base import Item
from distill_rl.evals.suites.registry import SUITES
from distill_rl.system.files import sha256

__all__ = ["SUITES", "Model", "evaluate", "evaluate_models", "wilson"]

ANSWER_MARGIN = 8
"""tokens that a completion may be longer than the longest right answer before it is cut off"""
_DECIDE = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
"""files of a model's folder that decide what it writes"""
_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Model:
    """A model to be scored."""

    name: str
    folder: Path
    out: Path | None = None
    """folder of its results; None: nothing is written"""


def evaluate(
    model_dir: str | os.PathLike[str],
    suites: Sequence[str],
    data: str | os.PathLike[str],
    *,
    out_dir: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    batch_size: int = 64,
    seed: int = 0,
    num_fewshot: int | None = None,
    max_new_tokens: int | None = None,
    backend: BackendName = "hf",
    strict: bool = False,
    clean: bool = False,
) -> dict[str, dict[str, Any]]:
    """Scores a model folder on local data, in this process; reaches no network.

    Args:
        suites: names in SUITES, or paths of .py files with a suite of your own.
        data: the file of a suite, or a folder that holds the data of all.
        out_dir: gets `<suite>.json`, the result, and `<suite>.items.jsonl`, one line per item; `<run>/evals/<model>` is
            where the report looks. What a killed call left there is gone on with. None: nothing is written.
        limit: at most so many items per suite, drawn by `seed`, in the order of the data.
        batch_size: prompts that are run together.
        num_fewshot, max_new_tokens: in place of the suites' own.
        strict: warnings about the data are errors.
        clean: results that are there already are thrown away.

    Returns:
        Per suite: `score` (mean over items, 0 to 1), `interval` (95 %, Wilson), `num_items`, `outcomes` (how many of
        each of `result.OUTCOMES`), `truncated` (completions that hit the token limit), `per_task` (the same by task),
        `macro` (mean over tasks), hashes of data and model, `seconds`, `tokens_per_second` and all settings.

    Raises:
        ConfigError: an unknown suite, a folder that is no model, a chat suite for a model without a chat template, or
            results of other settings in `out_dir`; found before anything is run.
        DataError: missing files or bad rows; one line each.
    """
    settings = Settings(batch_size=batch_size)
    options = Options(num_fewshot, max_new_tokens, limit, seed, strict, clean, backend=backend, settings=settings)
    model = Model(str(model_dir), Path(model_dir).expanduser(), None if out_dir is None else Path(out_dir))
    with closing(LocalExecutor()) as executor:
        return evaluate_models([model], suites, Path(data), options, executor)[model.name]


def evaluate_models(
    models: Sequence[Model],
    suites: Sequence[str],
    data: Path,
    options: Options,
    executor: Executor,
    progress: Progress | None = None,
    asked: Sequence[LoadedSuite] | None = None,
    interrupted: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Scores models one after the other, each on all suites: model name → suite → result. As `evaluate`.

    Args:
        executor: what runs them; loads a model only if some of its items have no row yet.
        asked: the questions, where they are loaded already.
        interrupted: asked while something else than the executor is waited for; may raise.
    """
    progress = progress or SilentProgress()
    asked = load_questions(suites, data, options) if asked is None else asked
    check_models(models, asked)
    for each in asked:
        for warning in each.questions.warnings:
            progress.warn(warning)
    results: dict[str, dict[str, dict[str, Any]]] = {}
    with ExitStack() as stack:
        stack.enter_context(locked({model.out for model in models if model.out is not None}))
        grader = stack.enter_context(Grader())
        # What is in the way is told before any model is loaded.
        runs = [_ModelRun(model, asked, options, interrupted) for model in models]
        for run in runs:
            results[run.model.name] = run.suites(executor, grader, progress)
    return results


def check_models(models: Sequence[Model], asked: Sequence[LoadedSuite]) -> None:
    """
    Raises:
        ConfigError: folders that hold no model, or none that the suites can ask; all problems at once.
    """
    from distill_rl.evals.backends.encode import model_folder

    chats = chat_suites(asked)
    problems: list[str] = []
    for model in models:
        what = f"model {model.name}"
        try:
            model_folder(model.folder, what)
        except ConfigError as error:
            problems += error.problems
            continue
        if chats:
            problems += _template_problems(chats, what, model.folder)
    if problems:
        raise ConfigError.many(problems)


def _template_problems(chats: Sequence[str], what: str, folder: Path) -> list[str]:
    from distill_rl.models.hub import read_tokenizer

    try:
        tokenizer: Any = read_tokenizer(folder)
    except DistillError as error:
        return list(error.problems)
    return [] if tokenizer.chat_template else [chat_problem(chats, what)]


class _ModelRun:
    """One model on all suites."""

    def __init__(self, model: Model, asked: Sequence[LoadedSuite], options: Options, interrupted: Callable[[], None]):
        self.model, self.options, self._interrupted = model, options, interrupted
        self._hash = hash_model(model.folder, interrupted)
        self._tokenizer: Any = None
        self._loaded = False
        self._stores = [(each, self._store(each)) for each in asked]

    def _store(self, asked: LoadedSuite) -> Store:
        options = self.options
        key = self._key(asked)
        return Store(self.model.out, asked.suite.name, key, clean=options.clean, replace_others=options.replace_others)

    def suites(self, executor: Executor, grader: Grader, progress: Progress) -> dict[str, dict[str, Any]]:
        return {each.suite.name: self._suite(each, store, executor, grader, progress) for each, store in self._stores}

    def _key(self, asked: LoadedSuite) -> dict[str, Any]:
        """What decides every row; not the batch size, which a run that goes on may change."""
        return {
            "suite": asked.suite.name,
            "model_sha256": self._hash,
            "data_sha256": asked.questions.content_sha256,
            "prompts_sha256": asked.prompts_sha256,
            "suite_sha256": registry.source_sha256(asked.name),
            "num_fewshot": asked.num_fewshot,
            "max_new_tokens": self._max_new_tokens(asked),
            "limit": self.options.limit,
            "seed": None if self.options.limit is None else self.options.seed,
            "backend": self.options.backend,
            "dtype": self.options.settings.dtype,
            "version": __version__,
        }

    def _suite(
        self, asked: LoadedSuite, store: Store, executor: Executor, grader: Grader, progress: Progress
    ) -> dict[str, Any]:
        if store.result is not None:
            progress.found(self.model.name, asked.suite.name, store.result)
            return store.result
        todo = [item for item in asked.items if item.id not in store.rows]
        resumed, start = len(asked.items) - len(todo), time.perf_counter()
        if todo and not self._loaded:
            executor.load(self.model.folder, self.options.backend, self.options.settings)
            self._loaded = True
            start = time.perf_counter()
        if todo and self.options.settings.dtype == "auto":
            store.set_device(executor.device.partition(":")[0])
        tokens = 0
        with progress.suite(self.model.name, asked.suite.name, len(asked.items), store.rows.values()) as shown:
            try:
                for rows in self._rows(asked, todo, store.key["max_new_tokens"], executor, grader):
                    store.append(rows)
                    tokens += worked_tokens(rows)
                    shown.add(rows)
            finally:
                store.close()
        seconds = time.perf_counter() - start
        speed = {"seconds": round(seconds, 3), "tokens_per_second": round(tokens / max(seconds, 1e-9), 1)}
        ordered = [store.rows[item.id] for item in asked.items]
        facts = self._facts(asked) | {"device": executor.device, "resumed_items": resumed}
        return store.finish([row["id"] for row in ordered], summarise(ordered) | facts | speed)

    def _rows(
        self, asked: LoadedSuite, items: Sequence[Item], max_new_tokens: int | None, executor: Executor, grader: Grader
    ) -> Iterator[list[Row]]:
        """Rows as they are judged; the model goes on meanwhile."""
        if not items:
            return
        waiting = _PendingGrades(asked.name, grader, self._interrupted)
        task = Task(asked.choose, max_new_tokens or 0, asked.suite.stop)
        for outputs in executor.run(task, items):
            rows = []
            for index, output in outputs:
                item = items[index]
                if task.choose:
                    rows.append(chosen(item, output))
                elif output.too_long:
                    rows.append(completed(item, output, None))
                else:
                    waiting.submit(item, output)
            yield rows + waiting.done()
        yield from waiting.rest()

    def _max_new_tokens(self, asked: LoadedSuite) -> int | None:
        if asked.choose:
            return None
        own = self.options.max_new_tokens or asked.suite.max_new_tokens
        return own or ANSWER_MARGIN + max(self._count_tokens(item.answer) for item in asked.items)

    def _count_tokens(self, text: str) -> int:
        if self._tokenizer is None:
            from distill_rl.models.hub import read_tokenizer

            self._tokenizer = read_tokenizer(self.model.folder)
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _facts(self, asked: LoadedSuite) -> dict[str, Any]:
        item = asked.items[0]
        prompt = item.prefix + item.prompt if isinstance(item.prompt, str) else [dict(turn) for turn in item.prompt]
        return {
            "title": asked.suite.title,
            "model": str(self.model.folder),
            "data": [str(file) for file in asked.questions.files][:20],
            "warnings": list(asked.questions.warnings),
            "batch_size": self.options.settings.batch_size,
            "example_prompt": prompt,
        }


@dataclass
class _PendingGrades:
    """Completions that are being judged."""

    suite: str
    grader: Grader
    interrupted: Callable[[], None]
    futures: dict[Future[Graded], tuple[Item, Output]] = field(default_factory=dict)

    def submit(self, item: Item, output: Output) -> None:
        self.futures[self.grader.submit(self.suite, item, output.text)] = (item, output)

    def done(self) -> list[Row]:
        return [self._row(future) for future in [each for each in self.futures if each.done()]]

    def rest(self) -> Iterator[list[Row]]:
        """Waits for all that are left: the grader gives each an outcome in its time.

        Raises:
            WorkerError: it did not.
        """
        deadline = time.monotonic() + self.grader.longest_s
        while self.futures:
            self.interrupted()
            if wait(self.futures, timeout=_POLL_S, return_when=FIRST_COMPLETED).done:
                yield self.done()
                deadline = time.monotonic() + self.grader.longest_s
            elif time.monotonic() > deadline:
                raise WorkerError("grader", f"must judge an item within {self.grader.longest_s:g} s", "no verdict")

    def _row(self, future: Future[Graded]) -> Row:
        item, output = self.futures.pop(future)
        return completed(item, output, future.result())


def hash_model(folder: Path, interrupted: Callable[[], None] = lambda: None) -> str:
    """sha256 over weights, config, tokenizer and chat template, names included."""
    digest = hashlib.sha256()
    for path in sorted(path for kind in _DECIDE for path in folder.glob(kind)):
        interrupted()
        digest.update(f"{path.name} {sha256(path)}\n".encode())
    return digest.hexdigest()
