"""Models, data and configurations that the preflight tests share. No test may change them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from distill_rl.preflight import gather
from tests.helpers.corpus import write_corpus
from tests.helpers.models import write_tiny_model
from tests.helpers.tokenizers import tiny_tokenizer
from tests.helpers.zoo import write_model

FOREIGN = 600
"""Number of ids of the tokenizer of `foreign`, `strict` and `mute`."""
REFUSES_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


def unrelated_tokenizer() -> PreTrainedTokenizerFast:
    """Knows three words that occur in no text here, so it has no token in common with any other tokenizer."""
    words = {f"zzq{i}xx": i for i in range(3)} | {"??": 3}
    core = Tokenizer(models.WordLevel(words, unk_token="??"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="??")


@pytest.fixture(scope="session")
def material(tmp_path_factory) -> Path:
    """`run.yaml` is valid as it stands; so is `pair.yaml`, whose teacher has another tokenizer."""
    root = tmp_path_factory.mktemp("material")
    write_tiny_model(root / "student")
    write_tiny_model(root / "teacher", vocab_size=384, hidden=64, positions=256, seed=1)  # with padded embeddings
    tiny_tokenizer().save_pretrained(write_model(root / "gemma2", "gemma2", vocab_size=320))
    foreign = tiny_tokenizer(FOREIGN, seed=7)
    write_tiny_model(root / "foreign", tokenizer=foreign)
    foreign.chat_template = REFUSES_SYSTEM
    write_tiny_model(root / "strict", tokenizer=foreign)
    foreign.chat_template = None
    write_tiny_model(root / "mute", tokenizer=foreign)
    write_tiny_model(root / "unrelated", tokenizer=unrelated_tokenizer(), vocab_size=16)
    write_corpus(root / "data.jsonl", rows=64)
    write_corpus(root / "chat.jsonl", rows=64, messages=True)
    for name, teacher in (("run.yaml", "teacher"), ("pair.yaml", "foreign")):
        (root / name).write_text(
            f"""
run: {{dir: {root}/runs}}
student: {{model: {root}/student}}
teachers: [{{model: {root}/{teacher}, name: big}}]
data: {{path: {root}/data.jsonl, max_length: 128}}
loss: {{top_k: 8}}
train: {{steps: 3, global_batch_size: 8, micro_batch_size: 2}}
"""
        )
    return root


@pytest.fixture
def problems(material) -> Callable[..., list[str]]:
    """The problems of a configuration with overrides, one line each."""

    def _problems(*overrides: str, file: str = "run.yaml", **options: Any) -> list[str]:
        checked = gather(material / file, overrides, **options)
        assert all("\n" not in line for line in checked.problems)
        return checked.problems

    return _problems
