"""Finds the data of a suite in files, copies of hub repositories, folders of `datasets` and original archives.

`read_split` also reads what `find` finds.

`find` looks for a split in these places and takes the first that has files:

1. the folders named after the data set, up to two levels below `data`, then `data` itself (`_roots`). A folder of the
   hub's cache stands for its current snapshot;
2. in each of them, the folder itself, then its subfolders main, all, default and data (`_in_root`);
3. otherwise one folder per subject, joined;
4. otherwise a file in `data` itself that is named after the data set (`_lone`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from distill_rl.errors import DataError
from distill_rl.evals.data.read import SUFFIXES, Columns, Row, read_rows, require_columns

_PARTS = ("main", "all", "default", "data")
"""Folders between a data set's folder and its files: configurations of a hub repository, the content of an archive."""
_METADATA_FILES = ("state.json", "dataset_info.json", "dataset_dict.json", "dataset_infos.json")
_SHARD = re.compile(r"-\d+-of-\d+$")


@dataclass(frozen=True, slots=True)
class DataSetNames:
    """The names of a data set's folders and files, in lower case and without punctuation."""

    aliases: tuple[str, ...]
    """Names of the data set's folder, or of a file with its questions; the first is used in messages."""
    hosts: tuple[str, ...] = ()
    """Folders of other data sets that may hold such a file too."""


MATH = DataSetNames(("math", "hendrycksmath", "competitionmath", "hendryckscompetitionmath", "eleutheraihendrycksmath"))
MATH500 = DataSetNames(("math500", "huggingfaceh4math500"), hosts=MATH.aliases)
MMLU = DataSetNames(("mmlu", "caismmlu", "hendryckstest", "mmlunotrain", "hailsmmlunotrain", "lukaemonmmlu"))
GSM8K = DataSetNames(("gsm8k", "openaigsm8k", "gradeschoolmath"))
_ALL = frozenset(alias for names in (MATH, MATH500, MMLU, GSM8K) for alias in names.aliases)


def read_split(
    data: Path,
    names: DataSetNames,
    split: str,
    columns: Columns,
    foreign: Columns | None = None,
    header: Sequence[str] = (),
) -> tuple[list[Row], list[Path]]:
    """Finds a split of a data set, reads all of its rows in order, and returns them with the files that they come from.

    Args:
        data, names, split: as `find` takes them.
        columns, foreign: the columns that the files must have and must not have, as `require_columns` takes them.
        header: the columns of CSV files that do not name them.

    Raises:
        DataError: as `find`, `read_rows` and `require_columns`.
    """
    files = find(data, names, split)
    rows = [row for file in files for row in read_rows(file, header)]
    require_columns(rows, columns, foreign)
    return rows, files


def find(data: Path, names: DataSetNames, split: str) -> list[Path]:
    """The files of a split, in order; for a data set that `datasets` saved, its folder instead. Never empty.

    Args:
        data: a folder with the folders (or files) of several data sets, the folder of this data set, or its file with
            the test questions; other splits are then searched beside that file.
        names: the names under which the data set's folders and files are searched.
        split: its name in lower case, such as `test`.

    Raises:
        DataError: `data` does not exist or does not hold the split; the message names up to three searched folders.
    """
    data = data.expanduser()
    if not data.exists():
        rule, remedy = "must be a file or folder with data of suites", "docs/evaluation.md#data says how to fill one"
        raise DataError(str(data), rule, "no such file or folder", remedy)
    if data.is_file():
        if split == "test":
            return [data]
        files = _other_split(data, split)
        searched = [data.parent]
    else:
        roots = list(_roots(data, names))
        searched = roots or [data]
        for root in roots:
            if files := _in_root(root, names, split, may_hold_others=root == data):
                break
        else:
            files = _lone(data, names, split)
    if not files:
        listed = ", ".join(map(str, searched[:3]))
        if len(searched) > 3:
            listed += f" and {len(searched) - 3} more"
        forms = f"{split}{{{','.join(SUFFIXES)}}}, {split}-*, {split}/ and folders of datasets"
        rule = f"must hold the split {split!r} of {names.aliases[0]}"
        remedy = f"looked in {listed} (there and in {', '.join(_PARTS)}) for {forms}"
        raise DataError(str(data), rule, "nothing of it", remedy)
    return files


def _roots(data: Path, names: DataSetNames) -> Iterator[Path]:
    """Yields the folders that may hold the data set, the likeliest first: those named after it, up to two levels below
    `data`, then `data` itself, unless that is named after another data set.

    Folders of the hub's cache are replaced by their current snapshot.
    """
    children = _folders(data)
    named = [child for child in children if _canonical(child.name) in names.aliases]
    named += [inner for child in children for inner in _folders(child) if _canonical(inner.name) in names.aliases]
    for folder in named:
        yield _snapshot(folder)
    if _canonical(data.name) not in _ALL - set(names.aliases):
        yield _snapshot(data)


def _in_root(root: Path, names: DataSetNames, split: str, may_hold_others: bool) -> list[Path]:
    """The files of a split in a folder, in its usual subfolders, or in one folder per subject; empty if there are none.

    The first of these places that has files is taken; only those of the subjects are joined.

    Args:
        may_hold_others: the folder was not found by its name, so its subfolders may be other data sets.
    """
    parts = [child for part in _PARTS for child in _folders(root) if child.name.lower() == part]
    for folder in (root, *parts):
        if files := _in_folder(folder, names, split):
            return files
    # A folder with one folder per subject looks like a folder of several data sets. It is taken as the former only if
    # its name says so, or if no subfolder is named after a data set and at least two have files of the split.
    subjects = [child for folder in (root, *parts) for child in _folders(folder) if child not in parts]
    if may_hold_others and any(_canonical(child.name) in _ALL for child in subjects):
        return []
    by_subject = [_in_folder(child, names, split, deep=False) for child in subjects]
    if may_hold_others and sum(map(bool, by_subject)) < 2:
        return []
    return [file for files in by_subject for file in files]


def _in_folder(folder: Path, names: DataSetNames, split: str, deep: bool = True) -> list[Path]:
    """The files of a split in one folder, found by their names; for a data set that `datasets` saved, its folder. Empty
    if there are none.

    A file named after the data set alone, and a saved data set without splits, count as the test split.

    Args:
        deep: also take all files below a subfolder that is named after the split.
    """
    if (folder / "dataset_dict.json").is_file():
        return [folder / split] if (folder / split / "state.json").is_file() else []
    if (folder / "state.json").is_file():
        return [folder] if split == "test" else []
    if files := _matching(folder, {split, *(alias + split for alias in names.aliases)}):
        return files
    if split == "test" and (files := _matching(folder, set(names.aliases))):
        return files
    for child in _folders(folder):
        if child.name.lower() == split and (child / "state.json").is_file():
            return [child]
        if child.name.lower() == split and deep:
            return _one_form(child.rglob("*"))
    return []


def _lone(data: Path, names: DataSetNames, split: str) -> list[Path]:
    """The file (or shards) named after the data set in the given folder or in a folder of `names.hosts`; empty if there
    is none.

    For the test split the name alone suffices; for others it must be followed by the split.
    """
    wanted = {alias + split for alias in names.aliases}
    if split == "test":
        wanted |= set(names.aliases)
    for folder in (data, *(child for child in _folders(data) if _canonical(child.name) in names.hosts)):
        if files := _matching(folder, wanted):
            return files
    return []


def _other_split(file: Path, split: str) -> list[Path]:
    """The file (or shards) of another split beside the file with the test questions; empty if there is none.

    It has the same name with the split in place of "test", or else the split as its whole name without suffix.
    """
    name = re.sub("test", split, file.name, flags=re.IGNORECASE)
    if name != file.name and file.with_name(name).is_file():
        return [file.with_name(name)]
    return _matching(file.parent, {split})


def _matching(folder: Path, wanted: set[str]) -> list[Path]:
    """Data files in a folder whose name, without suffix, shard number and punctuation, is among `wanted`; a single file
    is preferred to numbered shards. All have the same suffix; empty if there are none."""
    files = [file for file in _entries(folder) if _canonical(_SHARD.sub("", file.stem)) in wanted]
    unsharded = [file for file in files if not _SHARD.search(file.stem)]
    return _one_form(unsharded)[:1] or _one_form(files)


def _one_form(files: Iterator[Path] | Sequence[Path]) -> list[Path]:
    """The data files with the first of SUFFIXES that occurs, because the same rows may be stored in several formats.

    They are sorted by folder and then by number or name. Metadata and hidden files are left out; empty if no data file
    remains.
    """
    data = [
        file for file in files if file.is_file() and file.name not in _METADATA_FILES and not file.name.startswith(".")
    ]
    for suffix in SUFFIXES:
        if form := [file for file in data if file.suffix.lower() == suffix]:
            return sorted(form, key=_numeric_order)
    return []


def _numeric_order(file: Path) -> tuple[Path, int, str]:
    """Sort key: by folder, then by the number a file is named with; files with other names first."""
    return file.parent, int(file.stem) if file.stem.isdecimal() else -1, file.name


def _folders(folder: Path) -> list[Path]:
    """The folders in a folder, sorted, without hidden ones."""
    return sorted(child for child in _entries(folder) if child.is_dir() and not child.name.startswith("."))


def _entries(folder: Path) -> list[Path]:
    """The entries of a folder, in no particular order; empty if it cannot be read."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _snapshot(folder: Path) -> Path:
    """The current snapshot of a data set in the hub's cache: the revision that `main` names, or the only one. Any other
    folder is returned as it is, and so is one without a clear revision."""
    revisions = _folders(folder / "snapshots") if (folder / "snapshots").is_dir() else []
    main = folder / "refs" / "main"
    if main.is_file() and (named := folder / "snapshots" / main.read_text().strip()) in revisions:
        return named
    return revisions[0] if len(revisions) == 1 else folder


def _canonical(name: str) -> str:
    """The letters and digits of a name in lower case; the prefix `datasets--` of the hub's cache is dropped."""
    return "".join(char for char in name.lower().removeprefix("datasets--") if char.isalnum())
