"""Which loss is suggested for a pair of tokenizers."""

from __future__ import annotations

import json

import pytest

from distill_rl.align import TokenAligner, audit
from distill_rl.align.verify import FEW_SINGLES, advise, class_of
from tests.helpers.align import SENTENCES, family, unknown_is_eos
from tests.helpers.tokenizers import seeded_words


@pytest.mark.parametrize(
    ("share", "chunks", "common", "loss", "reason"),
    [
        (0.87, 412, 96, "hybrid", "87.0% of the chunks are 1:1 and compare 96 common tokens; the others"),
        (0.47, 412, 96, "alm", "only 47.0% of the chunks are 1:1"),
        (1.0, 5, 30000, "hybrid", "100.0% of the chunks are 1:1 and compare 30,000 common tokens"),
        (FEW_SINGLES, 1000, 1, "hybrid", "60.0% of the chunks are 1:1"),
        (FEW_SINGLES - 0.01, 1000, 1, "alm", "only 59.0% of the chunks are 1:1"),
        (0.0, 1000, 0, "alm", "no token of the two vocabularies spells the same"),
        (0.0, 0, 96, "none", "no text could be aligned"),
    ],
)
def test_advice(share, chunks, common, loss, reason):
    suggested, found = advise(share, chunks, common)
    assert suggested == loss
    assert found.startswith(reason)


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        (" hello", "letters"),
        ("é", "letters"),
        ("123", "digits"),
        ("?!", "punctuation"),
        ("🧑", "punctuation"),
        ("中文", "cjk"),
        ("ひカ한", "cjk"),
        ("мир", "other scripts"),
        (" \n\t", "whitespace"),
        ("a1", "mixed"),
        (b"\xe4\xb8", "parts of characters"),
    ],
)
def test_class_of_spellings(spelled, name):
    assert class_of(spelled if isinstance(spelled, bytes) else spelled.encode()) == name


def test_tokenizer_covers_itself_fully():
    report = audit(TokenAligner(family("tiktoken"), family("tiktoken")), SENTENCES)
    assert report.one_to_one_share == report.exact_share == report.aligned_share == 1
    assert list(report.chunk_lengths) == ["1:1"]
    assert report.suggested_loss == "hybrid"
    assert report.methods == {"bytes": len(SENTENCES)}


def test_report_agrees_with_the_rows():
    aligner = TokenAligner(family("byte_level"), family("spm_always"))
    texts = [*SENTENCES, " ".join(seeded_words(3, 50)), "12345 中文"]
    report = audit(aligner, texts)
    rows = [aligner.align(text) for text in texts]
    chunks = sum(row.num_chunks for row in rows)
    assert report.one_to_one_share == pytest.approx(sum(row.counts["1:1"] for row in rows) / chunks)
    assert sum(report.chunk_lengths.values()) == chunks == sum(part.chunks for part in report.classes.values())
    assert report.exact_share == sum(row.exact for row in rows) / len(texts)
    tokens = sum(row.student_chunk.max(initial=-1) >= 0 and (row.student_chunk >= 0).sum() for row in rows)
    assert sum(part.chunks * part.student_tokens for part in report.classes.values()) == pytest.approx(tokens)
    assert {"digits", "letters", "punctuation", "cjk"} <= report.classes.keys()
    assert 0 < report.common_vocabulary < aligner.student.size
    assert json.loads(json.dumps(report.to_dict()))["classes"]["digits"]["chunks"] == report.classes["digits"].chunks


def test_unknown_tokens_count_as_uncompared_text():
    aligner = TokenAligner(family("wordpiece"), family("tiktoken"))
    texts = ["ka lo \u2603", "\u2603 mi \u2603 \u2603", "sol an be"]
    rows = [aligner.align(text) for text in texts]
    unknown = sum((row.student_ids == aligner.student.unknown).sum() for row in rows)
    tokens = sum(len(row.student_ids) for row in rows)
    assert unknown == 4
    report = audit(aligner, texts)
    assert report.unknown_share == pytest.approx(unknown / tokens)
    assert report.aligned_share == pytest.approx(sum((row.student_chunk >= 0).sum() for row in rows) / tokens)
    assert report.aligned_share <= 1 - report.unknown_share


def test_eos_with_the_unknown_id_is_not_unknown_text():
    name = "unigram_fallback"  # appends </s> to every text
    aligner = TokenAligner(unknown_is_eos(name), family("tiktoken"))
    assert aligner.student.unknown == aligner.align("ka lo").student_ids[-1]
    report = audit(aligner, SENTENCES)
    assert report.unknown_share == 0
    assert report.aligned_share == audit(TokenAligner(family(name), family("tiktoken")), SENTENCES).aligned_share


def test_lossy_side_and_suggestion_are_reported():
    report = audit(TokenAligner(family("byte_level"), family("wordpiece")), SENTENCES)
    assert report.exact_share < 1
    assert list(report.lossy) == ["teacher"]
    assert report.aligned_share < 1
    far = audit(TokenAligner(family("byte_level"), family("byte_level_other")), ["\u2603" * 50])
    assert report.advice == f"loss.cross_tokenizer={report.suggested_loss}: {report.reason}"
    assert (far.suggested_loss, far.one_to_one_share) == ("hybrid", 1.0)
    with pytest.raises(ValueError, match="at least one text"):
        audit(TokenAligner(family("byte_level"), family("tiktoken")), [])
