"""Which attention a model takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AfmoeConfig,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    GPTJConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
)

from distill_rl.config.schema import StudentConfig, TeacherConfig
from distill_rl.errors import ConfigError
from distill_rl.models import attention
from distill_rl.models.attention import ON_CPU, OURS, SPREAD, VARLEN, ChosenAttention, choose

LLAMA = LlamaConfig(hidden_size=512, num_attention_heads=8)
ODD_HEADS = LlamaConfig(hidden_size=80, num_attention_heads=8)
WIDE_HEADS = LlamaConfig(hidden_size=512, num_attention_heads=8, head_dim=512)


def chosen(asked: str, config: Any, *, dtype: str = "bf16", training: bool = True, **facts: Any) -> ChosenAttention:
    """On a GPU without flash_attn, in bf16, unless the facts say otherwise."""
    settings = (StudentConfig if training else TeacherConfig)(model="m", attention=asked, dtype=dtype)
    return choose(settings, config, **{"packing": True, "no_kernel": None} | facts)


SINKS = GptOssConfig()
CHUNKS = Llama4TextConfig(attention_chunk_size=8)


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    there: set[str] = set()
    monkeypatch.setattr(attention, "installed", lambda name: name in there)
    return there


@pytest.mark.parametrize("asked", ["sdpa", "eager", "flash_attention_2", VARLEN["torch"]])
def test_named_implementation_is_taken(asked: str) -> None:
    assert chosen(asked, LLAMA, no_kernel=ON_CPU).implementation == asked


@pytest.mark.parametrize(
    ("config", "facts", "wanted", "why"),
    [
        (LLAMA, {}, VARLEN["torch"], "variable-length kernels of torch"),
        (MistralConfig(sliding_window=64), {}, VARLEN["torch"], "variable-length"),
        (LLAMA, {"no_kernel": ON_CPU}, "sdpa", "sdpa"),
        (Gemma2Config(), {"no_kernel": ON_CPU}, "eager", "soft cap"),
        (Gemma2Config(), {}, "eager", "soft cap"),
        (LLAMA, {"dtype": "fp32"}, "sdpa", "not in fp32"),
        (LLAMA, {"dtype": "fp32", "packing": False}, VARLEN["torch"], "every row is one document"),
        (MistralConfig(sliding_window=64), {"dtype": "fp32", "packing": False}, "sdpa", "not in fp32"),
        (MistralConfig(sliding_window=None), {"dtype": "fp32", "packing": False}, VARLEN["torch"], "one document"),
        (ODD_HEADS, {}, "sdpa", "not of 10"),
        (WIDE_HEADS, {}, "sdpa", "not of 512"),
        (GPT2Config(), {}, "sdpa", "attention dropout, the model's is 0.1"),
        (GPT2Config(), {"training": False}, VARLEN["torch"], "variable-length"),
        (OPTConfig(), {"training": False}, "sdpa", "not proven"),
        (LLAMA, {"no_kernel": "the GPU is old"}, "sdpa", "the GPU is old"),
        (GPTJConfig(), {"no_kernel": ON_CPU}, "eager", "no sdpa attention for gptj"),
        (GPTJConfig(), {}, "eager", "no sdpa attention for gptj; the family is not proven"),
    ],
)
def test_auto_depends_on_device_dtype_and_model(config: Any, facts: dict, wanted: str, why: str) -> None:
    choice = chosen("auto", config, **facts)
    assert choice.implementation == wanted
    assert why in choice.why


@pytest.mark.parametrize("config", [LLAMA, Gemma2Config(), GPT2Config()], ids=["llama", "gemma2", "gpt2"])
def test_flash_attn_is_preferred_and_supports_more(config: Any, packages: set[str]) -> None:
    packages.add("flash_attn")
    for asked in ("auto", "varlen"):
        assert chosen(asked, config).implementation == VARLEN["flash_attn"]
    assert chosen("auto", LLAMA, dtype="fp32").implementation == "sdpa"


def test_varlen_takes_kernels_or_fails() -> None:
    assert chosen("varlen", LLAMA).implementation == VARLEN["torch"]
    for config, facts, why in (
        (LLAMA, {"no_kernel": ON_CPU}, "on GPUs only"),
        (LLAMA, {"dtype": "fp32"}, "not in fp32"),
        (Gemma2Config(), {}, "soft cap"),
    ):
        with pytest.raises(ConfigError, match=f"student.attention: .*{why}.*set it to auto"):
            chosen("varlen", config, **facts)


def test_divided_rows_take_attention_of_this_package(packages: set[str]) -> None:
    def name(asked: str, **facts: Any) -> str:
        return chosen(asked, LLAMA, spread=True, **facts).implementation

    assert {name(asked, no_kernel=ON_CPU) for asked in ("auto", "sdpa", "eager")} == {SPREAD["sdpa"]}
    assert name("auto") == name("varlen") == SPREAD["torch"]
    assert name("auto", dtype="fp32") == name("sdpa") == SPREAD["sdpa"]
    with pytest.raises(ConfigError, match=r"student\.attention: flash_attn is not installed; got flash_attention_2"):
        name("flash_attention_2")
    packages.add("flash_attn")
    assert name("auto") == name("flash_attention_2") == SPREAD["flash_attn"]


@pytest.mark.parametrize(
    ("asked", "config", "rule"),
    [
        (
            "sdpa",
            Gemma2Config(),
            "sdpa has no soft cap on attention scores, which the model needs (attn_logit_softcapping=50)",
        ),
        ("flash_attention_2", SINKS, "FlashAttention's kernels cannot compute the attention sinks of gpt_oss"),
        (
            "flash_attention_2",
            CHUNKS,
            "FlashAttention's kernels cannot keep to the chunks of 8 positions of llama4_text (attention_chunk_size)",
        ),
        (
            "flash_attention_2",
            WIDE_HEADS,
            "FlashAttention's kernels support heads of a multiple of 8 features up to 256, not of 512",
        ),
        ("varlen", SINKS, "torch's kernels cannot compute the attention sinks of gpt_oss"),
        (
            "varlen",
            AfmoeConfig(sliding_window=64),
            "torch's kernels would not be told the window of 64 positions of afmoe (sliding_window)",
        ),
        (
            "varlen",
            DeepseekV3Config(),
            "torch's kernels support heads of one size, not queries of 192 and values of 128 features",
        ),
    ],
)
def test_what_does_not_compute_the_model_is_refused_by_name(asked: str, config: Any, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        chosen(asked, config)
    assert caught.value.problems == (f"student.attention: {rule}; got {asked}; set it to auto",)
    with pytest.raises(ConfigError, match=r"^teachers\[\]\.attention: "):
        chosen(asked, config, training=False)


@pytest.mark.parametrize("config", [SINKS, CHUNKS])
def test_rows_are_not_divided_where_attention_of_this_package_does_not_fit(config: Any) -> None:
    with pytest.raises(ConfigError, match=r"^student\.parallel\.sp: must be 1: attention over divided rows cannot"):
        chosen("auto", config, spread=True)


@pytest.mark.parametrize("config", [Gemma2Config(), SINKS, CHUNKS, DeepseekV3Config(), WIDE_HEADS, LLAMA])
def test_eager_computes_everything(config: Any) -> None:
    assert chosen("eager", config).implementation == "eager"


def test_registered_names_are_opaque_to_transformers() -> None:
    assert not any(word in name for name in OURS for word in ("flash", "sdpa", "/", "paged"))


def test_choosing_attention_does_not_import_torch(tmp_path: Path) -> None:
    code = "import sys, distill_rl.models.attention; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=tmp_path).returncode == 0
