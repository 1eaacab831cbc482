"""What benchmarks share: the program around a measurement, tables, timing, and runs of the real command line."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from distill_rl.errors import ConfigError
from tests.bench import record

Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")
Sizes = Mapping[str, Mapping[str, int]]
"""Default sizes by device (cuda, cpu) and name."""
OFFLINE = {"HF_HUB_OFFLINE": "1"}
ONE_THREAD = OFFLINE | {"OMP_NUM_THREADS": "1"}
_BLOCK = re.compile(r"(<!-- table: (?P<name>\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_LOG_LINES = 50
"""Lines of a failed run's log that are printed."""


class Refused(Exception):
    """The benchmark cannot run with these options or on this machine; the message says why, in one line."""


def program(
    name: str,
    measure: Callable[..., dict[str, Any]],
    verdict: Callable[[Any], list[str]] = lambda _: [],
    *,
    columns: Sequence[str] = (),
    arguments: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    sizes: Sizes | None = None,
) -> Callable[..., int]:
    """Returns the `main` of a benchmark: it parses the options, measures, prints the figures and writes them.

    `main` takes the command line (None: that of the process) and returns the exit code: 0, 1 for missed targets, 2 for
    `Refused`. It refuses `--device cuda` where there is no CUDA device.

    Args:
        name: that of the benchmark and its JSON file.
        measure: returns the figures. It is given an empty directory, deleted afterwards, and the options. The options
            are its keywords; types and defaults are those of the signature, help texts the lines `keyword: text` of the
            docstring. `Refused` ends the program with one line and exit code 2.
        verdict: the missed targets of the figures, one line each; the exit code is 1 if there are any.
        columns: those of the printed table; all by default. See `print_figures`.
        arguments: further keywords of `add_argument`, by keyword of `measure`.
        sizes: those of a GPU benchmark. They become options beside `--device`; `measure` gets both as the keywords
            `device` and `sizes` (by name). Figures of a CPU are written only to a file that the user names.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        command_line = parser(sys.modules[measure.__module__].__doc__)
        for keyword, default in (measure.__kwdefaults__ or {}).items():
            option = {**_option(measure, keyword, default), **arguments.get(keyword, {})}
            command_line.add_argument(f"--{keyword.replace('_', '-')}", **option)
        if sizes is not None:
            add_sizes(command_line, sizes)
        options = vars(command_line.parse_args(argv))
        out, device = options.pop("out"), options.get("device", "")
        try:
            if sizes is not None:
                _require_device(device)
                options["sizes"] = {name: options.pop(name) or default for name, default in sizes[device].items()}
            with tempfile.TemporaryDirectory() as folder:
                figures = measure(Path(folder), **options)
        except (Refused, ConfigError) as error:
            print(f"{name}: error: {error}", file=sys.stderr)
            return 2
        print_figures(figures, columns)
        return finish(name, figures, out, verdict(figures), device=device)

    return main


def _require_device(device: str) -> None:
    """Raises Refused if `device` is cuda and there is none."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise Refused("no CUDA device; --device cpu runs its small twin")


def _option(measure: Callable[..., Any], keyword: str, default: object) -> dict[str, Any]:
    """The keywords of `add_argument` for a keyword of `measure`: `bool`, `T`, `T | None` or `tuple[T, ...]`.

    The help text is the line `keyword: text.` of `measure`'s docstring, empty without one, and names a default that is
    not empty. A bool becomes a flag.
    """
    hint = get_type_hints(measure)[keyword]
    described = re.search(rf"^ +{keyword}: (.*)\.$", str(measure.__doc__), re.MULTILINE)
    text = described[1] if described else ""
    if hint is bool:
        return {"action": "store_true", "help": text}
    option = {"default": default, "type": next(iter(get_args(hint)), hint)}
    if get_origin(hint) is tuple:
        option["nargs"] = "+"
    return option | {"help": f"{text}; default: %(default)s" if default else text}


def print_figures(figures: Mapping[str, Any], columns: Sequence[str] = ()) -> None:
    """Prints records (a mapping of mappings, or a list of them) as a table, and all other figures as lines.

    A table has the figure's name as title, and the keys of a mapping of mappings as its first column. Any other mapping
    is printed as one line per entry.

    Args:
        figures: by name.
        columns: of the tables; `a` includes the parts `a.b` of a nested record. All columns by default.
    """
    from rich.console import Console
    from rich.table import Table

    for title, value in figures.items():
        rows = list(value.values()) if isinstance(value, Mapping) else value
        if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
            named = value if isinstance(value, Mapping) else {"": value}
            for name, cell in named.items():
                print(f"{title}{'.' * bool(name)}{name}: {_cell(cell)}")
            continue
        records = [_flat(row) for row in rows]
        if isinstance(value, Mapping):
            records = [{"": name} | row for name, row in zip(value, records)]
        names = dict.fromkeys(name for row in records for name in row)
        prefixes = tuple(f"{column}." for column in columns)
        shown = [name for name in names if not columns or not name or f"{name}.".startswith(prefixes)]
        table = Table(*shown, title=title)
        for row in records:
            table.add_row(*(_cell(row.get(heading)) for heading in shown))
        Console(width=180).print(table)


def markdown_table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose columns but the first are aligned to the right."""
    lines = [heading, ["---", *["---:"] * (len(heading) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_tables(page: str, make: Callable[[str], str]) -> str:
    """A page in which what stands between `<!-- table: NAME -->` and `<!-- end -->` is replaced by `make(NAME)`."""
    return _BLOCK.sub(lambda match: f"{match[1]}{make(match['name'])}\n{match[3]}", page)


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """A nested record as one: `{"a": {"b": 1}}` becomes `{"a.b": 1}`."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        parts = _flat(value) if isinstance(value, Mapping) else {"": value}
        flat |= {f"{name}.{part}" if part else name: cell for part, cell in parts.items()}
    return flat


def _cell(value: object) -> str:
    """A value as short text: four significant digits for floats, a dash for None.

    Elements of a list or tuple are joined by blanks, entries of a mapping as `name value` by commas.
    """
    if value is None:
        return "–"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_cell(part)}" for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(map(_cell, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def missed(*targets: tuple[bool, str]) -> list[str]:
    """The messages of the targets that are missed, from pairs of (missed, message)."""
    return [message for is_missed, message in targets if is_missed]


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser with the option `--out`, a path that is None by default.

    Args:
        description: its first line becomes the parser's description.
    """
    parser = argparse.ArgumentParser(description=str(description).partition("\n")[0])
    parser.add_argument("--out", type=Path, metavar="JSON", help="default: docs/benchmarks/<name>.json")
    return parser


def add_sizes(command_line: argparse.ArgumentParser, sizes: Sizes) -> None:
    """Adds `--device` (cuda by default, or cpu), and an option for every size, an integer.

    A size that is not given stays None: its default depends on the device and is only named in the help text.

    Args:
        command_line: the parser that is extended.
        sizes: defaults for cuda and cpu by name; both devices have the same names.
    """
    command_line.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small, to see that it works"
    )
    for name, large in sizes["cuda"].items():
        text = f"default: {large}; {sizes['cpu'][name]} on a CPU"
        command_line.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=text)


def finish(
    name: str, figures: Mapping[str, Any], out: Path | None, problems: Iterable[str] = (), *, device: str = ""
) -> int:
    """Writes the figures and prints the path and the problems; returns the exit code, 1 if there are any problems.

    Args:
        name: of the benchmark.
        out: the file; None: docs/benchmarks/NAME.json.
        problems: one line each.
        device: where a GPU benchmark ran, `cuda` or `cpu`; its figures of a CPU are written only if `out` is given.
            Empty for any other benchmark.
    """
    if device == "cpu" and out is None:
        print("not written: figures of a CPU are no record; --out keeps them")
    else:
        print(f"written: {record.write(name, figures, out)}")
    lines = list(problems)
    for line in lines:
        print(line)
    return int(bool(lines))


def best_times(
    runs: Mapping[Name, Callable[[], Result]], rounds: int, *, warm_up: bool
) -> tuple[dict[Name, float], dict[Name, Result]]:
    """The best time of each run in seconds, and the result of its last call.

    In every round each run is called once, in turn, so that a slow moment hits all. With `warm_up` there is one more
    round, the first, which is not timed.
    """
    best, results = dict.fromkeys(runs, float("inf")), {}
    for i in range(rounds + warm_up):
        for name, run in runs.items():
            start = time.perf_counter()
            results[name] = run()
            seconds = time.perf_counter() - start
            if i >= warm_up:
                best[name] = min(best[name], seconds)
    return best, results


def train_command(config: Path, *arguments: str) -> list[str]:
    """The command that trains with `config`, in this interpreter."""
    return [sys.executable, "-m", "distill_rl", "train", "-c", str(config), *arguments]


def train(config: Path, run: Path, *overrides: str, environment: Mapping[str, str], quiet: bool = False) -> None:
    """Trains with the real command line and waits for its end.

    Args:
        config: the configuration file.
        run: the run's directory, as the configuration and the overrides set it.
        overrides: further arguments of the command.
        environment: variables added to those of this process.
        quiet: show the command's output only if it fails.

    Raises:
        SystemExit: the command failed; with the end of the driver's log.
    """
    done = subprocess.run(
        train_command(config, *overrides), env=os.environ | environment, capture_output=quiet, text=True
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout or ''}{done.stderr or ''}{failure(run)}")


def failure(run: Path) -> str:
    """A message for a failed run of the command line: its name and the last 50 lines of its driver's log, if any."""
    log = run / "logs" / "latest" / "driver.log"
    lines = log.read_text("utf-8").splitlines() if log.exists() else ["(none)"]
    return "\n".join([f"the run {run.name} failed; the end of its log:", *lines[-_LOG_LINES:]])


def step_records(metrics: Path) -> list[dict[str, Any]]:
    """The records of training steps in a metrics.jsonl, without a half-written last line. Empty if there is no file."""
    lines = metrics.read_text("utf-8").splitlines(keepends=True) if metrics.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [step for step in records if "train/loss" in step]
