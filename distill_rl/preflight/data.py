"""Checks the data by reading a sample of rows, and says what it shows of a run: tokens, padding, positions of a step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from distill_rl.config.facts import Facts, SampleFacts, SourceFacts, StepFacts
from distill_rl.config.schema import Config, DataConfig
from distill_rl.config.schema.data import concatenation_problem
from distill_rl.data.batch.collate import BatchPlan, arrange_lengths, widths
from distill_rl.data.batch.tokenization import Tokenization
from distill_rl.data.loader import Joining, empty
from distill_rl.data.order import random_order
from distill_rl.data.reading.cache import Cache
from distill_rl.data.reading.source import MixedSource, Mixture, Source
from distill_rl.data.reading.sources import each_source
from distill_rl.data.routing import plain_value, plain_values, weights_of
from distill_rl.errors import DataError, UnreadableFile, problem
from distill_rl.preflight.pairs import check_alignment, template_problems
from distill_rl.preflight.rows import Documents, check_chats, check_labels
from distill_rl.preflight.stores import compare_documents
from distill_rl.run.opened import OpenedRun, RunFindings
from distill_rl.run.shared_vocabulary import some

SAMPLED_ROWS = 64
"""Number of rows read from the start; as many more are read evenly spaced over the data."""
COMPARED_ROWS = 4096
"""Most training documents that are compared with those to validate on."""
_PLACES = 8
"""Of data that are read by blocks, the rows that are spaced are read at this many places."""
_SHOWN_VALUES = 6
"""Most values of a column that are named."""
_STEPS = 256
"""Most steps over which means of a sample are taken."""


def data_facts(
    run: OpenedRun, findings: RunFindings, cache: Cache, *, on_gpu: bool
) -> tuple[Facts, list[Mapping[str, Any]]]:
    """Opens the data as the loader will, reads a sample of rows of each source, and counts the training documents.

    Problems are added to `findings`: rows, too few documents, chats and their templates, `data.loss_on`, and, if there is
    no problem of any kind yet, tokenizers that align on none of the documents. Data with nothing to train on are a
    problem, too.

    Args:
        run: with its models open and its teachers compared.
        cache: as of `OpenedRun.open_data`.
        on_gpu: whether rows go to GPUs.

    Returns:
        Facts with `num_documents`, `data_kind`, `sources` and `step` alone, or with nothing if the data could not be
        opened; what is found in a sample is left out if there is a problem. And the training documents of the sample.
    """
    config, problems = run.config, findings.problems
    run.open_data(findings, cache)
    training, validation = run.train, run.validation
    if training is None:
        if any(source is None for _, source in run.sources):
            for key, source in run.sources:
                if source is not None:
                    _read_sample(config, key, source, findings)
        return Facts(), []
    num_problems = len(problems)
    main = "data.sources" if config.data.sources else "data.path"
    parts: tuple[Source, ...] = getattr(training, "sources", (training,))
    samples = [_read_sample(config, key, part, findings) for (key, _), part in zip(run.sources, parts)]
    documents = [*chain(*(sample.values() for sample in samples))]
    held_out = [] if validation is None else [*_read_sample(config, "data.validation", validation, findings).values()]
    if held_out and len(problems) == num_problems:
        findings.notes += _trained_on(held_out, validation, documents, parts)
    if len(problems) == num_problems:
        for part, sampled in zip(parts, samples):
            findings.notes += _routing_notes(config, part, sampled)
    if training.kind == "messages" and len(problems) == num_problems:
        check_chats(config, documents + held_out, run.student, run.teachers, findings)
    problems += _count_problems(config, main, training, findings)
    problems += _kind_problems(config.data, training.kind)
    problems += template_problems(run)
    if not any(text.startswith(("data.", "student")) for text in problems):
        check_labels(config, main, training.kind, documents, run.student, findings)
        if validation is not None:
            check_labels(config, "data.validation", training.kind, held_out, run.student, findings)
    if not problems:
        check_alignment(run, documents, findings)
    if not any(text.startswith(("data.", "student")) for text in problems) and not run.rules:
        compare_documents(run, findings, cache.say)
    facts = Facts(
        num_documents=len(training) if training.exact else None,
        data_kind=training.kind,
        sources=tuple(_source_facts(config.data, training)),
    )
    if problems or run.rules:
        return facts, documents
    even = [[sample[row] for row in _spread(part) if row in sample] for part, sample in zip(parts, samples)]
    found, step = _expect(run, facts.sources, even, on_gpu=on_gpu)
    return replace(facts, sources=found, step=step), documents


def _trained_on(held_out: Documents, validation: Any, sampled: Documents, parts: Sequence[Source]) -> Iterator[str]:
    """Yields at most one line: documents to validate on that are also trained on, so that validation measures memory too."""

    def key(document: Mapping[str, Any]) -> str:
        content = {name: value for name, value in document.items() if name not in ("row", "rows")}
        return json.dumps(content, sort_keys=True)

    # Beside the sample, some thousands of the training documents are read.
    training, most = {key(document) for document in sampled}, COMPARED_ROWS // len(parts)
    for part in parts:
        for row in range(0, len(part), 1 if part.windowed else max(1, -(-len(part) // most)))[:most]:
            with suppress(DataError):
                training.add(key(part[row]))
    if both := sum(key(document) in training for document in held_out):
        documents, all_of = sum(map(len, parts)), len(held_out) == len(validation)
        few = "" if documents <= COMPARED_ROWS else f", of which {COMPARED_ROWS:,} of {documents:,} were compared"
        sampled_only = "" if all_of else f" of a sample of {len(held_out):,}"
        found = f"{both:,} of {len(held_out):,} documents{sampled_only} are also trained on{few}"
        remedy = "give other data, or remove duplicates"
        yield f"data.validation: {found}; validation then measures what was memorised, too: {remedy}"


def _kind_problems(data: DataConfig, kind: str) -> Iterator[str]:
    if kind == "text" and (data.loss_on == "assistant" or data.loss_roles):
        key = "data.loss_roles" if data.loss_roles else "data.loss_on"
        turns = "turns" if data.loss_roles else "assistant turns"
        remedy = "use data.loss_on=all, or data that has messages"
        yield problem(key, f"{turns} are found in chat messages only", "rows of text", remedy)
    if kind == "messages" and data.concatenate and data.format == "auto":
        yield concatenation_problem("chats")


def _routing_notes(config: Config, source: Source, documents: Mapping[int, Any]) -> Iterator[str]:
    """Yields how many rows of a sample, by index, each teacher is asked for, and values of `where` that no row has."""
    routing = source.layout.routing
    found = [document for document in documents.values() if document is not None]
    if routing is None or not found:
        return
    rows = [source.columns(i) for i, document in documents.items() if document is not None]
    for i, (choice, teacher) in enumerate(zip(routing.choices, config.running_teachers)):
        if choice is None:
            continue
        count = sum((weights_of(document) or ())[i] > 0 for document in found)
        yield f"teachers.{i}: {teacher.name} is asked for {count} of {len(rows)} rows of a sample"
        for column, wanted in teacher.where.items():
            seen = {plain_value(row.get(column), "") for row in rows} - {None}
            for value in wanted if isinstance(wanted, list) else [wanted]:
                if not plain_values(value) <= seen:
                    others = some([repr(each) for each in sorted(filter(None, seen))], _SHOWN_VALUES) or "no value"
                    found_none = f"no row of a sample of {len(rows)} has {value!r}; they have {others}"
                    yield f"teachers.{i}.where.{column}: {found_none}"
    if nobody := sum(not any(weight > 0 for weight in weights_of(document) or ()) for document in found):
        has_ce = config.loss.ce_weight > 0 or config.loss.dynamic_scale != "off"
        then = "they are trained on with CE alone" if has_ce else "loss.ce_weight is 0, so nothing is learnt from them"
        yield f"teachers: none is asked for {nobody} of {len(rows)} rows of a sample; {then}"


def _count_problems(config: Config, key: str, training: Any, findings: RunFindings) -> Iterator[str]:
    """Yields a problem if there are fewer documents than a global batch has; notes if their number is not known."""
    batch, path = config.train.global_batch_size, config.data.path
    if not training.exact:
        converted = "compressed files are converted to Parquet when a run first reads them"
        until = "until then the first rows are checked, and the number of documents is not known"
        findings.notes.append(f"{key}: {converted}; {until}")
    elif len(training) < batch:
        documents = "1 training document is" if len(training) == 1 else f"{len(training)} training documents are"
        rule = f"{documents} fewer than one global batch of {batch}"
        yield problem(key, rule, path, "lower train.global_batch_size, or give more data")


def _read_sample(config: Config, key: str, source: Any, findings: RunFindings) -> dict[int, Any]:
    """The documents of a sample, by index; with `data.bad_rows: fail` those before the first that is bad, a problem."""
    documents: dict[int, Any] = {}
    bad: list[str] = []
    for row in sample(source):
        if config.data.bad_rows == "fail":
            num_problems = len(findings.problems)
            documents[row] = findings.attempt(key, partial(source.__getitem__, row))
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
        share = f"{len(bad)} of {len(bad) + len(documents)} rows of a sample"
        findings.notes.append(f"{key}: {share} will be left out; the first: {bad[0]}")
    elif bad:  # and no others
        findings.problems.append(problem(key, "some row must be readable", f"{len(bad)} bad rows; the first: {bad[0]}"))
    return documents


def sample(source: Any) -> list[int]:
    """The rows to read: SAMPLED_ROWS at the start, and about as many that represent all."""
    return sorted({*range(min(len(source), SAMPLED_ROWS)), *_spread(source)})


def _spread(source: Any) -> list[int]:
    """About SAMPLED_ROWS rows, evenly spaced; all rows of small data."""
    count = len(source)
    if not getattr(source, "windowed", False):
        return [*range(0, count, max(1, count // SAMPLED_ROWS))]
    # Of data that are read by blocks, the rows lie at a few places, so that few blocks are read.
    length = SAMPLED_ROWS // _PLACES
    return sorted({place + i for place in range(0, count - length, max(1, count // _PLACES)) for i in range(length)})


def _source_facts(data: DataConfig, training: Source | Mixture) -> Iterator[SourceFacts]:
    """Yields the facts of each source of the training documents, without those that need a sample."""
    members = training.members if isinstance(training, Mixture) else [MixedSource(training, 1.0, data.path or "")]
    total = sum(member.weight for member in members)
    for member, (_, settings) in zip(members, each_source(data)):
        part = member.source
        recognised = settings.format == "auto" and part.layout.format in ("sharegpt", "alpaca")
        count = len(part) if part.exact else None
        yield SourceFacts(member.name, part.layout.format, count, member.weight / total, recognised)


def _expect(
    run: OpenedRun, sources: Sequence[SourceFacts], samples: Sequence[Documents], *, on_gpu: bool
) -> tuple[tuple[SourceFacts, ...], StepFacts | None]:
    """The facts of the sources with those of their samples, and what a step is expected to compute."""
    # Documents are tokenised by every tokenizer of the run, but not aligned: pieces are taken to be as long as rows allow.
    config, data, kind = run.config, run.config.data, run.train.kind
    lengths = [config.length_of(opened.settings) for opened in run.crossing]
    tokenizers = [opened.tokenizer for opened in (run.student, *run.crossing)]
    if not all(samples) or not all(tokenizers):
        return tuple(sources), None
    limits = np.array([data.max_length, *lengths])
    plan = BatchPlan.from_config(config, 0, split=config.splits_documents(kind)).for_device(on_gpu=on_gpu)
    joining = Joining.of(data)
    # What a template leaves out is checked with the chats (`rows.py`).
    whole = DataConfig(max_length=data.max_length, unrendered="warn")
    readers = [Tokenization(tokenizer, whole, format=kind).encode_all for tokenizer in tokenizers]
    read = [_TokenizedSample.of(documents, readers, joining) for documents in samples]

    def steps(samples: Sequence[_TokenizedSample], shares: Sequence[float]) -> tuple[float, float, float]:
        """The means over some steps of positions and tokens, and the share of documents that are too long."""
        positions, tokens, too_long = [], [], []
        for lengths in _steps(samples, shares, config.train.global_batch_size, joining):
            pieces = _pieces(lengths, limits, split=plan.split)
            positions.append(_positions(pieces, limits, plan))
            tokens.append(pieces[:, 0].sum())
            too_long.append((lengths > limits).any(axis=1))
        return float(np.mean(positions)), float(np.mean(tokens)), float(np.concatenate(too_long).mean())

    found = []
    for source, part in zip(sources, read):
        positions, tokens, too_long = steps([part], [1.0])
        sample = SampleFacts(float(part.lengths[:, 0].mean()), too_long, plan.split, 1 - tokens / positions)
        found.append(replace(source, sample=sample))
    positions, tokens, _ = steps(read, [source.share for source in sources])
    return tuple(found), StepFacts(round(positions), tokens / positions)


@dataclass(frozen=True, slots=True)
class _TokenizedSample:
    """The documents of a sample as the tokenizers read them."""

    lengths: np.ndarray
    """int64 [documents, tokenizers], in tokens, not cut."""
    characters: np.ndarray
    """int64 [documents]; of chats 0."""
    joint: np.ndarray
    """int64 [tokenizers]: tokens that a joint between two texts adds, negative if special tokens vanish there."""

    @classmethod
    def of(cls, documents: Documents, readers: Sequence[Any], joining: Joining | None) -> _TokenizedSample:
        """Tokenises documents."""
        lengths = _lengths(documents, readers)
        characters = np.array([len(document.get("text", "")) for document in documents], dtype=np.int64)
        if joining is None:
            return cls(lengths, characters, np.zeros(len(readers), dtype=np.int64))
        separator, nothing = _lengths([{"text": joining.separator}, {"text": ""}], readers)
        return cls(lengths, characters, separator - 2 * nothing)


def _steps(
    samples: Sequence[_TokenizedSample], shares: Sequence[float], batch_size: int, joining: Joining | None
) -> Iterator[np.ndarray]:
    """Yields int64 [documents, tokenizers] for several steps: the lengths of documents of all samples, joined if texts are."""
    # Each sample has its share of the documents. They are drawn evenly from it, and again if they are too few.
    orders = [random_order(0, (i,), len(sample.lengths)) for i, sample in enumerate(samples)]
    given = np.zeros(len(samples), dtype=np.int64)
    for step in range(min(max(sum(map(len, orders)) // batch_size, 1), _STEPS)):
        before = given.copy()
        for place in range(step * batch_size, (step + 1) * batch_size):
            given[np.argmax(np.array(shares) * (place + 1) - given)] += 1  # the one that is furthest behind
        chosen = [
            np.sort(order[np.arange(first, end) % len(order)]) for order, first, end in zip(orders, before, given)
        ]
        lengths = np.concatenate([sample.lengths[rows] for sample, rows in zip(samples, chosen)])
        if joining is None:
            yield lengths
            continue
        characters = np.concatenate([sample.characters[rows] for sample, rows in zip(samples, chosen)])
        joint = samples[0].joint
        groups = joining.groups(characters.tolist())
        yield np.stack([lengths[group].sum(axis=0) + joint * (group.stop - group.start - 1) for group in groups])


def _lengths(documents: Documents, readers: Sequence[Any]) -> np.ndarray:
    """int64 [documents, tokenizers]: tokens of each document for each tokenizer, not cut."""
    return np.array([[len(read(document).input_ids) for document in documents] for read in readers], dtype=np.int64).T


def _pieces(lengths: np.ndarray, limits: np.ndarray, *, split: bool) -> np.ndarray:
    """int64 [pieces, sides]: the lengths of what rows hold of the documents: their beginnings, or all of them in pieces."""
    # A document longer than a row on some side is divided in the same proportion on all sides.
    fill = (lengths / limits).max(axis=1)  # in rows, on the side that is full first
    whole = np.minimum(1 / np.maximum(fill, 1e-9), 1)[:, None]
    if not split:
        return np.minimum(np.rint(lengths * whole).astype(np.int64), limits)
    pieces = []
    for document, rows, part in zip(lengths, fill, whole):
        full = np.minimum(np.rint(document * part).astype(np.int64), limits)
        count = max(int(np.ceil(rows)), 1)
        pieces += [full] * (count - 1) + [np.minimum(document - full * (count - 1), limits)]
    return np.maximum(np.stack(pieces), 0)


def _positions(lengths: np.ndarray, limits: np.ndarray, plan: Any) -> int:
    """Positions that the student computes for a batch of documents with these lengths."""
    return int(widths([int(lengths[row, 0].sum()) for row in arrange_lengths(lengths, limits, plan)], plan).sum())
