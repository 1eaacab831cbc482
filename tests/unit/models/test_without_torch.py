"""What `check` asks of models is the same where Transformers has no PyTorch, and only its own process goes without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from distill_rl.errors import ConfigError
from distill_rl.models.files.examine import examine
from distill_rl.models.files.hub import read_config
from distill_rl.system.without_torch import gpu_possible
from tests.helpers.corpus import write_corpus
from tests.helpers.models import write_tiny_model

WITHOUT = """
import json, sys
from pathlib import Path
from distill_rl.system.without_torch import import_transformers_without_torch

def main():
    import_transformers_without_torch()
    folder = Path(sys.argv[1])
    {body}

if __name__ == "__main__":
    main()
"""


def without_torch(tmp_path: Path, body: str, folder: Path) -> list[str]:
    """The list that a function's body prints as JSON in a process without PyTorch; nothing goes to stderr."""
    script = tmp_path / "script.py"
    script.write_text(WITHOUT.format(body="\n    ".join(body.strip().splitlines())))
    done = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def edit(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def test_transformers_reads_configs_and_leaves_torch_to_others(tmp_path):
    body = """
import os
from transformers.utils import is_torch_available
from distill_rl.models.files.architecture import architecture_problems
from distill_rl.models.files.hub import read_config, read_tokenizer
print(json.dumps([is_torch_available(), read_config(folder).model_type, len(read_tokenizer(folder)) > 0]))
assert architecture_problems("student", folder) == []
assert "TRANSFORMERS_NO_ADVISORY_WARNINGS" not in os.environ
assert "torch" not in sys.modules
import torch
assert torch.ones(1).item() == 1
"""
    assert without_torch(tmp_path, body, write_tiny_model(tmp_path / "model")) == [False, "llama", True]


def test_a_class_is_asked_in_another_process(tmp_path):
    folder = write_tiny_model(tmp_path / "model", "gpt2", layers=2)
    edit(folder, n_layer=1)
    body = """
from distill_rl.models.files.examine import examine
print(json.dumps(examine("student", folder, attention="sdpa", packing=True, weights=True)))
assert "torch" not in sys.modules
"""
    expected = examine("student", folder, attention="sdpa", packing=True, weights=True)
    assert len(expected) == 1
    assert without_torch(tmp_path, body, folder) == expected


@pytest.mark.parametrize(("function", "change"), [
    ("read_config(folder)", {"dtype": "bogus"}),
    ("examine('student', folder, attention='sdpa', packing=True, weights=True)", {"hidden_act": "bogus"}),
])  # fmt: skip
def test_errors_are_those_with_torch(tmp_path, function, change):
    folder = write_tiny_model(tmp_path / "model")
    edit(folder, **change)
    with pytest.raises(ConfigError) as expected:
        eval(function, {"read_config": read_config, "examine": examine, "folder": folder})
    body = f"""
from distill_rl.errors import ConfigError
from distill_rl.models.files.examine import examine
from distill_rl.models.files.hub import read_config
try:
    {function}
except ConfigError as error:
    print(json.dumps(error.problems))
"""
    assert without_torch(tmp_path, body, folder) == list(expected.value.problems)


@pytest.fixture
def run_file(tmp_path) -> Path:
    write_tiny_model(tmp_path / "student")
    write_corpus(tmp_path / "data.jsonl", rows=64)
    path = tmp_path / "run.yaml"
    settings = {
        "run": {"name": "run", "dir": str(tmp_path / "run")},
        "student": {"model": str(tmp_path / "student")},
        "teachers": [{"name": "t", "model": str(tmp_path / "student")}],
        "data": {"path": str(tmp_path / "data.jsonl"), "max_length": 32},
    }
    path.write_text(json.dumps(settings))
    return path


@pytest.mark.skipif(gpu_possible(), reason="torch counts the GPUs here")
def test_check_imports_neither_torch_nor_datasets_nor_pandas(run_file):
    command = [sys.executable, "-X", "importtime", "-m", "distill_rl", "check", "-c", str(run_file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "transformers.configuration_utils" in imported, done.stderr
    assert not imported & {"torch", "datasets", "pandas"}


def test_a_callers_transformers_keeps_torch(run_file):
    calls = f"""
import distill_rl
from distill_rl.cli import main
distill_rl.check({str(run_file)!r})
main(["check", "-c", {str(run_file)!r}])
from transformers.utils import is_torch_available
from transformers import LlamaForCausalLM
assert is_torch_available() and LlamaForCausalLM.forward
"""
    done = subprocess.run([sys.executable, "-c", calls], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
