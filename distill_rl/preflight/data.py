"""Checks the data by opening them and reading a sample of rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from distill_rl.config.facts import Facts
from distill_rl.config.reading.walk import MISSING
from distill_rl.config.rules import validate
from distill_rl.config.rules.data import concatenation_problem
from distill_rl.config.schema import Config, DataConfig
from distill_rl.errors import DataError, problem
from distill_rl.models.files.facts import visible_gpus
from distill_rl.preflight.models.opened import Findings, Opened
from distill_rl.preflight.models.pairs import check_alignment, template_problems
from distill_rl.preflight.rows.chats import check_chats
from distill_rl.preflight.rows.expected import expect, source_facts
from distill_rl.preflight.rows.labels import check_labels
from distill_rl.preflight.rows.routing import routing_notes
from distill_rl.preflight.stores.documents import compare_documents

if TYPE_CHECKING:
    from distill_rl.data.reading.cache import Cache
    from distill_rl.data.reading.source import Source
    from distill_rl.data.routing import Routing

SAMPLED_ROWS = 64
"""Number of rows read from the start; as many more are read evenly spaced over the data."""
COMPARED_ROWS = 4096
"""Most training documents that are compared with those to validate on."""
_PLACES = 8
"""Of data that are read by blocks, the rows that are spaced are read at this many places."""


def data_facts(config: Config, student: Opened, teachers: list[Opened], findings: Findings, cache: Cache) -> Facts:
    """Opens the data as the loader will, reads a sample of rows of each source, and counts the training documents.

    Problems are added to `findings`: rows, too few documents, chats and their templates, `data.loss_on`, and, if there is
    no problem of any kind yet, tokenizers that align on none of the documents. The facts hold `num_documents`, `data_kind`,
    `sources` and `step` alone, or nothing if the data could not be opened; what is found in a sample is left out if there
    is a problem. Data with nothing to train on are a problem, too.

    Args:
        student, teachers: as opened, the teachers with their `cross_tokenizer_loss` set.
        cache: if nothing may be written, hub data sets are not downloaded, and only their existence is checked.
    """
    opened = _open(config, findings, cache)
    sources = [source for _, source in opened if source is not None]
    if not sources or len(sources) < len(opened):
        for key, source in opened:
            if source is not None:
                _read_sample(config, key, source, findings)
        return Facts()
    divided = _divide(config, sources, findings, cache)
    if divided is None:
        return Facts()
    training, validation = divided
    data, problems = config.data, findings.problems
    num_problems = len(problems)
    main = "data.sources" if data.sources else "data.path"
    parts = _parts(training)
    samples = [_read_sample(config, key, part, findings) for (key, _), part in zip(opened, parts)]
    documents = [*chain(*(sample.values() for sample in samples))]
    held_out = [] if validation is None else [*_read_sample(config, "data.validation", validation, findings).values()]
    if held_out and len(problems) == num_problems:
        findings.notes += _trained_on(held_out, validation, documents, parts)
    if len(problems) == num_problems:
        for part, sampled in zip(parts, samples):
            findings.notes += routing_notes(config, part, sampled)
    if training.kind == "messages" and len(problems) == num_problems:
        check_chats(config, documents + held_out, student, teachers, findings)
    problems += _count_problems(config, main, training, findings)
    problems += _kind_problems(data, training.kind)
    problems += template_problems(config, training.kind, student, teachers)
    if not any(text.startswith(("data.", "student")) for text in problems):
        check_labels(config, main, training.kind, documents, student, findings)
        if validation is not None:
            check_labels(config, "data.validation", training.kind, held_out, student, findings)
    findings.documents = documents
    if not problems:
        check_alignment(config, documents, student, teachers, findings)
    if not any(text.startswith(("data.", "student")) for text in problems) and not validate.problems(config):
        compare_documents(config, training, validation, student, teachers, findings, cache.say)
    facts = Facts(
        num_documents=len(training) if training.exact else None,
        data_kind=training.kind,
        sources=tuple(source_facts(data, training)),
    )
    if problems or validate.problems(config):
        return facts
    even = [[sample[row] for row in _spread(part) if row in sample] for part, sample in zip(parts, samples)]
    found, step = expect(config, training.kind, facts.sources, even, student, teachers, on_gpu=visible_gpus() > 0)
    return replace(facts, sources=found, step=step)


def _trained_on(
    held_out: Sequence[Mapping[str, Any]],
    validation: Any,
    sampled: Sequence[Mapping[str, Any]],
    parts: Sequence[Source],
) -> Iterator[str]:
    """Yields at most one line: documents to validate on that are also trained on, so that validation measures memory too.

    Args:
        held_out: a sample of the validation documents.
        sampled: of the training documents; some thousands more are read.
    """

    def key(document: Mapping[str, Any]) -> str:
        return json.dumps(
            {name: value for name, value in document.items() if name not in ("row", "rows")}, sort_keys=True
        )

    training, most = {key(document) for document in sampled}, COMPARED_ROWS // len(parts)
    for part in parts:
        for row in range(0, len(part), 1 if part.windowed else max(1, -(-len(part) // most)))[:most]:
            with suppress(DataError):
                training.add(key(part[row]))
    both = sum(key(document) in training for document in held_out)
    if both:
        documents, all_of = sum(map(len, parts)), len(held_out) == len(validation)
        few = "" if documents <= COMPARED_ROWS else f", of which {COMPARED_ROWS:,} of {documents:,} were compared"
        some = "" if all_of else f" of a sample of {len(held_out):,}"
        yield (
            f"data.validation: {both:,} of {len(held_out):,} documents{some} are also trained on{few}; validation then measures "
            "what was memorised, too: give other data, or remove duplicates"
        )


def _kind_problems(data: DataConfig, kind: str) -> Iterator[str]:
    """Yields settings that the kind of the data, `text` or `messages`, does not allow, one line each."""
    if kind == "text" and (data.loss_on == "assistant" or data.loss_roles):
        key = "data.loss_roles" if data.loss_roles else "data.loss_on"
        turns = "turns" if data.loss_roles else "assistant turns"
        remedy = "use data.loss_on=all, or data that has messages"
        yield problem(key, f"{turns} are found in chat messages only", "rows of text", remedy)
    if kind == "messages" and data.concatenate and data.format == "auto":
        yield concatenation_problem("chats")


def _open(config: Config, findings: Findings, cache: Cache) -> list[tuple[str, Source | None]]:
    """Every source with the setting that names it; None for one that could not be opened, which `findings` say why."""
    from distill_rl.data.reading.sources import HubError, each_source, is_hub_name, open_one
    from distill_rl.models.files.facts import find_data_set

    routing = _routing(config)
    opened: list[tuple[str, Source | None]] = []
    for key, settings in each_source(config.data):
        path, source = settings.path, None
        if path is None or path == MISSING or not path.strip():
            pass
        elif not cache.write and is_hub_name(path):
            missing, reason = find_data_set(key, path)
            findings.problems += filter(None, [missing])
            findings.unreachable += filter(None, [reason])
        else:
            try:
                source = findings.attempt(
                    key,
                    lambda: open_one(key, settings, cache=cache, routing=routing),  # noqa: B023 (called at once)
                    let_pass=HubError,
                )
            except HubError as error:
                findings.unreachable.append(str(error))
        opened.append((key, source))
    return opened


def _routing(config: Config) -> Routing | None:
    """Which teachers a row is for."""
    from distill_rl.data.routing import Routing

    return Routing.of(config)


def _divide(config: Config, sources: list[Source], findings: Findings, cache: Cache) -> Any:
    """The documents to train on, and those to validate on or None; None alone if that is not possible."""
    from distill_rl.data.reading.sources import HubError, mixture_of, split_validation

    data = config.data
    source: Any = sources[0]
    if data.sources:
        if any(entry.weight <= 0 for entry in data.sources):  # reported as settings
            return None
        source = findings.attempt("data.sources", lambda: mixture_of(data, sources))
        if source is None:
            return None
    try:
        divided = findings.attempt(
            "data.validation",
            lambda: split_validation(source, data, config.run.seed, cache=cache, routing=_routing(config)),
            let_pass=HubError,
        )
    except HubError as error:
        findings.unreachable.append(str(error))
        return None
    return divided or (source, None)


def _parts(training: Any) -> tuple[Source, ...]:
    """The sources of the training documents."""
    return getattr(training, "sources", (training,))


def _count_problems(config: Config, key: str, training: Any, findings: Findings) -> Iterator[str]:
    """Yields a problem if there are fewer documents than a global batch has; notes if their number is not known.

    Args:
        key: the setting that names the data.
    """
    batch, path = config.train.global_batch_size, config.data.path
    if not training.exact:
        findings.notes.append(
            f"{key}: compressed files are converted to Parquet when a run first reads them; until then the first rows are "
            "checked, and the number of documents is not known"
        )
    elif len(training) < batch:
        documents = "1 training document is" if len(training) == 1 else f"{len(training)} training documents are"
        rule = f"{documents} fewer than one global batch of {batch}"
        yield problem(key, rule, path, "lower train.global_batch_size, or give more data")


def _read_sample(config: Config, key: str, source: Any, findings: Findings) -> dict[int, Any]:
    """The documents of a sample, by index; with `data.bad_rows: fail` those before the first that is bad, a problem.

    With `skip`, bad rows are noted, and are a problem if there are no others.

    Args:
        key: the setting with which the line about a bad row begins.
    """
    from distill_rl.data.loader import empty
    from distill_rl.errors import DataError, UnreadableFile

    documents: dict[int, Any] = {}
    bad: list[str] = []
    for row in sample(source):
        if config.data.bad_rows == "fail":
            num_problems = len(findings.problems)
            documents[row] = findings.attempt(key, lambda row=row: source[row])  # type: ignore[misc]
            if len(findings.problems) > num_problems:
                break
            continue
        try:
            document = source[row]
            if reason := empty(document):
                bad.append(f"row {document['row']}: {reason}")
            else:
                documents[row] = document
        except UnreadableFile as error:
            findings.problems += [f"{key}: {text}" for text in error.problems]
            break
        except DataError as error:
            bad.append(str(error))
    if bad and documents:
        findings.notes.append(
            f"{key}: {len(bad)} of {len(bad) + len(documents)} rows of a sample will be left out; the first: {bad[0]}"
        )
    elif bad:
        findings.problems.append(problem(key, "some row must be readable", f"{len(bad)} bad rows; the first: {bad[0]}"))
    return documents


def sample(source: Any) -> list[int]:
    """The rows to read: SAMPLED_ROWS at the start, and about as many that represent all."""
    return sorted({*range(min(len(source), SAMPLED_ROWS)), *_spread(source)})


def _spread(source: Any) -> list[int]:
    """About SAMPLED_ROWS rows, evenly spaced; all rows of small data.

    Of data that are read by blocks, these lie at a few places, so that few blocks are read.
    """
    count = len(source)
    if not getattr(source, "windowed", False):
        return [*range(0, count, max(1, count // SAMPLED_ROWS))]
    run = SAMPLED_ROWS // _PLACES
    places = range(0, count - run, max(1, count // _PLACES))
    return sorted({place + i for place in places for i in range(run)})
