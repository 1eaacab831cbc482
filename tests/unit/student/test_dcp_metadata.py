"""Files that torch wrote are read as `pickle` reads them; what a hostile one would do is not done."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from distill_rl.student.checkpoint import read_metadata
from tests.frozen.past import FOLDER


class Call:
    """Is pickled as a call."""

    def __init__(self, function: Callable, *arguments: Any):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def changed(file: bytes, **fields: Any) -> bytes:
    """A genuine file with other fields of a tensor, or of the place of one."""
    metadata = pickle.loads(file)
    for made in (metadata, *metadata.state_dict_metadata.values(), *metadata.storage_data.values()):
        vars(made).update({name: value for name, value in fields.items() if hasattr(made, name)})
    return pickle.dumps(metadata)


def nested(depth: int, instruction: bytes) -> bytes:
    return b")" + instruction * depth


GLOBAL = b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93"
UPON_A_TYPE = GLOBAL + b"N}\x8c\x08__init__\x8c\x05torch\x8c\x04Size\x93s\x86b."  # (None, {"__init__": torch.Size})
DOUBLING = b")\x94" + b"".join(b"h" + bytes([level]) + b"\x86\x94" for level in range(99))
"""A tuple of itself twice, 99 times: whatever walks through it never ends."""
HOSTILE: dict[str, Callable[[bytes, Path], bytes]] = {
    "a call": lambda file, mark: pickle.dumps(Call(os.mkdir, str(mark))),
    "a call of an old protocol": lambda file, mark: pickle.dumps(Call(os.mkdir, str(mark)), protocol=0),
    "a call in a field": lambda file, mark: changed(file, chunks=[Call(os.mkdir, str(mark))]),
    "a call behind a genuine file": lambda file, mark: file[:-1] + b"0" + pickle.dumps(Call(os.mkdir, str(mark)))[2:],
    "a call in the arguments of another": lambda file, mark: pickle.dumps(Call(torch.Size, (Call(os.mkdir, str(mark)),))),
    "a name": lambda file, mark: pickle.dumps(os.system),
    "a name with dots": lambda file, mark: b"\x80\x04\x8c\x05torch\x8c\x0aSize.count\x93.",
    "an old instruction": lambda file, mark: b"cposix\nmkdir\n(S'" + str(mark).encode() + b"'\ntR.",
    "an old instance": lambda file, mark: b"(S'" + str(mark).encode() + b"'\niposix\nmkdir\n.",
    "a persistent name": lambda file, mark: b"Px\n.",
    "an extension": lambda file, mark: b"\x82\x01.",
    "a state of a type": lambda file, mark: UPON_A_TYPE,
    "another field": lambda file, mark: GLOBAL + b")\x81}\x8c\x09__class__Nsb.",
    "an empty field": lambda file, mark: changed(file, storage_data=None),
    "a size that is a list": lambda file, mark: changed(file, size=[4, 4]),
    "a size of sizes": lambda file, mark: changed(file, size=Call(torch.Size, ((4,),))),
    "a file elsewhere": lambda file, mark: changed(file, relative_path="../__0_0.distcp"),
    "a decoder": lambda file, mark: changed(file, transform_descriptors=["x"]),
    "a pickle as content": lambda file, mark: pickle.dumps(
        Metadata({"a": BytesStorageMetadata()}, {}, {MetadataIndex("a"): _StorageInfo("__0_0.distcp", 0, 1)})
    ),
    "parts without a place": lambda file, mark: pickle.dumps(
        Metadata(dict.fromkeys(map(str, range(9)), next(iter(pickle.loads(file).state_dict_metadata.values()))), {}, {})
    ),
    "an empty object": lambda file, mark: GLOBAL + b")\x81.",
    "an index without a name": lambda file, mark: (
        b"\x80\x04}\x8c\x25torch.distributed.checkpoint.metadata\x8c\x0dMetadataIndex\x93)\x81Ns."
    ),
    "a place in the memo that is far away": lambda file, mark: b"\x80\x04)r\xff\xff\xff\xff.",
    "nothing in the memo": lambda file, mark: b"\x80\x04j\xff\xff\xff\xff.",
    "a text of exabytes": lambda file, mark: b"\x80\x04\x8d" + (2**60).to_bytes(8, "little") + b"x.",
    "a number of many digits": lambda file, mark: b"I" + b"9" * 100_000 + b"\n.",
    "a key that doubles": lambda file, mark: b"}" + DOUBLING + b"Ns.",
    "a key of deep tuples": lambda file, mark: b"}" + nested(1_000_000, b"\x85") + b"Ns.",
    "a name of deep tuples": lambda file, mark: nested(1_000_000, b"\x85") + b")\x93.",
    "a name that doubles": lambda file, mark: DOUBLING + b")\x93.",
    "a type that doubles": lambda file, mark: DOUBLING + b")\x81.",
    "a function that doubles": lambda file, mark: DOUBLING + b")R.",
    "an argument that doubles": lambda file, mark: (
        b"\x8c\x05torch\x8c\x04Size\x93" + DOUBLING + b"R."
    ),
    "a result of deep tuples": lambda file, mark: nested(1_000_000, b"\x85") + b".",
    "the list that holds itself": lambda file, mark: b"\x80\x04]\x94h\x00a.",
    "an empty stack": lambda file, mark: b"\x80\x04.",
    "no end": lambda file, mark: file[:-1],
    "no file": lambda file, mark: b"",
}  # fmt: skip


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("genuine")
    tensors = {"a": torch.zeros(2, 3), "b": torch.tensor(1.0), "c": torch.zeros(70_000, 1, dtype=torch.bfloat16)}
    dcp.save(tensors | {"random": torch.get_rng_state()}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return (folder / ".metadata").read_bytes()


def test_genuine_files_are_read_as_pickle_reads_them(genuine: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(genuine)
    files = [tmp_path / ".metadata", *FOLDER.glob("*/runs/*/checkpoints/*/student/.metadata")]
    assert len(files) > 4
    for file in files:
        read, wanted = read_metadata(file), pickle.loads(file.read_bytes())
        assert read.state_dict_metadata == wanted.state_dict_metadata
        assert read.storage_data == wanted.storage_data
        assert read.version == wanted.version


@pytest.mark.parametrize("what", HOSTILE)
def test_what_a_hostile_file_would_do_is_not_done(genuine: bytes, tmp_path: Path, what: str) -> None:
    file, mark = tmp_path / ".metadata", tmp_path / "ran"
    file.write_bytes(HOSTILE[what](genuine, mark))
    before = dict(vars(Metadata))
    with pytest.raises(ValueError):  # noqa: PT011
        read_metadata(file)
    assert not mark.exists()
    assert dict(vars(Metadata)) == before
