"""What models are measured on, how a teacher is loaded, and how a lack of memory is told."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from distill_rl.config.load import read_config
from distill_rl.config.schema import Config
from distill_rl.demo import bits
from distill_rl.demo.measure import BEGUN, Reading, Subject, TrialFindings, _memory_in_one_line, measure
from distill_rl.errors import DataError, DistillError, GpuMemoryError
from distill_rl.models.attention import installed
from distill_rl.models.files import read_tokenizer, unwritten_beginning, write_beginning
from tests.helpers.corpus import corpus_rows
from tests.helpers.models import write_tiny_model
from tests.helpers.tokenizers import tiny_tokenizer
from tests.helpers.zoo import write_model

WHOLE = Reading(length=512, longest=None, same=True)
CHATS = corpus_rows(8, messages=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """Student and teacher."""
    root = tmp_path_factory.mktemp("measure")
    return write_tiny_model(root / "student"), write_tiny_model(root / "teacher", hidden=64, seed=1)


def config_of(folders: tuple[Path, Path], tmp_path: Path, rows: list[Any], **settings: Any) -> Config:
    """A configuration that validates on all of these rows, in their order; a row may be a line that is no JSON."""
    path = tmp_path / "held_out.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    teacher = {"model": str(folders[1]), "dtype": "fp32", **settings.pop("teacher", {})}
    source = {
        "student.model": str(folders[0]),
        "teachers": [teacher],
        "data.path": str(path),
        "data.validation.path": str(path),
    }
    config, findings = read_config(source | settings)
    assert config is not None
    assert findings.lines == []
    return config


def measured(folders: tuple[Path, Path], config: Config, reading: Reading = WHOLE) -> TrialFindings:
    subjects = (
        Subject("teacher", folders[1], teacher=True, begin=True),
        Subject("student_before", folders[0], begin=True),
    )
    return measure(config, subjects, reading)


@pytest.mark.parametrize("rows", [corpus_rows(8), CHATS], ids=["texts", "chats"])
def test_the_teacher_is_measured_as_a_student_would_be(folders, tmp_path, rows):
    config = config_of(folders, tmp_path, rows)
    found = measured(folders, config)
    plain = measure(config, [Subject("student", folders[1])], WHOLE)
    assert found.models["teacher"].bits == pytest.approx(plain.models["student"].bits, rel=1e-4)
    assert found.models["teacher"].num_bytes == found.models["student_before"].num_bytes
    assert found.models["teacher"].samples == ()
    assert len(found.models["student_before"].samples) == 3


def test_a_base_teacher_reads_the_students_chats(folders, tmp_path):
    base = write_tiny_model(tmp_path / "base", hidden=64, seed=1)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (base / name).unlink(missing_ok=True)
    assert not read_tokenizer(base).chat_template
    pair = folders[0], base
    found, expected = (measured(each, config_of(each, tmp_path, CHATS)) for each in (pair, folders))
    assert found.models["teacher"].bits == expected.models["teacher"].bits


def test_rows_without_anything_that_counts_are_left_out_for_all_models(folders, tmp_path):
    asked = {"messages": [{"role": "user", "content": "No answer to this."}]}
    config = config_of(folders, tmp_path, [*CHATS[:2], asked], **{"data.loss_on": "assistant"})
    found = measured(folders, config)
    for model in found.models.values():
        assert len(model.bits) == 2
        assert min(model.num_bytes) > 0
    with pytest.raises(DataError, match=r"^TEXT: some document .* none in 1; give more text"):
        measured(folders, config_of(folders, tmp_path, [asked], **{"data.loss_on": "assistant"}))


def test_a_teacher_with_another_tokenizer_reads_the_same_documents(folders, tmp_path):
    other = write_tiny_model(tmp_path / "other", tokenizer=tiny_tokenizer(600, seed=7))
    config = config_of((folders[0], other), tmp_path, [*corpus_rows(4), {"text": "x"}])
    found = measured((folders[0], other), config, Reading(length=512, longest=None, same=False))
    teacher, student = (found.models[name] for name in ("teacher", "student_before"))
    assert len(teacher.bits) == len(student.bits) == 4
    assert teacher.bits_per_byte > 0
    config = config_of((folders[0], other), tmp_path, [{"text": "x"}])
    with pytest.raises(DataError, match=r"^TEXT: "):
        measured((folders[0], other), config, Reading(length=512, longest=None, same=False))


def begin(folder: Path) -> None:
    """Lets the tokenizer in a folder write its first token before every text."""
    tokenizer = read_tokenizer(folder)
    write_beginning(tokenizer)
    tokenizer.save_pretrained(folder)


def test_a_first_token_that_is_not_written_is_tried(folders, tmp_path):
    """Against plain forward passes in fp64; of a tokenizer that writes it, and of chats, there is nothing to try."""
    rows = corpus_rows(9)
    found = measured(folders, config_of(folders, tmp_path, rows)).models["teacher"].begun
    tokenizer = read_tokenizer(folders[1])
    model = AutoModelForCausalLM.from_pretrained(folders[1]).double().eval()
    lost, num_bytes = [0.0, 0.0], 0
    for row in rows[:BEGUN]:
        ids = tokenizer(row["text"])["input_ids"]
        num_bytes += len(row["text"].encode()) - len(tokenizer.decode(ids[:1]).encode())
        for i, before in enumerate(([], [tokenizer.bos_token_id])):
            with torch.no_grad():
                logits = model(torch.tensor([[*before, *ids]])).logits[0, len(before) : -1]
            lost[i] += float(cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum")) / math.log(2)
    assert found.token == "<s>"
    assert [found.as_read, found.begun] == pytest.approx([each / num_bytes for each in lost], rel=1e-5)
    assert found.as_read != pytest.approx(found.begun, rel=1e-3)
    assert measured(folders, config_of(folders, tmp_path, CHATS)).models["teacher"].begun is None
    begins = write_tiny_model(tmp_path / "begins", hidden=64, seed=1)
    begin(begins)
    pair = folders[0], begins
    reading = Reading(length=512, longest=None, same=False)
    again = measured(pair, config_of(pair, tmp_path, rows), reading).models
    assert again["teacher"].begun is None
    assert again["student_before"].begun is not None


@pytest.mark.parametrize(
    ("name", "other", "unwritten"),
    [("<s>", {}, True), ("<|begin_of_text|>", {}, True), ("<bos>", {}, True), ("<|im_start|>", {}, False),
     ("</s>", {"eos_token": "</s>"}, False), ("<s>", {"eos_token": "<s>"}, False), ("<s>", {"pad_token": "<s>"}, False)],
)  # fmt: skip
def test_a_token_that_also_does_something_else_is_no_first_token(name, other, unwritten):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": name, **other})
    assert (unwritten_beginning(tokenizer) == tokenizer.bos_token_id) == unwritten
    tokenizer.bos_token = None
    assert unwritten_beginning(tokenizer) is None


@pytest.mark.parametrize("family", ["gpt2", "olmo2"])
def test_teachers_of_other_families_are_measured_alike(folders, tmp_path, family):
    """The second has no output layer that this package knows, so that its own forward pass makes the logits."""
    teacher = write_model(tmp_path / family, family, vocab_size=320)
    tiny_tokenizer().save_pretrained(teacher)
    config = config_of((folders[0], teacher), tmp_path, corpus_rows(4))
    found = measure(config, [Subject("teacher", teacher, teacher=True), Subject("student", teacher)], WHOLE).models
    assert found["teacher"].bits == pytest.approx(found["student"].bits, rel=1e-4)


@pytest.mark.parametrize("bad", ["{no json", json.dumps({"text": 7})])
def test_bad_rows_are_skipped_or_refused_as_in_the_training(folders, tmp_path, bad):
    rows = [*corpus_rows(4), bad]
    found = measured(folders, config_of(folders, tmp_path, rows, **{"data.bad_rows": "skip"}))
    assert len(found.models["teacher"].bits) == 4
    with pytest.raises(DataError):
        measured(folders, config_of(folders, tmp_path, rows))


def test_texts_with_a_token_without_a_row_are_left_out_as_in_the_training(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<image>", special=True, normalized=False)])
    narrow, wide = (
        write_tiny_model(tmp_path / f"{size}", tokenizer=tokenizer, vocab_size=size, seed=size) for size in (320, 328)
    )
    rows = [*corpus_rows(4), {"text": "lo <image> ka lo ka"}]
    for pair, number in (((narrow, wide), 4), ((wide, narrow), 4), ((wide, wide), 5)):
        found = measured(pair, config_of(pair, tmp_path, rows))
        assert [len(model.bits) for model in found.models.values()] == [number] * 2


def test_only_the_beginning_of_a_long_text_counts(folders, tmp_path):
    text = " ".join(row["text"] for row in corpus_rows(4))
    config = config_of(folders, tmp_path, [{"text": text}, {"text": "short"}])
    found = measured(folders, config, Reading(length=512, longest=12, same=True))
    tokenizer = read_tokenizer(folders[0])
    cut = bits.beginning(tokenizer, {"text": text}, 12)["text"]
    assert text.startswith(cut)
    assert len(tokenizer(cut)["input_ids"]) == 12
    long, short = found.models["teacher"].num_bytes
    assert 0 < long <= len(cut.encode())
    assert 0 < short <= len("short")


@pytest.mark.skipif(not installed("torchao"), reason="needs torchao")
def test_a_teacher_in_few_bits_is_measured_in_few_bits(folders, tmp_path):
    rows = corpus_rows(8)
    whole = measured(folders, config_of(folders, tmp_path, rows)).models
    config = config_of(folders, tmp_path, rows, teacher={"quantization": "int8"})
    found = measured(folders, config).models
    assert found["student_before"] == whole["student_before"]
    assert found["teacher"].bits != whole["teacher"].bits
    assert found["teacher"].bits == pytest.approx(whole["teacher"].bits, rel=0.02)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore\nlines"), GpuMemoryError),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory\nlines"), DistillError),
        (MemoryError(), DistillError),
    ],
)
def test_a_lack_of_memory_is_one_line(tmp_path, error, kind):
    with pytest.raises(kind) as raised, _memory_in_one_line(Subject("student_before", tmp_path)):
        raise error
    assert str(raised.value).startswith("measuring student before: needs more ")
    assert "\n" not in str(raised.value)


def test_other_errors_pass(tmp_path):
    with pytest.raises(RuntimeError, match=r"^other$"), _memory_in_one_line(Subject("teacher", tmp_path)):
        raise RuntimeError("other")
