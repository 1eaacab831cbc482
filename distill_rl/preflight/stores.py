"""Checks the stores of a run: can they be read, do they hold what it asks for, and is there room for what it writes?"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unicodedata import is_normalized

from distill_rl.config.derive import sizes, total_steps
from distill_rl.config.facts import Facts
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.data.batch import document_aligner
from distill_rl.data.batch.document_aligner import CrossTokenizerTeacher, StoredTargets
from distill_rl.data.batch.tokenization import Tokenization, name_of
from distill_rl.data.loader import Loader
from distill_rl.data.routing import asked, weights_of
from distill_rl.errors import StoreError, problem
from distill_rl.models.files import cached, teacher_identity
from distill_rl.run.job import manifest_of
from distill_rl.run.opened import OpenedRun, RunFindings, held_out_batches
from distill_rl.store.store import FILE, SHARDS, Manifest, Store, description_problems, short, unmarked
from distill_rl.system.files import size_of, size_text
from distill_rl.types import Row, TrainState, row_of

Document = Mapping[str, Any]

_TOKEN_BYTES = 6
"""Bytes of a token in a store beside its targets: the token, and its part of the index."""
SHOWN = 3
"""Documents that are named in a message."""
_SURELY = 256
"""Documents at the start that are found by their tokens, whatever their names say."""
_SAY_EVERY_S = 30.0
"""Seconds between two lines of progress."""


def store_problems(run: OpenedRun, findings: RunFindings) -> None:
    """Adds to the findings how the stores that teachers are read from do not fit what the run asks for."""
    for teacher in run.teachers:
        if teacher.store is not None:
            findings.problems += _problems(run.config, teacher.key, teacher.settings, teacher.store)
            if note := unmarked(teacher.store.shards):
                findings.notes.append(f"{teacher.key}.store: {note}")


def _problems(config: Config, key: str, settings: TeacherConfig, store: Store) -> Iterator[str]:
    manifest, path = store.manifest, settings.store.path
    yield from (f"{key}.store: {text}" for text in description_problems(store.folder, manifest))
    if settings.export != manifest.kind:
        remedy = f"set {key}.export={manifest.kind} and a loss that works with it, or run the teacher (backend=hf)"
        yield problem(f"{key}.export", f"the store holds {manifest.kind}", settings.export, remedy)
    if manifest.kind == "topk" and config.loss.top_k > manifest.entries:
        rule, remedy = f"must not exceed the {manifest.entries} entries of {path}", "or less, or capture again"
        yield problem("loss.top_k", rule, config.loss.top_k, f"use {manifest.entries} {remedy}")
    if manifest.kind == settings.export == "sampled" and config.loss.draws != manifest.entries:
        remedy = f"set loss.draws={manifest.entries}, or capture again"
        yield problem("loss.draws", f"must be that of {path}, {manifest.entries}", config.loss.draws, remedy)
    if config.loss.temperature != manifest.temperature:
        rule = f"must be that of {path}, {manifest.temperature:g}: log-probs cannot be taken to another one"
        remedy = f"set loss.temperature={manifest.temperature:g}, or capture again"
        yield problem("loss.temperature", rule, config.loss.temperature, remedy)
    if settings.model != settings.store.teacher_folder:
        yield from _model_problems(key, settings, manifest)


def _model_problems(key: str, settings: TeacherConfig, manifest: Manifest) -> Iterator[str]:
    """Yields a problem if the model that the settings name is on this machine and another than the store's."""
    folder, findings = Path(settings.model).expanduser(), RunFindings()
    if not folder.is_dir():
        found_in_cache = findings.attempt(key, lambda: cached(settings.model, settings.revision))
        if found_in_cache is None:
            return
        folder = found_in_cache
    found = findings.attempt(key, lambda: teacher_identity(settings, folder))
    if found is not None and found != manifest.weights:
        rule = f"must be the model of {settings.store.path} ({manifest.model}, weights {short(manifest.weights)})"
        remedy = "leave it out, name the same revision and quantization, or capture again"
        yield problem(f"{key}.model", rule, f"{settings.model}, weights {short(found)}", remedy)


def stored_ids_problems(run: OpenedRun) -> Iterator[str]:
    """Yields stores whose probabilities are over other ids than the run compares, one line each."""
    for opened in run.teachers:
        size = run.ids_of(opened)
        if opened.store is not None and opened.tokenizer_hash not in ("", opened.store.manifest.tokenizer):
            rule = f"must be that of {opened.store.folder}: the store keeps its tokens"
            yield problem(f"{opened.key}.tokenizer", rule, opened.tokenizer_hash[:12], "leave it out, or capture again")
        if opened.store is None or size is None or opened.store.manifest.vocabulary_size == size:
            continue
        rule = f"has probabilities of {opened.store.manifest.vocabulary_size:,} ids; this run compares {size:,}"
        remedy = "capture again with a file of this student"
        yield problem(f"{opened.key}.store", rule, str(opened.store.folder), remedy)


def cache_problems(run: OpenedRun, findings: RunFindings, *, on_gpu: bool, captures: bool) -> Iterator[str]:
    """Yields a problem for every cache that holds other targets than the run would write, one line each.

    Args:
        findings: gets notes on caches.
        on_gpu: as far as this machine shows.
        captures: as for `manifest_of`.
    """
    config = run.config
    for opened in run.teachers:
        settings = opened.settings
        if settings.cache is None or not (Path(settings.cache) / FILE).exists():
            continue
        if opened.folder is None or (size := run.ids_of(opened)) is None:
            continue
        try:
            store = Store(Path(settings.cache))
            manifest = manifest_of(
                config,
                settings,
                weights=opened.identity,
                tokenizer=opened.tokenizer_hash,
                vocabulary_size=size,
                on_gpu=on_gpu,
                captures=captures,
            )
        except StoreError as error:
            yield from (f"{opened.key}.cache: {text}" for text in error.problems)
            continue
        if config.ray.address is not None:  # what the cluster's nodes have is not known yet
            manifest = replace(manifest, wire_dtype=store.manifest.wire_dtype)
        if differences := list(store.manifest.differences(manifest.identity)):
            key = "--out" if captures else f"{opened.key}.cache"
            rule = "one store holds the targets of one teacher, taken in one way"
            remedy = "name another folder, or take the targets as before"
            yield problem(key, rule, f"{settings.cache} ({'; '.join(differences)})", remedy)
        if note := unmarked(store.shards):
            findings.notes.append(f"{opened.key}.cache: {note}")


def room_problems(config: Config, facts: Facts, *, captures: bool) -> Iterator[str]:
    """Yields a problem for every store that a run would fill and that its disk has no room for, as a sample shows.

    What is in the store counts as done: a capture that was stopped needs room for the rest only.

    Args:
        captures: as for `manifest_of`.
    """
    tokens = 0.0
    for source in facts.sources:
        if source.sample is None or source.documents is None:
            return
        tokens += source.sample.tokens_per_document * source.documents
    if facts.num_documents and facts.total_steps is not None:
        tokens *= min(1.0, facts.total_steps * config.train.global_batch_size / facts.num_documents)
    for i, (teacher, targets) in enumerate(zip(config.running_teachers, sizes(config, facts).teachers)):
        if teacher.cache is None:
            continue
        compact = captures and config.capture.format == "compact"
        needed = int(tokens * (_TOKEN_BYTES + (targets.entries if compact else targets.bytes_per_token)))
        folder = Path(teacher.cache).absolute()
        needed -= size_of(folder / SHARDS)
        free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.is_dir())).free
        if needed > free:
            rule = f"the targets need about {size_text(needed)}, and {size_text(free)} are free"
            remedy = "choose another disk, lower loss.top_k, or use capture.format=compact"
            yield problem(f"teachers.{i}.cache", rule, teacher.cache, remedy)


@dataclass(slots=True)
class MissingDocuments:
    """The documents of a run that a store does not have."""

    count: int = 0
    checked: int = 0
    examples: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        share = 100 * self.count / max(self.checked, 1)
        return f"{self.count:,} of {self.checked:,} documents ({share:.3g} %); the first: {', '.join(self.examples)}"


def compare_documents(run: OpenedRun, findings: RunFindings, say: Callable[[str], None]) -> None:
    """Looks up all documents of the run in every store, and adds what is missing to the problems or, if allowed, notes.

    Documents are tokenised and divided as the run will do it, except those that a store has whole: it has all their
    pieces.

    Args:
        run: with its models and data open and its teachers compared.
        say: called with a line before documents are looked up, and every half minute.
    """
    stored = {i: opened.store for i, opened in enumerate(run.teachers) if opened.store is not None}
    if not stored or any(model.tokenizer is None for model in run.models):
        return
    if not run.train.exact:
        note = "teachers: which documents a store lacks is not known before compressed data are converted"
        findings.notes.append(note)
        return
    say("the documents of the run are looked up in the stores of targets")
    validated_on = chain.from_iterable(batch.documents for batch in held_out_batches(run.config, run.validation))
    trained_on = zip(_trained_on(run.config, run.train), repeat("row"))
    documents = chain(trained_on, zip(validated_on, repeat("validation row")))
    for i, missing in _look_up(run, documents, stored, say).items():
        if not missing.count:
            continue
        opened = run.teachers[i]
        key, settings = f"{opened.key}.store", opened.settings.store
        if settings.missing == "fail":
            remedy = f"capture them, or set {key}.missing to skip or live"
            rule = f"{settings.path} must have all documents of the run"
            findings.problems.append(problem(f"{key}.missing", rule, f"fail, and it lacks {missing}", remedy))
        elif settings.skips_missing and missing.count == missing.checked:
            rule = f"{settings.path} has none of the documents of the run"
            findings.problems.append(problem(key, rule, None, "is it the store of other data?"))
        else:
            does = "are skipped" if settings.skips_missing else "are computed by the teacher"
            findings.notes.append(f"{opened.key}: the store lacks {missing}; they {does}")


def _trained_on(config: Config, training: Any) -> Iterator[Document]:
    """The documents that the run will train on; each once, unless they are joined, which may differ by epoch."""
    epochs, repeated = config.train.epochs, config.repeats_documents
    if repeated and (epochs is None or epochs > 1):
        steps = total_steps(config, len(training))
        epochs = 1.0 if steps is None or steps * config.train.global_batch_size >= len(training) else None
    elif epochs is None and config.train.steps is None:  # train.minutes: how many they will be is not known
        epochs = 1.0
    order = training.order(config.run.seed, windowed=training.windowed)
    config = replace(config, train=replace(config.train, epochs=epochs))
    documents = chain.from_iterable(batch.documents for batch in Loader(training, config, TrainState(), order))
    return documents if repeated or config.data.concatenate else _once(documents)


def _once(documents: Iterable[Document]) -> Iterator[Document]:
    seen: set[Row] = set()
    for document in documents:
        if (row := row_of(document)) not in seen:
            seen.add(row)
            yield document


def _look_up(
    run: OpenedRun, documents: Iterable[tuple[Document, str]], stores: Mapping[int, Store], say: Callable[[str], None]
) -> dict[int, MissingDocuments]:
    """What each store lacks, by the index of its teacher. Each document comes with the word for its row."""
    # 1. The first documents are tokenised, divided and found by their tokens, as in the run.
    # 2. So are all others, but those that every store has whole under their name. If that was wrong for one of the
    #    first (a tokenizer that ends texts in another token, for example), it counts for none.
    pieces_of = _divider(run, StoredTargets(frozenset(stores)))
    found, checked = {i: MissingDocuments() for i in stores}, 0
    names_tell, said = True, time.monotonic()
    for document, word in documents:
        if time.monotonic() >= said + _SAY_EVERY_S:
            said = time.monotonic()
            say(f"{checked:,} documents are looked up")
        checked += 1
        needed = {i: store for i, store in stores.items() if asked(weights_of(document), i)}
        for i in needed:
            found[i].checked += 1
        known = _is_known(document, needed.values())
        if known and names_tell and checked > _SURELY:
            continue
        pieces, names = pieces_of(document)
        look = document_aligner.ref_and_tokens
        lacking = [i for i, of in needed.items() if not all(of.has(*look(piece, i, names)) for piece in pieces)]
        names_tell = names_tell and not (known and lacking)
        for i in lacking:
            found[i].count += 1
            if len(found[i].examples) < SHOWN:
                found[i].examples.append(f"{word} {row_of(document)}")
    return found


def _is_known(document: Document, stores: Iterable[Store]) -> bool:
    """Whether every store has a document whole, by its name."""
    # Not known of a chat, whose name depends on its template, nor of a text in another form than NFC, which has the
    # name of that form, but perhaps other tokens.
    text = document.get("text")
    if text is None or not is_normalized("NFC", text):
        return False
    name = name_of(text)
    return all(store.has_whole(name) for store in stores)


def _divider(run: OpenedRun, stored: StoredTargets) -> Callable[[Document], tuple[list[Any], dict[int, bytes]]]:
    """How a document is divided into pieces, and what the teachers call it; nothing for one that cannot be read."""
    config, student = run.config, run.student
    data = replace(config.data, unrendered="warn", loss_on="all", loss_roles=[])
    tokenization = Tokenization(student.tokenizer, data, format=run.train.kind, stops=student.stops)
    split = config.splits_documents(run.train.kind)
    crossing, lengths = {}, {}
    for i, opened in enumerate(run.teachers):
        if opened.cross_tokenizer_loss is not None:
            lengths[i] = config.length_of(opened.settings)
            tokenizers = student.tokenizer, opened.tokenizer
            stops = {"student_stops": student.stops, "stops": opened.stops}
            crossing[i] = CrossTokenizerTeacher.of(opened.name, *tokenizers, config.aligner, **stops)
    return document_aligner.DocumentAligner(tokenization, crossing, lengths, split=split, stored=stored).pieces_of
