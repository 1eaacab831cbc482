"""Documents packed beyond the numbers of a configuration, such as windows, chunks and floors, are right or refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from distill_rl.errors import ConfigError
from distill_rl.models import forward
from distill_rl.models.checks import SCALED_BEYOND, numbers_of, with_numbers
from distill_rl.parallel.mesh import World
from tests.helpers.engines import relative_l2
from tests.helpers.load import load_model
from tests.helpers.zoo import DENSE, MIXTURES, UNLISTED, family_config, write_family

N = 8
RIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    **dict.fromkeys(
        ("cohere2", "exaone4", "gemma2", "gemma3_text", "gemma4_text", "ministral"), ("sliding_window", {})
    ),
    **dict.fromkeys(("mistral", "olmo3", "phi3", "starcoder2"), ("sliding_window", {})),
    "deepseek_v32": ("index_topk", {}),
    "doge": ("keep_window_size", {}),
    "ministral3": (SCALED_BEYOND, {}),
    "modernbert-decoder": ("local_attention", {}),
    "qwen3": ("sliding_window", {"use_sliding_window": True, "max_window_layers": 1}),
}
"""Families with another computation beyond a number of tokens of a document: what it is called, and further settings."""
_LLAMA4 = {"attn_scale": 0.1, "no_rope_layers": [1, 0], "intermediate_size_mlp": 64}
COUNTED = {
    "llama4's chunks": ("llama4_text", "attention_chunk_size", _LLAMA4),
    "llama4's temperature": ("llama4_text", "floor_scale", _LLAMA4),
    "minimax_m3's blocks": ("minimax_m3_vl_text", "index_block_size", {"index_topk_blocks": 1}),
}
"""The same beyond a number of tokens of a row."""
RULE = r"packed documents must not depend on the rest of their row; got they do in rows beyond {}; set data\.packing: false"


def with_number(name: str, number: int, others: dict[str, Any]) -> dict[str, Any]:
    """Settings of a configuration by which the number that has this name is `number`."""
    if name == SCALED_BEYOND:
        rope = {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1, SCALED_BEYOND: number}
        return {"rope_parameters": rope, **others}
    return {name: 2 * number if name == "local_attention" else number, **others}


def parts(packs: Sequence[Sequence[int]]) -> list[list[Tensor]]:
    """Ids of documents of these lengths, row by row. None occurs twice: Doge's scores of equal tokens are equal, and it
    takes any of those."""
    draw = torch.Generator().manual_seed(0)
    return [[3 + torch.randperm(297, generator=draw)[:length] for length in row] for row in packs]


def laid_out(rows: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
    """Ids and positions [R, S] of rows of documents; the padding at a row's end continues its last document."""
    width = max(sum(map(len, row)) for row in rows)
    ids, positions = torch.full((len(rows), width), 2), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        at = 0
        for document in row:
            ids[i, at : at + len(document)] = document
            positions[i, at:] = torch.arange(width - at)
            at += len(document)
    return ids, positions


def of_documents(rows: Sequence[Sequence[Tensor]], logits: Tensor) -> Tensor:
    """The logits [T, V] of the documents of some rows, one after another."""
    return torch.cat([row[: sum(map(len, documents))] for documents, row in zip(rows, logits, strict=True)])


def differences(path: Path, student: Any, packs: Sequence[Sequence[int]], micro_batch: int) -> tuple[float, float]:
    """How far a student is from Transformers on each document alone, in eager attention and fp32.

    Returns the largest error of a logit as a share of the largest logit, and the relative L2 error of the gradient.
    """
    rows = parts(packs)
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    wanted = torch.cat([plain(input_ids=one[None], use_cache=False).logits[0] for row in rows for one in row])
    wanted.log_softmax(-1)[:, 7].sum().backward()
    student.eval().zero_grad()
    found = []
    for i in range(0, len(rows), micro_batch):
        logits = forward.logits(student, *laid_out(rows[i : i + micro_batch]))
        found.append(of_documents(rows[i : i + micro_batch], logits))
        found[-1].log_softmax(-1)[:, 7].sum().backward()
    error = (torch.cat(found) - wanted).abs().max() / wanted.abs().max()
    gradients: list[dict[str, Tensor]] = []
    for model in (student, plain):
        named = ((name, each.grad) for name, each in model.named_parameters() if each.grad is not None)
        gradients.append({name: getattr(grad, "full_tensor", lambda grad=grad: grad)() for name, grad in named})
    return error.item(), relative_l2(*gradients)


@pytest.mark.parametrize("attention", ["auto", "eager"])
@pytest.mark.parametrize("family", RIGHT)
def test_packed_documents_beyond_a_number_are_as_alone(
    tmp_path: Path, world: World, family: str, attention: str
) -> None:
    if family == "doge" and transformers.__version__ < "5.19":
        pytest.skip("in this release of transformers packed documents see each other in doge")
    name, others = RIGHT[family]
    path = write_family(tmp_path, family, **with_number(name, N, others))
    student = load_model(path, world, role="student", dtype="fp32", attention=attention, longest=None)
    packs = [(7, 21, 4, 12), (12, 30), (21, 7, 16), (44,)]
    for micro_batch in (1, 4):
        assert max(differences(path, student, packs, micro_batch)) < 1e-5
    load_model(path, world, role="student", dtype="bf16", longest=None)  # nor does rounding look like a fault


@pytest.mark.parametrize("case", COUNTED)
def test_rows_beyond_a_number_that_counts_in_the_row_are_refused(tmp_path: Path, world: World, case: str) -> None:
    family, name, others = COUNTED[case]
    path, longest = write_family(tmp_path, family, **with_number(name, N, others)), N - (name == "floor_scale")
    for beyond in (longest + 1, None):
        for dtype in ("fp32", "bf16"):
            with pytest.raises(ConfigError, match=RULE.format(f".*{name}={N}.*")):
                load_model(path, world, role="teacher", dtype=dtype, longest=beyond)
    packed = load_model(path, world, role="student", dtype="fp32", longest=longest)
    single = load_model(path, world, role="student", dtype="fp32", packing=False)
    for micro_batch in (1, 4):
        packs = [(3, longest - 3), (longest - 3, 3), (longest,), (2, 3, 1)]
        assert max(differences(path, packed, packs, micro_batch)) < 1e-5
        assert max(differences(path, single, [(40,), (longest,), (longest + 1,), (3,)], micro_batch)) < 1e-5
    assert differences(path, packed, [(3, longest - 2)], 1)[0] > 1e-3, "no row is refused for nothing"


def test_numbers_of_real_models_are_named_together(tmp_path: Path, world: World) -> None:
    path = write_family(tmp_path, "llama4_text", **_LLAMA4)
    for longest, named in ((None, "attention_chunk_size=8192 and floor_scale=8192"), (8192, "floor_scale=8192")):
        with pytest.raises(ConfigError, match=RULE.format(named)):
            load_model(path, world, role="student", dtype="fp32", longest=longest)
    load_model(path, world, role="student", dtype="fp32", longest=8191)


def test_a_number_that_weights_have_as_their_size_makes_the_row_longer(tmp_path: Path, world: World) -> None:
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32}
    path = write_family(tmp_path, "deepseek_v4", compress_rates=rates)
    with pytest.raises(ConfigError, match="must not see each other"):
        load_model(path, world, role="student", dtype="fp32", longest=None)
    student = load_model(path, world, role="student", dtype="fp32", longest=31)
    assert max(differences(path, student, [(12, 19), (31,)], 1)) < 1e-5
    assert differences(path, student, [(12, 33)], 1)[0] > 1e-3


def test_a_scale_that_follows_the_place_in_the_row_is_seen(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here Ministral 3 computes it as Llama 4 does, and not from the position in the document."""
    from transformers.models.ministral3 import modeling_ministral3

    right = modeling_ministral3.get_llama_4_attn_scale
    path = write_family(tmp_path, "ministral3", **with_number(SCALED_BEYOND, 16384, {}))
    monkeypatch.setattr(
        modeling_ministral3,
        "get_llama_4_attn_scale",
        lambda positions, *others: right(torch.arange(positions.shape[1])[None], *others),
    )
    with pytest.raises(ConfigError, match=RULE.format(f"{SCALED_BEYOND}=16384")):
        load_model(path, world, role="student", dtype="fp32", longest=16385)
    load_model(path, world, role="student", dtype="fp32", longest=16384)


@pytest.mark.parametrize("case", [*RIGHT, *COUNTED])
@torch.no_grad()
def test_a_model_with_other_numbers_is_the_one_that_its_configuration_would_give(case: str) -> None:
    """So the probe enters what a family does beyond them. Transformers makes the other model."""
    family, name, others = COUNTED.get(case) or (case, *RIGHT[case])
    configs = [family_config(family, **with_number(name, number, others)) for number in (256, N)]
    model, small = (AutoModelForCausalLM.from_config(each, attn_implementation="eager").eval() for each in configs)
    small.load_state_dict(model.state_dict())
    ids = torch.arange(3, 43)[None]
    own, wanted = (each(input_ids=ids, use_cache=False).logits for each in (model, small))
    assert (own - wanted).abs().max() > 1e-4 * own.abs().max()
    number = SCALED_BEYOND if name == SCALED_BEYOND else name if name != "local_attention" else "sliding_window"
    assert number in numbers_of(configs[0])
    with with_numbers(model, [number], N):
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, wanted)
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, own)


WORDS = (
    "chunk",
    "window",
    "scal",
    "length",
    "kernel",
    "floor",
    "original",
    "topk",
    "block",
    "compress",
    "conv",
    "local",
)
HARMLESS = {
    "a factor that is the same for every token": {
        "attention_value_scale", "attn_scale", "embedding_scale", "llama_4_scaling_beta", "logit_scale", "logits_scaling",
        "moe_routed_scaling_factor", "mscale", "mscale_all_dim", "query_pre_attn_scalar", "route_scale",
        "routed_scaling_factor", "router_scaling_factor", "scale_depth", "scale_emb",
    },
    "only for the weights of a new model": {
        "final_w_init_variance_scale", "linear_dt_init_floor", "time_step_floor", "time_step_scale", "w_init_variance_scale",
    },
    "a number or kind of layers, of blocks of layers, or of experts": {
        "_sliding_window_pattern", "max_window_layers", "moe_topk", "num_local_experts", "num_mem_blocks",
        "prefix_dense_sliding_window_pattern", "sliding_window_pattern", "topk_group", "xlstm.num_blocks",
    },
    "a size of weights without positions": {"block_ffn_dim_multiplier", "block_multiple_of"},
    "of a layer with a state, so that the next document sees the last token, and packing is refused": {
        "conv1d_width", "conv_L_cache", "conv_kernel", "conv_kernel_size", "linear_conv_kernel_dim", "mamba_chunk_size",
        "mamba_d_conv", "number_of_conv_states", "ple_conv_kernel_size",
        "inkling_text.log_scaling_alpha", "inkling_text.sliding_window_size", "mamba2.chunk_size", "minimax.block_size",
        "nemotron_h.chunk_size", "recurrent_gemma.attention_window_size", "rwkv.context_length", "rwkv.rescale_every",
        "xlstm.chunk_size", "xlstm.max_inference_chunksize", "zamba2.chunk_size",
    },
    "of a family that takes no positions, or whose attention is not causal, so that packing is refused": {
        "big_bird.block_size", "big_bird.num_random_blocks", "bigbird_pegasus.block_size", "bigbird_pegasus.num_random_blocks",
        "cpmant.prompt_length", "mvp.prompt_length", "reformer.local_attention_probs_dropout_prob",
        "reformer.local_attn_chunk_length", "reformer.local_num_chunks_after", "reformer.local_num_chunks_before",
        "reformer.lsh_attn_chunk_length", "reformer.lsh_num_chunks_after", "reformer.lsh_num_chunks_before",
        "whisper.mask_feature_length", "whisper.mask_time_length",
    },
    "positions that the model has, with which check compares data.max_length": {"model_max_length"},
    "makes sliding_window": {"modernbert-decoder.local_attention"},
    "blocks of index_block_size each that are always chosen": {"minimax_m3_vl_text.index_local_blocks"},
    "a mask of distances that is made once; they are the same in any row": {"gpt_neo.window_size"},
    "makes rotary frequencies, whose kinds are judged elsewhere": {
        "deepseek_v4.compress_rope_theta",
        *(f"{name}.{SCALED_BEYOND}" for name in ("apertus", "cwm", "gpt_oss", "phi3", "phi4_multimodal")),
    },
}  # fmt: skip
"""Numbers in configurations, or in those of one family, whose names have one of WORDS, and why no row is too long for them."""
UNMADE = {"musicgen", "musicgen_melody"}
"""Decoders of sound, which have no configuration without that of an encoder."""


def numbers_in(settings: Mapping[str, Any], of: str = "") -> Iterator[tuple[str, str]]:
    """Names of numbers but 0, and of lists of them, in the configuration of a text model, each with that of its group."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and not name.startswith(("audio", "vision", "depth")):
            yield from numbers_in(value, name)
        values = value if isinstance(value, list) else [value]
        if all(type(each) in (int, float) for each in values) and any(values):
            yield of, name


def test_every_number_of_this_kind_is_entered_or_harmless() -> None:
    configs = [family_config(name) for name in (*DENSE, *MIXTURES, *UNLISTED)]
    configs += [AutoConfig.for_model(name) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in UNMADE]
    harmless, unknown = frozenset().union(*HARMLESS.values()), set()
    for config in (each.get_text_config() for each in configs):
        known = harmless | numbers_of(config).keys()
        for of, name in numbers_in(config.to_dict()):
            if any(word in name for word in WORDS) and not {of, name, f"{config.model_type}.{name}"} & known:
                unknown.add(f"{config.model_type}.{name}")
    assert not unknown
