"""R21: a run is identified by the content of its files, and a checkpoint of other files is refused."""

import json
import re
import shutil

import pytest

from distill_rl.config.load import load_config
from distill_rl.data.order import random_order
from distill_rl.data.reading import files, source
from distill_rl.errors import CheckpointError
from distill_rl.run import checkpoints
from distill_rl.run.job import prepare
from distill_rl.run.opened import open_rows
from distill_rl.types import RunPaths


@pytest.fixture
def copy(material, tmp_path):
    """A copy of the material in another folder, for changes."""
    root = tmp_path / "copy"
    root.mkdir()
    for name in ("student", "teacher"):
        shutil.copytree(material / name, root / name)
    for name in ("data.jsonl", "chat.jsonl"):
        shutil.copy(material / name, root / name)
    (root / "run.yaml").write_text((material / "run.yaml").read_text().replace(str(material), str(root)))
    return root


def fingerprints(root, data, *settings):
    config = load_config(root / "run.yaml", [f"data.path={root}/{data}", *settings])
    return prepare(open_rows(config), RunPaths(root / "runs" / "mine")).fingerprints


def change_a_word(root):
    file = root / "data.jsonl"
    file.write_text(file.read_text().replace("a", "e", 1))


def add_a_token(root):
    for model in ("student", "teacher"):
        file = root / model / "tokenizer.json"
        content = json.loads(file.read_text())
        content["added_tokens"][0]["lstrip"] = not content["added_tokens"][0]["lstrip"]
        file.write_text(json.dumps(content))


def change_a_weight(root, model="teacher"):
    file = root / model / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def change_the_shape(root):
    file = root / "student" / "config.json"
    file.write_text(file.read_text().replace("{", '{"attention_dropout": 0.25,', 1))


def change_the_template(root):
    file = root / "student" / "chat_template.jinja"
    file.write_text(file.read_text() + " ")


@pytest.mark.parametrize(
    ("data", "change", "name"),
    [
        ("data.jsonl", change_a_word, "data"),
        ("data.jsonl", add_a_token, "tokenizer"),
        ("data.jsonl", change_a_weight, "teacher big"),
        ("data.jsonl", change_the_shape, "student"),
        ("chat.jsonl", change_the_template, "chat template"),
    ],
)
def test_edited_file_is_refused_with_both_hashes(material, copy, data, change, name):
    saved = fingerprints(copy, data)
    assert saved["data"] == fingerprints(material, data)["data"], "the path must not matter"
    change(copy)
    current = fingerprints(copy, data)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.require_same(saved, current)
    (line,) = caught.value.problems
    assert line.startswith(f"the {name} of this run: ")
    assert re.search(f"{current[name][:16]}, saved with {saved[name][:16]}", line)


def test_other_weights_beside_adapters_are_refused(copy):
    saved = fingerprints(copy, "data.jsonl", "student.lora={}")
    change_a_weight(copy, "student")
    current = fingerprints(copy, "data.jsonl", "student.lora={}")
    with pytest.raises(CheckpointError) as caught:
        checkpoints.require_same(saved, current)
    (line,) = caught.value.problems
    assert line.startswith("the frozen weights of this run: ")
    assert f"{current['frozen weights'][:16]}, saved with {saved['frozen weights'][:16]}" in line
    del saved["frozen weights"]  # as in checkpoints of before
    checkpoints.require_same(saved, current)
    assert "frozen weights" not in fingerprints(copy, "data.jsonl"), "all weights are in a checkpoint without adapters"


def test_a_checkpoint_of_the_former_order_goes_on_in_it(material, monkeypatch):
    """Large data had one permutation of all rows; a run that was begun in it ends in it."""
    former = fingerprints(material, "data.jsonl")
    monkeypatch.setattr(files, "SMALL_BYTES", 0)
    monkeypatch.setattr(source, "WINDOW_BYTES", 1)
    monkeypatch.setattr(files, "BLOCK_BYTES", 256)
    config = load_config(material / "run.yaml")
    job = prepare(open_rows(config), RunPaths(material / "runs" / "mine"))
    assert job.fingerprints["order of the data"] == "run.seed=0, shuffled blocks, version 1"
    rows = len(job.opened.train)
    assert [job.order(i) for i in range(rows)] != random_order(0, (0, 0), rows).tolist()
    resumed = job.going_on(former)
    assert resumed.fingerprints == former
    assert [resumed.order(i) for i in range(rows)] == random_order(0, (0, 0), rows).tolist()
    assert job.going_on(job.fingerprints) is job
    assert job.going_on({}) is job
    with pytest.raises(CheckpointError, match="order of the data"):
        checkpoints.require_same(former | {"order of the data": "run.seed=1"}, resumed.fingerprints)
