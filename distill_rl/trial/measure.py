"""Measures models on the text that is held out: bits per byte, and greedy continuations. Runs in a process of its own, so
that nothing of it is left when training begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill_rl.align.chat_form import text_of
from distill_rl.config.schema import Config
from distill_rl.evals.suites.base import Item

SAMPLES = 3
NEW_TOKENS = 48
PROMPT_CHARACTERS = 200
_LEAST_CHARACTERS = 16
"""Of a text from which a prompt is taken."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to measure."""

    name: str
    folder: Path
    samples: bool = True


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found of one model."""

    bits: tuple[float, ...]
    """Per held-out document."""
    num_bytes: tuple[int, ...]
    samples: tuple[str, ...] = ()
    """Its continuation of every prompt."""

    @property
    def bits_per_byte(self) -> float:
        return sum(self.bits) / sum(self.num_bytes)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A held-out text that models continue."""

    item: Item
    shown: str
    reference: str
    """How the text goes on."""


@dataclass(frozen=True, slots=True)
class Findings:
    prompts: tuple[Prompt, ...]
    models: Mapping[str, Measured]


def measure(config: Config, subjects: Sequence[Subject], length: int, parent: int) -> Findings:
    """Measures models, one after another.

    Args:
        config: of the training; its data and seed say what is held out.
        length: most tokens that a model reads at once.
        parent: process that waits for this one, which ends with it.

    Raises:
        DistillError: a model or the text cannot be read.
    """
    from distill_rl.evals.backends.base import Settings
    from distill_rl.evals.backends.hf import HfBackend
    from distill_rl.system.parent import end_with
    from distill_rl.trial import bits

    end_with(parent)
    documents = held_out(config)
    prompts = make_prompts(documents)
    found: dict[str, Measured] = {}
    for subject in subjects:
        with closing(HfBackend(subject.folder, Settings(batch_size=8))) as backend:
            encoded = [bits.encode(backend.encoder.tokenizer, document, config.data) for document in documents]
            texts = [""] * len(prompts)
            if subject.samples:
                items = [prompt.item for prompt in prompts]
                for i, output in backend.generate(items, max_new_tokens=NEW_TOKENS):
                    texts[i] = output.text
            found[subject.name] = Measured(
                tuple(bits.bits(backend.model, encoded, length).tolist()),
                tuple(document.num_bytes for document in encoded),
                tuple(texts) if subject.samples else (),
            )
    return Findings(prompts, found)


def held_out(config: Config) -> list[Mapping[str, Any]]:
    """The documents that a run of this configuration validates on, at most `data.validation.max_documents`."""
    from distill_rl.data.loader import empty
    from distill_rl.data.reading.sources import open_source, split_validation

    _, validation = split_validation(open_source(config.data), config.data, config.run.seed)
    assert validation is not None
    count = min(len(validation), config.data.validation.max_documents)
    return [document for document in map(validation.__getitem__, range(count)) if not empty(document)]


def make_prompts(documents: Sequence[Mapping[str, Any]]) -> tuple[Prompt, ...]:
    """At most SAMPLES prompts from documents that are evenly spaced among those that have one."""
    prompts = [prompt for document in documents if (prompt := _prompt(document)) is not None]
    count = min(SAMPLES, len(prompts))
    return tuple(prompts[i * len(prompts) // count] for i in range(count))


def _prompt(document: Mapping[str, Any]) -> Prompt | None:
    """The beginning of a text, up to the end of a word, or what comes before the first answer of a chat; None without."""
    name = f"row {document['row']}"
    if "messages" not in document:
        text = document["text"].strip()
        most = min(len(text) // 2, PROMPT_CHARACTERS)
        start = text[: most + 1].rpartition(" ")[0].rstrip() or text[:most]
        if len(text) < _LEAST_CHARACTERS:
            return None
        return Prompt(Item(name, start, ""), start, text[len(start) :])
    messages = [{"role": message["role"], "content": text_of(message)} for message in document["messages"]]
    place = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), 0)
    if not place:
        return None
    return Prompt(Item(name, tuple(messages[:place]), ""), messages[place - 1]["content"], messages[place]["content"])
