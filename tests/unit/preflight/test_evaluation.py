"""What is told of the suites of a run before it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distill_rl.config.schema import Config
from distill_rl.preflight.evaluation import suite_problems
from distill_rl.preflight.opened import Opened
from tests.helpers.suites import write_suite
from tests.helpers.tokenizers import tiny_tokenizer

STUDENT = Opened(tokenizer=tiny_tokenizer())


def asked(*suites: str, data: Path | None) -> Config:
    config = Config()
    config.evaluate.suites = list(suites)
    config.evaluate.data = None if data is None else str(data)
    return config


def test_a_good_suite_has_no_problem(tmp_path: Path) -> None:
    assert suite_problems(asked(str(write_suite(tmp_path)), data=tmp_path), STUDENT) == []


def test_without_suites_nothing_is_looked_for(tmp_path: Path) -> None:
    assert suite_problems(asked(data=tmp_path / "nothing"), Opened()) == []


@pytest.mark.parametrize(
    ("suites", "words"), [(("mmul",), "must be among"), (("mmlu",), "mmlu"), (("mmlu", "gsm8k"), "gsm8k")]
)
def test_unknown_suites_and_missing_data_are_one_line_each(tmp_path: Path, suites: tuple[str, ...], words: str) -> None:
    found = suite_problems(asked(*suites, data=tmp_path), STUDENT)
    assert all(line.startswith("evaluate.suites: ") for line in found)
    assert words in " ".join(found)
    assert len(found) == len(suites)


def test_a_student_without_a_chat_template_cannot_be_asked_in_chats(tmp_path: Path) -> None:
    chats = tmp_path / "exact_match.jsonl"
    chats.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}], "answer": "ho"}) + "\n")
    bare = tiny_tokenizer()
    bare.chat_template = None
    (line,) = suite_problems(asked("exact_match", data=chats), Opened(tokenizer=bare))
    assert line.startswith("student: the chat prompts of exact_match need")
    assert suite_problems(asked("exact_match", data=chats), STUDENT) == []


def test_an_engine_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = asked(str(write_suite(tmp_path)), data=tmp_path)
    config.evaluate.backend = "vllm"
    monkeypatch.setattr("distill_rl.preflight.evaluation.find_spec", lambda name: None)
    (line,) = suite_problems(config, STUDENT)
    assert line.startswith("evaluate.backend: needs vllm, which is not installed; got vllm; install the vllm extra")
