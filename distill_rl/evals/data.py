"""The data of the suites: finding files, reading rows, and facts about the published data."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from distill_rl.errors import DataError, first_line
from distill_rl.evals.suites.base import Item, Questions

# Reads rows of questions from Parquet, JSON lines, JSON, CSV and Arrow files, and from folders saved by `datasets`.

T = TypeVar("T")
Columns = Mapping[str, Sequence[str]]
"""Per kind of column ("answer"), the names that it may have."""

_QUESTION_COLUMNS = {"question", "problem", "prompt", "input"}
"""A first CSV record with one of these names is a header."""
SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".arrow")
_LONGEST_CELL = 1 << 30
"""Characters of a cell of CSV; the module's own limit, 128 KiB, is shorter than some documents."""
MAX_PROBLEMS = 20
"""Bad rows that are reported before reading stops."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file."""

    file: Path
    position: int
    """From 1; in JSON lines and CSV files, of its line or record in the file."""
    values: Mapping[str, Any]
    """Values by column; column names are in lower case."""
    problem: str = ""
    """The rule that the row breaks; it then has no values."""


def read_rows(path: Path, header: Sequence[str] = ()) -> list[Row]:
    """Reads all rows of a file, or of a folder that `datasets` saved. Column names become lower case.

    A row that cannot be read, such as an invalid line, is returned with the rule that it breaks (`Row.problem`).

    Args:
        path: its suffix, one of SUFFIXES, gives the format.
        header: the columns of a CSV file whose first record does not name them.

    Raises:
        DataError: an unreadable, damaged or empty file, or an unknown format.
    """
    rows = []
    try:
        for position, content in _contents(path, header):
            if isinstance(content, Mapping):
                rows.append(Row(path, position, {str(name).strip().lower(): value for name, value in content.items()}))
            else:
                rows.append(Row(path, position, {}, problem=content))
    except OSError as error:
        raise DataError(str(path), "cannot be read", error.strerror or str(error)) from error
    if not rows:
        raise DataError(str(path), "must hold at least one row")
    return rows


def convert_rows(rows: Iterable[Row], function: Callable[[Row], T]) -> list[T]:
    """Applies `function` to every row and returns the results in order.

    Args:
        function: raises ValueError with the rule that a bad row breaks.

    Raises:
        DataError: the bad rows, including those with a `problem`, one line each with file, position and rule; stops
            after MAX_PROBLEMS of them.
    """
    converted, problems = [], []
    for row in rows:
        try:
            if row.problem:
                raise ValueError(row.problem)
            converted.append(function(row))
        except ValueError as error:
            problems.append(str(DataError(f"{row.file}, row {row.position}", str(error))))
            if len(problems) == MAX_PROBLEMS:
                problems.append(f"{row.file}: stopped after {MAX_PROBLEMS} bad rows")
                break
    DataError.raise_all(problems)
    return converted


def require_columns(rows: Sequence[Row], kinds: Columns, foreign: Columns) -> None:
    """Checks that every file has the columns of its suite. A file whose rows were all unreadable has none and passes.

    Args:
        kinds: the columns that a file must have, at least one name of each kind.
        foreign: columns that occur only in the data of other suites.

    Raises:
        DataError: a file lacks a kind of column or has a foreign one; one line per file and kind, up to MAX_PROBLEMS.
    """
    columns_of: dict[Path, dict[str, None]] = {}
    for row in rows:
        columns_of.setdefault(row.file, {}).update(dict.fromkeys(row.values))
    problems = []
    for file, columns in columns_of.items():
        listed = f"the columns {', '.join(columns)}"
        for kind, names in kinds.items():
            if columns and not any(name in columns for name in names):
                allowed = " or ".join(f"`{name}`" for name in names)
                problems.append(str(DataError(str(file), f"must have a column with the {kind} ({allowed})", listed)))
        for kind, names in foreign.items():
            if any(name in columns for name in names):
                rule = f"must have no column with {kind}, which belongs to the data of another suite"
                problems.append(str(DataError(str(file), rule, listed)))
    if len(problems) > MAX_PROBLEMS:
        problems[MAX_PROBLEMS:] = [f"and {len(problems) - MAX_PROBLEMS} more files with wrong columns"]
    DataError.raise_all(problems)


def first_value(row: Row, names: Sequence[str]) -> Any:
    """The first value in the named columns that is neither missing nor empty; else an empty text if one has it; else
    None."""
    values = [row.values[name] for name in names if row.values.get(name) is not None]
    return next(iter([value for value in values if value != ""] or values), None)


def required_text(row: Row, names: Sequence[str]) -> str:
    """The first value in the named columns, as `first_value`, which must be non-empty Unicode text; it is not stripped.

    Raises:
        ValueError: it is missing, blank, not text, or holds lone surrogates.
    """
    value = first_value(row, names)
    if not isinstance(value, str) or not value.strip():
        got = "nothing" if value is None else repr(value)[:60]
        raise ValueError(f"`{names[0]}` must be non-empty text; got {got}; correct the row, or remove it")
    return require_unicode(value, names[0])


def require_unicode(text: str, name: str) -> str:
    """Returns the text unchanged if it can be encoded; `name` is its column, for the error.

    Raises:
        ValueError: it holds lone surrogates, which JSON escapes can spell.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"`{name}` must be Unicode text, without lone surrogates") from error
    return text


def content_sha256(contents: Iterable[Sequence[str]], *, exact: bool = False) -> str:
    """SHA-256 of rows of texts as hexadecimal digits, independent of the order of the rows.

    Args:
        exact: hash every character; otherwise runs of white space count as one blank, and white space at the ends is
            ignored.
    """
    return hashlib.sha256("\n".join(sorted(_digest(texts, exact=exact) for texts in contents)).encode()).hexdigest()


def _digest(texts: Sequence[str], *, exact: bool = False) -> str:
    """SHA-256 of texts in their order, as hexadecimal digits; white space counts as in `content_sha256`."""
    hashed = [text if exact else " ".join(text.split()) for text in texts]
    return hashlib.sha256(json.dumps(hashed).encode()).hexdigest()


def _contents(path: Path, header: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    """Yields (position from 1, the row or the rule that it breaks)."""
    suffix = path.suffix.lower()
    if path.is_dir() or suffix in (".parquet", ".arrow"):
        return enumerate(_table(path, suffix), start=1)
    if suffix == ".csv":
        return _csv(path, header)
    if suffix in (".json", ".jsonl"):
        return _json(path)
    raise DataError(str(path), f"must end in {', '.join(SUFFIXES)}, or be a folder written by datasets.save_to_disk")


def _table(path: Path, suffix: str) -> list[dict[str, Any]]:
    """The rows of a Parquet file, an Arrow file, or a folder that `datasets` saved, as dictionaries by column."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if suffix == ".parquet" and path.is_file():
            return pq.read_table(path).to_pylist()
        import datasets  # slow to import

        dataset = datasets.load_from_disk(str(path)) if path.is_dir() else datasets.Dataset.from_file(str(path))
        return dataset.to_list()
    except (pa.ArrowException, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from error


def _csv(path: Path, header: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    """Yields the rows of a CSV file: (number of the record, the cells by column, or the rule that the record breaks)."""
    # The first record names the columns if `header` is empty or if it holds a usual name of the question's column;
    # otherwise `header` does. Empty records are skipped; one with another number of cells than columns is bad.
    names: Sequence[str] = ()
    csv.field_size_limit(_LONGEST_CELL)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for position, cells in enumerate(csv.reader(file), start=1):
                if not cells:
                    continue
                if not names:
                    first = [cell.strip().lower() for cell in cells]
                    if not header or _QUESTION_COLUMNS & set(first):
                        names = first
                        continue
                    names = header
                if len(cells) == len(names):
                    yield position, dict(zip(names, cells))
                else:
                    yield position, f"must have {len(names)} cells ({', '.join(names)}), has {len(cells)}"
    except (csv.Error, UnicodeDecodeError) as error:
        raise _damaged(path, error) from error


def _json(path: Path) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    """Yields the rows of a JSON file: (position from 1, the object or the rule that the row breaks)."""
    # A .json file may be a list of objects or a single object. Anything else is read as JSON lines; blank lines are
    # skipped but count.
    content = path.read_bytes()
    whole = _parse(content) if path.suffix.lower() == ".json" else ""  # text is an error message
    if isinstance(whole, Mapping):
        yield 1, whole
        return
    if isinstance(whole, list):
        for position, row in enumerate(whole, start=1):
            yield position, row if isinstance(row, Mapping) else "must be an object with the columns as its keys"
        return
    if whole and content.lstrip().startswith(b"["):
        raise DataError(str(path), "must be valid JSON", "a list that is not", "it may be cut off; copy it again")
    for position, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            row = _parse(line)
            problem = row if isinstance(row, str) else "must be one JSON object per line"
            yield position, row if isinstance(row, Mapping) else problem


def _parse(content: bytes) -> Mapping[str, Any] | list[Any] | str:
    """Parses bytes as JSON; returns the object or list."""
    # If they are not valid JSON in UTF-8, or another JSON value, it returns a text instead, the rule that they break.
    try:
        parsed = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return "must be UTF-8"
    except (ValueError, RecursionError):
        return "must be one JSON object per line"
    return parsed if isinstance(parsed, Mapping | list) else "must be one JSON object per line"


def _damaged(path: Path, error: Exception) -> DataError:
    """The error about a file or folder that a reader rejected with `error`, of which the first line is shown."""
    kind = path.suffix[1:] or "folder"
    reason = first_line(error)[:200]
    return DataError(str(path), f"must be a readable, complete {kind}", reason, "it may be cut off; copy it again")


# Finds the data of a suite in files, copies of hub repositories, folders of `datasets` and original archives.
#
# `read_split` also reads what `find` finds.
#
# `find` looks for a split in these places and takes the first that has files:
#
# 1. the folders named after the data set, up to two levels below `data`, then `data` itself (`_roots`). A folder of the
#    hub's cache stands for its current snapshot;
# 2. in each of them, the folder itself, then its subfolders main, all, default and data (`_in_root`);
# 3. otherwise one folder per subject, joined;
# 4. otherwise a file in `data` itself that is named after the data set (`_lone`).

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
    data: Path, names: DataSetNames, split: str, kinds: Columns, foreign: Columns, header: Sequence[str] = ()
) -> tuple[list[Row], list[Path]]:
    """Finds a split of a data set, reads all of its rows in order, and returns them with the files that they come from.

    Args:
        data, names, split: as `find` takes them.
        kinds, foreign: the columns that the files must have and must not have, as `require_columns` takes them.
        header: the columns of CSV files that do not name them.

    Raises:
        DataError: as `find`, `read_rows` and `require_columns`.
    """
    files = find(data, names, split)
    rows = [row for file in files for row in read_rows(file, header)]
    require_columns(rows, kinds, foreign)
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
        files, searched = _other_split(data, split), [data.parent]
    else:
        roots = list(_roots(data, names))
        found = (_in_root(root, names, split, may_hold_others=root == data) for root in roots)
        files, searched = next(filter(None, found), []) or _lone(data, names, split), roots or [data]
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
    """Yields the folders that may hold the data set: those named after it, then `data` itself."""
    children = _folders(data)
    named = [child for child in children if _canonical(child.name) in names.aliases]
    named += [inner for child in children for inner in _folders(child) if _canonical(inner.name) in names.aliases]
    for folder in named:
        yield _snapshot(folder)
    if _canonical(data.name) not in _ALL - set(names.aliases):
        yield _snapshot(data)


def _in_root(root: Path, names: DataSetNames, split: str, may_hold_others: bool) -> list[Path]:
    """The files of a split in a folder, in its usual subfolders, or in one folder per subject; empty if there are none."""
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
    """The files of a split in one folder, found by their names; of a saved data set its folder."""
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
    """The file or shards named after the data set, in `data` or a folder of one of `names.hosts`."""
    wanted = {alias + split for alias in names.aliases}
    if split == "test":
        wanted |= set(names.aliases)
    folders = data, *(child for child in _folders(data) if _canonical(child.name) in names.hosts)
    return next(filter(None, (_matching(folder, wanted) for folder in folders)), [])


def _other_split(file: Path, split: str) -> list[Path]:
    """The file (or shards) of another split beside the file with the test questions; empty if there is none."""
    name = re.sub("test", split, file.name, flags=re.IGNORECASE)
    if name != file.name and file.with_name(name).is_file():
        return [file.with_name(name)]
    return _matching(file.parent, {split})


def _matching(folder: Path, wanted: set[str]) -> list[Path]:
    """Files whose bare name is among `wanted`; one file is preferred to numbered shards."""
    files = [file for file in _entries(folder) if _canonical(_SHARD.sub("", file.stem)) in wanted]
    return _one_form([file for file in files if not _SHARD.search(file.stem)])[:1] or _one_form(files)


def _one_form(files: Iterator[Path] | Sequence[Path]) -> list[Path]:
    """The data files with the first of SUFFIXES that occurs, because the same rows may be stored in several formats."""
    # They are sorted by folder and then by number or name. Metadata and hidden files are left out; empty if no data
    # file remains.
    data = [
        file for file in files if file.is_file() and file.name not in _METADATA_FILES and not file.name.startswith(".")
    ]
    for suffix in SUFFIXES:
        if form := [file for file in data if file.suffix.lower() == suffix]:
            return sorted(form, key=_numeric_order)
    return []


def _numeric_order(file: Path) -> tuple[Path, int, str]:
    return file.parent, int(file.stem) if file.stem.isdecimal() else -1, file.name


def _folders(folder: Path) -> list[Path]:
    return sorted(child for child in _entries(folder) if child.is_dir() and not child.name.startswith("."))


def _entries(folder: Path) -> list[Path]:
    """The entries of a folder, in no particular order; empty if it cannot be read."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _snapshot(folder: Path) -> Path:
    """The current snapshot of a data set in the hub's cache: the revision that `main` names, or the only one."""
    # Any other folder is returned as it is, and so is one without a clear revision.
    revisions = _folders(folder / "snapshots") if (folder / "snapshots").is_dir() else []
    main = folder / "refs" / "main"
    if main.is_file() and (named := folder / "snapshots" / main.read_text().strip()) in revisions:
        return named
    return revisions[0] if len(revisions) == 1 else folder


def _canonical(name: str) -> str:
    return "".join(char for char in name.lower().removeprefix("datasets--") if char.isalnum())


# Facts about the published data: row counts, content hashes, and the worked examples of the papers.


@dataclass(frozen=True, slots=True)
class PublishedSplit:
    """A split as it was published."""

    name: str
    count: int
    content_sha256: str
    """As computed by `content_sha256`."""

    def warnings(self, count: int, content_sha256: str) -> tuple[str, ...]:
        """Compares rows as read with the published split; returns one line if their count or else their content
        differs, otherwise an empty tuple. `content_sha256` is computed by `content_sha256`."""
        if count != self.count:
            return (f"{self.name}: {count} rows, the published data have {self.count}",)
        if content_sha256 != self.content_sha256:
            actual, published = content_sha256[:12], self.content_sha256[:12]
            return (f"{self.name}: the content differs from the published data (sha256 {actual}…, not {published}…)",)
        return ()


def make_questions(
    rows: Sequence[T],
    content_of: Callable[[T], Sequence[str]],
    make_item: Callable[[str, T], Item],
    files: Iterable[Path],
    published: PublishedSplit,
) -> Questions:
    """The questions of a split in the order of its rows, with ids and a hash of their content, and with the differences
    from the published split as warnings.

    The ids are made from content, so that they do not depend on file format and row order: 12 hexadecimal digits, and for
    repeated rows the suffixes -2, -3, …

    Args:
        content_of: row → the texts that identify it, from which ids and hash are made.
        make_item: (id, row) → item.
        files: those that were read.
    """
    items: list[Item] = []
    count: Counter[str] = Counter()
    for row in rows:
        row_id = _digest(content_of(row))[:12]
        count[row_id] += 1
        items.append(make_item(row_id if count[row_id] == 1 else f"{row_id}-{count[row_id]}", row))
    content = content_sha256(map(content_of, rows))
    return Questions(tuple(items), tuple(files), content, published.warnings(len(items), content))


def first_examples(name: str, count: int) -> list[tuple[str, str]]:
    """The first `count` worked examples of a paper, each a question and its answer, from the JSON file `name` in the folder `fewshot`, which cites the
    paper.

    Raises:
        DataError: the paper has fewer, or `count` is negative.
    """
    text = (Path(__file__).parent / "fewshot" / f"{name}.json").read_text(encoding="utf-8")
    examples = json.loads(text)["examples"]
    if not 0 <= count <= len(examples):
        rule = f"must be 0 to {len(examples)}, the worked examples of its paper"
        raise DataError(f"num_fewshot of {name}", rule, count)
    return [(example["question"], example["answer"]) for example in examples[:count]]
