"""Every family of the list in docs/models.md, from its files into shards and back, with a random model of each."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from distill_rl.errors import ConfigError
from distill_rl.evals.backends.base import Settings
from distill_rl.evals.backends.hf import HfBackend
from distill_rl.models import forward
from distill_rl.models.classes import examine
from distill_rl.models.export import export_model
from distill_rl.models.files import read_tokenizer
from distill_rl.models.load import load_to_generate
from distill_rl.parallel.mesh import World
from tests.helpers.load import load_model
from tests.helpers.zoo import DENSE, EAGER, LEAKING, MIXTURES, UNSPLIT, write_family

IDS = torch.arange(3, 15)[None]
POSITIONS = torch.arange(12)[None]
PAGE = Path(__file__).parents[3] / "docs" / "models.md"


def attention_of(family: str) -> str:
    """What `attention: auto` takes on a CPU."""
    return "eager" if family in EAGER else "sdpa"


def logits_of(model: Path | PreTrainedModel, attention: str = "") -> Tensor:
    """What a model of transformers answers; it is loaded from a folder with this attention."""
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(model, attn_implementation=attention)
    with torch.no_grad():
        return model(input_ids=IDS, position_ids=POSITIONS, use_cache=False).logits


@pytest.mark.parametrize("family", [*DENSE, *MIXTURES])
def test_family_loads_trains_exports_and_reloads(tmp_path: Path, world: World, family: str) -> None:
    source, out = write_family(tmp_path / "source", family), tmp_path / "out"
    packing, attention = family not in LEAKING, attention_of(family)
    student = load_model(source, world, role="student", dtype="fp32", packing=packing).eval()
    assert student.config._attn_implementation == attention
    assert examine("student", source, attention="sdpa", packing=packing, weights=True, automatic=True) == []
    logits = forward.logits(student, IDS, POSITIONS)
    assert torch.equal(logits, logits_of(source, attention))

    eager = logits_of(source, "eager")
    teacher = load_model(source, world, role="teacher", dtype="fp32", packing=packing)
    with closing(HfBackend(source, Settings(device="cpu", dtype="fp32"))) as evaluated:
        others = [logits_of(model) for model in (teacher, evaluated.model, load_to_generate(source, world))]
    for found in (logits.detach(), *others):
        assert (found - eager).abs().max() <= 1e-5 * eager.abs().max()

    def export() -> dict[str, Tensor]:
        export_model(student, source=source, tokenizer=read_tokenizer(source), out_dir=out)
        return load_file(out / "model.safetensors")

    before, exported = load_file(source / "model.safetensors"), export()
    assert exported.keys() == before.keys()
    assert all(torch.equal(exported[name], before[name]) for name in before), "byte for byte before training"

    logits.log_softmax(-1)[..., 7].sum().backward()
    with torch.no_grad():
        for parameter in student.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.01 * parameter.grad)
        trained = forward.logits(student, IDS, POSITIONS)
    assert not torch.equal(trained, logits)
    export()
    assert torch.equal(logits_of(out, attention), trained)


def blur(folder: Path) -> Path:
    """Gives every number of a model's file, in fp32, digits that no type of 16 bits has."""
    file, draw = folder / "model.safetensors", torch.Generator().manual_seed(0)
    tensors = {
        name: (tensor.float() + 0.05 * torch.randn(tensor.shape, generator=draw)).contiguous()
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def tensors_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers; a tied one once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("family", [*DENSE, *MIXTURES])
def test_every_tensor_has_the_dtype_and_the_bits_of_transformers(tmp_path: Path, world: World, family: str) -> None:
    """A bias by which a router chooses experts stays in fp32: rounded, it chooses others."""
    source = blur(write_family(tmp_path, family))
    teacher = load_model(source, world, role="teacher", dtype="bf16", packing=family not in LEAKING)
    found = [(torch.bfloat16, teacher)]
    found += [(dtype, load_to_generate(source, world, dtype=dtype)) for dtype in (torch.bfloat16, torch.float16)]
    for dtype, model in found:
        expected = tensors_of(AutoModelForCausalLM.from_pretrained(source, dtype=dtype))
        ours = tensors_of(model)
        assert ours.keys() == expected.keys()
        dtypes = {name: (tensor.dtype, ours[name].dtype) for name, tensor in expected.items()}
        assert {name: both for name, both in dtypes.items() if both[0] != both[1]} == {}
        assert all(torch.equal(tensor, ours[name]) for name, tensor in expected.items())


@pytest.mark.parametrize("family", sorted(LEAKING))
def test_leaking_family_is_refused_only_with_packing(tmp_path: Path, world: World, family: str) -> None:
    with pytest.raises(ConfigError, match=r"must not see each other.*data\.packing: false"):
        load_model(write_family(tmp_path, family), world, role="student", dtype="fp32")


def table() -> str:
    """The list of docs/models.md."""
    lines = ["| `model_type` | kind | `data.packing` | attention | tensor parallel |", "|---|---|---|---|---|"]
    for family in sorted([*DENSE, *MIXTURES]):
        kind = "mixture of experts" if family in MIXTURES else "dense"
        split = "no" if family in UNSPLIT else "yes"
        lines.append(
            f"| `{family}` | {kind} | {'no' if family in LEAKING else 'yes'} | {attention_of(family)} | {split} |"
        )
    return "\n".join(lines)


def test_the_list_in_the_docs_is_what_is_tested_here() -> None:
    assert table() in PAGE.read_text()
