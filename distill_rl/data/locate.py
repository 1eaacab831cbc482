"""Resolves `data.path` to files, Arrow folders or a hub data set."""

from __future__ import annotations

import difflib
import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from distill_rl.data import files
from distill_rl.data.layouts import Layout
from distill_rl.data.rows import check_type
from distill_rl.errors import DataError

if TYPE_CHECKING:
    import datasets

CHECK_BYTES = 256 << 20
"""Memory-mapped columns up to this size are checked when they are opened; larger ones as their rows are read."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_HUB_PROBE_S = 10.0
_FOLDER_FILES = ("state.json", "dataset_info.json", "dataset_dict.json")


class HubError(DataError):
    """A hub data set that cannot be reached from here, so it may or may not exist."""


@dataclass(frozen=True, slots=True)
class Part:
    """The opened rows of a file, an Arrow folder or a hub data set, with only the columns of a layout."""

    name: str
    rows: files.Rows


@dataclass(frozen=True, slots=True)
class DataFile:
    """One Arrow, Parquet or JSON file."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def content(self) -> list[Path]:
        """The files that hold the rows."""
        return [self.path]

    def columns(self) -> list[str]:
        return files.column_names(self.path)

    def open(self, layout: Layout) -> Part:
        """Reads the columns of the layout, checked.

        Rows of an Arrow file are checked only if they have at most `CHECK_BYTES`, the main column's type always. A
        large Parquet or JSON file is checked when it is first converted (`files.open_file`).

        Raises:
            DataError: a missing column; a damaged file; a column of another type; a row that does not fit the layout; a
                Parquet or JSON file without rows.
        """
        if self.path.suffix == ".arrow":
            return Loaded(self.name, files.open_arrow(self.path, layout)).open(layout)
        return Part(self.name, files.open_file(self.path, layout))


@dataclass(frozen=True, slots=True)
class Loaded:
    """A data set that `datasets` has opened: an Arrow file or folder, or a hub data set."""

    name: str
    dataset: datasets.Dataset

    @property
    def content(self) -> list[Path]:
        """The Arrow files that `datasets` has mapped for the rows; empty for a single Arrow file."""
        return [Path(file["filename"]) for file in self.dataset.cache_files]

    def columns(self) -> list[str]:
        return self.dataset.column_names

    def open(self, layout: Layout) -> Part:
        """The columns of the layout: the type of the main one is checked, rows up to `CHECK_BYTES`.

        Raises:
            DataError: a missing column; a column of another type; a row that does not fit the layout.
        """
        dataset = self.dataset.select_columns(layout.columns(self.columns(), self.name))
        table = dataset.data
        if layout.format in ("text", "messages"):
            check_type(table.column(layout.key).type, layout.kind, f"{self.name}, column {layout.key!r}")
        if table.nbytes <= CHECK_BYTES:
            files.check_columns(table, layout, f"{self.name},")
        return Part(self.name, dataset)


def locate(path: str, splits: Sequence[str], setting: str) -> list[DataFile | Loaded]:
    """Everything that `path` names, sorted by path: files, Arrow folders, or one hub data set, which may be downloaded.

    Files are not opened yet. Folders and hub data sets are, which turns off the progress bars of `datasets`.

    Args:
        path: a file, a folder of `datasets.save_to_disk`, a glob of either, or a hub name if nothing local has it.
        splits: if the data have splits, the first of these that exists is read.
        setting: the config key that holds `path`, for error messages.

    Raises:
        HubError: a hub name that cannot be reached.
        DataError: nothing there, no such split, damaged folders.
    """
    local = _local_paths(path, setting)
    if not local:
        return [_open_hub(path, splits, setting)]
    return [_open_folder(entry, splits, setting) if entry.is_dir() else DataFile(entry) for entry in local]


def is_hub_name(path: str) -> bool:
    """Whether `path` can only be a hub data set: it has the form of a hub name, and nothing local has that name.

    A name with an owner is not one if a folder with the owner's name exists here. Asks no hub.
    """
    if not _HUB_NAME.fullmatch(path) or path.endswith(files.SUFFIXES) or Path(path).exists():
        return False
    owner, slash, _ = path.partition("/")
    return not (slash and Path(owner).is_dir())


def _local_paths(path: str, setting: str) -> list[Path]:
    """The files and folders that `path` names, sorted; empty for a hub name.

    A glob matches data files and Arrow folders, but not the files inside those folders.

    Args:
        setting: the config key that holds `path`, for error messages.

    Raises:
        DataError: nothing there, a glob without a match, or a file that is not a data file.
    """
    if glob.has_magic(path) and not Path(path).exists():
        found = sorted(Path(entry) for entry in glob.glob(path, recursive=True))  # noqa: PTH207 (Path.glob takes no absolute pattern)
        folders = {entry for entry in found if _is_arrow_folder(entry)}
        found = [entry for entry in found if entry in folders or (_is_data_file(entry) and entry.parent not in folders)]
        if not found:
            raise DataError(setting, f"a glob that matches {', '.join(files.SUFFIXES)} files or Arrow folders", path)
        return found
    entry = Path(path)
    if entry.is_dir():
        return [entry]
    if entry.exists():
        if entry.suffix not in files.SUFFIXES:
            raise DataError(setting, f"a folder or a file ending in {', '.join(files.SUFFIXES)}", path)
        return [entry]
    if is_hub_name(path):
        return []
    raise DataError(setting, "an existing file, folder or glob, or a hub name", path, _nearby(entry))


def _is_data_file(path: Path) -> bool:
    """Whether a path is an Arrow, Parquet or JSON file, and not one that describes an Arrow folder."""
    return path.is_file() and path.suffix in files.SUFFIXES and path.name not in _FOLDER_FILES


def _is_arrow_folder(path: Path) -> bool:
    """Whether a folder was written by `datasets.save_to_disk`, with or without splits."""
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _nearby(path: Path) -> str:
    """The remedy for a path that does not exist: the most similar name in its folder, otherwise "check the path"."""
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {path.parent / close[0]}?" if close else "check the path"


def _open_folder(path: Path, splits: Sequence[str], setting: str) -> Loaded:
    """The data set in a folder written by `datasets.save_to_disk`; of several splits the first of `splits` that it has.

    Args:
        setting: the config key that names the folder, for error messages.

    Raises:
        DataError: another kind of folder, a damaged one, or none of the splits.
    """
    if not _is_arrow_folder(path):
        inside = sorted({entry.suffix for entry in path.rglob("*") if entry.suffix in files.SUFFIXES})
        remedy = f"name its files with a glob: {path}/**/*{inside[0]}" if inside else "it holds no data files"
        raise DataError(setting, "a folder written by datasets.save_to_disk", str(path), remedy)
    import datasets

    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_from_disk(str(path))
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DataError(
            str(path), "a complete Arrow folder", str(error)[:200], "a file may be missing or truncated"
        ) from error
    return Loaded(str(path), _pick_split(loaded, splits, str(path)))


def _pick_split(loaded: Any, splits: Sequence[str], name: str) -> datasets.Dataset:
    """The data set itself if it has no splits, otherwise the first of `splits` that it has.

    Args:
        loaded: a `Dataset` or `DatasetDict`.
        name: of the data, for error messages.

    Raises:
        DataError: none of the splits.
    """
    import datasets

    if isinstance(loaded, datasets.Dataset):
        return loaded
    for split in splits:
        if split in loaded:
            return loaded[split]
    raise DataError(name, f"has the split {splits[-1]!r}", f"the splits {sorted(loaded)}", "set data.split")


def _open_hub(name: str, splits: Sequence[str], setting: str) -> Loaded:
    """A hub data set, downloaded if necessary; only from the local cache if the hub library is offline.

    If it is not offline, the hub is probed first, for at most 10 s.

    Args:
        name: as on the hub.
        splits: the first of these that exists is taken, if there are splits.
        setting: the config key that holds the name, for error messages.

    Raises:
        HubError: the hub cannot be reached or, offline, the data set is not in the cache.
        DataError: no such data set or no right to read it; one that `datasets` cannot load; none of the splits.
    """
    import datasets
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    offline = huggingface_hub.constants.HF_HUB_OFFLINE
    unreachable = HubError(
        setting,
        "an existing path, or a hub data set that can be reached",
        name,
        "check the name, the network, HF_HOME and HF_HUB_OFFLINE",
    )
    if not offline:
        # Probe first: `load_dataset` would retry an unreachable hub for more than 20 seconds.
        try:
            huggingface_hub.HfApi().dataset_info(name, timeout=_HUB_PROBE_S)
        except RepositoryNotFoundError as error:
            raise DataError(setting, "a path, or a hub data set that you may read", name, "check the name") from error
        except Exception as error:  # HTTP and socket errors; their classes depend on the HTTP client of the hub library
            raise unreachable from error
    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_dataset(name)
    except Exception as error:  # the builder of a data set may raise anything
        if offline and isinstance(error, OSError):
            raise unreachable from error
        raise DataError(setting, "a hub data set that `datasets` can load", f"{name}: {str(error)[:200]}") from error
    return Loaded(name, _pick_split(loaded, splits, name))
