"""R21: what a run is made of is known by its content, and a checkpoint of anything else is refused."""

import json
import re
import shutil

import pytest

from distill_rl.config.load import load_config
from distill_rl.errors import CheckpointError
from distill_rl.preflight.job import prepare
from distill_rl.run import checkpoints
from distill_rl.types import RunPaths
from tests.helpers.corpus import write_corpus
from tests.helpers.models import write_tiny_model

CONFIG = """\
student: {{model: {0}/student, dtype: fp32}}
teachers: [{{name: big, model: {0}/teacher, dtype: fp32}}]
data: {{path: {0}/{1}, max_length: 64}}
train: {{steps: 1, global_batch_size: 8}}
run: {{dir: {0}/runs}}
"""


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    root = tmp_path_factory.mktemp("original")
    write_tiny_model(root / "teacher", hidden=32, seed=1)
    write_tiny_model(root / "student", hidden=16, seed=2)
    write_corpus(root / "text.jsonl", rows=20, seed=5)
    write_corpus(root / "chats.jsonl", rows=20, seed=6, messages=True)
    return root


def fingerprints(root, data):
    (root / "run.yaml").write_text(CONFIG.format(root, data))
    return prepare(load_config(root / "run.yaml"), RunPaths(root / "runs" / "mine")).fingerprints


def change_a_word(root):
    file = root / "text.jsonl"
    file.write_text(file.read_text().replace("a", "e", 1))


def add_a_token(root):
    for model in ("student", "teacher"):
        file = root / model / "tokenizer.json"
        content = json.loads(file.read_text())
        content["added_tokens"][0]["lstrip"] = not content["added_tokens"][0]["lstrip"]
        file.write_text(json.dumps(content))


def change_a_weight(root):
    file = root / "teacher" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def change_the_shape(root):
    file = root / "student" / "config.json"
    file.write_text(file.read_text().replace("{", '{"attention_dropout": 0.25,', 1))


def change_the_template(root):
    file = root / "student" / "chat_template.jinja"
    file.write_text(file.read_text() + " ")


@pytest.mark.parametrize(
    ("data", "change", "name"),
    [
        ("text.jsonl", change_a_word, "data"),
        ("text.jsonl", add_a_token, "tokenizer"),
        ("text.jsonl", change_a_weight, "teacher big"),
        ("text.jsonl", change_the_shape, "student"),
        ("chats.jsonl", change_the_template, "chat template"),
    ],
)
def test_an_edited_file_is_refused_with_both_hashes(original, tmp_path, data, change, name):
    root = tmp_path / "copy"
    shutil.copytree(original, root)
    saved = fingerprints(root, data)
    assert saved["data"] == fingerprints(original, data)["data"], "what a thing is called is not what it is"
    change(root)
    current = fingerprints(root, data)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.require_same(saved, current)
    (line,) = caught.value.problems
    assert line.startswith(f"the {name} of this run: ")
    assert re.search(f"{current[name][:16]}, saved with {saved[name][:16]}", line)
