"""What `check` says of what chat templates leave out."""

from __future__ import annotations

from distill_rl.config.schema import Config, DataConfig
from distill_rl.preflight.rows import check_chats
from distill_rl.run.opened import Comparison, OpenedModel, OpenedTeacher, RunFindings
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
    findings = RunFindings()
    check_chats(config, rows, OpenedModel("student", "student", config.student, tokenizer=tokenizer), [], findings)
    (line,) = findings.problems
    assert line.startswith(
        "data.unrendered: the chat template of the student's tokenizer leaves out `<think> in content` of assistant messages in "
        "1 of 2 rows; got row 1: '<think>an be</think>kalo'; "
    )


def test_a_turn_that_is_taken_out_need_not_be_found_in_what_a_teacher_reads() -> None:
    """The teacher's template shortens earlier turns, so that their places are not known; the student's does not."""
    ours, theirs = tiny_tokenizer(), tiny_tokenizer(600, seed=7)
    ours.chat_template = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    theirs.chat_template = "{% for m in messages %}{{ m.role + ': ' + (m.content if loop.last else m.content[:3] + '...') + eos_token }}{% endfor %}"
    config = Config(data=DataConfig(path="data", loss_on="all", unrendered="warn"))
    chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "kalobe", "weight": 0}] * 2
    student = OpenedModel("student", "student", config.student, tokenizer=ours)
    teacher = OpenedTeacher(
        "teachers.0", "teacher big", config.student, tokenizer=theirs, comparison=Comparison("hybrid")
    )
    findings = RunFindings()
    check_chats(config, [{"row": 0, "messages": chat}], student, [teacher], findings)
    assert findings.problems == []
