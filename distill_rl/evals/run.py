"""Runs suites on models: `evaluate_models`."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill_rl import __version__
from distill_rl.errors import ConfigError, DistillError, WorkerError
from distill_rl.evals.backends.base import Output, model_folder
from distill_rl.evals.executor import Executor, SuiteTask
from distill_rl.evals.grading.grader import Graded, Grader
from distill_rl.evals.options import LoadedSuite, Options, chat_problem, chat_suites, without_effect
from distill_rl.evals.results import ResultStore, Row, choice_row, completion_row, locked, processed_tokens, summarise
from distill_rl.evals.suites import registry
from distill_rl.evals.suites.base import Item
from distill_rl.observe.log import ProgressBar, get, print_line, printable
from distill_rl.system.files import sha256, write_atomic

if TYPE_CHECKING:
    from rich.console import Console


# Progress of an evaluation: a bar on a terminal, log lines elsewhere, or counts in a file for another process.


@dataclass(frozen=True, slots=True)
class Counts:
    """How far the evaluation of a model has come."""

    suite: str
    done: int
    total: int
    score: float
    """Mean over the items done; 0 before the first."""
    items_per_second: float
    """Since the suite began, without items that an earlier run left."""

    def __str__(self) -> str:
        speed = f"{self.items_per_second:,.1f} items/s"
        score = f", score {self.score:.3f}" if self.done else ""
        return f"{self.suite}: {self.done:,} of {self.total:,} items, {speed}{score}"


class EvalProgress:
    """Receives the progress of an evaluation, suite by suite; this one shows nothing but warnings, which go to the log.

    Args:
        interval_s: seconds between two times at which it is shown, where there is no terminal.
        clock: seconds from any origin.
    """

    def __init__(self, *, interval_s: float = 10.0, clock: Callable[[], float] = time.monotonic):
        self.interval_s, self.clock = interval_s, clock

    @contextmanager
    def suite(self, model: str, suite: str, total: int, rows: Collection[Row]) -> Iterator[EvalProgress]:
        """Returns a context manager around the evaluation of one suite on one model; it yields this object, whose `add` is
        to be called with every batch of newly graded rows.

        Args:
            model, suite: names to show.
            total: items of the suite.
            rows: graded rows that an earlier, interrupted run left; they count as done from the start.
        """
        self._suite, self._total, self._num_resumed = suite, total, len(rows)
        self._num_items, self._num_tokens, self._score_sum = len(rows), 0, sum(row["score"] for row in rows)
        self._start = self.clock()
        yield self

    def add(self, rows: Collection[Row]) -> None:
        """Counts newly graded rows, each of which must be passed once."""
        self._num_items += len(rows)
        self._num_tokens += processed_tokens(rows)
        self._score_sum += sum(row["score"] for row in rows)
        seconds = max(self.clock() - self._start, 1e-9)
        speed = round((self._num_items - self._num_resumed) / seconds, 3)
        score = self._score_sum / max(self._num_items, 1)
        self._show(Counts(self._suite, self._num_items, self._total, score, speed), self._num_tokens / seconds)

    def _show(self, counts: Counts, tokens_per_second: float) -> None:
        """Shows how far the present suite has come; does nothing here."""

    def already_finished(self, model: str, suite: str, result: Mapping[str, Any]) -> None:
        """Called for a suite that an earlier run finished, in place of `suite`; does nothing here.

        Args:
            model, suite: names to show.
            result: the stored result.
        """

    def warn(self, text: str) -> None:
        """Reports a warning about the evaluation; here as a warning in the log."""
        get("evals").warning(text)


class ConsoleProgress(EvalProgress):
    """Shows the items done, the score so far, tokens per second and the time left: a bar on a terminal, otherwise a line
    after the first rows, at intervals and when all items are done.

    Args:
        console: where to write; None: stdout.
        timing: as `EvalProgress`.
    """

    def __init__(self, *, console: Console | None = None, **timing: Any):
        from rich.console import Console

        super().__init__(**timing)
        self.console = console or Console()

    @contextmanager
    def suite(self, model: str, suite: str, total: int, rows: Collection[Row]) -> Iterator[EvalProgress]:
        name = f"{suite}  {model}"
        if rows:
            self._print(f"{name}: {len(rows)} of {total} items are already done")
        options: Any = {"console": self.console, "interval_s": self.interval_s, "clock": self.clock}
        bar = ProgressBar(printable(f"{name}:"), total, done=len(rows), **options)
        with closing(bar) as self._bar, super().suite(model, suite, total, rows):
            yield self

    def _show(self, counts: Counts, tokens_per_second: float) -> None:
        score = [f"score {counts.score:.3f}"] if counts.done else []
        self._bar.update(counts.done, [*score, f"{tokens_per_second:,.0f} tokens/s"])

    def already_finished(self, model: str, suite: str, result: Mapping[str, Any]) -> None:
        self._print(f"{suite}  {model}: all {result.get('num_items')} items are already done")

    def warn(self, text: str) -> None:
        self._print(f"warning: {text}")

    def _print(self, text: str) -> None:
        print_line(self.console, printable(text))


class FileProgress(EvalProgress):
    """Keeps the counts of the present suite in a file, which `read_counts` reads in another process.

    As a context manager it removes the file.

    Args:
        path: written at most once per `interval_s` seconds.
        interval_s, clock: as `EvalProgress`.
    """

    def __init__(self, path: Path, *, interval_s: float = 1.0, clock: Callable[[], float] = time.monotonic):
        super().__init__(interval_s=interval_s, clock=clock)
        self._path, self._written = path, -interval_s

    def __enter__(self) -> FileProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)

    def _show(self, counts: Counts, tokens_per_second: float) -> None:
        """Writes the counts, unless the last ones are younger than the interval."""
        if (now := self.clock()) - self._written >= self.interval_s:
            self._written = now
            write_atomic(self._path, json.dumps(asdict(counts)))


def progress_file(folder: Path) -> Path:
    """The file of a `FileProgress`, in the folder of the model's results."""
    return folder / ".progress.json"


def read_counts(path: Path) -> Counts | None:
    """Returns what a `FileProgress` wrote last; None without a file, or if it cannot be read."""
    try:
        return Counts(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


ANSWER_MARGIN = 8
"""Tokens by which a completion may exceed the suite's longest answer, where the suite sets no limit."""
_HASHED_FILES = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
"""Files of a model folder that determine its output."""
_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Model:
    """A model to be scored."""

    name: str
    folder: Path
    out: Path | None = None
    """Folder of its results; None: nothing is written."""


def evaluate_models(
    models: Sequence[Model],
    suites: Sequence[LoadedSuite],
    options: Options,
    executor: Executor,
    progress: EvalProgress | None = None,
    interrupted: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Scores models one after another, each on all suites: model name → suite → result.

    A result folder (`Model.out`) gets `<suite>.json`, the result, and `<suite>.items.jsonl`, one line per item; the
    report looks for them in `<run>/evals/<model>`. An evaluation that was killed continues from what it left there,
    unless `options.clean` is set. The folders are locked against other processes meanwhile.

    Args:
        models: with distinct names, the keys of the returned dictionary.
        suites: loaded with the same options.
        executor: runs the models; loads a model only if some of its items are not done yet. It is not closed.
        progress: None: nothing but warnings is shown.
        interrupted: called during every wait outside the executor; may raise, which ends the evaluation.

    Returns:
        Per model and suite: `score` (mean over items, 0 to 1), `interval` (95 %, Wilson), `num_items`, `ungraded` (items
        without a grade, which score 0), `outcomes` (counts for each of `OUTCOMES`), `truncated` (completions
        that reached the token limit), `per_task` (the same by task), `macro` (mean over tasks; None without tasks),
        `seconds`, `tokens_per_second`, the fields of the key (`_ModelRun._key`: hashes of data and model, and settings) and facts about the run.

    Raises:
        ConfigError: a folder without a model, a chat suite for a model without a chat template, or, in a result folder,
            results of other settings or another evaluation at work, all before any model is loaded; later, a model that
            the executor cannot load, or rows to be continued that come from another kind of device (dtype auto).
        DataError: an item whose prompt or choices cannot be encoded.
        GpuMemoryError: the GPU has too little memory.
        WorkerError: the grading processes do not start or do not answer.
    """
    progress = progress or EvalProgress()
    check_models(models, suites, options)
    warnings = [warning for entry in suites for warning in entry.questions.warnings]
    for remark in warnings + without_effect(suites, options)[1]:
        progress.warn(remark)
    with ExitStack() as stack:
        for folder in {model.out for model in models if model.out is not None}:
            stack.enter_context(locked(folder))
        grader = stack.enter_context(Grader())
        # Every result folder is read before any model is loaded, so that conflicting results are reported at once.
        runs = [_ModelRun(model, suites, options, executor, grader, progress, interrupted) for model in models]
        return {run.model.name: run.results() for run in runs}


def check_models(models: Sequence[Model], loaded: Sequence[LoadedSuite], options: Options) -> None:
    """Checks, without loading weights, that every model's folder holds a model that can be split as the options say,
    and that the model has a chat template if a suite needs one.

    Raises:
        ConfigError: all problems of all models at once.
    """
    from distill_rl.models.families import split_problems
    from distill_rl.models.files import read_config, read_tokenizer

    tp, backend = options.settings.tensor_parallel, options.backend
    chats = chat_suites(loaded)
    problems: list[str] = []
    for model in models:
        what = f"model {model.name}"
        try:
            model_folder(model.folder, what)
            if chats and not read_tokenizer(model.folder).chat_template:
                problems.append(chat_problem(chats, what))
            if tp > 1:
                lines = split_problems(read_config(model.folder), tp, backend=backend, setting="tp")
                problems += [f"{what}: {line}" for line in lines]
        except DistillError as error:
            problems += error.problems
    ConfigError.raise_all(problems)


@dataclass
class _ModelRun:
    """One model on all suites."""

    model: Model
    suites: Sequence[LoadedSuite]
    options: Options
    executor: Executor
    grader: Grader
    progress: EvalProgress
    interrupted: Callable[[], None]

    def __post_init__(self) -> None:
        """Hashes the model's files and reads its earlier results of all suites; does not load the model.

        The result folder must be locked. With the option `clean` or `replace_others` results may be deleted here.

        Raises:
            ConfigError: the folder holds results of other settings, or the file of a user's suite cannot be read.
        """
        self._hash = hash_model(self.model.folder, self.interrupted)
        self._model_is_loaded = False
        stores = {"clean": self.options.clean, "replace_others": self.options.replace_others}
        self._stores = [
            (entry, ResultStore(self.model.out, entry.suite.name, self._key(entry), **stores)) for entry in self.suites
        ]

    def results(self) -> dict[str, dict[str, Any]]:
        """Evaluates the model on all suites, one after another; returns suite name → result. See `evaluate_models`."""
        return {entry.suite.name: self._evaluate_suite(entry, store) for entry, store in self._stores}

    def _key(self, entry: LoadedSuite) -> dict[str, Any]:
        """What determines a suite's rows; stored rows are only continued if it is equal."""
        # The batch size is not part of it, so a continued evaluation may change it. The seed is None if there is no
        # limit, because nothing is drawn then.
        return {
            "suite": entry.suite.name,
            "model_sha256": self._hash,
            "data_sha256": entry.questions.content_sha256,
            "prompts_sha256": entry.prompts_sha256,
            "suite_sha256": registry.source_sha256(entry.name),
            "num_fewshot": entry.num_fewshot,
            "max_new_tokens": self._max_new_tokens(entry),
            "limit": self.options.limit,
            "seed": None if self.options.limit is None else self.options.seed,
            "backend": self.options.backend,
            "dtype": self.options.settings.dtype,
            "version": __version__,
        }

    def _evaluate_suite(self, entry: LoadedSuite, store: ResultStore) -> dict[str, Any]:
        """The result of one suite. One that is finished comes straight from the store, without a model."""
        # Otherwise loads the model if no suite has yet, evaluates the items that the store lacks, appends each row to
        # the store as soon as it is graded, and writes the result, whose `seconds` and `tokens_per_second` count this
        # run only, without loading. After an error the stored rows remain, for the next evaluation to continue from.
        if store.result is not None:
            self.progress.already_finished(self.model.name, entry.suite.name, store.result)
            return store.result
        todo = [item for item in entry.items if item.id not in store.rows]
        if todo and not self._model_is_loaded:
            self.executor.load(self.model.folder, self.options.backend, self.options.settings)
            self._model_is_loaded = True
        if todo and self.options.settings.dtype == "auto":
            store.set_device(self.executor.device.partition(":")[0])
        tokens, start, done = 0, time.perf_counter(), list(store.rows.values())
        with self.progress.suite(self.model.name, entry.suite.name, len(entry.items), done) as shown, closing(store):
            for rows in self._rows(entry, todo, store.key["max_new_tokens"]):
                store.append(rows)
                tokens += processed_tokens(rows)
                shown.add(rows)
        seconds = time.perf_counter() - start
        speed = {"seconds": round(seconds, 3), "tokens_per_second": round(tokens / max(seconds, 1e-9), 1)}
        order = [item.id for item in entry.items]
        summary = summarise([store.rows[item_id] for item_id in order])
        resumed = {"device": self.executor.device, "resumed_items": len(entry.items) - len(todo)}
        return store.finish(order, summary | self._facts(entry) | resumed | speed)

    def _rows(self, entry: LoadedSuite, items: Sequence[Item], max_new_tokens: int | None) -> Iterator[list[Row]]:
        """Yields lists of rows as they are graded; the model generates meanwhile."""
        if not items:
            return
        pending: _Pending = {}
        task = SuiteTask(entry.choose, max_new_tokens or 0, entry.suite.stop)
        for outputs in self.executor.run(task, items):
            rows = []
            for index, output in outputs:
                item = items[index]
                if task.choose:
                    rows.append(choice_row(item, output))
                elif output.too_long:
                    rows.append(completion_row(item, output, None))
                else:
                    pending[self.grader.submit(entry.name, item, output.text)] = item, output
            yield rows + _graded(pending)
        yield from _rest(pending, self.grader, self.interrupted)

    def _max_new_tokens(self, entry: LoadedSuite) -> int | None:
        """The token limit of a suite's completions; None for a suite with choices."""
        # It is that of the options, else that of the suite, else ANSWER_MARGIN tokens more than the suite's longest
        # answer.
        if entry.choose:
            return None
        if limit := self.options.max_new_tokens or entry.suite.max_new_tokens:
            return limit
        answers = (self._tokenizer(item.answer, add_special_tokens=False)["input_ids"] for item in entry.items)
        return ANSWER_MARGIN + max(map(len, answers))

    @cached_property
    def _tokenizer(self) -> Any:
        from distill_rl.models.files import read_tokenizer

        return read_tokenizer(self.model.folder)

    def _facts(self, entry: LoadedSuite) -> dict[str, Any]:
        """What a result shows beside its key."""
        item = entry.items[0]
        prompt = item.prefix + item.prompt if isinstance(item.prompt, str) else [dict(turn) for turn in item.prompt]
        return {
            "title": entry.suite.title,
            "model": str(self.model.folder),
            "data": [str(file) for file in entry.questions.files][:20],
            "warnings": list(entry.questions.warnings),
            "batch_size": self.options.settings.batch_size,
            "tensor_parallel": self.options.settings.tensor_parallel,
            "example_prompt": prompt,
        }


_Pending = dict[Future[Graded], tuple[Item, Output]]
"""Completions that are being graded."""


def _graded(pending: _Pending) -> list[Row]:
    """Removes and returns the rows whose grades are ready, without waiting; raises what a grade does."""
    return [completion_row(*pending.pop(future), future.result()) for future in list(pending) if future.done()]


def _rest(pending: _Pending, grader: Grader, interrupted: Callable[[], None]) -> Iterator[list[Row]]:
    """Yields the rows of all grades in lists as they arrive; fails after `grader.longest_s`, by which the grader ends every item."""
    deadline = time.monotonic() + grader.longest_s
    while pending:
        interrupted()
        if wait(pending, timeout=_POLL_S, return_when=FIRST_COMPLETED).done:
            yield _graded(pending)
            deadline = time.monotonic() + grader.longest_s
        elif time.monotonic() > deadline:
            raise WorkerError("grader", f"must judge an item within {grader.longest_s:g} s", "no verdict")


def hash_model(folder: Path, interrupted: Callable[[], None] = lambda: None) -> str:
    """SHA-256 (hexadecimal) over the names and contents of the files in a model folder that match _HASHED_FILES:
    weights, configs, tokenizer and chat template.

    Args:
        interrupted: called before each file; may raise.
    """
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _HASHED_FILES for path in folder.glob(pattern)):
        interrupted()
        digest.update(f"{path.name} {sha256(path)}\n".encode())
    return digest.hexdigest()
