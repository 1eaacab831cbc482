"""distill-rl align: how two tokenizations of the user's text match, and whether what is built on it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distill_rl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.console import Console

    from distill_rl.align import CoverageReport, TokenAligner
    from distill_rl.config.schema import DataConfig
    from distill_rl.verify import Check

VERIFIED_TEXTS, VERIFIED_CHARACTERS = 32, 8000
"""`--verify` looks at so many of the texts, evenly spaced, and at so much of each."""
SIDES = ("student", "teacher")


def align(student: str, teacher: str, data: DataConfig, *, limit: int, json_file: Path | None, verify: bool) -> int:
    """Prints a coverage audit, and with `verify` the checks; 1 if a check failed, else 0.

    Args:
        student, teacher: folders or hub names; only the tokenizers are read.
        data: path, split and columns; chats give the contents of their messages.
        limit: at most so many rows, evenly spaced over the data.
        json_file: gets the audit, and the checks.

    Raises:
        ConfigError: no tokenizer there, a slow one, nothing in common, or no text that can be matched exactly.
        DataError: no such data, or rows that cannot be read.
    """
    from rich.console import Console

    from distill_rl.align import audit
    from distill_rl.files import write_json
    from distill_rl.models.hub import read_tokenizer

    if limit < 1:
        raise ConfigError("--limit", "must be 1 or more", limit)
    tokenizers = [read_tokenizer(name) for name in (student, teacher)]
    texts = read_texts(data, limit)
    aligner = _aligner(tokenizers)
    report = audit(aligner, texts)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 110)
    print_report(console, (student, teacher), aligner, report)
    checks = run_checks(aligner, tokenizers, texts) if verify and report.common_vocabulary else []
    if checks:
        print_checks(console, checks)
    if json_file is not None:
        write_json(
            json_file,
            {"student": student, "teacher": teacher, **asdict(report), "checks": [asdict(check) for check in checks]},
        )
    _refuse(aligner, report, len(texts))
    return int(not all(check.passed for check in checks))
