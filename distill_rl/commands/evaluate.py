"""distill-rl eval: runs suites on model folders, offline."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from distill_rl.errors import ConfigError, DataError, DistillError, problem
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


def command(**given: Any) -> int:
    """Runs all suites on all models, prints a table and, if `out` is given, writes results, items and a log there.

    The entry point of `distill-rl eval`, with the options of the command line as keywords; those of `Options`, `Settings` and
    `ExecutorOptions` have the names of the fields that they set. Sets HF_HUB_OFFLINE for this process, and handles SIGTERM,
    SIGUSR1, SIGHUP and Ctrl-C while it runs.

    Returns:
        0; or 85 after SIGTERM, SIGUSR1 or SIGHUP: the graded items are kept in `out`, and the same command continues.

    Raises:
        ConfigError: bad options, unknown suites, bad data in the suites, folders without a model (all of these at
            once), results of other settings in `out`, or an `out` that cannot be written.
        DistillError: the evaluation failed, for instance because an actor died.
        KeyboardInterrupt: Ctrl-C, or a second SIGTERM.
    """
    from distill_rl.evals.backends.base import Settings
    from distill_rl.evals.options import Options

    if given["dry_run"]:
        return _write_script(given)
    if given["slurm"]:
        raise ConfigError("--slurm", "has no effect without --dry-run", remedy="add --dry-run to write a batch script")

    def made(kind: type) -> Any:
        return kind(**{entry.name: given[entry.name] for entry in fields(kind) if entry.name in given})

    options, where, out = replace(made(Options), settings=made(Settings)), made(ExecutorOptions), given["out"]
    setup_console()
    os.environ["HF_HUB_OFFLINE"] = "1"
    from distill_rl.evals.run import ConsoleProgress, evaluate_models

    with ExitStack() as stack:
        signals = stack.enter_context(Signals())
        try:
            with signals.at_once():
                models, loaded = _prepare(given["models"], given["suites"], given["data"], out, options, where)
            if out is not None:
                try:
                    stack.enter_context(log_file(out / "logs" / "eval.log"))
                except OSError as error:
                    rule, value = "must be a folder that can be written", f"{out} ({error.strerror})"
                    raise ConfigError("--out", rule, value) from error
            with (
                _executor(where, signals, out) as executor,
                # Without Ray, no Ray call swallows an exception that the signal handler raises.
                signals.at_once() if where.shards == 0 else nullcontext(),
            ):
                results = evaluate_models(
                    models, loaded, options, executor, ConsoleProgress(), signals.raise_if_stopping
                )
        except Preempted:
            say("stopped; graded items are kept, and the same command continues" if out else "stopped")
            return EXIT_PREEMPTED
        except DistillError:
            get("evals").info("the evaluation failed", exc_info=True)
            raise
    print_table(results)
    warn_about_too_long_items(results)
    if out is not None:
        say(f"results   {out}")
        if len(models) > 1:
            say(f"compare   distill-rl report {out}")
    return 0


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
    split, copies, share = (options[name] for name in ("tensor_parallel", "shards", "gpus_per_shard"))
    return write_evaluation_script(options["out"], arguments, options["slurm"], split=split, copies=copies, share=share)


def _prepare(
    models: Sequence[str], suites: Sequence[str], data: Path, out: Path | None, options: Options, where: ExecutorOptions
) -> tuple[list[Model], list[LoadedSuite]]:
    """The models and the loaded suites of a command line, checked; no weights are read and nothing is started."""
    from distill_rl.evals.options import load_questions, without_effect
    from distill_rl.evals.run import check_models

    problems: list[str] = []
    opened = _attempt(lambda: parse_models(models, out), problems) or []
    _attempt(lambda: require_valid(options, where), problems)
    loaded = _attempt(lambda: load_questions(suites, data, options), problems) or []
    problems += without_effect(loaded, options)[0]
    _attempt(lambda: check_models(opened, loaded, options), problems)
    ConfigError.raise_all(dict.fromkeys(map(_as_option, problems)))
    return opened, loaded


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
            problems.append(problem("--model", f"a name {broken}", argument, "give NAME=DIR"))
        elif name in folders:
            clash = f"{folders[name]} and {path} are both called {name}"
            problems.append(problem("--model", "must have different names", clash, "give NAME=DIR"))
        folders[name] = path
    ConfigError.raise_all(problems)
    single = len(folders) == 1
    return [Model(name, path, out and (out if single else out / name)) for name, path in folders.items()]


def require_valid(options: Options, executor: ExecutorOptions) -> None:
    """Checks --shards, --deadline, --gpus-per-shard, --tp and --ray-address of a command line.

    Raises:
        ConfigError: numbers out of range or options that exclude each other; all at once.
    """
    ranks, gpus = options.settings.tensor_parallel, executor.gpus_per_shard
    problems = []
    if executor.shards < 0:
        problems.append(problem("--shards", "must be 0 or more", executor.shards))
    if not 0 < executor.deadline_s < math.inf:
        problems.append(problem("--deadline", "must be greater than 0", executor.deadline_s))
    if gpus is not None and not (0 < gpus <= 1 or (math.isfinite(gpus) and gpus > 1 and gpus == int(gpus))):
        problems.append(problem("--gpus-per-shard", "must be a fraction of a GPU, or a whole number", gpus))
    if ranks > 1 and options.backend == "hf" and executor.shards == 0:
        rule = "the backend hf splits a model over Ray actors, and --shards 0 starts none"
        problems.append(problem("--tp", rule, ranks, "set --shards to 1 or more"))
    if gpus is not None and (ranks > 1 or not executor.shards):
        reason = "--tp decides" if ranks > 1 else "--shards 0 takes the first GPU"
        problems.append(problem("--gpus-per-shard", f"has no effect here: {reason}", gpus, "leave it out"))
    if executor.address is not None and executor.shards == 0:
        remedy = "leave it out, or set --shards to 1 or more"
        problems.append(problem("--ray-address", "has no effect with --shards 0", executor.address, remedy))
    ConfigError.raise_all(problems)


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
    from rich.table import Column, Table

    from distill_rl.evals.results import num_ungraded

    rows: list[tuple[str, str, str, Mapping[str, Any]]] = []
    for model, suites in results.items():
        for suite, result in suites.items():
            rows.append((model, suite, "all", result))
            tasks = result["per_task"]
            if 1 < len(tasks) <= MAX_TASKS:
                rows += [("", "", task, part) for task, part in tasks.items()]
    failures: dict[str, list[int]] = {
        "not graded": [num_ungraded(part["outcomes"]) for *_, part in rows],
        "cut off": [part["truncated"] for *_, part in rows],
        "no answer": [part["outcomes"]["unparsable"] for *_, part in rows],
        "too long": [part["outcomes"]["too_long"] for *_, part in rows],
    }
    occurred = {heading: counts for heading, counts in failures.items() if any(counts)}
    texts = (Column(heading, overflow="fold") for heading in ("model", "suite", "task"))
    headings = ("score", "95 % interval", "items", *occurred)
    table = Table(*texts, *(Column(each, justify="right", no_wrap=True) for each in headings), box=box.SIMPLE_HEAD)
    for i, (*names, part) in enumerate(rows):
        low, high = part["interval"]
        figures = [f"{part['score']:.3f}", f"{low:.3f} to {high:.3f}", f"{part['num_items']:,}"]
        counts = [f"{numbers[i]:,}" for numbers in occurred.values()]
        table.add_row(*(escape(printable(name)) for name in names), *figures, *counts)
    open_console(120).print(table)


def warn_about_too_long_items(results: Results) -> None:
    """Prints a warning for every model and suite with items that do not fit into the model's positions.

    Those items have scored zero.
    """
    for model, suites in results.items():
        for suite, result in suites.items():
            if count := result["outcomes"]["too_long"]:
                what = f"{count} of {result['num_items']} items of {suite} do not fit into the positions of {model}"
                say(f"warning: {what} and count as wrong; fewer worked examples (--num-fewshot) may help")
