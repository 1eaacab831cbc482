"""A model that is evaluated on two tensor-parallel ranks gives what the whole model gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distill_rl.errors import ConfigError
from distill_rl.evals.backends.base import Output, Settings
from distill_rl.evals.executor import LocalExecutor, SuiteTask
from distill_rl.evals.suites.base import Item
from distill_rl.parallel.mesh import World, close_world, open_world
from tests.helpers import ranks
from tests.helpers.models import FAMILIES
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.tokenizers import seeded_words, tiny_tokenizer
from tests.helpers.zoo import write_model

pytestmark = pytest.mark.ranks

WORDS = seeded_words(3, 200)
PREFIX = " ".join(WORDS[:30]) + "\n\n"
COMPLETE, CHOOSE = SuiteTask(choose=False, max_new_tokens=6, stop=(" lo",)), SuiteTask(choose=True)
ITEMS = [Item(f"row {n}", " ".join(WORDS[30 + 9 * n :][: 1 + 2 * n]), "", prefix=PREFIX * (n % 2)) for n in range(4)]
CHOICES = [replace(item, choices=(" ka", " mi lo", " mi ka")) for item in ITEMS]
SETTINGS = Settings(batch_size=3, dtype="fp32")


def outputs(executor: LocalExecutor, folder: str, settings: Settings) -> list[list[Output]]:
    """The completions of ITEMS, and the log-likelihoods of CHOICES."""
    executor.load(Path(folder), "hf", settings)
    results = []
    for task, items in ((COMPLETE, ITEMS), (CHOOSE, CHOICES)):
        by_item = dict(pair for chunk in executor.run(task, items) for pair in chunk)
        results.append([by_item[i] for i in range(len(items))])
    return results


def in_world() -> World:
    return open_world(rank=ranks.rank(), dp=1, tp=2, store=ranks.store(), timeout_s=60)


def evaluate(folders: list[str]) -> list[list[list[Output]]] | None:
    """The outputs of every model, on the first rank; the other one follows."""
    world, settings = in_world(), replace(SETTINGS, tensor_parallel=2)
    try:
        if world.rank:
            LocalExecutor(world).follow()
            return None
        executor = LocalExecutor(world).lead()
        results = [outputs(executor, folder, settings) for folder in folders]
        executor.close()
        return results
    finally:
        close_world(world)


def test_two_ranks_give_the_completions_and_scores_of_one(tmp_path: Path) -> None:
    """For every family with a plan; a sliding window, which no padded prefix may precede; tied embeddings."""
    tokenizer = tiny_tokenizer()
    models = {name: {} for name in (*FAMILIES, "mistral-window")} | {"qwen3-tied": {"tie": True}}
    folders = []
    for name, settings in models.items():
        folder = write_model(tmp_path / name, name.removesuffix("-tied"), vocab_size=len(tokenizer), **settings)
        tokenizer.save_pretrained(folder)
        folders.append(str(folder))
    split, nothing = run_ranks(2, evaluate, folders, group=False, timeout=300)  # eleven models
    assert nothing is None
    for name, folder, (completions, scores) in zip(models, folders, split):
        whole_completions, whole_scores = outputs(LocalExecutor(), folder, SETTINGS)
        assert len({output.text for output in completions}) > 2, f"{name}: the texts differ"
        assert completions == whole_completions, name
        for ours, theirs in zip(scores, whole_scores):
            torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), rtol=0, atol=1e-4)
            assert replace(ours, logprobs=()) == replace(theirs, logprobs=())


def test_model_that_cannot_be_split_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    folder = write_model(tmp_path, "llama", vocab_size=len(tokenizer), heads=4, kv_heads=1)
    tokenizer.save_pretrained(folder)
    with pytest.raises(RankError, match="1 key-value heads cannot be split evenly") as caught:
        run_ranks(2, evaluate, [str(folder)], group=False)
    assert isinstance(caught.value.cause, ConfigError)


def test_number_of_ranks_must_be_that_of_the_settings(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    folder = write_model(tmp_path, "llama", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"tensor_parallel: .* this process is one of 1; got 2"):
        LocalExecutor().load(folder, "hf", replace(SETTINGS, tensor_parallel=2))
