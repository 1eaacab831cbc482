"""Checks the stores of a run: are they readable, of the right teacher and kind, and do they have every document?"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import is_normalized

from distill_rl.config.derive import sizes, total_steps
from distill_rl.config.facts import Facts, repeats_documents, running_teachers, splits_documents
from distill_rl.config.paths import teacher_folder
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.errors import StoreError, first_line, problem
from distill_rl.models.files.facts import fingerprint_model
from distill_rl.models.hub import resolve, tokenizer_hash, tokenizer_of
from distill_rl.preflight.machine import size_text
from distill_rl.preflight.opened import Findings, Opened
from distill_rl.preflight.pairs import compared_ids
from distill_rl.store.manifest import (
    FILE,
    SHARDS,
    Manifest,
    describe_teacher,
    description_problems,
    read_manifest,
    require_same,
    write_manifest,
)
from distill_rl.store.store import Store
from distill_rl.system.files import size_of

if TYPE_CHECKING:
    from distill_rl.preflight.job import Job
    from distill_rl.types import Row

SHOWN = 3
"""Documents that are named in a message."""
_CHUNK = 256
"""Documents that are looked up at a time."""


def manifest_of(
    config: Config,
    teacher: TeacherConfig,
    *,
    weights: str,
    tokenizer: str,
    vocabulary_size: int,
    on_gpu: bool,
    captures: bool,
) -> Manifest:
    """What the store of a teacher's targets says of itself, without the files that describe the teacher.

    Args:
        weights, tokenizer, vocabulary_size: see `Manifest`.
        on_gpu: whether the teacher runs on a GPU, which decides `wire_dtype: auto`.
        captures: whether `capture.format` counts; a cache is exact.
    """
    wire_dtype: str = teacher.wire_dtype
    if wire_dtype == "auto":
        wire_dtype = "fp16" if on_gpu else "fp32"
    return Manifest(
        format=config.capture.format if captures else "exact",
        kind=teacher.export,
        entries=config.loss.draws if teacher.export == "sampled" else min(config.loss.top_k, vocabulary_size),
        temperature=config.loss.temperature,
        wire_dtype=wire_dtype,
        dtype=teacher.dtype,
        model=teacher.model,
        revision=teacher.revision,
        weights=weights,
        tokenizer=tokenizer,
        vocabulary_size=vocabulary_size,
        mass=config.capture.mass if captures else None,
    )


def make_stores(job: Job, *, on_gpu: bool, captures: bool) -> None:
    """Makes the store of every teacher whose targets the run stores, or checks that one which exists fits.

    Args:
        on_gpu, captures: as for `manifest_of`.

    Raises:
        StoreError: it holds other targets, or cannot be written.
    """
    for teacher, known in job.facts.by_teacher(job.config):
        if teacher.cache is None:
            continue
        folder = Path(teacher.cache)
        assert known.vocabulary_size is not None
        manifest = manifest_of(
            job.config,
            teacher,
            weights=job.fingerprints[f"teacher {teacher.name}"],
            tokenizer=tokenizer_hash(tokenizer_of(teacher)),
            vocabulary_size=known.vocabulary_size,
            on_gpu=on_gpu,
            captures=captures,
        )
        sources = [resolve(teacher.model, teacher.revision)]
        if teacher.tokenizer is not None:
            sources.append(resolve(teacher.tokenizer))
        make_store(folder, manifest, sources)


def make_store(folder: Path, manifest: Manifest, sources: list[Path]) -> None:
    """Makes a store, or checks that one which exists fits. Of several runs that do so at the same time, one makes it.

    Args:
        manifest: without the files that describe the teacher.
        sources: as of `describe_teacher`.

    Raises:
        StoreError: the store holds other targets, or cannot be written.
    """
    if not (folder / FILE).exists():
        try:
            with _locked(folder):
                if not (folder / FILE).exists():
                    for draft in folder.glob(f".{FILE}.*"):  # of a run that was killed
                        draft.unlink()
                    write_manifest(folder, replace(manifest, files=describe_teacher(folder, sources)))
        except OSError as error:
            raise StoreError(f"{folder}", "must be writable", first_line(error), "choose another folder") from error
    require_same(folder, manifest)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Makes other processes wait that enter it with the same folder, except on a file system without locks.

    The folder is made if it does not exist. The lock is deleted when the block has made a store: who comes later finds
    that, and does not need the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    with path.open("a") as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        path.unlink(missing_ok=True)


def open_stores(config: Config, teachers: Sequence[Opened], findings: Findings) -> None:
    """Opens the store of every running teacher that has one, and adds what is wrong with it to the findings.

    Sets `store` of those that are read from a store.

    Args:
        teachers: not opened yet.
    """
    for opened in teachers:
        settings = opened.settings
        assert isinstance(settings, TeacherConfig)
        if settings.backend != "store" or not settings.store:
            continue
        folder = Path(settings.store)
        opened.store = findings.attempt(f"{opened.key}.store", partial(Store, folder))
        if opened.store is not None:
            findings.problems += _problems(config, opened.key, settings, opened.store)


def _problems(config: Config, key: str, settings: TeacherConfig, store: Store) -> Iterator[str]:
    """Yields how a store does not fit what the run asks for, one line each."""
    manifest = store.manifest
    yield from (f"{key}.store: {text}" for text in description_problems(store.folder, manifest))
    if settings.export != manifest.kind:
        remedy = f"set {key}.export={manifest.kind} and a loss that works with it, or run the teacher (backend=hf)"
        yield problem(f"{key}.export", f"the store holds {manifest.kind}", settings.export, remedy)
    if manifest.kind == "topk" and config.loss.top_k > manifest.entries:
        remedy = f"use {manifest.entries} or less, or capture again"
        yield problem("loss.top_k", f"must not exceed the {manifest.entries} entries of {settings.store}",
                      config.loss.top_k, remedy)  # fmt: skip
    if manifest.kind == settings.export == "sampled" and config.loss.draws != manifest.entries:
        remedy = f"set loss.draws={manifest.entries}, or capture again"
        yield problem("loss.draws", f"must be that of {settings.store}, {manifest.entries}", config.loss.draws, remedy)
    if config.loss.temperature != manifest.temperature:
        rule = f"must be that of {settings.store}, {manifest.temperature:g}: log-probs cannot be taken to another one"
        remedy = f"set loss.temperature={manifest.temperature:g}, or capture again"
        yield problem("loss.temperature", rule, config.loss.temperature, remedy)
    if settings.model != teacher_folder(settings.store or ""):
        yield from _model_problems(key, settings, manifest)


def _model_problems(key: str, settings: TeacherConfig, manifest: Manifest) -> Iterator[str]:
    """Yields a problem if the model that the settings name is another than the store's; none if it cannot be read."""
    findings = Findings()
    found = findings.attempt(key, lambda: fingerprint_model(resolve(settings.model, settings.revision, weights=True)))
    if found is not None and found != manifest.weights:
        rule = f"must be the model of {settings.store} ({manifest.model}, weights {manifest.weights[:12]})"
        remedy = "leave it out, name the same revision, or capture again"
        yield problem(f"{key}.model", rule, f"{settings.model}, weights {found[:12]}", remedy)


def stored_ids_problems(student: Opened, teachers: Sequence[Opened]) -> Iterator[str]:
    """Yields stores whose probabilities are over other ids than the run compares, one line each.

    The teachers must have their `shared` set (`vocabulary_problems`).
    """
    for opened in teachers:
        size = opened.vocabulary_size if opened.shared is None else compared_ids(student, [*teachers])
        if opened.store is None or size is None or opened.store.manifest.vocabulary_size == size:
            continue
        rule = f"has probabilities of {opened.store.manifest.vocabulary_size:,} ids; this run compares {size:,}"
        yield problem(
            f"{opened.key}.store", rule, str(opened.store.folder), "capture again with a file of this student"
        )


def cache_problems(config: Config, teachers: Sequence[Opened], *, on_gpu: bool, captures: bool) -> Iterator[str]:
    """Yields a problem for every cache that holds other targets than the run would write, one line each.

    Args:
        teachers: opened, with what is known of their vocabularies.
        on_gpu: as far as this machine shows.
        captures: as for `manifest_of`.
    """
    for opened in teachers:
        settings = opened.settings
        assert isinstance(settings, TeacherConfig)
        if settings.cache is None or not (Path(settings.cache) / FILE).exists():
            continue
        if opened.folder is None or opened.tokenizer_hash is None or opened.vocabulary_size is None:
            continue
        size = opened.vocabulary_size if opened.shared is None else opened.shared.size
        try:
            there = read_manifest(Path(settings.cache))
            manifest = manifest_of(
                config,
                settings,
                weights=fingerprint_model(opened.folder),
                tokenizer=opened.tokenizer_hash,
                vocabulary_size=size,
                on_gpu=on_gpu,
                captures=captures,
            )
        except StoreError as error:
            yield from (f"{opened.key}.cache: {text}" for text in error.problems)
            continue
        if config.ray.address is not None:  # what the cluster's nodes have is not known yet
            manifest = replace(manifest, wire_dtype=there.wire_dtype)
        if differences := list(there.differences(manifest)):
            rule = "one store holds the targets of one teacher, taken in one way"
            yield problem(
                f"{opened.key}.cache", rule, f"{settings.cache} ({'; '.join(differences)})", "name another folder"
            )


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
    for i, (teacher, targets) in enumerate(zip(running_teachers(config), sizes(config, facts).teachers)):
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


_TOKEN_BYTES = 6
"""Bytes of a token in a store beside its targets: the token, and its part of the index."""


@dataclass(frozen=True, slots=True)
class Missing:
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
        say: called with a line before documents are looked up.
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
    documents = chain(_trained_on(config, training), _validated_on(config, validation))
    for i, missing in _look_up(config, training.kind, documents, student, teachers, stored).items():
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
    from distill_rl.data.joining import Joining
    from distill_rl.data.loader import Loader
    from distill_rl.types import TrainState

    epochs = config.train.epochs
    joining, repeated = Joining.of(config.data), repeats_documents(config)
    if repeated and (epochs is None or epochs > 1):
        steps = total_steps(config, len(training))
        epochs = 1.0 if steps is None or steps * config.train.global_batch_size >= len(training) else None
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
    from distill_rl.data.joining import Joining
    from distill_rl.data.loader import validation_batches

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
    documents: Iterable[Mapping[str, Any]],
    student: Opened,
    teachers: Sequence[Opened],
    stores: Mapping[int, Store],
) -> dict[int, Missing]:
    """What each store lacks, by the index of its teacher."""
    from distill_rl.data.batch.naming import StoredTargets, name_of, side_of
    from distill_rl.types import row_of

    whole = {i: _names_of_whole_documents(store) for i, store in stores.items()}
    pieces_of = _divider(config, kind, student, teachers, StoredTargets(frozenset(stores)))
    counts, examples, checked = dict.fromkeys(stores, 0), {i: list[str]() for i in stores}, 0
    documents = iter(documents)
    while part := list(islice(documents, _CHUNK)):
        checked += len(part)
        # The name of a chat depends on its template: all of it is done as in the run. So it is for a text in another
        # form than NFC, which has the name of the form NFC, but perhaps other tokens.
        unsure = [
            d
            for d in part
            if "text" not in d
            or not is_normalized("NFC", d["text"])
            or any(name_of(d["text"]) not in names for names in whole.values())
        ]
        for document in unsure:
            pieces, names = pieces_of(document)
            for i, store in stores.items():
                if not all(store.has(*side_of(piece, i, names)) for piece in pieces):
                    counts[i] += 1
                    if len(examples[i]) < SHOWN:
                        examples[i].append(f"row {row_of(document)}")
    return {i: Missing(counts[i], checked, tuple(examples[i])) for i in stores}


def _names_of_whole_documents(store: Store) -> set[bytes]:
    """The documents that a store has in one piece."""
    names: set[bytes] = set()
    for shard in store.shards:
        complete = shard.whole & (shard.first == 0)
        names.update(name.tobytes() for name in shard.names[complete])
    return names


def _divider(
    config: Config, kind: str, student: Opened, teachers: Sequence[Opened], stored: Any
) -> Callable[[Mapping[str, Any]], tuple[list[Any], dict[int, bytes]]]:
    """How a document is divided into pieces, and what the teachers call it; nothing for one that cannot be read."""
    from distill_rl.config.facts import teacher_length
    from distill_rl.data.batch.document_aligner import CrossTokenizerTeacher, DocumentAligner
    from distill_rl.data.batch.pieces import STUDENT, Extent, Piece, splitter_of
    from distill_rl.data.batch.tokenization import Tokenization

    data = replace(config.data, unrendered="warn", loss_on="all", loss_roles=[])
    tokenization = Tokenization.of(student.tokenizer, data, format=kind)
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
        return [Piece(cut, {}, {STUDENT: Extent(whole=not cut.truncated)})], {}

    return alone
