"""Checks the data by opening them and reading a sample of rows."""

from __future__ import annotations

from typing import Any

from distill_rl.config.facts import Facts
from distill_rl.config.schema import Config
from distill_rl.config.walk import MISSING
from distill_rl.preflight.opened import Opened, attempt, line
from distill_rl.preflight.pairs import alignment_problems, template_problems

SAMPLED_ROWS = 64
"""Number of rows read from the start; as many more are read evenly spaced over the data."""


def data_facts(
    config: Config,
    student: Opened,
    teachers: list[Opened],
    problems: list[str],
    unreachable: list[str],
    download: bool,
) -> Facts:
    """Opens the data as the loader will, reads a sample of rows, and counts the documents.

    Args:
        download: download a hub data set; otherwise only its existence is checked.
    """
    from distill_rl.data.sources import HubError, is_hub_name, open_source, split_validation
    from distill_rl.models.facts import find_data_set

    data = config.data
    if data.path == MISSING or not data.path.strip():
        return Facts()
    if not download and is_hub_name(data.path):
        problem, reason = find_data_set("data.path", data.path)
        problems += [problem] if problem else []
        unreachable += [reason] if reason else []
        return Facts()
    try:
        source = attempt("data.path", lambda: open_source(data), problems, let_pass=HubError)
        if source is None:
            return Facts()
        parts = attempt(
            "data.validation", lambda: split_validation(source, data, config.run.seed), problems, let_pass=HubError
        )
    except HubError as error:
        unreachable.append(str(error))
        return Facts()
    training, validation = parts or (source, None)
    problems += _row_problems(training)
    problems += _row_problems(validation) if validation is not None else []
    if len(training) < config.train.global_batch_size:
        rule = f"{len(training)} training documents are fewer than one global batch of {config.train.global_batch_size}"
        problems.append(line("data.path", rule, data.path, "lower train.global_batch_size, or give more data"))
    if source.kind == "text" and data.loss_on == "assistant":
        rule, remedy = (
            "assistant turns are found in chat messages only",
            "use data.loss_on=all, or data that has messages",
        )
        problems.append(line("data.loss_on", rule, "rows of text", remedy))
    problems += template_problems(config, source.kind, student, teachers)
    if not problems:
        problems += alignment_problems(config, training, student, teachers)
    return Facts(
        num_documents=len(training),
        num_validation_documents=len(validation) if validation is not None else None,
        data_fingerprint=source.fingerprint,
    )


def _row_problems(source: Any) -> list[str]:
    """The first bad row among those at the start and evenly spaced ones. The loader checks every row it reads."""
    count = len(source)
    stride = max(1, count // SAMPLED_ROWS)
    rows = sorted({*range(min(count, SAMPLED_ROWS)), *range(0, count, stride)})
    problems: list[str] = []
    for row in rows:
        attempt("data.path", lambda row=row: source[row], problems)  # type: ignore[misc]
        if problems:
            break
    return problems
