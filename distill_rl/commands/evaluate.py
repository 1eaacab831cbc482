"""distill-rl eval: suites on model folders, offline."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from distill_rl.errors import ConfigError, DataError, DistillError
from distill_rl.observe.log import get, log_file, printable, say, setup_console
from distill_rl.system.signals import EXIT_PREEMPTED, Preempted, Signals

if TYPE_CHECKING:
    from distill_rl.evals.executor import Executor
    from distill_rl.evals.options import LoadedSuite, Options
    from distill_rl.evals.run import Model

Result = TypeVar("Result")
Results = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""model name → suite → result"""

MAX_TASKS = 10
"""a suite of more tasks is printed without them"""
COUNTED = {
    "truncated": "cut off",
    "unparsable": "no answer",
    "too_long": "too long",
    "grader_timeout": "grader late",
    "grader_failed": "grader failed",
}
"""what may go wrong with an item, and the heading of its column, which is there where it did"""


@dataclass(frozen=True, slots=True)
class Where:
    """Where the models run."""

    shards: int = 1
    """Ray actors; 0: this process, without Ray"""
    gpus_each: float | None = None
    address: str | None = None
    deadline_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class Request:
    """The command line of `distill-rl eval`."""

    models: Sequence[str]
    """folders, each with a name in front where it needs one: NAME=DIR"""
    suites: Sequence[str]
    data: Path
    options: Options
    out: Path | None = None
    where: Where = field(default_factory=Where)


def evaluate(request: Request) -> int:
    """Runs all suites on all models and prints a table; with `out`, results and items are written there.

    Returns:
        0, or 85 when it was stopped by SIGTERM or SIGUSR1: what was judged is kept, the same command goes on.

    Raises:
        ConfigError: unknown suites, folders that hold no model, or results of other settings in `out`.
        DataError: bad data of the suites.
    """
    setup_console()
    os.environ["HF_HUB_OFFLINE"] = "1"
    from distill_rl.evals.progress import ConsoleProgress
    from distill_rl.evals.run import evaluate_models

    with ExitStack() as stack:
        signals = stack.enter_context(Signals())
        try:
            with signals.at_once():
                models, asked = prepared(request)
            if request.out is not None:
                stack.enter_context(_log(request.out))
            stop = signals.raise_if_stopping
            with (
                _executor(request.where, signals, request.out) as executor,
                _at_once_without_ray(request.where, signals),
            ):
                results = evaluate_models(
                    models,
                    request.suites,
                    request.data,
                    request.options,
                    executor,
                    ConsoleProgress(),
                    loaded=loaded,
                    interrupted=stop,
                )
        except Preempted:
            say("stopped; what was judged is kept, the same command goes on" if request.out else "stopped")
            return EXIT_PREEMPTED
        except DistillError:
            get("evals").info("the evaluation failed", exc_info=True)
            raise
    print_table(results)
    warn_about_too_long_items(results)
    if request.out is not None:
        say(f"results   {request.out}")
        if len(models) > 1:
            say(f"compare   distill-rl report {request.out}")
    return 0


def prepared(request: Request) -> tuple[list[Model], list[LoadedSuite]]:
    """The models and the questions.

    Raises:
        ConfigError: everything that is wrong with either, and with the other settings, at once.
    """
    from distill_rl.evals.options import load_questions
    from distill_rl.evals.run import check_models

    problems: list[str] = []
    models = _tried(lambda: parse_models(request.models, request.out), problems) or []
    _tried(lambda: require_valid(request), problems)
    asked = _tried(lambda: load_questions(request.suites, request.data, request.options), problems) or []
    _tried(lambda: check_models(models, asked), problems)
    if problems:
        raise ConfigError.many(dict.fromkeys(problems))
    return models, asked


def _tried(step: Callable[[], Result], problems: list[str]) -> Result | None:
    """What a step gives, or nothing where it finds bad input, which is added to the problems."""
    try:
        return step()
    except (ConfigError, DataError) as error:
        problems += error.problems
        return None


def parse_models(given: Sequence[str], out: Path | None) -> list[Model]:
    """`NAME=DIR`, or `DIR`, whose name is that of the folder, or of the run that it is the export of.

    One model's results go to `out` itself, several models' to a folder for each.

    Raises:
        ConfigError: two models of one name, or a name that is no file name.
    """
    from distill_rl.evals.run import Model

    named: dict[str, Path] = {}
    problems = []
    for text in given:
        name, equals, folder = text.partition("=")
        path = Path(folder if equals and not Path(text).is_dir() else text).expanduser()
        if not equals or Path(text).is_dir():
            name = path.resolve().parent.name if path.resolve().name == "export" else path.resolve().name
        if not name or name.startswith(".") or "/" in name:
            problems.append(str(ConfigError("--model", "a name must be fit for a folder", text, "give NAME=DIR")))
        elif name in named:
            clash = f"{named[name]} and {path} are both called {name}"
            problems.append(str(ConfigError("--model", "must have different names", clash, "give NAME=DIR")))
        named[name] = path
    if problems:
        raise ConfigError.many(problems)
    single = len(named) == 1
    return [Model(name, path, out and (out if single else out / name)) for name, path in named.items()]


def require_valid(request: Request) -> None:
    """
    Raises:
        ConfigError: numbers that make no sense, or settings that do not go together; all at once.
    """
    where, settings = request.where, request.options.settings
    each, ranks = where.gpus_each, settings.tensor_parallel
    problems = []
    if where.shards < 0:
        problems.append(ConfigError("--shards", "must be 0 or more", where.shards))
    if not 0 < where.deadline_s < math.inf:
        problems.append(ConfigError("--deadline", "must be greater than 0", where.deadline_s))
    if each is not None and not (0 < each <= 1 or (math.isfinite(each) and each > 1 and each == int(each))):
        problems.append(ConfigError("--gpus-per-shard", "must be a share of a GPU, or a whole number", each))
    if ranks > 1 and request.options.backend != "vllm":
        problems.append(ConfigError("--tensor-parallel", "needs --backend vllm", ranks, "use more --shards"))
    if each is not None and (ranks > 1 or not where.shards):
        why = "--tensor-parallel decides" if ranks > 1 else "--shards 0 takes the first GPU"
        problems.append(ConfigError("--gpus-per-shard", f"has no meaning here: {why}", each, "leave it out"))
    if problems:
        raise ConfigError.many(map(str, problems))


@contextmanager
def _log(out: Path) -> Iterator[None]:
    """
    Raises:
        ConfigError: nothing can be written there.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(log_file(out / "logs" / "eval.log"))
        except OSError as error:
            raise ConfigError("--out", "must be a folder that can be written", f"{out} ({error.strerror})") from error
        yield


def _executor(where: Where, signals: Signals, out: Path | None) -> AbstractContextManager[Executor]:
    if where.shards == 0:
        from distill_rl.evals.executor import LocalExecutor

        return closing(LocalExecutor())
    from distill_rl.config.schema import RayConfig
    from distill_rl.workers.evaluation.executor import RayExecutor, Shards

    shards = Shards(where.shards, where.gpus_each, RayConfig(address=where.address), where.deadline_s)
    logs = None if out is None else out / "logs"
    return RayExecutor(shards, started=signals.install_again, interrupted=signals.raise_if_stopping, logs=logs)


def _at_once_without_ray(where: Where, signals: Signals) -> AbstractContextManager[None]:
    """Where nothing of Ray waits, the handler itself may raise."""
    return signals.at_once() if where.shards == 0 else nullcontext()


def print_table(results: Results) -> None:
    """Score, interval and what went wrong, by model, suite and task."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    rows = [
        ((model, suite) if not index else ("", ""), task, part)
        for model, suites in results.items()
        for suite, result in suites.items()
        for index, (task, part) in enumerate(_parts(result))
    ]
    shown = [name for name in COUNTED if any(_count(part, name) for _, _, part in rows)]
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("model", "suite", "task"):
        table.add_column(heading, overflow="fold")
    for heading in ("score", "95 % interval", "items", *(COUNTED[name] for name in shown)):
        table.add_column(heading, justify="right", no_wrap=True)
    for head, task, part in rows:
        low, high = part["interval"]
        figures = [f"{part['score']:.3f}", f"{low:.3f} to {high:.3f}", f"{part['num_items']:,}"]
        counts = [f"{_count(part, name):,}" for name in shown]
        table.add_row(*(escape(printable(text)) for text in (*head, task)), *figures, *counts)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 120)  # a file or a pipe has no width to keep to
    console.print(table)


def warn_about_too_long_items(results: Results) -> None:
    """Items that count as not right because they could not be asked."""
    for model, suites in results.items():
        for suite, result in suites.items():
            count = result["outcomes"]["too_long"]
            if count:
                what = f"{count} of {result['num_items']} items of {suite} do not fit into the positions of {model}"
                say(f"warning: {what} and count as not right; fewer worked examples (--num-fewshot) may help")


def _parts(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    tasks = result["per_task"]
    return [("all", result), *(tasks.items() if 1 < len(tasks) <= MAX_TASKS else ())]


def _count(part: Mapping[str, Any], name: str) -> int:
    return part["truncated"] if name == "truncated" else part["outcomes"][name]


def print_suites() -> None:
    """The suites there are, one line each."""
    from distill_rl.evals.suites.registry import SUITES

    width = max(map(len, SUITES))
    for name, suite in SUITES.items():
        print(f"{name:<{width}}  {suite.title}")
