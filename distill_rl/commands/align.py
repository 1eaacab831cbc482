"""distill-rl align: how two tokenizations of the user's text match, and whether what is built on it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distill_rl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.console import Console

    from distill_rl.align import CoverageReport, TokenAligner
    from distill_rl.align.endings import Endings
    from distill_rl.config.schema import DataConfig
    from distill_rl.verify import Check

VERIFIED, VERIFIED_CHARACTERS = 32, 8000
"""`--verify` looks at so many of the texts, evenly spaced, and at so much of each."""
LENGTHS_SHOWN = 6
_OUTCOMES = {True: ("pass", None), False: ("FAIL", "bold red"), None: ("nothing checked", "yellow")}


@dataclass(frozen=True, slots=True)
class Rows:
    texts: list[str]
    """texts, or the contents of chats"""
    chats: list[list[dict[str, str]]]
    """empty for rows of text"""


def align(
    student: str,
    teacher: str,
    path: str,
    columns: Mapping[str, str],
    *,
    limit: int,
    json_file: Path | None,
    verify: bool,
) -> int:
    """Prints a coverage audit, and with `verify` the checks; 1 if a check failed, else 0, also where it had nothing to
    look at.

    Args:
        student, teacher: folders or hub names; only the tokenizers are read.
        path: as `data.path`.
        columns: `split`, `text_key`, `messages_key` of `data` where they are not the defaults.
        limit: at most so many rows, evenly spaced over the data.
        json_file: gets the audit and the checks.

    Raises:
        ConfigError: no tokenizer there, a slow one, nothing in common, or no text with a chunk.
        DataError: no such data, or rows that cannot be read.
    """
    from rich.console import Console

    from distill_rl.align import TokenAligner, audit
    from distill_rl.align.endings import endings
    from distill_rl.config.schema import DataConfig
    from distill_rl.models.hub import configured_stops, read_tokenizer
    from distill_rl.system.files import write_json

    if limit < 1:
        raise ConfigError("--limit", "must be 1 or more", limit)
    ours, theirs = read_tokenizer(student), read_tokenizer(teacher)
    data = DataConfig(path=path)
    for key, value in columns.items():
        setattr(data, key, value)
    rows = read_rows(data, limit)
    aligner = TokenAligner(
        ours, theirs, student_stops=configured_stops(student), teacher_stops=configured_stops(teacher)
    )
    report = audit(aligner, rows.texts)
    ends = endings(aligner, _spaced(rows.texts), _spaced(_chats(rows, ours, theirs)))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 110)  # a file or a pipe has no width to keep to
    print_report(console, student, teacher, report, ends)
    problems = refusals(report)
    noted = [] if problems else [*warnings(report), *template_warnings(rows, ours, theirs)]
    print_warnings(console, noted)
    checks = verify_pair(aligner, ours, theirs, rows) if verify and not problems else []
    if checks:
        print_checks(console, checks)
    if json_file is not None:
        results = [asdict(check) for check in checks]
        figures = {"student": student, "teacher": teacher, **report.to_dict()}
        write_json(json_file, {**figures, "stops": asdict(ends), "warnings": noted, "checks": results})
    if problems:
        raise ConfigError.many(problems)
    return int(any(check.passed is False for check in checks))


def read_rows(data: DataConfig, limit: int) -> Rows:
    """At most `limit` rows, evenly spaced.

    Raises:
        DataError: no such data, damaged rows, or nothing but empty ones.
    """
    from distill_rl.data.sources import open_source

    source = open_source(data)
    count = min(limit, len(source))
    rows = [source[int(index)] for index in np.linspace(0, len(source) - 1, count).round()]
    chats = [[dict(message) for message in row["messages"]] for row in rows if "messages" in row]
    texts = [row["text"] for row in rows if "text" in row]
    texts += [message["content"] for chat in chats for message in chat]
    texts = [text for text in texts if text]
    if not texts:
        raise DataError("--data", "must hold text", f"{count} rows that are empty")
    return Rows(texts, chats)


def refusals(report: CoverageReport) -> list[str]:
    """Why nothing could be learnt across this pair, one line each; empty if something could."""
    if not report.common_vocabulary:
        rule = "no token of the two vocabularies spells the same bytes: the common vocabulary is empty"
        remedy = "check that both are text models; only loss.cross_tokenizer=alm compares such a pair"
        return [str(ConfigError("--student and --teacher", rule, remedy=remedy))]
    if not report.chunk_lengths:
        rule = f"none of {report.texts} texts aligns anywhere{_reasons(report)}"
        return [str(ConfigError("--data", rule, remedy="use another teacher, or other text"))]
    return []


def warnings(report: CoverageReport) -> list[str]:
    """What is odd about the texts, one line each."""
    if report.exact_share:
        return []
    rule = f"none of {report.texts:,} texts is spelled in full by both sides{_reasons(report)}"
    return [f"{rule}; {report.aligned_share:.1%} of the student's tokens are compared"]


def template_warnings(rows: Rows, student: Any, teacher: Any) -> list[str]:
    """The tokenizers without the chat template that a run on these chats needs, one line each."""
    if not rows.chats:
        return []
    bare = [name for name, side in (("student", student), ("teacher", teacher)) if not side.chat_template]
    return [
        f"the {name}'s tokenizer has no chat template, so a run on these messages would be refused; give it one, or use text"
        for name in bare
    ]


def print_warnings(console: Console, noted: Sequence[str]) -> None:
    from rich.markup import escape

    for warning in noted:
        console.print(escape(f"warning    {warning}\n"))


def _reasons(report: CoverageReport) -> str:
    reasons = "; ".join(f"{side}: {reason}" for side, reason in report.lossy.items())
    return f" ({reasons})" if reasons else ""


def verify_pair(aligner: TokenAligner, student: Any, teacher: Any, rows: Rows) -> list[Check]:
    """All checks, on evenly spaced rows; those of chats have none to look at where a tokenizer has no chat template."""
    from distill_rl.align.endings import align_training_rows
    from distill_rl.align.projection import build_projection
    from distill_rl.verify import check_alignment, check_chats, check_losses, check_stops

    texts = [text[:VERIFIED_CHARACTERS] for text in _spaced(rows.texts)]
    chats = _spaced(_chats(rows, student, teacher))
    projection = build_projection(
        student, teacher, student_columns=aligner.student.size, teacher_columns=aligner.teacher.size,
        student_stops=aligner.student.stops, teacher_stops=aligner.teacher.stops,
    )  # fmt: skip
    checks = check_alignment(aligner, student, teacher, texts)
    if rows.chats:
        checks += check_chats(aligner, chats)
    checks += check_stops(aligner, projection, align_training_rows(aligner, [] if rows.chats else texts, chats))
    return checks + check_losses(aligner, student, teacher, texts, projection=projection)


def _chats(rows: Rows, student: Any, teacher: Any) -> list[list[dict[str, str]]]:
    """Those that both tokenizers can write."""
    return rows.chats if student.chat_template and teacher.chat_template else []


def print_report(console: Console, student: str, teacher: str, report: CoverageReport, ends: Endings) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from distill_rl.observe.log import printable

    console.print(f"\nstudent    {escape(printable(student))}\nteacher    {escape(printable(teacher))}")
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in [*_lines(report), *_ends(ends)]:
        table.add_row(name, escape(value))
    console.print(table)
    classes = Table(box=box.SIMPLE_HEAD)
    classes.add_column("chunks of", no_wrap=True)
    for heading in ("chunks", "1:1", "student tokens", "teacher tokens"):
        classes.add_column(heading, justify="right")
    for name, found in report.classes.items():
        share = f"{found.one_to_one_share:.1%}"
        classes.add_row(name, f"{found.chunks:,}", share, f"{found.student_tokens:.2f}", f"{found.teacher_tokens:.2f}")
    console.print(classes)
    console.print(f"suggested  loss.cross_tokenizer={report.suggested_loss}: {report.reason}\n")


def print_checks(console: Console, checks: Sequence[Check]) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    table.add_column("what must hold")
    table.add_column("found")
    for check in checks:
        word, style = _OUTCOMES[check.passed]
        table.add_row(word, escape(check.name), escape(check.detail), style=style)
    console.print(table)
    empty = sum(check.passed is None for check in checks)
    passed = f"{sum(check.passed is True for check in checks)} of {len(checks)} checks passed"
    console.print(passed + (f", {empty} had nothing to look at" if empty else "") + "\n")


def _lines(report: CoverageReport) -> Iterator[tuple[str, str]]:
    chunks = sum(report.chunk_lengths.values())
    lengths = list(report.chunk_lengths.items())
    shown = ", ".join(f"{size} {count / chunks:.1%}" for size, count in lengths[:LENGTHS_SHOWN])
    yield "texts", f"{report.texts:,}, {report.exact_share:.1%} spelled in full by both sides"
    yield "by method", ", ".join(f"{method} {count:,}" for method, count in report.methods.items())
    yield "1:1 chunks", f"{report.one_to_one_share:.1%} of {chunks:,}"
    yield (
        "chunk sizes",
        (shown or "none") + (f", {len(lengths) - LENGTHS_SHOWN} others" if len(lengths) > LENGTHS_SHOWN else ""),
    )
    unknown = f", {report.unknown_share:.1%} are unknown tokens" if report.unknown_share else ""
    yield "tokens in a chunk", f"{report.aligned_share:.1%} of the student's{unknown}"
    yield (
        "vocabularies",
        (f"{report.student_size:,} and {report.teacher_size:,} ids, {report.common_vocabulary:,} of them in common"),
    )
    for side, reason in report.lossy.items():
        yield f"lossy {side}", reason


def _ends(ends: Endings) -> Iterator[tuple[str, str]]:
    for side, stops in (("student", ends.student_stops), ("teacher", ends.teacher_stops)):
        yield f"stops {side}", ", ".join(stops) or "none: nothing ends an answer"
    share = ends.ending / ends.rows if ends.rows else 0.0
    yield "rows that end in both", f"{share:.1%} of {ends.rows:,}"


def _spaced(items: Sequence[Any]) -> list[Any]:
    """At most VERIFIED of them, evenly spaced."""
    places = np.linspace(0, len(items) - 1, min(VERIFIED, len(items))).round().astype(int)
    return [items[place] for place in places]
