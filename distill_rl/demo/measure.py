"""Measures models on the text that is held out: bits per byte, and greedy continuations. Runs in a process of its own, so
that nothing of it is left when training begins."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill_rl.align.chats import text_of
from distill_rl.config.schema import Config, StudentConfig, TeacherConfig
from distill_rl.errors import DataError, GpuMemoryError, WorkerError, first_line
from distill_rl.evals.suites.base import Item
from distill_rl.models.files import read_config, tokenizer_of, unwritten_beginning
from distill_rl.system.gpu_memory import amounts, is_out_of_memory
from distill_rl.system.processes import end_with

if TYPE_CHECKING:
    from distill_rl.demo.bits import EncodedText

SAMPLES = 3
NEW_TOKENS = 48
PROMPT_CHARACTERS = 200
_LEAST_CHARACTERS = 16
"""Of a text from which a prompt is taken."""
BEGUN = 6
"""Documents that a model also reads with its first token before them, if its tokenizer writes none."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to measure."""

    name: str
    folder: Path
    teacher: bool = False
    """Loaded as the training's teacher is, with its quantization; it continues no prompts."""
    begin: bool = False
    """Whether it also reads texts with a first token that its tokenizer does not write."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How models read the held-out text."""

    length: int
    """Most tokens that they read at once."""
    longest: int | None
    """Most tokens of a text that count; None: all."""
    same: bool
    """Whether the teacher reads the student's tokens, as in the training."""


@dataclass(slots=True)
class Reader:
    """A tokenizer, and what it reads."""

    tokenizer: Any
    rows: int
    """How many of its ids have an embedding row."""
    texts: list[EncodedText] = field(default_factory=list)
    """The held-out documents, in their order."""


@dataclass(frozen=True, slots=True)
class Begun:
    """Bits per byte of a few documents as a tokenizer reads them, and with a token before each that it does not write."""

    token: str
    as_read: float
    begun: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found of one model."""

    bits: tuple[float, ...]
    """Per held-out document."""
    num_bytes: tuple[int, ...]
    samples: tuple[str, ...] = ()
    """Its continuation of every prompt."""
    begun: Begun | None = None
    """None: not asked for, chats, or the tokenizer writes the model's first token or has none."""

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
class TrialFindings:
    prompts: tuple[Prompt, ...]
    models: Mapping[str, Measured]


def measure(config: Config, subjects: Sequence[Subject], reading: Reading, parent: int | None = None) -> TrialFindings:
    """Measures models, one after another.

    Args:
        config: of the training; its data and seed say what is held out.
        parent: process that waits for this one, which ends with it.

    Raises:
        DistillError: a model or the text cannot be read, or memory is too small.
    """
    if parent is not None:
        end_with(parent)
    models: list[StudentConfig | TeacherConfig] = [config.student, config.teachers[0]]
    rows = [read_config(each.model, each.revision, quantized=each.may_be_quantized).vocab_size for each in models]
    readers = [Reader(tokenizer_of(models[0]), min(rows))]
    if not reading.same:
        readers = [Reader(tokenizer_of(models[0]), rows[0]), Reader(tokenizer_of(models[1]), rows[1])]
    documents = readable(held_out(config), readers, config, reading.longest)
    prompts = make_prompts(documents)
    found: dict[str, Measured] = {}
    for subject in subjects:
        reader = readers[-1 if subject.teacher else 0]
        begins = reader.tokenizer if subject.begin and "text" in documents[0] else None
        with _memory_in_one_line(subject):
            if subject.teacher:
                teacher = replace(config.teachers[0], model=os.fspath(subject.folder), revision=None)
                found[subject.name] = _teacher(teacher, begins, reader.texts, reading.length)
            else:
                found[subject.name] = _student(subject.folder, begins, reader.texts, prompts, reading.length)
    return TrialFindings(prompts, found)


def _student(
    folder: Path, begins: Any, encoded: Sequence[EncodedText], prompts: Sequence[Prompt], length: int
) -> Measured:
    """Measures a student with whole weights, as others will use it."""
    from distill_rl.evals.backends.base import Settings
    from distill_rl.evals.backends.hf import HfBackend

    texts = [""] * len(prompts)
    with closing(HfBackend(folder, Settings(batch_size=8))) as backend:
        for i, output in backend.generate([prompt.item for prompt in prompts], max_new_tokens=NEW_TOKENS):
            texts[i] = output.text
        return _measured(backend.model, begins, encoded, length, texts)


def _teacher(teacher: TeacherConfig, begins: Any, encoded: Sequence[EncodedText], length: int) -> Measured:
    """Measures a teacher as the training loads it: whole weights may be more than fits."""
    import torch

    from distill_rl.models.determinism import start_vector_math
    from distill_rl.models.load import load_model
    from distill_rl.parallel.mesh import close_world, open_world

    start_vector_math()
    world = open_world(rank=0, dp=1, tp=1, device="cuda" if torch.cuda.is_available() else "cpu")
    try:
        return _measured(load_model(teacher, world, packing=False), begins, encoded, length)
    finally:
        close_world(world)
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()


def _measured(
    model: Any, begins: Any, encoded: Sequence[EncodedText], length: int, texts: Sequence[str] = ()
) -> Measured:
    """The bits of the documents; and of some with a first token, if the tokenizer `begins` does not write it."""
    from distill_rl.demo import bits

    found = bits.bits(model, encoded, length)
    num_bytes = tuple(document.num_bytes for document in encoded)
    begun = None
    if begins is not None and (token := unwritten_beginning(begins)) is not None:
        first = slice(BEGUN)
        total, read = sum(num_bytes[first]), [bits.begun(document, token) for document in encoded[first]]
        with_token = float(bits.bits(model, read, length).sum())
        begun = Begun(begins.bos_token, float(found[first].sum()) / total, with_token / total)
    return Measured(tuple(found.tolist()), num_bytes, tuple(texts), begun)


@contextmanager
def _memory_in_one_line(subject: Subject) -> Iterator[None]:
    """Raises a DistillError in place of those of PyTorch that mean that memory has run out, which have many lines."""
    what = f"measuring {subject.name.replace('_', ' ')}"
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        remedy = "take a smaller model, or a machine with more memory"
        if is_out_of_memory(error):
            raise GpuMemoryError(what, "needs more GPU memory", amounts(error), remedy) from None
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise WorkerError(what, "needs more memory", first_line(error), remedy) from None
        raise


def held_out(config: Config) -> list[Mapping[str, Any]]:
    """The documents that a run of this configuration validates on, at most `data.validation.max_documents`.

    Raises:
        DataError: a row that cannot be read, unless bad rows are skipped.
    """
    from distill_rl.data.loader import empty, validation_batches
    from distill_rl.data.reading.sources import open_source, split_validation

    data = config.data
    _, validation = split_validation(open_source(data), data, config.run.seed)
    assert validation is not None
    batches = validation_batches(validation, replace(config, data=replace(data, concatenate=False)))
    return [document for batch in batches for document in batch.documents if not empty(document)]


def readable(
    documents: Sequence[Mapping[str, Any]], readers: Sequence[Reader], config: Config, longest: int | None
) -> list[Mapping[str, Any]]:
    """The documents in which student and teacher predict something, which each of `readers` reads; all models are measured on
    these. As in the training, those are left out that have a token for which a model has no embedding row.

    Args:
        readers: the student's tokenizer and, if it is another, the teacher's.
        longest: most of the student's tokens of a text, of which the rest is left out; None: not limited.

    Raises:
        DataError: there are none; or one that cannot be encoded, unless bad rows are skipped.
    """
    from distill_rl.demo import bits

    kept: list[Mapping[str, Any]] = []
    for document in documents:
        try:
            beginning = bits.beginning(readers[0].tokenizer, document, longest)
            read = [(reader, bits.encode(reader.tokenizer, beginning, config.data)) for reader in readers]
        except DataError:
            if config.data.bad_rows == "skip":
                continue
            raise
        if all(text.num_bytes and text.counted.any() and text.ids.max() < reader.rows for reader, text in read):
            kept.append(beginning)
            for reader, text in read:
                reader.texts.append(text)
    if not kept:
        rule = "some document that is held out must have a token that is predicted and trained on"
        raise DataError("TEXT", rule, f"none in {len(documents)}", "give more text, or longer documents")
    return kept


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
