"""Reads the `.metadata` of a checkpoint of torch.distributed.checkpoint, which is a pickle, without running it.

A pickle is a program of a small machine with a stack. What torch writes uses two dozen of its instructions, and names
a dozen of torch's types. `read_metadata` follows these, and refuses the file at anything else. It calls nothing that
the file names: a type becomes an object of that type whose fields have the types that torch gives them.
"""

from __future__ import annotations

import pickletools
import re
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

_FIELDS: dict[type, dict[str, tuple[type, ...]]] = {
    dcp.Metadata: {
        "state_dict_metadata": (dict,),
        "planner_data": (dict, NoneType),
        "storage_data": (dict,),
        "storage_meta": (dcp.StorageMeta, NoneType),
        "version": (str, NoneType),
    },
    dcp.StorageMeta: {
        "checkpoint_id": (str, NoneType),
        "save_id": (str, NoneType),
        "load_id": (str, NoneType),
        "modules": (list,),
    },
    dcp.TensorStorageMetadata: {"properties": (dcp.TensorProperties,), "size": (torch.Size,), "chunks": (list,)},
    dcp.TensorProperties: {},  # a tuple, of which torch reads the dtype only
    dcp.ChunkStorageMetadata: {"offsets": (torch.Size,), "sizes": (torch.Size,)},
    dcp.MetadataIndex: {"fqn": (str,), "offset": (torch.Size, NoneType), "index": (int, NoneType)},
    _StorageInfo: {"relative_path": (str,), "offset": (int,), "length": (int,)},
}
"""The fields of every type that may be made, and their types; BytesStorageMetadata, whose content torch unpickles, is
not among them."""
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_NAMES: dict[tuple[str, str], Any] = {
    **{(made.__module__, made.__name__): made for made in _FIELDS},
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): "layout",
    (dcp.__name__, "_MEM_FORMAT_ENCODING"): dcp._MEM_FORMAT_ENCODING,
    ("pathlib", "PosixPath"): "path",
    ("pathlib._local", "PosixPath"): "path",  # Python 3.13
}
_VALUES = {"SHORT_BINUNICODE", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_FILE = re.compile(r"__\d+_\d+\.distcp")


def read_metadata(file: Path) -> dcp.Metadata:
    """Returns what a `.metadata` describes: tensors only, in files beside it.

    Raises:
        OSError: it cannot be read.
        ValueError: torch would not have written it for tensors.
    """
    try:
        return _checked(_run(file.read_bytes()))
    except (IndexError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _run(program: bytes) -> Any:
    """Follows a pickle and returns its result.

    Raises:
        ValueError, IndexError, KeyError, TypeError: it does what torch's do not.
    """
    stack: list[Any] = []
    marks: list[int] = []  # heights of the stack
    memo: list[Any] = []

    def above_mark() -> list[Any]:
        height = marks.pop()
        items = stack[height:]
        del stack[height:]
        return items

    value: Any
    for instruction, value, _ in pickletools.genops(program):
        name = instruction.name
        if name in _VALUES:
            stack.append(value)
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[value])
        elif name == "MEMOIZE":
            memo.append(stack[-1])
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "MARK":
            marks.append(len(stack))
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
        elif name == "TUPLE":
            stack.append(tuple(above_mark()))
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name in ("SETITEM", "SETITEMS"):
            items = above_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            if any(type(key) not in (str, dcp.MetadataIndex) for key in items[::2]):
                raise ValueError("a key that is neither a name nor an index")
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name in ("APPEND", "APPENDS"):
            items = above_mark() if name == "APPENDS" else [stack.pop()]
            stack[-1].extend(items)
        elif name == "STACK_GLOBAL":
            where, what = stack.pop(-2), stack.pop()
            if type(where) is not str or type(what) is not str:  # what is nested may be endless to hash and to show
                raise ValueError("a name that is no text")
            if (where, what) not in _NAMES:
                raise ValueError(f"it names {f'{where}.{what}'[:200]!r}")
            stack.append(_NAMES[where, what])
        elif name == "NEWOBJ":
            made, arguments = stack.pop(-2), stack.pop()
            if arguments != () or not isinstance(made, type) or made not in _FIELDS:
                raise ValueError("it makes an object of another type")
            stack.append(object.__new__(made))
        elif name == "REDUCE":
            called, arguments = stack.pop(-2), stack.pop()
            stack.append(_reduced(called, arguments))
        elif name == "BUILD":
            state = stack.pop()
            _build(stack[-1], state)
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"the instruction {name}")
    (result,) = stack
    return result


def _reduced(called: Any, arguments: Any) -> Any:
    """What a call of one of the functions in `_NAMES` returns, for the arguments that torch writes."""
    if called is torch.Size:
        (sizes,) = arguments
        if type(sizes) is tuple and all(type(size) is int for size in sizes):
            return torch.Size(sizes)
    elif called is dcp._MEM_FORMAT_ENCODING and arguments == (0,):
        return dcp._MEM_FORMAT_ENCODING(0)
    elif called == "layout" and arguments == ("torch.strided",):
        return torch.strided
    elif called == "path":
        return None  # where it was written
    raise ValueError("it calls a function with other arguments")


def _build(made: Any, state: Any) -> None:
    """Sets the fields of an object that `NEWOBJ` made."""
    if type(made) is dcp.TensorProperties and type(state) is tuple and isinstance(state[0], torch.dtype):
        made.__setstate__(state)
        return
    fields = _FIELDS[type(made)]
    if type(state) is not dict or state.keys() != fields.keys():
        raise ValueError(f"{type(made).__name__} has other fields")
    for name, value in state.items():
        if type(value) not in fields[name]:
            raise ValueError(f"{name} of {type(made).__name__} is {type(value).__name__}")
    vars(made).update(state)


def _checked(read: Any) -> dcp.Metadata:
    """The parts of a file's content that loading needs, if every tensor consists of parts of files beside it."""
    if type(read) is not dcp.Metadata:
        raise ValueError(f"it makes {type(read).__name__}")
    tensors: dict[str, Any] = read.state_dict_metadata
    places = read.storage_data
    if any(type(name) is not str or type(entry) is not dcp.TensorStorageMetadata for name, entry in tensors.items()):
        raise ValueError("an entry that is no tensor")
    if sum(len(entry.chunks) for entry in tensors.values()) != len(places):
        raise ValueError("tensors with other parts than it has places for")
    if any(type(chunk) is not dcp.ChunkStorageMetadata for entry in tensors.values() for chunk in entry.chunks):
        raise ValueError("a part of a tensor that is none")
    if any(type(index) is not dcp.MetadataIndex or type(place) is not _StorageInfo for index, place in places.items()):
        raise ValueError("a place that is none")
    for place in places.values():
        if not _FILE.fullmatch(place.relative_path):
            raise ValueError(f"a part of a tensor in {place.relative_path[:200]!r}")
    return dcp.Metadata(tensors, None, places, dcp.StorageMeta(), read.version)
