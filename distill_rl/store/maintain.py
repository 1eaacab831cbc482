"""What is done with stores beside filling and reading them: description, verification, merging, export."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distill_rl.errors import StoreError, first_line
from distill_rl.store import store as stores
from distill_rl.store.store import Manifest, Shard, Store
from distill_rl.system.files import replacing

if TYPE_CHECKING:
    import pyarrow as pa

_SAMPLED = 256
"""Records of which the retained probability is measured."""
_BINS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0)
"""Upper ends of the histogram of retained probability."""
_BAR = 40
_ROW_GROUP = 256
"""Pieces that are decoded at once for a Parquet file."""


def info(folder: Path) -> Iterator[str]:
    """Yields lines on the teacher, the contents, the size per token and the retained probability of a store.

    Raises:
        StoreError: no store, or a damaged one.
    """
    store = Store(folder)
    manifest, tokens = store.manifest, sum(shard.num_tokens for shard in store.shards)
    revision = f" at {manifest.revision}" if manifest.revision else ""
    weights = f"weights {manifest.weights[:12]}"
    if manifest.dtype == stores.SERVED:
        weights = f"{manifest.weights}, weights not known"
    yield f"teacher    {manifest.model}{revision}, {weights}, tokenizer {manifest.tokenizer[:12]}"
    what = {"topk": f"top {manifest.entries}", "sampled": f"{manifest.entries} draws"}[manifest.kind]
    yield (
        f"targets    {what} of {manifest.vocabulary_size:,} ids at temperature {manifest.temperature:g}, "
        f"{manifest.wire_dtype}, format {manifest.format}"
    )
    documents, pieces = _distinct(store)
    whole = sum(int((shard.whole & (shard.first == 0)).sum()) for shard in store.shards)
    twice = len(store) - pieces
    yield f"documents  {documents:,} in {len(store):,} pieces, {whole:,} of them whole documents"
    if note := stores.unmarked(store.shards):
        yield f"note       {note}"
    if twice:
        yield f"twice      {twice:,} pieces; `distill-rl store merge` leaves them out"
    sizes = Counter[str]()
    for shard in store.shards:
        sizes.update(shard.column_bytes())
    total = sizes.total()
    yield f"tokens     {tokens:,} in {len(store.shards):,} files of {total / 2**20:,.1f} MiB"
    if tokens:
        parts = ", ".join(f"{name} {size / tokens:.1f}" for name, size in sizes.items())
        yield f"size       {total / tokens:.1f} bytes per token ({parts})"
        yield from _retained(store)


def _distinct(store: Store) -> tuple[int, int]:
    """Number of different documents, and of different pieces of them."""
    if not len(store):
        return 0, 0
    names = np.concatenate([shard.names for shard in store.shards])
    places = [np.stack([shard.first, shard.length], axis=1) for shard in store.shards]
    pieces = np.concatenate([names, np.concatenate(places).astype("<i8").view(np.uint8)], axis=1)

    def count(rows: np.ndarray) -> int:
        return len(np.unique(np.ascontiguousarray(rows).view(f"V{rows.shape[1]}")))

    return count(names), count(pieces)


def _retained(store: Store) -> Iterator[str]:
    """Yields how much of the teacher's probability the stored entries hold, over a sample of the records."""
    count = len(store)
    places = np.unique(np.linspace(0, count - 1, min(_SAMPLED, count)).astype(int))
    ends = np.cumsum([len(shard) for shard in store.shards])
    masses = []
    for place in places:
        shard = int(np.searchsorted(ends, place, "right"))
        record = int(place - (ends[shard - 1] if shard else 0))
        columns = stores.decoded(store.manifest, store.shards[shard], record)
        if "rest_logprob" not in columns:
            return
        masses.append(-np.expm1(np.minimum(columns["rest_logprob"].values.astype(np.float64), 0)))
    mass = np.concatenate(masses)
    quantiles = np.quantile(mass, [0.05, 0.5])
    yield (
        f"retained   {mass.mean():.4f} of the probability on average, median {quantiles[1]:.4f}, "
        f"95 % of the tokens above {quantiles[0]:.4f} (a sample of {len(mass):,} tokens)"
    )
    counts, _ = np.histogram(np.clip(mass, 0, 1), bins=[0, *_BINS[:-1], 1 + 1e-12])
    for lower, upper, number in zip([0.0, *_BINS], _BINS, counts):
        share = number / len(mass)
        yield f"           {lower:<5g} to {upper:<5g} {100 * share:5.1f} % {'#' * round(_BAR * share)}".rstrip()


def verify(folder: Path) -> tuple[str, list[str]]:
    """Reads every byte of a store.

    Returns:
        A line on what was read, and a line for everything that is damaged or of another store: file, place, remedy.

    Raises:
        StoreError: no store, or its manifest is damaged.
    """
    manifest = stores.read_manifest(folder)
    problems, records, tokens = [*stores.description_problems(folder, manifest)], 0, 0
    files, shards = stores.shard_files(folder), []
    for path in files:
        try:
            shard = Shard(path)
            stores.require_own(manifest, [shard])
        except StoreError as error:
            problems += error.problems
            continue
        problems += shard.problems() or _undecodable(manifest, shard)
        shards.append(shard)
        records, tokens = records + len(shard), tokens + shard.num_tokens
    summary = f"verified   {len(files):,} files, {records:,} pieces, {tokens:,} tokens: every checksum matches"
    note = stores.unmarked(shards)
    return (f"{summary}; {note}" if note else summary), problems


def _undecodable(manifest: Manifest, shard: Shard) -> Iterator[str]:
    """Yields records that cannot be decoded although their checksums match, one line each."""
    for i in range(len(shard)):
        try:
            stores.decoded(manifest, shard, i)
        except StoreError as error:
            yield from error.problems


def merge(folders: Sequence[Path], out: Path) -> str:
    """Copies all pieces of some stores into another, which may exist; a piece that it has is not copied again.

    Returns a line on what was copied.

    Raises:
        StoreError: the stores hold different targets, one is damaged, or `out` cannot be written.
    """
    opened = [Store(folder) for folder in folders]
    first = opened[0].manifest
    for store in opened[1:]:
        stores.require_same(folders[0], store.manifest)
    stores.make_store(out, first, [folders[0] / stores.TEACHER])
    target = Store(out)
    writer = stores.StoreWriter(target, write_every_s=float("inf"))
    copied = skipped = 0
    for store in opened:
        for shard in store.shards:
            for i in range(len(shard)):
                piece, tokens = shard.piece(i), shard.tokens(i)
                found = target.find(piece, tokens)
                if writer.holds(piece, tokens) or (found is not None and not found.in_context):
                    skipped += 1
                    continue
                writer.add(piece, tokens, shard.targets(i), encoded=True)
                writer.flush_if_due()
                copied += 1
    writer.flush()
    note = stores.unmarked([shard for store in opened for shard in store.shards])
    return f"merged     {copied:,} pieces into {out}; {skipped:,} were there already" + (f"; {note}" if note else "")


def export(folder: Path, out: Path) -> str:
    """Writes a store as Parquet: one file per shard, a row per piece, lists per token. Returns a line on what was written.

    Columns: `document` (hex), `first`, `prefix`, `whole`, `tokens`, then the targets by name.

    Raises:
        StoreError: the store is damaged, or `out` is not a new folder that can be written.
    """
    store = Store(folder)
    if out.exists():
        raise StoreError(f"{out}", "must be a new folder", "it exists", "choose another one with --out")
    try:
        with replacing(out) as new:
            for number, shard in enumerate(store.shards):
                _write_parquet(store.manifest, shard, new / f"{number:05}.parquet")
    except OSError as error:
        remedy = "free some space or choose another folder"
        raise StoreError(f"{out}", "must be writable", first_line(error), remedy) from error
    tokens = sum(shard.num_tokens for shard in store.shards)
    return f"exported   {len(store):,} pieces, {tokens:,} tokens to {len(store.shards):,} Parquet files in {out}"


def _write_parquet(manifest: Manifest, shard: Shard, path: Path) -> None:
    """Writes one shard, in groups of pieces, so that a shard need not fit into memory when it is decoded."""
    import pyarrow as pa
    from pyarrow import parquet

    schema = None  # of the first piece: an empty list has no type of its own
    with ExitStack() as opened:
        for start in range(0, len(shard), _ROW_GROUP):
            rows = [_parquet_row(manifest, shard, i) for i in range(start, min(start + _ROW_GROUP, len(shard)))]
            if schema is None:
                schema = pa.schema({name: _parquet_type(value) for name, value in rows[0].items()})
                writer = opened.enter_context(parquet.ParquetWriter(path, schema))
            columns = {name: [_lists(row[name]) for row in rows] for name in schema.names}
            writer.write_table(pa.table(columns, schema))


def _parquet_row(manifest: Manifest, shard: Shard, record: int) -> dict[str, Any]:
    """A piece and its targets, by the names of the columns; bfloat16 becomes float32, which Parquet has."""
    piece = shard.piece(record)
    row = {
        "document": piece.name.hex(),
        "first": piece.first,
        "prefix": piece.prefix,
        "whole": piece.whole,
        "tokens": shard.tokens(record),
    }
    for name, column in stores.decoded(manifest, shard, record).items():
        is_bfloat16 = column.dtype == "BF16"
        row[name] = (column.values.astype(np.int32) << 16).view(np.float32) if is_bfloat16 else column.values
    return row


def _parquet_type(value: Any) -> pa.DataType:
    """The type of a column: that of the value, and a list for every dimension of an array."""
    import pyarrow as pa

    if not isinstance(value, np.ndarray):
        return pa.scalar(value).type
    kind = pa.from_numpy_dtype(value.dtype)
    for _ in range(value.ndim):
        kind = pa.list_(kind)
    return kind


def _lists(value: Any) -> Any:
    return list(value) if isinstance(value, np.ndarray) and value.ndim > 1 else value
