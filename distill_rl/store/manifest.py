"""What a store says of itself: the teacher, how its targets were taken, and how they are written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distill_rl.config.schema import TeacherConfig
from distill_rl.errors import StoreError, first_line
from distill_rl.system.files import sha256, write_atomic, write_json
from distill_rl.system.folders import close_folder

VERSION = 1
FILE, TEACHER, SHARDS = "manifest.json", "teacher", "shards"
FORMATS = ("exact", "compact")
DESCRIPTION = ("*.json", "*.jinja", "*.txt", "*.model", "tokenizer*")
"""Files of a model that describe it and its tokenizer, as globs; weights are not among them."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Two captures go into one store only if all of this is the same, `model` and `revision` excepted."""

    format: str
    """`exact` or `compact`."""
    kind: str
    """`topk` or `sampled`: `teachers[].export`."""
    entries: int
    """Per token: `loss.top_k`, or `loss.draws`."""
    temperature: float
    wire_dtype: str
    """Of the log-probs: fp32, fp16 or bf16."""
    dtype: str
    """In which the teacher was run; `served` if a server ran it, which does not say."""
    model: str
    """Name or folder of the teacher when it was captured; for people."""
    revision: str | None
    weights: str
    """Of the teacher: sha256 over config and weights, and how they were quantised (`models.files.teacher_identity`), or
    `served_identity`."""
    tokenizer: str
    """sha256 over what determines a text's ids (`models.files.tokenizer_hash`)."""
    vocabulary_size: int
    """Ids with a probability; further columns of the teacher's output layer are padding."""
    mass: float | None = None
    """With `compact`: the fewest entries that hold this probability are kept. None: all."""
    files: dict[str, str] = field(default_factory=dict)
    """sha256 of every file in the folder `teacher`, by name."""

    @property
    def identity(self) -> dict[str, Any]:
        """What tells the targets of two stores apart, which every shard repeats."""
        return {name: value for name, value in asdict(self).items() if name in _WORDS}

    def differences(self, other: Mapping[str, Any]) -> Iterator[str]:
        """Yields how targets with another `identity` differ from those here, one clause each."""
        for name, mine in self.identity.items():
            if mine != other.get(name):
                yield f"{_WORDS[name]} {short(mine)} here, {short(other.get(name))} there"


_WORDS = {
    "format": "capture.format",
    "kind": "teachers[].export",
    "entries": "entries per token (loss.top_k or loss.draws)",
    "temperature": "loss.temperature",
    "wire_dtype": "teachers[].wire_dtype",
    "dtype": "teachers[].dtype",
    "weights": "the teacher's weights",
    "tokenizer": "the teacher's tokenizer",
    "vocabulary_size": "ids that are compared",
    "mass": "capture.mass",
}
"""What a user calls the fields that tell the targets of two stores apart."""


def short(value: Any) -> Any:
    """A value as it is written in YAML; of a hash the first digits, and what is said behind it."""
    if value is None:
        return "null"
    if not isinstance(value, str):
        return value
    first, space, rest = value.partition(" ")
    return f"{first[:12]}{space}{rest}" if len(first) == 64 else value


SERVED = "served"
"""`Manifest.dtype` of a teacher that a server ran, and how its `weights` begin."""


def served_identity(teacher: TeacherConfig) -> str:
    """What stands in place of the weights' hash for a teacher that a server runs: its name there and the interface.

    It does not tell two models apart that are served under one name.
    """
    return f"{SERVED} as {teacher.model} by {teacher.endpoint.api}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Makes a store in a folder that holds none. The files that describe the teacher must be in it (`describe_teacher`)."""
    (folder / SHARDS).mkdir(parents=True, exist_ok=True)
    value = asdict(manifest) | {"version": VERSION}
    write_json(folder / FILE, value | {"checksum": _checksum(value)})
    for path in (folder, folder / SHARDS, folder / FILE):  # a store that others may write to is not read
        close_folder(path)


def require_same(folder: Path, manifest: Manifest) -> None:
    """Checks that the targets of a capture may go into the store in a folder.

    Raises:
        StoreError: it holds other targets, or its manifest cannot be read; the line names every difference.
    """
    differences = list(read_manifest(folder).differences(manifest.identity))
    if differences:
        rule = "one store holds the targets of one teacher, taken in one way"
        raise StoreError(f"{folder}", rule, "; ".join(differences), "keep them in folders of their own")


def describe_teacher(folder: Path, sources: list[Path]) -> dict[str, str]:
    """Copies the files that describe a teacher into the store's folder `teacher`, and returns their sha256 by name.

    Args:
        sources: the model's folder and, behind it, the tokenizer's if that is another one; its files go first.
    """
    target = folder / TEACHER
    target.mkdir(parents=True, exist_ok=True)
    for source in sources:
        for pattern in DESCRIPTION:
            for file in sorted(source.glob(pattern)):
                if file.is_file() and not file.name.endswith(".index.json"):
                    write_atomic(target / file.name, file.read_bytes())
    return {file.name: sha256(file) for file in sorted(target.iterdir()) if not file.name.startswith(".")}


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks the manifest of a store.

    Raises:
        StoreError: no store, a newer one, or a damaged manifest.
    """
    path = folder / FILE
    if not folder.is_dir() or not path.is_file():
        rule = "must be a store, a folder that `distill-rl capture` has made"
        found = f"no {FILE}" if folder.is_dir() else "no such folder"
        raise StoreError(f"{folder}", rule, found, "name the folder that was given with --out")
    remedy = "copy it again from where the store was made"
    try:
        value = json.loads(path.read_text("utf-8"))
        version = value["version"]
        checksum = value.pop("checksum")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise StoreError(f"{path}", "must be a manifest of a store", first_line(error), remedy) from error
    if version != VERSION:
        rule = f"version {VERSION} can be read; the store was made by another version of distill_rl"
        raise StoreError(f"{path}", rule, version, "update distill_rl")
    if checksum != _checksum(value):
        raise StoreError(f"{path}, byte 0", "does not match its checksum: it was damaged or edited", None, remedy)
    del value["version"]
    try:
        return Manifest(**value)
    except TypeError as error:
        raise StoreError(f"{path}", "must be a manifest of a store", first_line(error), remedy) from error


def description_problems(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Yields the files that describe the teacher and are missing or changed, one line each."""
    for name, expected in manifest.files.items():
        file = folder / TEACHER / name
        found = sha256(file) if file.is_file() else "no file"
        if found != expected:
            remedy = "copy it again from where the store was made"
            rule = f"must have the sha256 {expected[:12]}… of the manifest"
            yield str(StoreError(f"{file}, byte 0", rule, short(found), remedy))


def _checksum(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
