"""Documents → rows for a student and a teacher of another tokenizer: what is compared spells the same text on both sides."""

from __future__ import annotations

import numpy as np
import pytest

from distill_rl.config.schema import AlignerConfig
from distill_rl.data.chat import render
from distill_rl.data.collate import BatchPlan, BatchSharding, Tokenization, build_batch
from distill_rl.data.cross_tokenizer_batch import BatchBuilder, CrossTokenizerTeacher
from distill_rl.errors import DataError
from distill_rl.types import IGNORE_INDEX, Cursor, DocumentBatch
from tests.helpers.align import family
from tests.helpers.corpus import corpus_rows
from tests.helpers.tokenizers import tiny_tokenizer

LENGTH = 64


@pytest.fixture(scope="module")
def student():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def teacher():
    return tiny_tokenizer(600, seed=7)


def documents(rows: list[dict], index: int = 0) -> DocumentBatch:
    return DocumentBatch(index, tuple({"row": row, **each} for row, each in enumerate(rows)), Cursor(0, len(rows)))


def builder(student, *teachers, loss_on: str = "all", dp: int = 1, max_length: int = LENGTH) -> BatchBuilder:
    """`teachers`: tokenizers, None for one that reads the student's rows."""
    plan = BatchPlan(
        BatchSharding(dp, 1), tuple(BatchSharding(1, 2) for _ in teachers), max_length, packing=False, pad_id=2
    )
    tokenization = Tokenization(student, format="auto", loss_on=loss_on, max_length=max_length)
    teachers = [
        each and CrossTokenizerTeacher.of(f"t{n}", student, each, AlignerConfig()) for n, each in enumerate(teachers)
    ]
    return BatchBuilder(tokenization, plan, teachers)


def spelled(tokenizer, rows, chunk_row: np.ndarray, row: int, number: int) -> str:
    """The text of a chunk: its predictions stand one place before its tokens."""
    places = np.flatnonzero(chunk_row == number)
    assert (np.diff(places) == 1).all(), "a chunk's predictions follow one another"
    return tokenizer.decode(rows.input_ids[row, places + 1], clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("messages", [False, True])
def test_every_chunk_is_the_same_text_on_both_sides(student, teacher, messages):
    info, (part,), ((theirs,),) = builder(student, teacher, max_length=400).build(
        documents(corpus_rows(12, 3, messages))
    )
    (shared,) = part.chunks
    total, one_to_one = 0, 0
    for row in range(part.rows.shape[0]):
        count = shared.student[row].max(initial=-1) + 1
        assert count == shared.teacher[row].max(initial=-1) + 1
        for number in range(count):
            text = spelled(student, part.rows, shared.student[row], row, number)
            assert text == spelled(teacher, theirs.rows, shared.teacher[row], row, number)
            one_to_one += (shared.student[row] == number).sum() == 1 == (shared.teacher[row] == number).sum()
        total += count
    (found,) = info.alignments
    assert total == found.num_chunks == shared.num_chunks > 0
    assert one_to_one == found.num_one_to_one
    assert 0 < one_to_one < total
    assert found.num_covered == shared.num_covered == np.count_nonzero(shared.student >= 0)
    assert found.num_exact == info.num_documents == 12
    assert found.methods == {"bytes": 12}


def test_the_teacher_is_asked_for_what_is_compared_and_for_nothing_else(student, teacher):
    _, (part,), ((theirs,),) = builder(student, teacher).build(documents(corpus_rows(12, 3)))
    (shared,) = part.chunks
    assert np.array_equal(theirs.rows.labels != IGNORE_INDEX, shared.teacher >= 0)
    following = np.roll(theirs.rows.input_ids, -1, axis=1)
    assert np.array_equal(theirs.rows.labels[shared.teacher >= 0], following[shared.teacher >= 0])
    assert (part.rows.labels[shared.student >= 0] != IGNORE_INDEX).all()


def test_the_end_of_a_text_is_a_chunk_so_that_a_student_learns_to_stop(student, teacher):
    _, (part,), ((theirs,),) = builder(student, teacher).build(documents([{"text": "kalo mi"}]))
    (shared,) = part.chunks
    ours = int(np.flatnonzero(part.rows.labels[0] == student.eos_token_id)[0])
    other = int(np.flatnonzero(theirs.rows.labels[0] == teacher.eos_token_id)[0])
    assert shared.student[0, ours] == shared.teacher[0, other] >= 0


def test_a_chat_is_compared_in_its_contents_and_its_ends_of_turns(student, teacher):
    chat = [{"role": "user", "content": "kalo mi"}, {"role": "assistant", "content": "sol est"}]
    _, (part,), ((theirs,),) = builder(student, teacher, loss_on="assistant").build(documents([{"messages": chat}]))
    (shared,) = part.chunks
    texts = [spelled(student, part.rows, shared.student[0], 0, number) for number in range(shared.num_chunks)]
    assert "".join(texts) == "sol est<|end|>"
    ends = [spelled(teacher, theirs.rows, shared.teacher[0], 0, number) for number in range(shared.num_chunks)]
    assert "".join(ends) == "sol est<|end|>"


SPOKEN = [
    {"role": "user", "content": "kalo <|end|> mi </s>?"},
    {"role": "assistant", "content": "sol <|end|><s> est"},
    {"role": "user", "content": "<|turn|>assistant\nter"},
    {"role": "assistant", "content": "an<|endoftext|>"},
]
"""A chat whose contents spell special tokens."""


@pytest.mark.parametrize("name", ["byte_level", "tiktoken", "spm_first", "spm_prepend", "unigram", "wordpiece"])
def test_what_looks_special_in_a_message_is_text_on_both_sides(name):
    student, teacher = tiny_tokenizer(), family(name)
    info, (part,), ((theirs,),) = builder(student, teacher, max_length=400).build(documents([{"messages": SPOKEN}]))
    assert info.bad_rows == ()
    for tokenizer, rows in ((student, part.rows), (teacher, theirs.rows)):
        found = [
            np.count_nonzero(rows.input_ids[0] == tokenizer.convert_tokens_to_ids(token))
            for token in ("<|turn|>", "<|end|>", "</s>")
        ]
        assert found == [4, 4, 0], "those that the template writes"
    (shared,) = part.chunks
    assert shared.num_chunks > 8
    inside = [spelled(student, part.rows, shared.student[0], 0, number) for number in range(shared.num_chunks)]
    if name in ("byte_level", "tiktoken"):
        assert "".join(inside) == "".join(message["content"] for message in SPOKEN) + 4 * "<|end|>"
        assert info.alignments[0].num_exact == 1


@pytest.mark.parametrize("name", ["tiktoken", "wordpiece"])
def test_what_looks_special_is_learnt_where_the_assistant_says_it_and_nowhere_else(name):
    student = tiny_tokenizer()
    _, (part,), _ = builder(student, family(name), loss_on="assistant", max_length=400).build(
        documents([{"messages": SPOKEN}])
    )
    labels = part.rows.labels[0]
    learnt = labels[labels != IGNORE_INDEX]
    assert student.decode(learnt) == "sol <|end|><s> est<|end|>an<|endoftext|><|end|>"
    assert (learnt == student.convert_tokens_to_ids("<|end|>")).sum() == 2, "the ends of the assistant's turns"


def test_a_plain_chat_is_tokenised_as_for_one_tokenizer(student, teacher):
    batch = documents(corpus_rows(8, 3, messages=True))
    for loss_on in ("all", "assistant"):
        build = builder(student, teacher, loss_on=loss_on, max_length=400)
        _, (part,), _ = build.build(batch)
        _, (wanted,), _ = build_batch(batch, build._tokenization, build._plan)
        assert np.array_equal(part.rows.input_ids, wanted.rows.input_ids)
        assert np.array_equal(part.rows.labels, wanted.rows.labels)


def test_the_assistant_is_found_in_a_template_whose_own_words_are_composed():
    student, teacher = tiny_tokenizer(), family("byte_level_nfc")
    student.chat_template = (
        "{% for m in messages %}{{ 'cafe\u0301 ' + m.role + ':\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'cafe\u0301 assistant:\n' }}{% endif %}"
    )
    chat = [{"role": "user", "content": "kalo"}, {"role": "assistant", "content": "e\u0301 est"}]
    _, (part,), _ = builder(student, teacher, loss_on="assistant").build(documents([{"messages": chat}]))
    labels = part.rows.labels[0]
    assert render(student, chat).count("e\u0301") == 3
    assert student.decode(labels[labels != IGNORE_INDEX]) == "é est<|end|>"


def test_long_documents_end_where_both_sides_have_a_boundary(student, teacher):
    long = " ".join(row["text"] for row in corpus_rows(6, 2))
    info, (part,), ((theirs,),) = builder(student, teacher, max_length=32).build(documents([{"text": long}]))
    (shared,) = part.chunks
    assert info.num_truncated == 1
    assert part.rows.shape[1] <= 32
    assert theirs.rows.shape[1] <= 32
    ours, others = (
        side.input_ids[0][side.position_ids[0] == np.arange(side.shape[1])] for side in (part.rows, theirs.rows)
    )
    kept, kept_too = (tokenizer.decode(ids[ids != 2]) for tokenizer, ids in ((student, ours), (teacher, others)))
    assert kept == kept_too
    assert long.startswith(kept)
    assert shared.num_covered == np.count_nonzero(part.rows.labels != IGNORE_INDEX)


def test_with_two_teachers_the_student_has_one_row_that_suits_both(student, teacher):
    third = tiny_tokenizer(420, seed=9)
    long = " ".join(row["text"] for row in corpus_rows(6, 2))
    batch = documents([{"text": long}, {"text": "kalo mi ter"}])
    built = builder(student, teacher, None, third, max_length=32).build(batch)
    info, (part,), (first, (same,), last) = built
    assert [each is None for each in part.chunks] == [False, True, False]
    assert np.array_equal(same.rows.input_ids, part.rows.input_ids)
    assert same.num_labels == part.num_labels
    assert [each.teacher for each in info.alignments] == ["t0", "t2"]
    for tokenizer, theirs, shared in ((teacher, first[0], part.chunks[0]), (third, last[0], part.chunks[2])):
        for number in range(shared.student[0].max() + 1):
            text = spelled(student, part.rows, shared.student[0], 0, number)
            assert text == spelled(tokenizer, theirs.rows, shared.teacher[0], 0, number)


def test_a_teacher_that_loses_the_text_leaves_it_to_be_learnt_and_to_the_other_teachers(student, teacher):
    unread = "\u2603" * 60  # to the one teacher a single unknown token
    lossy = family("unigram")
    info, _, _ = builder(student, lossy, max_length=LENGTH).build(documents([{"text": unread}]))
    assert LENGTH // 2 <= info.num_labels + 1 <= LENGTH
    assert info.alignments[0].num_exact == 0
    alone, (without,), _ = builder(student, teacher, max_length=LENGTH).build(documents([{"text": unread}]))
    both, (beside,), _ = builder(student, lossy, teacher, max_length=LENGTH).build(documents([{"text": unread}]))
    assert both.num_labels == min(info.num_labels, alone.num_labels)
    shared, wanted = beside.chunks[1], without.chunks[0]
    size = np.count_nonzero(beside.rows.labels[0] != IGNORE_INDEX)
    assert shared.num_chunks >= 0.5 * wanted.num_chunks > 0
    assert np.array_equal(shared.student[0, : size - 2], wanted.student[0, : size - 2])


def test_ranks_have_contiguous_parts_and_the_counts_of_the_whole(student, teacher):
    batch = documents(corpus_rows(7, 5))
    _, (whole,), _ = builder(student, teacher).build(batch)
    _, parts, _ = builder(student, teacher, dp=2).build(batch)
    assert [part.first_row for part in parts] == [0, 4]
    joined = np.concatenate([part.chunks[0].student for part in parts])
    assert np.array_equal(joined[:7], whole.chunks[0].student[:7])
    assert (joined[7:] == -1).all()
    assert {part.chunks[0].num_chunks for part in parts} == {whole.chunks[0].num_chunks}


def test_one_tokenizer_gives_the_rows_of_plain_training(student):
    plan = BatchPlan(BatchSharding(1, 1), (BatchSharding(1, 1),), LENGTH, packing=True, pad_id=2)
    tokenization = Tokenization(student, format="auto", loss_on="all", max_length=LENGTH)
    batch = documents(corpus_rows(9, 4))
    info, (part,), _ = BatchBuilder(tokenization, plan, [None]).build(batch)
    other, (wanted,), _ = build_batch(batch, tokenization, plan)
    assert np.array_equal(part.rows.input_ids, wanted.rows.input_ids)
    assert part.chunks == ()
    assert info.num_labels == other.num_labels


def test_two_copies_of_a_tokenizer_compare_every_token_one_to_one(student):
    info, (part,), ((theirs,),) = builder(student, student).build(documents(corpus_rows(9, 4)))
    (found,) = info.alignments
    assert found.num_one_to_one == found.num_chunks == found.num_covered == info.num_labels
    assert np.array_equal(part.rows.input_ids, theirs.rows.input_ids)
    assert np.array_equal(part.rows.labels, theirs.rows.labels)


def test_a_row_that_is_skipped_or_cannot_be_aligned_teaches_nothing_and_is_named(student, teacher, monkeypatch):
    batch = documents(corpus_rows(4, 4))
    build = builder(student, teacher)
    _, (skipped,), _ = build.build(batch, skip=(2,))
    assert (skipped.rows.labels[2] == IGNORE_INDEX).all()
    assert (skipped.chunks[0].student[2] == -1).all()
    nothing, _, _ = build.build(batch, skip=range(4))
    assert (nothing.alignments[0].num_exact, nothing.alignments[0].methods) == (0, {})

    aligner = build._teachers[0].aligner
    pair = aligner.pair

    def stumble(ours, theirs, **limits):
        if ours.text.startswith("2:"):
            raise ValueError("no such boundary")
        return pair(ours, theirs, **limits)

    monkeypatch.setattr(aligner, "pair", stumble)
    info, (found,), _ = build.build(batch)
    assert [(bad.row, bad.reason) for bad in info.bad_rows] == [(2, "ValueError: no such boundary")]
    assert (info.alignments[0].num_exact, info.alignments[0].methods) == (3, {"bytes": 3})
    for name in ("input_ids", "labels"):
        assert np.array_equal(getattr(found.rows, name), getattr(skipped.rows, name))


def test_what_only_the_user_can_mend_is_raised(student, teacher):
    with pytest.raises(DataError, match=r"data\.loss_on=assistant"):
        builder(student, teacher, loss_on="assistant").build(documents([{"text": "kalo"}]))


def test_a_chat_that_a_teachers_template_refuses_says_whose_it_is(student):
    strict, bare = tiny_tokenizer(600, seed=7), tiny_tokenizer(600, seed=7)
    strict.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        + strict.chat_template
    )
    bare.chat_template = None
    chat = [{"role": "system", "content": "kalo"}, {"role": "assistant", "content": "mi"}]
    with pytest.raises(DataError, match=r"row 0: .*template of teacher t1's tokenizer.*System role not supported"):
        builder(student, student, strict).build(documents([{"messages": chat}]))
    with pytest.raises(DataError, match=r"row 0: .*chat template, which teacher t0's tokenizer has not"):
        builder(student, bare).build(documents([{"messages": chat}]))
    with pytest.raises(DataError, match=r"row 0: .*template of the student's tokenizer.*System role not supported"):
        builder(strict, student).build(documents([{"messages": chat}]))
