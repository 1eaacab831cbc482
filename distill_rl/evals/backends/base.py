"""The protocol of a backend. `hf.HfBackend` (Transformers) is the reference, `vllm.VllmBackend` the fast one.

Both encode prompts with `encode.Encoder`, so that they run the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from distill_rl.evals.suites.base import Item

BackendName = Literal["hf", "vllm"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How a model is run; the same for every backend."""

    batch_size: int = 64
    """Rows per forward pass (hf); vllm forms its own batches."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """auto: fp32 on CPUs, the dtype of the files on GPUs."""
    tensor_parallel: int = 1
    """Number of ranks, each on a GPU or on the CPU, that every layer is split over."""
    gpu_share: float = 1.0
    """Fraction of a GPU's memory for the model and everything that it computes. `hf` runs out of memory at this limit;
    `vllm` allocates nine tenths of it at its start and keeps them."""
    device: str = ""
    """cuda:N or cpu; empty: the first visible GPU, otherwise the CPU."""
    threads: int = 0
    """CPU threads; 0: torch's default."""


@dataclass(frozen=True, slots=True)
class Output:
    """A model's output for an item: a completion, or the log-likelihoods of its choices."""

    text: str = ""
    """The completion, without special tokens, up to a stop text."""
    num_tokens: int = 0
    """Generated tokens, including the final stop token; for choices, the tokens of all choices."""
    prompt_tokens: int = 0
    """Tokens of the whole prompt, including its prefix; for choices, of their common context."""
    run_tokens: int = 0
    """For choices: tokens that the model ran. The prefix that items share counts once, for one of them."""
    truncated: bool = False
    """The completion reached its token limit before a stop token or a stop text."""
    logprobs: tuple[float, ...] = ()
    """Per choice, the sum of its tokens' log-probabilities after the prompt (natural logarithm)."""
    too_long: bool = False
    """Prompt and answer exceed the model's positions; nothing was run."""


class Backend(Protocol):
    """A loaded model."""

    device: Any
    """The model's device; its `str` is cpu, cuda or cuda:N."""

    def generate(
        self, items: Sequence[Item], *, max_new_tokens: int, stop: Sequence[str] = ()
    ) -> Iterator[tuple[int, Output]]:
        """Yields greedy completions, lazily: (index into `items`, output) for every item, in any order, as they finish.

        An item whose prompt leaves no room for an answer gets an output with `too_long`. A completion is limited to
        `max_new_tokens` and to the model's positions.

        Args:
            stop: texts that end a completion and are not part of it.

        Raises:
            DataError: a chat that the tokenizer's template rejects, or an empty prompt.
        """
        ...

    def choose(self, items: Sequence[Item]) -> Iterator[tuple[int, Output]]:
        """Yields the log-likelihoods of every item's `choices`, lazily: (index into `items`, output) for every item, in
        any order, as they finish.

        An item whose prompt and longest choice exceed the model's positions gets an output with `too_long`.

        Raises:
            DataError: as `generate`, or a choice that adds no token to its prompt.
        """
        ...

    def reload(self, folder: Path) -> None:
        """Replaces the model by that of another folder, with its weights, tokenizer, chat template and stop tokens.

        Raises:
            ConfigError: as the constructor; after an error only `close` may be called.
        """
        ...

    def close(self) -> None:
        """Frees the model's memory and ends the backend's processes."""
        ...
