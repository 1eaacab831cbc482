"""The base of a backend: settings, outputs, the encoding of items, and the rows of tokens that are run for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from os.path import commonprefix
from pathlib import Path
from typing import Any, Literal

from jinja2.exceptions import TemplateError

from distill_rl.data.batch.chat import render
from distill_rl.data.batch.tokenization import KnownIds, unknown_token
from distill_rl.errors import ConfigError, DataError
from distill_rl.evals.suites.base import Item
from distill_rl.models.files import folder_problems, read_config, read_tokenizer
from distill_rl.models.stops import configured_stops
from distill_rl.models.vllm import EngineSettings

BackendName = Literal["hf", "vllm"]


@dataclass(frozen=True, slots=True)
class Settings(EngineSettings):
    """How a model is run; the same for every backend.

    With the backend hf, `tensor_parallel` ranks may also be on CPUs, `gpu_share` is the limit at which it runs out of
    memory, and `device` is cuda:N or cpu; empty: the first visible GPU, otherwise the CPU.
    """

    batch_size: int = 64
    """Rows per forward pass (hf); vllm forms its own batches."""


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


# Encodes items as token ids, in the same way for every backend.


class ItemEncoder:
    """Tokenizer, chat template and stop tokens of a model folder.

    Raises:
        ConfigError: the folder is missing, cannot be loaded as a causal LM, or names no end-of-text token.
    """

    def __init__(self, folder: Path):
        self.tokenizer: Any = read_tokenizer(folder)
        config = read_config(folder, quantized=True).get_text_config()
        self.positions: int | None = getattr(config, "max_position_embeddings", None)
        """Maximum tokens of prompt and answer together; None: unknown."""
        self._known = KnownIds(config.vocab_size, f"model {folder}")
        # Of the generation config, the tokenizer's end of text, and what the chat template writes after a turn; each once.
        candidates = [*configured_stops(folder), self.tokenizer.eos_token_id, _end_of_turn(self.tokenizer)]
        self.stop_ids = tuple(dict.fromkeys(token for token in candidates if token is not None))
        if not self.stop_ids:
            remedy = "set eos_token in tokenizer_config.json"
            raise ConfigError(f"model {folder}", "must have an end-of-text token", None, remedy)
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

    def choices(self, item: Item) -> tuple[list[int], list[list[int]]]:
        """The ids of an item's choices: the context that they have in common, and what each adds to it; no list is empty.

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
        continuations = [whole[len(context) :] for whole in wholes]
        if [] in continuations:
            choice = item.choices[continuations.index([])]
            raise DataError(item.id, "every choice must add at least one token to the prompt", repr(choice))
        return context, continuations

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
    ConfigError.raise_all(folder_problems(what, folder))
    return folder


def common_start(rows: Sequence[Sequence[int]]) -> Any:
    """The tokens that all rows begin with, as a slice of one of the rows; empty if there are none."""
    return commonprefix(rows)  # type: ignore[arg-type]  # noqa: RUF071 (of lists of ids, which it takes as well)


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


# What backends have in common: the rows of tokens that they run for items, and when these end.

_MAX_TEXTLESS_TOKENS = 8
"""Tokens without text of their own that may occur inside a stop text."""


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """Tokens that a model runs for an item."""

    item_index: int
    prefix: str
    """Text at its start that rows of other items may have too; empty: none."""
    ids: list[int]
    start: int
    """How many of the ids are the prompt. Several rows may share all of these but the last, which predicts the next one."""


@dataclass(frozen=True, slots=True)
class PromptRow(EncodedRow):
    """A prompt to be completed."""

    max_new_tokens: int
    """At least 1."""


@dataclass(frozen=True, slots=True)
class ChoiceRow(EncodedRow):
    """The context of choices, and the choices that this row scores.

    The context is followed by all tokens of a choice but the last, which only has to be predicted. Choices that differ
    only in their last token share a row; choices of one token each share the context alone.
    """

    choices: list[tuple[int, list[int]]]
    """(index of the choice, its tokens)."""


def prompt_rows(
    encoder: ItemEncoder, items: Sequence[Item], max_new_tokens: int, positions: int | None
) -> tuple[list[PromptRow], list[tuple[int, Output]]]:
    """Encodes prompts; returns the rows of those that fit, and (index into `items`, output) for those that are too
    long.

    Args:
        max_new_tokens: limit of every completion.
        positions: maximum tokens of prompt and completion together, which also limits a completion; None: no limit.

    Raises:
        DataError: an empty prompt, or a chat that the tokenizer's template rejects.
    """
    rows, too_long = [], []
    for index, item in enumerate(items):
        ids = encoder.encode(item)
        limit = max_new_tokens if positions is None else min(max_new_tokens, positions - len(ids))
        if limit > 0:
            rows.append(PromptRow(index, item.prefix, ids, len(ids), limit))
        else:
            too_long.append((index, Output(prompt_tokens=len(ids), too_long=True)))
    return rows, too_long


def choice_rows(index: int, prefix: str, context: list[int], continuations: Sequence[list[int]]) -> list[ChoiceRow]:
    """The fewest rows that score every choice of an item; each choice belongs to exactly one of them.

    Args:
        context, continuations: as `ItemEncoder.choices` returns them.
    """
    bodies: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
    for i, ids in enumerate(continuations):
        bodies.setdefault(tuple(ids[:-1]), []).append((i, ids))
    return [ChoiceRow(index, prefix, [*context, *body], len(context), choices) for body, choices in bodies.items()]


class StopDetector:
    """Detects the end of a completion: a stop token, the token limit or a stop text.

    Args:
        stop: the stop texts.
    """

    def __init__(self, encoder: ItemEncoder, stop: Sequence[str]):
        self._encoder, self.stop = encoder, tuple(stop)
        # A token with text has at least one byte of it, so this many tokens cover every stop text.
        self._tail = max((len(text.encode()) for text in stop), default=0) + _MAX_TEXTLESS_TOKENS

    def output(self, row: PromptRow, written: Sequence[int]) -> Output | None:
        """The output of a row that has ended with its last token, by a stop token, the token limit or a stop text; None
        while it continues. Call it after every token.

        The text ends before the first stop text. Decoding the last tokens only finds a possible stop text; decoding the
        whole completion confirms it, because text at the start of a decoded tail can differ.

        Args:
            written: all generated ids of the row so far; at least one.
        """
        ended = written[-1] in self._encoder.stop_ids
        full = len(written) >= row.max_new_tokens
        may_stop = self.stop and any(text in self._encoder.decode(written[-self._tail :]) for text in self.stop)
        if not (ended or full or may_stop):
            return None
        whole = self._encoder.decode(written[:-1] if ended else written)
        starts = [whole.find(text) for text in self.stop if text in whole]
        if not (ended or full or starts):
            return None
        text = whole[: min(starts)] if starts else whole
        return Output(text, len(written), len(row.ids), truncated=not ended and not starts)

    def first(self, row: PromptRow, written: Sequence[int]) -> Output | None:
        """The output at the first end in a complete sequence of generated ids, as if `output` had been called after
        every token; None if it does not end. For engines that may run past a stop text.

        Without stop texts only the end of the sequence is examined, so no earlier token may be a stop token.
        """
        counts = range(1, len(written) + 1) if self.stop else [len(written)]
        outputs = (self.output(row, written[:count]) for count in counts)
        return next((output for output in outputs if output is not None), None)


class Backend(ABC):
    """A loaded model."""

    device: Any
    """The model's device; its `str` is cpu, cuda or cuda:N."""
    encoder: ItemEncoder
    positions: int | None
    """Maximum tokens of a prompt and a choice together; None: unknown."""
    answer_positions: int | None
    """The same of a prompt and its completion."""

    def generate(
        self, items: Sequence[Item], *, max_new_tokens: int, stop: Sequence[str] = ()
    ) -> Iterator[tuple[int, Output]]:
        """Yields greedy completions, lazily: (index into `items`, output) for every item, in any order, as they finish.

        An item whose prompt leaves no room for an answer gets an output with `too_long`; these come first. A completion
        ends at a stop token, at a text in `stop`, which it does not contain, or at the limit of `max_new_tokens` or of
        the model's positions.

        Raises:
            DataError: at the first step, a chat that the tokenizer's template rejects, or an empty prompt.
        """
        rows, too_long = prompt_rows(self.encoder, items, max_new_tokens, self.answer_positions)
        yield from too_long
        yield from self._complete(rows, StopDetector(self.encoder, stop))

    def choose(self, items: Sequence[Item]) -> Iterator[tuple[int, Output]]:
        """Yields the log-likelihoods of every item's `choices`, lazily: (index into `items`, output) for every item, in
        any order, as they finish.

        An item whose prompt and longest choice exceed the model's positions gets an output with `too_long`; these come
        first.

        Raises:
            DataError: as `generate`, or a choice that adds no token to its prompt.
        """
        rows: list[ChoiceRow] = []
        outputs: dict[int, Output] = {}
        for index, item in enumerate(items):
            context, continuations = self.encoder.choices(item)
            lengths = [len(ids) for ids in continuations]
            if self.positions is not None and max(lengths) > max(self.positions - len(context), 0):
                outputs[index] = Output(prompt_tokens=len(context), too_long=True)
            else:
                outputs[index] = Output(prompt_tokens=len(context), num_tokens=sum(lengths))
                rows += choice_rows(index, item.prefix, context, continuations)
        yield from ((index, output) for index, output in outputs.items() if output.too_long)
        sums: dict[int, dict[int, float]] = {index: {} for index in outputs}
        run_tokens = dict.fromkeys(outputs, 0)
        for row, scored, run in self._score(rows):
            index = row.item_index
            sums[index] |= scored
            run_tokens[index] += run
            if len(sums[index]) == len(items[index].choices):
                logprobs = tuple(sums[index][i] for i in range(len(sums[index])))
                yield index, replace(outputs[index], logprobs=logprobs, run_tokens=run_tokens[index])

    @abstractmethod
    def _complete(self, rows: Sequence[PromptRow], stops: StopDetector) -> Iterator[tuple[int, Output]]:
        """Yields (`EncodedRow.item_index`, output) for every row, in any order."""

    @abstractmethod
    def _score(self, rows: Sequence[ChoiceRow]) -> Iterator[tuple[ChoiceRow, Mapping[int, float], int]]:
        """Yields every row, in any order, with {index of a choice: sum of its tokens' log-probabilities} and the tokens run."""

    @abstractmethod
    def reload(self, folder: Path) -> None:
        """Replaces the model by that of another folder, with its weights, tokenizer, chat template and stop tokens.

        Raises:
            ConfigError: as the constructor; after an error only `close` may be called.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees the model's memory and ends the backend's processes."""
