import subprocess
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from distill_rl.align import TokenAligner
from distill_rl.align.alignment import Tokenized
from tests.helpers.align import FAMILIES, LOSSLESS, check_numbers, check_row, family, unknown_is_eos


@cache
def make_aligner(student: str, teacher: str, method: str = "auto") -> TokenAligner:
    return TokenAligner(family(student), family(teacher), method)


def spelled(aligner: TokenAligner, result, side: str) -> list[bytes]:
    vocabulary, ids = (
        (aligner.student, result.student_ids) if side == "student" else (aligner.teacher, result.teacher_ids)
    )
    return [vocabulary.token_bytes(number) for number in ids.tolist()]


def test_import_loads_only_numpy():
    program = "import sys, distill_rl.align\nprint(*({'torch', 'transformers', 'tokenizers', 'numba', 'safetensors'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_chunks_may_end_inside_a_character():
    aligner = make_aligner("byte_level", "spm_first")
    text = "\u2603"  # three bytes that no vocabulary has as one token
    result = aligner.align(text)
    assert result.exact
    assert [piece for piece in spelled(aligner, result, "teacher") if piece] == [b" ", b"\xe2", b"\x98", b"\x83"]
    assert result.teacher_chunk.tolist() == [-1, -1, 0, 1, 2]
    assert result.counts == {"1:1": 3, "1:n": 0, "n:1": 0, "m:n": 0}


@pytest.mark.parametrize(
    "text", ["12345", "1 12 123 1234", "x  y   z\t\t \n", "a\r\nb\r\n", "🧑‍🚀👨‍👩‍👧‍👦", "if x:\n        y = 10_000\n"]
)
@pytest.mark.parametrize("teacher", LOSSLESS)
def test_digits_spaces_and_emoji_are_exact(text, teacher):
    result = make_aligner("tiktoken", teacher).align(text)
    assert result.exact
    check_row(family("tiktoken"), family(teacher), text, result)


@pytest.mark.parametrize("name", ["spm_prepend", "spm_first", "spm_always", "unigram_fallback", "byte_level_prefix"])
@pytest.mark.parametrize("text", ["hello", " hello", "  hello", "ka lo", " ", "   ", "\nka", "中"])
def test_dummy_space_is_dropped_only_where_it_was_added(name, text):
    for aligner in (make_aligner("byte_level", name), make_aligner(name, "byte_level")):
        result = aligner.align(text)
        assert result.exact
        by_ids = aligner.align_ids(result.student_ids, result.teacher_ids)
        assert by_ids.exact
        assert np.array_equal(by_ids.student_chunk, result.student_chunk)
        assert np.array_equal(by_ids.teacher_chunk, result.teacher_chunk)


def test_other_side_decides_about_an_ambiguous_space():
    aligner = make_aligner("spm_first", "byte_level")
    with_space, without = aligner.align(" ka"), aligner.align("ka")
    assert np.array_equal(with_space.student_ids, without.student_ids)
    assert with_space.exact
    assert without.exact
    assert not np.array_equal(with_space.teacher_ids, without.teacher_ids)


def test_lone_dummy_metaspace_is_in_no_chunk():
    aligner = make_aligner("spm_prepend", "byte_level")
    result = aligner.align("中")
    assert spelled(aligner, result, "student")[:2] == [b"", b" "]
    assert result.student_chunk[:2].tolist() == [-1, -1]
    assert result.exact


def test_dummy_space_after_padding_and_specials_is_dropped():
    aligner = make_aligner("spm_prepend", "byte_level")
    marked, plain = family("spm_prepend"), family("byte_level")
    student_ids = marked("<pad><pad><s>ka lo</s>mi an", add_special_tokens=False)["input_ids"]
    teacher_ids = plain("<s>ka lo</s>mi an", add_special_tokens=False)["input_ids"]
    result = aligner.align_ids(student_ids, teacher_ids)
    assert result.exact
    assert b"".join(spelled(aligner, result, "student")) == b" ka lo mi an"
    check_numbers(result)
    eos = student_ids.index(marked.eos_token_id), teacher_ids.index(plain.eos_token_id)
    assert result.stop_pairs == [(2, 0), eos]


def test_literal_metaspace_makes_a_row_inexact():
    for teacher in ("byte_level", "spm_always", "spm_prepend"):
        result = make_aligner("spm_prepend", teacher).align("ka ▁ lo")
        assert not result.exact
        assert result.num_chunks


def test_nfc_text_is_composed_for_both_sides():
    aligner = make_aligner("byte_level", "byte_level_nfc")
    assert aligner.normalize("e\u0301") == aligner.normalize(aligner.normalize("e\u0301")) == "\u00e9"
    result = aligner.align("cafe\u0301")
    assert result.exact
    assert b"".join(spelled(aligner, result, "student")) == "caf\u00e9".encode()
    assert make_aligner("byte_level", "tiktoken").normalize("e\u0301") == "e\u0301"


def test_lower_casing_loses_only_capitals():
    aligner = make_aligner("byte_level", "wordpiece")
    result = aligner.align("The cat sat, on 12345 mats")
    assert not result.exact
    assert result.method == "offsets"
    chunk_of = dict(zip(spelled(aligner, result, "teacher"), result.teacher_chunk.tolist()))
    assert chunk_of[b"the"] == -1
    assert chunk_of[b"at"] >= 0
    assert chunk_of[b"1"] >= 0
    assert result.lossy >= 1
    check_numbers(result)


def test_only_the_unknown_token_is_in_no_chunk():
    aligner = make_aligner("byte_level", "unigram")
    result = aligner.align("ka \u2603 lo mi")
    assert not result.exact
    unknown = result.teacher_ids == aligner.teacher.roles["unk"]
    assert unknown.sum() == 1
    assert result.teacher_chunk[unknown].tolist() == [-1]
    assert result.teacher_chunk[np.flatnonzero(unknown)[0] + 1] >= 0


@pytest.mark.parametrize("name", FAMILIES)
def test_special_looking_text_is_text(name):
    aligner, tokenizer = make_aligner(name, "byte_level"), family(name)
    before = tokenizer("<s>x</s>", add_special_tokens=False)["input_ids"]
    result = aligner.align("a </s> b<|end|>")
    specials = aligner.student.special[result.student_ids] & (result.student_ids != aligner.student.roles["unk"])
    assert not specials[1:-1].any()
    if name in LOSSLESS:
        assert result.exact
    assert tokenizer("<s>x</s>", add_special_tokens=False)["input_ids"] == before
    assert not tokenizer.backend_tokenizer.encode_special_tokens


def test_padding_and_truncation_of_the_tokenizer_are_ignored():
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(family("byte_level").backend_tokenizer.to_str())
    )
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    text = "a longer text than that"
    result = TokenAligner(tokenizer, family("byte_level")).align(text)
    assert result.exact
    assert np.array_equal(result.student_ids, result.teacher_ids)


def test_token_that_strips_spaces_makes_a_row_inexact():
    backend = Tokenizer.from_str(family("byte_level").backend_tokenizer.to_str())
    backend.add_tokens([AddedToken("<eat>", rstrip=True, normalized=False)])
    aligner = TokenAligner(PreTrainedTokenizerFast(tokenizer_object=backend), family("byte_level"))
    assert aligner.align("ka <eat>lo").exact
    result = aligner.align("ka <eat>  lo mi")
    assert not result.exact
    check_numbers(result)
    number = backend.token_to_id("<eat>")
    assert result.student_chunk[result.student_ids == number].tolist() == [-1]
    assert result.student_chunk[-1] >= 0


def test_side_that_ends_early_is_aligned_up_to_its_end():
    aligner = make_aligner("byte_level", "tiktoken")
    whole = aligner.align("ka lo mi ter an sol be ru")
    result = aligner.align_ids(whole.student_ids, whole.teacher_ids[:-3])
    assert not result.exact
    assert result.method == "bytes"
    held = np.flatnonzero(whole.teacher_chunk < whole.teacher_chunk[-3])
    assert np.array_equal(result.teacher_chunk[held], whole.teacher_chunk[held])
    assert (result.student_chunk[whole.student_chunk >= result.num_chunks] == -1).all()


def test_only_differing_middle_is_aligned_by_dp():
    aligner = make_aligner("byte_level", "tiktoken")
    parts = [aligner.align(text) for text in ("ka lo mi ", "wrong words here", " be ru ing")]
    other = aligner.align("other things").teacher_ids
    result = aligner.align_ids(
        np.concatenate([part.student_ids for part in parts]),
        np.concatenate([parts[0].teacher_ids, other, parts[2].teacher_ids]),
    )
    assert result.method == "dp"
    assert not result.exact
    check_numbers(result)
    assert np.array_equal(result.student_chunk[: len(parts[0].student_ids)], parts[0].student_chunk)
    assert result.student_chunk[-1] == result.teacher_chunk[-1] == result.num_chunks - 1


def test_equal_tokens_at_different_places_are_no_chunk():
    # One side keeps only the first i (İ in lower case), the other one only the last.
    for student, teacher in (("unigram", "wordpiece"), ("wordpiece", "unigram")):
        aligner = make_aligner(student, teacher)
        for text, method in (("İ\n" + "\u2603" * 70 + "i", "dp"), ("İMi", "bytes")):
            result = aligner.align(text)
            by_ids = aligner.align_ids(result.student_ids, result.teacher_ids)
            assert by_ids.num_chunks == 1  # from ids alone this is undecidable
            assert (result.method, result.num_chunks) == (method, 0)
            assert (result.student_chunk == -1).all()
            assert (result.teacher_chunk == -1).all()
        assert make_aligner(student, teacher, "dp").align("İ\n" + "\u2603" * 70 + "i").num_chunks == 0
        kept = make_aligner(student, teacher, "dp").align("ka lo, mi ter, an")
        assert kept.num_chunks > 4
        check_numbers(kept)


@pytest.mark.parametrize("name", ["byte_level", "unigram"])
def test_eos_with_the_unknown_id_ends_a_text(name):
    aligner = TokenAligner(family("tiktoken"), unknown_is_eos(name))
    assert aligner.teacher.unknown == aligner.teacher.roles["eos"]
    student, teacher = aligner.tokenize_student("ka lo mi", end=True), aligner.tokenize_teacher("ka lo mi", end=True)
    ends = [(len(student.ids) - 1, len(teacher.ids) - 1)]
    result = aligner.pair(student, teacher)
    assert (result.method, result.exact, result.stop_pairs) == ("bytes", True, ends)
    by_ids = aligner.align_ids(student.ids, teacher.ids)
    assert (by_ids.exact, by_ids.stop_pairs) == (True, ends)


@pytest.mark.parametrize("name", ["wordpiece", "unigram"])
@pytest.mark.parametrize("text", ["ka \u2603 lo", "ka lo \u2603", "\u2603"])
def test_unknown_token_with_the_eos_id_is_not_eos(name, text):
    aligner = TokenAligner(family("tiktoken"), unknown_is_eos(name))
    student, teacher = aligner.tokenize_student(text, end=True), aligner.tokenize_teacher(text, end=True)
    assert (teacher.ids == aligner.teacher.unknown).sum() == 2  # the snowman and the end
    assert teacher.ids[-1] == aligner.teacher.roles["eos"]
    result = aligner.pair(student, teacher)
    assert not result.exact
    assert result.stop_pairs == [(len(student.ids) - 1, len(teacher.ids) - 1)]
    inside = np.flatnonzero(teacher.ids == aligner.teacher.unknown)[0]
    both = TokenAligner(unknown_is_eos(name), unknown_is_eos(name)).align_ids(teacher.ids, teacher.ids)
    assert (inside, inside) not in both.stop_pairs or text != "ka \u2603 lo"  # at the end, ids alone cannot decide


def test_ids_out_of_range_are_rejected_unless_masked():
    aligner = make_aligner("byte_level", "tiktoken")
    for wrong in (-100, aligner.student.size):
        with pytest.raises(ValueError, match=f"got {wrong}; give a mask"):
            aligner.align_ids([wrong], [])
        assert aligner.align_ids([wrong], [], student_mask=[0]).student_chunk.tolist() == [-1]
    with pytest.raises(ValueError, match="shape"):
        aligner.align_ids([1, 2], [], student_mask=[1])
    with pytest.raises(ValueError, match="one row"):
        aligner.align_ids([[1, 2]], [])


def test_repeats_and_long_padding_are_exact():
    aligner = make_aligner("byte_level", "spm_always")
    result = aligner.align("The cat sat. " * 300)
    assert result.exact
    assert result.num_chunks > 900
    eos = aligner.student.roles["eos"]
    padded = aligner.align_ids(np.r_[result.student_ids, np.full(1500, eos)], result.teacher_ids)
    assert padded.exact
    assert np.array_equal(padded.student_chunk[: len(result.student_ids)], result.student_chunk)


def test_missing_eos_is_appended_and_paired():
    aligner = make_aligner("byte_level", "unigram_fallback")
    student, teacher = aligner.tokenize_student("ka lo", end=True), aligner.tokenize_teacher("ka lo", end=True)
    assert student.ids[-1] == aligner.student.roles["eos"]
    assert (teacher.ids == aligner.teacher.roles["eos"]).sum() == 1
    result = aligner.pair(student, teacher)
    assert result.stop_pairs == [(len(student.ids) - 1, len(teacher.ids) - 1)]
    assert aligner.align("ka lo").stop_pairs == []
    short = aligner.pair(student, teacher, max_student_tokens=len(student.ids) - 1)
    assert short.stop_pairs == []
    assert short.dropped == (1, 1)
    bos = make_aligner("spm_first", "spm_prepend").align("ka lo")
    assert bos.stop_pairs == [(0, 0)]


def test_cutting_twice_changes_nothing():
    aligner = make_aligner("byte_level", "unigram_fallback")
    result = aligner.align("ka lo mi ter an sol be ru ing est und")
    for limit in range(len(result.student_ids) + 1):
        cut = result.cut(limit)
        assert (
            cut.to_dict() == aligner.align("ka lo mi ter an sol be ru ing est und", max_student_tokens=limit).to_dict()
        )
        assert cut.cut(limit) is cut
    with pytest.raises(ValueError, match="at least 0"):
        result.cut(-1)


def test_errors_name_the_allowed_values():
    with pytest.raises(ValueError, match="auto, bytes, offsets, dp, got 'best'"):
        TokenAligner(family("byte_level"), family("tiktoken"), "best")
    with pytest.raises(ValueError, match="fast tokenizer"):
        TokenAligner(object(), family("tiktoken"))
    aligner = make_aligner("byte_level", "tiktoken")
    with pytest.raises(ValueError, match="lone surrogate at character 1"):
        aligner.align("a\ud800")
    with pytest.raises(ValueError, match="one text"):
        aligner.pair(aligner.tokenize_student("a"), aligner.tokenize_teacher("bc"))
    with pytest.raises(ValueError, match="number of spans, got 1 and None"):
        aligner.pair(Tokenized(np.zeros(0, np.int32), "", ((0, 0),)), aligner.tokenize_teacher("a"))


def test_both_sides_need_spans_of_the_same_number():
    aligner = make_aligner("byte_level", "tiktoken")
    side = Tokenized(np.zeros(0, np.int32), "", ())
    spans = [None, (), ((0, 0),), ((0, 0), (0, 0))]
    for left in spans:
        for right in spans:
            if left == right:
                continue
            with pytest.raises(ValueError, match="number of spans"):
                aligner.pair(replace(side, spans=left), replace(side, spans=right))
