"""Adapters have one gradient for every layout and micro-batch size, and a run with them is resumed bit for bit."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from distill_rl.config.schema import LoraConfig
from distill_rl.errors import CheckpointError
from distill_rl.models import adapters
from distill_rl.models.files import read_tokenizer
from distill_rl.models.parallelize import reshard
from distill_rl.parallel.mesh import close_world, open_world
from distill_rl.student import checkpoint
from distill_rl.student.engine import StudentEngine
from distill_rl.student.optim import clip_gradients
from distill_rl.types import TokenRows
from tests.helpers import engines, ranks
from tests.helpers.lora import VOCABULARY, batch_rows, lora_config, peft_model, run_steps, set_adapters
from tests.helpers.models import write_tiny_model

pytestmark = pytest.mark.ranks

STEPS = 3
MAX_NORM = 0.05
"""Less than the norm of any of the gradients."""
LAYOUTS = [(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (2, 1, 2, 1), (2, 2, 1, 1), (1, 1, 1, 2)]
STUDENTS = {
    "llama": {"family": "llama", "tie": True, "whole": ["embed_tokens"]},
    "gpt2": {"family": "gpt2"},  # fused projections are gathered; weights are [in, out]
    "phi3": {"family": "phi3", "whole": ["lm_head"]},
    "qwen3": {"family": "qwen3"},  # torch's style for its norms makes new parameters
    "mixtral": {"family": "mixtral"},  # split by Transformers' plan; only its own forward makes logits
}


def gradients(dp: int, tp: int, replicas: int, sp: int, students: dict[str, Path]) -> dict:
    """Runs on a rank. The whole gradient, clipped, and its norm before, per student, gradient_sync, loss.fused, micro-batch size and dtype."""
    world = open_world(rank=ranks.rank(), dp=dp, tp=tp, replicas=replicas, sp=sp)
    batch = engines.rank_batch(batch_rows(), world.dp_rank, dp)
    parts = engines.halves(batch)
    results = {}
    for name, path in students.items():
        config = lora_config(path, STUDENTS[name].get("whole", []))
        for variant in variants_of(name, shards=dp > replicas):
            sync, fused, size, dtype = variant
            config.student.gradient_sync, config.loss.fused, config.train.micro_batch_size = sync, fused, size
            config.student.dtype = dtype
            engine = StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=4)
            set_adapters(engine.model)
            engine.forward_backward(parts[0], engines.no_targets, last=False)
            engine.evaluate(parts[0], engines.no_targets)
            engine.forward_backward(parts[1], engines.no_targets, last=True)
            reshard(engine.model)
            norm = clip_gradients(engine.parameters, MAX_NORM).item()
            whole = engines.whole_gradients(engine.model)
            results[name, *variant] = (whole if world.rank == 0 else None, norm)
    return results


def variants_of(name: str, shards: bool) -> list[tuple[str, str, int, str]]:
    """Values of gradient_sync, loss.fused, micro-batch size and dtype, of which a family's plan knows nothing.

    Args:
        shards: whether parameters are sharded: other layouts reduce once per step under either setting.
    """
    second = "micro_batch" if shards else "step"
    variants = [("step", "off", 1, "fp32"), (second, "off" if name == "mixtral" else "on", 2, "fp32")]
    return variants + [("step", "off", 2, "bf16")] * (name in ("llama", "gpt2"))


def folders_of(root: Path) -> dict[str, Path]:
    kinds = {name: {key: value for key, value in kind.items() if key != "whole"} for name, kind in STUDENTS.items()}
    return {name: write_tiny_model(root / name, seed=20 + i, **kind) for i, (name, kind) in enumerate(kinds.items())}


@pytest.fixture(scope="module")
def students(tmp_path_factory) -> dict[str, Path]:
    return folders_of(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def references(students) -> dict[str, tuple[dict[str, torch.Tensor], float]]:
    """fp64 gradients of PEFT's own layers in the plain models, one document at a time; clipped by torch, with their norms
    before."""
    rows, wanted = batch_rows(), {}
    for name, path in students.items():
        model = peft_model(path, STUDENTS[name].get("whole", []))
        set_adapters(model.double())
        _, ce = engines.plain_losses(engines.plain_logits(model, rows, VOCABULARY), rows.labels, None)
        (ce / engines.rank_batch(rows).num_labels).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()
        assert norm > 2 * MAX_NORM
        wanted[name] = engines.whole_gradients(model), norm
    return wanted


@pytest.mark.parametrize(
    ("dp", "tp", "replicas", "sp"), LAYOUTS, ids=[f"dp{dp}tp{tp}r{r}sp{sp}" for dp, tp, r, sp in LAYOUTS]
)
def test_gradient_of_adapters_is_peft_s_on_every_layout(students, references, dp: int, tp: int, replicas: int, sp: int):
    results = ranks.run_ranks(dp * tp * sp, gradients, dp, tp, replicas, sp, students, timeout=400)
    assert {name for name, *_ in results[0]} == students.keys()
    for (name, *variant), (gradient, norm) in results[0].items():
        whole, wanted = references[name]
        error = engines.relative_l2(gradient, whole)
        assert {tensor.dtype for tensor in gradient.values()} == {torch.float32}
        if variant[-1] == "bf16":  # keeps 8 bits; a missing or doubled term would be off by a third at least
            assert 1e-4 < error < 0.05, f"{name}, {variant}: {error:.1e}"
            continue
        assert error < 1e-5, f"{name}, {variant}: {error:.1e}"
        assert norm == pytest.approx(wanted, rel=1e-5), f"{name}, {variant}"
        assert all(other[name, *variant][1] == norm for other in results), "every rank must scale by the same factor"


def rows_of_widths(packing: bool) -> list[TokenRows]:
    documents = engines.random_documents(12, seed=11, longest=18)
    rows = engines.uneven_packs(documents) if packing else [[document] for document in documents[:8]]
    return [engines.token_rows(rows, width) for width in (40, 56)]


def compiled_gradients(dp: int, tp: int, student: Path) -> list[tuple[float | None, dict[str, torch.Tensor]]]:
    """Runs on a rank. The loss of its rows and the whole gradient at every width, of layers that are traced as by
    `student.compile`; no compiler is needed."""
    world = open_world(rank=ranks.rank(), dp=dp, tp=tp)
    config = lora_config(student, [])
    config.student.compile = True
    results: list = []
    with pytest.MonkeyPatch.context() as patch, torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        torch._dynamo.reset()
        traced = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
        patch.setattr(torch.nn.Module, "compile", traced)
        engine = StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=4)
        set_adapters(engine.model)
        for rows in rows_of_widths(packing=tp == 1):
            batch = engines.rank_batch(rows, world.dp_rank, dp)
            if tp == 1:  # a program more for every kind of layer
                engine.evaluate(batch, engines.no_targets)
            metrics = engine.forward_backward(batch, engines.no_targets)
            reshard(engine.model)
            loss = metrics["train/nll_loss"].value if metrics else None
            results.append((loss, engines.whole_gradients(engine.model)))
            engine.optimizer.zero_grad(set_to_none=True)
    return results


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 2)])
def test_compiled_layers_give_peft_s_gradient_at_every_width(students, dp: int, tp: int):
    """In the first layer the hidden states need no gradient; rows have masks or none: all are programs of one function."""
    outcomes = ranks.run_ranks(dp * tp, compiled_gradients, dp, tp, students["gpt2"], timeout=900)
    model = peft_model(students["gpt2"])
    set_adapters(model.double())
    for rows, (loss, gradient) in zip(rows_of_widths(packing=tp == 1), outcomes[0], strict=True):
        _, ce = engines.plain_losses(engines.plain_logits(model, rows, VOCABULARY), rows.labels, None)
        model.zero_grad()
        mean = ce / engines.rank_batch(rows).num_labels
        mean.backward()
        if dp == 1:
            assert loss == pytest.approx(mean.item(), rel=1e-6)
        assert engines.relative_l2(gradient, engines.whole_gradients(model)) < 1e-5


def straight_and_resumed(dp: int, tp: int, student: Path, folder: Path) -> dict:
    """Three steps, and two, a save and another in a new engine; the latter is exported. With dropout."""

    def engine_in(name: str) -> StudentEngine:
        store = torch.distributed.PrefixStore(name, ranks.store())
        world = open_world(rank=ranks.rank(), dp=dp, tp=tp, store=store)
        return StudentEngine(
            lora_config(student, ["lm_head"], dropout=0.2), world, vocabulary_size=VOCABULARY, total_steps=STEPS
        )

    engine = engine_in("straight")
    start = engines.whole_parameters(engine.model)
    straight = run_steps(engine, 0, STEPS), engines.whole_parameters(engine.model), torch.get_rng_state()
    close_world(engine.world)
    engine = engine_in("first")
    losses = run_steps(engine, 0, 2)
    engine.save(folder / "checkpoint")
    saved = set(checkpoint.trained_tensors(engine._named_parameters(), engine.optimizer))
    close_world(engine.world)
    engine = engine_in("second")
    engine.load(folder / "checkpoint")
    losses += run_steps(engine, 2, STEPS)
    resumed = losses, engines.whole_parameters(engine.model), torch.get_rng_state()
    engine.export(folder / "export", read_tokenizer(student))
    close_world(engine.world)
    return {"straight": straight, "resumed": resumed, "start": start, "saved": saved}


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_resumed_run_equals_the_straight_run_and_is_exported_for_peft(students, tmp_path, dp: int, tp: int):
    student = students["llama"] if (dp, tp) != (1, 2) else students["gpt2"]
    outcomes = ranks.run_ranks(dp * tp, straight_and_resumed, dp, tp, student, tmp_path, group=False, timeout=400)
    for outcome in outcomes:
        (losses, state, random), (losses_again, state_again, random_again) = outcome["straight"], outcome["resumed"]
        assert losses == losses_again
        assert all(torch.equal(tensor, state_again[name]) for name, tensor in state.items())
        assert torch.equal(random, random_again)
        changed = {name for name in state if not torch.equal(state[name], outcome["start"][name])}
        trained = {name for name in state if ".lora_" in name or "embed_tokens" in name or "lm_head" in name}
        assert changed == trained
        assert {name.removeprefix("model.") for name in outcome["saved"] if name.startswith("model.")} == trained
    begun = peft_model(student).float()
    adapters.initialise(begun, seed=0)
    for name, tensor in begun.named_parameters():
        if ".lora_" in name:
            assert torch.equal(outcomes[0]["start"][name], tensor), f"{name} must begin alike on every layout"
    base = AutoModelForCausalLM.from_pretrained(student)
    tensors = load_file(tmp_path / "export" / "adapter" / "adapter_model.safetensors")
    for name, tensor in outcomes[0]["resumed"][1].items():
        if ".lora_" in name:
            assert torch.equal(tensors[f"base_model.model.{name.replace('.default', '')}"], tensor)
    ids = torch.arange(5, 25)[None]
    peft = PeftModel.from_pretrained(base, tmp_path / "export" / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    with torch.no_grad():
        # The merge adds before the product, PEFT after it.
        torch.testing.assert_close(merged(ids).logits, peft(ids).logits, rtol=1e-4, atol=1e-5)


def other_checkpoints(full: Path, folder: Path) -> list[str]:
    """Runs on a rank. The messages for a checkpoint of adapters where all weights are trained, and the other ways round."""
    world = open_world(rank=0, dp=1, tp=1)

    def engine(rank: int | None) -> StudentEngine:
        config = lora_config(full, [])
        config.student.lora = None if rank is None else LoraConfig(rank=rank)
        return StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=4)

    messages = []
    engines_by_rank = {rank: engine(rank) for rank in (None, 4, 8)}
    for wrote, reads in ((4, None), (None, 4), (4, 8)):
        engines_by_rank[wrote].save(folder / f"{wrote}")
        with pytest.raises(CheckpointError) as refused:
            engines_by_rank[reads].load(folder / f"{wrote}")
        messages.append(str(refused.value))
    return messages


def test_a_checkpoint_of_other_training_is_refused_in_one_line(students, tmp_path):
    (messages,) = ranks.run_ranks(1, other_checkpoints, students["llama"], tmp_path)
    for message in messages:
        assert "must hold what is trained of student.model" in message
        assert "resume with the student, and the student.lora, that wrote it" in message
        assert "\n" not in message
