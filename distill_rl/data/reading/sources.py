"""Opens the data of a configuration: one source (`data.path`) or several with weights (`data.sources`)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from glob import has_magic
from typing import Literal

import numpy as np

from distill_rl.config.schema import DataConfig
from distill_rl.data.mixture import Interleaved, Mixture
from distill_rl.data.order import random_order
from distill_rl.data.reading import files
from distill_rl.data.reading.block_rows import BlockStore
from distill_rl.data.reading.cache import Cache
from distill_rl.data.reading.layouts import Layout, choose_layout
from distill_rl.data.reading.locate import DataFile, HubError, Loaded, Part, is_hub_name, locate
from distill_rl.data.reading.records import compression_of, kind_of
from distill_rl.data.reading.source import Source
from distill_rl.data.routing import Routing
from distill_rl.errors import DataError
from distill_rl.system.files import size_text

__all__ = ["HubError", "Source", "each_source", "is_hub_name", "open_one", "open_source", "split_validation"]

_VALIDATION_STREAM = 1
_READERS = 16
"""Threads that open files: the footers of a thousand files on a network file system are read side by side."""
_TOLD = 5
"""Most problems of one source that are reported at once."""


def each_source(data: DataConfig) -> list[tuple[str, DataConfig]]:
    """The setting that names each source (`data.path` or `data.sources.1.path`), and the settings that open it."""
    if not data.sources:
        return [("data.path", data)]
    found = []
    for i, source in enumerate(data.sources):
        own = {
            name: getattr(source, name)
            for name in ("split", "subset", "revision", "format", "text_key", "messages_key", "tools_key")
            if getattr(source, name) is not None
        }
        found.append((f"data.sources.{i}.path", replace(data, path=source.path, sources=[], **own)))
    return found


def names_of(data: DataConfig) -> list[str]:
    """A short name per source, for metrics and messages: the end of its path without a glob, numbered if others have it."""
    fixed = [
        [part for part in source.path.split("/") if part not in ("", ".", "..") and not has_magic(part)]
        for source in data.sources
    ]
    ends = [parts[-1] if parts else "files" for parts in fixed]
    names = [end if ends.count(end) == 1 else f"{end}.{i}" for i, end in enumerate(ends)]
    return names if len(set(names)) == len(names) else [f"{end}.{i}" for i, end in enumerate(ends)]


def open_source(
    data: DataConfig,
    *,
    split: Literal["train", "validation"] = "train",
    cache: Cache = Cache(),  # noqa: B008
    routing: Routing | None = None,
) -> Source | Mixture:
    """Opens `data.path` or all of `data.sources`, or `data.validation.path` for split "validation".

    If the data have splits, training reads `data.split`; validation reads "validation" if there is one, otherwise
    `data.split`.

    Args:
        cache: what may be written, and where lines for the user go.
        routing: which teachers a row is for; None: every row is for all of them.

    Raises:
        HubError: a hub name that cannot be reached.
        DataError: what `open_one` finds wrong, of all sources at once; sources of different kinds.
    """
    if split == "validation":
        path = data.validation.path
        settings = data if path == data.path else replace(data, subset=None, revision=None)
        splits = ("validation", data.split)
        return open_one("data.validation.path", settings, path, splits, cache=cache, routing=routing)
    if not data.sources:
        return open_one("data.path", data, cache=cache, routing=routing)
    opened, problems = [], []
    for key, settings in each_source(data):
        try:
            opened.append(open_one(key, settings, cache=cache, routing=routing))
        except HubError:
            raise
        except DataError as error:
            problems += [text if text.startswith(key) else f"{key}: {text}" for text in error.problems]
    if problems:
        raise DataError.many(problems)
    return mixture_of(data, opened)


def mixture_of(data: DataConfig, opened: Sequence[Source]) -> Mixture:
    """The mixture of `data.sources`, once they are open. Raises DataError for a weight of 0 or less, or several kinds."""
    return Mixture(opened, [source.weight for source in data.sources], names_of(data))


def open_one(
    key: str,
    data: DataConfig,
    path: str | None = None,
    splits: Sequence[str] = (),
    *,
    cache: Cache = Cache(),  # noqa: B008
    routing: Routing | None = None,
) -> Source:
    """Opens one source and finds the columns to read.

    With several files, the columns of the first decide between text and messages, and all must have the same main
    column.

    Args:
        key: the setting that names it, for messages.
        data: its settings.
        path, splits: in place of `data.path` and `data.split`.
        routing: which teachers a row is for; None: every row is for all of them.

    Raises:
        HubError: a hub name that cannot be reached.
        DataError: missing path, no rows, no such column or split, rows that are not text or messages, damaged files; up
            to `_TOLD` of these at once.
    """
    path = path or data.path
    if not path:
        raise DataError(key, "a path or a hub name", "nothing")
    strict = data.bad_rows == "fail"
    origins = locate(path, splits or (data.split,), key, data, cache.say)
    layout = _layout_of(origins, data, routing)
    local = [origin.path for origin in origins if isinstance(origin, DataFile)]
    size = sum(files.bytes_in_memory(path) for path in local)
    access = files.Access(cache, BlockStore(), size < files.SMALL_BYTES, strict, data.sample_by)
    counted = [path for path in local if kind_of(path) in (".jsonl", ".json", ".txt") and not compression_of(path)]
    lines = sum(path.stat().st_size for path in counted)
    if not access.small and lines > 1 << 30:
        cache.say(f"counting   the lines of {path} ({size_text(lines)})")

    def opened(origin: DataFile | Loaded) -> Part | DataError | None:
        try:
            return origin.open(layout, access)
        except files.EmptyFile as error:
            return error if strict or len(origins) == 1 else None
        except DataError as error:
            return error

    with ThreadPoolExecutor(_READERS if len(origins) > 1 else 1) as pool:
        results = list(pool.map(opened, origins))
    problems = [line for result in results if isinstance(result, DataError) for line in result.problems]
    if problems:
        more = [f"{key}: {len(problems) - _TOLD} further files have problems"] if len(problems) > _TOLD else []
        raise DataError.many(problems[:_TOLD] + more)
    parts = [result for result in results if isinstance(result, Part)]
    if not sum(len(part.rows) for part in parts):
        raise DataError(key, "at least one row", f"an empty data set at {path}")
    content = [file for origin in origins for file in origin.content]
    reading = ""
    if data.sample_by != "line" and any(path.name.endswith((".txt", ".txt.gz", ".txt.zst")) for path in local):
        reading = data.sample_by
    return Source(parts, layout=layout, paths=content, store=access.store, large=not access.small, reading=reading)


def _layout_of(origins: Sequence[DataFile | Loaded], data: DataConfig, routing: Routing | None) -> Layout:
    """The layout of the first file that has rows.

    Raises:
        EmptyFile: with `data.bad_rows: fail`, the first file is empty; otherwise all are.
        DataError: as for `choose_layout`.
    """
    for origin in origins[:-1]:
        try:
            return choose_layout(origin.columns(), data, origin.name, routing)
        except files.EmptyFile:
            if data.bad_rows == "fail":
                raise
    return choose_layout(origins[-1].columns(), data, origins[-1].name, routing)


def split_validation(
    source: Source | Mixture,
    data: DataConfig,
    seed: int,
    *,
    cache: Cache = Cache(),  # noqa: B008
    routing: Routing | None = None,
) -> tuple[Source | Mixture, Source | Interleaved | None]:
    """The rows to train on, and the rows to validate on; None for the latter if validation is off.

    Opens `data.validation.path` if it is set. Otherwise holds out the fraction `data.validation.fraction` of the rows of
    every source, at least one and never all; only `seed` decides which. Both parts keep the order of the source. A
    fraction of 0 or less is off.

    Raises:
        DataError: chats to validate on beside texts to train on, or the reverse; a fraction of 1 or more, or fewer than
            two rows to divide; whatever `open_source` raises.
    """
    if data.validation.path:
        validation = open_source(data, split="validation", cache=cache, routing=routing)
        assert isinstance(validation, Source)
        if validation.kind != source.kind:
            names = {"text": "rows of text", "messages": "chats"}
            rule = f"{names[source.kind]}, as {'data.sources have' if data.sources else 'data.path has'}"
            found = f"{names[validation.kind]} in {data.validation.path}"
            raise DataError("data.validation.path", rule, found, "give both in the same form")
        return source, validation
    if data.validation.fraction <= 0:
        return source, None
    if isinstance(source, Source):
        return _hold_out(source, data.validation.fraction, seed)
    parts = [_hold_out(part, data.validation.fraction, seed, name) for part, name in zip(source.sources, source.names)]
    training = Mixture([part for part, _ in parts], source.weights, source.names)
    return training, Interleaved(training, [part for _, part in parts], data.validation.max_documents)


def _hold_out(source: Source, fraction: float, seed: int, name: str = "") -> tuple[Source, Source]:
    """A source without some of its rows, and these.

    Args:
        name: of one of several sources, for messages.

    Raises:
        DataError: a fraction of 1 or more, or fewer than two rows.
    """
    if len(source) < 2 or fraction >= 1:
        found = f"{fraction} of {len(source)} rows{f' of {name}' if name else ''}"
        raise DataError("data.validation.fraction", "a fraction below 1 of at least two rows", found)
    count = min(max(round(fraction * len(source)), 1), len(source) - 1)
    rows = np.sort(random_order(seed, (_VALIDATION_STREAM,), len(source))[:count])
    description = f"seed {seed}, {count} rows held out"
    return source.divide(rows, described=(f"training: {description}", f"validation: {description}"))
