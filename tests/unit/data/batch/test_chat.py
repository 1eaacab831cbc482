"""The assistant's turns in rendered chats, for the kinds of templates that models ship with."""

from __future__ import annotations

import json
from functools import partial

import pytest

from distill_rl.align import TokenAligner
from distill_rl.align.chats import render as render_for_alignment
from distill_rl.config.schema import DataConfig
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


@pytest.mark.parametrize("said", [">", "|>", "end|>", "<|end|>", "a>"])
def test_turns_that_say_the_end_of_the_end_token(tokenizer, said):
    chat = [CHAT[0], {"role": "assistant", "content": said}]
    assert assistant_turns(tokenizer, TURNS + PROMPT, [*chat, *chat]) == [said + "<|end|>"] * 2
    assert assistant_turns(tokenizer, NO_END, [*chat, *chat]) == [said + "\n"] * 2


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
            tokenizer, DataConfig(loss_on="assistant", max_length=10_000, stops="none"), format="messages"
        )
        for row, document in enumerate(corpus_rows(12, seed=2, messages=True)):
            encoded = tokenization.encode({"row": row, **document})
            text = tokenizer.decode(encoded.input_ids[encoded.label_mask])
            end = "<|end|>" if template != INSTRUCTION else "</s>"
            contents = [message["content"] for message in document["messages"] if message["role"] == "assistant"]
            assert [turn.strip() for turn in text.split(end)] == [*contents, ""], json.dumps(document)


OPENS, EMPTY = "<think>\n", "<think>\n\n</think>\n\n"
CALL = {"function": {"name": "f", "arguments": {}}}
WITH_CALLS = (
    "{% for m in messages %}{{ '<|turn|>' + m.role + '\n' + m.content }}{% if m.tool_calls %}{{ '<tool_call>f</tool_call>' }}"
    "{% endif %}{{ '<|end|>\n' }}{% endfor %}"
)


def prompting(text: str) -> str:
    """The end of a template whose generation prompt writes this behind the header."""
    return PROMPT.replace("assistant\n", "assistant\n" + text)


@pytest.mark.parametrize(
    ("prompt", "turn", "expected"),
    [
        ("", {"content": "four"}, "four<|end|>"),
        ("", {"content": "<think>\nhm\n</think>\n\nfour"}, "<think>\nhm\n</think>\n\nfour<|end|>"),
        (OPENS, {"content": "<think>\nhm\n</think>\n\nfour"}, "hm\n</think>\n\nfour<|end|>"),
        (OPENS, {"content": "</think>\n\nfour"}, "</think>\n\nfour<|end|>"),
        (OPENS, {"content": "four"}, "four<|end|>"),
        (OPENS, {"content": "", "tool_calls": [CALL]}, "<tool_call>f</tool_call><|end|>"),
        (
            OPENS,
            {"content": "<think>\nhm\n</think>", "tool_calls": [CALL]},
            "hm\n</think><tool_call>f</tool_call><|end|>",
        ),
        (EMPTY, {"content": EMPTY + "four"}, "four<|end|>"),
        (EMPTY, {"content": "<think>\nhm\n</think>\n\nfour"}, "<think>\nhm\n</think>\n\nfour<|end|>"),
        (EMPTY, {"content": "four"}, "four<|end|>"),
    ],
)
def test_a_turn_begins_behind_the_whole_prompt_or_else_behind_the_header(tokenizer, prompt, turn, expected):
    turn = {"role": "assistant", **turn}
    for chat in ([CHAT[0], turn], [turn, CHAT[0]], [CHAT[0], turn, CHAT[0], turn]):
        turns = assistant_turns(tokenizer, WITH_CALLS + prompting(prompt), chat)
        assert turns == [expected] * sum(message is turn for message in chat)


BLOCK = "{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}{{ '\n' }}"
BLOCK_WITH_HEADER = "{% generation %}{{ '<|turn|>assistant\n' + m.content + '<|end|>\n' }}{% endgeneration %}"


def marked(block: str) -> str:
    """A template with this block for an assistant's turn."""
    header = "" if "assistant" in block else "{{ '<|turn|>assistant\n' }}"
    other = "{{ '<|turn|>' + m.role + '\n' + m.content + '<|end|>\n' }}"
    is_turn = "{% if m.role == 'assistant' %}" + header + block + "{% else %}" + other + "{% endif %}"
    return "{% for m in messages %}" + is_turn + "{% endfor %}" + PROMPT


@pytest.mark.parametrize("block", [BLOCK, BLOCK_WITH_HEADER])
@pytest.mark.parametrize("said", [["one"], ["one", "two"], ["", "two"], ["one", ""], ["one\n", " two"]])
@pytest.mark.parametrize("begins", [False, True])
def test_generation_blocks_hold_neither_header_nor_what_follows_the_end(tokenizer, block, said, begins):
    chat = [turn for text in said for turn in ({"role": "assistant", "content": text}, CHAT[0])]
    turns = assistant_turns(tokenizer, marked(block), chat if begins else [CHAT[0], *chat])
    assert turns == [text + "<|end|>" for text in said]


@pytest.mark.parametrize("block", [BLOCK, BLOCK_WITH_HEADER])
def test_a_turn_in_a_generation_block_may_quote_the_header(tokenizer, block):
    said = "<|turn|>assistant\none"
    chat = [CHAT[0], {"role": "assistant", "content": said}]
    assert assistant_turns(tokenizer, marked(block), chat) == [said + "<|end|>"]


OFF = [("weight", 0), ("weight", 0.0), ("train", False), ("loss", 0), ("train_on_turn", False), ("mask", False)]


def labelled(tokenizer, chat, roles):
    """What is trained on of a chat as ChatML writes it."""
    tokenizer.chat_template = TURNS + PROMPT
    text, spans, _ = render_document(tokenizer, {"row": 3, "messages": chat}, roles=roles)
    return None if spans is None else [text[first:stop] for first, stop in spans]


def switched(place, key, value):
    return [{**message, key: value} if i == place else message for i, message in enumerate(CHAT)]


@pytest.mark.parametrize(("key", "value"), OFF)
def test_a_switch_takes_a_turn_out(tokenizer, key, value):
    first, last = switched(1, key, value), switched(3, key, value)
    assert labelled(tokenizer, first, ["assistant"]) == ["end<|end|>"]
    assert labelled(tokenizer, last, ["assistant"]) == ["four, é 中<|end|>"]
    assert labelled(tokenizer, first, ["user", "assistant"]) == ["2 + 2?", "four, é 中", "end<|end|>"]
    assert labelled(tokenizer, first, ["user"]) == ["2 + 2?", "four, é 中"]
    assert labelled(tokenizer, switched(0, key, value), ["user", "assistant"]) == [
        "four, é 中<|end|>",
        "four, é 中",
        "end<|end|>",
    ]
    assert labelled(tokenizer, first, []) == [
        "<|turn|>user\n2 + 2?<|end|>\n<|turn|>assistant\n",
        "\n<|turn|>user\nfour, é 中<|end|>\n<|turn|>assistant\nend<|end|>\n",
    ]
    assert labelled(tokenizer, switched(2, key, value), []) == [
        "<|turn|>user\n2 + 2?<|end|>\n<|turn|>assistant\nfour, é 中<|end|>\n<|turn|>user\n",
        "<|end|>\n<|turn|>assistant\nend<|end|>\n",
    ]


@pytest.mark.parametrize("key", [key for key, _ in OFF[1:]])
@pytest.mark.parametrize("value", [1, 1.0, True, None])
def test_a_switch_that_is_on_changes_nothing(tokenizer, key, value):
    for roles in ([], ["assistant"], ["user", "assistant"]):
        assert labelled(tokenizer, switched(1, key, value), roles) == labelled(tokenizer, CHAT, roles)


@pytest.mark.parametrize("value", [0.5, "0", "false", 2, -1, [], float("nan")])
@pytest.mark.parametrize("roles", [[], ["assistant"], ["user"]])
def test_another_value_of_a_switch_is_refused(tokenizer, value, roles):
    with pytest.raises(DataError, match=r"^row 3: `train` of message 1 must be 0 or 1.*\Z") as refused:
        labelled(tokenizer, switched(1, "train", value), roles)
    assert repr(value) in str(refused.value)


def test_turns_that_nothing_asks_for_need_not_be_found(tokenizer):
    tokenizer.chat_template = SHORTENED
    chat = [*CHAT[:2], {"role": "user", "content": "And?"}, CHAT[3]]
    off = [chat[0] | {"weight": 0}, *chat[1:]], [chat[0], chat[1] | {"weight": 0}, *chat[2:]]
    render = partial(render_document, tokenizer, stops=["<stop>"])
    for messages in (chat, off[1]):
        text, spans, _ = render({"row": 0, "messages": messages}, roles=["user"])
        assert [text[first:stop] for first, stop in spans] == ["2 + 2?", "And?"]
    text, spans, _ = render({"row": 0, "messages": off[0]})
    assert [text[first:stop][:7] for first, stop in spans] == ["<|turn|", "<|end|>"]
    for wanted in ({"roles": ["assistant"]}, {}):
        with pytest.raises(DataError, match="rewrites earlier turns"):
            render({"row": 0, "messages": off[1]}, **wanted)
    assert render({"row": 0, "messages": off[1]}, text_only=True).spans is None


def test_what_is_known_of_a_template_is_that_of_its_variables(tokenizer):
    opens = "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' + ('<think>' if thinks else '') }}{% endif %}"
    tokenizer.chat_template = TURNS + opens
    said = {"role": "assistant", "content": "<think>hm</think>four"}
    for thinks in (False, True, False):
        document = {"row": 0, "messages": [said, CHAT[0], said], "chat_template_kwargs": {"thinks": thinks}}
        text, spans, _ = render_document(tokenizer, document, roles=["assistant"])
        turn = "hm</think>four<|end|>" if thinks else "<think>hm</think>four<|end|>"
        assert [text[first:stop] for first, stop in spans] == [turn, turn]
