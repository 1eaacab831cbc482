"""Looks up the documents of a run in the stores that its teachers are read from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any
from unicodedata import is_normalized

from distill_rl.config.derive import total_steps
from distill_rl.config.facts import repeats_documents, running_teachers, splits_documents
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.errors import problem
from distill_rl.preflight.models.opened import Findings, Opened
from distill_rl.store.store import Store

if TYPE_CHECKING:
    from distill_rl.types import Row

SHOWN = 3
"""Documents that are named in a message."""
_SURELY = 256
"""Documents at the start that are found by their tokens, whatever their names say."""
_SAY_EVERY_S = 30.0
"""Seconds between two lines of progress."""


@dataclass(frozen=True, slots=True)
class MissingDocuments:
    """The documents of a run that a store does not have."""

    count: int
    checked: int
    examples: tuple[str, ...]

    def __str__(self) -> str:
        share = 100 * self.count / max(self.checked, 1)
        return f"{self.count:,} of {self.checked:,} documents ({share:.3g} %); the first: {', '.join(self.examples)}"


def compare_documents(
    config: Config,
    training: Any,
    validation: Any,
    student: Opened,
    teachers: Sequence[Opened],
    findings: Findings,
    say: Callable[[str], None],
) -> None:
    """Looks up all documents of the run in every store, and adds what is missing to the problems or, if allowed, notes.

    Documents are tokenised and divided as the run will do it, except those that a store has whole: it has all their
    pieces.

    Args:
        training, validation: the documents; None: no validation.
        teachers: the running ones, opened.
        say: called with a line before documents are looked up, and every half minute.
    """
    stored = {i: opened.store for i, opened in enumerate(teachers) if opened.store is not None}
    if not stored or student.tokenizer is None or any(opened.tokenizer is None for opened in teachers):
        return
    if not training.exact:
        findings.notes.append(
            "teachers: which documents a store lacks is not known before compressed data are converted"
        )
        return
    say("the documents of the run are looked up in the stores of targets")
    documents = chain(
        zip(_trained_on(config, training), repeat("row")),
        zip(_validated_on(config, validation), repeat("validation row")),
    )
    for i, missing in _look_up(config, training.kind, documents, student, teachers, stored, say).items():
        if not missing.count:
            continue
        opened = teachers[i]
        settings = opened.settings
        assert isinstance(settings, TeacherConfig)
        if settings.missing == "fail":
            remedy = f"capture them, or set {opened.key}.missing to skip or live"
            rule = f"{settings.store} must have all documents of the run"
            findings.problems.append(
                problem(f"{opened.key}.missing", rule, f"{settings.missing}, and it lacks {missing}", remedy)
            )
        elif settings.missing == "skip" and missing.count == missing.checked:
            rule = f"{settings.store} has none of the documents of the run"
            findings.problems.append(problem(f"{opened.key}.store", rule, None, "is it the store of other data?"))
        else:
            does = "are skipped" if settings.missing == "skip" else "are computed by the teacher"
            findings.notes.append(f"{opened.key}: the store lacks {missing}; they {does}")


def _trained_on(config: Config, training: Any) -> Iterator[Mapping[str, Any]]:
    """The documents that the run will train on; each once, unless they are joined, which may differ by epoch."""
    from distill_rl.data.loader import Joining, Loader
    from distill_rl.types import TrainState

    epochs = config.train.epochs
    joining, repeated = Joining.of(config.data), repeats_documents(config)
    if repeated and (epochs is None or epochs > 1):
        steps = total_steps(config, len(training))
        epochs = 1.0 if steps is None or steps * config.train.global_batch_size >= len(training) else None
    elif epochs is None and config.train.steps is None:  # train.minutes: how many they will be is not known
        epochs = 1.0
    loader = Loader(
        training,
        batch_size=config.train.global_batch_size,
        seed=config.run.seed,
        steps=config.train.steps,
        epochs=epochs,
        start=TrainState(),
        order=training.order(config.run.seed, windowed=training.windowed),
        skip_bad_rows=config.data.bad_rows == "skip",
        joining=joining,
    )
    documents = chain.from_iterable(batch.documents for batch in loader)
    return documents if repeated or joining is not None else _once(documents)


def _once(documents: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yields the documents without those of a row that came before."""
    from distill_rl.types import row_of

    seen: set[Row] = set()
    for document in documents:
        if (row := row_of(document)) not in seen:
            seen.add(row)
            yield document


def _validated_on(config: Config, validation: Any) -> Iterator[Mapping[str, Any]]:
    """The documents that the run will validate on."""
    from distill_rl.data.loader import Joining, validation_batches

    if validation is None:
        return iter(())
    batches = validation_batches(
        validation,
        config.train.global_batch_size,
        config.data.validation.max_documents,
        skip_bad_rows=config.data.bad_rows == "skip",
        joining=Joining.of(config.data),
    )
    return chain.from_iterable(batch.documents for batch in batches)


def _look_up(
    config: Config,
    kind: str,
    documents: Iterable[tuple[Mapping[str, Any], str]],
    student: Opened,
    teachers: Sequence[Opened],
    stores: Mapping[int, Store],
    say: Callable[[str], None],
) -> dict[int, MissingDocuments]:
    """What each store lacks, by the index of its teacher. Each document comes with the word for its row.

    A document is looked up for the teachers that are asked for it.

    1. The first documents are tokenised, divided and found by their tokens, as in the run.
    2. So are all others, but those that every store has whole under their name. If that was wrong for one of the first
       (a tokenizer that ends texts in another token, for example), it counts for none.
    """
    from distill_rl.data.batch.pieces import StoredTargets, ref_and_tokens
    from distill_rl.data.routing import asked, weights_of
    from distill_rl.types import row_of

    pieces_of = _divider(config, kind, student, teachers, StoredTargets(frozenset(stores)))
    counts, examples = dict.fromkeys(stores, 0), {i: list[str]() for i in stores}
    looked_up, checked = dict.fromkeys(stores, 0), 0
    names_tell, said = True, time.monotonic()
    for document, word in documents:
        if time.monotonic() >= said + _SAY_EVERY_S:
            said = time.monotonic()
            say(f"{checked:,} documents are looked up")
        checked += 1
        needed = {i: store for i, store in stores.items() if asked(weights_of(document), i)}
        for i in needed:
            looked_up[i] += 1
        known = _is_known(document, needed.values())
        if known and names_tell and checked > _SURELY:
            continue
        pieces, names = pieces_of(document)
        lacking = [
            i for i, store in needed.items() if not all(store.has(*ref_and_tokens(piece, i, names)) for piece in pieces)
        ]
        names_tell = names_tell and not (known and lacking)
        for i in lacking:
            counts[i] += 1
            if len(examples[i]) < SHOWN:
                examples[i].append(f"{word} {row_of(document)}")
    return {i: MissingDocuments(counts[i], looked_up[i], tuple(examples[i])) for i in stores}


def _is_known(document: Mapping[str, Any], stores: Iterable[Store]) -> bool:
    """Whether every store has a document whole, by its name.

    Not known of a chat, whose name depends on its template, nor of a text in another form than NFC, which has the name
    of that form, but perhaps other tokens.
    """
    from distill_rl.data.batch.tokenization import name_of

    text = document.get("text")
    if text is None or not is_normalized("NFC", text):
        return False
    name = name_of(text)
    return all(store.has_whole(name) for store in stores)


def _divider(
    config: Config, kind: str, student: Opened, teachers: Sequence[Opened], stored: Any
) -> Callable[[Mapping[str, Any]], tuple[list[Any], dict[int, bytes]]]:
    """How a document is divided into pieces, and what the teachers call it; nothing for one that cannot be read."""
    from distill_rl.config.facts import teacher_length
    from distill_rl.data.batch.document_aligner import CrossTokenizerTeacher, DocumentAligner
    from distill_rl.data.batch.pieces import STUDENT, DocumentPiece, Extent, splitter_of
    from distill_rl.data.batch.tokenization import Tokenization

    data = replace(config.data, unrendered="warn", loss_on="all", loss_roles=[])
    tokenization = Tokenization.of(student.tokenizer, data, format=kind, stops=student.stops)
    split = splits_documents(config, kind)
    crossing = {
        i: CrossTokenizerTeacher.of(
            opened.name,
            student.tokenizer,
            opened.tokenizer,
            config.aligner,
            student_stops=student.stops,
            stops=opened.stops,
        )
        for i, opened in enumerate(teachers)
        if opened.cross_tokenizer_loss is not None
    }
    if crossing:
        settings = running_teachers(config)
        lengths = {i: teacher_length(config, settings[i]) for i in crossing}
        aligner = DocumentAligner(tokenization, crossing, lengths, split=split, stored=stored)
        return aligner.pieces_of

    splitter = splitter_of(student.tokenizer, config.data.max_length, {}) if split else None

    def alone(document: Mapping[str, Any]) -> tuple[list[Any], dict[int, bytes]]:
        encoded = tokenization.encode_all(document)
        if splitter is not None:
            return splitter.split(encoded, {}), {}
        cut = encoded.cut(config.data.max_length)
        return [DocumentPiece(cut, {}, {STUDENT: Extent(whole=not cut.truncated)})], {}

    return alone
