"""Where the data of a suite lie: files, copies of hub repositories, folders of `datasets`, original archives."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from distill_rl.errors import DataError
from distill_rl.evals.data.read import SUFFIXES

_PARTS = ("main", "all", "default", "data")
"""folders between a data set's own and its files: a hub repository's configuration, an archive's content"""
_NOT_ROWS = ("state.json", "dataset_info.json", "dataset_dict.json", "dataset_infos.json")
_SHARD = re.compile(r"-\d+-of-\d+$")


@dataclass(frozen=True, slots=True)
class DataSetNames:
    """What the folders and files of a data set are called, in lower case and without punctuation."""

    own: tuple[str, ...]
    """the data set's folder, or a file with its questions; the first is the name used in messages"""
    beside: tuple[str, ...] = ()
    """folders of other data sets in which such a file may lie too"""


MATH = DataSetNames(("math", "hendrycksmath", "competitionmath", "hendryckscompetitionmath", "eleutheraihendrycksmath"))
MATH500 = DataSetNames(("math500", "huggingfaceh4math500"), beside=MATH.own)
MMLU = DataSetNames(("mmlu", "caismmlu", "hendryckstest", "mmlunotrain", "hailsmmlunotrain", "lukaemonmmlu"))
GSM8K = DataSetNames(("gsm8k", "openaigsm8k", "gradeschoolmath"))
_ALL = frozenset(name for names in (MATH, MATH500, MMLU, GSM8K) for name in names.own)


def find(data: Path, names: DataSetNames, split: str) -> list[Path]:
    """The files of a split, in order, or the folder of a data set that `datasets` saved.

    Args:
        data: a folder with the folders (or files) of several data sets, the folder of this one, or a file of it; other
            splits are looked for next to a file with the test questions.

    Raises:
        DataError: nothing there, with where it was looked for.
    """
    data = data.expanduser()
    if not data.exists():
        raise DataError(str(data), "must be a file or folder with data of suites", "no such file or folder")
    if data.is_file():
        if split == "test":
            return [data]
        found = _twin(data, split)
        looked = [data.parent]
    else:
        roots = list(_roots(data, names))
        found = next((files for root in roots if (files := _in_root(root, names, split, given=root == data))), [])
        found = found or _lone(data, names, split)
        looked = roots or [data]
    if not found:
        listed = ", ".join(str(root) for root in looked[:3]) + (
            f" and {len(looked) - 3} more" if len(looked) > 3 else ""
        )
        forms = f"{split}{{{','.join(SUFFIXES)}}}, {split}-*, {split}/ and folders of datasets"
        rule = f"must hold the split {split!r} of {names.own[0]}"
        raise DataError(
            str(data), rule, "nothing of it", f"looked in {listed} (there and in {', '.join(_PARTS)}) for {forms}"
        )
    return found


def _roots(data: Path, names: DataSetNames) -> Iterator[Path]:
    """Folders that may be the data set's, the likeliest first."""
    children = _folders(data)
    named = [child for child in children if _plain(child.name) in names.own]
    named += [inner for child in children for inner in _folders(child) if _plain(inner.name) in names.own]
    for folder in named:
        yield _snapshot(folder)
    if _plain(data.name) not in _ALL - set(names.own):
        yield _snapshot(data)


def _in_root(root: Path, names: DataSetNames, split: str, given: bool) -> list[Path]:
    """
    Args:
        given: the folder was not found by its name, and may hold several data sets.
    """
    parts = [child for part in _PARTS for child in _folders(root) if child.name.lower() == part]
    for folder in (root, *parts):
        if found := _in_folder(folder, names, split):
            return found
    # One folder per subject, which a folder of several data sets looks like.
    subjects = [child for folder in (root, *parts) for child in _folders(folder) if child not in parts]
    if given and any(_plain(child.name) in _ALL for child in subjects):
        return []
    each = [_in_folder(child, names, split, deep=False) for child in subjects]
    return [file for files in each for file in files] if sum(map(bool, each)) > 1 or not given else []


def _in_folder(folder: Path, names: DataSetNames, split: str, deep: bool = True) -> list[Path]:
    """
    Args:
        deep: a folder named after the split counts with all the files in it.
    """
    if (folder / "dataset_dict.json").is_file():
        return [folder / split] if (folder / split / "state.json").is_file() else []
    if (folder / "state.json").is_file():
        return [folder] if split == "test" else []
    if found := _matching(folder, {split, *(name + split for name in names.own)}):
        return found
    if split == "test" and (found := _matching(folder, set(names.own))):
        return found
    for child in _folders(folder):
        if child.name.lower() == split and (child / "state.json").is_file():
            return [child]
        if child.name.lower() == split and deep:
            return _one_form(child.rglob("*"))
    return []


def _lone(data: Path, names: DataSetNames, split: str) -> list[Path]:
    """A file named after the data set in the given folder or in one of `beside`."""
    wanted = {name + split for name in names.own} | (set(names.own) if split == "test" else set())
    for folder in (data, *(child for child in _folders(data) if _plain(child.name) in names.beside)):
        if found := _matching(folder, wanted):
            return found
    return []


def _twin(file: Path, split: str) -> list[Path]:
    """The file of another split next to the one with the test questions."""
    name = re.sub("test", split, file.name, flags=re.IGNORECASE)
    if name != file.name and file.with_name(name).is_file():
        return [file.with_name(name)]
    return _matching(file.parent, {split})


def _matching(folder: Path, wanted: set[str]) -> list[Path]:
    """Data files whose names are wanted; a file that is whole before numbered shards."""
    there = [file for file in _entries(folder) if _plain(_SHARD.sub("", file.stem)) in wanted]
    whole = [file for file in there if not _SHARD.search(file.stem)]
    return _one_form(whole)[:1] or _one_form(there)


def _one_form(files: Iterator[Path] | Sequence[Path]) -> list[Path]:
    """Those with the first suffix that is there, since the same rows may lie side by side in several forms."""
    data = [file for file in files if file.is_file() and file.name not in _NOT_ROWS and not file.name.startswith(".")]
    forms = ([file for file in data if file.suffix.lower() == suffix] for suffix in SUFFIXES)
    return sorted(next((form for form in forms if form), []), key=_order)


def _order(file: Path) -> tuple[Path, int, str]:
    return file.parent, int(file.stem) if file.stem.isdecimal() else -1, file.name


def _folders(folder: Path) -> list[Path]:
    return sorted(child for child in _entries(folder) if child.is_dir() and not child.name.startswith("."))


def _entries(folder: Path) -> list[Path]:
    """None in a folder that may not be read, such as a neighbour of the one that is looked for."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _snapshot(folder: Path) -> Path:
    """Of a folder in the hub's cache the revision that `main` names, or the only one."""
    revisions = _folders(folder / "snapshots") if (folder / "snapshots").is_dir() else []
    main = folder / "refs" / "main"
    if main.is_file() and (named := folder / "snapshots" / main.read_text().strip()) in revisions:
        return named
    return revisions[0] if len(revisions) == 1 else folder


def _plain(name: str) -> str:
    """A folder of the hub's cache is called datasets--owner--name."""
    return "".join(char for char in name.lower().removeprefix("datasets--") if char.isalnum())
