"""The assistant's turns in rendered chats, for the kinds of templates that models ship with."""

from __future__ import annotations

import json

import pytest

from distill_rl.align import TokenAligner
from distill_rl.align.chats.rendering import render as render_for_alignment
from distill_rl.data.batch.chat import render, render_document
from distill_rl.data.batch.tokenization import Tokenization
from distill_rl.errors import DataError
from tests.helpers.corpus import corpus_rows
from tests.helpers.tokenizers import tiny_tokenizer

TURNS = "{% for m in messages %}{{ '<|turn|>' + m.role + '\n' + m.content + '<|end|>\n' }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|turn|>system\nBe kind.<|end|>\n' }}{% endif %}" + TURNS + PROMPT
)
DATED = "{{ 'Today is ' + strftime_now('%d %b %Y') + '\n' }}" + TURNS + PROMPT
INSTRUCTION = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content.strip() + eos_token }}"
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
NO_END = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
# Only the last turn carries an empty block of thought, as in Qwen3.
THOUGHT_LAST = (
    "{% for m in messages %}{{ '<|turn|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|end|>\n' }}{% endfor %}" + PROMPT
)
# The prompt opens a block of thought that rendered turns do not have, as in DeepSeek-R1.
THOUGHT_PROMPT = TURNS + "{% if add_generation_prompt %}{{ '<|turn|>assistant\n<think>\n' }}{% endif %}"
# Earlier turns are shortened.
SHORTENED = (
    "{% for m in messages %}{{ '<|turn|>' + m.role + '\n' }}"
    "{{ (m.content if loop.last or m.role == 'user' else m.content[:3] + '...') + '<|end|>\n' }}{% endfor %}" + PROMPT
)
MARKED = (
    "{% for m in messages %}{{ '<|turn|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ (m.content if loop.last else m.content[:3] + '...') + '<|end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|end|>\n' }}{% endif %}{% endfor %}" + PROMPT
)
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('a user must begin') }}{% endif %}" + TURNS + PROMPT

CHAT = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "four, é 中"},
    {"role": "user", "content": "four, é 中"},  # repeats the assistant's content
    {"role": "assistant", "content": "end"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def assistant_turns(tokenizer, template, chat):
    tokenizer.chat_template = template
    text, spans, _ = render_document(tokenizer, {"row": 0, "messages": chat}, roles=("assistant",))
    return [text[first:stop] for first, stop in spans]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TURNS + PROMPT, ["four, é 中<|end|>", "end<|end|>"]),
        (DEFAULT_SYSTEM, ["four, é 中<|end|>", "end<|end|>"]),
        (DATED, ["four, é 中<|end|>", "end<|end|>"]),
        (INSTRUCTION, [" four, é 中</s>", " end</s>"]),
        (NO_END, ["four, é 中\n", "end\n"]),
        (THOUGHT_LAST, ["four, é 中<|end|>", "<think>\n\n</think>\n\nend<|end|>"]),
        (THOUGHT_PROMPT, ["four, é 中<|end|>", "end<|end|>"]),
        (MARKED, ["fou...<|end|>", "end<|end|>"]),
    ],
    ids=[
        "chatml",
        "default-system",
        "dated",
        "instruction",
        "no-end-token",
        "thought-last",
        "thought-prompt",
        "marked",
    ],
)
def test_spans_hold_each_turn_and_its_end_token(tokenizer, template, expected):
    assert assistant_turns(tokenizer, template, CHAT) == expected


def test_turns_that_contain_words_of_the_template(tokenizer):
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "think"}]
    chat += [{"role": "user", "content": "?"}, {"role": "assistant", "content": ""}]
    chat += [{"role": "user", "content": "?"}, {"role": "assistant", "content": " \n"}]
    assert assistant_turns(tokenizer, THOUGHT_LAST, chat[:2]) == ["<think>\n\n</think>\n\nthink<|end|>"]
    assert assistant_turns(tokenizer, THOUGHT_LAST, chat[:4]) == ["think<|end|>", "<think>\n\n</think>\n\n<|end|>"]
    assert assistant_turns(tokenizer, TURNS + PROMPT, chat) == ["think<|end|>", "<|end|>", " \n<|end|>"]


def test_consecutive_assistant_turns_from_the_start(tokenizer):
    chat = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert assistant_turns(tokenizer, TURNS + PROMPT, chat) == ["a<|end|>", "b<|end|>"]


def test_template_that_rewrites_history_is_refused(tokenizer):
    tokenizer.chat_template = SHORTENED
    with pytest.raises(DataError, match=r"row 41: .*generation.*data\.loss_on=all"):
        render_document(tokenizer, {"row": 41, "messages": CHAT}, roles=("assistant",))
    assert render_document(tokenizer, {"row": 41, "messages": CHAT}).spans is None
    assert assistant_turns(tokenizer, SHORTENED, CHAT[:2]) == ["four, é 中<|end|>"]


def test_template_error_names_row_and_reason(tokenizer):
    tokenizer.chat_template = STRICT
    with pytest.raises(DataError, match=r"row 7: .*template of the student's tokenizer.*a user must begin"):
        render_document(tokenizer, {"row": 7, "messages": CHAT[1:]})
    with pytest.raises(DataError, match=r"template of teacher big's tokenizer.*a user must begin"):
        render_document(tokenizer, {"row": 7, "messages": CHAT[1:]}, whose="teacher big's tokenizer")


def test_tokenizer_without_a_chat_template_is_refused(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"row 0: .*chat template; the student's tokenizer has none"):
        render_document(tokenizer, {"row": 0, "messages": CHAT})
    with pytest.raises(DataError, match="teacher big's tokenizer has none"):
        render_document(tokenizer, {"row": 0, "messages": CHAT}, whose="teacher big's tokenizer")


def test_dated_templates_do_not_depend_on_the_day(tokenizer):
    tokenizer.chat_template = DATED
    text = render_document(tokenizer, {"row": 0, "messages": CHAT}).text
    assert text.startswith("Today is 26 Jul 2024\n")
    # The aligner searches for contents in exactly the text that the data module renders.
    assert text == render(tokenizer, CHAT) == render_for_alignment(tokenizer, CHAT)
    assert text == TokenAligner(tokenizer, tokenizer).tokenize_messages(CHAT, "student").text
    prompted = render(tokenizer, CHAT[:1], add_generation_prompt=True)
    assert prompted == "Today is 26 Jul 2024\n<|turn|>user\n2 + 2?<|end|>\n<|turn|>assistant\n"
    dated = render(tokenizer, CHAT[:1], strftime_now=lambda form: "today")
    assert dated.startswith("Today is today\n")


def test_label_mask_spells_the_assistant_turns(tokenizer):
    for template in (TURNS + PROMPT, INSTRUCTION):
        tokenizer.chat_template = template
        tokenization = Tokenization(
            tokenizer, format="messages", loss_on="assistant", max_length=10_000, untaught_stops=True
        )
        for row, document in enumerate(corpus_rows(12, seed=2, messages=True)):
            encoded = tokenization.encode({"row": row, **document})
            text = tokenizer.decode(encoded.input_ids[encoded.label_mask])
            end = "<|end|>" if template != INSTRUCTION else "</s>"
            contents = [message["content"] for message in document["messages"] if message["role"] == "assistant"]
            assert [turn.strip() for turn in text.split(end)] == [*contents, ""], json.dumps(document)
