"""Rows in many scripts with pairs of real tokenizers, each compared with a slow walk over its bytes."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from distill_rl.align import TokenAligner
from tests.helpers.align import DATA, check_numbers, check_row, real

pytestmark = pytest.mark.skipif(
    not (DATA / "tokenizers").is_dir(), reason="real tokenizers and texts are not in ../shared/data"
)

# Reading the tokenizers takes most of the time: each occurs, the large ones once, and byte-level and SentencePiece ones
# are paired with each other and among themselves.
PAIRS = [
    ("qwen3", "cl100k_base"),
    ("minimind", "mistral-tekken"),
    ("minimind", "mistral-v1"),
    ("mistral-v1", "llm-jp-v2.2"),
    ("gpt2", "roberta-base"),
]
LOSSY_PAIRS = [
    ("qwen3", "t5-small"),
    ("minimind", "bert-uncased"),
    ("t5-small", "mistral-v1"),
    ("bert-uncased", "t5-small"),
]
SCRIPTS = ("cmn_hans", "cmn_hant", "jpn", "arb", "hin", "tha", "kor", "rus", "ell_polytonic", "vie", "heb", "eng")


@cache
def texts() -> tuple[str, ...]:
    draw = random.Random(0)

    def cuts(text: str, count: int, size: int) -> Iterator[str]:
        for _ in range(count):
            start = draw.randrange(max(1, len(text) - size))
            yield text[start : start + size]

    result: list[str] = []
    for line in (DATA / "corpus/multilingual/udhr.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        result += cuts(row["text"], 4 if row["lang"] in SCRIPTS else 1, 300)
    result += cuts((DATA / "corpus/edge/emoji-test.txt").read_text("utf-8"), 8, 300)
    result += json.loads((DATA / "corpus/edge/blns.json").read_text("utf-8"))[::2]
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in ("ast.py", "heapq.py", "json/decoder.py", "textwrap.py", "decimal.py", "_pydecimal.py"):
        result += cuts((library / name).read_text("utf-8"), 3, 500)
    result += mathematics(draw)
    result += [
        "",
        " ",
        "  ",
        "\n",
        "▁",
        "▁▁ x",
        "a\u0301e\u0301",
        "\r\n\t x",
        "</s>",
        "<|im_end|> <s>",
        "<0xE2>",
        "🧑‍🚀👨‍👩‍👧",
        "12345 1,234.5",
    ]
    return tuple(result)


def mathematics(draw: random.Random) -> list[str]:
    parquet = pytest.importorskip("pyarrow.parquet")
    return draw.sample(parquet.read_table(DATA / "evals/math/test.parquet")["problem"].to_pylist(), 20)


@cache
def make_aligner(student: str, teacher: str) -> TokenAligner:
    return TokenAligner(real(student), real(teacher))


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_no_row_is_misaligned(student: str, teacher: str) -> None:
    aligner = make_aligner(student, teacher)
    inexact = []
    for text in texts():
        result = aligner.align(text)
        check_numbers(result)
        check_row(real(student), real(teacher), aligner.normalize(text), result)
        if not result.exact:
            inexact.append(text)
    # These tokenizers lose only a literal ▁ and text that Unigram reads as one of its byte pieces.
    assert all("▁" in text or "<0x" in text for text in inexact), inexact


@pytest.mark.parametrize(("student", "teacher"), LOSSY_PAIRS)
def test_lossy_rows_are_inexact_with_correct_chunks(student: str, teacher: str) -> None:
    aligner = make_aligner(student, teacher)
    exact = 0
    for text in texts():
        result = aligner.align(text)
        check_numbers(result)
        check_row(real(student), real(teacher), aligner.normalize(text), result)
        exact += result.exact
    assert exact < len(texts()) / 3


@pytest.mark.parametrize(("student", "teacher"), [("qwen3", "t5-small"), ("minimind", "bert-uncased")])
def test_dp_chunks_cover_the_same_place(student: str, teacher: str) -> None:
    """Rows in which one tokenizer knows hardly any letter: its commas and full stops stand between unknown tokens."""
    aligner = make_aligner(student, teacher)
    rows = [json.loads(line) for line in (DATA / "corpus/multilingual/udhr.jsonl").read_text("utf-8").splitlines()]
    checked = 0
    for text in (row["text"][start : start + 400] for row in rows for start in range(0, 1600, 400)):
        result = aligner.align(text)
        if result.method != "dp":
            continue
        text, extents = aligner.normalize(text), []
        for name, ids, chunk in (
            (student, result.student_ids, result.student_chunk),
            (teacher, result.teacher_ids, result.teacher_chunk),
        ):
            encoded = real(name)(text, return_offsets_mapping=True)
            assert encoded["input_ids"] == ids.tolist()
            offsets = np.array(encoded["offset_mapping"])
            tokens = [chunk == number for number in range(result.num_chunks)]
            extents.append([(offsets[held, 0].min(), offsets[held, 1].max()) for held in tokens])
        for student_extent, teacher_extent in zip(*extents):
            checked += 1
            start, stop = max(student_extent[0], teacher_extent[0]), min(student_extent[1], teacher_extent[1])
            assert start < stop, (text, student_extent, teacher_extent)
    assert checked


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_ids_alone_give_the_same_chunks(student: str, teacher: str) -> None:
    aligner = make_aligner(student, teacher)
    for text in texts()[::5]:
        by_text = aligner.align(text)
        by_ids = aligner.align_ids(by_text.student_ids, by_text.teacher_ids)
        if by_text.exact:
            assert by_ids.exact
            assert np.array_equal(by_ids.student_chunk, by_text.student_chunk), text
            assert np.array_equal(by_ids.teacher_chunk, by_text.teacher_chunk), text


@pytest.mark.parametrize(
    ("student", "teacher"), [*PAIRS, ("qwen3", "gpt2"), ("gpt2", "mistral-v1"), ("qwen3", "t5-small")]
)
@pytest.mark.parametrize(
    "text",
    [
        "One two.<|endoftext|>Three four.",
        "<|im_start|>user\nHi there<|im_end|>\n",
        "One </s> two",
        "<s>[INST] one [/INST] two</s>",
    ],
)
def test_special_tokens_that_a_text_has_are_read_as_each_side_reads_them(student, teacher, text):
    """One that only one side knows is compared with nothing, all other text that both spell is."""
    sides = real(student), real(teacher)
    aligner = TokenAligner(*sides)
    read = [aligner.tokenize_student(text, with_specials=True), aligner.tokenize_teacher(text, with_specials=True)]
    for tokenizer, tokens in zip(sides, read):
        assert tokens.ids.tolist() == tokenizer(aligner.normalize(text))["input_ids"]
    pair = aligner.pair(*read)
    rows = (pair.student_ids, pair.student_chunk), (pair.teacher_ids, pair.teacher_chunk)
    specials = [{*tokenizer.all_special_tokens} for tokenizer in sides]
    for i in range(pair.num_chunks):
        tokens = [tokenizer.convert_ids_to_tokens(ids[chunk == i]) for tokenizer, (ids, chunk) in zip(sides, rows)]
        written = [[token for token in side if token in known] for side, known in zip(tokens, specials)]
        assert written[0] == written[1]
        spelt = [tokenizer.decode(ids[chunk == i]).strip() for tokenizer, (ids, chunk) in zip(sides, rows)]
        assert spelt[0] == spelt[1]
    assert pair.num_chunks >= 2
