from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distill_rl.config.facts import AdapterFacts
from distill_rl.config.schema import LoraConfig, StudentConfig
from distill_rl.errors import ConfigError
from distill_rl.models.adapters import Outline, choose_layers, sizes
from distill_rl.models.classes import survey
from distill_rl.models.files import read_config, read_headers
from distill_rl.models.weights import skeleton
from tests.helpers.models import write_tiny_model
from tests.helpers.zoo import write_family

LAYER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama", tie=True)


def model(folder: Path):
    return skeleton(read_config(folder), dtype=torch.float32, attention="eager")


def outline(folder: Path) -> Outline:
    return Outline.of_model(model(folder))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("tie", [False, True])
def test_files_and_class_give_the_same_choice_and_numbers(tmp_path: Path, family: str, tie: bool):
    """So `check` need not import the class of a Llama-like model."""
    source = write_tiny_model(tmp_path, family, tie=tie)
    shapes = {name: tuple(entry["shape"]) for name, entry in read_headers(source).items()}
    by_class, by_files = outline(source), Outline.of_files(read_config(source), shapes)
    for settings in ({}, {"modules_to_save": ["lm_head", "norm"]}, {"targets": ["mlp.up_proj"], "rank": 3}):
        lora = LoraConfig(**settings)
        one, other = choose_layers(by_class, lora), choose_layers(by_files, lora)
        assert (set(one.adapted), set(one.whole), one.patterns) == (
            set(other.adapted),
            set(other.whole),
            other.patterns,
        )
        assert sizes(by_class, lora) == sizes(by_files, lora)


def test_default_is_every_linear_layer_but_the_output_layer(folder):
    chosen = choose_layers(outline(folder), LoraConfig())
    assert chosen.adapted == tuple(f"model.layers.{i}.{name}" for i in (0, 1) for name in (*LAYER, *MLP))
    assert chosen.whole == ()
    assert set(chosen.patterns) == {name.rpartition(".")[2] for name in (*LAYER, *MLP)}


def test_a_router_that_returns_more_than_a_product_is_no_linear_layer(tmp_path: Path):
    found = choose_layers(outline(write_family(tmp_path, "llama4_text")), LoraConfig())
    assert found.adapted
    assert not any(name.endswith("router") for name in found.adapted)


def test_a_rank_above_the_width_of_every_layer_is_refused(folder):
    found = survey(folder, StudentConfig(lora=LoraConfig(rank=17)))
    assert found.narrow == 4, "keys and values of two layers have 16 features"
    assert str(found).endswith("adapters of 14 layers, 4 of them with fewer features than the rank")
    assert survey(folder, StudentConfig(lora=LoraConfig(rank=32))).layers == 14
    with pytest.raises(ConfigError) as caught:
        survey(folder, StudentConfig(lora=LoraConfig(rank=33)))
    assert str(caught.value) == (
        "student.lora.rank: must not exceed the 32 features of the widest layer with an adapter; got 33; "
        "use 32 or less, or train without student.lora"
    )


def test_targets_are_ends_of_names(folder):
    chosen = choose_layers(outline(folder), LoraConfig(targets=["mlp.down_proj", "layers.1.self_attn.q_proj"]))
    assert chosen.adapted == (
        "model.layers.0.mlp.down_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.down_proj",
    )
    assert chosen.patterns == ("mlp.down_proj", "layers.1.self_attn.q_proj")


def test_peft_is_given_whole_names_where_ends_name_more(folder):
    """`mlp` also ends the name of a module that is no linear layer, which PEFT would refuse."""
    inner = model(folder)
    inner.model.layers[1].mlp.q_proj = torch.nn.ModuleList()  # ends like the linear layers of attention
    chosen = choose_layers(Outline.of_model(inner), LoraConfig(targets=["q_proj"]))
    assert chosen.patterns == chosen.adapted == tuple(f"model.layers.{i}.self_attn.q_proj" for i in (0, 1))


def test_one_of_two_tied_embeddings_names_both(folder):
    assert choose_layers(outline(folder), LoraConfig(modules_to_save=["lm_head"])).whole == (
        "model.embed_tokens",
        "lm_head",
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"targets": ["q_pro"]}, ("student.lora.targets.0", "no layer", "got q_pro", "did you mean q_proj")),
        ({"targets": ["query_key_value"]}, ("no layer", "there are q_proj, k_proj")),
        ({"targets": ["input_layernorm"]}, ("names no linear layer", "got input_layernorm")),
        ({"targets": ["lm_head"]}, ("is an embedding or the output layer", "student.lora.modules_to_save")),
        ({"targets": ["roj"]}, ("no layer of the student", "got roj")),
        ({"modules_to_save": ["embed_token"]}, ("modules_to_save.0", "no module", "did you mean embed_tokens")),
        ({"modules_to_save": ["mlp"]}, ("is trained whole", "model.layers.0.mlp.gate_proj", "got mlp")),
        ({"modules_to_save": ["act_fn"]}, ("no module", "got act_fn")),
    ],
)
def test_names_that_match_nothing_are_refused_in_one_line(folder, settings, words):
    with pytest.raises(ConfigError) as refused:
        choose_layers(outline(folder), LoraConfig(**settings))
    (line,) = refused.value.problems
    assert all(word in line for word in words), line


def test_numbers_of_parameters_are_those_of_the_shapes(folder):
    """Hidden size 32, heads 4 of which 2 have keys, intermediate size 64, two layers, 320 ids."""
    attention = (32 + 32) + 2 * (32 + 16) + (32 + 32)
    adapters = 2 * 8 * (attention + 3 * (32 + 64))
    total = sum(parameter.numel() for parameter in model(folder).parameters())
    assert survey(folder, StudentConfig(lora=LoraConfig(rank=8))) == AdapterFacts(14, adapters, total)
    table = 320 * 32
    assert sizes(outline(folder), LoraConfig(rank=8, modules_to_save=["lm_head"])) == AdapterFacts(
        14, adapters + table, total - table
    )
