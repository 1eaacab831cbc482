"""A step with a teacher of the student's tokenizer and one of another, against values counted without this package."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from tests.helpers.command import distill_rl, records
from tests.helpers.corpus import corpus_rows, write_corpus

pytestmark = pytest.mark.cli
ROWS, SEED = 8, 9


def test_shares_and_weights_are_those_counted_from_offsets_and_logits(material, cluster, tmp_path):
    """All documents are in the one step, whole."""
    from transformers import AutoTokenizer

    data = write_corpus(tmp_path / "few.jsonl", rows=ROWS, seed=SEED)
    ended = distill_rl(
        "train", "-c", material.config(tmp_path, "foreign"), f"data.path={data}", "data.max_length=512",
        "data.validation.fraction=0", "data.packing=false", "train.micro_batch_size=8",
        f"teachers.1.model={material.root}/teacher", "teachers.1.name=same", "teachers.1.dtype=fp32",
        "teachers.0.score=ce", "teachers.1.score=ce", "train.steps=1", "schedule.steps=1", "schedule.warmup_steps=0",
        "aligner.workers=0", cluster=cluster,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    (step,) = (record for record in records(tmp_path / "runs" / "tiny") if "train/kl_loss" in record)

    texts = [row["text"] for row in corpus_rows(ROWS, SEED)]
    student, foreign = (AutoTokenizer.from_pretrained(material.root / name) for name in ("student", "foreign"))
    chunks = [sizes for text in texts for sizes in chunk_sizes(text, student, foreign)]
    covered = sum(ours for ours, _ in chunks)
    labels = sum(len(student(text)["input_ids"]) for text in texts)
    assert step["align/chunks"] == len(chunks)
    assert step["align/one_to_one"] == pytest.approx(sum(sizes == (1, 1) for sizes in chunks) / len(chunks), rel=1e-9)
    assert step["align/coverage"] == pytest.approx(covered / labels, rel=1e-9)

    kl, of_foreign, of_same = (step[f"train/kl_loss{name}"] for name in ("", "/big", "/same"))
    scores = [
        cross_entropy(material.root / "foreign", foreign, texts) / covered,
        cross_entropy(material.root / "teacher", student, texts) / labels,
    ]
    weight = 1 / (1 + math.exp(scores[0] - scores[1]))  # the softmax of the negative scores
    assert kl == pytest.approx(weight * of_foreign + (1 - weight) * of_same, rel=1e-5)
    assert abs(of_foreign - of_same) > 0.1 * kl, "no weight would show"


def chunk_sizes(text: str, student, foreign) -> Iterator[tuple[int, int]]:
    """Tokens of student and teacher in each span between the places where both end a token, after the first span.

    The first token of a text is not predicted. The end of the text is a token of its own on both sides.
    """
    ends = []
    for tokenizer in (student, foreign):
        offsets = [end for _, end in tokenizer(text, return_offsets_mapping=True)["offset_mapping"]]
        ends.append([*offsets, len(text) + 1])
    places = sorted({*ends[0]} & {*ends[1]})
    for start, end in pairwise(places):
        ours, theirs = (sum(start < each <= end for each in side) for side in ends)
        yield ours, theirs


def cross_entropy(model, tokenizer, texts: list[str]) -> float:
    """The sum over all tokens but the first ones, in double precision, each text by itself."""
    from transformers import AutoModelForCausalLM

    teacher = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    total = 0.0
    for text in texts:
        tokens = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            logits = teacher(tokens).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum").item()
    return total
