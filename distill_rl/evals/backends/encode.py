"""From an item to token ids, the same for every backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from distill_rl.data.chat import render
from distill_rl.errors import ConfigError, DataError
from distill_rl.evals.suites.base import Item
from distill_rl.models.facts import folder_problems
from distill_rl.models.hub import configured_stops, read_tokenizer


@dataclass(frozen=True, slots=True)
class Choices:
    """An item whose choices are compared by log-likelihood."""

    context: list[int]
    """what all choices go on from; at least one token"""
    continuations: tuple[list[int], ...]
    """per choice the tokens after the context; at least one each"""


class Encoder:
    """Tokenizer and chat template of a model folder, and the tokens that end what it writes.

    Raises:
        ConfigError: the folder is missing, cannot be loaded as a causal LM, or names no end-of-text token.
    """

    def __init__(self, folder: Path):
        self.tokenizer: Any = read_tokenizer(folder)
        self.positions = _positions(folder)
        """tokens that prompt and answer may have together; None: no limit is known"""
        self.stop_ids = _stop_ids(folder, self.tokenizer)

    def encode(self, item: Item) -> list[int]:
        """The ids of an item's prompt, as the model saw such text in training: no end-of-text token after it.

        Raises:
            DataError: an empty prompt, a chat for a tokenizer without a chat template, or one that it refuses.
        """
        (ids,) = self._tokenize(item, [""])
        if not ids:
            raise DataError(item.id, "the prompt must have at least one token")
        return ids

    def choices(self, item: Item) -> Choices:
        """The ids of an item's choices, each tokenised together with the prompt, as such a text would be.

        The context is what the prompt and all of these texts have in common at their start. That is the prompt, unless
        its last characters form a token with the first of a choice; then they count as part of the choices.

        Raises:
            DataError: as `encode`, or a choice that adds no token to the prompt.
        """
        prompt, *wholes = self._tokenize(item, ["", *item.choices])
        context = _common([prompt, *wholes])
        if not context:
            raise DataError(item.id, "the prompt must have at least one token")
        continuations = tuple(whole[len(context) :] for whole in wholes)
        for choice, continuation in zip(item.choices, continuations):
            if not continuation:
                raise DataError(item.id, "every choice must add at least one token to the prompt", repr(choice))
        return Choices(context, continuations)

    def count_tokens(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of generated ids, without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def room(self, ids: Sequence[int]) -> int | None:
        """Tokens that the model can write after a prompt; None: any number."""
        return None if self.positions is None else max(self.positions - len(ids), 0)

    def _tokenize(self, item: Item, endings: list[str]) -> list[list[int]]:
        """The ids of the prompt with each of the endings."""
        chat = not isinstance(item.prompt, str)
        text = item.prefix + (self._chat(item) if chat else item.prompt)  # type: ignore[operator]
        # A chat template writes the special tokens that belong to the text itself.
        rows = self.tokenizer([text + ending for ending in endings], add_special_tokens=not chat)["input_ids"]
        return [list(ids) if chat else self._without_end(list(ids)) for ids in rows]

    def _without_end(self, ids: list[int]) -> list[int]:
        while ids and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()
        return ids

    def _chat(self, item: Item) -> str:
        if not self.tokenizer.chat_template:
            rule = "chat messages need a tokenizer with a chat template"
            raise DataError(item.id, rule, "none", "give `prompt` instead")
        try:
            return render(self.tokenizer, item.prompt, add_generation_prompt=True)  # type: ignore[arg-type]
        except TemplateError as error:
            raise DataError(item.id, "must be a chat that the tokenizer's template accepts", str(error)) from error


def model_folder(model_dir: str | Path, what: str | None = None) -> Path:
    """A folder that can be loaded as a causal LM, from safetensors, without running code that it holds.

    Args:
        what: the model as the user knows it; None: by its folder.

    Raises:
        ConfigError: it is missing, or something speaks against it; one line each.
    """
    folder, what = Path(model_dir).expanduser(), what or f"model {model_dir}"
    if not folder.is_dir():
        raise ConfigError(what, "must be a folder", "no such folder", "evaluation reaches no hub")
    problems = folder_problems(what, folder)
    if problems:
        raise ConfigError.many(problems)
    return folder


def common_length(rows: Sequence[Sequence[int]]) -> int:
    """How many ids all rows have in common at their start."""
    return len(_common(rows))


def _common(rows: Sequence[Sequence[int]]) -> Any:
    return commonprefix(rows)  # type: ignore[arg-type]  # noqa: RUF071 (of lists of ids, which it takes as well)


def _positions(folder: Path) -> int | None:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # every field has its own validator, each with its own exception
        rule = "config.json must describe a model that transformers knows without code of its own"
        raise ConfigError(f"model {folder}", rule, (str(error).splitlines() or [type(error).__name__])[0]) from error
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def _stop_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Ends of text and of turn: the generation config's, the tokenizer's, and what the chat template writes after a turn."""
    candidates = [*configured_stops(folder), tokenizer.eos_token_id, _end_of_turn(tokenizer)]
    found = tuple(dict.fromkeys(token for token in candidates if token is not None))
    if not found:
        raise ConfigError(
            f"model {folder}", "must have an end-of-text token", None, "set eos_token in tokenizer_config.json"
        )
    return found


def _end_of_turn(tokenizer: Any) -> int | None:
    """The special token right after an assistant's words, if the template writes one."""
    if not tokenizer.chat_template:
        return None
    words = "Yes"
    try:
        chat = render(tokenizer, [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": words}])
    except TemplateError:
        return None
    after = tokenizer(chat.rpartition(words)[2].lstrip(), add_special_tokens=False)["input_ids"]
    # Not `all_special_ids`: a turn marker need not have a role of its own (eos_token, pad_token, …).
    added = tokenizer.added_tokens_decoder
    return after[0] if after and after[0] in added and added[after[0]].special else None
