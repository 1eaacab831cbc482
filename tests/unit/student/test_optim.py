from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import nn

from distill_rl.config.schema import OptimizerConfig, ScheduleConfig
from distill_rl.models.weights import skeleton
from distill_rl.student.optim import Schedule, build_optimizer, clip_gradients
from tests.helpers.zoo import DENSE, MIXTURES, family_config


def rates(last: int, total: int, **settings) -> list[float]:
    schedule = Schedule(ScheduleConfig(**settings), peak=2.0, total_steps=total)
    return [schedule(step) for step in range(1, last + 1)]


def test_warm_up_rises_linearly_from_the_first_step():
    assert rates(5, 100, warmup_steps=4) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


def test_cosine_falls_to_the_minimum_at_the_horizon():
    got = rates(12, 10, kind="cosine", min_lr_ratio=0.1)
    want = [2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * i / 10)) / 2) for i in range(10)] + [0.2, 0.2]
    assert got == pytest.approx(want)


def test_linear_falls_evenly_and_never_reaches_zero():
    assert rates(5, 4, kind="linear") == pytest.approx([2.0, 1.5, 1.0, 0.5, 0.0])


def test_constant_stays_at_the_peak():
    assert rates(6, 4, kind="constant", warmup_steps=2) == pytest.approx([1.0, 2.0, 2.0, 2.0, 2.0, 2.0])


def test_the_rate_is_held_at_the_peak_before_it_falls():
    held = rates(12, 12, kind="linear", warmup_steps=2, hold_steps=4)
    assert held == pytest.approx([1.0, *[2.0] * 6, *(2.0 * (1 - i / 6) for i in range(1, 6))])


def test_a_run_without_a_known_end_stays_at_the_peak():
    assert rates(5000, sys.maxsize, warmup_steps=2, min_lr_ratio=0.3)[2:] == [rates(3, 5, min_lr_ratio=0.3)[0]] * 4998


def test_warm_up_longer_than_the_run_takes_a_tenth_of_it():
    assert rates(3, 3, kind="constant", warmup_steps=10) == pytest.approx([2.0, 2.0, 2.0])
    assert rates(4, 20, kind="constant", warmup_steps=21) == pytest.approx([1.0, 2.0, 2.0, 2.0])
    assert rates(3, 10, warmup_steps=10) == pytest.approx([0.2, 0.4, 0.6]), "one that fits is left alone"


def test_extended_run_has_the_warm_up_of_the_longer_run():
    assert rates(30, 30, warmup_steps=25)[3:] == pytest.approx(
        [2.0 * step / 25 for step in range(4, 26)] + rates(30, 30, warmup_steps=25)[25:]
    )


def test_extended_run_with_fixed_horizon_keeps_rates():
    assert rates(8, 8, steps=8) == rates(8, 16, steps=8)
    assert rates(16, 16, steps=8, min_lr_ratio=0.25)[8:] == pytest.approx([0.5] * 8)


def test_extended_run_without_horizon_follows_longer_run():
    longer = rates(16, 16)
    assert longer[7] > rates(8, 8)[7]
    assert longer == rates(16, 16, steps=16)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))


# The last two parts of every name.
DECAYED = """
    c_attn.weight c_fc.weight c_proj.weight dense.weight dense_4h_to_h.weight dense_h_to_4h.weight down_proj.weight
    embed_in.weight embed_positions.weight embed_tokens.weight experts.down_proj experts.gate_up_proj fc1.weight fc2.weight
    fc_in.weight fc_out.weight gate.weight gate_proj.weight gate_up_proj.weight k_proj.weight kv_a_proj_with_mqa.weight
    kv_b_proj.weight lm_head.weight embed_out.weight o_proj.weight out_proj.weight q_a_proj.weight q_b_proj.weight
    q_proj.weight qkv_proj.weight query_key_value.weight router.weight shared_expert_gate.weight up_proj.weight v_proj.weight
    word_embeddings.weight wpe.weight wte.weight
"""
PLAIN = """
    act_fn.alpha_n act_fn.alpha_p attention_layernorm.weight attn_sub_norm.weight c_attn.bias c_fc.bias c_proj.bias
    dense.bias dense_4h_to_h.bias dense_h_to_4h.bias experts.down_proj_bias experts.gate_up_proj_bias fc1.bias fc2.bias
    fc_in.bias fc_out.bias feedforward_layernorm.weight ffn_sub_norm.weight final_layer_norm.bias final_layer_norm.weight
    final_layernorm.bias final_layernorm.weight input_layernorm.bias input_layernorm.weight k_norm.weight k_proj.bias
    kv_a_layernorm.weight lm_head.bias ln_1.bias ln_1.weight ln_2.bias ln_2.weight ln_attn.bias ln_attn.weight ln_f.bias
    ln_f.weight ln_mlp.bias ln_mlp.weight norm.bias norm.weight o_proj.bias out_proj.bias post_attention_layernorm.bias
    post_attention_layernorm.weight post_feedforward_layernorm.weight post_mlp_layernorm.weight
    post_self_attn_layernorm.weight pre_feedforward_layernorm.weight q_a_layernorm.weight q_norm.weight q_proj.bias
    query_key_value.bias router.bias self_attn.sinks self_attn_layer_norm.bias self_attn_layer_norm.weight v_proj.bias
"""


@pytest.mark.parametrize("owned", [{}, {"use_qk_norm": True}], ids=["", "cohere-q-norm"])
def test_decay_goes_by_owner_and_role_in_every_family(owned: dict[str, bool]):
    optimizer = OptimizerConfig(weight_decay=0.1)
    for family in ["cohere"] if owned else [*DENSE, *MIXTURES]:
        model = skeleton(family_config(family, **owned), dtype=torch.float32, attention="eager")
        by_decay = {group["weight_decay"]: group["params"] for group in build_optimizer(model, optimizer).param_groups}
        for name, parameter in model.named_parameters():
            end = ".".join(name.split(".")[-2:])
            where = [any(parameter is each for each in by_decay.get(decay, ())) for decay in (0.1, 0.0)]
            assert where == [end in DECAYED.split(), end in PLAIN.split()], (family, name)


def test_decay_applies_to_matrices_only():
    model = small_model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.5, weight_decay=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 0.95 if parameter.ndim > 1 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_early_optimizer_state_does_not_change_adamw():
    config = OptimizerConfig(lr=1e-2, betas=[0.8, 0.9], eps=1e-6, weight_decay=0.3)
    ours, plain = small_model(), small_model()
    optimizer = build_optimizer(ours, config)
    assert all(set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"} for p in ours.parameters())
    groups = [
        {"params": [p for p in plain.parameters() if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in plain.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, foreach=False)
    for seed in range(3):
        inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
        for model, stepper in ((ours, optimizer), (plain, reference)):
            stepper.zero_grad()
            model(inputs).square().sum().backward()
            stepper.step()
    for a, b in zip(ours.parameters(), plain.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_frozen_parameters_are_not_optimized():
    model = small_model()
    model[0].weight.requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerConfig())
    assert all(p is not model[0].weight for group in optimizer.param_groups for p in group["params"])


@pytest.mark.parametrize(("limit", "factor"), [(2.5, 0.5), (5.0, 1.0), (100.0, 1.0), (0.0, 1.0)])
def test_clipping_scales_all_gradients_by_one_factor(limit: float, factor: float):
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, 1)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([0.0, 3.0]), torch.tensor([[4.0], [0.0]])
    assert clip_gradients(parameters, limit).item() == pytest.approx(5.0)
    torch.testing.assert_close(parameters[0].grad, torch.tensor([0.0, 3.0]) * factor)
    torch.testing.assert_close(parameters[1].grad, torch.tensor([[4.0], [0.0]]) * factor)


def test_norm_of_a_gradient_with_a_nan_is_nan():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, float("nan")])
    assert math.isnan(clip_gradients([parameter], 1.0).item())


def gradients_of(model: nn.Module, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=draw)


def test_fused_and_foreach_take_the_same_steps():
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1)
    models = {fused: small_model() for fused in (False, True)}
    for fused, model in models.items():
        optimizer = build_optimizer(model, config, fused=fused)
        assert {group["fused"] for group in optimizer.param_groups} == {fused}
        assert all(group["foreach"] != fused for group in optimizer.param_groups)
        for seed in range(5):
            gradients_of(model, seed)
            optimizer.step()
        assert {state["step"].item() for state in optimizer.state.values()} == {5.0}
        assert {state["step"].dtype for state in optimizer.state.values()} == {torch.float32}
    for ours, theirs in zip(models[False].parameters(), models[True].parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
