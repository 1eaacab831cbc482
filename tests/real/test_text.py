"""What is counted, labelled and aligned in real text with real tokenizers and templates."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill_rl.align import TokenAligner
from distill_rl.align.chats import Chat
from distill_rl.align.verify import audit, check_alignment, check_chats
from distill_rl.config.schema import Config, DataConfig, StudentConfig, TeacherConfig
from distill_rl.data.batch.tokenization import Tokenization
from distill_rl.demo.measure import Reading, Subject, measure
from distill_rl.demo.real import RealMaterial, documents
from distill_rl.errors import DataError
from tests.helpers.align import DATA

CHAT = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Japan?"},
    {"role": "assistant", "content": "東京, Tokyo 🗼\n\n```python\nprint('x')\n```"},
]
TOOLS = [{"type": "function", "function": {"name": "capital", "parameters": {"type": "object", "properties": {}}}}]


@torch.no_grad()
def bits_per_byte(folder: Path, texts: Sequence[str]) -> float:
    """By Transformers, a text at a time; a first token that nothing predicts does not count, and neither do its bytes."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    bits = num_bytes = 0.0
    for text in texts:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        first = 0 if ids[0, 0] == tokenizer.bos_token_id else len(tokenizer.decode(ids[0, :1]).encode())
        logits = model(input_ids=ids).logits[0, :-1].double()
        bits += float(cross_entropy(logits, ids[0, 1:], reduction="sum")) / math.log(2)
        num_bytes += len(text.encode()) - first
    return bits / num_bytes


def test_bits_per_byte_of_a_trial(folder: Path, tmp_path: Path) -> None:
    """Those of a student and of a teacher."""
    texts = [text[:700] for text in documents()[1][:9]]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = Config(student=StudentConfig(model=str(folder)), teachers=[TeacherConfig(name="t", model=str(folder))])
    config.teachers[0].dtype = "fp32"
    config.data = DataConfig(path=str(tmp_path / "text.jsonl"))
    config.data.validation.path = str(tmp_path / "text.jsonl")
    subjects = [Subject("teacher", folder, teacher=True), Subject("student", folder)]
    found = measure(config, subjects, Reading(512, None, same=True))
    wanted = bits_per_byte(folder, texts)
    print(f"{folder.name}: {wanted:.3f} bits per byte")
    for name in ("teacher", "student"):
        assert found.models[name].bits_per_byte == pytest.approx(wanted, rel=1e-4)
    assert wanted < 1.3


def labelled(tokenizer: Any, messages: list[dict[str, Any]], **more: Any) -> list[str]:
    """The runs of tokens that are trained on, in words."""
    reader = Tokenization(tokenizer, DataConfig(loss_on="assistant", max_length=4096), format="messages")
    encoded = reader.encode_all({"row": 0, "messages": messages, **more})
    marked = zip(encoded.label_mask.tolist(), encoded.input_ids.tolist())
    return [tokenizer.decode([token for _, token in run]) for on, run in groupby(marked, lambda pair: pair[0]) if on]


def test_labels_of_a_chat_are_the_answers_and_their_ends(material: RealMaterial) -> None:
    tokenizer = AutoTokenizer.from_pretrained(material.smollm2)
    answers = [message["content"] for message in CHAT if message["role"] == "assistant"]
    found = labelled(tokenizer, CHAT)
    assert [run.removesuffix("\n") for run in found] == [f"{answer}<|im_end|>" for answer in answers]


def test_tools_that_the_template_leaves_out_are_refused(material: RealMaterial) -> None:
    tokenizer = AutoTokenizer.from_pretrained(material.smollm2)
    assert "tools" not in tokenizer.chat_template
    with pytest.raises(DataError, match="tools"):
        labelled(tokenizer, CHAT, tools=TOOLS)


@pytest.fixture(scope="module")
def corpora() -> dict[str, list[str]]:
    if not DATA.is_dir():
        pytest.skip("the corpora are not in ../shared/data")
    found = {"reference": documents()[1]}
    for name in ("inaugural", "tinyshakespeare"):
        text = (DATA / f"corpus/en/{name}.txt").read_text("utf-8")
        found[name] = [text[start : start + 2000] for start in range(0, 60_000, 2000)]
    rows = [json.loads(line) for line in (DATA / "corpus/multilingual/udhr.jsonl").read_text("utf-8").splitlines()]
    found["udhr"] = [row["text"][:600] for row in rows]
    found["edge"] = [text for text in json.loads((DATA / "corpus/edge/blns.json").read_text("utf-8")) if text]
    return found


@pytest.mark.parametrize("name", ["reference", "inaugural", "tinyshakespeare", "udhr", "edge"])
def test_tokens_of_49k_and_262k_ids_are_aligned(
    material: RealMaterial, gemma: Path, corpora: dict[str, list[str]], name: str
) -> None:
    """Wherever both tokenizers spell the whole text; SmolLM2's has no token for some control characters."""
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (material.smollm2, gemma)]
    aligner = TokenAligner(*tokenizers)
    texts = corpora[name]
    report = audit(aligner, texts)
    one = f"{report.one_to_one_share:.1%} of the chunks 1:1, {report.aligned_share:.2%} of the tokens in chunks"
    print(f"{name}: {len(texts)} texts, {one}, exact {report.exact_share:.1%}")
    assert report.aligned_share > 0.998
    assert report.unknown_share == 0
    lost = []
    for text in texts:
        row = aligner.align(text)
        assert row.teacher_ids[0] == tokenizers[1].bos_token_id
        spelled = [tokenizer.decode(ids) for tokenizer, ids in zip(tokenizers, (row.student_ids, row.teacher_ids[1:]))]
        assert row.exact == (spelled == [text, text])
        lost += [] if row.exact else [text]
    assert len(lost) == (1 if name == "edge" else 0)
    checks = check_alignment(aligner, *tokenizers, texts[:40])
    assert [check for check in checks if check.passed is not True] == []


def test_chats_are_aligned(material: RealMaterial, gemma: Path) -> None:
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (material.smollm2, gemma)]
    chats = [Chat([message for message in CHAT if message["role"] != "system"])]
    if tokenizers[1].chat_template is None:
        pytest.skip("this Gemma has no chat template")
    assert [check for check in check_chats(TokenAligner(*tokenizers), chats) if check.passed is not True] == []
