"""Problems with the suites of a run, found before it starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from distill_rl.config.schema import Config, StudentConfig
from distill_rl.preflight.suites import check_suites
from distill_rl.run.opened import OpenedModel, RunFindings
from tests.helpers.suites import write_suite
from tests.helpers.tokenizers import tiny_tokenizer

STUDENT = OpenedModel("student", "student", StudentConfig(), tokenizer=tiny_tokenizer())


def config_with(*suites: str, data: Path | None) -> Config:
    config = Config()
    config.evaluate.suites = list(suites)
    config.evaluate.data = None if data is None else str(data)
    return config


def suite_problems(config: Config, student: OpenedModel) -> list[str]:
    findings = RunFindings()
    check_suites(config, student, [], findings)
    assert not findings.notes
    return findings.problems


def test_good_suite_has_no_problem(tmp_path: Path) -> None:
    assert suite_problems(config_with(str(write_suite(tmp_path)), data=tmp_path), STUDENT) == []


def test_without_suites_nothing_is_checked(tmp_path: Path) -> None:
    assert suite_problems(config_with(data=tmp_path / "nothing"), replace(STUDENT, tokenizer=None)) == []


@pytest.mark.parametrize(
    ("suites", "words"), [(("mmul",), "must be among"), (("mmlu",), "mmlu"), (("mmlu", "gsm8k"), "gsm8k")]
)
def test_unknown_suites_and_missing_data_are_one_line_each(tmp_path: Path, suites: tuple[str, ...], words: str) -> None:
    lines = suite_problems(config_with(*suites, data=tmp_path), STUDENT)
    assert all(line.startswith("evaluate.suites: ") for line in lines)
    assert words in " ".join(lines)
    assert len(lines) == len(suites)


def test_suite_of_chats_needs_a_chat_template(tmp_path: Path) -> None:
    chats = tmp_path / "exact_match.jsonl"
    chats.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}], "answer": "ho"}) + "\n")
    bare = tiny_tokenizer()
    bare.chat_template = None
    (line,) = suite_problems(config_with("exact_match", data=chats), replace(STUDENT, tokenizer=bare))
    assert line.startswith("student: the chat prompts of exact_match need a tokenizer with a chat template")
    assert suite_problems(config_with("exact_match", data=chats), STUDENT) == []


def test_options_that_only_some_suites_use_are_noted(tmp_path: Path) -> None:
    (tmp_path / "exact_match.jsonl").write_text('{"prompt": "x", "answer": "y"}\n')
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "1 + 1?", "answer": "It is 2. #### 2"}\n')
    config, findings = config_with("exact_match", "gsm8k", data=tmp_path), RunFindings()
    config.evaluate.num_fewshot, config.evaluate.max_new_tokens = 2, 8
    check_suites(config, STUDENT, [], findings)
    assert findings.problems == []
    assert findings.notes == [
        "evaluate.num_fewshot has no effect on exact_match: it is for suites that take worked examples"
    ]
