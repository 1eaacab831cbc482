from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from distill_rl.errors import DistillError
from distill_rl.models import forward
from distill_rl.models.export import export_model
from distill_rl.models.files import read_tokenizer, tokenizer_hash
from distill_rl.parallel.mesh import World
from tests.helpers.load import load_model
from tests.helpers.models import FAMILIES, write_tiny_model
from tests.helpers.zoo import write_family

IDS = torch.arange(3, 15)[None]


def same_bytes(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


@torch.no_grad()
def logits_of(folder: Path) -> Tensor:
    return AutoModelForCausalLM.from_pretrained(folder)(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_untrained_student_is_exported_byte_for_byte(tmp_path: Path, world: World, family: str, tie: bool) -> None:
    source = write_tiny_model(tmp_path / "source", family, tie=tie, dtype="bfloat16")
    student = load_model(source, world, role="student", dtype="fp32")
    export_model(student, source=source, tokenizer=read_tokenizer(source), out_dir=tmp_path / "out")
    assert same_bytes(load_file(tmp_path / "out/model.safetensors"), load_file(source / "model.safetensors"))
    assert torch.equal(logits_of(tmp_path / "out"), logits_of(source))


def test_transformers_loads_the_trained_student(tmp_path: Path, world: World) -> None:
    source = write_tiny_model(tmp_path / "source", "llama", tie=True)
    student = load_model(source, world, role="student", dtype="fp32")
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(1.5)
        wanted = forward.logits(student, IDS, torch.arange(12)[None])
    export_model(student, source=source, tokenizer=read_tokenizer(source), out_dir=tmp_path / "out")
    assert torch.equal(logits_of(tmp_path / "out"), wanted)
    assert not torch.equal(logits_of(source), wanted)


def test_folder_is_complete_for_users(tmp_path: Path, world: World) -> None:
    source = write_tiny_model(tmp_path / "source", "qwen2", dtype="float16")
    GenerationConfig(temperature=0.25, do_sample=True, eos_token_id=1).save_pretrained(source)
    config = json.loads((source / "config.json").read_text())
    del config["dtype"]
    config |= {"torch_dtype": "float32", "auto_map": {"AutoConfig": "own.Config"}}
    (source / "config.json").write_text(json.dumps(config))
    student = load_model(source, world, role="student", dtype="bf16")
    out = tmp_path / "deep" / "down" / "out"
    tokenizer = read_tokenizer(source)
    export_model(student, source=source, tokenizer=tokenizer, out_dir=out, card="# A student\n")
    assert (out / "README.md").read_text() == "# A student\n"
    assert GenerationConfig.from_pretrained(out).temperature == 0.25
    assert tokenizer_hash(read_tokenizer(out)) == tokenizer_hash(tokenizer)
    written = json.loads((out / "config.json").read_text())
    assert written["dtype"] == "float16"
    assert not {"torch_dtype", "auto_map"} & written.keys()
    assert written["use_cache"] is True
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.float16
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_large_model_is_written_in_shards(tmp_path: Path, world: World) -> None:
    source = write_tiny_model(tmp_path / "source", "llama")
    student = load_model(source, world, role="student", dtype="fp32")
    tokenizer, out = read_tokenizer(source), tmp_path / "out"
    export_model(student, source=source, tokenizer=tokenizer, out_dir=out, max_file_bytes=40_000)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    assert torch.equal(logits_of(tmp_path / "out"), logits_of(source))
    again = load_model(tmp_path / "out", world, role="teacher", dtype="fp32")
    assert torch.equal(forward.logits(again, IDS, torch.arange(12)[None]), logits_of(source))


def test_tensors_that_are_computed_with_in_fp32_are_not_rounded(tmp_path: Path, world: World) -> None:
    """Of a DeepSeek-V3, the bias by which a router chooses experts; every other tensor gets the dtype that is asked for."""
    source, out = write_family(tmp_path / "source", "deepseek_v3"), tmp_path / "out"
    student = load_model(source, world, role="student", dtype="fp32")
    export_model(student, source=source, tokenizer=read_tokenizer(source), out_dir=out, dtype=torch.bfloat16)
    before, written = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    kept = {name for name, tensor in written.items() if tensor.dtype == torch.float32}
    assert kept == {name for name in before if name.endswith("e_score_correction_bias")} != set()
    assert all(torch.equal(tensor, before[name].to(tensor.dtype)) for name, tensor in written.items())
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_older_export_and_leftovers_are_replaced(tmp_path: Path, world: World) -> None:
    source = write_tiny_model(tmp_path / "source", "llama")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "stale.txt").touch()
    (tmp_path / ".out.0123abcd").mkdir()
    student = load_model(source, world, role="student", dtype="fp32")
    export_model(student, source=source, tokenizer=read_tokenizer(source), out_dir=tmp_path / "out")
    assert not (tmp_path / "out" / "stale.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_failed_write_keeps_the_older_export(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tiny_model(tmp_path / "source", "llama")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").touch()
    student = load_model(source, world, role="student", dtype="fp32")
    tokenizer = read_tokenizer(source)
    monkeypatch.setattr(type(tokenizer), "save_pretrained", _disk_full)
    with pytest.raises(DistillError, match=r"export to .*out: must be writable.*No space left"):
        export_model(student, source=source, tokenizer=tokenizer, out_dir=tmp_path / "out")
    assert (tmp_path / "out" / "precious.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def _disk_full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")
