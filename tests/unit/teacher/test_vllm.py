"""What the scorer on vLLM asks for and how it reads answers; tests/vllm runs the engine."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from distill_rl.errors import ConfigError, WorkerError
from distill_rl.parallel.mesh import World
from distill_rl.teacher.build import build_teacher
from distill_rl.teacher.vllm import VllmScorer, scores_of, scoring_arguments
from tests.helpers.backends import contract_config
from tests.helpers.models import write_tiny_model

GIB = 2**30
PROMPT = np.array([7, 3, 5], np.int32)


@dataclass
class Flat:
    """An answer as vLLM 0.32 gives it: for each position after the first, the next token, then the most likely ones."""

    token_ids: list[int] = field(default_factory=lambda: [3, 9, 3, 5, 4, 8])
    logprobs: list[float] = field(default_factory=lambda: [-1.0, -0.5, -1.0, -4.0, -0.1, -3.0])
    positions: int = 3

    def __len__(self) -> int:
        return self.positions


def test_the_first_entry_of_a_position_is_the_next_token() -> None:
    scores = scores_of(Flat(), PROMPT, 2, "big")
    np.testing.assert_array_equal(scores.ids, [[9, 3], [4, 8]])
    np.testing.assert_array_equal(scores.logprobs, np.array([[-0.5, -1.0], [-0.1, -3.0]], np.float32))
    np.testing.assert_array_equal(scores.next_logprobs, np.array([-1.0, -4.0], np.float32))
    assert (scores.ids.dtype, scores.logprobs.dtype) == (np.int32, np.float32)


@pytest.mark.parametrize(
    ("flat", "words"),
    [
        (Flat(token_ids=[3, 9, 3, 5, 4]), "must answer 3 log-probs for each of 2 tokens; got 5 for 2"),
        (Flat(positions=2), "must answer 3 log-probs for each of 2 tokens; got 6 for 1"),
        (Flat(token_ids=[3, 9, 3, 6, 4, 8]), "must answer about the tokens that were sent"),
    ],
)
def test_answers_of_another_form_are_refused(flat: Flat, words: str) -> None:
    with pytest.raises(WorkerError, match=f"teacher big: .*{words}"):
        scores_of(flat, PROMPT, 2, "big")


@pytest.mark.parametrize(
    ("gpu", "share", "columns", "tokens"),
    [
        (None, 1.0, 32_000, 2097),
        (None, 1.0, 320, 8192),
        (80 * GIB, 1.0, 151_936, 1766),
        (80 * GIB, 0.1, 151_936, 441),
        (16 * GIB, 1.0, 262_144, 512),
    ],
)
def test_the_logits_of_a_step_are_bounded(gpu, share, columns, tokens) -> None:
    arguments = scoring_arguments(gpu, gpu_share=share, columns=columns, longest=4096, top_k=64)
    assert arguments["max_num_batched_tokens"] == tokens
    assert arguments["max_num_seqs"] <= tokens
    assert 4 * columns * tokens <= GIB
    if gpu is not None:
        taken = arguments["gpu_memory_utilization"] * gpu + 3 * 4 * columns * tokens
        assert taken == pytest.approx(0.9 * share * gpu)


def test_no_cache_of_prefixes_and_raw_log_probs_are_asked_for() -> None:
    arguments = scoring_arguments(None, gpu_share=1.0, columns=320, longest=100, top_k=17)
    assert arguments["enable_prefix_caching"] is False
    assert (arguments["logprobs_mode"], arguments["max_logprobs"]) == ("raw_logprobs", 17)
    assert arguments["max_model_len"] == 101


def test_without_vllm_the_extra_is_named(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    config = contract_config(write_tiny_model(tmp_path), backend="vllm")
    with pytest.raises(ConfigError, match=r"backend vllm: needs vllm, which is not installed.*\[vllm\]"):
        VllmScorer(config, config.teachers[0])
    with pytest.raises(ConfigError, match=r"backend vllm: needs vllm, which is not installed.*\[vllm\]"):
        build_teacher(config, config.teachers[0], world, vocabulary_size=320)
