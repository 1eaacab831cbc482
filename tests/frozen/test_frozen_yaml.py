"""Configurations and overrides of an earlier commit mean what they meant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from distill_rl.config.load import load_config, read_config
from distill_rl.config.rules import problems
from distill_rl.preflight import gather
from tests.frozen.past import MOVED, SHORT, Past, reads


def settings(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of what a YAML file sets; mappings whose names the user chooses are one value."""
    if isinstance(node, dict) and not path.endswith(".where") and node:
        for key, value in node.items():
            yield from settings(value, f"{path}.{key}".lstrip("."))
    elif isinstance(node, list) and node and isinstance(node[0], dict):
        for i, value in enumerate(node):
            yield from settings(value, f"{path}.{i}")
    else:
        yield path, node


def value_of(config: Any, key: str) -> Any:
    of_first = re.sub(r"^teachers\.\d+", "teachers.0", key)
    place = MOVED.get(of_first, SHORT.get(of_first, of_first)).split(".")
    for part in [*place[:1], *key.split(".")[1:2], *place[2:]]:
        config = config[int(part)] if isinstance(config, list) else getattr(config, part)
    return config


def means(value: Any, written: Any) -> bool:
    """Whether a setting has the value that a file gives it: `on` is a boolean in YAML, and one text may stand for a list."""
    if isinstance(written, dict) and not isinstance(value, dict):  # `lora: {}`
        return value is not None
    words = {True: "on", False: "off"}.get(written) if isinstance(written, bool) else None
    return value in (written, words) or value == [written]


@reads("yaml")
def test_every_file_is_valid_and_keeps_its_values(past: Past):
    files = sorted(Path("yaml").rglob("*.yaml"))
    assert len(files) > 30
    for file in [*files, *Path("runs").glob("*/config.yaml")]:
        config = load_config(file)
        if file.name != "base.yaml":  # only the files that extend it have teachers
            assert problems(config) == [], file
        for key, value in settings(OmegaConf.to_container(OmegaConf.load(file), resolve=False)):
            if key != "extends" and "${" not in str(value):
                assert means(value_of(config, key), value), f"{file}: {key}"


@reads("yaml")
def test_every_setting_can_still_be_given_on_the_command_line(past: Past):
    refused = []
    for override in Path("yaml/overrides.txt").read_text().splitlines():
        lines = read_config({}, [override])[1].lines
        key, _, value = override.partition("=")
        refused += [line for line in lines if line.startswith(f"{key}:") and value != "???"]
    assert refused == []


@reads("yaml")
def test_a_key_that_moved_is_read_with_a_note_of_the_new_spelling(past: Past):
    overrides = dict(line.split("=", 1) for line in Path("yaml/overrides.txt").read_text().splitlines())
    assert MOVED.keys() <= overrides.keys()
    for old, new in MOVED.items():
        notes = gather("yaml/two-teachers.yaml", [f"{old}={overrides[old]}", "run.name=moved"]).notes
        assert sum(old in note and new in note for note in notes) == 1, notes


@reads("yaml")
def test_every_field_of_a_teacher_is_set_in_a_frozen_file(past: Past):
    """What is checked here is the frozen past: it leaves none out."""
    written = {
        key.split(".")[2]
        for file in Path("yaml").glob("teacher-*.yaml")
        for key, _ in settings(OmegaConf.to_container(OmegaConf.load(file), resolve=False))
        if key.startswith("teachers.")
    }
    overrides = [line.split("=")[0].split(".") for line in Path("yaml/overrides.txt").read_text().splitlines()]
    assert written == {key[2] for key in overrides if key[0] == "teachers"}
