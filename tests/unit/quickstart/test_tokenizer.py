from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill_rl.quickstart.tasks import DIGITS, TASKS, WORDS
from distill_rl.quickstart.tokenizer import make_tokenizer

TOKENIZER = make_tokenizer(128)
QUESTION = {"role": "user", "content": "sort words: tiger apple queen"}
ANSWER = {"role": "assistant", "content": "apple queen tiger"}


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    assert TOKENIZER.decode(ids(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("piece", [*WORDS, *DIGITS, *" ".join(TASKS).split(), "=>"])
def test_every_piece_of_the_tasks_is_one_token_with_and_without_a_space(piece: str) -> None:
    assert len(ids(piece)) == len(ids(f" {piece}")) == 1


def test_a_second_making_gives_the_same_tokenizer() -> None:
    again = make_tokenizer(128)
    assert again.backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()
    assert again.chat_template == TOKENIZER.chat_template


def test_the_special_tokens_have_ids_of_their_own_and_the_vocabulary_has_no_holes() -> None:
    special = {TOKENIZER.bos_token_id, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id}
    assert len(special) == 3
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(len(TOKENIZER)))


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
