"""What is said before a run of a teacher with another tokenizer that cannot teach this student."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from distill_rl.align.projection import build_projection, load_projection, save_projection
from distill_rl.config.derive import sizes
from distill_rl.preflight import gather
from tests.helpers.corpus import write_corpus
from tests.helpers.models import write_tiny_model
from tests.helpers.tokenizers import tiny_tokenizer

FOREIGN = 600


def stranger() -> PreTrainedTokenizerFast:
    """Knows three words that no text here has, so that it has no token in common with anybody."""
    words = {f"zzq{number}xx": number for number in range(3)} | {"??": 3}
    core = Tokenizer(models.WordLevel(words, unk_token="??"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="??")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("pairs")
    write_tiny_model(root / "student")
    foreign = tiny_tokenizer(FOREIGN, seed=7)
    write_tiny_model(root / "foreign", tokenizer=foreign)
    foreign.chat_template = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{{ m.content }}{% endfor %}"
    write_tiny_model(root / "strict", tokenizer=foreign)
    foreign.chat_template = None
    write_tiny_model(root / "mute", tokenizer=foreign)
    write_tiny_model(root / "stranger", tokenizer=stranger(), vocab_size=16)
    write_corpus(root / "data.jsonl", rows=64)
    write_corpus(root / "chat.jsonl", rows=64, messages=True)
    (root / "run.yaml").write_text(
        f"""
run: {{dir: {root}/runs}}
student: {{model: {root}/student}}
teachers: [{{model: {root}/foreign, name: big}}]
data: {{path: {root}/data.jsonl, max_length: 128}}
loss: {{top_k: 8}}
train: {{steps: 3, global_batch_size: 8, micro_batch_size: 2}}
"""
    )
    return root


@pytest.fixture
def problems(root):
    def found(*overrides: str) -> list[str]:
        lines = gather(root / "run.yaml", overrides).problems
        assert all("\n" not in line for line in lines)
        return lines

    return found


def test_two_models_with_different_tokenizers_are_a_run_and_the_facts_say_how(root):
    checked = gather(root / "run.yaml")
    assert checked.problems == []
    assert checked.facts.cross_tokenizer_losses == ("hybrid",)
    assert checked.facts.teacher_vocabularies == (FOREIGN,)
    same = gather(root / "run.yaml", [f"teachers.0.model={root}/student"])
    assert same.facts.cross_tokenizer_losses == (None,)
    forced = gather(root / "run.yaml", [f"teachers.0.model={root}/student", "teachers.0.loss=alm"])
    assert forced.facts.cross_tokenizer_losses == ("alm",)


def test_a_vocabulary_with_nothing_in_common_is_refused_with_what_would_do(problems, root):
    line = problems(f"teachers.0.model={root}/stranger", "loss.top_k=2")[0]
    assert line.startswith(
        "teachers.0: the loss hybrid compares ids that spell the same bytes in both tokenizers; the "
    )
    assert line.endswith("use loss.cross_tokenizer=alm, or check the tokenizers")


def test_tokenizers_that_align_no_document_are_refused(problems, root):
    (line,) = problems(f"teachers.0.model={root}/stranger", "loss.top_k=2", "loss.cross_tokenizer=alm")
    assert "none of 8 documents aligns between the student's tokenizer and that of teacher big" in line


@pytest.mark.parametrize(
    ("teacher", "expected"),
    [
        ("mute", "data.format: chat messages need a chat template; the tokenizer of teacher big has none"),
        ("strict", "teachers.0: row 0: must be readable by the student and teacher big; got"),
    ],
)
def test_a_teacher_that_cannot_write_the_chats_is_refused(problems, root, teacher, expected):
    (line,) = problems(f"data.path={root}/chat.jsonl", f"teachers.0.model={root}/{teacher}")
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
        (["loss.top_k=601"], "loss.top_k: must not exceed the 600 ids of the tokenizer of teacher big; got 601"),
        (
            ["teachers.0.loss=same"],
            "teachers.0: must have the student's vocabulary (loss: same); the tokenizers differ",
        ),
    ],
)
def test_settings_that_do_not_suit_the_pair_are_refused(problems, overrides, expected):
    (line,) = problems(*overrides)
    assert line.startswith(expected), line


@pytest.mark.parametrize("method", ["hybrid", "xtoken", "gold", "uld", "alm", "strict"])
def test_hidden_states_suit_every_loss_across_tokenizers(root, method):
    checked = gather(root / "run.yaml", ["teachers.0.export=hidden", f"loss.cross_tokenizer={method}"])
    assert checked.problems == []
    derived = sizes(checked.config, checked.facts)
    assert derived.teachers[0].bytes_per_token == 2 * 32 + 4
    assert derived.memory[0].heads == 4 * FOREIGN * (32 + 2 * 128)


@pytest.fixture(scope="module")
def projections(root) -> Path:
    """A good one, and what can be wrong with one."""
    ours, theirs = tiny_tokenizer(), tiny_tokenizer(FOREIGN, seed=7)
    sizes = {"student_columns": len(ours), "teacher_columns": FOREIGN}
    made = build_projection(ours, theirs, **sizes)
    folder = root / "projections"
    folder.mkdir()
    save_projection(made, folder / "good")
    save_projection(
        build_projection(theirs, ours, student_columns=FOREIGN, teacher_columns=len(ours)), folder / "another"
    )
    broken = made.values.copy()
    broken[3] = np.nan
    save_projection(replace(made, values=broken), folder / "nan")
    away = made.indices.copy()
    away[3] = FOREIGN
    save_projection(replace(made, indices=away), folder / "away")
    return folder


def test_a_projection_of_the_pair_is_accepted(problems, projections):
    assert load_projection(projections / "good").num_teacher == FOREIGN
    assert problems(f"projection.path={projections}/good") == []


@pytest.mark.parametrize("name", ["another", "nan", "away", "missing"])
def test_a_projection_of_another_pair_or_a_broken_one_is_refused(problems, projections, name):
    (line,) = problems(f"projection.path={projections}/{name}")
    assert line.startswith("projection.path: ")
    assert f"{projections}/{name}" in line


def test_a_projection_without_a_pair_it_could_be_of_is_refused(problems, projections, root):
    (line,) = problems(f"projection.path={projections}/good", f"teachers.0.model={root}/student")
    assert line.startswith("projection.path: fits one teacher with another tokenizer; 0 of the teachers have one")
