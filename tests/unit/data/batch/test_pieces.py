"""Documents are named by their text, and rows say which of a document's tokens they hold, on every side."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping
from hashlib import blake2b
from itertools import chain
from typing import Any

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from distill_rl.config.schema import AlignerConfig, DataConfig
from distill_rl.data.batch.collate import BatchPlan, BatchSharding
from distill_rl.data.batch.cross_tokenizer_batch import BatchBuilder
from distill_rl.data.batch.document_aligner import CrossTokenizerTeacher, StoredTargets
from distill_rl.data.batch.tokenization import Tokenization, name_of
from distill_rl.types import BatchInfo, Cursor, DocumentBatch, PieceRef, RankBatch
from tests.helpers.corpus import corpus_rows
from tests.helpers.tokenizers import CHAT_TEMPLATE, tiny_tokenizer

LENGTH = 40
OTHER_TEMPLATE = CHAT_TEMPLATE.replace("{{ bos_token }}", "")


# ------------------------------------------------------------------ names


def test_a_name_is_the_documented_hash():
    assert name_of("kalomi") == blake2b(b"kalomi", digest_size=16).digest()
    assert len(name_of("")) == 16


def test_forms_of_the_same_text_have_one_name():
    composed = "caf\u00e9 \u1e69 \uac00"
    decomposed = unicodedata.normalize("NFD", composed)
    assert composed != decomposed
    assert name_of(composed) == name_of(decomposed)


def test_texts_that_differ_in_anything_else_have_different_names():
    texts = ["", " ", "a", "A", "a ", "a\n", "\ufb01", "fi", "\u212b", "\u00c5 ", "\x00", "a\x00"]
    assert len({name_of(text) for text in texts}) == len(texts)


def test_lone_surrogates_are_named():
    assert len({name_of(text) for text in ("\ud800", "\udfff", "a\ud800", "?", "\ufffd")}) == 5


def tokenizer(*, bos: bool = False, template: str = CHAT_TEMPLATE, **options: int) -> Any:
    made = tiny_tokenizer(**options)
    made.chat_template = template
    if bos:
        made._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return made


def tokenization(made: Any) -> Tokenization:
    return Tokenization(made, DataConfig(max_length=LENGTH), format="auto")


def test_a_text_has_one_name_for_every_tokenizer():
    document = {"row": 3, "text": "kalomi ter"}
    names = {tokenization(made).encode(document).name for made in (tokenizer(), tokenizer(vocab_size=600, seed=7))}
    assert names == {name_of("kalomi ter")}


def test_a_chat_is_named_by_what_its_template_writes():
    chat = {"row": 0, "messages": [{"role": "user", "content": "kalo"}, {"role": "assistant", "content": "mi"}]}
    written = "<|turn|>user\nkalo<|end|>\n<|turn|>assistant\nmi<|end|>\n"
    assert tokenization(tokenizer()).encode(chat).name == name_of("<s>" + written)
    assert tokenization(tokenizer(template=OTHER_TEMPLATE)).encode(chat).name == name_of(written)
    as_text = {"row": 0, "text": written}
    assert tokenization(tokenizer()).encode(as_text).name == name_of(written)


def test_variables_of_the_template_are_part_of_the_name():
    template = "{{ tone }}" + CHAT_TEMPLATE
    chat = {"row": 0, "messages": [{"role": "user", "content": "kalo"}]}
    names = {
        tokenization(tokenizer(template=template)).encode(chat | {"chat_template_kwargs": {"tone": tone}}).name
        for tone in ("warm", "cold")
    }
    assert len(names) == 2


# ------------------------------------------------------------------ what rows hold


def build(
    student: Any,
    teachers: list[Any],
    documents: list[Mapping[str, Any]],
    *,
    stored: StoredTargets,
    packing: bool = False,
    split: bool = False,
) -> tuple[BatchInfo, list[list[RankBatch]]]:
    """A batch for teachers on two ranks each; a teacher's tokenizer, or None for one that reads the student's rows."""
    shardings = tuple(BatchSharding(2, 1) for _ in teachers)
    lengths = tuple(LENGTH if other is None else LENGTH + 8 for other in teachers)
    plan = BatchPlan(
        BatchSharding(1, 2), shardings, LENGTH, packing, pad_id=2, teacher_lengths=lengths, split=split,
        rows_per_sub_batch=8,
    )  # fmt: skip
    crossing = [
        other and CrossTokenizerTeacher.of(f"t{i}", student, other, AlignerConfig()) for i, other in enumerate(teachers)
    ]
    builder = BatchBuilder(tokenization(student), plan, crossing, stored=stored)
    rows = tuple({"row": i, **document} for i, document in enumerate(documents))
    info, student_parts, teacher_parts = builder.build(DocumentBatch(0, rows, Cursor(0, len(rows))))
    assert all(part.pieces == () for part in student_parts)
    return info, teacher_parts


def text_of(made: Any, document: Mapping[str, Any]) -> str:
    if "text" in document:
        return document["text"]
    return made.apply_chat_template(document["messages"], tokenize=False)


def all_tokens(made: Any, document: Mapping[str, Any]) -> list[int]:
    """All tokens of a document, eos included."""
    return tokenization(made).encode_all({"row": 0, **document}).input_ids.tolist()


def held(parts: list[RankBatch]) -> list[tuple[PieceRef, list[int]]]:
    """Every piece of a teacher's rows with the tokens at its place; the pieces of a row must fill it up to the padding."""
    found = []
    for part in parts:
        assert len(part.pieces) == part.rows.shape[0]
        for ids, positions, pieces in zip(part.rows.input_ids, part.rows.position_ids, part.pieces):
            start = 0
            for piece in pieces:
                assert piece.length > 0
                assert positions[start : start + piece.length].tolist() == list(range(piece.length))
                found.append((piece, ids[start : start + piece.length].tolist()))
                start += piece.length
            assert np.count_nonzero(positions == 0) == max(len(pieces), 1), "no further document begins in the row"
    return found


STUDENTS: Mapping[str, Callable[[], Any]] = {
    "without bos": lambda: tokenizer(),
    "with bos": lambda: tokenizer(bos=True),
}


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("split", [False, True], ids=["cut", "split"])
@pytest.mark.parametrize("kind", STUDENTS)
@pytest.mark.parametrize("messages", [False, True], ids=["texts", "chats"])
def test_the_pieces_of_all_ranks_are_the_documents_tokens(kind, packing, split, messages):
    """Of two teachers, one with the student's tokenizer and one with its own and another template."""
    student, other = (
        STUDENTS[kind](),
        tokenizer(bos=kind == "with bos", template=OTHER_TEMPLATE, vocab_size=600, seed=7),
    )
    documents = corpus_rows(18, 3, messages)
    stored = StoredTargets(frozenset({0, 1}))
    info, teachers = build(student, [None, other], documents, stored=stored, packing=packing, split=split)
    assert info.num_split if split else info.num_truncated
    for made, parts in zip((student, other), teachers):
        whole = {name_of(text_of(made, document)): all_tokens(made, document) for document in documents}
        pieces: dict[bytes, list[PieceRef]] = {name: [] for name in whole}
        for piece, tokens in held(parts):
            body = tokens[piece.prefix :]
            first = piece.first
            assert body == whole[piece.name][first : first + len(body)]
            assert tokens[: piece.prefix] == [0] * piece.prefix
            assert piece.whole == (first + len(body) == len(whole[piece.name]))
            pieces[piece.name].append(piece)
        for name, of_document in pieces.items():
            of_document.sort(key=lambda piece: piece.first)
            assert of_document[0].first == of_document[0].prefix == 0
            assert split or len(of_document) == 1
            if split:
                ends = [piece.first + piece.length - piece.prefix for piece in of_document]
                assert [piece.first for piece in of_document[1:]] == ends[:-1], "each begins where the last one ends"
                assert ends[-1] == len(whole[name])
                wanted = 1 if kind == "with bos" and whole[name][0] == 0 else 0
                assert {piece.prefix for piece in of_document[1:]} <= {wanted}


def test_one_tokenizer_alone_gives_the_pieces_that_it_gives_beside_another():
    """A capture of one teacher serves a run with two: its documents have the same names and tokens."""
    student, other = tokenizer(bos=True), tokenizer(vocab_size=600, seed=7)
    documents = [row for row in corpus_rows(18, 3) if len(all_tokens(student, row)) <= LENGTH]
    documents = [row for row in documents if len(all_tokens(other, row)) <= LENGTH]
    assert len(documents) > 3
    _, (alone,) = build(student, [None], documents, stored=StoredTargets(frozenset({0})))
    _, (beside, crossing) = build(student, [None, other], documents, stored=StoredTargets(frozenset({0, 1})))
    _, (as_student,) = build(other, [None], documents, stored=StoredTargets(frozenset({0})))
    for one, two in ((alone, beside), (as_student, crossing)):
        assert sorted(map(repr, held(one))) == sorted(map(repr, held(two)))


def test_rows_of_teachers_without_a_store_do_not_name_their_pieces():
    other = tokenizer(vocab_size=600, seed=7)
    _, (first, second) = build(tokenizer(), [None, other], corpus_rows(6, 3), stored=StoredTargets(frozenset({1})))
    assert all(part.pieces == () for part in first)
    assert len(held(second)) == 6


@pytest.mark.parametrize("other", [False, True], ids=["same tokenizer", "other tokenizer"])
@pytest.mark.parametrize("split", [False, True], ids=["cut", "split"])
def test_documents_that_a_store_lacks_are_left_out_and_counted(other, split):
    student = tokenizer()
    teacher = tokenizer(vocab_size=600, seed=7) if other else None
    documents = corpus_rows(8, 3)
    lacking = {name_of(documents[i]["text"]) for i in (2, 5)}
    asked = []

    def has(piece: PieceRef, tokens: np.ndarray) -> bool:
        assert len(tokens) == piece.length
        asked.append(piece)
        return piece.name not in lacking

    stored = StoredTargets(frozenset({0}), {0: has})
    info, (parts,) = build(student, [teacher], documents, stored=stored, split=split)
    assert {piece.name for piece, _ in held(parts)} == {name_of(row["text"]) for row in documents} - lacking
    assert (info.num_documents, info.num_not_stored, info.num_left_out) == (8, 2, 0)
    assert {piece.name for piece in asked} == {name_of(row["text"]) for row in documents}
    kept = [row for i, row in enumerate(documents) if i not in (2, 5)]
    same, _ = build(student, [teacher], kept, stored=StoredTargets(frozenset({0})), split=split)
    assert (info.num_tokens, info.num_labels) == (same.num_tokens, same.num_labels)
    assert [*chain(info.alignments)] == [*chain(same.alignments)], "those left out do not count"
