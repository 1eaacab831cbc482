"""A teacher's backend as a section, and the keys of the teacher in which these settings were before."""

from __future__ import annotations

from typing import Any

import pytest

from distill_rl.config.load import read_config
from distill_rl.config.rules import notes, problems
from distill_rl.config.save import decisive, fingerprint, to_yaml
from distill_rl.config.schema import Config
from distill_rl.config.walk import Findings

SERVED = {"tokenizer": "t", "endpoint": {"url": "http://h:8000", "api": "vllm"}}


def read(teacher: dict[str, Any], *overrides: str) -> tuple[Config, Findings]:
    source = {"student.model": "s", "data.path": "d", "train.steps": 1, "teachers": [{"model": "m"} | teacher]}
    config, findings = read_config(source, overrides)
    assert config is not None
    return config, findings


@pytest.mark.parametrize(
    ("earlier", "today"),
    [
        ({"backend": "hf"}, {}),
        ({"backend": "vllm"}, {"vllm": {}}),
        ({"backend": "vllm"}, {"vllm": None}),
        ({"backend": "vllm", "gpu_share": 0.3}, {"vllm": {"gpu_share": 0.3}}),
        ({"backend": "store", "store": "targets"}, {"store": {"path": "targets"}}),
        ({"backend": "store", "store": "a", "missing": "skip"}, {"store": {"path": "a", "missing": "skip"}}),
        (
            {"backend": "endpoint", "tokenizer": "t", "url": "http://h:8000", "api": "vllm", "retry_s": 9},
            SERVED | {"endpoint": SERVED["endpoint"] | {"retry_s": 9}},
        ),
        (
            {"backend": "endpoint", "tokenizer": "t", "url": ["http://a", "http://b"], "api": "openai", "ca_file": "c",
             "token_env": "DISTILL_RL_TOKEN", "concurrency": 2, "request_timeout_s": 3.0},
            {"tokenizer": "t", "endpoint": {"url": ["http://a", "http://b"], "api": "openai", "ca_file": "c",
             "token_env": "DISTILL_RL_TOKEN", "concurrency": 2, "request_timeout_s": 3.0}},
        ),
    ],
)  # fmt: skip
def test_both_spellings_are_one_configuration_and_the_earlier_one_has_one_note(earlier, today) -> None:
    (before, found), (after, silent) = read(earlier), read(today)
    assert (before, found.lines, silent.lines) == (after, [], [])
    assert fingerprint(before) == fingerprint(after)
    assert silent.notes == []
    flat = [key for key in earlier if key not in ("backend", "store", "tokenizer")]
    assert len(found.notes) == bool(flat)
    for key in flat:
        assert f"teachers.0.{key} is now teachers.0." in found.notes[0]


def test_an_earlier_key_with_its_default_is_said_on_the_command_line_only() -> None:
    before = {
        "gpu_share": None,
        "url": [],
        "concurrency": 16,
        "request_timeout_s": 120.0,
        "store": None,
        "missing": "fail",
    }
    config, findings = read(before)
    assert (config, findings.notes) == (read({})[0], [])
    _, findings = read({}, "teachers.0.concurrency=16")
    assert findings.notes == [
        "earlier keys are read as before: teachers.0.concurrency is now teachers.0.endpoint.concurrency"
    ]


def test_a_saved_configuration_reads_back(tmp_path) -> None:
    for teacher in (SERVED, {"store": {"path": "a"}}, {"vllm": {"gpu_share": 0.3}}, {}):
        config, _ = read(teacher)
        (tmp_path / "config.yaml").write_text(to_yaml(config))
        again, findings = read_config(tmp_path / "config.yaml")
        assert (again, findings.lines, findings.notes) == (config, [], [])


def test_the_command_line_overrides_either_spelling_with_either() -> None:
    flat = {"backend": "endpoint", "tokenizer": "t", "url": "http://a", "api": "vllm"}
    for teacher in (flat, SERVED):
        for key in ("teachers.0.url", "teachers.0.endpoint.url"):
            config, findings = read(teacher, f"{key}=http://b")
            assert (config.teachers[0].endpoint.url, findings.lines) == (["http://b"], [])
    for override in ("teachers.0.store=b", "teachers.0.store.path=b", "teachers.0.store={path: b}"):
        config, _ = read({"backend": "store", "store": "a", "missing": "skip"}, override)
        assert (config.teachers[0].store.path, config.teachers[0].store.missing) == ("b", "skip")


def test_references_name_either_spelling() -> None:
    for key in ("retry_s", "endpoint.retry_s"):
        config, findings = read(SERVED | {"name": f"n${{teachers.0.{key}}}"}, "teachers.0.endpoint.retry_s=7")
        assert (config.teachers[0].name, findings.lines) == ("n7", [])


@pytest.mark.parametrize(
    ("teacher", "line"),
    [
        (
            {"vllm": {"gpu_share": 0.3}, "gpu_share": 0.4},
            "teachers.0.gpu_share: contradicts teachers.0.vllm.gpu_share=0.3, which is the same setting; got 0.4",
        ),
        ({"vllm": {}, "endpoint": {}}, "teachers.0: a teacher has one backend; got vllm and endpoint"),
        (
            {"endpoint": {"request_timeout": 3}},
            "teachers.0.endpoint.request_timeout: unknown key; did you mean teachers.0.endpoint.request_timeout_s?",
        ),
        ({"store": {"folder": "a"}}, "teachers.0.store.folder: unknown key; keys here: path, missing"),
        ({"store": {"path": 5}}, 'teachers.0.store.path: must be text or null; got 5; put it in quotes: path: "5"'),
        ({"vllm": 5}, "teachers.0.vllm: must be a section with the keys gpu_share; got 5"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(teacher, line) -> None:
    _, findings = read(teacher)
    assert [text for text in findings.lines if text.startswith(line)] == findings.lines
    assert len(findings.lines) == 1


def test_a_flat_key_chooses_no_backend() -> None:
    for key, value in (("gpu_share", 0.4), ("store", "a"), ("url", "http://h")):
        config, _ = read({key: value})
        assert config.teachers[0].backend == "hf"
        assert len(problems(config)) == 1
        assert [config] == [read({}, f"teachers.0.{key}={value}")[0]]


@pytest.mark.parametrize(
    ("teacher", "override", "backend"),
    [
        ({"vllm": {"gpu_share": 0.5}}, "gpu_share=null", "vllm"),
        ({"store": {"path": "a"}}, "store=b", "store"),
        (SERVED, "url=http://b", "endpoint"),
        ({"vllm": {}}, "gpu_share=0.3", "vllm"),
        ({}, "vllm.gpu_share=0.3", "vllm"),
        ({"gpu_share": 0.3}, "gpu_share=0.4", "hf"),
    ],
)
def test_a_section_chooses_the_backend_whatever_flat_keys_follow(teacher, override, backend) -> None:
    config, findings = read(teacher, f"teachers.0.{override}")
    assert (config.teachers[0].backend, findings.lines) == (backend, [])


def test_a_list_in_place_of_teachers_has_sections_of_its_own() -> None:
    config, _ = read({"vllm": {"gpu_share": 0.5}}, "teachers=[{model: m, gpu_share: 0.4}]")
    assert config.teachers[0].backend == "hf"


def test_two_teachers_do_not_share_a_store_by_another_spelling() -> None:
    config, _ = read({"name": "a", "cache": "c"}, "teachers.1={name: b, model: n, cache: ./c}")
    assert any("every teacher needs a store of its own" in line for line in problems(config))


def test_settings_of_another_backend_have_no_effect() -> None:
    config, _ = read({"backend": "vllm", "endpoint": {"concurrency": 3}, "store": {"missing": "skip"}})
    assert problems(config) == []
    assert [line.split(" has no effect: ")[0] for line in notes(config)] == [
        "teachers.0.endpoint.concurrency=3",
        "teachers.0.store.missing=skip",
    ]


def test_what_decides_the_numbers_has_the_keys_that_earlier_checkpoints_know() -> None:
    config, _ = read({"store": {"path": "a", "missing": "skip"}, "vllm": {}, "backend": "store"})
    keys = {key for key in decisive(config) if key.startswith("teachers.0.")}
    assert {"teachers.0.gpu_share", "teachers.0.missing"} <= keys
    assert not any(part in key for key in keys for part in ("store", "vllm", "endpoint", "url"))
