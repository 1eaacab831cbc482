"""The form in which a template gets contents: null, text or parts, and arguments of calls."""

from __future__ import annotations

import random
import re
from functools import cache
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from distill_rl.align import TokenAligner, content_spans
from distill_rl.align.chats import any_of, find_texts, message_spans, quoted_spans, render, template_form, text_of
from distill_rl.align.place import join_spans
from tests.helpers.align import (
    DATA,
    FAMILIES,
    LOSSLESS,
    check_chunks_spell_alike,
    check_numbers,
    chunk_bytes,
    family,
    real,
    stripping,
    unknown_is_eos,
)
from tests.helpers.tokenizers import tiny_tokenizer

CALLS = "{% for c in m.tool_calls or [] %}{{ 'call ' + c.function.name }}{% endfor %}"
PARTS = "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}"
EITHER = "{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}"
CALL: dict[str, Any] = {"type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
NULL = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def written(body: str, message: dict[str, Any]) -> str:
    """A question and this message, each between bars."""
    made = tiny_tokenizer()
    made.chat_template = "{% for m in messages %}|" + body + "{% endfor %}|"
    return render(made, [{"role": "user", "content": "q"}, message])


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("{{ m.content }}" + CALLS, "|q|call f|"),  # would write None
        ("{{ m.content | tojson }}" + CALLS, '|"q"|""call f|'),  # would write null
        ("{{ m.content + '.' }}" + CALLS, "|q.|.call f|"),  # would fail
        ("{{ m.content.strip() }}" + CALLS, "|q|call f|"),
        ("{{ m.content or '' }}" + CALLS, "|q|call f|"),
        ("{% if m.content is none %}nothing {% else %}{{ m.content + '.' }}{% endif %}" + CALLS, "|q.|nothing call f|"),
        (PARTS + CALLS, "|q|call f|"),
    ],
)
def test_null_is_empty_unless_the_template_reads_it(body: str, text: str) -> None:
    assert written(body, NULL) == text
    assert NULL["content"] is None


def test_null_of_a_template_without_calls() -> None:
    answer = {"role": "assistant", "content": None}
    assert written("{{ m.content }}", answer) == "|q||"
    assert written("{% if m.tool_calls %}{{ raise_exception('no') }}{% endif %}{{ m.content }}", answer) == "|q||"


@pytest.mark.parametrize("content", ["a b", [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]])
@pytest.mark.parametrize("body", ["{{ m.content }}", PARTS, EITHER])
def test_text_and_parts_say_the_same(body: str, content: Any) -> None:
    assert written(body, {"role": "assistant", "content": content}) == "|q|a b|"


@pytest.mark.parametrize(("body", "form"), [("{{ m.content }}", "text"), (PARTS, "parts"), (EITHER, "either")])
def test_the_form_is_found_again_for_another_template(body: str, form: str) -> None:
    made = tiny_tokenizer()
    for template, expected in ((body, form), ("{{ messages[0].content }}", "text")):
        made.chat_template = template.replace("m.content", "messages[0].content")
        assert template_form(made).content == expected


@pytest.mark.parametrize("arguments", [{"a": "é"}, '{"a": "é"}'])
@pytest.mark.parametrize("filtered", ["| tojson", "", ".a"])
def test_arguments_are_an_object_or_text_as_the_template_reads_them(filtered: str, arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    field = "m.tool_calls[0].function.arguments" + filtered.replace(".a", ".items() | map('join', '=') | join")
    text = written(
        "{% if m.tool_calls %}{{ " + field + " }}{% endif %}",
        {"role": "assistant", "content": "", "tool_calls": [call]},
    )
    assert text == ("|" * 2 + {"| tojson": '{"a": "é"}', "": '{"a": "é"}', ".a": "a=é"}[filtered] + "|")


def test_the_text_of_a_message() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": None}, {"text": "b"}]
    contents: list[Any] = ["a", None, [], parts]
    assert [text_of({"content": content}) for content in contents] == ["a", "", "", "ab"]
    assert text_of({}) == ""


CHAT = [
    {"role": "system", "content": "user"},
    {"role": "user", "content": "What is 12345, naïve friend?"},
    {"role": "assistant", "content": "A number.\nIndeed  so."},
    {"role": "user", "content": "中文?"},
    {"role": "assistant", "content": "是。"},
]


@cache
def make_aligner(student: str, teacher: str) -> TokenAligner:
    return TokenAligner(family(student), family(teacher))


@pytest.mark.parametrize("teacher", FAMILIES)
def test_only_contents_are_aligned_and_turn_ends_paired(teacher):
    aligner = make_aligner("byte_level", teacher)
    result = aligner.align_messages(CHAT)
    check_numbers(result)
    check_chunks_spell_alike(family("byte_level"), family(teacher), result)
    ends = [side.convert_tokens_to_ids("<|end|>") for side in (family("byte_level"), family(teacher))]
    turns = [pair for pair in result.stop_pairs if pair != (0, 0)]  # without bos, which both templates may begin with
    assert len(turns) == len(CHAT)
    assert all(result.student_ids[a] == ends[0] and result.teacher_ids[b] == ends[1] for a, b in turns)
    inside = b"".join(chunk_bytes(family("byte_level"), result.student_ids, result.student_chunk, result.num_chunks))
    contents = "".join(message["content"] for message in CHAT).encode()
    special = aligner.student.special[result.student_ids]
    assert (result.student_chunk[special] == -1).all()
    if teacher not in LOSSLESS:
        assert not result.exact or teacher == "unigram"
    elif teacher.startswith("byte") or teacher == "tiktoken":
        assert result.exact
        assert inside == contents
    else:  # the space in "]: What" may become part of the first word's token
        assert result.exact
        assert len(inside) > 0.6 * len(contents)


def test_chat_is_cut_behind_a_stop_pair():
    aligner = make_aligner("byte_level", "tiktoken")
    whole = aligner.align_messages(CHAT)
    student, teacher = whole.stop_pairs[2]
    result = aligner.align_messages(CHAT, max_student_tokens=student + 3)
    assert len(result.student_ids) == student + 1
    assert len(result.teacher_ids) == teacher + 1
    assert result.stop_pairs == whole.stop_pairs[:3]
    assert result.dropped == (len(whole.student_ids) - student - 1, len(whole.teacher_ids) - teacher - 1)
    check_numbers(result)


@pytest.mark.parametrize("teacher", ["tiktoken", "spm_prepend", "unigram_fallback"])
def test_special_looking_content_is_text(teacher):
    aligner = make_aligner("byte_level", teacher)
    chat = [{"role": "user", "content": "say <|end|> and </s>!"}, {"role": "assistant", "content": "no"}]
    result = aligner.align_messages(chat)
    for side, ids in ((family("byte_level"), result.student_ids), (family(teacher), result.teacher_ids)):
        assert (ids == side.convert_tokens_to_ids("<|end|>")).sum() == 2
        assert (ids == side.eos_token_id).sum() == 0
    inside = b"".join(chunk_bytes(family("byte_level"), result.student_ids, result.student_chunk, result.num_chunks))
    assert b"<|end|>" in inside
    assert b"</s>" in inside
    assert len([pair for pair in result.stop_pairs if pair != (0, 0)]) == 2


@pytest.mark.parametrize("name", FAMILIES)
def test_special_looking_content_leaves_the_rest_unchanged(name):
    aligner = make_aligner("byte_level", name)
    chats = ([*CHAT, {"role": "user", "content": f"ka {word} lo"}, CHAT[-1]] for word in ("mi", "<|end|>"))
    plain, spelled = (aligner.tokenize_messages(chat, "teacher") for chat in chats)
    starts = [side.text.rindex("<|turn|>", 0, side.spans[-2][0]) for side in (plain, spelled)]
    stops = [side.spans[-2][1] for side in (plain, spelled)]
    for chosen in (
        [side.ids[side.offsets[:, 1] <= start] for side, start in zip((plain, spelled), starts)],
        [side.ids[side.offsets[:, 0] >= stop] for side, stop in zip((plain, spelled), stops)],
    ):
        assert len(chosen[0]) > 3
        assert np.array_equal(*chosen)
    given = aligner.tokenize_messages(CHAT, "teacher", rendered=render(family(name), CHAT))
    wanted = aligner.tokenize_messages(CHAT, "teacher")
    assert np.array_equal(given.ids, wanted.ids)
    assert (given.text, given.spans) == (wanted.text, wanted.spans)


def test_stripped_content_is_aligned():
    aligner = make_aligner("byte_level", "spm_first")
    result = aligner.align_messages(
        [{"role": "user", "content": "  Indeed, the 12345th lot! \n"}, {"role": "assistant", "content": "mi"}]
    )
    inside = b"".join(chunk_bytes(family("byte_level"), result.student_ids, result.student_chunk, result.num_chunks))
    assert b"12345" in inside
    assert not result.exact
    assert len(result.stop_pairs) == 2


@pytest.mark.parametrize("name", ["byte_level", "spm_prepend", "spm_first", "unigram_fallback"])
@pytest.mark.parametrize("last", ["是。", "say <|end|> and go"])
def test_stripped_template_newline_keeps_a_row_exact(name, last):
    chat = [*CHAT[:-1], {"role": "assistant", "content": last}]
    aligner = TokenAligner(family("tiktoken"), stripping(name))
    result = aligner.align_messages(chat)
    assert "<|end|>\n<|turn|>\n" in aligner.tokenize_messages(chat, "teacher").text
    assert not any(piece == b"\n" for piece in map(aligner.teacher.token_bytes, result.teacher_ids[:4].tolist()))
    assert (result.method, result.exact) == ("bytes", True)
    assert len(result.stop_pairs) == len(chat)
    inside = b"".join(chunk_bytes(family("tiktoken"), result.student_ids, result.student_chunk, result.num_chunks))
    assert inside == "".join(message["content"] for message in chat).encode()
    check_numbers(result)
    assert TokenAligner(stripping(name), family("tiktoken")).align_messages(chat).exact


@pytest.mark.parametrize("content", ["\n\n  mi ter", "\u3000mi", "\n\nsay <|end|> mi"])
def test_stripped_message_white_space_is_lost(content):
    aligner = TokenAligner(family("tiktoken"), stripping("spm_prepend"))
    result = aligner.align_messages([CHAT[1], {"role": "assistant", "content": content}])
    assert not result.exact
    assert len(result.stop_pairs) == 2
    assert result.num_chunks
    check_numbers(result)
    check_chunks_spell_alike(family("tiktoken"), stripping("spm_prepend"), result)


def test_template_eos_with_the_unknown_id_is_exact():
    aligner = TokenAligner(family("tiktoken"), unknown_is_eos("unigram"))
    chat = [{"role": "user", "content": "ka lo mi"}, {"role": "assistant", "content": "ter an sol"}]
    result = aligner.align_messages(chat)
    assert (result.method, result.exact, len(result.stop_pairs)) == ("bytes", True, 2)
    result = aligner.align_messages([chat[0], {"role": "assistant", "content": "ter \u2603"}])
    assert not result.exact
    assert result.stop_pairs[-1] == (len(result.student_ids) - 2, len(result.teacher_ids) - 1)


def test_messages_are_composed_like_texts():
    aligner = make_aligner("byte_level", "byte_level_nfc")
    assert aligner.align_messages([{"role": "user", "content": "cafe\u0301"}]).exact


def test_chats_need_templates():
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(family("byte_level").backend_tokenizer.to_str()))
    with pytest.raises(ValueError, match="chat template"):
        TokenAligner(family("byte_level"), bare).align_messages(CHAT)


def test_content_spans_with_and_without_the_template():
    tokenizer = family("byte_level")
    rendered = render(tokenizer, CHAT)
    spans = content_spans(rendered, CHAT, lambda chat: render(tokenizer, chat))
    assert [rendered[start:stop] for start, stop in spans] == [message["content"] for message in CHAT]
    assert rendered[: spans[0][0]].endswith("system\n")  # not the "user" of the second header
    assert content_spans(rendered, CHAT[1:]) == spans[1:]
    assert content_spans("abc", [{"role": "user", "content": "zz"}, {"role": "user", "content": " c "}]) == (
        (0, 0),
        (2, 3),
    )
    assert content_spans(rendered, [{"role": "user", "content": None}]) == ((0, 0),)


@pytest.mark.parametrize("last", ["assistant", " user \n", ""])
@pytest.mark.parametrize("strips", ["", ".strip()"])
def test_contents_are_found_before_a_stop_that_is_added(last, strips):
    """The contents are words that the template writes as well, so that searching for them would find others."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ '<' + m.role + '>' + m.content" + strips + " }}{% endfor %}"
    chat = [{"role": "user", "content": "assistant"}, {"role": "assistant", "content": last}]
    said = last.strip() if strips else last
    for stop in ("", "<user>"):
        spans = content_spans("<user>assistant<assistant>" + said + stop, chat, lambda chat: render(tokenizer, chat))
        assert spans[0] == (6, 15)
        assert spans[1] == ((26, 26 + len(said)) if said else (15, 15))


# Earlier turns lose the thought in their content; that of the last one is written anew, and an empty one if it has none.
THOUGHTS_CUT = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% set said = m.content.split('</think>')[-1].strip() %}"
    "{% if m.role == 'user' %}{{ m.content }}{% elif not loop.last %}{{ said }}{% else %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content else '' %}"
    "{{ '<think>' + thought.strip() + '</think>' + said }}{% endif %}{% endfor %}"
)


def test_contents_around_thoughts_that_are_cut_are_found():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = THOUGHTS_CUT
    thinking = {"role": "assistant", "content": "<think>\nhm\n</think>\n\ner"}
    question = {"role": "user", "content": "user"}
    chat = [question, thinking, question, thinking]
    text = "<user>user<assistant>er<user>user<assistant><think>hm</think>er"
    spans = content_spans(text, chat, lambda chat: render(tokenizer, chat))
    assert spans[:3] == ((6, 10), (21, 23), (29, 33))
    assert content_spans(text[:33], chat[:3], lambda chat: render(tokenizer, chat)) == spans[:3]


# A thought, the content, and calls with their arguments in JSON or one by one.
CALLS_OF = (
    "{{% for m in messages %}}{{{{ '<' + m.role + '>' }}}}"
    "{{% if m.reasoning_content %}}{{{{ m.reasoning_content }}}} so {{% endif %}}{{{{ m.content }}}}"
    "{{% for c in m.tool_calls or [] %}}{{{{ ' call ' + c.function.name }}}}{arguments}{{% endfor %}}{{% endfor %}}"
)
IN_JSON = "{{ c.function.arguments | tojson }}"
ONE_BY_ONE = "{% for k, v in c.function.arguments | dictsort %}{{ '\n' + k + '=' + v | string }}{% endfor %}"


@pytest.mark.parametrize(
    ("arguments", "spans"),
    [(IN_JSON, ["f", '{"b": "f", "a": 1}', "g", "{}"]), (ONE_BY_ONE, ["f", "a=1\nb=f", "g", ""])],
)
def test_thoughts_and_calls_have_spans(arguments: str, spans: list[str]) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CALLS_OF.format(arguments=arguments)
    called = (("f", {"b": "f", "a": 1}), ("g", {}))
    calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in called]
    turn = {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": calls}
    chat = [{"role": "user", "content": "f"}, turn]
    text = render(tokenizer, chat)
    found = message_spans(text, chat, lambda chat: render(tokenizer, chat))
    assert [[text[slice(*span)] for span in of_message] for of_message in found] == [["f"], ["hm", "so", *spans]]
    without = message_spans(text, chat)
    assert [[text[slice(*span)] for span in of_message] for of_message in without] == [["f"], ["", "so", *[""] * 4]]


def with_template(body: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose template writes this for every message."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}" + body + "{% endfor %}"
    return tokenizer


def quoted(body: str, content: str, *tokens: str) -> list[tuple[int, str]]:
    """The places and texts that a template's text quotes of a content."""
    tokenizer = with_template(body)
    chat = [{"role": "user", "content": content}]
    text = render(tokenizer, chat)
    spans = quoted_spans(text, chat, lambda chat: render(tokenizer, chat), any_of(tokens))
    return [(start, text[start:stop]) for start, stop in spans]


def test_only_what_a_message_says_is_quoted() -> None:
    assert quoted("<e>{{ m.content }}<e>", "a<e>", "<e>") == [(4, "<e>")]
    assert quoted("<e>{{ m.content | tojson }}<e>", '"<e>', "<e>") == [(6, "<e>")]
    assert quoted("<e>{{ m.content.replace('<e>', '') }}<e>", "a<e>b", "<e>") == []
    assert quoted("<e>{{ m.content }}", "a", "<e>") == quoted("<e>", "<e>", "<e>") == []
    assert quoted("{{ m.content }}", "<e>") == []


def test_tags_that_the_template_reads_are_its_own() -> None:
    cut = "{{ m.content.split('</think>')[-1] }}<e>"
    assert quoted(cut, "<think><e></think>a<e>", "<e>", "<think>", "</think>") == [(1, "<e>")]


def test_a_template_that_reads_what_is_quoted_leaves_the_content_to_be_searched_for() -> None:
    assert quoted("{{ 'one ' if '<e>' in m.content }}{{ m.content }}<e>", "a<e>", "<e>") == [(4, "a<e>")]
    refusing = "{% if '<e>' not in m.content %}{{ raise_exception('no') }}{% endif %}{{ m.content }}<e>"
    assert quoted(refusing, "a<e>", "<e>") == [(0, "a<e>")]


def test_texts_whose_place_is_not_known_are_missing() -> None:
    chat = [{"role": "user", "content": "One"}, {"role": "assistant", "content": "two", "reasoning_content": "Three"}]
    for body, complete in (
        ("{{ m.reasoning_content }}|{{ m.content }}", True),
        ("{{ m.content }}", True),
        ("{{ m.reasoning_content | lower }}|{{ m.content }}", False),
        ("{{ m.content | upper }}", False),
    ):
        tokenizer = with_template(body)
        found = find_texts(render(tokenizer, chat), chat, lambda chat, made=tokenizer: render(made, chat))
        assert found.complete == complete
        assert TokenAligner(tokenizer, with_template(body)).align_messages(chat).exact == complete


def test_pieces_that_touch_on_both_sides_are_one() -> None:
    """Otherwise a token that reaches from a thought into the tag behind it would be in no chunk."""
    pieces = np.array([[0, 2, 5, 7], [2, 4, 7, 9], [4, 6, 10, 12], [7, 9, 12, 14], [9, 10, 14, 15]])
    assert join_spans(pieces).tolist() == [[0, 4, 5, 9], [4, 6, 10, 12], [7, 10, 12, 15]]
    assert join_spans(pieces[:0]).shape == (0, 4)
    chat = [CHAT[1], {"role": "assistant", "content": "<think>\nA number.\n</think>\n\nSo."}]
    result = make_aligner("byte_level", "tiktoken").align_messages(chat)
    inside = chunk_bytes(family("byte_level"), result.student_ids, result.student_chunk, result.num_chunks)
    assert b"".join(inside) == "".join(message["content"] for message in chat).encode()
    assert result.exact


SAID_FIRST = "<a>{{ m.content }}|{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
CALLED_FIRST = "<a>{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}|{{ m.content }}"


@pytest.mark.parametrize(
    ("student", "teacher", "compared"),
    [
        (SAID_FIRST, SAID_FIRST, "why|so long|f"),
        (CALLED_FIRST, CALLED_FIRST, "why|f|so long"),
        (SAID_FIRST, CALLED_FIRST, "why|so long"),
        (CALLED_FIRST, SAID_FIRST, "why|so long"),
    ],
)
def test_texts_in_another_order_are_compared_as_far_as_they_go(student: str, teacher: str, compared: str) -> None:
    chat = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so long", "tool_calls": [CALL]}]
    tokenizers = with_template(student), with_template(teacher)
    result = TokenAligner(*tokenizers).align_messages(chat)
    check_chunks_spell_alike(*tokenizers, result)
    inside = chunk_bytes(tokenizers[0], result.student_ids, result.student_chunk, result.num_chunks)
    assert b"".join(inside) == compared.replace("|", "").encode()
    assert result.exact == (student == teacher)


@pytest.mark.skipif(not (DATA / "tokenizers").is_dir(), reason="real tokenizers are not in ../shared/data")
def test_phi3_tokens_and_template():
    phi = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(real("mistral-v1").backend_tokenizer.to_str()), eos_token="<|endoftext|>"
    )
    turns = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
    phi.add_tokens([AddedToken(token, rstrip=True, normalized=False, special=True) for token in turns])
    phi.chat_template = (
        "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    )
    for aligner in (TokenAligner(real("minimind"), phi), TokenAligner(phi, real("minimind"))):
        result = aligner.align_messages(CHAT)
        assert (result.method, result.exact) == ("bytes", True)
        assert len(result.stop_pairs) == len(CHAT)
        check_numbers(result)


@pytest.mark.skipif(not (DATA / "tokenizers").is_dir(), reason="real tokenizers are not in ../shared/data")
def test_real_templates_with_a_thinking_block():
    aligner = TokenAligner(real("qwen3"), real("minimind"))
    result = aligner.align_messages(CHAT)
    assert result.exact
    assert len(result.stop_pairs) == len(CHAT)
    inside = b"".join(chunk_bytes(real("qwen3"), result.student_ids, result.student_chunk, result.num_chunks))
    assert inside == "".join(message["content"] for message in CHAT).encode()
    thought = [b"<think>", b"</think>"]
    place = [aligner.student.token_bytes(number) in thought for number in result.student_ids.tolist()]
    assert (result.student_chunk[np.array(place)] == -1).all()


def test_of_several_texts_the_longest_is_matched():
    draw = random.Random(0)
    for _ in range(200):
        texts = ["".join(draw.choices("ab|.", k=draw.randint(1, 4))) for _ in range(draw.randint(1, 9))]
        one_by_one = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))
        read = "".join(draw.choices("ab|.", k=60))
        assert any_of(texts).findall(read) == one_by_one.findall(read)
    assert any_of([""]) is None
