import json
import socket
import struct
import subprocess
import sys

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from distill_rl.errors import ConfigError
from distill_rl.models import files
from distill_rl.models.files import folder_problems, locate, looks_like_hub_name, read_model_facts, weight_files
from distill_rl.scaling.shape import Shape
from tests.helpers.models import FAMILIES, write_tiny_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "llama", layers=3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tie", [False, True])
def test_facts_match_the_loaded_model(tmp_path, family, tie):
    folder = write_tiny_model(tmp_path / family, family, tie=tie, vocab_size=384)
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = read_model_facts(folder, AutoConfig.from_pretrained(folder))
    assert folder_problems("student.model", folder) == []
    assert found.parameters == model.num_parameters()
    assert (found.family, found.tied, found.vocabulary_columns) == (family, tie, 384)
    assert (found.hidden_size, found.num_layers, found.num_heads) == (32, 2, 4)
    assert found.bytes_on_disk == sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())


def test_shape_counts_the_matrices_that_a_model_of_wide_heads_has(tmp_path):
    """Qwen3's heads are wider than its hidden size divided by their number."""
    config = AutoConfig.for_model(
        "qwen3", hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=24, vocab_size=96, tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    found = read_model_facts(tmp_path, config)
    assert (found.head_size, found.num_heads, found.key_size) == (24, 4, 48)
    assert Shape.of(found).parameters == sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)


def test_sharded_model_is_counted_once(tmp_path, llama):
    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(weight_files(tmp_path)) > 1
    config = AutoConfig.from_pretrained(llama)
    assert read_model_facts(tmp_path, config).parameters == read_model_facts(llama, config).parameters


def copy(source, target, *leave_out):
    target.mkdir()
    for file in source.iterdir():
        if file.name not in leave_out:
            (target / file.name).write_bytes(file.read_bytes())
    return target


def only(lines):
    (line,) = lines
    assert line.startswith("student.model: ")
    return line


def test_missing_or_damaged_config_is_named(tmp_path, llama):
    bare = copy(llama, tmp_path / "bare", "config.json")
    assert "must hold a config.json" in only(folder_problems("student.model", bare))
    (bare / "model.gguf").write_bytes(b"GGUF")
    assert "it holds model.gguf: write that in safetensors first" in only(folder_problems("student.model", bare))
    (bare / "config.json").write_text("{")
    assert "config.json cannot be read" in only(folder_problems("student.model", bare))


def test_pickled_weights_are_refused_unread(tmp_path, llama):
    folder = copy(llama, tmp_path / "bin", "model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"\x80 not even a pickle")
    assert "weights must be safetensors; the folder has only pickled ones" in only(
        folder_problems("student.model", folder)
    )


def test_folder_without_weights_is_named(tmp_path, llama):
    folder = copy(llama, tmp_path / "empty", "model.safetensors")
    assert "must hold model.safetensors" in only(folder_problems("student.model", folder))
    assert folder_problems("student.model", folder, weights=False) == []


@pytest.mark.parametrize(
    ("described", "named"),
    [
        ('{"peft_type": "LORA", "base_model_name_or_path": "org/big"}', "LORA adapter of org/big"),
        ("[", "PEFT adapter of an unk"),
    ],
)
def test_adapter_is_named_with_its_base_and_remedy(tmp_path, llama, described, named):
    adapter = copy(llama, tmp_path / "adapter", "config.json", "model.safetensors")
    (adapter / "adapter_config.json").write_text(described)
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    line = only(folder_problems("student.model", adapter))
    assert all(words in line for words in (named, "without the model's weights", "merge_and_unload()", str(adapter)))
    (adapter / "config.json").write_bytes((llama / "config.json").read_bytes())  # some tools copy it beside the adapter
    assert only(folder_problems("student.model", adapter)) == line
    (tmp_path / "config.json").write_text("{}")  # as an export holds the adapter that is merged in it
    assert only(folder_problems("student.model", adapter)).endswith(f"give {tmp_path}, where it is merged")


def test_a_model_beside_an_adapter_is_refused(tmp_path, llama):
    both = copy(llama, tmp_path / "both")
    (both / "adapter_config.json").write_text("{}")
    assert only(folder_problems("student.model", both)) == (
        "student.model: must hold a model or an adapter, not both: transformers would apply the adapter, and training would "
        f"not; got {both}; move adapter_config.json and adapter_model.* elsewhere to take the model alone, or merge them first"
    )


def test_family_with_own_code_is_refused(tmp_path, llama):
    folder = copy(llama, tmp_path / "remote")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mystery", "auto_map": {"AutoModelForCausalLM": "modeling_mystery.Mystery"}}
    (folder / "config.json").write_text(json.dumps(config))
    assert "'mystery' needs code from its folder (auto_map), which is never run" in only(
        folder_problems("student.model", folder)
    )
    del config["auto_map"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "must name a model_type that transformers has; got 'mystery'" in only(
        folder_problems("student.model", folder)
    )


def test_code_beside_a_known_family_is_ignored(tmp_path, llama):
    folder = copy(llama, tmp_path / "both")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "x.Y"}}))
    assert folder_problems("student.model", folder) == []


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda data: data[:-100], "cut off"),
        (lambda data: data[:4], "not a safetensors file, or cut off"),
        (lambda data: b"", "not a safetensors file, or cut off"),
        (lambda data: struct.pack("<Q", 4) + b"{{{{", "its header is damaged"),
        (lambda data: b"\xff" * 64, "not a safetensors file, or cut off"),
    ],
)
def test_damaged_weight_file_is_named(tmp_path, llama, damage, expected):
    folder = copy(llama, tmp_path / "damaged")
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    line = only(folder_problems("student.model", folder))
    assert expected in line
    assert "model.safetensors" in line


def test_every_missing_shard_is_named(tmp_path, llama):
    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(tmp_path, max_shard_size="40KB")
    first, second = weight_files(tmp_path)[:2]
    first.unlink()
    second.unlink()
    lines = folder_problems("student.model", tmp_path)
    assert len(lines) == 2
    assert first.name in lines[0]
    assert second.name in lines[1]
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert "index.json cannot be read" in only(folder_problems("student.model", tmp_path))


def test_paths_and_hub_names_are_distinguished(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert looks_like_hub_name("meta-llama/Llama-3.2-1B")
    assert not any(map(looks_like_hub_name, ("gpt2", "/a/b", "./a/b", "~/a", "a/b/c", "../b", "")))
    (tmp_path / "models").mkdir()
    assert not looks_like_hub_name("models/llama")
    (tmp_path / "file").touch()
    for name, found in {
        "models/llama": "no such folder",
        "absent": "no such folder; got absent",
        "file": "not a file",
    }.items():
        with pytest.raises(ConfigError, match=found):
            locate("student.model", name)
    assert str(locate("student.model", "models")) == "models"


def test_hub_name_is_unreachable_offline_not_wrong():
    code = (
        "from distill_rl.models.files import HubUnreachable, locate, find_data_set\n"
        "try:\n    locate('student.model', 'some-org/some-model')\nexcept HubUnreachable as error:\n    print(error)\n"
        "problem, reason = find_data_set('data.path', 'some-org/some-data'); assert not problem; print(reason)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin", "HF_HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=True,
    )
    model, data = done.stdout.splitlines()
    assert model.startswith("student.model: model some-org/some-model")
    assert data.startswith("data.path: some-org/some-data is neither a file nor a folder here")


def test_silent_hub_times_out(monkeypatch):
    """A server that accepts connections and never answers. The module's deadline ends the wait, not the client's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(files, "HUB_TIMEOUT_S", 0.2)
        answer = files.in_time(lambda: socket.create_connection(server.getsockname()).recv(1))
    assert answer is None


def test_timely_answer_or_error_is_returned():
    assert files.in_time(lambda: 7) == 7
    assert isinstance(files.in_time(lambda: 1 / 0), ZeroDivisionError)
