import subprocess
import sys
from functools import cache

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from distill_rl.align import TokenAligner
from distill_rl.align.alignment import Tokenized
from tests.helpers.align import FAMILIES, LOSSLESS, check_numbers, check_row, family, unknown_is_eos


@cache
def aligner(student: str, teacher: str, method: str = "auto") -> TokenAligner:
    return TokenAligner(family(student), family(teacher), method)


def spelled(made: TokenAligner, found, side: str) -> list[bytes]:
    vocabulary, ids = (made.student, found.student_ids) if side == "student" else (made.teacher, found.teacher_ids)
    return [vocabulary.token_bytes(number) for number in ids.tolist()]


def test_importing_loads_numpy_alone():
    program = "import sys, distill_rl.align\nprint(*({'torch', 'transformers', 'tokenizers', 'numba', 'safetensors'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_characters_are_cut_at_shared_bytes_inside_of_them():
    made = aligner("byte_level", "spm_first")
    text = "\u2603"  # three bytes, in no vocabulary
    found = made.align(text)
    assert found.exact
    assert [piece for piece in spelled(made, found, "teacher") if piece] == [b" ", b"\xe2", b"\x98", b"\x83"]
    assert found.teacher_chunk.tolist() == [-1, -1, 0, 1, 2]
    assert found.counts == {"1:1": 3, "1:n": 0, "n:1": 0, "m:n": 0}


@pytest.mark.parametrize(
    "text", ["12345", "1 12 123 1234", "x  y   z\t\t \n", "a\r\nb\r\n", "🧑‍🚀👨‍👩‍👧‍👦", "if x:\n        y = 10_000\n"]
)
@pytest.mark.parametrize("teacher", LOSSLESS)
def test_digits_white_space_and_joined_emoji_are_exact_in_chunks_of_any_size(text, teacher):
    found = aligner("tiktoken", teacher).align(text)
    assert found.exact
    check_row(family("tiktoken"), family(teacher), text, found)


@pytest.mark.parametrize("name", ["spm_prepend", "spm_first", "spm_always", "unigram_fallback", "byte_level_prefix"])
@pytest.mark.parametrize("text", ["hello", " hello", "  hello", "ka lo", " ", "   ", "\nka", "中"])
def test_a_space_of_the_tokenizers_own_is_dropped_only_where_it_was_added(name, text):
    for made in (aligner("byte_level", name), aligner(name, "byte_level")):
        found = made.align(text)
        assert found.exact
        by_ids = made.align_ids(found.student_ids, found.teacher_ids)
        assert by_ids.exact
        assert np.array_equal(by_ids.student_chunk, found.student_chunk)
        assert np.array_equal(by_ids.teacher_chunk, found.teacher_chunk)


def test_where_ids_do_not_tell_a_space_the_other_side_decides():
    made = aligner("spm_first", "byte_level")
    with_space, without = made.align(" ka"), made.align("ka")
    assert np.array_equal(with_space.student_ids, without.student_ids)
    assert with_space.exact
    assert without.exact
    assert not np.array_equal(with_space.teacher_ids, without.teacher_ids)


def test_a_lone_metaspace_that_spells_nothing_is_in_no_chunk():
    made = aligner("spm_prepend", "byte_level")
    found = made.align("中")
    assert spelled(made, found, "student")[:2] == [b"", b" "]
    assert found.student_chunk[:2].tolist() == [-1, -1]
    assert found.exact


def test_the_dummy_space_goes_behind_padding_and_inline_specials_too():
    made = aligner("spm_prepend", "byte_level")
    marked, plain = family("spm_prepend"), family("byte_level")
    ours = marked("<pad><pad><s>ka lo</s>mi an", add_special_tokens=False)["input_ids"]
    theirs = plain("<s>ka lo</s>mi an", add_special_tokens=False)["input_ids"]
    found = made.align_ids(ours, theirs)
    assert found.exact
    assert b"".join(spelled(made, found, "student")) == b" ka lo mi an"
    check_numbers(found)
    eos = ours.index(marked.eos_token_id), theirs.index(plain.eos_token_id)
    assert found.stop_pairs == [(2, 0), eos]


def test_a_literal_metaspace_makes_a_row_inexact_whichever_the_other_side():
    for teacher in ("byte_level", "spm_always", "spm_prepend"):
        found = aligner("spm_prepend", teacher).align("ka ▁ lo")
        assert not found.exact
        assert found.num_chunks


def test_nfc_composes_the_text_once_and_for_both():
    made = aligner("byte_level", "byte_level_nfc")
    assert made.normalize("e\u0301") == made.normalize(made.normalize("e\u0301")) == "\u00e9"
    found = made.align("cafe\u0301")
    assert found.exact
    assert b"".join(spelled(made, found, "student")) == "caf\u00e9".encode()
    assert aligner("byte_level", "tiktoken").normalize("e\u0301") == "e\u0301"


def test_lower_casing_loses_capitals_and_keeps_the_rest():
    made = aligner("byte_level", "wordpiece")
    found = made.align("The cat sat, on 12345 mats")
    assert not found.exact
    assert found.method == "offsets"
    chunk_of = dict(zip(spelled(made, found, "teacher"), found.teacher_chunk.tolist()))
    assert chunk_of[b"the"] == -1
    assert chunk_of[b"at"] >= 0
    assert chunk_of[b"1"] >= 0
    assert found.lossy >= 1
    check_numbers(found)


def test_an_unknown_token_is_in_no_chunk_and_what_follows_is():
    made = aligner("byte_level", "unigram")
    found = made.align("ka \u2603 lo mi")
    assert not found.exact
    unknown = found.teacher_ids == made.teacher.roles["unk"]
    assert unknown.sum() == 1
    assert found.teacher_chunk[unknown].tolist() == [-1]
    assert found.teacher_chunk[np.flatnonzero(unknown)[0] + 1] >= 0


@pytest.mark.parametrize("name", FAMILIES)
def test_what_looks_special_is_text_and_the_callers_tokenizer_stays_as_it_was(name):
    made, tokenizer = aligner(name, "byte_level"), family(name)
    before = tokenizer("<s>x</s>", add_special_tokens=False)["input_ids"]
    found = made.align("a </s> b<|end|>")
    specials = made.student.special[found.student_ids] & (found.student_ids != made.student.roles["unk"])
    assert not specials[1:-1].any()
    if name in LOSSLESS:
        assert found.exact
    assert tokenizer("<s>x</s>", add_special_tokens=False)["input_ids"] == before
    assert not tokenizer.backend_tokenizer.encode_special_tokens


def test_padding_and_truncation_on_the_callers_tokenizer_do_not_reach_the_aligner():
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(family("byte_level").backend_tokenizer.to_str())
    )
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    text = "a longer text than that"
    found = TokenAligner(tokenizer, family("byte_level")).align(text)
    assert found.exact
    assert np.array_equal(found.student_ids, found.teacher_ids)


def test_an_added_token_that_swallows_spaces_makes_a_row_inexact():
    backend = Tokenizer.from_str(family("byte_level").backend_tokenizer.to_str())
    backend.add_tokens([AddedToken("<eat>", rstrip=True, normalized=False)])
    made = TokenAligner(PreTrainedTokenizerFast(tokenizer_object=backend), family("byte_level"))
    assert made.align("ka <eat>lo").exact
    found = made.align("ka <eat>  lo mi")
    assert not found.exact
    check_numbers(found)
    number = backend.token_to_id("<eat>")
    assert found.student_chunk[found.student_ids == number].tolist() == [-1]
    assert found.student_chunk[-1] >= 0


def test_one_side_that_ends_early_is_aligned_so_far_and_not_exact():
    made = aligner("byte_level", "tiktoken")
    whole = made.align("ka lo mi ter an sol be ru")
    found = made.align_ids(whole.student_ids, whole.teacher_ids[:-3])
    assert not found.exact
    assert found.method == "bytes"
    held = np.flatnonzero(whole.teacher_chunk < whole.teacher_chunk[-3])
    assert np.array_equal(found.teacher_chunk[held], whole.teacher_chunk[held])
    assert (found.student_chunk[whole.student_chunk >= found.num_chunks] == -1).all()


def test_a_difference_in_the_middle_goes_to_the_programme_and_both_ends_stay():
    made = aligner("byte_level", "tiktoken")
    parts = [made.align(text) for text in ("ka lo mi ", "wrong words here", " be ru ing")]
    other = made.align("other things").teacher_ids
    found = made.align_ids(
        np.concatenate([part.student_ids for part in parts]),
        np.concatenate([parts[0].teacher_ids, other, parts[2].teacher_ids]),
    )
    assert found.method == "dp"
    assert not found.exact
    check_numbers(found)
    assert np.array_equal(found.student_chunk[: len(parts[0].student_ids)], parts[0].student_chunk)
    assert found.student_chunk[-1] == found.teacher_chunk[-1] == found.num_chunks - 1


def test_equal_tokens_at_two_places_of_a_text_are_no_chunk():
    # One side keeps the first i (of İ, lower-cased) and the other one the last; each loses what the other one keeps.
    for student, teacher in (("unigram", "wordpiece"), ("wordpiece", "unigram")):
        made = aligner(student, teacher)
        for text, method in (("İ\n" + "\u2603" * 70 + "i", "dp"), ("İMi", "bytes")):
            found = made.align(text)
            by_ids = made.align_ids(found.student_ids, found.teacher_ids)
            assert by_ids.num_chunks == 1  # ids alone do not tell
            assert (found.method, found.num_chunks) == (method, 0)
            assert (found.student_chunk == -1).all()
            assert (found.teacher_chunk == -1).all()
        assert aligner(student, teacher, "dp").align("İ\n" + "\u2603" * 70 + "i").num_chunks == 0
        kept = aligner(student, teacher, "dp").align("ka lo, mi ter, an")
        assert kept.num_chunks > 4
        check_numbers(kept)


@pytest.mark.parametrize("name", ["byte_level", "unigram"])
def test_an_eos_with_the_id_of_the_unknown_token_ends_a_text(name):
    made = TokenAligner(family("tiktoken"), unknown_is_eos(name))
    assert made.teacher.unknown == made.teacher.roles["eos"]
    student, teacher = made.tokenize_student("ka lo mi", end=True), made.tokenize_teacher("ka lo mi", end=True)
    ends = [(len(student.ids) - 1, len(teacher.ids) - 1)]
    found = made.pair(student, teacher)
    assert (found.method, found.exact, found.stop_pairs) == ("bytes", True, ends)
    by_ids = made.align_ids(student.ids, teacher.ids)
    assert (by_ids.exact, by_ids.stop_pairs) == (True, ends)


@pytest.mark.parametrize("name", ["wordpiece", "unigram"])
@pytest.mark.parametrize("text", ["ka \u2603 lo", "ka lo \u2603", "\u2603"])
def test_an_unknown_token_with_the_id_of_eos_ends_nothing(name, text):
    made = TokenAligner(family("tiktoken"), unknown_is_eos(name))
    student, teacher = made.tokenize_student(text, end=True), made.tokenize_teacher(text, end=True)
    assert (teacher.ids == made.teacher.unknown).sum() == 2  # for the snowman, and for the end
    assert teacher.ids[-1] == made.teacher.roles["eos"]
    found = made.pair(student, teacher)
    assert not found.exact
    assert found.stop_pairs == [(len(student.ids) - 1, len(teacher.ids) - 1)]
    inside = np.flatnonzero(teacher.ids == made.teacher.unknown)[0]
    both = TokenAligner(unknown_is_eos(name), unknown_is_eos(name)).align_ids(teacher.ids, teacher.ids)
    assert (inside, inside) not in both.stop_pairs or text != "ka \u2603 lo"  # at the end ids alone do not tell


def test_ids_out_of_range_are_refused_unless_masked():
    made = aligner("byte_level", "tiktoken")
    for wrong in (-100, made.student.size):
        with pytest.raises(ValueError, match=f"got {wrong}; give a mask"):
            made.align_ids([wrong], [])
        assert made.align_ids([wrong], [], student_mask=[0]).student_chunk.tolist() == [-1]
    with pytest.raises(ValueError, match="shape"):
        made.align_ids([1, 2], [], student_mask=[1])
    with pytest.raises(ValueError, match="one row"):
        made.align_ids([[1, 2]], [])


def test_repeats_and_long_padding_are_exact():
    made = aligner("byte_level", "spm_always")
    found = made.align("The cat sat. " * 300)
    assert found.exact
    assert found.num_chunks > 900
    eos = made.student.roles["eos"]
    padded = made.align_ids(np.r_[found.student_ids, np.full(1500, eos)], found.teacher_ids)
    assert padded.exact
    assert np.array_equal(padded.student_chunk[: len(found.student_ids)], found.student_chunk)


def test_the_end_is_appended_where_the_tokenizer_writes_none_and_paired():
    made = aligner("byte_level", "unigram_fallback")
    student, teacher = made.tokenize_student("ka lo", end=True), made.tokenize_teacher("ka lo", end=True)
    assert student.ids[-1] == made.student.roles["eos"]
    assert (teacher.ids == made.teacher.roles["eos"]).sum() == 1
    found = made.pair(student, teacher)
    assert found.stop_pairs == [(len(student.ids) - 1, len(teacher.ids) - 1)]
    assert made.align("ka lo").stop_pairs == []
    short = made.pair(student, teacher, max_student_tokens=len(student.ids) - 1)
    assert short.stop_pairs == []
    assert short.dropped == (1, 1)
    bos = aligner("spm_first", "spm_prepend").align("ka lo")
    assert bos.stop_pairs == [(0, 0)]


def test_a_cut_can_be_made_again():
    made = aligner("byte_level", "unigram_fallback")
    found = made.align("ka lo mi ter an sol be ru ing est und")
    for limit in range(len(found.student_ids) + 1):
        cut = found.cut(limit)
        assert cut.to_dict() == made.align("ka lo mi ter an sol be ru ing est und", max_student_tokens=limit).to_dict()
        assert cut.cut(limit) is cut
    with pytest.raises(ValueError, match="at least 0"):
        found.cut(-1)


def test_bad_arguments_say_what_is_allowed():
    with pytest.raises(ValueError, match="auto, bytes, offsets, dp, got 'best'"):
        TokenAligner(family("byte_level"), family("tiktoken"), "best")
    with pytest.raises(ValueError, match="fast tokenizer"):
        TokenAligner(object(), family("tiktoken"))
    made = aligner("byte_level", "tiktoken")
    with pytest.raises(ValueError, match="lone surrogate at character 1"):
        made.align("a\ud800")
    with pytest.raises(ValueError, match="one text"):
        made.pair(made.tokenize_student("a"), made.tokenize_teacher("bc"))
    with pytest.raises(ValueError, match="number of spans, got 1 and None"):
        made.pair(Tokenized(np.zeros(0, np.int32), "", ((0, 0),)), made.tokenize_teacher("a"))
