"""The protocol of a backend, and the encoding of items that all backends share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from os.path import commonprefix
from pathlib import Path
from typing import Any, Literal, Protocol

from jinja2.exceptions import TemplateError

from distill_rl.data.batch.chat import render
from distill_rl.data.batch.tokenization import KnownIds, unknown_token
from distill_rl.errors import ConfigError, DataError
from distill_rl.evals.suites.base import Item
from distill_rl.models.files import configured_stops, folder_problems, read_tokenizer

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


# Encodes items as token ids, in the same way for every backend.


@dataclass(frozen=True, slots=True)
class Choices:
    """The tokens of an item whose choices are compared by log-likelihood."""

    context: list[int]
    """The common start of all choices; at least one token."""
    continuations: tuple[list[int], ...]
    """Per choice, its tokens after the context; at least one each."""


class ItemEncoder:
    """Tokenizer, chat template and stop tokens of a model folder.

    Raises:
        ConfigError: the folder is missing, cannot be loaded as a causal LM, or names no end-of-text token.
    """

    def __init__(self, folder: Path):
        self.tokenizer: Any = read_tokenizer(folder)
        config = _text_config(folder)
        self.positions: int | None = getattr(config, "max_position_embeddings", None)
        """Maximum tokens of prompt and answer together; None: unknown."""
        self._known = KnownIds(config.vocab_size, f"model {folder}")
        self.stop_ids = _stop_ids(folder, self.tokenizer)
        names = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")
        self.frame_ids = {*self.stop_ids, *(getattr(self.tokenizer, f"{name}_token_id", None) for name in names)}
        """Stop tokens, and the special tokens that have a name of their own."""

    def encode(self, item: Item) -> list[int]:
        """The ids of an item's prefix and prompt, for the model to continue: without the end-of-text token that some
        tokenizers append. A chat is rendered with the start of the assistant's turn.

        Raises:
            DataError: an empty prompt, one with a token for which the model has no embedding row, or a chat that has no
                chat template or is rejected by it.
        """
        (ids,) = self._tokenize(item, [""])
        if not ids:
            raise DataError(item.id, "the prompt must have at least one token")
        return ids

    def choices(self, item: Item) -> Choices:
        """The ids of an item's choices: the context that they have in common, and what each adds to it.

        1. Tokenise the prompt alone and together with every choice, as in running text.
        2. The context is the longest common start of these sequences. It equals the prompt, unless the prompt's last
           characters merge with a choice's first ones into one token; then these characters belong to the choices.
        3. The continuations are the remaining tokens of each choice.

        Raises:
            DataError: as `encode`, or a choice that adds no token to the prompt.
        """
        prompt, *wholes = self._tokenize(item, ["", *item.choices])
        context = common_start([prompt, *wholes])
        if not context:
            raise DataError(item.id, "the prompt must have at least one token")
        continuations = tuple(whole[len(context) :] for whole in wholes)
        for choice, continuation in zip(item.choices, continuations):
            if not continuation:
                raise DataError(item.id, "every choice must add at least one token to the prompt", repr(choice))
        return Choices(context, continuations)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of generated ids, without tokens that only frame a text (`frame_ids`).

        Other special tokens, such as `<tool_call>` in some vocabularies, may be what was asked for.
        """
        return self.tokenizer.decode([token for token in ids if token not in self.frame_ids], skip_special_tokens=False)

    def _tokenize(self, item: Item, endings: list[str]) -> list[list[int]]:
        """The ids of prefix and prompt followed by each of the endings: one list per ending."""
        chat = not isinstance(item.prompt, str)
        text = item.prefix + (self._chat(item) if chat else item.prompt)  # type: ignore[operator]
        # A chat template writes its special tokens itself.
        texts = [text + ending for ending in endings]
        rows = [list(ids) for ids in self.tokenizer(texts, add_special_tokens=not chat)["input_ids"]]
        if not chat and any(self._num_ends(ids) for ids in rows):
            written = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
            rows = [ids[: len(ids) - self._num_ends(ids) + self._num_ends(own)] for ids, own in zip(rows, written)]
        if problem := unknown_token(item.id, chain(*rows), [self._known], self.tokenizer):
            raise problem
        return rows

    def _num_ends(self, ids: Sequence[int]) -> int:
        return next((i for i, token in enumerate(reversed(ids)) if token != self.tokenizer.eos_token_id), len(ids))

    def _chat(self, item: Item) -> str:
        """The messages as rendered text, up to the start of the assistant's turn."""
        if not self.tokenizer.chat_template:
            rule = "chat messages need a tokenizer with a chat template"
            raise DataError(item.id, rule, "none", "give `prompt` instead")
        try:
            return render(self.tokenizer, item.prompt, add_generation_prompt=True)  # type: ignore[arg-type]
        except TemplateError as error:
            raise DataError(item.id, "must be a chat that the tokenizer's template accepts", str(error)) from error


def model_folder(model_dir: str | Path, what: str | None = None) -> Path:
    """Returns the folder of a model (with `~` expanded), after checking that it can be loaded as a causal LM, from
    safetensors, without running code that it contains.

    Args:
        what: name of the model in messages; None: its folder.

    Raises:
        ConfigError: the folder is missing or cannot be loaded; one line per reason.
    """
    folder, what = Path(model_dir).expanduser(), what or f"model {model_dir}"
    if not folder.is_dir():
        raise ConfigError(what, "must be a folder", "no such folder", "evaluation reaches no hub")
    problems = folder_problems(what, folder)
    if problems:
        raise ConfigError.many(problems)
    return folder


def common_start(rows: Sequence[Sequence[int]]) -> Any:
    """The tokens that all rows begin with, as a slice of one of the rows; empty if there are none."""
    return commonprefix(rows)  # type: ignore[arg-type]  # noqa: RUF071 (of lists of ids, which it takes as well)


def _text_config(folder: Path) -> Any:
    """What a model's config.json says of its language model."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # each config field has its own validator and exception type
        rule = "config.json must describe a model that transformers knows without code of its own"
        raise ConfigError(f"model {folder}", rule, (str(error).splitlines() or [type(error).__name__])[0]) from error
    return config.get_text_config()


def _stop_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    # Of the generation config, the tokenizer's end of text, and what the chat template writes after a turn; each once.
    candidates = [*configured_stops(folder), tokenizer.eos_token_id, _end_of_turn(tokenizer)]
    stop_ids = tuple(dict.fromkeys(token for token in candidates if token is not None))
    if not stop_ids:
        raise ConfigError(
            f"model {folder}", "must have an end-of-text token", None, "set eos_token in tokenizer_config.json"
        )
    return stop_ids


def _end_of_turn(tokenizer: Any) -> int | None:
    """The special token that the chat template writes right after an assistant's text, if any."""
    if not tokenizer.chat_template:
        return None
    answer = "Yes"
    try:
        chat = render(tokenizer, [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": answer}])
    except TemplateError:
        return None
    after = tokenizer(chat.rpartition(answer)[2].lstrip(), add_special_tokens=False)["input_ids"]
    # `all_special_ids` would miss end-of-turn tokens that are neither eos_token nor another named special token.
    added = tokenizer.added_tokens_decoder
    return after[0] if after and after[0] in added and added[after[0]].special else None
