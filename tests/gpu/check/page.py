"""The output files: the results as gpu_check.json, and the same rendered as a page of text, gpu_check.txt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from textwrap import wrap
from typing import Any

from distill_rl.system.files import write_atomic
from tests.gpu.check.parts import Part
from tests.gpu.check.process import FAILED, NOT_RUN, TIMED_OUT, Outcome

FORMAT = 1
JSON, TEXT, LOG = "gpu_check.json", "gpu_check.txt", "gpu_check.log"
WIDTH = 118
_LABEL = 12
_FEW, _GAP = 12, 4
"""More numbers than _FEW are set in several columns, _GAP spaces apart."""


@dataclass
class Record:
    """The results so far; both files are rewritten after every part."""

    out: Path
    call: Mapping[str, Any]
    """The command-line options."""
    parts: Sequence[Part]
    machine: Mapping[str, Any] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """By part; only parts that are done."""
    state: str = "running"
    """`running`, `done`, or `stopped by` a signal."""
    seconds: float = 0.0
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def failures(self) -> list[str]:
        """Names of the parts that failed, timed out or had no time left to run, in the order in which they ended."""
        return [name for name, outcome in self.outcomes.items() if outcome.status in (FAILED, TIMED_OUT, NOT_RUN)]

    def as_json(self) -> dict[str, Any]:
        """The content of gpu_check.json.

        `parts` has one entry per part, in order: name, title and status (`waiting` if it is not done yet), and for a
        part that is done the other fields of `Outcome` as well.
        """
        done = {name: asdict(outcome) for name, outcome in self.outcomes.items()}
        parts = [{"name": p.name, "title": p.title, **done.get(p.name, {"status": "waiting"})} for p in self.parts]
        return {
            "format": FORMAT,
            "state": self.state,
            "started": self.started,
            "seconds": round(self.seconds, 1),
            "call": dict(self.call),
            "machine": dict(self.machine),
            "failures": self.failures,
            "parts": parts,
        }

    def write(self) -> None:
        """Writes both files, each atomically, and creates the folder if it is missing.

        Raises:
            OSError: the folder cannot be created or written to.
        """
        content = self.as_json()
        self.out.mkdir(parents=True, exist_ok=True)
        write_atomic(self.out / JSON, json.dumps(content, indent=2, allow_nan=False) + "\n")
        write_atomic(self.out / TEXT, render(content))


def render(content: Mapping[str, Any]) -> str:
    """The page as text: verdict, machine, one line per part, then the figures of each part, or its text if it has one.

    Args:
        content: what `Record.as_json` returns.
    """
    lines = [headline(content), "", *_machine(content), "", *_summary(content["parts"])]
    for part in content["parts"]:
        if part.get("text"):
            details = [f"  {line}" for line in part["text"].splitlines()]
        else:
            details = list(_figures(part.get("figures", {}), "  "))
        if details:
            lines += ["", f"{part['name']}: {part['title']}", *details]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def headline(content: Mapping[str, Any]) -> str:
    """The verdict in one line: numbers of parts that are ok, not ok (with names), skipped and not done; seconds; state.

    Numbers that are 0 are left out, except for that of ok parts, and so is the state `done`.

    Args:
        content: what `Record.as_json` returns.
    """
    parts, failures = content["parts"], content["failures"]
    done = [part for part in parts if part["status"] != "waiting"]
    num_ok = sum(part["status"] == "ok" for part in parts)
    skipped = sum(part["status"] == "skipped" for part in parts)
    text = f"GPU check: {num_ok} of {len(parts)} parts ok"
    if failures:
        text += f", {len(failures)} not ok ({', '.join(failures)})"
    if skipped:
        text += f", {skipped} skipped"
    if len(done) < len(parts):
        text += f", {len(parts) - len(done)} not done"
    state = "" if content["state"] == "done" else f"; {content['state']}"
    return f"{text}; {content['seconds']:.0f} s{state}"


def _machine(content: Mapping[str, Any]) -> Iterator[str]:
    """Yields the page's lines about machine, packages and code, and one about the call and its start.

    Without facts about the machine, only the last one.
    """
    machine, call = content["machine"], content["call"]
    if machine:
        for gpu in _gpu_lines(machine["gpus"]) or ["none in use"]:
            yield _labelled("GPU", gpu)
        if machine.get("driver"):
            names = ("driver", "CUDA", "cuDNN", "NCCL")
            text = ", ".join(f"{name} {machine[name.lower()]}" for name in names if machine[name.lower()])
            yield _labelled("driver", f"{text}; allocator {machine['allocator']}")
        cpu = machine["cpu"]
        yield _labelled("CPU", f"{cpu['name']}, {cpu['cores']} cores, {cpu['threads']} threads in use")
        packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
        yield _labelled("Python", f"{machine['python']}; {packages}")
        optional = machine["optional"]
        present = [f"{name} {version}" for name, version in optional.items() if version]
        absent = [name for name, version in optional.items() if not version]
        yield _labelled("optional", f"{', '.join(present) or 'none'}; not installed: {', '.join(absent) or 'none'}")
        for name, value in machine["settings"].items():
            yield _labelled("setting", f"{name}={value}")
        commit = machine["commit"][:12] or "unknown"
        yield _labelled("code", f"commit {commit}{', with changes' if machine['dirty'] else ''}")
    options = [name if value is True else f"{name} {value}" for name, value in call.items() if value is not False]
    yield _labelled("called", f"{', '.join(options)}; {content['started']}")


def _gpu_lines(gpus: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each different GPU (name, memory, free memory and so on), with the number of those that are alike.

    Empty without GPUs.
    """
    texts = [
        f"{gpu['name']}, {gpu['gib']} GiB ({gpu['free_gib']} free), {gpu['multiprocessors']} multiprocessors, "
        f"compute capability {gpu['capability']}, L2 {gpu['l2_mib']} MiB"
        for gpu in gpus
    ]
    return [f"{texts.count(text)} × {text}" if texts.count(text) > 1 else text for text in dict.fromkeys(texts)]


def _labelled(label: str, text: str) -> str:
    """The label, and beside it the text, wrapped to WIDTH: one string, in which every line of the text is indented."""
    lines = wrap(text, WIDTH - _LABEL, break_on_hyphens=False) or [""]
    return f"\n{' ' * _LABEL}".join([f"{label:<{_LABEL}}{lines[0]}", *lines[1:]])


def _summary(parts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the table of parts as aligned lines: name, result, seconds, peak GiB (if any part has one) and a note.

    The note is the title of a part that is ok or waiting, and the reason of any other.
    """
    rows = []
    for part in parts:
        peak = part.get("peak_gib")
        seconds = f"{part['seconds']:.1f}" if part.get("seconds") else ""
        # The title for parts that are ok or waiting, the reason for all others.
        note = part.get("reason") if part["status"] not in ("ok", "waiting") else part["title"]
        rows.append([part["name"], part["status"], seconds, "" if peak is None else f"{peak:.1f}", note or ""])
    peaks = any(row[3] for row in rows)
    header = ["part", "result", "s", "peak GiB", ""]
    shown = [[cell for i, cell in enumerate(row) if peaks or i != 3] for row in [header, *rows]]
    yield from _aligned(shown, "", right={2, 3} if peaks else {2})


def _figures(figures: Mapping[str, Any], indent: str) -> Iterator[str]:
    """Yields figures as lines: first single values, then each mapping as a section and each list.

    A list of mappings becomes a table, any other list a wrapped line of its values.
    """
    plain = {name: value for name, value in figures.items() if not isinstance(value, Mapping | list)}
    yield from _numbers([(name, _text(value)) for name, value in plain.items()], indent)
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}"
            yield from _figures(value, indent + "  ")
        elif isinstance(value, list):
            if value and all(isinstance(row, Mapping) for row in value):
                yield from _table(value, indent)
            else:
                yield from wrap(
                    f"{name}: {', '.join(map(_text, value))}",
                    WIDTH,
                    initial_indent=indent,
                    subsequent_indent=indent + "  ",
                )


def _numbers(pairs: Sequence[tuple[str, str]], indent: str) -> Iterator[str]:
    """Yields lines of names and numbers, one pair per line; more than _FEW pairs in as many columns as fit.

    Columns are filled from top to bottom, one after the other.
    """
    if not pairs:
        return
    width, digits = (max(len(pair[i]) for pair in pairs) for i in (0, 1))
    fit = max((WIDTH - len(indent) + _GAP) // (width + 2 + digits + _GAP), 1)
    columns = 1 if len(pairs) <= _FEW else fit
    height = -(-len(pairs) // columns)
    for i in range(height):
        cells = [f"{name:<{width}}  {value:<{digits}}" for name, value in pairs[i::height]]
        yield indent + (" " * _GAP).join(cells)


def _table(rows: Sequence[Mapping[str, Any]], indent: str) -> Iterator[str]:
    """Yields a header and one line per row, with the columns in order of first appearance and `–` for a missing value.

    Columns without any value are left out; columns without text are right-aligned.
    """
    names = [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if any(row.get(name) is not None for row in rows)
    ]
    cells = [[_text(row[name]) if row.get(name) is not None else "–" for name in names] for row in rows]
    numbers = {i for i, name in enumerate(names) if all(not isinstance(row.get(name), str) for row in rows)}
    yield from _aligned([names, *cells], indent, right=numbers)


def _aligned(rows: Sequence[Sequence[str]], indent: str, right: set[int]) -> Iterator[str]:
    """Yields the rows of a table as lines, each column as wide as its longest cell.

    Args:
        rows: at least one, all of the same length.
        right: indices of the columns that are right-aligned; the others are left-aligned.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        padded = [f"{cell:>{w}}" if i in right else f"{cell:<{w}}" for i, (cell, w) in enumerate(zip(row, widths))]
        yield indent + "  ".join(padded).rstrip()


def _text(value: Any) -> str:
    """A value as text: a rounded number, `–` for None, `str` of anything else.

    Whole numbers are shown in full. Other numbers are rounded by size: from 1,000 on to whole ones, from 1 on to four
    significant digits, from 0.001 on to three, below to two with an exponent. Thousands are separated by commas.
    """
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    size = abs(value)
    if size < 1e-3:
        return f"{value:.1e}"
    if size < 1:
        return f"{value:.3g}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"
