from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from distill_rl.errors import ConfigError
from distill_rl.models import forward
from distill_rl.models.weights import WeightFiles
from distill_rl.parallel.mesh import World
from tests.helpers.load import load_model
from tests.helpers.models import write_tiny_model


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def split_into_parts(folder: Path) -> None:
    """Rewrites the folder as three files and an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    part_of = {name: f"model-{number % 3 + 1:05d}-of-00003.safetensors" for number, name in enumerate(tensors)}
    for part in set(part_of.values()):
        save_file({name: tensors[name] for name in tensors if part_of[name] == part}, folder / part)
    index = {"metadata": {}, "weight_map": part_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@torch.no_grad()
def assert_loads(folder: Path, wanted: Tensor, world: World) -> None:
    ids = torch.arange(3, 15)[None]
    model = load_model(folder, world, role="teacher", dtype="fp32")
    assert torch.equal(forward.logits(model, ids, torch.arange(12)[None]), wanted)


@torch.no_grad()
def logits_of(folder: Path) -> Tensor:
    return AutoModelForCausalLM.from_pretrained(folder)(input_ids=torch.arange(3, 15)[None], use_cache=False).logits


def test_read_returns_the_requested_slice(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6).bfloat16()
    save_file({"x": whole, "scalar": torch.tensor(7.0)}, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path)
    assert torch.equal(files.read("x", (slice(1, 3), slice(2, 5))), whole[1:3, 2:5])
    assert files.read("scalar", ()) == 7.0
    assert files.dtype("x") == torch.bfloat16
    files.require_shape("x", whole)
    with pytest.raises(ConfigError, match=r"shape must be \[6, 4\] by config\.json; got \[4, 6\]"):
        files.require_shape("x", whole.T)


def test_sharded_files_are_found_through_the_index(tmp_path: Path, world: World) -> None:
    folder = write_tiny_model(tmp_path, "qwen2")
    wanted = logits_of(folder)
    split_into_parts(folder)
    assert_loads(folder, wanted, world)


def test_files_of_a_bare_inner_model_load(tmp_path: Path, world: World) -> None:
    folder = write_tiny_model(tmp_path, "gpt2", tie=True)
    wanted = logits_of(folder)

    def strip(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    rewrite(folder, strip)
    assert_loads(folder, wanted, world)


@pytest.mark.parametrize("kept", ["both", "lm_head.weight", "model.embed_tokens.weight"])
def test_tied_head_is_found_under_either_name(tmp_path: Path, world: World, kept: str) -> None:
    folder = write_tiny_model(tmp_path, "llama", tie=True)
    wanted = logits_of(folder)

    def store(tensors: dict[str, Tensor]) -> None:
        shared = tensors.pop("model.embed_tokens.weight")
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            if kept in ("both", name):
                tensors[name] = shared.clone()

    rewrite(folder, store)
    assert_loads(folder, wanted, world)


def test_stored_rotary_frequencies_are_ignored(tmp_path: Path, world: World) -> None:
    folder = write_tiny_model(tmp_path, "llama")
    wanted = logits_of(folder)
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    assert_loads(folder, wanted, world)


def drop_norm(tensors: dict[str, Tensor]) -> None:
    del tensors["model.norm.weight"]


def add_stranger(tensors: dict[str, Tensor]) -> None:
    tensors["visual.proj.weight"] = torch.zeros(3)


def narrow_head(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()


def integer_norm(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(32, dtype=torch.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_norm, r"llama needs tensors that are not there: model\.norm\.weight \(1 in all\)"),
        (add_stranger, r"llama has no such tensors: visual\.proj\.weight \(1 in all\)"),
        (narrow_head, r"tensor lm_head\.weight: shape must be \[320, 32\] by config\.json; got \[319, 32\]"),
        (integer_norm, r"tensor model\.norm\.weight: dtype must be one of .*; got I8"),
    ],
)
def test_weights_unlike_the_config_are_refused(
    tmp_path: Path, world: World, change: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    folder = write_tiny_model(tmp_path, "llama", vocab_size=320)
    rewrite(folder, change)
    with pytest.raises(ConfigError, match=message):
        load_model(folder, world, role="student", dtype="fp32")


def test_differing_tied_weights_are_refused(tmp_path: Path, world: World) -> None:
    folder = write_tiny_model(tmp_path, "llama", tie=True)
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight and lm_head\.weight: must be equal"):
        load_model(folder, world, role="student", dtype="fp32")


def test_pickled_weights_are_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(ConfigError, match=r"only pickled ones.*save_pretrained"):
        WeightFiles(tmp_path)


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must hold model\.safetensors"):
        WeightFiles(tmp_path)


def test_truncated_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(1000)}, file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"cut off: .* bytes; got .*model\.safetensors"):
        WeightFiles(tmp_path)


def test_index_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ConfigError, match=r"index\.json cannot be read"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.safetensors", r"a file that the index names is missing; got .*gone\.safetensors"),
        ("../outside/model.safetensors", "every file in the index must be in the folder"),
    ],
)
def test_index_must_name_files_in_the_folder(tmp_path: Path, name: str, message: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "outside").mkdir()
    save_file({"x": torch.ones(3)}, tmp_path / "outside" / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ConfigError, match=message):
        WeightFiles(folder)
