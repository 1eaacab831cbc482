"""What a store says of itself is read as it was written, or refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from distill_rl.errors import StoreError
from distill_rl.store.store import (
    FILE,
    TEACHER,
    Store,
    describe_teacher,
    description_problems,
    read_manifest,
    require_same,
    write_manifest,
)
from tests.helpers.stores import MANIFEST


@pytest.fixture
def model(tmp_path) -> Path:
    """A model's folder: its description, and weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "vocab.txt", "tokenizer.model"):
        (folder / name).write_text(f"{name} of the model")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder


def edit(folder: Path, **changes: object) -> None:
    value = json.loads((folder / FILE).read_text())
    (folder / FILE).write_text(json.dumps(value | changes))


def test_a_manifest_is_read_as_it_was_written(tmp_path):
    manifest = replace(MANIFEST, revision="main", mass=0.95, temperature=0.1 + 0.2, files={"config.json": "c" * 64})
    write_manifest(tmp_path / "store", manifest)
    assert read_manifest(tmp_path / "store") == manifest


@pytest.mark.parametrize(("changes", "words"), [
    ({"temperature": 2.0}, ("manifest.json, byte 0", "does not match its checksum", "copy it again")),
    ({"weights": "c" * 64}, ("does not match its checksum",)),
    ({"more": 1}, ("does not match its checksum",)),
    ({"checksum": "0" * 64}, ("does not match its checksum",)),
    ({"version": 2}, ("version 1 can be read", "got 2", "update distill_rl")),
])  # fmt: skip
def test_an_edited_or_newer_manifest_is_refused(tmp_path, changes, words):
    write_manifest(tmp_path, MANIFEST)
    edit(tmp_path, **changes)
    with pytest.raises(StoreError) as refused:
        read_manifest(tmp_path)
    assert all(word in str(refused.value) for word in (str(tmp_path), *words)), refused.value


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "{}", '{"version": 1}', "\ufeff{}"])
def test_what_is_no_manifest_is_refused(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(StoreError, match="must be a manifest of a store"):
        read_manifest(tmp_path)


def test_a_flipped_bit_anywhere_is_noticed(tmp_path):
    write_manifest(tmp_path, MANIFEST)
    content = (tmp_path / FILE).read_bytes()
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 7
        (tmp_path / FILE).write_bytes(damaged)
        line = ""
        try:
            assert read_manifest(tmp_path) == MANIFEST, "only white space may differ"
        except StoreError as error:
            line = str(error)
        assert not line or str(tmp_path / FILE) in line


def test_a_folder_without_a_store_is_told_from_none(tmp_path):
    for folder, value in ((tmp_path, "no manifest.json"), (tmp_path / "absent", "no such folder")):
        with pytest.raises(StoreError, match=f"{folder}: must be a store, a folder that `distill-rl capture`.*{value}"):
            read_manifest(folder)


def test_every_difference_to_another_capture_is_named(tmp_path):
    write_manifest(tmp_path, MANIFEST)
    require_same(tmp_path, replace(MANIFEST, model="elsewhere/teacher", revision="v2", files={"config.json": "d" * 64}))
    other = replace(
        MANIFEST,
        entries=64,
        temperature=2.0,
        wire_dtype="fp16",
        dtype="bf16",
        weights="c" * 64,
        tokenizer="d" * 64,
        vocabulary_size=321,
        format="compact",
        mass=0.9,
    )
    with pytest.raises(StoreError) as refused:
        require_same(tmp_path, other)
    line = str(refused.value)
    for words in (
        "entries per token (loss.top_k or loss.draws) 3 here, 64 there",
        "loss.temperature 1.0 here, 2.0 there",
        "teachers[].wire_dtype fp32 here, fp16 there",
        "teachers[].dtype fp32 here, bf16 there",
        "the teacher's weights aaaaaaaaaaaa here, cccccccccccc there",
        "the teacher's tokenizer bbbbbbbbbbbb here, dddddddddddd there",
        "ids that are compared 320 here, 321 there",
        "capture.format exact here, compact there",
        "capture.mass null here, 0.9 there",
        "one store holds the targets of one teacher",
        "keep them in folders of their own",
    ):
        assert words in line


def test_the_description_has_no_weights_and_the_models_files_first(tmp_path, model):
    other = tmp_path / "tokenizer"
    other.mkdir()
    (other / "tokenizer.json").write_text("another tokenizer")
    store = tmp_path / "store"
    files = describe_teacher(store, [model, other])
    names = {"config.json", "tokenizer.json", "chat_template.jinja", "vocab.txt", "tokenizer.model"}
    assert files.keys() == names
    assert {path.name for path in (store / TEACHER).iterdir()} == names
    assert (store / TEACHER / "tokenizer.json").read_text() == "another tokenizer", "the one that is read"
    assert list(description_problems(store, replace(MANIFEST, files=files))) == []


def test_changed_and_missing_files_of_the_description_are_named(tmp_path, model):
    store = tmp_path / "store"
    files = describe_teacher(store, [model])
    (store / TEACHER / "config.json").write_text("changed")
    (store / TEACHER / "vocab.txt").unlink()
    changed, missing = description_problems(store, replace(MANIFEST, files=files))
    assert f"{store}/teacher/config.json, byte 0: must have the sha256 {files['config.json'][:12]}" in changed
    assert "vocab.txt" in missing
    assert "got no file" in missing


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def test_a_store_made_where_groups_may_write_can_be_opened(tmp_path, model):
    with umask(0o002):
        store = tmp_path / "store"
        write_manifest(store, replace(MANIFEST, files=describe_teacher(store, [model])))
    assert len(Store(store)) == 0
