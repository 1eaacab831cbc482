"""The safetensors of a model folder: which files, and what their headers say. No weight is read; no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from distill_rl.errors import problem
from distill_rl.models.files.tower import is_joined, text_names

FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights that can be read, as safetensors names them."""
TIED_APART, UNTIE = "must be equal, because config.json ties them", "set tie_word_embeddings: false in config.json"
"""The rule about tensors that are one in the model, and what to do."""
_SAMPLES, _SAMPLE_BYTES = 64, 64 * 2**10


def read_headers(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the entry in the header (`dtype`, `shape` and place) of every tensor of a causal language model, by name.

    Of a model with several towers these are the tensors of the text tower. For a folder in which `weight_problems` finds nothing.
    """
    headers = (_header(file) for file in weight_files(folder))
    entries = {name: entry for header in headers for name, entry in header.items() if name != "__metadata__"}
    return {name: entries[stored] for name, stored in model_names(folder, entries).items()}


def tied_problems(key: str, folder: Path, groups: Iterable[Sequence[str]]) -> list[str]:
    """Returns one line per group of tensors that config.json ties and whose values differ in the files.

    Some samples of the weights are read, not all of them; tensors of another dtype than the first are left out.

    Args:
        key: the setting that names the model, for the lines.
        groups: names of tensors that are one in the model, as `read_headers` has them.
    """
    wanted = [group for group in groups if len(group) > 1]
    if not wanted:
        return []
    files = weight_files(folder)
    headers = {file: _header(file) for file in files}
    place = {name: (file, entry) for file, header in headers.items() for name, entry in header.items()}
    stored = model_names(folder, [name for name in place if name != "__metadata__"])

    def samples(name: str) -> tuple[str, list[bytes]]:
        file, entry = place[stored[name]]
        begin, end = entry["data_offsets"]
        last = max(end - begin - _SAMPLE_BYTES, 0)
        with file.open("rb") as stream:
            first = 8 + int.from_bytes(stream.read(8), "little") + begin
            found = []
            for i in range(_SAMPLES if last else 1):
                stream.seek(first + last * i // (_SAMPLES - 1))
                found.append(stream.read(min(_SAMPLE_BYTES, end - begin)))
        return entry["dtype"], found

    lines = []
    for first, *others in wanted:
        dtype, part = samples(first)
        for other in others:
            if (found := samples(other))[0] == dtype and found[1] != part:
                lines.append(problem(key, f"{first} and {other} {TIED_APART}", "different values", UNTIE))
    return lines


def model_names(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns the name in the files of every tensor of a folder's causal language model.

    They are the names themselves unless the folder holds a model for images or sound too (`tower.text_names`).

    Args:
        names: of all tensors in the files.
    """
    return text_names(names) if holds_several(folder) else {name: name for name in names}


def holds_several(folder: Path) -> bool:
    """Whether a folder holds several models that are joined (`tower.is_joined`); not without a config.json."""
    file = folder / "config.json"
    return file.is_file() and is_joined(json.loads(file.read_text(encoding="utf-8")))


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files that hold the model: those that the index names, sorted, or `model.safetensors`.

    Empty if there is neither. Files that the index names need not exist. A malformed index raises whatever reading it
    raises.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else []


def weight_problems(key: str, folder: Path) -> list[str]:
    """Returns why a folder's weights cannot be read; empty if they can.

    One line says that the index cannot be read or that there are no safetensors; otherwise there is one line per file
    that is missing, outside the folder or damaged. Of each file only the header and the size are checked.

    Args:
        key: what the lines begin with.
    """
    try:
        files = weight_files(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [problem(key, f"model.safetensors.index.json cannot be read: {error!r}", str(folder))]
    if not files:
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
            remedy = "convert it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) in a place you trust"
            return [problem(key, "weights must be safetensors; the folder has only pickled ones", str(folder), remedy)]
        return [problem(key, "must hold model.safetensors", str(folder))]
    lines = []
    for file in files:
        if file.parent != folder:
            lines.append(problem(key, "every file in the index must be in the folder", str(file)))
            continue
        if not file.is_file():
            lines.append(problem(key, "a file that the index names is missing", str(file)))
            continue
        try:
            _header(file)
        except ValueError as error:
            lines.append(problem(key, str(error), str(file), "copy the model again"))
    return lines


def _header(file: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file, which consists of 8 bytes of length, header, and data.

    Raises:
        ValueError: not safetensors, or shorter than the header says.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= length <= size - 8:
            raise ValueError("not a safetensors file, or cut off")
        try:
            header = json.loads(stream.read(length))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ValueError("not a safetensors file: its header is damaged") from None
    if size < 8 + length + end:
        raise ValueError(f"cut off: {size:,} of {8 + length + end:,} bytes")
    return header
