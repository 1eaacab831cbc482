"""The balance of a mixture's routers: value and gradient against the definition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from distill_rl.errors import ConfigError
from distill_rl.parallel.mesh import World
from distill_rl.student.router_balance import RouterBalance, _routers
from tests.helpers.engines import random_documents, relative_l2, token_rows, whole_gradients
from tests.helpers.models import write_tiny_model
from tests.helpers.routers import plain_balance
from tests.helpers.zoo import write_family

# one document per row, since these models are called without positions; the last row is padding alone
ROWS = token_rows([[document] for document in random_documents(3, seed=3, vocabulary=300)] + [[]], 24)


def loaded(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").train()


def measured(model: torch.nn.Module, weight: float, parts: list[slice], num_labels: int, world: World) -> float:
    """Runs micro-batches of the rows forward and backward, with no other loss; the summed balance."""
    balance, total = RouterBalance(model, weight, world), 0.0
    for part in parts:
        with balance.of(ROWS[part], num_labels) as summed:
            logits = model(input_ids=torch.tensor(ROWS[part].input_ids, dtype=torch.long), use_cache=False).logits
        (0.0 * logits.sum()).backward()
        total += summed.item()
    return total


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mixtral", {}),
        ("mixtral", {"checkpointed": True}),
        ("deepseek_v3", {"sigmoid": True}),
        ("gpt_oss", {}),
        ("granitemoe", {}),
        ("llama4_text", {}),
    ],
)
@pytest.mark.parametrize("parts", [[slice(0, 4)], [slice(i, i + 1) for i in range(4)]], ids=["whole", "rows"])
def test_value_and_gradient_match_the_definition(
    tmp_path: Path, world: World, family: str, settings: dict, parts: list
) -> None:
    model, plain = (loaded(write_family(tmp_path, family)) for _ in range(2))
    if not _routers(model):
        pytest.skip(f"this release of transformers does not say which modules are the routers of {family}")
    if settings.get("checkpointed"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    wanted = plain_balance(plain, ROWS, sigmoid=settings.get("sigmoid", False))
    (0.25 * wanted / 50).backward()
    assert measured(model, 0.25, parts, 50, world) == pytest.approx(wanted.item(), rel=1e-5)
    found, reference = ({n: g for n, g in whole_gradients(m).items() if g.any()} for m in (model, plain))
    assert any("gate" in name or "router" in name for name in reference)
    assert relative_l2(found, reference) < 1e-5


def test_even_routing_has_the_balance_1(world: World) -> None:
    """Every token visits all experts: K = E."""
    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 4, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(MixtralConfig(**sizes, **experts)).train()
    labels = int(np.count_nonzero(ROWS.labels >= 0))
    assert measured(model, 0.0, [slice(0, 4)], labels, world) / labels == pytest.approx(1.0, abs=1e-6)


def test_only_training_measures_and_weight_0_adds_no_gradient(tmp_path: Path, world: World) -> None:
    model = loaded(write_family(tmp_path, "mixtral"))
    assert measured(model, 0.0, [slice(0, 4)], 50, world) > 0
    assert not any(gradient.any() for gradient in whole_gradients(model).values())
    assert measured(model.eval(), 0.25, [slice(0, 4)], 50, world) == 0


def test_weight_needs_routers(tmp_path: Path, world: World) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path, "llama"))
    assert not RouterBalance(model, 0.0, world)
    with pytest.raises(ConfigError, match=r"loss.router_weight.*mixture of experts.*0.5 with llama.*set it to 0"):
        RouterBalance(model, 0.5, world)
