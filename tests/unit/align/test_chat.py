from functools import cache

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from distill_rl.align import TokenAligner, content_spans
from distill_rl.align.chat import render
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

CHAT = [
    {"role": "system", "content": "user"},
    {"role": "user", "content": "What is 12345, naïve friend?"},
    {"role": "assistant", "content": "A number.\nIndeed  so."},
    {"role": "user", "content": "中文?"},
    {"role": "assistant", "content": "是。"},
]


@cache
def aligner(student: str, teacher: str) -> TokenAligner:
    return TokenAligner(family(student), family(teacher))


@pytest.mark.parametrize("teacher", FAMILIES)
def test_contents_are_aligned_templates_are_not_and_turns_end_together(teacher):
    made = aligner("byte_level", teacher)
    found = made.align_messages(CHAT)
    check_numbers(found)
    check_chunks_spell_alike(family("byte_level"), family(teacher), found)
    ends = [side.convert_tokens_to_ids("<|end|>") for side in (family("byte_level"), family(teacher))]
    turns = [pair for pair in found.stop_pairs if pair != (0, 0)]  # bos, where both templates begin with it
    assert len(turns) == len(CHAT)
    assert all(found.student_ids[a] == ends[0] and found.teacher_ids[b] == ends[1] for a, b in turns)
    inside = b"".join(chunk_bytes(family("byte_level"), found.student_ids, found.student_chunk, found.num_chunks))
    contents = "".join(message["content"] for message in CHAT).encode()
    special = made.student.special[found.student_ids]
    assert (found.student_chunk[special] == -1).all()
    if teacher not in LOSSLESS:
        assert not found.exact or teacher == "unigram"
    elif teacher.startswith("byte") or teacher == "tiktoken":
        assert found.exact
        assert inside == contents
    else:  # "]: What" is written with a space that may be the first word's own
        assert found.exact
        assert len(inside) > 0.6 * len(contents)


def test_the_chat_is_cut_where_both_sides_have_a_boundary_and_a_stop_is_kept():
    made = aligner("byte_level", "tiktoken")
    whole = made.align_messages(CHAT)
    student, teacher = whole.stop_pairs[2]
    found = made.align_messages(CHAT, max_student_tokens=student + 3)
    assert len(found.student_ids) == student + 1
    assert len(found.teacher_ids) == teacher + 1
    assert found.stop_pairs == whole.stop_pairs[:3]
    assert found.dropped == (len(whole.student_ids) - student - 1, len(whole.teacher_ids) - teacher - 1)
    check_numbers(found)


@pytest.mark.parametrize("teacher", ["tiktoken", "spm_prepend", "unigram_fallback"])
def test_what_looks_special_in_a_message_is_text(teacher):
    made = aligner("byte_level", teacher)
    chat = [{"role": "user", "content": "say <|end|> and </s>!"}, {"role": "assistant", "content": "no"}]
    found = made.align_messages(chat)
    for side, ids in ((family("byte_level"), found.student_ids), (family(teacher), found.teacher_ids)):
        assert (ids == side.convert_tokens_to_ids("<|end|>")).sum() == 2
        assert (ids == side.eos_token_id).sum() == 0
    inside = b"".join(chunk_bytes(family("byte_level"), found.student_ids, found.student_chunk, found.num_chunks))
    assert b"<|end|>" in inside
    assert b"</s>" in inside
    assert len([pair for pair in found.stop_pairs if pair != (0, 0)]) == 2


@pytest.mark.parametrize("name", FAMILIES)
def test_special_looking_text_changes_no_token_of_the_rest_of_a_chat(name):
    made = aligner("byte_level", name)
    chats = ([*CHAT, {"role": "user", "content": f"ka {word} lo"}, CHAT[-1]] for word in ("mi", "<|end|>"))
    plain, spelled = (made.tokenize_messages(chat, "teacher") for chat in chats)
    starts = [side.text.rindex("<|turn|>", 0, side.spans[-2][0]) for side in (plain, spelled)]
    stops = [side.spans[-2][1] for side in (plain, spelled)]
    for chosen in (
        [side.ids[side.offsets[:, 1] <= start] for side, start in zip((plain, spelled), starts)],
        [side.ids[side.offsets[:, 0] >= stop] for side, stop in zip((plain, spelled), stops)],
    ):
        assert len(chosen[0]) > 3
        assert np.array_equal(*chosen)
    given = made.tokenize_messages(CHAT, "teacher", rendered=render(family(name), CHAT))
    wanted = made.tokenize_messages(CHAT, "teacher")
    assert np.array_equal(given.ids, wanted.ids)
    assert (given.text, given.spans) == (wanted.text, wanted.spans)


def test_a_content_that_one_template_strips_is_aligned_without_its_white_space():
    made = aligner("byte_level", "spm_first")
    found = made.align_messages(
        [{"role": "user", "content": "  Indeed, the 12345th lot! \n"}, {"role": "assistant", "content": "mi"}]
    )
    inside = b"".join(chunk_bytes(family("byte_level"), found.student_ids, found.student_chunk, found.num_chunks))
    assert b"12345" in inside
    assert not found.exact
    assert len(found.stop_pairs) == 2


@pytest.mark.parametrize("name", ["byte_level", "spm_prepend", "spm_first", "unigram_fallback"])
@pytest.mark.parametrize("last", ["是。", "say <|end|> and go"])
def test_a_newline_that_a_templates_token_swallows_costs_nothing(name, last):
    chat = [*CHAT[:-1], {"role": "assistant", "content": last}]
    made = TokenAligner(family("tiktoken"), stripping(name))
    found = made.align_messages(chat)
    assert "<|end|>\n<|turn|>\n" in made.tokenize_messages(chat, "teacher").text
    assert not any(piece == b"\n" for piece in map(made.teacher.token_bytes, found.teacher_ids[:4].tolist()))
    assert (found.method, found.exact) == ("bytes", True)
    assert len(found.stop_pairs) == len(chat)
    inside = b"".join(chunk_bytes(family("tiktoken"), found.student_ids, found.student_chunk, found.num_chunks))
    assert inside == "".join(message["content"] for message in chat).encode()
    check_numbers(found)
    assert TokenAligner(stripping(name), family("tiktoken")).align_messages(chat).exact


@pytest.mark.parametrize("content", ["\n\n  mi ter", "\u3000mi", "\n\nsay <|end|> mi"])
def test_white_space_of_a_message_that_is_swallowed_is_lost(content):
    made = TokenAligner(family("tiktoken"), stripping("spm_prepend"))
    found = made.align_messages([CHAT[1], {"role": "assistant", "content": content}])
    assert not found.exact
    assert len(found.stop_pairs) == 2
    assert found.num_chunks
    check_numbers(found)
    check_chunks_spell_alike(family("tiktoken"), stripping("spm_prepend"), found)


def test_an_eos_of_a_template_with_the_id_of_the_unknown_token_is_exact():
    made = TokenAligner(family("tiktoken"), unknown_is_eos("unigram"))
    chat = [{"role": "user", "content": "ka lo mi"}, {"role": "assistant", "content": "ter an sol"}]
    found = made.align_messages(chat)
    assert (found.method, found.exact, len(found.stop_pairs)) == ("bytes", True, 2)
    found = made.align_messages([chat[0], {"role": "assistant", "content": "ter \u2603"}])
    assert not found.exact
    assert found.stop_pairs[-1] == (len(found.student_ids) - 2, len(found.teacher_ids) - 1)


def test_messages_are_composed_like_texts():
    made = aligner("byte_level", "byte_level_nfc")
    assert made.align_messages([{"role": "user", "content": "cafe\u0301"}]).exact


def test_chats_need_templates():
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(family("byte_level").backend_tokenizer.to_str()))
    with pytest.raises(ValueError, match="chat template"):
        TokenAligner(family("byte_level"), bare).align_messages(CHAT)


def test_contents_are_found_in_order_with_and_without_the_template():
    tokenizer = family("byte_level")
    rendered = render(tokenizer, CHAT)
    spans = content_spans(rendered, CHAT, lambda chat: render(tokenizer, chat))
    assert [rendered[start:stop] for start, stop in spans] == [message["content"] for message in CHAT]
    assert rendered[: spans[0][0]].endswith("system\n")  # not the word of the second header
    assert content_spans(rendered, CHAT[1:]) == spans[1:]
    assert content_spans("abc", [{"role": "user", "content": "zz"}, {"role": "user", "content": " c "}]) == (
        (0, 0),
        (2, 3),
    )
    assert content_spans(rendered, [{"role": "user", "content": None}]) == ((0, 0),)


@pytest.mark.skipif(not (DATA / "tokenizers").is_dir(), reason="real tokenizers are not in ../shared/data")
def test_a_real_vocabulary_with_the_tokens_and_template_of_phi3():
    phi = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(real("mistral-v1").backend_tokenizer.to_str()), eos_token="<|endoftext|>"
    )
    turns = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
    phi.add_tokens([AddedToken(token, rstrip=True, normalized=False, special=True) for token in turns])
    phi.chat_template = (
        "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    )
    for made in (TokenAligner(real("qwen3"), phi), TokenAligner(phi, real("qwen3"))):
        found = made.align_messages(CHAT)
        assert (found.method, found.exact) == ("bytes", True)
        assert len(found.stop_pairs) == len(CHAT)
        check_numbers(found)


@pytest.mark.skipif(not (DATA / "tokenizers").is_dir(), reason="real tokenizers are not in ../shared/data")
def test_real_templates_with_a_block_of_thought():
    made = TokenAligner(real("qwen3"), real("minimind"))
    found = made.align_messages(CHAT)
    assert found.exact
    assert len(found.stop_pairs) == len(CHAT)
    inside = b"".join(chunk_bytes(real("qwen3"), found.student_ids, found.student_chunk, found.num_chunks))
    assert inside == "".join(message["content"] for message in CHAT).encode()
    thought = [b"<think>", b"</think>"]
    place = [made.student.token_bytes(number) in thought for number in found.student_ids.tolist()]
    assert (found.student_chunk[np.array(place)] == -1).all()
