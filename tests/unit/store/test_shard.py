"""The files of a store: what is written is read, and a damaged byte is found, with its place."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from distill_rl.errors import StoreError
from distill_rl.store.store import SUFFIX, Record, Shard, serialize
from tests.helpers.stores import MANIFEST, record_of


def opened(folder: Path, content: bytes, name: str = "shard") -> Shard:
    path = folder / f"{name}{SUFFIX}"
    path.unlink(missing_ok=True)  # an earlier one may still be mapped
    path.write_bytes(content)
    return Shard(path)


def assert_holds(shard: Shard, records: list[Record]) -> None:
    assert len(shard) == len(records)
    for i, record in enumerate(records):
        assert shard.piece(i) == record.piece
        assert np.array_equal(shard.tokens(i), record.tokens)
        targets = shard.targets(i)
        assert targets.keys() == record.targets.keys()
        for name, column in record.targets.items():
            assert targets[name].dtype == column.dtype
            assert targets[name].values.dtype == column.values.dtype
            assert targets[name].values.tobytes() == column.values.tobytes()
            assert targets[name].values.shape == column.values.shape


def of_dtype(dtype: str) -> list[Record]:
    return [
        record_of("one", range(5), dtype=dtype),
        record_of("two", [], dtype=dtype),
        record_of("three", [7, 8, 9], number=20, dtype=dtype, first=4, prefix=1, whole=False),
        record_of("three", [6], number=40, dtype=dtype, first=7),
    ]


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_records_of_every_dtype_are_read_as_written(tmp_path, dtype):
    records = of_dtype(dtype)
    shard = opened(tmp_path, serialize(records))
    assert_holds(shard, records)
    assert shard.problems() == []
    assert shard.num_tokens == 9


def test_a_shard_may_hold_one_record_or_only_an_empty_one(tmp_path):
    for records in ([record_of("one", [3, 4])], [record_of("empty", [])]):
        assert_holds(opened(tmp_path, serialize(records)), records)


def test_other_tools_read_the_documented_tensors(tmp_path):
    records = of_dtype("F16")
    shard = opened(tmp_path, serialize(records))
    tensors = load_file(shard.path)
    wanted = {"names", "first", "prefix", "length", "whole", "sizes", "checksums", "tokens", *records[0].targets}
    assert tensors.keys() == wanted
    assert tensors["names"].shape == (4, 16)
    assert tensors["length"].tolist() == [5, 0, 3, 1]
    assert tensors["checksums"].shape == (4, 5)
    assert tensors["tokens"].tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 6]
    assert tensors["logprobs"].dtype == np.float16


def test_tensors_are_aligned_to_their_elements(tmp_path):
    shard = opened(tmp_path, serialize(of_dtype("F16")))
    for name in ("first", "sizes", "tokens", "ids", "rest_logprob", "logprobs"):
        array = shard._tensors[name].values
        assert array.__array_interface__["data"][0] % array.itemsize == 0, name


def test_bytes_of_columns_and_index_make_up_the_file(tmp_path):
    content = serialize(of_dtype("F32"))
    sizes = opened(tmp_path, content).column_bytes()
    assert sum(sizes.values()) == len(content)
    assert sizes["logprobs"] == sizes["ids"] == 9 * 3 * 4


def what_is_found(folder: Path, content: bytes, records: list[Record]) -> str:
    """The error of reading all of a shard; empty if it holds what was written."""
    try:
        shard = opened(folder, content)
        problems = shard.problems()
        if not problems:
            assert_holds(shard, records)
        return "\n".join(problems)
    except StoreError as error:
        return str(error)


def test_every_flipped_byte_is_found_with_its_place_or_harmless(tmp_path):
    records = [record_of("one", range(4)), record_of("two", [9, 8, 7], first=3, prefix=1, whole=False)]
    content = serialize(records, MANIFEST.identity)
    assert what_is_found(tmp_path, content, records) == ""
    header_end = 8 + int.from_bytes(content[:8], "little")
    harmless = []
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        line = what_is_found(tmp_path, bytes(damaged), records)
        if not line:
            harmless.append(place)
            continue
        assert f"{tmp_path}/shard{SUFFIX}" in line, (place, line)
        if place >= header_end:
            begin, end = (
                int(number.replace(",", "")) for number in re.search(r"bytes ([\d,]+) to ([\d,]+)", line).groups()
            )
            assert begin <= place < end, (place, line)
    assert all(8 <= place < header_end for place in harmless), "data are all covered"
    marker = content.index(b'"distill_rl":"targets"')
    assert all(marker <= place < marker + 22 for place in harmless), "only what nothing reads may be changed"


def test_damage_of_a_record_leaves_the_others_readable(tmp_path):
    records = [record_of("one", range(4)), record_of("two", [9, 8, 7], number=50)]
    content = bytearray(serialize(records))
    place = content.index(records[0].targets["logprobs"].values.tobytes())
    content[place] ^= 1
    shard = opened(tmp_path, bytes(content))
    assert np.array_equal(shard.tokens(0), records[0].tokens)
    with pytest.raises(StoreError, match="logprobs of record 0 does not match its checksum"):
        shard.targets(0)
    with pytest.raises(StoreError, match="capture what it held again"):
        shard.targets(0)
    assert shard.targets(1)["label_logprob"].values.tolist() == [-50, -51, -52]
    (line,) = shard.problems()
    assert f"bytes {place:,} to {place + 4 * 3 * 4:,}" in line


def test_a_shard_cut_off_anywhere_is_refused(tmp_path):
    content = serialize([record_of("one", range(3))])
    for length in range(len(content)):
        with pytest.raises(StoreError) as refused:
            opened(tmp_path, content[:length])
        assert f"shard{SUFFIX}" in str(refused.value), length


def test_another_version_is_refused_as_such(tmp_path):
    content = serialize([record_of("one", range(3))])
    with pytest.raises(StoreError, match=r"a shard of version 1; this one was written by another version.*got 2"):
        opened(tmp_path, content.replace(b'"version":"1"', b'"version":"2"'))


@pytest.mark.parametrize("content", [b"", b"x", b"not a safetensors file, but long enough to be one", bytes(64)])
def test_other_files_are_refused(tmp_path, content):
    with pytest.raises(StoreError, match="not a safetensors file, or cut off"):
        opened(tmp_path, content)


def test_a_safetensors_file_of_something_else_is_refused(tmp_path):
    from safetensors.numpy import save

    for metadata in (None, {"format": "pt"}, {"version": "1"}):
        with pytest.raises(StoreError):
            opened(tmp_path, save({"weight": np.zeros(3, np.float32)}, metadata))


def test_index_checksum_is_the_crc32_of_the_tensors_it_covers(tmp_path):
    content = serialize(of_dtype("F16"))
    tensors = load_file(opened(tmp_path, content).path)
    names = ("names", "first", "prefix", "length", "whole", "sizes", "checksums")
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    expected = zlib.crc32(b"".join(tensors[name].tobytes() for name in names))
    assert header["__metadata__"]["index_checksum"] == f"{expected:08x}"
