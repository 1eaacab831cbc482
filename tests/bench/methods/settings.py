"""The settings that are compared: what a table changes in the configuration of its task, as on the command line.

Everything that a setting does not name is that of the task: models, data, order, steps, batch size, optimizer. The learning rate
is chosen from RATES for every setting alike, CE included.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

Overrides = tuple[str, ...]

RATES = (1e-3, 3e-3, 1e-2)
"""Peak learning rates, of which each setting gets the best on the first seed."""
ROWS = (125, 250, 500, 1000, 2000)
"""Training rows of the `clean` tasks."""
SEEDS = (0, 1, 2)
HALF, HALF_FROM_GEMMA, FROM_GEMMA, LANGUAGES = (
    "half of SmolLM2",
    "half of SmolLM2, from Gemma",
    "SmolLM2, from Gemma",
    "SmolLM2, from Gemma, other languages",
)
PRETRAINED: Mapping[str, float] = MappingProxyType(
    {HALF: 1e-3, HALF_FROM_GEMMA: 1e-3, FROM_GEMMA: 1e-4, LANGUAGES: 1e-4}
)
"""Task with pretrained models → its only rate; a training takes minutes. 1e-4 is what `distill-rl try` chooses for SmolLM2, and
1e-3 is better than 3e-4 for the half of it on the text alone."""
PRETRAINED_SEEDS = (0, 1)

CE: Overrides = ("loss.kd_weight=0", "loss.ce_weight=1")
"""The data alone. No teacher is started."""
_HALF_CE: Overrides = ("loss.kd_weight=0.5", "loss.ce_weight=0.5")
_LOGITS: Overrides = ("teachers.0.export=logits",)


def _top(k: int, tail: str) -> Overrides:
    return f"loss.top_k={k}", f"loss.tail={tail}"


def _divergence(name: str, beta: float | None = None) -> Overrides:
    return (*_LOGITS, f"loss.divergence={name}", *(() if beta is None else (f"loss.beta={beta}",)))


TARGETS: Mapping[str, Overrides] = MappingProxyType(
    {
        "all logits": _LOGITS,
        **{f"top {k}, {tail}": _top(k, tail) for k in (8, 32, 64) for tail in ("bucket", "truncate", "renormalize")},
        **{f"{n} draws": ("teachers.0.export=sampled", f"loss.draws={n}") for n in (8, 32)},
        "hidden states": ("teachers.0.export=hidden",),
    }
)
"""What the student sees of the teacher's distribution."""
DIVERGENCES: Mapping[str, Overrides] = MappingProxyType(
    {
        "reverse KL": _divergence("reverse_kl"),
        "JSD, β = 0.5": _divergence("jsd", 0.5),
        "skewed forward KL, α = 0.1": _divergence("skewed_forward_kl", 0.1),
        "skewed reverse KL, α = 0.1": _divergence("skewed_reverse_kl", 0.1),
        "TVD": _divergence("tvd"),
    }
)
"""On all logits; forward KL is `all logits`."""
MIXTURES: Mapping[str, Overrides] = MappingProxyType(
    {
        "all logits, T = 2": (*_LOGITS, "loss.temperature=2"),
        "top 32, bucket, T = 2": (*_top(32, "bucket"), "loss.temperature=2"),
        "0.9 KD + 0.1 CE": (*_LOGITS, "loss.kd_weight=0.9", "loss.ce_weight=0.1"),
        "0.5 KD + 0.5 CE": (*_LOGITS, *_HALF_CE),
        "KD + CE, dynamic scale": (*_LOGITS, "loss.ce_weight=1", "loss.dynamic_scale=on"),
    }
)
SAME_TOKENIZER: Mapping[str, Overrides] = MappingProxyType({"CE": CE, **TARGETS, **DIVERGENCES, **MIXTURES})


def _method(name: str, *more: str) -> Overrides:
    return f"loss.cross_tokenizer={name}", *more


_MEAN, _CHAIN = "loss.chunk_average=mean", "loss.chunk_average=chain"
_METHODS: Mapping[str, Overrides] = MappingProxyType(
    {
        "hybrid": _method("hybrid"),
        "alm": _method("alm"),
        "xtoken, mean": _method("xtoken", *_LOGITS, _MEAN),
        "xtoken, chain": _method("xtoken", *_LOGITS, _CHAIN),
        "xtoken, chain, learnt projection": _method("xtoken", *_LOGITS, _CHAIN, "projection.learnable=true"),
        "gold, mean": _method("gold", *_LOGITS, _MEAN),
        "gold, chain": _method("gold", *_LOGITS, _CHAIN),
        "hkl, mean": _method("hkl", *_LOGITS, _MEAN),
        "uld, mean": _method("uld", *_LOGITS, _MEAN),
        "uld, chain": _method("uld", *_LOGITS, _CHAIN),
        "strict": _method("strict", *_LOGITS),
    }
)
CE_45: Mapping[str, Overrides] = MappingProxyType({"CE, 45 steps": (*CE, "train.steps=45")})
CE_60: Mapping[str, Overrides] = MappingProxyType({"CE, 60 steps": (*CE, "train.steps=60")})
"""The text alone for about as long as 30 steps with SmolLM2 or with Gemma as the teacher take."""
PRETRAINED_TARGETS: Mapping[str, Overrides] = MappingProxyType(
    {
        "CE": CE,
        **CE_45,
        "top 16, bucket": _top(16, "bucket"),
        **{
            name: SAME_TOKENIZER[name]
            for name in ("top 64, bucket", "all logits", "hidden states", "reverse KL", "JSD, β = 0.5")
        },
    }
)
ACROSS_TOKENIZERS: Mapping[str, Overrides] = MappingProxyType(
    {"CE": CE, **_METHODS, **{f"{name} + CE": (*method, *_HALF_CE) for name, method in _METHODS.items()}}
)


def _likelihoods(tau: int) -> Mapping[str, Overrides]:
    return MappingProxyType({f"{name}, τ = {tau}": _method(name, f"loss.alm_tau={tau}") for name in ("hybrid", "alm")})


TAU_1, TAU_100 = _likelihoods(1), _likelihoods(100)
"""With the τ that the task's configuration does not have: questions have 1, as the quickstart, and texts 100."""
WIDE: Mapping[str, Overrides] = MappingProxyType({"hybrid, top 512": _method("hybrid", *_LOGITS, "loss.top_k=512")})
"""Whether `hybrid` lacks what stands outside its top k, on text where that is much."""


TRL = "trl."
"""How the overrides of a setting that TRL trained begin."""
TRL_COMMIT = "ab47e93a"
"""The commit whose benchmark trains with TRL."""


def is_trl(overrides: Overrides) -> bool:
    return any(override.startswith(TRL) for override in overrides)


def _trl(trainer: str, *options: str) -> Overrides:
    """One of TRL's trainers, off-policy; everything else as its documentation has it."""
    return tuple(f"{TRL}{option}" for option in (f'trainer="{trainer}"', "lmbda=0.0", *options))


_ULD, _HYBRID = "use_uld_loss=true", "uld_use_hybrid_loss=true"
_BAYESIAN = 'uld_token_merge_strategy="bayesian"'
_STOPS = "uld_skip_student_eos=false", "uld_skip_teacher_eos=false"
_TRL_HALF_CE = "uld_distillation_weight=0.5", "uld_crossentropy_weight=0.5"
PEERS: Mapping[str, Mapping[str, Overrides]] = MappingProxyType(
    {
        "gkd": {
            "TRL GKD, β = 0": _trl("gkd", "beta=0.0"),
            "TRL GKD, β = 0.5": _trl("gkd", "beta=0.5"),
            "ours, forward KL": _LOGITS,
            "ours, JSD, β = 0.5": _divergence("jsd", 0.5),
        },
        "gold": {
            "TRL GOLD, ULD": _trl("gold", _ULD),
            "TRL GOLD, hybrid": _trl("gold", _ULD, _HYBRID),
            "TRL GOLD, hybrid, β = 0": _trl("gold", _ULD, _HYBRID, "beta=0.0"),
            "TRL GOLD, hybrid, bayesian": _trl("gold", _ULD, _HYBRID, _BAYESIAN),
            "TRL GOLD, hybrid, β = 0, with stops": _trl("gold", _ULD, _HYBRID, "beta=0.0", *_STOPS),
            "TRL GOLD, hybrid, β = 0, bayesian, with stops": _trl(
                "gold", _ULD, _HYBRID, "beta=0.0", _BAYESIAN, *_STOPS
            ),
            "TRL GOLD, hybrid, β = 0 + CE": _trl("gold", _ULD, _HYBRID, "beta=0.0", *_TRL_HALF_CE),
            "TRL GOLD, hybrid, β = 0, bayesian + CE": _trl("gold", _ULD, _HYBRID, "beta=0.0", _BAYESIAN, *_TRL_HALF_CE),
            "ours, hybrid": _method("hybrid"),
            "ours, hybrid + CE": _method("hybrid", *_HALF_CE),
            "ours, gold + CE": (*_METHODS["gold, chain"], *_HALF_CE),
            "ours, gold": _METHODS["gold, chain"],
            "ours, uld": _METHODS["uld, chain"],
        },
    }
)
"""Trainer of TRL → its settings, and ours that are nearest to them."""
