"""Rows for a student and teachers with other tokenizers: every chunk spells the same text on both sides."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from distill_rl.config.schema import AlignerConfig, DataConfig
from distill_rl.data.batch.chat import render
from distill_rl.data.batch.collate import BatchPlan, BatchSharding
from distill_rl.data.batch.cross_tokenizer_batch import BatchBuilder
from distill_rl.data.batch.document_aligner import CrossTokenizerTeacher, PieceLimits
from distill_rl.data.batch.tokenization import Tokenization
from distill_rl.errors import DataError
from distill_rl.types import IGNORE_INDEX, Cursor, DocumentBatch, TokenRows
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
    return DocumentBatch(index, tuple({"row": i, **row} for i, row in enumerate(rows)), Cursor(0, len(rows)))


def builder(
    student,
    *teachers,
    loss_on: str = "all",
    dp: int = 1,
    max_length: int = LENGTH,
    packing: bool = False,
    teacher_lengths: tuple[int, ...] = (),
    split: bool = False,
) -> BatchBuilder:
    """`teachers`: tokenizers; None for a teacher that reads the student's rows."""
    shardings = tuple(BatchSharding(1, 2) for _ in teachers)
    plan = BatchPlan(
        BatchSharding(dp, 1), shardings, max_length, packing, pad_id=2, teacher_lengths=teacher_lengths, split=split
    )
    tokenization = Tokenization(
        student, DataConfig(loss_on=loss_on, max_length=max_length, stops="none"), format="auto"
    )
    teachers = [
        tokenizer and CrossTokenizerTeacher.of(f"t{i}", student, tokenizer, AlignerConfig())
        for i, tokenizer in enumerate(teachers)
    ]
    return BatchBuilder(tokenization, plan, teachers)


def spelled(tokenizer, rows, chunk_row: np.ndarray, row: int, number: int) -> str:
    """The text of a chunk, whose predictions are one position before its tokens."""
    positions = np.flatnonzero(chunk_row == number)
    assert (np.diff(positions) == 1).all(), "a chunk's predictions are contiguous"
    return tokenizer.decode(rows.input_ids[row, positions + 1], clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("messages", [False, True])
def test_a_chunk_is_the_same_text_on_both_sides(student, teacher, messages, packing):
    info, (part,), ((teacher_part,),) = builder(student, teacher, max_length=400, packing=packing).build(
        documents(corpus_rows(12, 3, messages))
    )
    (chunks,) = (each.chunks for each in part.teachers)
    total, one_to_one = 0, 0
    for row in range(part.rows.shape[0]):
        count = chunks.student[row].max(initial=-1) + 1
        assert count == chunks.teacher[row].max(initial=-1) + 1
        for number in range(count):
            text = spelled(student, part.rows, chunks.student[row], row, number)
            assert text == spelled(teacher, teacher_part.rows, chunks.teacher[row], row, number)
            one_to_one += (chunks.student[row] == number).sum() == 1 == (chunks.teacher[row] == number).sum()
        total += count
    (alignment,) = info.alignments
    assert total == alignment.num_chunks == chunks.num_chunks > 0
    assert one_to_one == alignment.num_one_to_one
    assert 0 < one_to_one < total
    assert alignment.num_covered == chunks.num_covered == np.count_nonzero(chunks.student >= 0)
    assert alignment.num_exact == info.num_documents == 12
    assert alignment.methods == {"bytes": 12}


def documents_of(rows: TokenRows, tokenizer) -> list[list[str]]:
    """The text of each document of each row; padding is `</s>`, which also ends a document."""
    texts = []
    for ids, positions in zip(rows.input_ids, rows.position_ids):
        parts = np.split(ids, np.flatnonzero(positions == 0)[1:])
        texts.append([tokenizer.decode(part, skip_special_tokens=True) for part in parts])
    return texts


def test_packed_rows_of_all_sides_hold_the_same_documents(student, teacher):
    third = tiny_tokenizer(420, seed=9)
    rows = corpus_rows(24, 3)
    build = builder(student, teacher, None, third, max_length=200, packing=True)
    info, (part,), ((first,), (same,), (last,)) = build.build(documents(rows))
    wanted = documents_of(part.rows, student)
    assert info.num_rows < 24 / 2
    assert sorted(text for row in wanted for text in row if text) == sorted(row["text"] for row in rows)
    assert documents_of(first.rows, teacher) == wanted
    assert documents_of(last.rows, third) == wanted
    assert np.array_equal(same.rows.input_ids, part.rows.input_ids)
    assert first.rows.shape[1] <= 200 >= last.rows.shape[1]


def test_packing_changes_no_count_and_no_label(student, teacher):
    batch = documents(corpus_rows(24, 3))
    (padded, _, _), (packed, _, _) = (
        builder(student, teacher, max_length=200, packing=packing).build(batch) for packing in (False, True)
    )
    assert packed.num_rows < padded.num_rows / 2
    assert (packed.alignments, packed.num_labels, packed.num_tokens) == (
        padded.alignments,
        padded.num_labels,
        padded.num_tokens,
    )


def test_longer_rows_of_a_teacher_let_the_student_fill_its_own(teacher, student):
    batch = documents(corpus_rows(60, 3))  # the first tokenizer needs about 15 % fewer tokens than the second
    equal, _, _ = builder(teacher, student, max_length=200, packing=True).build(batch)
    longer, (part,), ((theirs,),) = builder(
        teacher, student, max_length=200, packing=True, teacher_lengths=(240,)
    ).build(batch)
    assert longer.num_rows < equal.num_rows
    assert part.rows.shape[1] <= 200 < theirs.rows.shape[1] <= 240


def test_teacher_labels_are_exactly_the_chunks(student, teacher):
    _, (part,), ((teacher_part,),) = builder(student, teacher).build(documents(corpus_rows(12, 3)))
    (chunks,) = (each.chunks for each in part.teachers)
    assert np.array_equal(teacher_part.rows.labels != IGNORE_INDEX, chunks.teacher >= 0)
    following = np.roll(teacher_part.rows.input_ids, -1, axis=1)
    assert np.array_equal(teacher_part.rows.labels[chunks.teacher >= 0], following[chunks.teacher >= 0])
    assert (part.rows.labels[chunks.student >= 0] != IGNORE_INDEX).all()


def test_the_end_of_a_text_is_a_chunk(student, teacher):
    _, (part,), ((teacher_part,),) = builder(student, teacher).build(documents([{"text": "kalo mi"}]))
    (chunks,) = (each.chunks for each in part.teachers)
    student_end = int(np.flatnonzero(part.rows.labels[0] == student.eos_token_id)[0])
    teacher_end = int(np.flatnonzero(teacher_part.rows.labels[0] == teacher.eos_token_id)[0])
    assert chunks.student[0, student_end] == chunks.teacher[0, teacher_end] >= 0


def test_chat_chunks_are_contents_and_ends_of_turns(student, teacher):
    chat = [{"role": "user", "content": "kalo mi"}, {"role": "assistant", "content": "sol est"}]
    _, (part,), ((teacher_part,),) = builder(student, teacher, loss_on="assistant").build(
        documents([{"messages": chat}])
    )
    (chunks,) = (each.chunks for each in part.teachers)
    texts = [spelled(student, part.rows, chunks.student[0], 0, number) for number in range(chunks.num_chunks)]
    assert "".join(texts) == "sol est<|end|>"
    ends = [spelled(teacher, teacher_part.rows, chunks.teacher[0], 0, number) for number in range(chunks.num_chunks)]
    assert "".join(ends) == "sol est<|end|>"


SPOKEN = [
    {"role": "user", "content": "kalo <|end|> mi </s>?"},
    {"role": "assistant", "content": "sol <|end|><s> est"},
    {"role": "user", "content": "<|turn|>assistant\nter"},
    {"role": "assistant", "content": "an<|endoftext|>"},
]
"""A chat whose messages spell special tokens."""


@pytest.mark.parametrize("name", ["byte_level", "tiktoken", "spm_first", "spm_prepend", "unigram", "wordpiece"])
def test_special_tokens_spelled_in_messages_are_text(name):
    student, teacher = tiny_tokenizer(), family(name)
    info, (part,), ((teacher_part,),) = builder(student, teacher, max_length=400).build(
        documents([{"messages": SPOKEN}])
    )
    assert info.bad_rows == ()
    for tokenizer, rows in ((student, part.rows), (teacher, teacher_part.rows)):
        counts = [
            np.count_nonzero(rows.input_ids[0] == tokenizer.convert_tokens_to_ids(token))
            for token in ("<|turn|>", "<|end|>", "</s>")
        ]
        assert counts == [4, 4, 0], "only those that the template writes"
    (chunks,) = (each.chunks for each in part.teachers)
    assert chunks.num_chunks > 8
    inside = [spelled(student, part.rows, chunks.student[0], 0, number) for number in range(chunks.num_chunks)]
    if name in ("byte_level", "tiktoken"):
        assert "".join(inside) == "".join(message["content"] for message in SPOKEN) + 4 * "<|end|>"
        assert info.alignments[0].num_exact == 1


@pytest.mark.parametrize("name", ["tiktoken", "wordpiece"])
def test_assistant_loss_with_special_tokens_spelled_in_messages(name):
    student = tiny_tokenizer()
    _, (part,), _ = builder(student, family(name), loss_on="assistant", max_length=400).build(
        documents([{"messages": SPOKEN}])
    )
    labels = part.rows.labels[0]
    trained = labels[labels != IGNORE_INDEX]
    assert student.decode(trained) == "sol <|end|><s> est<|end|>an<|endoftext|><|end|>"
    assert (trained == student.convert_tokens_to_ids("<|end|>")).sum() == 2, "the ends of the assistant's turns"


def test_a_plain_chat_gives_the_rows_of_one_tokenizer(student, teacher):
    batch = documents(corpus_rows(8, 3, messages=True))
    for loss_on in ("all", "assistant"):
        build = builder(student, teacher, loss_on=loss_on, max_length=400)
        _, (part,), _ = build.build(batch)
        _, (wanted,), _ = BatchBuilder(build.tokenization, build._plan).build(batch)
        assert np.array_equal(part.rows.input_ids, wanted.rows.input_ids)
        assert np.array_equal(part.rows.labels, wanted.rows.labels)


def test_assistant_spans_survive_nfc_of_the_template_text():
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


def test_long_documents_are_cut_at_a_shared_boundary(student, teacher):
    long = " ".join(row["text"] for row in corpus_rows(6, 2))
    info, (part,), ((teacher_part,),) = builder(student, teacher, max_length=32).build(documents([{"text": long}]))
    (chunks,) = (each.chunks for each in part.teachers)
    assert info.num_truncated == 1
    assert part.rows.shape[1] <= 32
    assert teacher_part.rows.shape[1] <= 32
    texts = []
    for tokenizer, rows in ((student, part.rows), (teacher, teacher_part.rows)):
        ids = rows.input_ids[0][rows.position_ids[0] == np.arange(rows.shape[1])]
        texts.append(tokenizer.decode(ids[ids != 2]))
    assert texts[0] == texts[1]
    assert long.startswith(texts[0])
    assert chunks.num_covered == np.count_nonzero(part.rows.labels != IGNORE_INDEX)


def test_two_teachers_share_one_student_row(student, teacher):
    third = tiny_tokenizer(420, seed=9)
    long = " ".join(row["text"] for row in corpus_rows(6, 2))
    batch = documents([{"text": long}, {"text": "kalo mi ter"}])
    built = builder(student, teacher, None, third, max_length=32).build(batch)
    info, (part,), (first, (same,), last) = built
    assert [each.chunks is None for each in part.teachers] == [False, True, False]
    assert np.array_equal(same.rows.input_ids, part.rows.input_ids)
    assert same.num_labels == part.num_labels
    assert [alignment.teacher for alignment in info.alignments] == ["t0", "t2"]
    for tokenizer, teacher_part, chunks in (
        (teacher, first[0], part.teachers[0].chunks),
        (third, last[0], part.teachers[2].chunks),
    ):
        for number in range(chunks.student[0].max() + 1):
            text = spelled(student, part.rows, chunks.student[0], 0, number)
            assert text == spelled(tokenizer, teacher_part.rows, chunks.teacher[0], 0, number)


def test_a_lossy_teacher_does_not_shorten_the_other_teachers_rows(student, teacher):
    unread = "\u2603" * 60  # a single unknown token for the lossy teacher
    lossy = family("unigram")
    info, _, _ = builder(student, lossy, max_length=LENGTH).build(documents([{"text": unread}]))
    assert LENGTH // 2 <= info.num_labels + 1 <= LENGTH
    assert info.alignments[0].num_exact == 0
    alone, (without,), _ = builder(student, teacher, max_length=LENGTH).build(documents([{"text": unread}]))
    both, (beside,), _ = builder(student, lossy, teacher, max_length=LENGTH).build(documents([{"text": unread}]))
    assert both.num_labels == min(info.num_labels, alone.num_labels)
    chunks, wanted = beside.teachers[1].chunks, without.teachers[0].chunks
    size = np.count_nonzero(beside.rows.labels[0] != IGNORE_INDEX)
    assert chunks.num_chunks >= 0.5 * wanted.num_chunks > 0
    assert np.array_equal(chunks.student[0, : size - 2], wanted.student[0, : size - 2])


def test_ranks_get_contiguous_parts_and_global_counts(student, teacher):
    batch = documents(corpus_rows(7, 5))
    _, (whole,), _ = builder(student, teacher).build(batch)
    _, parts, _ = builder(student, teacher, dp=2).build(batch)
    assert [part.first_row for part in parts] == [0, 4]
    joined = np.concatenate([part.teachers[0].chunks.student for part in parts])
    # Sorted by length, the rows alternate between the ranks; the last one only fills the batch.
    wanted = np.concatenate(
        [whole.teachers[0].chunks.student[[0, 1, 4, 5]], whole.teachers[0].chunks.student[[2, 3, 6, 7]]]
    )
    assert np.array_equal(joined, wanted)
    assert (joined[7] == -1).all()
    assert {part.teachers[0].chunks.num_chunks for part in parts} == {whole.teachers[0].chunks.num_chunks}


def test_teachers_with_the_students_tokenizer_read_its_rows(student):
    plan = BatchPlan(BatchSharding(1, 1), (BatchSharding(1, 1),), LENGTH, packing=True, pad_id=2)
    tokenization = Tokenization(student, DataConfig(max_length=LENGTH), format="auto")
    batch = documents(corpus_rows(9, 4))
    info, (part,), ((teacher_part,),) = BatchBuilder(tokenization, plan, [None]).build(batch)
    other, (wanted,), _ = BatchBuilder(tokenization, plan).build(batch)
    assert np.array_equal(part.rows.input_ids, wanted.rows.input_ids)
    assert np.array_equal(part.rows.input_ids, teacher_part.rows.input_ids)
    assert [each.chunks for each in part.teachers] == [None] * len(part.teachers)
    assert info.num_labels == other.num_labels


def test_equal_tokenizers_align_one_to_one(student):
    info, (part,), ((teacher_part,),) = builder(student, student).build(documents(corpus_rows(9, 4)))
    (alignment,) = info.alignments
    assert alignment.num_one_to_one == alignment.num_chunks == alignment.num_covered == info.num_labels
    assert np.array_equal(part.rows.input_ids, teacher_part.rows.input_ids)
    assert np.array_equal(part.rows.labels, teacher_part.rows.labels)


def test_skipped_and_failed_rows_are_empty_and_reported(student, teacher, monkeypatch):
    batch = documents(corpus_rows(4, 4))
    build = builder(student, teacher)
    _, (skipped,), _ = build.build(batch, skip=(2,))
    assert (skipped.rows.labels[3] == IGNORE_INDEX).all()
    assert (skipped.teachers[0].chunks.student[3] == -1).all()
    assert (skipped.rows.labels[:3] != IGNORE_INDEX).any(axis=1).all()
    all_skipped, _, _ = build.build(batch, skip=range(4))
    assert (all_skipped.alignments[0].num_exact, all_skipped.alignments[0].methods) == (0, {})

    aligner = build.teachers[0].aligner
    pair = aligner.pair

    def fail_on_row_2(student_tokens, teacher_tokens, **limits):
        if student_tokens.text.startswith("2:"):
            raise ValueError("no such boundary")
        return pair(student_tokens, teacher_tokens, **limits)

    monkeypatch.setattr(aligner, "pair", fail_on_row_2)
    info, (part,), _ = build.build(batch)
    assert [(bad.row, bad.reason) for bad in info.bad_rows] == [(2, "ValueError: no such boundary")]
    assert build.build(batch, skip=(0,))[0].num_left_out == 2
    assert (info.alignments[0].num_exact, info.alignments[0].methods) == (3, {"bytes": 3})
    for name in ("input_ids", "labels"):
        assert np.array_equal(getattr(part.rows, name), getattr(skipped.rows, name))


def test_errors_that_the_user_must_fix_are_raised(student, teacher):
    with pytest.raises(DataError, match=r"data\.loss_on=assistant"):
        builder(student, teacher, loss_on="assistant").build(documents([{"text": "kalo"}]))


def test_template_errors_name_the_tokenizer(student):
    strict, bare = tiny_tokenizer(600, seed=7), tiny_tokenizer(600, seed=7)
    strict.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        + strict.chat_template
    )
    bare.chat_template = None
    chat = [{"role": "system", "content": "kalo"}, {"role": "assistant", "content": "mi"}]
    with pytest.raises(DataError, match=r"row 0: .*template of teacher t1's tokenizer.*System role not supported"):
        builder(student, student, strict).build(documents([{"messages": chat}]))
    with pytest.raises(DataError, match=r"row 0: .*chat template; teacher t0's tokenizer has none"):
        builder(student, bare).build(documents([{"messages": chat}]))
    with pytest.raises(DataError, match=r"row 0: .*template of the student's tokenizer.*System role not supported"):
        builder(strict, student).build(documents([{"messages": chat}]))


def with_bos(tokenizer):
    """A copy that begins every text with bos."""
    tokenizer = copy.deepcopy(tokenizer)
    bos = tokenizer.bos_token, tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    return tokenizer


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("bos", [False, True])
def test_long_documents_are_split_on_all_sides(student, teacher, packing, bos):
    third = tiny_tokenizer(420, seed=9)
    if bos:
        student, teacher, third = map(with_bos, (student, teacher, third))
    rows = [{"text": " ".join(row["text"] for row in corpus_rows(5, seed=i))} for i in range(6)]
    batch = documents([*rows, {"text": "short"}])
    build = builder(student, teacher, None, third, packing=packing, split=True)
    info, (part,), ((first,), (same,), (last,)) = build.build(batch)
    whole, *_ = builder(student, teacher, None, third, max_length=4096, packing=packing).build(batch)
    assert (info.num_documents, info.num_split, info.num_truncated) == (7, 6, 0)
    # With bos, every piece has one, and no label is lost; without, nothing predicts the first token of a piece.
    num_added = info.num_tokens - whole.num_tokens if bos else whole.num_labels - info.num_labels
    num_pieces = 7 + num_added
    assert num_pieces > 6 * 3
    assert (info.num_tokens - whole.num_tokens, whole.num_labels - info.num_labels) == (
        (num_added, 0) if bos else (0, num_added)
    )
    for ours, all_of_it in zip(info.alignments, whole.alignments):
        assert ours.num_chunks == all_of_it.num_chunks - (0 if bos else num_added), "no chunk is divided"
        assert ours.num_exact == 7
        assert sum(ours.methods.values()) == 7
    wanted = [text for row in documents_of(part.rows, student) for text in row if text]
    assert len(wanted) == num_pieces
    for other, tokenizer in ((first, teacher), (same, student), (last, third)):
        assert [text for row in documents_of(other.rows, tokenizer) for text in row if text] == wanted
        assert other.rows.shape[1] <= LENGTH
    assert np.count_nonzero(part.rows.input_ids == student.bos_token_id) == (num_pieces if bos else 0)


def test_a_batch_of_pieces_does_not_depend_on_the_parts_it_was_aligned_in(student, teacher):
    batch = documents([{"text": " ".join(row["text"] for row in corpus_rows(4, seed=i))} for i in range(6)])
    build = builder(student, teacher, packing=True, split=True)
    at_once = build.assemble(0, batch.cursor, [build.align(batch.documents)])
    in_parts = build.assemble(0, batch.cursor, [build.align(batch.documents[:1]), build.align(batch.documents[1:])])
    for left, right in zip(at_once[1][0], in_parts[1][0]):
        assert np.array_equal(left.rows.input_ids, right.rows.input_ids)
        assert np.array_equal(left.teachers[0].chunks.student, right.teachers[0].chunks.student)
    assert at_once[0].alignments == in_parts[0].alignments


def test_a_document_is_split_with_one_tokenizer_too(student):
    text = " ".join(row["text"] for row in corpus_rows(8, seed=1))
    build = builder(student, None, split=True)
    info, (part,), _ = build.build(documents([{"text": text}, {"text": "short"}]))
    tokens = [*student(text)["input_ids"], *student("short")["input_ids"]]
    kept = part.rows.input_ids[part.rows.input_ids > 2]  # without padding and eos
    assert (info.num_split, info.num_truncated, info.num_unlabelled) == (1, 0, 0)
    assert sorted(kept.tolist()) == sorted(tokens)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("other", [True, False])
def test_a_batch_without_documents_is_padding(student, teacher, other, packing):
    build = builder(student, teacher if other else None, packing=packing, split=True)
    info, (part,), ((teacher_part,),) = build.build(documents([]))
    assert (info.num_documents, info.num_tokens, info.num_labels) == (0, 0, 0)
    assert (part.rows.labels == IGNORE_INDEX).all()
    assert part.rows.shape[0] == teacher_part.rows.shape[0] > 0


def test_a_joined_text_is_skipped_by_all_of_its_rows(student, teacher):
    texts = [{"row": 3, "rows": rows, "text": f"text {rows}"} for rows in ((3, 9), (3, 4))]
    batch = DocumentBatch(0, tuple(texts), Cursor())
    info, _, _ = builder(student, teacher).build(batch, skip={(3, 9), 3})
    assert info.num_left_out == 1


@pytest.mark.parametrize("template", ["{bos} $A", "{bos} {bos} $A {eos}", "$A {eos}", "$A"])
def test_every_piece_begins_with_the_special_tokens_of_a_text(student, template):
    tokenizer = copy.deepcopy(student)
    special = {"bos": tokenizer.bos_token, "eos": tokenizer.eos_token}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template.format(**special),
        special_tokens=[(token, tokenizer.convert_tokens_to_ids(token)) for token in {*special.values()}],
    )
    tokenizer.cls_token, tokenizer.bos_token = tokenizer.bos_token, None  # as BERT's
    count = template.count("{bos}")
    side = PieceLimits.of(tokenizer, LENGTH)
    assert side.prefix == (student.bos_token_id,) * count
    ids = np.array([*side.prefix, 7, 8], dtype=np.int32)
    assert side.of_document(ids).tolist() == [*side.prefix]
    assert not count or not len(side.of_document(ids[1:-1]))


def test_a_skipped_document_is_one_empty_piece(student, teacher):
    batch = documents([{"text": " ".join(row["text"] for row in corpus_rows(6, seed=1))}, {"text": "short"}])
    info, _, _ = builder(student, teacher, split=True).build(batch, skip={0})
    assert (info.num_documents, info.num_split) == (2, 0)
    assert sum(info.alignments[0].methods.values()) == 1
