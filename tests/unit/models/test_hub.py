from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from distill_rl.errors import ConfigError
from distill_rl.models import files
from distill_rl.models.files import (
    HubUnreachable,
    read_config,
    read_tokenizer,
    resolve,
    tokenizer_hash,
    vocabulary_size,
)
from distill_rl.models.stops import configured_stops
from tests.helpers.models import write_tiny_model
from tests.helpers.tokenizers import tiny_tokenizer


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without a network and with an empty hub cache."""
    import huggingface_hub.constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


def change_config(folder: Path, **changes: object) -> Path:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_existing_folder_is_used_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name") == Path("org/name")
    assert resolve(tmp_path) == tmp_path


@pytest.mark.parametrize("name", ["./gone", "/gone/for/good", "~/gone-for-good", "a/b/c"])
def test_missing_folder_is_not_sought_on_the_hub(name: str) -> None:
    with pytest.raises(ConfigError, match="no such folder") as caught:
        resolve(name)
    assert not isinstance(caught.value, HubUnreachable)


def test_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="must be a folder"):
        resolve(tmp_path / "model.safetensors")


@pytest.mark.usefixtures("offline")
def test_hub_name_without_network_is_unreachable() -> None:
    with pytest.raises(HubUnreachable, match=r"org/name.*HF_HUB_OFFLINE is set.*hf download"):
        resolve("org/name")


@pytest.mark.usefixtures("offline")
def test_cached_hub_name_needs_no_network(tmp_path: Path) -> None:
    stored = tmp_path / "cache" / "models--org--name"
    write_tiny_model(stored / "snapshots" / "abc123", "llama")
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("abc123")
    assert resolve("org/name", weights=True) == stored / "snapshots" / "abc123"
    assert read_config("org/name").model_type == "llama"
    assert read_tokenizer("org/name").is_fast


def test_invalid_hub_name_is_wrong() -> None:
    with pytest.raises(ConfigError, match="must be a folder, or a name"):
        resolve("not a name!")


def test_model_with_own_code_is_refused_and_not_run(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama")
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    change_config(folder, model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
    with pytest.raises(ConfigError, match="without code of its own"):
        read_config(folder)
    assert not (tmp_path / "ran").exists()


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    folder = change_config(write_tiny_model(tmp_path, "llama"), quantization_config={"quant_method": "fp8"})
    with pytest.raises(ConfigError, match="must not be quantized"):
        read_config(folder)


@pytest.mark.parametrize("content", [None, "{", '{"hidden_size": "wide", "model_type": "llama"}'])
def test_unreadable_config_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize("content", [None, "{"])
def test_unreadable_tokenizer_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match="must hold a tokenizer"):
        read_tokenizer(tmp_path)


def test_hash_ignores_saving_and_template(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    wanted = tokenizer_hash(tokenizer)
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.padding_side = "left"
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.backend_tokenizer.enable_truncation(7)
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_hash(AutoTokenizer.from_pretrained(tmp_path)) == wanted
    assert tokenizer_hash(read_tokenizer(tmp_path)) == wanted


def test_hash_depends_on_vocabulary_merges_and_added_tokens(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    original = json.loads((tmp_path / "tokenizer.json").read_text())
    hashes = {tokenizer_hash(tiny_tokenizer())}
    swapped, fewer = json.loads(json.dumps(original)), json.loads(json.dumps(original))
    vocabulary = swapped["model"]["vocab"]
    last, before = sorted(vocabulary, key=vocabulary.get)[-1:-3:-1]
    vocabulary[last], vocabulary[before] = vocabulary[before], vocabulary[last]
    fewer["model"]["merges"].pop()
    for changed in (swapped, fewer):
        (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
        hashes.add(tokenizer_hash(read_tokenizer(tmp_path)))
    extended = tiny_tokenizer()
    extended.add_tokens(["<extra>"])
    hashes.add(tokenizer_hash(extended))
    assert len(hashes) == 4


def test_vocabulary_size_includes_added_tokens_and_gaps() -> None:
    tokenizer = tiny_tokenizer()
    size = vocabulary_size(tokenizer)
    assert size == max(tokenizer.get_vocab().values()) + 1
    tokenizer.add_tokens(["<extra-1>", "<extra-2>"])
    assert vocabulary_size(tokenizer) == size + 2


def test_pickles_are_not_fetched_from_the_hub() -> None:
    from fnmatch import fnmatch

    for name in ("pytorch_model.bin", "model.pt", "training_args.pth", "modeling_own.py"):
        assert not any(fnmatch(name, pattern) for pattern in files._WEIGHTS), name


def test_tokenizer_file_means_the_same_for_every_family(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    text = "Kaé 42  中\n7"
    for family in ("llama", "qwen2"):
        folder = write_tiny_model(tmp_path / family, family, hidden=16, layers=1, tokenizer=tokenizer)
        assert read_tokenizer(folder)(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert tokenizer_hash(read_tokenizer(folder)) == tokenizer_hash(tokenizer)


@pytest.mark.parametrize(("files", "expected"), [
    ({"generation_config.json": {"eos_token_id": [3, 5]}, "config.json": {"eos_token_id": 7}}, (3, 5)),
    ({"generation_config.json": {}, "config.json": {"eos_token_id": 7}}, ()),
    ({"config.json": {"eos_token_id": 7}}, (7,)),
    ({}, ()),
])  # fmt: skip
def test_stops_come_from_the_generation_config(tmp_path, files, expected):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert configured_stops(tmp_path) == expected


@pytest.mark.parametrize("content", ["{", "[3]"])
def test_malformed_generation_config_is_named(tmp_path, content):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"generation_config\.json must be JSON"):
        configured_stops(tmp_path)
