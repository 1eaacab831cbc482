"""What `check` says of what the rows of a sample teach."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from distill_rl.config.schema import Config, DataConfig
from distill_rl.preflight.rows import check_labels
from distill_rl.run.opened import OpenedModel, RunFindings
from tests.helpers.tokenizers import tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content }}{% if m.role == 'assistant' and 'open' not in m.content %}{{ '<|end|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def chat(answer: str, row: int = 0) -> dict[str, Any]:
    return {"row": row, "messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": answer}]}


def found(
    documents: Sequence[dict[str, Any]], kind: str = "messages", template: str = TEMPLATE, **data: Any
) -> RunFindings:
    """What is found with a student that stops at `<|end|>`."""
    tokenizer = tiny_tokenizer(400)
    tokenizer.chat_template = template
    stop = tokenizer.convert_tokens_to_ids("<|end|>")
    config = Config(data=DataConfig(path="data", loss_on="assistant" if kind == "messages" else "all", **data))
    student = OpenedModel("student", "student", config.student, tokenizer=tokenizer, stops=(stop,))
    findings = RunFindings()
    check_labels(config, "data.path", kind, documents, student, findings)
    return findings


def test_rows_that_end_in_a_stop_are_counted() -> None:
    counted = found([chat("kalo"), chat("open", 1), chat("be", 2)])
    assert counted.problems == []
    assert (
        "data.path: 2 of 3 rows of a sample end what is learnt with a token at which generation stops" in counted.notes
    )


def test_a_token_across_the_border_of_a_turn_is_noted_with_its_row() -> None:
    tokenizer = tiny_tokenizer(400)
    assert " an" in tokenizer.convert_ids_to_tokens(tokenizer(": an be").input_ids)[1].replace("Ġ", " ")
    crossing = [note for note in found([chat("<|end|>kalo"), chat("an be", 7)]).notes if "inside a token" in note]
    assert crossing == [
        "data.path: in 1 of 2 rows of a sample a turn begins or ends inside a token, which is learnt as a whole, such as "
        "' an' in row 7"
    ]


@pytest.mark.parametrize("answers", [["", " "], [""]])
def test_data_of_which_only_ends_would_be_learnt_are_refused(answers: list[str]) -> None:
    (line,) = found([chat(answer, row) for row, answer in enumerate(answers)]).problems
    assert line.startswith("data.path: a row must have a token to train on; ")


def test_answers_of_which_nothing_but_stops_is_left_are_refused() -> None:
    """Their contents are not blank: they are what a stop is written as, and count as the token."""
    (line,) = found([chat("<|end|>"), chat("<|end|><|end|>", 1)], special_tokens_in_text=True).problems
    assert line == (
        "data.path: turns must say something; in the 2 rows that were read only their ends would be learnt; got stops in 2 rows; "
        "give turns with a content"
    )


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("messages", {}, "in a message, which is read as text (data.special_tokens_in_text)"),
        ("messages", {"special_tokens_in_text": True}, "in a message, which is read as that token (data.special_tokens_in_text)"),
        ("text", {}, ", which is read as that token"),
    ],
)  # fmt: skip
def test_rows_with_the_text_of_a_special_token_are_counted(kind: str, settings: dict[str, Any], said: str) -> None:
    texts = ["kalo", "an <|end|> be", "be"]
    rows = [chat(text, row) if kind == "messages" else {"row": row, "text": text} for row, text in enumerate(texts)]
    (note,) = [note for note in found(rows, kind, **settings).notes if "special token" in note]
    before = "data.path: 1 of 3 rows of a sample have the text of a special token"
    assert note == f"{before}{'' if said.startswith(',') else ' '}{said}; the first: row 1"
    assert not [note for note in found(rows[:1], kind, **settings).notes if "special token" in note]


def test_answers_that_no_stop_ends_are_refused_once() -> None:
    rows = [chat("open"), chat("open as well", 1)]
    (line,) = found(rows, template=TEMPLATE.replace("<|end|>", "; ")).problems
    assert line.startswith("data.path: row 0: an answer must end in a token at which generation stops; ")
    assert line.endswith("or set data.stops=none")
    allowed = found(rows, template=TEMPLATE.replace("<|end|>", "; "), stops="none")
    assert allowed.problems == []
    assert any(note.startswith("data.path: 0 of 2 rows of a sample end") for note in allowed.notes)
