"""The rules of served teachers, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from distill_rl.config.load import read_config
from distill_rl.config.rules import notes, problems
from distill_rl.config.save import decisive, to_yaml
from distill_rl.config.schema import Config
from distill_rl.config.schema.models import backend_problems

GOOD = {
    "name": "big",
    "model": "served",
    "backend": "endpoint",
    "url": "http://h:8000",
    "api": "vllm",
    "tokenizer": "t",
}


def config_of(*overrides: str, **teacher: Any) -> Config:
    source = {"student.model": "s", "data.path": "d", "train.steps": 1, "teachers": [GOOD | teacher]}
    config, findings = read_config(source, overrides)
    assert findings.lines == []
    assert config is not None
    return config


def test_a_complete_teacher_has_no_problem_and_one_url_is_a_list_of_one() -> None:
    config = config_of()
    assert config.teachers[0].endpoint.url == ["http://h:8000"]
    assert problems(config) == []
    assert config_of("teachers.0.endpoint.url=https://other:1/gateway").teachers[0].endpoint.url == [
        "https://other:1/gateway"
    ]
    assert config_of(url=["http://a", "http://b:2"]).teachers[0].endpoint.url == ["http://a", "http://b:2"]


def test_the_served_name_is_no_path(tmp_path, monkeypatch) -> None:
    from distill_rl.config.paths import absolute

    monkeypatch.chdir(tmp_path)
    for name in ("served", "t"):
        (tmp_path / name).mkdir()
    teacher = absolute(config_of()).teachers[0]
    assert (teacher.model, teacher.tokenizer) == ("served", str(tmp_path / "t"))


@pytest.mark.parametrize(
    ("teacher", "words"),
    [
        ({"url": []}, "teachers.0.endpoint.url: backend endpoint needs a server; got null; add teachers.0.endpoint.url=http://HOST:PORT"),
        ({"api": None}, "teachers.0.endpoint.api: backend endpoint needs the server's interface"),
        ({"tokenizer": None}, "teachers.0.tokenizer: backend endpoint needs the tokenizer of the served model"),
        ({"url": "h:8000"}, "teachers.0.endpoint.url: must be an address such as http://host:8000; got h:8000"),
        ({"url": "http://h:80000"}, "teachers.0.endpoint.url: must be an address such as http://host:8000 (Port out of range"),
        ({"url": "http://h/v1/"}, "teachers.0.endpoint.url: is the address in front of /v1; got http://h/v1/; use http://h"),
        ({"url": "http://h?a=1"}, "teachers.0.endpoint.url: must end with the host, the port or a path"),
        ({"url": "http://me:pw@h"}, "teachers.0.endpoint.url: must not hold a password; got http://<redacted>@h; put a token in"),
        ({"url": ["http://a", "ftp://b"]}, "teachers.0.endpoint.url.1: must be an address such as http://host:8000; got ftp://b"),
        ({"url": ["http://a", "http://a/"]}, "teachers.0.endpoint.url: names a server twice; got http://a"),
        ({"token_env": "AWS_SECRET_ACCESS_KEY"}, "teachers.0.endpoint.token_env: must be DISTILL_RL_TOKEN or DISTILL_RL_<NAME>_TOKEN"),
        ({"ca_file": "ca.pem"}, "teachers.0.endpoint.ca_file: is used with https only; got ca.pem"),
        ({"export": "hidden"}, "teachers.0.export: a server gives the most likely tokens (topk); got hidden"),
        ({"parallel": {"tp": 2}}, "teachers.0.parallel.tp: no model is divided here"),
        ({"retry_s": 900}, "teachers.0.endpoint.retry_s: must be less than ray.step_timeout_s=900"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(teacher: dict[str, Any], words: str) -> None:
    (line,) = backend_problems(config_of(**teacher))
    assert line.startswith(words), line


@pytest.mark.parametrize("name", ["DISTILL_RL_TOKEN", "DISTILL_RL_BIG_TOKEN"])
def test_variables_of_this_program_may_hold_a_token(name: str) -> None:
    assert problems(config_of(token_env=name)) == []


def test_another_temperature_is_refused_with_the_reason() -> None:
    (line,) = backend_problems(config_of("loss.temperature=2"))
    assert line.startswith("loss.temperature: must be 1: a server gives the log-probs of teacher big at temperature 1")
    assert list(backend_problems(config_of("loss.temperature=2", "loss.kd_weight=0", "loss.ce_weight=1"))) == []


@pytest.mark.parametrize("setting", ["url=http://h", "api=vllm", "token_env=DISTILL_RL_TOKEN", "ca_file=f"])
def test_settings_of_an_endpoint_are_refused_elsewhere(setting: str) -> None:
    name = setting.partition("=")[0]
    config, _ = read_config(
        {"student.model": "s", "data.path": "d", "teachers.0.model": "t"}, [f"teachers.0.{setting}"]
    )
    assert config is not None
    (line,) = backend_problems(config)
    assert line.startswith(f"teachers.0.endpoint.{name}: is a setting of backend endpoint only")


def test_what_has_no_effect_is_said() -> None:
    lines = notes(config_of(dtype="fp32", attention="eager"))
    assert any(
        "teachers.0.dtype=fp32, teachers.0.attention=eager have no effect: the run does not load" in line
        for line in lines
    )
    config, _ = read_config({"student.model": "s", "data.path": "d", "teachers.0.model": "t"}, ["teachers.0.retry_s=9"])
    assert config is not None
    assert any(
        "teachers.0.endpoint.retry_s=9.0 has no effect: the teacher is not behind a server" in line
        for line in notes(config)
    )


def test_a_server_may_move_between_a_start_and_its_resumption() -> None:
    moved = config_of(url="https://elsewhere", api="sglang", token_env="DISTILL_RL_TOKEN", concurrency=2)
    assert decisive(config_of()) == decisive(moved)
    assert decisive(config_of()) != decisive(config_of(model="another"))


def test_a_saved_configuration_names_the_variable_and_no_token(monkeypatch) -> None:
    monkeypatch.setenv("DISTILL_RL_TOKEN", "s3cret-9")
    text = to_yaml(config_of(token_env="DISTILL_RL_TOKEN"))
    assert "token_env: DISTILL_RL_TOKEN" in text
    assert "s3cret-9" not in text
