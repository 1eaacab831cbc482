"""Batched greedy generation with Transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2.exceptions import TemplateError

from distill_rl.data.chat import render
from distill_rl.errors import ConfigError, DataError
from distill_rl.evals.suite import Item, Prompt
from distill_rl.models.facts import folder_problems
from distill_rl.models.hub import read_tokenizer


@dataclass(frozen=True, slots=True)
class Completion:
    text: str
    """what follows the prompt, without special tokens"""
    num_tokens: int
    """generated tokens, the one that ended it included"""
    truncated: bool
    """the limit was reached before the model ended its turn"""


class Generator:
    """A model and its tokenizer, loaded offline, from safetensors, without running code of the model's folder.

    In fp32 on CPUs, in the dtype of the files on a GPU.

    Raises:
        ConfigError: the folder is missing or holds no such model.
    """

    def __init__(self, model_dir: str | Path):
        from transformers import GenerationConfig

        self.folder = Path(model_dir).expanduser()
        if not self.folder.is_dir():
            raise ConfigError(f"model {model_dir}", "must be a folder", "no such folder", "evaluation reaches no hub")
        problems = folder_problems(f"model {model_dir}", self.folder)
        if problems:
            raise ConfigError.many(problems)
        self.tokenizer: Any = read_tokenizer(self.folder)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = _load(self.folder, "auto" if self.device.type == "cuda" else torch.float32).to(self.device).eval()
        self.stop_ids = _stop_ids(self.model, self.tokenizer)
        # A folder's generation_config.json may sample, search beams or penalise repetition; none of it is greedy.
        self.model.generation_config = GenerationConfig(
            do_sample=False, eos_token_id=list(self.stop_ids), pad_token_id=self.stop_ids[0]
        )

    def encode(self, item: Item) -> list[int]:
        """The ids of an item's prompt, as the model saw such text in training: no end-of-text token after it.

        Raises:
            DataError: a chat prompt for a tokenizer without a chat template, or one that it refuses.
        """
        if isinstance(item.prompt, str):
            ids = list(self.tokenizer(item.prompt)["input_ids"])
            while ids and ids[-1] == self.tokenizer.eos_token_id:
                ids.pop()
        else:
            ids = list(self.tokenizer(self._chat(item.id, item.prompt), add_special_tokens=False)["input_ids"])
        if not ids:
            raise DataError(item.id, "the prompt must have at least one token")
        return ids

    def count_tokens(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def generate(
        self, items: Sequence[Item], *, max_new_tokens: int, batch_size: int
    ) -> Iterator[tuple[int, Completion]]:
        """Yields (index of the item, its completion) for every item, the longest prompts first.

        Prompts of similar length share a batch, which keeps padding small and shows at once whether the
        largest batch fits into memory.

        Raises:
            DataError: a prompt that cannot be encoded, or that leaves too few of the model's positions.
        """
        prompts = [self.encode(item) for item in items]
        positions = getattr(self.model.config, "max_position_embeddings", None)
        for item, ids in zip(items, prompts):
            if positions is not None and len(ids) + max_new_tokens > positions:
                rule = f"prompt and answer must fit into the model's {positions} positions"
                raise DataError(item.id, rule, f"{len(ids)} + {max_new_tokens} tokens", "leave the row out")
        order = sorted(range(len(items)), key=lambda index: -len(prompts[index]))
        for start in range(0, len(order), batch_size):
            indices = order[start : start + batch_size]
            yield from zip(indices, self._batch([prompts[index] for index in indices], max_new_tokens))

    @torch.inference_mode()
    def _batch(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Completion]:
        longest = max(len(ids) for ids in prompts)
        # What fills a row is masked in front of the prompt and cut off behind the answer, so any id will do.
        input_ids = torch.full((len(prompts), longest), self.stop_ids[0], dtype=torch.int64)
        mask = torch.zeros_like(input_ids)
        for row, ids in enumerate(prompts):
            input_ids[row, longest - len(ids) :] = torch.tensor(ids)
            mask[row, longest - len(ids) :] = 1
        output = self.model.generate(
            input_ids.to(self.device),
            attention_mask=mask.to(self.device),
            max_new_tokens=max_new_tokens,
            use_cache=True,
        )
        return [self._completion(row) for row in output[:, longest:].tolist()]

    def _completion(self, ids: list[int]) -> Completion:
        end = next((place for place, token in enumerate(ids) if token in self.stop_ids), None)
        text = self.tokenizer.decode(ids[:end], skip_special_tokens=True)
        return Completion(text, len(ids) if end is None else end + 1, end is None)

    def _chat(self, name: str, prompt: Prompt) -> str:
        if not self.tokenizer.chat_template:
            raise DataError(
                name, "chat messages need a tokenizer with a chat template", "none", "give `prompt` instead"
            )
        try:
            return render(self.tokenizer, prompt, add_generation_prompt=True)  # type: ignore[arg-type]
        except TemplateError as error:
            raise DataError(name, "must be a chat that the tokenizer's template accepts", str(error)) from error


def _load(folder: Path, dtype: torch.dtype | str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (ValueError, OSError, RuntimeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"model {folder}", "transformers must load it as a causal LM", first) from error
    finally:
        if bars:
            logging.enable_progress_bar()
    model, loading = loaded
    # transformers fills what the files lack with random numbers and only warns.
    if loading["missing_keys"]:
        missing = ", ".join(sorted(loading["missing_keys"])[:3])
        raise ConfigError(f"model {folder}", "its files must hold every weight", f"without {missing}", "copy it again")
    return model


def _stop_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ends of text and of turn: the generation config's, the tokenizer's, and what the chat template writes after a turn."""
    configured = model.generation_config.eos_token_id
    candidates = [*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id]
    candidates.append(_end_of_turn(tokenizer))
    found = tuple(dict.fromkeys(token for token in candidates if token is not None))
    if not found:
        raise ConfigError("model", "must have an end-of-text token", None, "set eos_token in tokenizer_config.json")
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
