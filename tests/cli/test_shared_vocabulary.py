"""A teacher whose tokenizer has a token more, or less, than the student's is compared token by token, to the last bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken

from distill_rl.config.load import load_config
from tests.helpers.command import distill_rl, distill_rl_in_process, series
from tests.helpers.corpus import write_corpus
from tests.helpers.models import write_tiny_model
from tests.helpers.one_process import train
from tests.helpers.tokenizers import tiny_tokenizer

pytestmark = pytest.mark.cli

EXPORTS = ("topk", "hidden", "logits")
LOSSES = ("train/loss", "train/nll_loss", *(f"train/kl_loss/{export}" for export in EXPORTS))
STEPS = 3


def longer_tokenizer():
    """One token more than the others, at the end; also the one that fills rows."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<|more|>", special=True, normalized=False)])
    tokenizer.pad_token = "<|more|>"
    return tokenizer


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`plain` and `longer` are the same weights with either tokenizer. One document in 32 spells the token."""
    root = tmp_path_factory.mktemp("shared")
    for role, seed in (("student", 1), ("teacher", 2)):
        write_tiny_model(root / role / "plain", vocab_size=328, seed=seed)
        longer_tokenizer().save_pretrained(shutil.copytree(root / role / "plain", root / role / "longer"))
    write_corpus(root / "corpus.jsonl", rows=31, seed=5)
    with (root / "corpus.jsonl").open("a") as file:
        file.write(json.dumps({"text": "lo <|more|> ka"}) + "\n")
    return root


def config(root: Path, student: str, teacher: str) -> Path:
    path = root / f"{student}-{teacher}.yaml"
    path.write_text(json.dumps({
        "run": {"dir": f"{root}/runs"},
        "student": {"model": f"{root}/student/{student}", "dtype": "fp32"},
        "teachers": [
            {"name": export, "model": f"{root}/teacher/{teacher}", "export": export, "dtype": "fp32"} for export in EXPORTS
        ],
        "data": {"path": f"{root}/corpus.jsonl", "max_length": 64},
        "loss": {"top_k": 8, "ce_weight": 0.1, "divergence": "reverse_kl"},
        "train": {"epochs": 1, "steps": STEPS, "global_batch_size": 16, "micro_batch_size": 4},
        "evaluate": {"every": 0},
    }))  # fmt: skip
    return path


def losses(root: Path, run: str) -> list[list[tuple[int, float]]]:
    found = [series(root / "runs" / run, name) for name in LOSSES]
    assert all(found)
    return found


@pytest.fixture(scope="module")
def plain(root: Path, tmp_path_factory) -> list[list[tuple[int, float]]]:
    """Without a token more, in one process."""
    file = config(root, "plain", "plain")
    checked = distill_rl_in_process("check", "-c", file)
    assert checked.code == 0, checked.err
    assert "more than" not in checked.out
    trained = train(load_config(file), tmp_path_factory.mktemp("plain") / "export")
    return [trained.series(name) for name in LOSSES]


def test_teacher_with_a_token_more_gives_the_losses_of_one_without(root, plain, cluster):
    ended = distill_rl("train", "-c", config(root, "plain", "longer"), cluster=cluster)
    assert ended.code == 0, ended.err
    for export in EXPORTS:
        said = (
            f"teacher   {export}: its tokenizer has 1 token more than the student's (<|more|>); compared token by token"
        )
        assert said in ended.out
    assert losses(root, "plain-longer") == plain


@pytest.mark.long_run
def test_student_with_a_token_more_leaves_out_the_rows_that_have_it(root, plain, cluster):
    ended = distill_rl("train", "-c", config(root, "longer", "plain"), cluster=cluster)
    assert ended.code == 0, ended.err
    assert "the student's tokenizer has 1 token more than the teacher's (<|more|>)" in ended.out
    bad = [json.loads(line) for line in (root / "runs/longer-plain/bad_rows.jsonl").read_text().splitlines()]
    assert [row["row"] for row in bad] == [31]
    assert "the 320 token ids of teacher topk and " in bad[0]["reason"]
    assert "got <|more|> (id 320); leave this token out, or set teachers[].loss=hybrid" in bad[0]["reason"]
    assert len(losses(root, "longer-plain")[0]) == len(plain[0])


def test_rows_with_a_token_that_the_models_have_no_row_for_are_refused(root, tmp_path):
    """The tokenizers of student and teacher both have it, and neither model has a row for it."""
    for role, seed in (("student", 1), ("teacher", 2)):
        longer_tokenizer().save_pretrained(write_tiny_model(tmp_path / role / "none", vocab_size=320, seed=seed))
    file = config(root, "longer", "longer")
    models = [f"student.model={tmp_path}/student/none"]
    models += [f"teachers.{i}.model={tmp_path}/teacher/none" for i in range(len(EXPORTS))]
    checked = distill_rl_in_process("check", "-c", file, *models)
    assert checked.code == 0, checked.err
    assert "has 320 embedding rows, and none for added tokens of its tokenizer (<|more|>)" in checked.out
    with pytest.raises(ValueError, match=r"row 31: the 320 embedding rows of the student and .* <\|more\|>"):
        train(load_config(file, models), tmp_path / "export")


def test_check_says_it_and_top_k_is_held_against_the_common_ids(root):
    file = config(root, "longer", "plain")
    ended = distill_rl_in_process("check", "-c", file)
    assert ended.code == 0, ended.err
    assert "# teacher    topk: the student's tokenizer has 1 token more than the teacher's (<|more|>); " in ended.out
    ended = distill_rl_in_process("check", "-c", file, "loss.top_k=321")
    assert ended.code == 2
    assert "loss.top_k: must not exceed the 320 ids" in ended.err
