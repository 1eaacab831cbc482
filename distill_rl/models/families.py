"""What differs between model families: tensor-parallel plans, sizes, kernels of the liger-kernel package.

Nothing here imports torch at run time, so that `check` can judge a plan before a model exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distill_rl.errors import ConfigError, problem
from distill_rl.system.environment import install_extra

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel


LIGER = ("llama", "mistral", "qwen2", "qwen3")
"""Model types for which `liger_kernel.transformers` has a function that replaces RMSNorm, rotary embedding and SwiGLU."""

COLUMN, ROW, REPLICATED, PER_HEAD = "column", "row", "replicated", "per_head"
"""How a module is split: by output features; by input features; not at all; not at all, but each rank applies it to its
own heads only, so that its gradient is the sum over the ranks."""
GATHERED, SLICED = "gathered", "sliced"
"""By output features, which are then gathered on every rank; by input features, of which every rank takes its part.

Between such a pair every rank computes the same. For projections that fuse several into one (queries, keys and values):
their contiguous parts are not whole heads, and any other division would have to be undone for every checkpoint and export.
"""
WHOLE = "whole"
"""Not at all, in a module of any kind, such as the router or the experts of a mixture."""
EMBEDDING, HEAD = "embedding", "head"
"""A table split by rows; the output layer, split by columns of the logits, which are not gathered."""

_TRANSFORMERS_STYLES = {
    "colwise": COLUMN,
    "rowwise": ROW,
    "colwise_gather_output": GATHERED,
    "rowwise_split_input": SLICED,
    "replicated_with_grad_allreduce": PER_HEAD,
}
"""By its name in transformers' plans, how a module is split; modules with other styles are not."""

_LLAMA_LAYER = {
    "input_layernorm": REPLICATED,
    "self_attn.q_proj": COLUMN,
    "self_attn.k_proj": COLUMN,
    "self_attn.v_proj": COLUMN,
    "self_attn.o_proj": ROW,
    "post_attention_layernorm": REPLICATED,
    "mlp.gate_proj": COLUMN,
    "mlp.up_proj": COLUMN,
    "mlp.down_proj": ROW,
}
_PHI3_LAYER = {
    "input_layernorm": REPLICATED,
    "self_attn.qkv_proj": GATHERED,
    "self_attn.o_proj": SLICED,
    "post_attention_layernorm": REPLICATED,
    "mlp.gate_up_proj": GATHERED,
    "mlp.down_proj": SLICED,
}
_GPT2_LAYER = {
    "ln_1": REPLICATED,
    "attn.c_attn": GATHERED,
    "attn.c_proj": SLICED,
    "ln_2": REPLICATED,
    "mlp.c_fc": COLUMN,
    "mlp.c_proj": ROW,
}
_LLAMA_OUTER = {"model.embed_tokens": EMBEDDING, "model.norm": REPLICATED, "lm_head": HEAD}
_GPT2_OUTER = {
    "transformer.wte": EMBEDDING,
    "transformer.wpe": REPLICATED,
    "transformer.ln_f": REPLICATED,
    "lm_head": HEAD,
}
_QWEN3_LAYER = {**_LLAMA_LAYER, "self_attn.q_norm": PER_HEAD, "self_attn.k_norm": PER_HEAD}


@dataclass(frozen=True)
class Family:
    """A model type of transformers."""

    name: str
    layer_plan: Mapping[str, str] = field(default_factory=dict)
    """How the modules of a decoder layer are split over tensor-parallel ranks. Empty: as `transformers_plan` says."""
    outer_plan: Mapping[str, str] = field(default_factory=lambda: _LLAMA_OUTER)
    """The same for the modules around the layers."""
    proven: bool = False
    """Whether this package's tests cover packing and the head of the family."""
    learned_positions: bool = False
    """Whether a table has a row per position."""


_KNOWN = (
    Family("llama", _LLAMA_LAYER, proven=True),
    Family("mistral", _LLAMA_LAYER, proven=True),
    Family("qwen2", _LLAMA_LAYER, proven=True),
    Family("qwen3", _QWEN3_LAYER, proven=True),
    Family("gpt2", _GPT2_LAYER, _GPT2_OUTER, proven=True, learned_positions=True),
    Family("phi3", _PHI3_LAYER, proven=True),
    Family("gemma2", proven=True),
    Family("granite", proven=True),
    Family("cohere", proven=True),
)
_FAMILIES = {family.name: family for family in _KNOWN}


def family_of(hf_config: PreTrainedConfig) -> Family:
    """The family of a model, by its `model_type`. One unknown to this package has no plan and is not proven."""
    return _FAMILIES.get(hf_config.model_type) or Family(hf_config.model_type)


def transformers_plan(hf_config: PreTrainedConfig) -> dict[str, str]:
    """How transformers would split the modules of a decoder layer, for a family without a plan here; empty if it has none.

    Modules that it does not name are whole on every rank, and so are those that it splits in ways that are not known here,
    such as experts. A layer need not have all of the modules.
    """
    plan = getattr(hf_config, "base_model_tp_plan", None) or {}
    names = ((name.partition(".*.")[2], _TRANSFORMERS_STYLES.get(style)) for name, style in plan.items())
    return {name: kind for name, kind in names if name and kind}


def fused_loss_problems(hf_config: PreTrainedConfig) -> list[str]:
    """Why `loss.fused: on` cannot train this model, as one line; empty if it can."""
    if family_of(hf_config).proven:
        return []
    known = ", ".join(sorted(family.name for family in _FAMILIES.values() if family.proven))
    rule = f"on needs a student whose output layer is known, one of {known}"
    return [problem("loss.fused", rule, hf_config.model_type, "leave it to auto")]


def tensor_parallel_problems(hf_config: PreTrainedConfig, tp: int, setting: str = "parallel.tp") -> list[str]:
    """Why this model cannot be split over `tp` ranks, one line each; empty if it can.

    The vocabulary need not be divisible, because its shards may be uneven.

    Args:
        setting: what the number of ranks is called in the lines.
    """
    if tp == 1:
        return []
    family = family_of(hf_config)
    plan = family.layer_plan or transformers_plan(hf_config)
    if not plan:
        return [f"model family {family.name} has no tensor-parallel plan, here or in transformers; set {setting}: 1"]
    sizes = _split_sizes(hf_config, by_heads=_splits_heads(plan))
    return [_uneven(count, what, tp, setting) for what, count in sizes.items() if count % tp]


def sequence_parallel_problems(hf_config: PreTrainedConfig, sp: int, tp: int, setting: str) -> list[str]:
    """Why the positions of this model's rows cannot be divided over `sp` ranks, one line each; empty if they can.

    Attention exchanges positions for heads, so every tensor-parallel rank must be able to divide its query heads.
    Key-value heads need not be divisible, because they are repeated. Whether the family passes on what attention needs
    for that is tried when a model of an unproven one is loaded.

    Args:
        tp: tensor-parallel size, which divides the heads first.
        setting: what the number of ranks is called in the lines.
    """
    if sp == 1:
        return []
    if (limit := length_limit(hf_config)) is not None:
        why = f"rotary frequencies of type {limit.kind} follow from a document's length"
        rule = f"{why}, and no rank sees whole documents"
        return [problem(setting, rule, sp, f"set {setting}=1")]
    by_heads = tp > 1 and _splits_heads(family_of(hf_config).layer_plan or transformers_plan(hf_config))
    heads = hf_config.num_attention_heads // (tp if by_heads else 1)
    if heads % sp == 0:
        return []
    possible = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
    what = f"{heads} attention heads" + (f" of each of {tp} tensor-parallel ranks" if by_heads else "")
    return [problem(setting, f"must divide the model's {what}", sp, f"use one of {possible}")]


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer; routers derive from `nn.Linear`, too, and return more than a product."""
    return type(module).__name__ in ("Linear", "Conv1D", "FalconLinear")


def _splits_heads(plan: Mapping[str, str]) -> bool:
    """Whether each tensor-parallel rank computes some of the attention heads; otherwise every rank computes all."""
    return any(kind == COLUMN and ("attn" in name or "attention" in name) for name, kind in plan.items())


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """Up to which length a model has the rotary frequencies of its pretraining; those of longer texts are others."""

    kind: str
    """`longrope`: all longer texts have the same frequencies. `dynamic`: they follow from the length."""
    length: int
    """Tokens."""
    longest: int
    """Most tokens for which the frequencies are made."""


def length_limit(hf_config: PreTrainedConfig) -> LengthLimit | None:
    """The limit of a model whose rotary frequencies depend on the length of the text; None for all others."""
    config: Any = hf_config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    # One set of parameters, or one per type of layer.
    sets = [each for each in parameters.values() if isinstance(each, Mapping)] or [parameters]
    limits = []
    for each in sets:
        positions = int(getattr(config, "max_position_embeddings", 0) or 0)
        if each.get("rope_type") == "longrope":
            limits.append(LengthLimit("longrope", int(each["original_max_position_embeddings"]), positions))
        elif each.get("rope_type") == "dynamic":
            limits.append(LengthLimit("dynamic", positions, int(positions * each["factor"])))
    return min(limits, key=lambda limit: limit.length, default=None)


def engine_length_problem(hf_config: PreTrainedConfig, engine: str, longest: int, context: int) -> str | None:
    """Why an inference engine with one set of rotary frequencies for all texts would compute other logits than the model.

    It takes the set by the length of its context: for `longrope` that of long texts if the context is longer than the
    limit, for `dynamic` one that suits no length.

    Args:
        engine: what it is called in the line.
        longest: most tokens of a text.
        context: most tokens that the engine takes, those that it generates included.

    Returns:
        The rule that is broken, without a remedy; None if the frequencies are right for all texts.
    """
    limit = length_limit(hf_config)
    if limit is None or (limit.kind == "longrope" and context <= limit.length):
        return None
    if limit.kind == "dynamic":
        return f"{engine} has one set of rotary frequencies, while those of the model (dynamic) follow from each text's length"
    where = f"texts of {longest:,} tokens" if longest >= limit.length else f"a context of {context:,} tokens"
    return (
        f"{engine} has one set of rotary frequencies, with {where} that of long texts, "
        f"while texts of up to {limit.length:,} tokens have another one (longrope)"
    )


def split_problems(hf_config: PreTrainedConfig, tp: int, *, backend: str, setting: str) -> list[str]:
    """Why a backend cannot split this model over `tp` ranks, one line each; empty if it can.

    Of an engine, which has plans of its own and repeats key-value heads, only the number of attention heads is known.

    Args:
        setting: what the number of ranks is called in the lines.
    """
    if backend == "hf":
        return tensor_parallel_problems(hf_config, tp, setting)
    heads = getattr(hf_config, "num_attention_heads", 0)
    return [_uneven(heads, "attention heads", tp, setting)] if heads % tp else []


def _uneven(count: int, what: str, tp: int, setting: str) -> str:
    remainder = f"{count} = {count // tp} * {tp} + {count % tp}"
    return f"{count} {what} cannot be split evenly over {setting} = {tp}: {remainder}"


def _split_sizes(hf_config: PreTrainedConfig, *, by_heads: bool) -> dict[str, int]:
    """The sizes that a plan divides by the number of ranks, by what they are called in messages."""
    heads = hf_config.num_attention_heads
    key_value_heads = getattr(hf_config, "num_key_value_heads", None) or heads
    if by_heads:
        attention = {"attention heads": heads, "key-value heads": key_value_heads}
    else:
        size = head_size(hf_config) or 0
        fused = (heads + 2 * key_value_heads) * size
        attention = {"query, key and value features": fused, "attention features": heads * size}
    return {**attention, "intermediate features": intermediate_size(hf_config)}


def intermediate_size(hf_config: PreTrainedConfig) -> int:
    """The width of a model's MLP, under whichever name its config has it; 4 · hidden size if it has none."""
    config: Any = hf_config
    return int(getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size)


def visited_intermediate_size(hf_config: PreTrainedConfig) -> int:
    """The width of all MLPs of a layer together that a token visits: its experts, shared ones included, or the only one.

    In a mixture of experts the layers that are dense do not count.
    """
    config: Any = hf_config
    one, visited = intermediate_size(config), experts_per_token(config)
    if not visited:
        return one
    expert = int(getattr(config, "moe_intermediate_size", None) or one)
    shared = getattr(config, "shared_expert_intermediate_size", None)
    if shared is None:
        shared = expert * int(getattr(config, "n_shared_experts", None) or config.model_type == "llama4_text")
    return visited * expert + int(shared)


def experts_per_token(hf_config: PreTrainedConfig) -> int:
    """Routed experts that a token visits in a layer; 0 for a dense model."""
    return int(getattr(hf_config, "num_experts_per_tok", None) or getattr(hf_config, "moe_k", None) or 0)


def num_experts(hf_config: PreTrainedConfig) -> int:
    """Experts among which a layer's router chooses, under whichever name the config has it; 0 for a dense model."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((int(value) for name in names if (value := getattr(hf_config, name, None))), 0)


def head_size(hf_config: PreTrainedConfig) -> int | None:
    """Features per attention head; None for a model without attention."""
    config: Any = hf_config
    heads = getattr(config, "num_attention_heads", None)
    return getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else None)


def is_decayed(name: str, dims: int) -> bool:
    """Whether weight decay applies to a tensor: to matrices of linear layers, experts, convolutions and embeddings.

    It does not to norms, biases and the decay rates of states, some of which have several dimensions: Cohere's norms of
    queries and keys have one vector per head, and GPT-OSS has one bias per expert.

    Args:
        name: in a model or in its files; its last part is the tensor's role, the part before is the owner.
    """
    *above, role = name.split(".")
    if above[-2:] == ["modules_to_save", "default"]:  # PEFT's copy of a module that is trained whole
        above = above[:-2]
    owner = above[-1] if above else ""
    return dims > 1 and "norm" not in owner and "bias" not in role and role != "A_log"


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks of the model, in order: the unit of checkpointing, compilation and sharding."""
    block_names = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in block_names]
    inside = {id(child) for block in blocks for child in block.modules() if child is not block}
    return [block for block in blocks if id(block) not in inside]


def liger_problems(hf_config: Any) -> list[str]:
    """Returns why a model's config rules out `student.kernels: liger`: one line, or an empty list if nothing does.

    Looks at `model_type` and `hidden_act` only, not at whether liger is installed.
    """
    if hf_config.model_type not in LIGER:
        return [f"liger replaces parts of {', '.join(LIGER)}; got {hf_config.model_type}"]
    if hf_config.hidden_act not in ("silu", "swish"):
        return [f"liger's MLP needs hidden_act silu; got {hf_config.hidden_act}"]
    return []


def use_liger(model: PreTrainedModel) -> None:
    """Makes `model` compute RMSNorm, rotary embedding and SwiGLU with liger's Triton kernels. Its loss is not changed.

    Norms and MLPs get another `forward` and keep their parameters, so this works before or after FSDP2 and on the meta
    device. The rotary embedding is a function in transformers' module of the family, so it is replaced for all models
    of that family in this process.

    Raises:
        ConfigError: the package or triton is missing, or there are no kernels for this model (`liger_problems`).
    """
    if problems := liger_problems(model.config):
        raise ConfigError.many([f"student.kernels: {problem}; set student.kernels=torch" for problem in problems])
    try:
        from liger_kernel import transformers as liger
    except ImportError as error:
        remedy = f"{install_extra('liger')}, or set student.kernels=torch"
        raise ConfigError("student.kernels", "liger needs liger_kernel and triton", str(error), remedy) from error
    getattr(liger, f"apply_liger_kernel_to_{model.config.model_type}")(
        rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False, model=model
    )
