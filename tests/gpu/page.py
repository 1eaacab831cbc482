"""The output files of the GPU check: the results as gpu_check.json, and the same as a page of text, gpu_check.txt."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table

from distill_rl.system.files import write_atomic

JSON, TEXT = "gpu_check.json", "gpu_check.txt"
WIDTH = 118


def write(out: Path, record: dict[str, Any]) -> None:
    """Fills in the names of the failed parts, and writes both files, each atomically.

    Raises:
        OSError: the folder cannot be written to.
    """
    failed = ("failed", "timed out", "not run")
    record["failures"] = [part["name"] for part in record["parts"] if part["status"] in failed]
    write_atomic(out / JSON, json.dumps(record, indent=2, allow_nan=False) + "\n")
    write_atomic(out / TEXT, render(record))


def headline(record: Mapping[str, Any]) -> str:
    """The verdict in one line: how many parts are ok, not ok (with names), skipped and not done; seconds; state."""
    parts, failures = record["parts"], record["failures"]
    num_ok, skipped, waiting = (
        sum(part["status"] == status for part in parts) for status in ("ok", "skipped", "waiting")
    )
    text = f"GPU check: {num_ok} of {len(parts)} parts ok"
    text += f", {len(failures)} not ok ({', '.join(failures)})" if failures else ""
    text += f", {skipped} skipped" if skipped else ""
    text += f", {waiting} not done" if waiting else ""
    state = "" if record["state"] == "done" else f"; {record['state']}"
    return f"{text}; {record['seconds']:.0f} s{state}"


def render(record: Mapping[str, Any]) -> str:
    """The page as text: verdict, machine, one line per part, then the figures of each part, or its text if it has one."""
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, markup=False, emoji=False, highlight=False)
    for block in (headline(record), _machine(record), _summary(record["parts"])):
        console.print(block)
        console.print()
    for part in record["parts"]:
        blocks = [part["text"]] if part.get("text") else list(_figures(part.get("figures", {})))
        if blocks:
            console.print(
                f"{part['name']}: {part['title']}", *(Padding(block, (0, 2)) for block in blocks), "", sep="\n"
            )
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()).rstrip("\n") + "\n"  # type: ignore[attr-defined]


def _machine(record: Mapping[str, Any]) -> Table:
    """Machine, packages and code, and the call; without facts about the machine, only the last one."""
    machine, table = record["machine"], Table.grid(padding=(0, 2, 0, 0))
    if machine:
        gpus = [
            f"{gpu['name']}, {gpu['gib']} GiB ({gpu['free_gib']} free), {gpu['multiprocessors']} multiprocessors, "
            f"compute capability {gpu['capability']}, L2 {gpu['l2_mib']} MiB"
            for gpu in machine["gpus"]
        ]
        for gpu in dict.fromkeys(gpus or ["none in use"]):
            table.add_row("GPU", f"{gpus.count(gpu)} × {gpu}" if gpus.count(gpu) > 1 else gpu)
        if machine.get("driver"):
            names = ("driver", "CUDA", "cuDNN", "NCCL")
            versions = ", ".join(f"{name} {machine[name.lower()]}" for name in names if machine[name.lower()])
            table.add_row("driver", f"{versions}; allocator {machine['allocator']}")
        cpu, optional = machine["cpu"], machine["optional"]
        table.add_row("CPU", f"{cpu['name']}, {cpu['cores']} cores, {cpu['threads']} threads in use")
        table.add_row("Python", f"{machine['python']}; {_versions(machine['packages'])}")
        absent = ", ".join(name for name, version in optional.items() if not version)
        table.add_row("optional", f"{_versions(optional) or 'none'}; not installed: {absent or 'none'}")
        for name, value in machine["settings"].items():
            table.add_row("setting", f"{name}={value}")
        changes = ", with changes" if machine["dirty"] else ""
        table.add_row("code", f"commit {machine['commit'][:12] or 'unknown'}{changes}")
    call = [
        name if value is True else f"{name} {value}" for name, value in record["call"].items() if value is not False
    ]
    table.add_row("called", f"{', '.join(call)}; {record['started']}")
    return table


def _versions(packages: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {version}" for name, version in packages.items() if version)


def _summary(parts: Sequence[Mapping[str, Any]]) -> Table:
    """The table of parts; the note is the title of a part that is ok or waiting, and the reason of any other."""
    rows = [
        {
            "part": part["name"],
            "result": part["status"],
            "s": f"{part['seconds']:.1f}" if "seconds" in part else "",
            "peak GiB": None if part.get("peak_gib") is None else f"{part['peak_gib']:.1f}",
            "": part["title"] if part["status"] in ("ok", "waiting") else part["reason"],
        }
        for part in parts
    ]
    return _table(rows, right=("s", "peak GiB"))


def _figures(figures: Mapping[str, Any]) -> Iterator[RenderableType]:
    """First single values, then each mapping as a section, each list of mappings as a table, and any other list."""
    values = Table.grid(padding=(0, 2, 0, 0))
    for name, value in figures.items():
        if not isinstance(value, Mapping | list):
            values.add_row(name, _text(value))
    if values.rows:
        yield values
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield name
            yield from (Padding(block, (0, 2)) for block in _figures(value))
        elif isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
            columns = {column for row in value for column in row}
            numbers = [column for column in columns if not any(isinstance(row.get(column), str) for row in value)]
            yield _table(value, right=numbers)
        elif isinstance(value, list):
            yield f"{name}: {', '.join(map(_text, value))}"


def _table(rows: Sequence[Mapping[str, Any]], right: Sequence[str]) -> Table:
    """A header and one line per row, columns in order of first appearance, without those that have no value."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    filled = (name for row in rows for name in row if any(other.get(name) is not None for other in rows))
    names = list(dict.fromkeys(filled))
    for name in names:
        table.add_column(name, justify="right" if name in right else "left")
    for row in rows:
        table.add_row(*(_text(row.get(name)) for name in names))
    return table


def _text(value: Any) -> str:
    """A number in four digits, or in full if it is whole or has more before the point; `–` for None; other text as it is."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    whole = float(value).is_integer() or abs(value) >= 1000
    return f"{value:,.0f}" if whole else f"{value:.4g}"
