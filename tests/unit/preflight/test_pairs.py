"""Problems of a student with a teacher that has another tokenizer, found before the run starts."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from distill_rl.align import TokenAligner, audit
from distill_rl.align.projection import build_projection, load_projection, save_projection
from distill_rl.config.derive import sizes
from distill_rl.preflight import gather
from distill_rl.preflight.pairs import ALIGNED_CHARACTERS, ALIGNED_ROWS
from tests.helpers.tokenizers import tiny_tokenizer
from tests.unit.preflight.conftest import FOREIGN


@pytest.fixture
def problems(problems):
    """As in conftest.py, for a teacher with another tokenizer."""
    return partial(problems, file="pair.yaml")


def test_facts_name_the_cross_tokenizer_loss(material):
    checked = gather(material / "pair.yaml")
    assert checked.problems == []
    (teacher,) = checked.facts.teachers
    assert (teacher.cross_tokenizer_loss, teacher.vocabulary_size) == ("hybrid", FOREIGN)
    same = gather(material / "pair.yaml", [f"teachers.0.model={material}/student"])
    assert same.facts.teachers[0].cross_tokenizer_loss is None
    forced = gather(material / "pair.yaml", [f"teachers.0.model={material}/student", "teachers.0.loss=alm"])
    assert forced.facts.teachers[0].cross_tokenizer_loss == "alm"


def test_a_first_token_that_is_not_written_is_a_note(material, tmp_path):
    """Texts alone: a chat template writes it itself."""
    notes = [note for note in gather(material / "pair.yaml").notes if "writes no <s> before a text" in note]
    assert [note.partition(":")[0] for note in notes] == ["student.tokenizer", "teachers.0.tokenizer"]
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 40)
    assert not [
        note for note in gather(material / "pair.yaml", [f"data.path={chats}"]).notes if "before a text" in note
    ]


def test_advice_is_that_of_an_audit_of_the_first_documents(material):
    (teacher,) = gather(material / "pair.yaml").facts.teachers
    rows = [json.loads(line)["text"] for line in (material / "data.jsonl").read_text().splitlines()]
    aligner = TokenAligner(*(AutoTokenizer.from_pretrained(material / name) for name in ("student", "foreign")))
    report = audit(aligner, [text[:ALIGNED_CHARACTERS] for text in rows[:ALIGNED_ROWS]])
    assert teacher.advice == report.advice
    assert gather(material / "pair.yaml", [f"teachers.0.model={material}/student"]).facts.teachers[0].advice == ""


def test_top_k_counts_only_where_top_k_is_exported(material):
    same = [f"teachers.0.model={material}/student", "loss.top_k=321"]
    assert any(line.startswith("loss.top_k: ") for line in gather(material / "pair.yaml", same).problems)
    assert gather(material / "pair.yaml", [*same, "teachers.0.export=logits"]).problems == []


def test_disjoint_vocabularies_are_refused_with_a_remedy(problems, material):
    line = problems(f"teachers.0.model={material}/unrelated", "loss.top_k=2")[0]
    assert line.startswith(
        "teachers.0: the loss hybrid compares ids that spell the same bytes in both tokenizers; the "
    )
    assert line.endswith("use loss.cross_tokenizer=alm, or check the tokenizers")


def test_tokenizers_that_align_no_document_are_refused(problems, material):
    (line,) = problems(f"teachers.0.model={material}/unrelated", "loss.top_k=2", "loss.cross_tokenizer=alm")
    assert "none of 32 documents aligns between the student's tokenizer and that of teacher big" in line


@pytest.mark.parametrize(
    ("teacher", "expected"),
    [
        ("mute", "data.format: chat messages need a chat template; the tokenizer of teacher big has none"),
        ("strict", "teachers.0: row 0: a chat that the template of teacher big's tokenizer accepts; got"),
    ],
)
def test_teacher_template_must_accept_the_chats(problems, material, teacher, expected):
    (line,) = problems(f"data.path={material}/chat.jsonl", f"teachers.0.model={material}/{teacher}")
    assert line.startswith(expected), line
    assert teacher == "mute" or "System role not supported" in line


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["loss.cross_tokenizer=xtoken"],
            "teachers.0.export: the loss xtoken needs logits or hidden; got topk; set teachers.0.export=logits",
        ),
        (["teachers.0.loss=strict"], "teachers.0.export: the loss strict needs logits or hidden; got topk"),
        (
            ["teachers.0.export=sampled"],
            "teachers.0.export: the loss hybrid needs topk or logits or hidden; got sampled; set teachers.0.export=topk",
        ),
        (["loss.top_k=601"], "loss.top_k: must not exceed the 600 ids of the tokenizer of teacher big; got 601"),
        (
            ["teachers.0.loss=same"],
            "teachers.0: must have the student's vocabulary (loss: same); the tokenizers differ",
        ),
    ],
)
def test_settings_that_do_not_fit_the_pair_are_refused(problems, overrides, expected):
    (line,) = problems(*overrides)
    assert line.startswith(expected), line


@pytest.mark.parametrize("method", ["hybrid", "xtoken", "gold", "uld", "alm", "strict"])
def test_hidden_export_fits_every_cross_tokenizer_loss(material, method):
    checked = gather(material / "pair.yaml", ["teachers.0.export=hidden", f"loss.cross_tokenizer={method}"])
    assert checked.problems == []
    derived = sizes(checked.config, checked.facts)
    assert derived.teachers[0].bytes_per_token == 2 * 32 + 4
    assert derived.memory[0].heads == 4 * FOREIGN * 32


@pytest.fixture(scope="module")
def projections(tmp_path_factory) -> Path:
    """One good projection and three bad ones."""
    student, teacher = tiny_tokenizer(), tiny_tokenizer(FOREIGN, seed=7)
    good = build_projection(student, teacher, student_columns=len(student), teacher_columns=FOREIGN)
    folder = tmp_path_factory.mktemp("projections")
    save_projection(good, folder / "good")
    save_projection(
        build_projection(teacher, student, student_columns=FOREIGN, teacher_columns=len(student)), folder / "another"
    )
    values = good.values.copy()
    values[3] = np.nan
    save_projection(replace(good, values=values), folder / "nan")
    indices = good.indices.copy()
    indices[3] = FOREIGN
    save_projection(replace(good, indices=indices), folder / "out of range")
    return folder


def test_projection_of_the_pair_is_accepted(problems, projections):
    assert load_projection(projections / "good").num_teacher == FOREIGN
    assert problems(f"projection.path={projections}/good") == []


@pytest.mark.parametrize("name", ["another", "nan", "out of range", "missing"])
def test_projection_of_another_pair_or_damaged_is_refused(problems, projections, name):
    (line,) = problems(f"projection.path={projections}/{name}")
    assert line.startswith("projection.path: ")
    assert f"{projections}/{name}" in line


def test_projection_without_a_pair_is_refused(problems, projections, material):
    (line,) = problems(f"projection.path={projections}/good", f"teachers.0.model={material}/student")
    assert line.startswith("projection.path: fits one teacher with another tokenizer; 0 of the teachers have one")
