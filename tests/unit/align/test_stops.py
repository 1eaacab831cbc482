"""Tokens that end an answer: which they are, how they are paired, and their rows in the projection."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from distill_rl.align import TokenAligner, Vocabulary
from distill_rl.align.chats import Chat
from distill_rl.align.projection import HEADER, build_projection, cached_projection, load_projection
from distill_rl.align.verify import endings
from distill_rl.align.vocabulary import TextEncoder, common_vocabulary, read_vocabulary
from tests.helpers.tokenizers import TURN_END, tiny_tokenizer

SIZES = {"student_columns": 320, "teacher_columns": 330}
QUESTION = {"role": "user", "content": "kalo mi"}
CHAT = [QUESTION, {"role": "assistant", "content": "ter an"}]


def pair() -> tuple[Any, Any]:
    return tiny_tokenizer(320), tiny_tokenizer(330, seed=1)


def ids(tokenizer: Any, *tokens: str) -> list[int]:
    return tokenizer.convert_tokens_to_ids(list(tokens))


def written(template_end: str) -> str:
    """A chat template that ends every turn with this text."""
    return "{% for message in messages %}{{ message['content'] + '" + template_end + "' }}{% endfor %}"


def test_stops_are_eos_end_of_turn_and_the_models_own() -> None:
    tokenizer = tiny_tokenizer(320)
    eos, turn, more = ids(tokenizer, "</s>", TURN_END, "<|endoftext|>")
    assert Vocabulary.from_tokenizer(tokenizer).stops == tuple(sorted((eos, turn)))
    assert read_vocabulary(tokenizer, TextEncoder(tokenizer), [more]).stops == tuple(sorted((eos, turn, more)))


@pytest.mark.parametrize("number", [-1, 10_000, 300])
def test_text_and_invalid_ids_are_no_stops(number: int) -> None:
    tokenizer = tiny_tokenizer(320)
    assert (
        read_vocabulary(tokenizer, TextEncoder(tokenizer), [number]).stops == Vocabulary.from_tokenizer(tokenizer).stops
    )


def test_stop_of_the_generation_config_is_paired() -> None:
    student, teacher = pair()
    student.chat_template, teacher.chat_template = written("</s>"), written("<|endoftext|>") + "{{ 'x' }}"
    (end,) = ids(teacher, "<|endoftext|>")
    teacher.chat_template = written("<|endoftext|>")
    result = TokenAligner(student, teacher, teacher_stops=[end]).align_messages(CHAT)
    assert [int(result.teacher_ids[place]) for _, place in result.stop_pairs] == [end, end]


def test_stop_is_not_common_with_a_lookalike_non_stop() -> None:
    student, teacher = pair()
    teacher.chat_template = written("</s>")
    sides = [Vocabulary.from_tokenizer(tokenizer) for tokenizer in (student, teacher)]
    student_turn, teacher_turn = (ids(tokenizer, TURN_END)[0] for tokenizer in (student, teacher))
    assert (student_turn in sides[0].stops, teacher_turn in sides[1].stops) == (True, False)
    assert (student_turn, teacher_turn) not in zip(*(side.tolist() for side in common_vocabulary(*sides)))


def test_projection_contains_both_sides_stops(tmp_path: Path) -> None:
    student, teacher = pair()
    (end,) = ids(teacher, "<|endoftext|>")
    projection = build_projection(student, teacher, **SIZES, teacher_stops=[end])
    assert projection.student_stops.tolist() == sorted(ids(student, "</s>", TURN_END))
    assert projection.teacher_stops.tolist() == sorted([*ids(teacher, "</s>", TURN_END), end])
    read = load_projection(cached_projection(tmp_path, student, teacher, **SIZES, teacher_stops=[end]))
    assert np.array_equal(read.teacher_stops, projection.teacher_stops)


def test_cached_file_without_stops_is_rebuilt(tmp_path: Path) -> None:
    student, teacher = pair()
    path = cached_projection(tmp_path, student, teacher, **SIZES)
    whole, content = path.read_bytes(), load_file(path)
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])["__metadata__"][HEADER]
    del content["student_stops"], content["teacher_stops"]
    save_file(content, path, {HEADER: header})
    assert not len(load_projection(path).student_stops)
    assert cached_projection(tmp_path, student, teacher, **SIZES) == path
    assert path.read_bytes() == whole


def test_other_stops_rebuild_the_projection(tmp_path: Path) -> None:
    student, teacher = pair()
    (end,) = ids(student, "<|endoftext|>")
    path = cached_projection(tmp_path, student, teacher, **SIZES)
    assert len(load_projection(path).student_stops) == 2
    cached_projection(tmp_path, student, teacher, **SIZES, student_stops=[end])
    assert load_projection(path).student_stops.tolist() == sorted(ids(student, "</s>", TURN_END, "<|endoftext|>"))


def test_endings_count_rows_with_a_final_stop_pair() -> None:
    student, teacher = pair()
    result = endings(TokenAligner(student, teacher), [], [Chat(CHAT), Chat([QUESTION])])
    assert (result.student_stops, result.teacher_stops) == (["</s>", TURN_END], ["</s>", TURN_END])
    assert (result.rows, result.ending) == (2, 2)
    teacher.chat_template = written("")
    assert endings(TokenAligner(student, teacher), [], [Chat(CHAT)]).ending == 0


def test_texts_end_in_eos() -> None:
    result = endings(TokenAligner(*pair()), ["kalo mi", "ter an sol"])
    assert (result.rows, result.ending) == (2, 2)


def test_copies_of_one_tokenizer_need_no_stops() -> None:
    projection = build_projection(tiny_tokenizer(320), tiny_tokenizer(320), student_columns=320, teacher_columns=320)
    assert not len(projection.student_stops)
    assert not len(projection.teacher_stops)
