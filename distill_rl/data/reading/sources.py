"""Opens the data of a configuration, one source (`data.path`) or several with weights (`data.sources`): what a path names, and its rows."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from distill_rl.config.schema import DataConfig
from distill_rl.data.order import random_order
from distill_rl.data.reading import files
from distill_rl.data.reading.cache import Cache
from distill_rl.data.reading.files import BlockStore, SameFile, TableRows, check_type, restore_of
from distill_rl.data.reading.layouts import KINDS, RowLayout, choose_layout
from distill_rl.data.reading.records import SampleBy, compression_of, kind_of
from distill_rl.data.reading.source import Interleaved, MixedSource, Mixture, Source
from distill_rl.data.routing import Routing
from distill_rl.errors import DataError
from distill_rl.system.files import nearby, size_text

if TYPE_CHECKING:
    import datasets

CHECK_BYTES = 256 << 20
"""Memory-mapped columns up to this size are checked when they are opened; larger ones as their rows are read."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_HUB_PROBE_S = 10.0
_FOLDER_FILES = ("state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
_SPLITS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}
"""Split → the words in names of files and folders that mean it; those of `datasets`."""


class HubError(DataError):
    """A hub data set that cannot be reached from here, so it may or may not exist."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file that is not part of an Arrow folder."""

    path: Path
    sample_by: SampleBy = "line"
    strict: bool = True
    """Whether a bad row is an error."""

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def content(self) -> list[Path]:
        """The files that hold the rows."""
        return [self.path]

    def columns(self) -> list[str]:
        return files.column_names(self.path, self.sample_by, strict=self.strict)

    def open(self, layout: RowLayout, access: files.Access) -> files.SourcePart:
        """Opens the columns of the layout.

        Rows are checked now if they are few (`CHECK_BYTES` of an Arrow file; `files.Access.small`) and `access.strict`,
        otherwise as they are read; the main column's type always.

        Raises:
            DataError: a missing column; a damaged file; a column of another type; a row that does not fit the layout; a
                file without rows, other than an Arrow file.
        """
        if kind_of(self.path) == ".arrow":
            return Loaded(self.name, files.open_arrow(self.path), [self.path]).open(layout, access)
        return files.SourcePart(self.name, files.open_file(self.path, layout, access), layout)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A memory-mapped table: an Arrow file, or what `datasets` has opened, an Arrow folder or a hub data set."""

    name: str
    table: pa.Table
    content: list[Path] = field(default_factory=list)
    """The Arrow files that are mapped for the rows. One of them in turn is looked at before every row: it must not change."""

    @classmethod
    def of(cls, name: str, dataset: datasets.Dataset) -> Loaded:
        """A data set whose rows are those of its table, as they are after loading."""
        return cls(name, dataset.data.table, [Path(file["filename"]) for file in dataset.cache_files])

    def columns(self) -> list[str]:
        return list(self.table.column_names)

    def open(self, layout: RowLayout, access: files.Access) -> files.SourcePart:
        """The columns of the layout: the type of the main one is checked, with `access.strict` rows up to `CHECK_BYTES`.

        Raises:
            DataError: a missing column, or one twice; a column of another type; a row that does not fit the layout.
        """
        table = self.table.select(layout.columns(self.columns(), self.name))
        restore = restore_of(table.schema, layout.key, self.name)
        if layout.format in ("text", "messages"):
            check_type(table.column(layout.key).type, layout.kind, f"{self.name}, column {layout.key!r}")
        rows = TableRows(table, restore)
        if self.content:
            watched = cycle([SameFile(path) for path in self.content])
            rows.before = lambda: next(watched).require()
        part = files.SourcePart(self.name, rows, layout)
        if access.strict and table.nbytes <= CHECK_BYTES:
            part.check(table)
        return part


def locate(
    path: str, splits: Sequence[str], setting: str, data: DataConfig, say: Callable[[str], None]
) -> list[DataFile | Loaded]:
    """Everything that `path` names, sorted by path: files, Arrow folders, or one hub data set, which may be downloaded.

    Files are not opened yet. Folders and hub data sets are, which turns off the progress bars of `datasets`.

    Args:
        path: a file, a folder of files or of `datasets.save_to_disk`, a glob, or a hub name if nothing local has it.
        splits: if the data have splits, the first of these that exists is read.
        setting: the config key that holds `path`, for error messages.
        data: subset and revision of a hub data set, what a row of a text file is, and whether bad rows are skipped.
        say: called with a line if files of a folder are left out because of their names.

    Raises:
        HubError: a hub name that cannot be reached.
        DataError: nothing there, no such split, damaged folders.
    """
    local = _local_paths(path, splits, setting, say)
    if not local:
        return [_open_hub(path, splits, setting, data)]
    read = partial(DataFile, sample_by=data.sample_by, strict=data.bad_rows == "fail")
    return [_open_folder(entry, splits) if entry.is_dir() else read(entry) for entry in local]


def is_hub_name(path: str) -> bool:
    """Whether `path` can only be a hub data set: it has the form of a hub name, and nothing local has that name.

    A name with an owner is not one if a folder with the owner's name exists here. Asks no hub.
    """
    if not _HUB_NAME.fullmatch(path) or path.lower().endswith(files.SUFFIXES) or Path(path).exists():
        return False
    owner, slash, _ = path.partition("/")
    return not (slash and Path(owner).is_dir())


def _local_paths(path: str, splits: Sequence[str], setting: str, say: Callable[[str], None]) -> list[Path]:
    """The files and folders that `path` names, sorted; empty for a hub name."""
    # A glob matches data files and Arrow folders, but not the files inside those folders. A folder stands for all data
    # files below it.
    entry = Path(path).expanduser()
    if glob.has_magic(path) and not entry.exists():
        found = sorted(Path(name) for name in glob.glob(str(entry), recursive=True))  # noqa: PTH207 (Path.glob takes no absolute pattern)
        folders = {name for name in found if _is_arrow_folder(name)}
        found = [name for name in found if name in folders or (_is_data_file(name) and name.parent not in folders)]
        found = found if kind_of(Path(path)) == ".txt" else _without_notes(found)
        if not found:
            raise DataError(setting, f"a glob that matches {', '.join(files.SUFFIXES)} files or Arrow folders", path)
        return found
    if entry.is_dir():
        return [entry] if _is_arrow_folder(entry) else _data_below(entry, splits, setting, say)
    if entry.exists():
        if not entry.name.lower().endswith(files.SUFFIXES):
            raise DataError(setting, f"a folder or a file ending in {', '.join(files.SUFFIXES)}", path)
        return [entry]
    if is_hub_name(path):
        return []
    raise DataError(setting, "an existing file, folder or glob, or a hub name", path, nearby(entry) or "check the path")


def _data_below(folder: Path, splits: Sequence[str], setting: str, say: Callable[[str], None]) -> list[Path]:
    """The data files and Arrow folders in a folder and its subfolders, sorted; hidden ones are left out."""
    # If names of files or subfolders say `train`, `validation` or `test` (or a usual short form), the folder has these
    # splits, as for `datasets`, and the first of `splits` among them is read.
    found = _without_notes(sorted(_walk(folder)))
    if not found:
        rule = f"a folder with files that end in {', '.join(files.SUFFIXES)}, or one of datasets.save_to_disk"
        raise DataError(setting, rule, str(folder), "it holds no data files")
    by_split: dict[str, list[Path]] = {}
    for path in found:
        if split := _split_of(path.relative_to(folder), splits):
            by_split.setdefault(split, []).append(path)
    if not by_split:
        return found
    for split in splits:
        if split in by_split:
            if (count := len(by_split[split])) < len(found):
                say(f"reading    {count} of the {len(found)} files in {folder}: those of its split {split}")
            return by_split[split]
    raise DataError(str(folder), f"has the split {splits[-1]!r}", f"the splits {sorted(by_split)}", "set data.split")


def _walk(folder: Path) -> Iterator[Path]:
    """Yields the data files and Arrow folders in a folder and its subfolders, links included; hidden ones are left out."""
    seen: set[Path] = set()
    for name, subfolders, names in os.walk(folder, followlinks=True):
        here = Path(name)
        if (real := here.resolve()) in seen:  # a link that leads back
            subfolders.clear()
            continue
        seen.add(real)
        if _is_arrow_folder(here):
            subfolders.clear()
            yield here
            continue
        subfolders[:] = [subfolder for subfolder in subfolders if not subfolder.startswith(".")]
        yield from (here / name for name in names if not name.startswith(".") and _is_data_file(here / name))


def _split_of(path: Path, wanted: Sequence[str]) -> str:
    """The split that a relative path names, as `wanted` names it if it does; empty if it names none."""
    words = {word for part in path.parts for word in re.split(r"[^a-z]+", part.lower())}
    for split in wanted:
        if split.lower() in words:
            return split
    return next((split for split, names in _SPLITS.items() if names & words), "")


def _without_notes(paths: list[Path]) -> list[Path]:
    """The paths without text files, if there are others: a README.txt beside Parquet files is no data."""
    others = [path for path in paths if kind_of(path) != ".txt"]
    return others or paths


def _is_data_file(path: Path) -> bool:
    """Whether a path is a data file by its name, and not one that describes a data set."""
    return path.is_file() and path.name.lower().endswith(files.SUFFIXES) and path.name not in _FOLDER_FILES


def _is_arrow_folder(path: Path) -> bool:
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _open_folder(path: Path, splits: Sequence[str]) -> Loaded:
    """The data set in a folder written by `datasets.save_to_disk`; of several splits the first of `splits` that it has."""
    import datasets

    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_from_disk(str(path))
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        remedy = "a file may be missing or truncated"
        raise DataError(str(path), "a complete Arrow folder", str(error)[:200], remedy) from error
    return Loaded.of(str(path), _pick_split(loaded, splits, str(path)))


def _pick_split(loaded: Any, splits: Sequence[str], name: str) -> datasets.Dataset:
    """The data set itself if it has no splits, otherwise the first of `splits` that it has."""
    if not isinstance(loaded, dict):
        return loaded
    for split in splits:
        if split in loaded:
            return loaded[split]
    raise DataError(name, f"has the split {splits[-1]!r}", f"the splits {sorted(loaded)}", "set data.split")


def _open_hub(name: str, splits: Sequence[str], setting: str, data: DataConfig) -> Loaded:
    """A hub data set, downloaded if necessary; only from the local cache if the hub library is offline."""
    # If it is not offline, the hub is probed first, for at most 10 s.
    import datasets
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    offline = huggingface_hub.constants.HF_HUB_OFFLINE
    remedy = "check the name, the network, HF_HOME and HF_HUB_OFFLINE"
    unreachable = HubError(setting, "an existing path, or a hub data set that can be reached", name, remedy)
    if not offline:
        # Probe first: `load_dataset` would retry an unreachable hub for more than 20 seconds.
        try:
            huggingface_hub.HfApi().dataset_info(name, revision=data.revision, timeout=_HUB_PROBE_S)
        except RevisionNotFoundError as error:
            raise DataError(setting, "a revision of the data set", f"{data.revision} of {name}") from error
        except RepositoryNotFoundError as error:
            raise DataError(setting, "a path, or a hub data set that you may read", name, "check the name") from error
        except Exception as error:  # HTTP and socket errors; their classes depend on the HTTP client of the hub library
            raise unreachable from error
    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_dataset(name, data.subset, revision=data.revision)
    except Exception as error:  # the builder of a data set may raise anything
        if offline and isinstance(error, OSError):
            raise unreachable from error
        raise DataError(setting, "a hub data set that `datasets` can load", f"{name}: {str(error)[:200]}") from error
    return Loaded.of(name, _pick_split(loaded, splits, name))


# Opens the data of a configuration: one source (`data.path`) or several with weights (`data.sources`).

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
        [part for part in source.path.split("/") if part not in ("", ".", "..") and not glob.has_magic(part)]
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
    DataError.raise_all(problems)
    return mixture_of(data, opened)


def mixture_of(data: DataConfig, opened: Sequence[Source]) -> Mixture:
    """The mixture of `data.sources`, once they are open. Raises DataError for a weight of 0 or less, or several kinds."""
    names = names_of(data)
    return Mixture([MixedSource(source, data.sources[i].weight, names[i]) for i, source in enumerate(opened)])


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

    def opened(origin: DataFile | Loaded) -> files.SourcePart | DataError | None:
        try:
            return origin.open(layout, access)
        except DataError as error:
            is_left_out = isinstance(error, files.EmptyFile) and not strict and len(origins) > 1
            return None if is_left_out else error

    with ThreadPoolExecutor(_READERS if len(origins) > 1 else 1) as pool:
        results = list(pool.map(opened, origins))
    problems = [line for result in results if isinstance(result, DataError) for line in result.problems]
    if problems:
        more = [f"{key}: {len(problems) - _TOLD} further files have problems"] if len(problems) > _TOLD else []
        raise DataError.many(problems[:_TOLD] + more)
    parts = [result for result in results if isinstance(result, files.SourcePart)]
    if not sum(len(part.rows) for part in parts):
        raise DataError(key, "at least one row", f"an empty data set at {path}")
    content = [file for origin in origins for file in origin.content]
    reading = ""
    if data.sample_by != "line" and any(path.name.endswith((".txt", ".txt.gz", ".txt.zst")) for path in local):
        reading = data.sample_by
    return Source(parts, layout=layout, paths=content, store=access.store, large=not access.small, reading=reading)


def _layout_of(origins: Sequence[DataFile | Loaded], data: DataConfig, routing: Routing | None) -> RowLayout:
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
            rule = f"{KINDS[source.kind]}, as {'data.sources have' if data.sources else 'data.path has'}"
            found = f"{KINDS[validation.kind]} in {data.validation.path}"
            raise DataError("data.validation.path", rule, found, "give both in the same form")
        return source, validation
    if data.validation.fraction <= 0:
        return source, None
    if isinstance(source, Source):
        return _hold_out(source, data.validation.fraction, seed)
    kept, held_out = [], []
    for member in source.members:
        rest, part = _hold_out(member.source, data.validation.fraction, seed, member.name)
        kept.append(replace(member, source=rest))
        held_out.append(replace(member, source=part))
    return Mixture(kept), Interleaved(held_out, data.validation.max_documents)


def _hold_out(source: Source, fraction: float, seed: int, name: str = "") -> tuple[Source, Source]:
    if len(source) < 2 or fraction >= 1:
        found = f"{fraction} of {len(source)} rows{f' of {name}' if name else ''}"
        raise DataError("data.validation.fraction", "a fraction below 1 of at least two rows", found)
    count = min(max(round(fraction * len(source)), 1), len(source) - 1)
    rows = np.sort(random_order(seed, (_VALIDATION_STREAM,), len(source))[:count])
    return source.divide(rows, f"seed {seed}, {count} rows held out")
