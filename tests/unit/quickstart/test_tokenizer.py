from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill_rl.quickstart.tasks import DIGITS, TASKS, WORDS
from distill_rl.quickstart.tokenizer import KINDS, MERGED_DIGITS, make_tokenizer

MADE = {kind: make_tokenizer(128, kind) for kind in KINDS}
TOKENIZER, LINES, SPELLER = MADE["words"], MADE["lines"], MADE["pieces"]
QUESTION = {"role": "user", "content": "sort words: tiger apple queen"}
ANSWER = {"role": "assistant", "content": "apple queen tiger"}


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    for tokenizer in MADE.values():
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


@pytest.mark.parametrize("piece", [*WORDS, *DIGITS, *" ".join(TASKS).split(), "=>"])
def test_every_piece_of_the_tasks_is_one_token_with_and_without_a_space(piece: str) -> None:
    assert len(ids(piece)) == len(ids(f" {piece}")) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_making_gives_the_same_tokenizer(kind: str) -> None:
    again = make_tokenizer(128, kind)
    assert again.backend_tokenizer.to_str() == MADE[kind].backend_tokenizer.to_str()
    assert again.chat_template == MADE[kind].chat_template


@pytest.mark.parametrize("kind", KINDS)
def test_the_special_tokens_have_ids_of_their_own_and_the_vocabulary_has_no_holes(kind: str) -> None:
    tokenizer = MADE[kind]
    assert len(set(tokenizer.convert_tokens_to_ids(list(KINDS[kind].special)))) == len(KINDS[kind].special)
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


def test_a_word_is_one_token_of_the_student_and_several_of_the_teacher_and_some_digits_are_one_of_either() -> None:
    for word in WORDS:
        assert len(LINES(f" {word}")["input_ids"]) == 1
        assert len(SPELLER(f" {word}")["input_ids"]) in (2, 3)
        assert len(SPELLER(word)["input_ids"]) in (2, 3)
    for digit in DIGITS:
        assert len(LINES(f" {digit}")["input_ids"]) == 1
        assert len(SPELLER(f" {digit}")["input_ids"]) == (1 if digit in MERGED_DIGITS else 2)


def test_teacher_and_student_share_no_special_token_and_few_ids() -> None:
    assert not set(KINDS["pieces"].special) & set(KINDS["lines"].special)
    ours, theirs = LINES.get_vocab(), SPELLER.get_vocab()
    shared = set(ours) & set(theirs)
    assert len(shared) > 256, "the bytes, and some words besides"
    assert sum(ours[token] == theirs[token] for token in shared) == 0


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("lines", "<bos>sort words: tiger apple queen =>\napple queen tiger<eos>"),
        ("pieces", "<|user|>sort words: tiger apple queen<|end|><|assistant|>apple queen tiger<|end|>"),
    ],
)
def test_across_tokenizers_an_answer_begins_and_ends_where_tokens_do(kind: str, text: str) -> None:
    tokenizer = MADE[kind]
    assert tokenizer.apply_chat_template([QUESTION, ANSWER], tokenize=False) == text
    question = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True)["input_ids"]
    chat = tokenizer.apply_chat_template([QUESTION, ANSWER], return_dict=True, return_assistant_tokens_mask=True)
    whole, spoken = chat["input_ids"], chat["assistant_masks"]
    assert whole[: len(question)] == question
    answer = tokenizer(ANSWER["content"], add_special_tokens=False)["input_ids"]
    assert whole[len(question) :] == [*answer, tokenizer.eos_token_id]
    assert spoken == [0] * len(question) + [1] * (len(answer) + 1)


def test_the_chat_template_writes_question_arrow_answer_and_end() -> None:
    text = TOKENIZER.apply_chat_template([QUESTION, ANSWER], tokenize=False)
    assert text == "<bos>sort words: tiger apple queen => apple queen tiger<eos>"


def test_the_tokens_of_the_question_begin_the_tokens_of_the_whole_chat() -> None:
    question = TOKENIZER.apply_chat_template([QUESTION], add_generation_prompt=True)["input_ids"]
    whole = TOKENIZER.apply_chat_template([QUESTION, ANSWER])["input_ids"]
    assert whole[: len(question)] == question
    assert len(whole) == len(question) + 4


def test_the_mask_covers_answer_and_end_and_nothing_else() -> None:
    encoded = TOKENIZER.apply_chat_template([QUESTION, ANSWER], return_dict=True, return_assistant_tokens_mask=True)
    spoken = [token for token, said in zip(encoded["input_ids"], encoded["assistant_masks"]) if said]
    assert TOKENIZER.decode(spoken) == " apple queen tiger<eos>"


def test_the_training_data_path_learns_the_same_tokens() -> None:
    from distill_rl.data.collate import Tokenization

    tokenization = Tokenization(TOKENIZER, format="messages", loss_on="assistant", max_length=128)
    encoded = tokenization.encode({"row": 0, "messages": [QUESTION, ANSWER]})
    learnt = encoded.input_ids[encoded.label_mask]
    assert TOKENIZER.decode(learnt.tolist()) == " apple queen tiger<eos>"


def test_it_survives_saving(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.is_fast
    assert loaded.apply_chat_template([QUESTION, ANSWER]) == TOKENIZER.apply_chat_template([QUESTION, ANSWER])
    assert (loaded.bos_token, loaded.eos_token, loaded.pad_token) == ("<bos>", "<eos>", "<pad>")
