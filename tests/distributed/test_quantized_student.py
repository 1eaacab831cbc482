"""Adapters beside a quantised base: the gradient on every layout, resuming, and an export of the weights as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate

from distill_rl.models.files import read_tokenizer
from distill_rl.models.parallelize import reshard
from distill_rl.models.quantization import QuantizedLinear, QuantizedWeight
from distill_rl.parallel.mesh import close_world, open_world
from distill_rl.student.engine import StudentEngine
from tests.helpers import engines, ranks
from tests.helpers.lora import VOCABULARY, batch_rows, lora_config, peft_model, run_steps, set_adapters
from tests.helpers.models import write_tiny_model

pytestmark = pytest.mark.ranks
pytest.importorskip("torchao", reason="torchao is not installed here: bash launch/test.sh quantization")

WHOLE = {"llama": ["embed_tokens"], "gpt2": [], "mixtral": ["layers.1.self_attn.q_proj"]}
"""Family → what is trained whole, and so is not quantised."""
TARGETS = {"mixtral": ["k_proj", "v_proj", "o_proj"]}
FORMATS = ("int8", "int4", "fp8")


@pytest.fixture(scope="module")
def students(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_tiny_model(root / name, name, hidden=64, seed=40 + i) for i, name in enumerate(WHOLE)}


def quantized_config(student: Path, format: str, **settings: object):
    config = lora_config(student, WHOLE[student.name], **settings)
    config.student.lora.targets = TARGETS.get(student.name)
    config.student.quantization = format
    return config


def parts_of_weights(model: torch.nn.Module) -> dict[str, tuple[Tensor, str]]:
    """This rank's part of every quantised weight, as it computes with it, and how the parts belong together."""
    parts = {}
    for name, module in model.named_modules():
        known = name.replace(".base_layer", "")
        if isinstance(module, QuantizedLinear):
            parts[f"{known}.weight"] = (module.weight.dequantize(), type(module.leaves).__name__)
        elif isinstance(module, QuantizedWeight) and module.data.ndim == 3:
            parts[known] = (module.dequantize(), Replicate.__name__)
    return parts


def gradients(dp: int, tp: int, students: dict[str, Path]) -> dict:
    """Runs on a rank. Per student, format, micro-batch size and activation checkpointing, the whole gradient and the weights."""
    world = open_world(rank=ranks.rank(), dp=dp, tp=tp)
    batch = engines.rank_batch(batch_rows(), world.dp_rank, dp)
    parts = engines.halves(batch)
    results = {}
    for name, path in students.items():
        for format in FORMATS:
            config = quantized_config(path, format)
            for size, checkpointing in ((1, False), (2, True)):
                config.train.micro_batch_size, config.student.activation_checkpointing = size, checkpointing
                engine = StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=4)
                set_adapters(engine.model)
                engine.forward_backward(parts[0], engines.no_targets, last=False)
                engine.evaluate(batch, engines.no_targets)
                engine.forward_backward(parts[1], engines.no_targets, last=True)
                reshard(engine.model)
                whole = engines.whole_gradients(engine.model)
                results[name, format, size] = (whole, parts_of_weights(engine.model))
    return results


def joined(name: str, parts: list[tuple[Tensor, str]]) -> Tensor:
    """A whole weight from the tensor-parallel ranks' parts."""
    (first, leaves), *_ = parts
    if leaves == "Replicate" or len(parts) == 1:
        assert all(torch.equal(part, first) for part, _ in parts)
        return first
    by_output = leaves == "Shard"
    return torch.cat([part for part, _ in parts], dim=int(by_output == (name == "gpt2")))


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_gradient_is_that_of_adapters_in_a_plain_model_with_the_same_weights(students, dp: int, tp: int) -> None:
    """The plain model has the quantised weights in fp64, and PEFT's own layers."""
    outcomes = ranks.run_ranks(dp * tp, gradients, dp, tp, students, timeout=400)
    rows = batch_rows()
    for name, format, size in outcomes[0]:
        found, weights = outcomes[0][name, format, size]
        for other in outcomes[tp::tp]:
            assert all(torch.equal(other[name, format, size][1][key][0], weights[key][0]) for key in weights)
        model = peft_model(students[name], WHOLE[name], TARGETS.get(name, ("",)))
        layers = model.config.num_hidden_layers
        assert len(weights) == {"llama": 7 * layers, "gpt2": 4 * layers, "mixtral": 6 * layers - 1}[name]
        for key in weights:
            owner, _, attribute = key.rpartition(".")
            owner = model.get_submodule(owner)
            owner = getattr(owner, "base_layer", owner)
            whole = joined(name, [outcome[name, format, size][1][key] for outcome in outcomes[:tp]])
            assert not torch.equal(getattr(owner, attribute), whole)
            if whole.ndim == 2:
                alone = QuantizedWeight(getattr(owner, attribute).data.float(), format, transposed=name == "gpt2")
                assert torch.equal(alone.dequantize(), whole), "the base does not depend on the layout"
            getattr(owner, attribute).data = whole
        set_adapters(model.double())
        _, ce = engines.plain_losses(engines.plain_logits(model, rows, VOCABULARY), rows.labels, None)
        (ce / engines.rank_batch(rows).num_labels).backward()
        error = engines.relative_l2(found, engines.whole_gradients(model))
        assert error < 1e-5, f"{name}, {format}, {size}: {error:.1e}"


def straight_and_resumed(dp: int, tp: int, student: Path, folder: Path) -> dict:
    """Four steps, and two, a save and two more in a new engine; the latter is exported. With dropout."""

    def engine_in(name: str) -> StudentEngine:
        store = torch.distributed.PrefixStore(name, ranks.store())
        world = open_world(rank=ranks.rank(), dp=dp, tp=tp, store=store)
        config = quantized_config(student, "int4", dropout=0.2)
        return StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=4)

    engine = engine_in("straight")
    straight = run_steps(engine, 0, 4), engines.whole_parameters(engine.model)
    close_world(engine.world)
    engine = engine_in("first")
    losses = run_steps(engine, 0, 2)
    engine.save(folder / "checkpoint")
    close_world(engine.world)
    engine = engine_in("second")
    engine.load(folder / "checkpoint")
    losses += run_steps(engine, 2, 4)
    engine.export(folder / "export", read_tokenizer(student))
    resumed = losses, engines.whole_parameters(engine.model)
    close_world(engine.world)
    return {"straight": straight, "resumed": resumed}


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_resumed_run_equals_the_straight_run_and_the_export_has_the_files_weights(
    students, tmp_path: Path, name: str, dp: int, tp: int
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    student = students[name]
    outcomes = ranks.run_ranks(dp * tp, straight_and_resumed, dp, tp, student, tmp_path, group=False, timeout=400)
    for outcome in outcomes:
        (losses, state), (losses_again, state_again) = outcome["straight"], outcome["resumed"]
        assert losses == losses_again
        assert all(torch.equal(tensor, state_again[key]) for key, tensor in state.items())
    ids = torch.arange(5, 25)[None]
    base = AutoModelForCausalLM.from_pretrained(student)
    peft = PeftModel.from_pretrained(base, tmp_path / "export" / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, peft(ids).logits, rtol=1e-4, atol=1e-5)


def from_checkpoint(dp: int, tp: int, student: Path, format: str, folder: Path) -> tuple:
    """Runs on a rank: steps 2 and 3, from the checkpoint in `folder`, or after steps 0 and 1 and the save of one.

    Returns the norms of the gradients, and what is trained, before and after them.
    """
    world = open_world(rank=ranks.rank(), dp=dp, tp=tp)
    engine = StudentEngine(quantized_config(student, format), world, vocabulary_size=VOCABULARY, total_steps=4)
    if folder.exists():
        engine.load(folder)
    else:
        run_steps(engine, 0, 2)
        engine.save(folder)
    before = engines.whole_parameters(engine.model)
    return run_steps(engine, 2, 4)[1::2], before, engines.whole_parameters(engine.model)


@pytest.mark.parametrize(("saved_at", "loaded_at"), [((1, 1), (1, 2)), ((1, 2), (2, 1))])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_a_checkpoint_goes_on_at_another_layout_as_if_never_interrupted(
    students, tmp_path: Path, format: str, saved_at: tuple[int, int], loaded_at: tuple[int, int]
) -> None:
    arguments = students["llama"], format, tmp_path / "checkpoint"
    outcomes = [
        ranks.run_ranks(dp * tp, from_checkpoint, dp, tp, *arguments, timeout=400)[0]
        for dp, tp in (saved_at, loaded_at)
    ]
    (norms, saved, wanted), (norms_again, loaded, ended) = outcomes
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(tensor, loaded[key]) for key, tensor in saved.items())
    assert any(not torch.equal(tensor, wanted[key]) for key, tensor in saved.items())
    # Layouts sum in another order, and AdamW makes large steps of gradients that are hardly more than rounding errors.
    torch.testing.assert_close(torch.tensor(norms_again), torch.tensor(norms), rtol=1e-4, atol=1e-6)
    for key, tensor in ended.items():
        torch.testing.assert_close(tensor, wanted[key], rtol=1e-3, atol=2e-4, msg=key)
