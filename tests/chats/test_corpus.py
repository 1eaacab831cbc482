"""Every chat template with every kind of chats: which tokens are trained on, or why the chat is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from distill_rl.config.schema import AlignerConfig
from distill_rl.data.batch.document_aligner import CrossTokenizerTeacher, DocumentAligner
from distill_rl.errors import DataError
from tests.chats import cells
from tests.chats.cells import RIGHT, Cell, document_of, outcomes, tokenization_of, tokenizers_of
from tests.chats.kinds import KINDS, say
from tests.chats.oracle import Expected, contradictions, expected
from tests.chats.page import PAGE, page
from tests.chats.templates import TEMPLATES, Template
from tests.chats.tokenizers import TOKENIZERS, byte_spans, metaspace, plain, special
from tests.chats.wrong_today import WRONG_TODAY

OTHER_TOKENIZERS = ["chatml", "llama2", "mistral-v1", "gemma2", "vicuna", "answer-blank", "alpaca", "deepseek-v2"]
"""Templates that are also tried with tokenizers that are not byte-level."""
TRIED = [(tokenizer, name) for name, template in TEMPLATES.items() for tokenizer in tokenizers_of(template)]
TRIED += [(tokenizer, name) for name in OTHER_TOKENIZERS for tokenizer in ("metaspace", "wordpiece")]


@cache
def wanted(name: str) -> dict[str, Expected]:
    """Kind → what must come of its chat with a template."""
    template = TEMPLATES[name]
    tokenizer = special(template)
    return {kind.name: expected(tokenizer, template, kind.chat(template)) for kind in KINDS.values()}


def stretches(text: str, learnt: tuple[bool, ...]) -> list[str]:
    """The stretches of a text that are learnt."""
    places = np.flatnonzero(np.diff([False, *learnt, False])).tolist()
    return [text[start:stop] for start, stop in zip(places[::2], places[1::2])]


@pytest.mark.parametrize(("tokenizer", "template"), TRIED)
def test_what_is_trained_on_follows_from_the_words(tokenizer: str, template: str) -> None:
    found = {kind: outcome for kind, outcome in outcomes(tokenizer, template).items() if outcome not in RIGHT}
    listed = _wrong_today(tokenizer, template)
    mended, broken = listed - found.keys(), {kind: found[kind] for kind in found.keys() - listed}
    assert (mended, broken) == (set(), {}), "cells that are right now leave WRONG_TODAY; others must not be wrong"


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=lambda template: template.name)
def test_a_teacher_with_another_tokenizer_changes_no_label(template: Template) -> None:
    """Chats that a template leaves something of are read as well; one of any template is read by this teacher's."""
    student = special(template)
    tokenization = tokenization_of(student, template, "warn")
    teacher = CrossTokenizerTeacher.of("other", student, _other_tokenizer(), AlignerConfig())
    aligner = DocumentAligner(tokenization, {0: teacher}, {0: 100_000})
    wrong, compared = [], 0
    for kind in KINDS.values():
        document = document_of(template, kind.chat(template))
        try:
            alone = tokenization.encode_all(document)
        except DataError:
            continue
        (aligned,) = aligner.align([document])
        beside = aligned.pieces[0].encoded
        compared += 1
        same = np.array_equal(beside.input_ids, alone.input_ids) and np.array_equal(beside.label_mask, alone.label_mask)
        wrong += [] if same else [kind.name]
    assert wrong == []
    assert compared > 10 or template.no_stop


@cache
def _other_tokenizer() -> Any:
    """A tokenizer with other pieces than the students', and with a template that accepts all chats."""
    return metaspace(TEMPLATES["chatml"])


def _wrong_today(tokenizer: str, template: str) -> set[str]:
    """The kinds of chats that are listed as wrong, each for one reason."""
    reasons = WRONG_TODAY.get(tokenizer, {}).values()
    kinds = [kind for by_template in reasons if template in by_template for kind in by_template[template].split(", ")]
    assert sorted(set(kinds)) == sorted(kinds)
    assert set(kinds) <= KINDS.keys()
    return set(kinds)


def test_every_listed_cell_is_one_that_is_tried() -> None:
    listed = {(tokenizer, name) for tokenizer, reasons in WRONG_TODAY.items() for of in reasons.values() for name in of}
    assert listed <= set(TRIED)


def test_the_page_has_the_outcome_of_every_cell() -> None:
    assert PAGE.read_text("utf-8") == page(), "run python -m tests.chats.page"


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=lambda template: template.name)
def test_marks_and_words_say_the_same(template: Template) -> None:
    for kind, cell in wanted(template.name).items():
        if cell.refused is None:
            assert contradictions(KINDS[kind].chat(template), cell.text, cell.learnt) == [], kind


@pytest.mark.parametrize(
    "template", [t for t in TEMPLATES.values() if not t.no_stop], ids=lambda template: template.name
)
def test_every_turn_ends_with_a_token_and_begins_behind_the_header(template: Template) -> None:
    for kind, cell in wanted(template.name).items():
        turns = stretches(cell.text, cell.learnt)
        if kind == "two turns":
            assert len(turns) == 2
        if template.ends and kind in ("late system", "two answers"):
            continue  # the token that ends a turn there is none that the model stops at
        for turn in turns[: -1 if cell.open else None]:
            assert turn.endswith(template.ends or template.special), kind
            assert kind.startswith("quoted") or not turn.startswith(template.header), kind


def test_the_corpus_covers_the_families_and_the_outcomes() -> None:
    assert len(TEMPLATES) >= 40
    assert len(KINDS) >= 20
    found = [cell for name in TEMPLATES for cell in wanted(name).values()]
    assert {cell.refused for cell in found} == {None, "template", "left out", "no stop"}
    assert sum(cell.refused is None for cell in found) > 0.6 * len(found)
    assert any(cell.open for cell in found)


def test_tokens_of_plain_headers_reach_across_the_borders_of_turns() -> None:
    crossing = 0
    for template in TEMPLATES.values():
        tokenizer = plain(template)
        cell = expected(tokenizer, template, KINDS["two turns"].chat(template))
        learnt = [flag for character, flag in zip(cell.text, cell.learnt) for _ in character.encode()]
        _, spans = byte_spans(tokenizer, tokenizer(cell.text, add_special_tokens=False)["input_ids"])
        crossing += any(len(set(learnt[start:stop])) == 2 for start, stop in spans)
    assert crossing >= 20


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"label_mask": lambda mask: ~mask}, "labels: "),
        ({"label_mask": lambda mask: np.roll(mask, 1)}, "labels: 2 missing, 2 too many"),
        ({"label_mask": lambda mask: mask & (np.arange(len(mask)) < len(mask) - 2)}, "labels: 1 missing"),
        ({"input_ids": lambda ids: ids[:-1], "label_mask": lambda mask: mask[:-1]}, "another text"),
        ({"left_out": lambda _: ("a note",)}, "said"),
        ({}, "right"),
    ],
)
def test_an_outcome_says_what_is_wrong(
    change: Mapping[str, Any], outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = cells._encode

    def changed(*arguments: Any) -> Any:
        encoded = encode(*arguments)
        return replace(encoded, **{name: edit(getattr(encoded, name)) for name, edit in change.items()})

    monkeypatch.setattr(cells, "_encode", changed)
    template = TEMPLATES["chatml"]
    assert Cell(template, KINDS["two turns"], "special").outcome(special(template)).startswith(outcome)


def test_words_contradict_labels_that_are_not_theirs() -> None:
    chat = KINDS["tools call"].chat(TEMPLATES["qwen3"])
    cell = wanted("qwen3")["tools call"]
    until = cell.text.index("ans2qb") + 3
    cut = tuple(flag and i < until for i, flag in enumerate(cell.learnt))
    without_name = tuple(flag and i < cell.text.rindex("nam1qa") for i, flag in enumerate(cell.learnt))
    assert contradictions(chat, cell.text, cell.learnt) == []
    assert contradictions(chat, cell.text, cut) == ["ans2qb: not learnt", "ans3qa: not learnt", "ans3qb: not learnt"]
    assert "nam1qa: learnt 0 times" in contradictions(chat, cell.text, without_name)
    assert "usr1qa: learnt" in contradictions(chat, cell.text, (True,) * len(cell.text))


def test_each_tokenizer_splits_words_and_keeps_tokens() -> None:
    template = TEMPLATES["chatml"]
    for name, make in TOKENIZERS.items():
        ids = make(template)(f"{template.stop}{say('ans', 1)}", add_special_tokens=False)["input_ids"]
        tokens = make(template).convert_ids_to_tokens(ids)
        assert (tokens[0] == template.stop) == (name != "plain")
        assert len(tokens) > 2
