"""Checks the data by opening them and reading a sample of rows."""

from __future__ import annotations

from typing import Any

from distill_rl.config.facts import Facts
from distill_rl.config.schema import Config
from distill_rl.config.walk import MISSING
from distill_rl.errors import problem
from distill_rl.preflight.chats import check_chats
from distill_rl.preflight.labels import check_labels
from distill_rl.preflight.opened import Findings, Opened
from distill_rl.preflight.pairs import check_alignment, template_problems

SAMPLED_ROWS = 64
"""Number of rows read from the start; as many more are read evenly spaced over the data."""


def data_facts(config: Config, student: Opened, teachers: list[Opened], findings: Findings, *, download: bool) -> Facts:
    """Opens the data as the loader will, reads a sample of rows, and counts the training documents.

    Problems are added to `findings`: rows, too few documents, chats and their templates, `data.loss_on`, and, if there is
    no problem of any kind yet, tokenizers that align on none of the documents. The facts hold `num_documents` and `data_kind`
    alone, or nothing if the data could not be opened. Data with nothing to train on are a problem, too.

    Args:
        student, teachers: as opened, the teachers with their `cross_tokenizer_loss` set.
        download: download a hub data set; otherwise only its existence is checked.
    """
    from distill_rl.data.sources import HubError, is_hub_name, open_source, split_validation
    from distill_rl.models.facts import find_data_set

    data, problems = config.data, findings.problems
    if data.path == MISSING or not data.path.strip():
        return Facts()
    if not download and is_hub_name(data.path):
        missing, reason = find_data_set("data.path", data.path)
        problems += filter(None, [missing])
        findings.unreachable += filter(None, [reason])
        return Facts()
    try:
        source = findings.attempt("data.path", lambda: open_source(data), let_pass=HubError)
        if source is None:
            return Facts()
        parts = findings.attempt(
            "data.validation", lambda: split_validation(source, data, config.run.seed), let_pass=HubError
        )
    except HubError as error:
        findings.unreachable.append(str(error))
        return Facts()
    training, validation = parts or (source, None)
    num_problems = len(problems)
    sampled = _check_rows("data.path", training, findings)
    if validation is not None:
        sampled += _check_rows("data.validation", validation, findings)
    if source.kind == "messages" and len(problems) == num_problems:
        check_chats(config, sampled, student, teachers, findings)
    if len(training) < config.train.global_batch_size:
        documents = "1 training document is" if len(training) == 1 else f"{len(training)} training documents are"
        rule = f"{documents} fewer than one global batch of {config.train.global_batch_size}"
        problems.append(problem("data.path", rule, data.path, "lower train.global_batch_size, or give more data"))
    if source.kind == "text" and (data.loss_on == "assistant" or data.loss_roles):
        key = "data.loss_roles" if data.loss_roles else "data.loss_on"
        rule = (
            "turns are found in chat messages only"
            if data.loss_roles
            else "assistant turns are found in chat messages only"
        )
        remedy = "use data.loss_on=all, or data that has messages"
        problems.append(problem(key, rule, "rows of text", remedy))
    problems += template_problems(config, source.kind, student, teachers)
    if not any(text.startswith(("data.", "student")) for text in problems):
        check_labels(config, "data.path", training, _sample(training), student, findings)
        if validation is not None:
            check_labels(config, "data.validation", validation, _sample(validation), student, findings)
    if not problems:
        check_alignment(config, training, student, teachers, findings)
    return Facts(num_documents=len(training), data_kind=source.kind)


def _check_rows(key: str, source: Any, findings: Findings) -> list[Any]:
    """Reads SAMPLED_ROWS rows at the start and about as many evenly spaced ones; errors go to `findings`.

    It stops at the first row that is bad; nothing is added if none is. Returns the rows that it has read.

    Args:
        key: the setting with which the line about a bad row begins.
    """
    rows: list[Any] = []
    num_problems = len(findings.problems)
    for row in _sample(source):
        rows.append(findings.attempt(key, lambda row=row: source[row]))  # type: ignore[misc]
        if len(findings.problems) > num_problems:
            break
    return rows


def _sample(source: Any) -> list[int]:
    """The rows to read: SAMPLED_ROWS at the start, and about as many evenly spaced ones."""
    count = len(source)
    return sorted({*range(min(count, SAMPLED_ROWS)), *range(0, count, max(1, count // SAMPLED_ROWS))})
