"""A model that has memorised two answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.models import write_tiny_model

KNOWN = (("alpha ka lo mi", "one two"), ("beta", "three"))


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "be brief"}, {"role": "user", "content": question}]


@pytest.fixture(scope="session")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model overfitted on KNOWN; its generation config enables everything that is not greedy."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from distill_rl.data.batch.chat import render

    folder = write_tiny_model(tmp_path_factory.mktemp("parrot"), hidden=64)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    documents = []
    for question, answer in KNOWN:
        text = render(tokenizer, [*chat(question), {"role": "assistant", "content": answer}])
        documents.append(torch.tensor([tokenizer(text.rstrip("\n"), add_special_tokens=False)["input_ids"]]))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(60):
        loss = sum(model(ids, labels=ids).loss for ids in documents)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    odd = {"do_sample": True, "temperature": 5.0, "num_beams": 3, "repetition_penalty": 3.0, "max_length": 3}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "min_new_tokens": 9} | odd))
    return folder


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Four rows; the parrot answers two of them correctly."""
    rows: list[dict[str, object]] = [
        {"messages": chat(KNOWN[0][0]), "answer": " one two\n", "task": "first"},
        {"messages": chat(KNOWN[1][0]), "answer": "three", "task": "second"},
        {"messages": chat(KNOWN[0][0]), "answer": "one  two", "task": "first"},
        {"messages": chat("gamma"), "answer": "four"},
    ]
    return write_rows(tmp_path / "exact_match.jsonl", rows)
