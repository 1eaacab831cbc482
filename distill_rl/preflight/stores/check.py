"""Checks the stores of a run: can they be read, do they hold what it asks for, and is there room for what it writes?"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from distill_rl.config.derive import sizes
from distill_rl.config.facts import Facts, running_teachers
from distill_rl.config.paths import teacher_folder
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.errors import StoreError, problem
from distill_rl.models.files.facts import teacher_identity
from distill_rl.models.files.hub import cached
from distill_rl.preflight.models.opened import Findings, Opened
from distill_rl.preflight.models.pairs import compared_ids
from distill_rl.preflight.stores.make import manifest_of
from distill_rl.store.manifest import FILE, SHARDS, Manifest, description_problems, served_identity, short
from distill_rl.store.store import Store, unmarked
from distill_rl.system.files import size_of, size_text

_TOKEN_BYTES = 6
"""Bytes of a token in a store beside its targets: the token, and its part of the index."""


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
            findings.notes += _notes(f"{opened.key}.store", opened.store)


def _notes(key: str, store: Store) -> Iterator[str]:
    """Yields what is worth knowing of a store that is read from or written to."""
    if note := unmarked(store.shards):
        yield f"{key}: {note}"


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
    """Yields a problem if the model that the settings name is another than the store's.

    A model that is not on this machine is not compared: it is not needed.
    """
    folder, findings = Path(settings.model).expanduser(), Findings()
    if not folder.is_dir():
        found_in_cache = findings.attempt(key, lambda: cached(settings.model, settings.revision))
        if found_in_cache is None:
            return
        folder = found_in_cache
    found = findings.attempt(key, lambda: teacher_identity(settings, folder))
    if found is not None and found != manifest.weights:
        rule = f"must be the model of {settings.store} ({manifest.model}, weights {short(manifest.weights)})"
        remedy = "leave it out, name the same revision and quantization, or capture again"
        yield problem(f"{key}.model", rule, f"{settings.model}, weights {short(found)}", remedy)


def stored_ids_problems(student: Opened, teachers: Sequence[Opened]) -> Iterator[str]:
    """Yields stores whose probabilities are over other ids than the run compares, one line each.

    The teachers must have their `shared` set (`vocabulary_problems`).
    """
    for opened in teachers:
        size = opened.vocabulary_size if opened.shared is None else compared_ids(student, [*teachers])
        if opened.store is not None and opened.tokenizer_hash not in (None, opened.store.manifest.tokenizer):
            rule = f"must be that of {opened.store.folder}: the store keeps its tokens"
            yield problem(f"{opened.key}.tokenizer", rule, opened.tokenizer_hash[:12], "leave it out, or capture again")
        if opened.store is None or size is None or opened.store.manifest.vocabulary_size == size:
            continue
        rule = f"has probabilities of {opened.store.manifest.vocabulary_size:,} ids; this run compares {size:,}"
        yield problem(
            f"{opened.key}.store", rule, str(opened.store.folder), "capture again with a file of this student"
        )


def cache_problems(
    config: Config, teachers: Sequence[Opened], findings: Findings, *, on_gpu: bool, captures: bool
) -> Iterator[str]:
    """Yields a problem for every cache that holds other targets than the run would write, one line each.

    Args:
        teachers: opened, with what is known of their vocabularies.
        findings: gets notes on caches.
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
            store = Store(Path(settings.cache))
            manifest = manifest_of(
                config,
                settings,
                weights=served_identity(settings)
                if settings.backend == "endpoint"
                else teacher_identity(settings, opened.folder),
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
        findings.notes += _notes(f"{opened.key}.cache", store)


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
