from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill_rl.demo.recipe import DIGITS, TASKS, WORDS
from distill_rl.demo.tokenizer import KINDS, MERGED_DIGITS, make_tokenizer

TOKENIZERS = {kind: make_tokenizer(128, kind) for kind in KINDS}
TOKENIZER, LINES, SPELLER = TOKENIZERS["words"], TOKENIZERS["lines"], TOKENIZERS["pieces"]
QUESTION = {"role": "user", "content": "sort words: tiger apple queen"}
ANSWER = {"role": "assistant", "content": "apple queen tiger"}


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    for tokenizer in TOKENIZERS.values():
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


@pytest.mark.parametrize("piece", [*WORDS, *DIGITS, *" ".join(TASKS).split(), "=>"])
def test_every_piece_of_the_tasks_is_one_token(piece: str) -> None:
    assert len(ids(piece)) == len(ids(f" {piece}")) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizer_is_deterministic(kind: str) -> None:
    again = make_tokenizer(128, kind)
    assert again.backend_tokenizer.to_str() == TOKENIZERS[kind].backend_tokenizer.to_str()
    assert again.chat_template == TOKENIZERS[kind].chat_template


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_distinct_and_ids_contiguous(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    assert len(set(tokenizer.convert_tokens_to_ids(list(KINDS[kind].special)))) == len(KINDS[kind].special)
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


def test_number_of_tokens_of_words_and_digits_on_either_side() -> None:
    for word in WORDS:
        assert len(LINES(f" {word}")["input_ids"]) == 1
        assert len(SPELLER(f" {word}")["input_ids"]) in (2, 3)
        assert len(SPELLER(word)["input_ids"]) in (2, 3)
    for digit in DIGITS:
        assert len(LINES(f" {digit}")["input_ids"]) == 1
        assert len(SPELLER(f" {digit}")["input_ids"]) == (1 if digit in MERGED_DIGITS else 2)


def test_teacher_and_student_share_no_special_token_and_no_id() -> None:
    assert not set(KINDS["pieces"].special) & set(KINDS["lines"].special)
    student, teacher = LINES.get_vocab(), SPELLER.get_vocab()
    shared = set(student) & set(teacher)
    assert len(shared) > 256, "the bytes and some words"
    assert sum(student[token] == teacher[token] for token in shared) == 0


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("lines", "<bos>sort words: tiger apple queen =>\napple queen tiger<eos>"),
        ("pieces", "<|user|>sort words: tiger apple queen<|end|><|assistant|>apple queen tiger<|end|>"),
    ],
)
def test_cross_tokenizer_answer_begins_and_ends_at_token_boundaries(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    assert tokenizer.apply_chat_template([QUESTION, ANSWER], tokenize=False) == text
    question = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True)["input_ids"]
    chat = tokenizer.apply_chat_template([QUESTION, ANSWER], return_dict=True, return_assistant_tokens_mask=True)
    whole, mask = chat["input_ids"], chat["assistant_masks"]
    assert whole[: len(question)] == question
    answer = tokenizer(ANSWER["content"], add_special_tokens=False)["input_ids"]
    assert whole[len(question) :] == [*answer, tokenizer.eos_token_id]
    assert mask == [0] * len(question) + [1] * (len(answer) + 1)


def test_chat_template_writes_question_arrow_answer_and_end() -> None:
    text = TOKENIZER.apply_chat_template([QUESTION, ANSWER], tokenize=False)
    assert text == "<bos>sort words: tiger apple queen => apple queen tiger<eos>"


def test_tokens_of_the_question_are_a_prefix_of_the_chat() -> None:
    question = TOKENIZER.apply_chat_template([QUESTION], add_generation_prompt=True)["input_ids"]
    whole = TOKENIZER.apply_chat_template([QUESTION, ANSWER])["input_ids"]
    assert whole[: len(question)] == question
    assert len(whole) == len(question) + 4


def test_assistant_mask_covers_answer_and_end_only() -> None:
    encoded = TOKENIZER.apply_chat_template([QUESTION, ANSWER], return_dict=True, return_assistant_tokens_mask=True)
    answer = [token for token, masked in zip(encoded["input_ids"], encoded["assistant_masks"]) if masked]
    assert TOKENIZER.decode(answer) == " apple queen tiger<eos>"


def test_data_pipeline_trains_on_the_same_tokens() -> None:
    from distill_rl.config.schema import DataConfig
    from distill_rl.data.batch.tokenization import Tokenization

    tokenization = Tokenization(TOKENIZER, DataConfig(loss_on="assistant", max_length=128), format="messages")
    encoded = tokenization.encode({"row": 0, "messages": [QUESTION, ANSWER]})
    trained_on = encoded.input_ids[encoded.label_mask]
    assert TOKENIZER.decode(trained_on.tolist()) == " apple queen tiger<eos>"


def test_tokenizer_survives_saving(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.is_fast
    assert loaded.apply_chat_template([QUESTION, ANSWER]) == TOKENIZER.apply_chat_template([QUESTION, ANSWER])
    assert (loaded.bos_token, loaded.eos_token, loaded.pad_token) == ("<bos>", "<eos>", "<pad>")
