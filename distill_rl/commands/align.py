"""distill-rl align: shows how two tokenizations of the user's text match, and checks what depends on that match."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from distill_rl.errors import ConfigError, DataError, problem
from distill_rl.observe.log import open_console, printable
from distill_rl.system.files import write_json

if TYPE_CHECKING:
    from distill_rl.align import CoverageReport
    from distill_rl.align.chats import Chat
    from distill_rl.align.verify import Endings, PropertyCheck
    from distill_rl.config.schema import DataConfig

VERIFIED, VERIFIED_CHARACTERS = 32, 8000
"""Number of texts that `--verify` checks, evenly spaced, and the maximum length of each."""
LENGTHS_SHOWN = 6
_OUTCOMES = {True: ("pass", None), False: ("FAIL", "bold red"), None: ("nothing checked", "yellow")}


@dataclass(frozen=True, slots=True)
class TextRows:
    texts: list[str]
    """Non-empty texts: the rows themselves, or the contents of the messages of chats."""
    chats: list[Chat]
    """Empty if the rows are texts."""


class TokenizerPair:
    """The tokenizers of two folders or hub names, and their aligner."""

    def __init__(self, student: str, teacher: str):
        """Reads tokenizers and stop tokens.

        Raises:
            ConfigError: a tokenizer that is missing or slow.
        """
        from distill_rl.align import TokenAligner
        from distill_rl.models.files import read_tokenizer
        from distill_rl.models.stops import configured_stops

        self.student, self.teacher = read_tokenizer(student), read_tokenizer(teacher)
        stops = configured_stops(student), configured_stops(teacher)
        self.aligner = TokenAligner(self.student, self.teacher, student_stops=stops[0], teacher_stops=stops[1])

    def readable(self, chats: list[Chat]) -> list[Chat]:
        """The chats if both tokenizers have a chat template, else an empty list."""
        return chats if self.student.chat_template and self.teacher.chat_template else []


def align(
    student: str,
    teacher: str,
    path: str,
    *,
    text_key: str | None,
    messages_key: str | None,
    split: str | None,
    limit: int,
    json_file: Path | None,
    verify: bool,
) -> int:
    """Prints a coverage audit with warnings and, with `verify`, the results of all checks.

    If the student could learn nothing from the teacher, only the audit is printed, and ConfigError is raised.

    Args:
        student, teacher: folders or hub names; only the tokenizers and stop tokens are read.
        path: data, in any form that `data.path` accepts.
        text_key, messages_key, split: settings of `data`; None: the default.
        limit: maximum number of rows, evenly spaced over the data.
        json_file: file for the figures of the audit and the checks, written even if the pair is then refused; None: no
            file.

    Returns:
        1 if a check failed, else 0. A check without anything to look at does not fail.

    Raises:
        ConfigError: a limit below 1, a tokenizer that is missing or slow, nothing in common, or no text with a chunk.
        DataError: data that are missing or cannot be read.
    """
    from distill_rl.align import audit
    from distill_rl.align.verify import endings
    from distill_rl.config.schema import DataConfig

    if limit < 1:
        raise ConfigError("--limit", "must be 1 or more", limit)
    pair = TokenizerPair(student, teacher)
    columns: dict[str, Any] = {"text_key": text_key, "messages_key": messages_key, "split": split}
    data = DataConfig(path=path, **{key: value for key, value in columns.items() if value is not None})
    rows = read_rows(data, limit)
    report = audit(pair.aligner, rows.texts)
    ends = endings(pair.aligner, _spaced(rows.texts), _spaced(pair.readable(rows.chats)))
    console = open_console(110)
    print_report(console, student, teacher, report, ends)
    problems = refusals(report)
    messages = [] if problems else warnings(report, rows, pair)
    for message in messages:
        console.print(escape(f"warning    {message}\n"))
    checks: list[PropertyCheck] = []
    if verify and not problems:
        checks = verify_pair(pair, rows)
        print_checks(console, checks)
    if json_file is not None:
        figures = {"student": student, "teacher": teacher, **report.to_dict(), "stops": asdict(ends)}
        write_json(json_file, {**figures, "warnings": messages, "checks": [asdict(check) for check in checks]})
    ConfigError.raise_all(problems)
    return int(any(check.passed is False for check in checks))


def read_rows(data: DataConfig, limit: int) -> TextRows:
    """Returns at most `limit` evenly spaced rows: the chats, and all non-empty texts, the chats' messages included.

    Raises:
        DataError: the data are missing or damaged, or no row that was read has text.
    """
    from distill_rl.align.chats import Chat, texts_of
    from distill_rl.data.reading.cache import Cache
    from distill_rl.data.reading.layouts import template_options
    from distill_rl.data.reading.sources import open_source

    rows = _spaced(open_source(data, cache=Cache(write=False)), limit)
    chats = [Chat(row["messages"], template_options(row)) for row in rows if "messages" in row]
    texts = [text for row in rows for text in texts_of(row)]
    if not texts:
        raise DataError("--data", "must hold text", f"{len(rows)} empty rows")
    return TextRows(texts, chats)


def refusals(report: CoverageReport) -> list[str]:
    """Why a student could learn nothing from this teacher, one line each; empty if it could.

    The reasons are that the vocabularies have no token in common, and that no text aligns anywhere.
    """
    if not report.common_vocabulary:
        rule = "no token of the two vocabularies spells the same bytes: the common vocabulary is empty"
        remedy = "check that both are text models; only loss.cross_tokenizer=alm works for such a pair"
        return [problem("--student and --teacher", rule, remedy=remedy)]
    if not report.chunk_lengths:
        rule = f"none of {report.texts} texts aligns anywhere{_reasons(report)}"
        return [problem("--data", rule, remedy="use another teacher, or other text")]
    return []


def warnings(report: CoverageReport, rows: TextRows, pair: TokenizerPair) -> list[str]:
    """That no text is spelled in full by both sides, and tokenizers without the template that chats need, one line each."""
    lines = []
    if not report.exact_share:
        rule = f"none of {report.texts:,} texts is spelled in full by both sides{_reasons(report)}"
        lines.append(f"{rule}; {report.aligned_share:.1%} of the student's tokens are compared")
    rule = "tokenizer has no chat template, so a run on these messages would be refused; give it one, or use text"
    for name, tokenizer in (("student", pair.student), ("teacher", pair.teacher)):
        if rows.chats and not tokenizer.chat_template:
            lines.append(f"the {name}'s {rule}")
    return lines


def _reasons(report: CoverageReport) -> str:
    """The reasons why a side does not spell some text, as ` (side: reason; ...)`; empty if there are none."""
    reasons = "; ".join(f"{side}: {reason}" for side, reason in report.lossy.items())
    return f" ({reasons})" if reasons else ""


def verify_pair(pair: TokenizerPair, rows: TextRows) -> list[PropertyCheck]:
    """The results of all checks of a pair on evenly spaced rows, each text cut to VERIFIED_CHARACTERS.

    Checks of chats have no rows to look at if a tokenizer has no chat template, and are left out if the rows are texts.

    Raises:
        ValueError: no text with a chunk.
    """
    from distill_rl.align.projection import build_projection
    from distill_rl.align.verify import align_training_rows, check_alignment, check_chats
    from distill_rl.preflight.verify import check_losses, check_stops

    texts = [text[:VERIFIED_CHARACTERS] for text in _spaced(rows.texts)]
    chats = _spaced(pair.readable(rows.chats))
    student, teacher, aligner = pair.student, pair.teacher, pair.aligner
    projection = build_projection(
        student, teacher, student_columns=aligner.student.size, teacher_columns=aligner.teacher.size,
        student_stops=aligner.student.stops, teacher_stops=aligner.teacher.stops,
    )  # fmt: skip
    checks = check_alignment(aligner, student, teacher, texts)
    if rows.chats:
        checks += check_chats(aligner, chats)
    checks += check_stops(aligner, projection, align_training_rows(aligner, [] if rows.chats else texts, chats))
    return checks + check_losses(aligner, projection, student, texts)


def print_report(console: Console, student: str, teacher: str, report: CoverageReport, ends: Endings) -> None:
    """Prints the coverage audit: the names, a table of figures, a table by class of characters, the suggested loss.

    Args:
        student, teacher: names to show, as the user gave them.
        ends: stop tokens of both sides, and how many rows end in one on both.
    """
    console.print(f"\nstudent    {escape(printable(student))}\nteacher    {escape(printable(teacher))}")
    table = Table(Column(no_wrap=True), Column(), box=box.SIMPLE_HEAD, show_header=False)
    for name, value in _lines(report, ends):
        table.add_row(name, escape(value))
    console.print(table)
    numbers = (Column(name, justify="right") for name in ("chunks", "1:1", "student tokens", "teacher tokens"))
    classes = Table(Column("chunks of", no_wrap=True), *numbers, box=box.SIMPLE_HEAD)
    for name, counts in report.classes.items():
        tokens = f"{counts.student_tokens:.2f}", f"{counts.teacher_tokens:.2f}"
        classes.add_row(name, f"{counts.chunks:,}", f"{counts.one_to_one_share:.1%}", *tokens)
    console.print(classes)
    console.print(f"suggested  {report.advice}\n")


def print_checks(console: Console, checks: Sequence[PropertyCheck]) -> None:
    """Prints a table with the outcome of every check (pass, FAIL, or nothing checked), and how many passed."""
    table = Table(Column(no_wrap=True), "what must hold", "found", box=box.SIMPLE_HEAD)
    for check in checks:
        outcome, style = _OUTCOMES[check.passed]
        table.add_row(outcome, escape(check.name), escape(check.detail), style=style)
    console.print(table)
    empty = sum(check.passed is None for check in checks)
    passed = f"{sum(check.passed is True for check in checks)} of {len(checks)} checks passed"
    console.print(passed + (f", {empty} had nothing to look at" if empty else "") + "\n")


def _lines(report: CoverageReport, ends: Endings) -> Iterator[tuple[str, str]]:
    # (label, text) for each line of the audit, in the order of printing: how the two tokenizations match, the stop tokens of both sides,
    # and the share of rows that end in one on both.
    chunks = sum(report.chunk_lengths.values())
    lengths = list(report.chunk_lengths.items())
    shown = ", ".join(f"{size} {count / chunks:.1%}" for size, count in lengths[:LENGTHS_SHOWN]) or "none"
    if len(lengths) > LENGTHS_SHOWN:
        shown += f", {len(lengths) - LENGTHS_SHOWN} others"
    yield "texts", f"{report.texts:,}, {report.exact_share:.1%} spelled in full by both sides"
    yield "by method", ", ".join(f"{method} {count:,}" for method, count in report.methods.items())
    yield "1:1 chunks", f"{report.one_to_one_share:.1%} of {chunks:,}"
    yield "chunk sizes", shown
    unknown = f", {report.unknown_share:.1%} are unknown tokens" if report.unknown_share else ""
    yield "tokens in a chunk", f"{report.aligned_share:.1%} of the student's{unknown}"
    sizes = f"{report.student_size:,} and {report.teacher_size:,} ids"
    yield "vocabularies", f"{sizes}, {report.common_vocabulary:,} of them in common"
    for side, reason in report.lossy.items():
        yield f"lossy {side}", reason
    for side, stops in (("student", ends.student_stops), ("teacher", ends.teacher_stops)):
        yield f"stops {side}", ", ".join(stops) or "none: no token ends an answer"
    share = ends.ending / ends.rows if ends.rows else 0.0
    yield "rows that end in both", f"{share:.1%} of {ends.rows:,}"


def _spaced(items: Any, count: int = VERIFIED) -> list[Any]:
    """At most `count` (default 32) items of a sequence, evenly spaced from first to last; all if there are no more."""
    indices = np.linspace(0, len(items) - 1, min(count, len(items))).round()
    return [items[int(i)] for i in indices]
