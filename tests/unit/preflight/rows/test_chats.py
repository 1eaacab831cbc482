"""What `check` says of what chat templates leave out."""

from __future__ import annotations

from distill_rl.config.schema import Config, DataConfig
from distill_rl.preflight.models.opened import Findings, Opened
from distill_rl.preflight.rows.chats import check_chats
from tests.helpers.tokenizers import tiny_tokenizer

CUTS_THOUGHTS = (
    "{% for m in messages %}{{ m.role + ': ' + (m.content.split('</think>') | last) + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def test_a_thought_that_is_cut_out_of_a_content_is_shown_with_the_content() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CUTS_THOUGHTS
    config = Config(data=DataConfig(path="data", loss_on="assistant"))
    question = {"role": "user", "content": "u"}
    answers = ["kalo", "<think>an be</think>kalo"]
    rows = [{"row": i, "messages": [question, {"role": "assistant", "content": answers[i]}]} for i in range(2)]
    findings = Findings()
    check_chats(config, rows, Opened("student", "student", config.student, tokenizer=tokenizer), [], findings)
    (line,) = findings.problems
    assert line.startswith(
        "data.unrendered: the chat template of the student's tokenizer leaves out `<think> in content` of assistant messages in "
        "1 of 2 rows; got row 1: '<think>an be</think>kalo'; "
    )
