"""distill-rl eval: runs suites on model folders, offline."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from distill_rl.errors import ConfigError, DataError, DistillError
from distill_rl.observe.log import get, log_file, open_console, printable, say, setup_console
from distill_rl.system.files import name_problem
from distill_rl.system.signals import EXIT_PREEMPTED, Preempted, Signals

if TYPE_CHECKING:
    from distill_rl.evals.executor import Executor
    from distill_rl.evals.options import LoadedSuite, Options
    from distill_rl.evals.run import Model

Result = TypeVar("Result")
Results = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""model name → suite → result"""

MAX_TASKS = 10
"""A suite with more tasks is printed without them."""
FAILURE_HEADINGS = {
    "ungraded": "not graded",
    "truncated": "cut off",
    "unparsable": "no answer",
    "too_long": "too long",
}
"""Failure of an item → heading of its column in the table, which is shown only if the failure occurred."""


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """Where the models run."""

    shards: int = 1
    """Number of Ray actors; 0: in this process, without Ray."""
    gpus_per_shard: float | None = None
    """None: the GPUs are shared out evenly."""
    address: str | None = None
    """Address of a running Ray cluster; None: start one."""
    deadline_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """The command line of `distill-rl eval`."""

    models: Sequence[str]
    """Folders, as DIR or NAME=DIR."""
    suites: Sequence[str]
    data: Path
    options: Options
    out: Path | None = None
    executor: ExecutorOptions = field(default_factory=ExecutorOptions)


def command(**options: Any) -> int:
    """Evaluates with the options of the command line as keywords, which have the names of the fields that they set.

    The entry point of `distill-rl eval`; returns the exit code and raises as `evaluate` does.
    """
    from distill_rl.evals.backends.base import Settings
    from distill_rl.evals.options import Options

    if options["dry_run"]:
        return _write_script(options)
    if options["slurm"]:
        raise ConfigError("--slurm", "has no effect without --dry-run", remedy="add --dry-run to write a batch script")

    def made(kind: type) -> Any:
        return kind(**{entry.name: options[entry.name] for entry in fields(kind) if entry.name in options})

    return evaluate(
        EvaluationRequest(
            options["models"],
            options["suites"],
            options["data"],
            options=replace(made(Options), settings=made(Settings)),
            out=options["out"],
            executor=made(ExecutorOptions),
        )
    )


def _write_script(options: Mapping[str, Any]) -> int:
    from distill_rl.commands.dry_run import write_evaluation_script

    if options["out"] is None:
        raise ConfigError("--dry-run", "needs --out, in which it writes the batch script")
    for name, option in (("clean", "--clean"), ("address", "--ray-address")):
        if options[name]:
            raise ConfigError(f"--dry-run and {option}", "exclude each other", remedy=f"leave {option} out")
    plain = ("data", "out", "backend", "limit", "num_fewshot", "max_new_tokens", "batch_size", "dtype", "shards",
             "gpus_per_shard", "tensor_parallel", "seed")  # fmt: skip
    arguments = ["--model", *options["models"], "--suites", ",".join(options["suites"])]
    for name in plain:
        if options[name] is not None:
            arguments += [f"--{name.replace('_', '-')}", str(options[name])]
    arguments += ["--deadline", f"{options['deadline_s']:g}", *(["--strict"] if options["strict"] else [])]
    return write_evaluation_script(options["out"], arguments, options["slurm"])


def evaluate(request: EvaluationRequest) -> int:
    """Runs all suites on all models, prints a table and, if `out` is given, writes results, items and a log there.

    Sets HF_HUB_OFFLINE for this process, and handles SIGTERM, SIGUSR1, SIGHUP and Ctrl-C while it runs.

    Returns:
        0; or 85 after SIGTERM, SIGUSR1 or SIGHUP: the graded items are kept in `out`, and the same command continues.

    Raises:
        ConfigError: bad options, unknown suites, bad data in the suites, folders without a model (all of these at
            once), results of other settings in `out`, or an `out` that cannot be written.
        DistillError: the evaluation failed, for instance because an actor died.
        KeyboardInterrupt: Ctrl-C, or a second SIGTERM.
    """
    setup_console()
    os.environ["HF_HUB_OFFLINE"] = "1"
    from distill_rl.evals.run import ConsoleProgress, evaluate_models

    with ExitStack() as stack:
        signals = stack.enter_context(Signals())
        try:
            with signals.at_once():
                models, loaded = prepare(request)
            if request.out is not None:
                try:
                    stack.enter_context(log_file(request.out / "logs" / "eval.log"))
                except OSError as error:
                    rule, value = "must be a folder that can be written", f"{request.out} ({error.strerror})"
                    raise ConfigError("--out", rule, value) from error
            with (
                _executor(request.executor, signals, request.out) as executor,
                # Without Ray, no Ray call swallows an exception that the signal handler raises.
                signals.at_once() if request.executor.shards == 0 else nullcontext(),
            ):
                results = evaluate_models(
                    models, loaded, request.options, executor, ConsoleProgress(), signals.raise_if_stopping
                )
        except Preempted:
            say("stopped; graded items are kept, and the same command continues" if request.out else "stopped")
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


def prepare(request: EvaluationRequest) -> tuple[list[Model], list[LoadedSuite]]:
    """The models and the loaded suites of a command line, checked; no weights are read and nothing is started.

    Raises:
        ConfigError: all problems of models, suites, their data and options at once.
    """
    from distill_rl.evals.options import load_questions, without_effect
    from distill_rl.evals.run import check_models

    problems: list[str] = []
    models = _attempt(lambda: parse_models(request.models, request.out), problems) or []
    _attempt(lambda: require_valid(request), problems)
    loaded = _attempt(lambda: load_questions(request.suites, request.data, request.options), problems) or []
    problems += without_effect(loaded, request.options)[0]
    _attempt(lambda: check_models(models, loaded, request.options), problems)
    if problems:
        raise ConfigError.many(dict.fromkeys(map(_as_option, problems)))
    return models, loaded


def _as_option(line: str) -> str:
    """An error line that begins with a field of the options, with the option of the command line in its place."""
    from distill_rl.evals.backends.base import Settings
    from distill_rl.evals.options import Options

    name, colon, rest = line.partition(":")
    if name in {"tp", *(entry.name for kind in (Options, Settings) for entry in fields(kind))}:
        name = f"--{name.replace('_', '-')}"
    return name + colon + rest


def _attempt(step: Callable[[], Result], problems: list[str]) -> Result | None:
    """The result of a step; None if it raises ConfigError or DataError, whose lines are added to `problems`."""
    try:
        return step()
    except (ConfigError, DataError) as error:
        problems += error.problems
        return None


def parse_models(arguments: Sequence[str], out: Path | None) -> list[Model]:
    """Models from arguments `NAME=DIR` or `DIR`.

    The name of a `DIR` is that of the folder, or of the folder above one called `export`.

    An argument that is an existing folder is a `DIR`, even with `=` in it. The results of a single model go to `out`
    itself, those of several models to a subfolder of `out` for each; None: they are not written.

    Raises:
        ConfigError: all models with the name of another, or with a name that cannot name a folder.
    """
    from distill_rl.evals.run import Model

    folders: dict[str, Path] = {}
    problems = []
    for argument in arguments:
        name, equals, folder = argument.partition("=")
        if equals and not Path(argument).is_dir():
            path = Path(folder).expanduser()
        else:
            path = Path(argument).expanduser()
            resolved = path.resolve()
            name = resolved.parent.name if resolved.name == "export" else resolved.name
        if broken := "must not begin with a dot" if name.startswith(".") else name_problem(name):
            problems.append(str(ConfigError("--model", f"a name {broken}", argument, "give NAME=DIR")))
        elif name in folders:
            clash = f"{folders[name]} and {path} are both called {name}"
            problems.append(str(ConfigError("--model", "must have different names", clash, "give NAME=DIR")))
        folders[name] = path
    if problems:
        raise ConfigError.many(problems)
    single = len(folders) == 1
    return [Model(name, path, out and (out if single else out / name)) for name, path in folders.items()]


def require_valid(request: EvaluationRequest) -> None:
    """Checks --shards, --deadline, --gpus-per-shard, --tp and --ray-address of a command line.

    Raises:
        ConfigError: numbers out of range or options that exclude each other; all at once.
    """
    executor, ranks = request.executor, request.options.settings.tensor_parallel
    gpus = executor.gpus_per_shard
    problems = []
    if executor.shards < 0:
        problems.append(ConfigError("--shards", "must be 0 or more", executor.shards))
    if not 0 < executor.deadline_s < math.inf:
        problems.append(ConfigError("--deadline", "must be greater than 0", executor.deadline_s))
    if gpus is not None and not (0 < gpus <= 1 or (math.isfinite(gpus) and gpus > 1 and gpus == int(gpus))):
        problems.append(ConfigError("--gpus-per-shard", "must be a fraction of a GPU, or a whole number", gpus))
    if ranks > 1 and request.options.backend == "hf" and executor.shards == 0:
        rule = "the backend hf splits a model over Ray actors, and --shards 0 starts none"
        problems.append(ConfigError("--tp", rule, ranks, "set --shards to 1 or more"))
    if gpus is not None and (ranks > 1 or not executor.shards):
        reason = "--tp decides" if ranks > 1 else "--shards 0 takes the first GPU"
        problems.append(ConfigError("--gpus-per-shard", f"has no effect here: {reason}", gpus, "leave it out"))
    if executor.address is not None and executor.shards == 0:
        remedy = "leave it out, or set --shards to 1 or more"
        problems.append(ConfigError("--ray-address", "has no effect with --shards 0", executor.address, remedy))
    if problems:
        raise ConfigError.many(map(str, problems))


def _executor(options: ExecutorOptions, signals: Signals, out: Path | None) -> AbstractContextManager[Executor]:
    """A context manager with the executor that runs the models: in this process for 0 shards, else in Ray actors."""
    if options.shards == 0:
        from distill_rl.evals.executor import LocalExecutor

        return closing(LocalExecutor())
    from distill_rl.config.schema import RayConfig
    from distill_rl.workers.evaluation import RayExecutor, Shards

    shards = Shards(options.shards, options.gpus_per_shard, RayConfig(address=options.address), options.deadline_s)
    logs = None if out is None else out / "logs"
    return RayExecutor(shards, started=signals.install_again, interrupted=signals.raise_if_stopping, logs=logs)


def print_table(results: Results) -> None:
    """Prints a table with score, 95 % interval, items and failures, one row per model and suite.

    Suites with 2 to MAX_TASKS tasks get a row per task too.

    A kind of failure has a column only if it occurred.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    rows: list[tuple[str, str, str, Mapping[str, Any]]] = []
    for model, suites in results.items():
        for suite, result in suites.items():
            rows.append((model, suite, "all", result))
            tasks = result["per_task"]
            if 1 < len(tasks) <= MAX_TASKS:
                rows += [("", "", task, part) for task, part in tasks.items()]
    failures = [name for name in FAILURE_HEADINGS if any(_count(part, name) for *_, part in rows)]
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("model", "suite", "task"):
        table.add_column(heading, overflow="fold")
    for heading in ("score", "95 % interval", "items", *(FAILURE_HEADINGS[name] for name in failures)):
        table.add_column(heading, justify="right", no_wrap=True)
    for *names, part in rows:
        low, high = part["interval"]
        figures = [f"{part['score']:.3f}", f"{low:.3f} to {high:.3f}", f"{part['num_items']:,}"]
        counts = [f"{_count(part, name):,}" for name in failures]
        table.add_row(*(escape(printable(name)) for name in names), *figures, *counts)
    console = open_console(120)
    console.print(table)


def warn_about_too_long_items(results: Results) -> None:
    """Prints a warning for every model and suite with items that do not fit into the model's positions.

    Those items have scored zero.
    """
    for model, suites in results.items():
        for suite, result in suites.items():
            count = result["outcomes"]["too_long"]
            if count:
                what = f"{count} of {result['num_items']} items of {suite} do not fit into the positions of {model}"
                say(f"warning: {what} and count as wrong; fewer worked examples (--num-fewshot) may help")


def _count(part: Mapping[str, Any], name: str) -> int:
    """Number of items of a result that failed in this way (a key of FAILURE_HEADINGS)."""
    from distill_rl.evals.results import num_ungraded

    if name == "ungraded":
        return num_ungraded(part["outcomes"])
    return part["truncated"] if name == "truncated" else part["outcomes"][name]


def print_suites() -> None:
    """Prints name and title of the built-in suites, one line each."""
    from distill_rl.evals.suites.registry import SUITES

    width = max(map(len, SUITES))
    for name, suite in SUITES.items():
        print(f"{name:<{width}}  {suite.title}")
