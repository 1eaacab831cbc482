"""What runs a model on the items of a suite. `generate.HfBackend` (Transformers) is the oracle, `vllm.VllmBackend` the fast one.

Both take prompts as ids from one `encode.Encoder`, so that they see the same tokens.
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
    """rows of one forward (hf); requests handed over at once are batched by vllm itself"""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """auto: fp32 on CPUs, that of the files on GPUs"""
    tensor_parallel: int = 1
    """GPUs of one model (vllm)"""
    gpu_share: float = 1.0
    """of a GPU's memory that the model and all that it computes may take. `hf` runs out of memory at this limit; `vllm`
    takes nine tenths of it when it starts, and keeps them"""
    device: str = ""
    """cuda:N or cpu; empty: the first GPU that is visible, else the CPU"""
    threads: int = 0
    """of the CPU; 0: as torch decides"""


@dataclass(frozen=True, slots=True)
class Output:
    """What a model made of an item: a completion, or log-likelihoods of the choices."""

    text: str = ""
    """what follows the prompt, without special tokens, up to a stop text"""
    num_tokens: int = 0
    """generated tokens, the one that ended it included; for choices the tokens of all of them"""
    prompt_tokens: int = 0
    """of the whole prompt, prefix included; for choices of the context that all of them go on from"""
    truncated: bool = False
    """the limit was reached before the model ended its turn or wrote a stop text"""
    logprobs: tuple[float, ...] = ()
    """per choice the sum of its tokens' log-probabilities after the prompt (natural logarithm)"""
    too_long: bool = False
    """prompt and answer do not fit into the model's positions; nothing was run"""


class Backend(Protocol):
    """A loaded model."""

    settings: Settings
    device: Any
    """what the model runs on; its `str` is cpu, cuda or cuda:N"""

    def generate(
        self, items: Sequence[Item], *, max_new_tokens: int, stop: Sequence[str] = ()
    ) -> Iterator[tuple[int, Output]]:
        """Greedy completions: (index of the item, its output) for every item, in any order, as they come.

        Raises:
            DataError: a chat that the tokenizer's template refuses, or an empty prompt.
        """
        ...

    def choose(self, items: Sequence[Item]) -> Iterator[tuple[int, Output]]:
        """Log-likelihoods of every item's `choices`: (index of the item, its output) for every item, as they come.

        Raises:
            DataError: as above, or a choice that adds no token to its prompt.
        """
        ...

    def reload(self, folder: Path) -> None:
        """Takes another model in place of this one, as if made anew from that folder: weights, tokenizer, chat template,
        ends of text.

        Raises:
            ConfigError: as when a backend is made. Nothing but `close` may follow then.
        """
        ...

    def close(self) -> None:
        """Frees the model's memory, and ends what was started."""
        ...
