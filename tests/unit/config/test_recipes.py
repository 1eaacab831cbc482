from pathlib import Path

import pytest
from omegaconf import OmegaConf

from distill_rl.config.derive import sizes
from distill_rl.config.facts import Facts
from distill_rl.config.load import load_config
from distill_rl.config.rules import problems
from distill_rl.config.schema import Config
from distill_rl.config.walk import default_of, leaves

CONFIGS = Path(__file__).parents[3] / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_shipped_configuration_is_valid(path):
    assert problems(load_config(path)) == []


@pytest.mark.parametrize("path", sorted((CONFIGS / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_recipe_contains_only_non_default_settings(path):
    defaults = {name: default_of(entry) for name, entry, _ in leaves(Config)}
    settings = dict(flat(OmegaConf.to_container(OmegaConf.load(path))))
    assert [key for key, value in settings.items() if defaults[key] == value] == []


def flat(node, path=""):
    if isinstance(node, list) and all(isinstance(entry, dict) for entry in node):
        node = {str(i): entry for i, entry in enumerate(node)}
    if not isinstance(node, dict):
        return [(path, node)]
    return [leaf for key, value in node.items() for leaf in flat(value, f"{path}.{key}".lstrip("."))]


def test_llama_recipe_has_the_published_settings():
    config = load_config(CONFIGS / "recipes/llama3.2-1b-from-llama3.1-8b-1n8g.yaml")
    assert (config.student.model, config.teachers[0].model) == ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B")
    assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.eps) == (5e-5, [0.9, 0.98], 1e-5)
    assert (config.optimizer.weight_decay, config.schedule.kind, config.schedule.warmup_steps) == (0.1, "cosine", 50)
    assert (config.train.steps, config.train.global_batch_size, config.data.max_length) == (10000, 768, 4096)
    assert config.loss.divergence == "forward_kl"
    assert (config.student.dtype, config.teachers[0].dtype) == ("bf16", "bf16")


@pytest.mark.parametrize(
    ("recipe", "teacher", "ranks"),
    [
        ("llama3.2-1b-from-phi-4-mini-1n8g", "microsoft/Phi-4-mini-instruct", 8),
        ("llama3.2-1b-from-qwen3-4b-2n8g", "Qwen/Qwen3-4B", 16),
    ],
)
def test_cross_tokenizer_recipes_match_schedule_and_machine(recipe, teacher, ranks):
    config = load_config(CONFIGS / f"recipes/{recipe}.yaml")
    assert (config.student.model, config.teachers[0].model) == ("meta-llama/Llama-3.2-1B", teacher)
    assert (config.train.steps, config.schedule.warmup_steps, config.schedule.kind) == (80000, 4000, "cosine")
    assert (config.schedule.steps, config.schedule.min_lr_ratio) == (None, 0.0), "76,000 steps of cosine, to zero"
    assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.eps) == (5e-5, [0.9, 0.98], 1e-5)
    assert (config.optimizer.weight_decay, config.train.max_grad_norm) == (0.1, 1.0)
    assert (config.train.global_batch_size, config.data.max_length, config.run.seed) == (768, 4096, 42)
    assert (config.loss.cross_tokenizer, config.loss.dynamic_scale) == ("hybrid", "on")
    assert config.student.parallel.dp == config.teachers[0].parallel.dp == ranks
    assert (config.ray.address is not None) == (ranks > 8), "more than one node is one Ray cluster"


def test_targets_of_the_llama_recipe_fit_in_memory():
    config = load_config(CONFIGS / "recipes/llama3.2-1b-from-llama3.1-8b-1n8g.yaml")
    (teacher,) = sizes(config, Facts(vocabulary_size=128256, gpus=8)).teachers
    assert teacher.bytes_per_token == 128 * (4 + 2) + 8
    assert teacher.ring_bytes < 2**30
