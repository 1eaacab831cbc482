"""What `check` asks of models is the same where Transformers has no PyTorch, and only its own process goes without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distill_rl.errors import ConfigError
from distill_rl.models.classes import examine
from distill_rl.models.files import read_config
from distill_rl.system.environment import ROOT
from distill_rl.system.without_torch import gpu_possible
from tests.helpers.corpus import write_corpus
from tests.helpers.models import write_tiny_model

WITHOUT = """
import json, sys
from pathlib import Path
from distill_rl.system.without_torch import import_transformers_without_torch

def main():
    import_transformers_without_torch()
    root = Path(sys.argv[1])
    {body}

if __name__ == "__main__":
    main()
"""


EXAMINE = "examine('student', folder, attention='sdpa', packing=True, weights=True)"
WRONG = {"dtype": ("read_config(folder)", {"dtype": "bogus"}), "activation": (EXAMINE, {"hidden_act": "bogus"})}
"""Folder → what raises an error of its model, and what is changed in the model's configuration"""

BODY = f"""
import os
from distill_rl.errors import ConfigError
from distill_rl.models.files import architecture_problems
from distill_rl.models.classes import examine
from distill_rl.models.files import read_config, read_tokenizer
from transformers.utils import is_torch_available
folder = root / "llama"
found = dict(reads=[is_torch_available(), read_config(folder).model_type, len(read_tokenizer(folder)) > 0])
found["architecture"] = architecture_problems("student", folder)
folder = root / "gpt2"
found["gpt2"] = {EXAMINE}
assert "torch" not in sys.modules
for name, function in {[(name, function) for name, (function, _) in WRONG.items()]!r}:
    folder = root / name
    try:
        eval(function)
    except ConfigError as error:
        found[name] = list(error.problems)
assert "TRANSFORMERS_NO_ADVISORY_WARNINGS" not in os.environ
import torch
assert torch.ones(1).item() == 1
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, some with a wrong configuration."""
    root = tmp_path_factory.mktemp("models")
    write_tiny_model(root / "llama")
    edit(write_tiny_model(root / "gpt2", "gpt2", layers=2), n_layer=1)
    for name, (_, change) in WRONG.items():
        edit(write_tiny_model(root / name), **change)
    return root


@pytest.fixture(scope="module")
def found(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """What a process without PyTorch finds of these models; nothing goes to stderr."""
    script = tmp_path_factory.mktemp("script") / "script.py"
    script.write_text(WITHOUT.replace("{body}", "\n    ".join(BODY.strip().splitlines())))
    done = subprocess.run([sys.executable, str(script), str(root)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def edit(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def test_transformers_reads_configs_and_leaves_torch_to_others(found):
    assert found["reads"] == [False, "llama", True]
    assert found["architecture"] == []


def test_a_class_is_asked_in_another_process(root, found):
    expected = examine("student", root / "gpt2", attention="sdpa", packing=True, weights=True)
    assert len(expected) == 1
    assert found["gpt2"] == expected


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_those_with_torch(root, found, name):
    with pytest.raises(ConfigError) as expected:
        eval(WRONG[name][0], {"read_config": read_config, "examine": examine, "folder": root / name})
    assert found[name] == list(expected.value.problems)


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


FAMILIES = """
import sys
sys.path.insert(0, sys.argv[1])
if sys.argv[2] == "remember":
    from distill_rl.system.without_torch import remember_families
    remember_families()
from transformers.utils.import_utils import create_import_structure_from_path, __file__ as file
from pathlib import Path
found = create_import_structure_from_path(Path(file).parents[1] / "models")
print(sorted((name, str(sorted(str(sorted(key)) for key in part))) for name, part in found.items()))
"""


PACKAGES = """
import sys
sys.path.insert(0, sys.argv[1])
from distill_rl.system.without_torch import remember_families
remember_families()
import importlib.metadata
read = importlib.metadata.packages_distributions
from transformers.utils.import_utils import PACKAGE_DISTRIBUTION_MAPPING as found
assert importlib.metadata.packages_distributions is read
print(sys.argv[2] in found, {**found, sys.argv[2]: 0} == {**read(), sys.argv[2]: 0})
"""


def test_installed_packages_are_remembered_until_one_is_added(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPYCACHEPREFIX": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path / "site")}

    def found(name: str) -> str:
        command = [sys.executable, "-c", PACKAGES, str(ROOT), name]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    assert found("new") == "False True"
    (kept,) = (tmp_path / "cache").rglob("*.opt-packages.json")
    known = json.loads(kept.read_bytes())
    kept.write_text(json.dumps({"about": known["about"], "packages": known["packages"] | {"kept": ["kept"]}}))
    assert found("kept") == "True True"
    info = tmp_path / "site" / "new-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: new\nVersion: 1\n")
    (info / "top_level.txt").write_text("new\n")
    assert found("new") == "True True"
    assert found("kept") == "False True"


def test_families_are_remembered_until_transformers_changes(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(tmp_path)

    def families(how: str) -> str:
        command = [sys.executable, "-c", FAMILIES, str(ROOT), how]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    read = families("read")
    assert families("remember") == read
    (kept,) = tmp_path.rglob("*.opt-exports.json")
    about, found = json.loads(kept.read_bytes()).values()
    other = [*found, ["added", []]]
    kept.write_text(json.dumps({"about": about, "exports": other}))
    assert "('added', '[]')" in families("remember")
    kept.write_text(json.dumps({"about": [about[0], about[1] + 1], "exports": other}))
    assert families("remember") == read
    kept.write_bytes(b"damaged")
    assert families("remember") == read
