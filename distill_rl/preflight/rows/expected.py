"""What a sample of documents says about a run: tokens, what is cut or split, padding, and the positions of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from distill_rl.config.facts import (
    SampleFacts,
    SourceFacts,
    StepFacts,
    running_teachers,
    splits_documents,
    teacher_length,
)
from distill_rl.config.schema import Config, DataConfig
from distill_rl.preflight.models.opened import Opened

if TYPE_CHECKING:
    import numpy as np

    from distill_rl.data.loader import Joining
    from distill_rl.data.mixture import Mixture
    from distill_rl.data.reading.source import Source

_STEPS = 256
"""Most steps over which means are taken."""


def source_facts(data: DataConfig, training: Source | Mixture) -> Iterator[SourceFacts]:
    """Yields the facts of each source of the training documents, without those that need a sample."""
    from distill_rl.data.mixture import MixedSource, Mixture
    from distill_rl.data.reading.sources import each_source

    members = training.members if isinstance(training, Mixture) else [MixedSource(training, 1.0, data.path or "")]
    total = sum(member.weight for member in members)
    for member, (_, settings) in zip(members, each_source(data)):
        part = member.source
        recognised = settings.format == "auto" and part.layout.format in ("sharegpt", "alpaca")
        count = len(part) if part.exact else None
        yield SourceFacts(member.name, part.layout.format, count, member.weight / total, recognised)


def expect(
    config: Config,
    kind: str,
    sources: Sequence[SourceFacts],
    samples: Sequence[Sequence[Mapping[str, Any]]],
    student: Opened,
    teachers: Sequence[Opened],
    *,
    on_gpu: bool,
) -> tuple[tuple[SourceFacts, ...], StepFacts | None]:
    """The facts of the sources with those of their samples, and what a step is expected to compute.

    Documents are tokenised by every tokenizer of the run, but not aligned: pieces are taken to be as long as rows allow.
    For a configuration and documents without problems.

    Args:
        kind: of the documents, `text` or `messages`.
        samples: documents of every source.
        student, teachers: as opened, the teachers with their `cross_tokenizer_loss` set.
        on_gpu: whether the rows go to GPUs.

    Returns:
        As said; the sources unchanged and None if a tokenizer could not be read or a sample is empty.
    """
    import numpy as np

    from distill_rl.data.batch.collate import BatchPlan
    from distill_rl.data.loader import Joining

    data = config.data
    crossing = [
        (opened, teacher_length(config, teacher))
        for opened, teacher in zip(teachers, running_teachers(config))
        if opened.cross_tokenizer_loss is not None
    ]
    tokenizers = [student.tokenizer, *(opened.tokenizer for opened, _ in crossing)]
    if not all(samples) or not all(tokenizers):
        return tuple(sources), None
    limits = np.array([data.max_length, *(length for _, length in crossing)])
    plan = BatchPlan.from_config(config, 0, split=splits_documents(config, kind)).for_device(on_gpu=on_gpu)
    joining = Joining.of(data)
    read = [_Sample.of(config, kind, documents, tokenizers, joining) for documents in samples]

    def steps(samples: Sequence[_Sample], shares: Sequence[float]) -> tuple[float, float, float]:
        """The means over some steps of positions and tokens, and the share of documents that are too long."""
        positions, tokens, too_long = [], [], []
        for lengths in _steps(samples, shares, config.train.global_batch_size, joining):
            pieces = _pieces(lengths, limits, split=plan.split)
            positions.append(_positions(pieces, limits, plan))
            tokens.append(pieces[:, 0].sum())
            too_long.append((lengths > limits).any(axis=1))
        return float(np.mean(positions)), float(np.mean(tokens)), float(np.concatenate(too_long).mean())

    found = []
    for source, part in zip(sources, read):
        positions, tokens, too_long = steps([part], [1.0])
        sample = SampleFacts(float(part.lengths[:, 0].mean()), too_long, plan.split, 1 - tokens / positions)
        found.append(replace(source, sample=sample))
    positions, tokens, _ = steps(read, [source.share for source in sources])
    return tuple(found), StepFacts(round(positions), tokens / positions)


@dataclass(frozen=True, slots=True)
class _Sample:
    """The documents of a sample as the tokenizers read them."""

    lengths: np.ndarray
    """int64 [documents, tokenizers], in tokens, not cut."""
    characters: np.ndarray
    """int64 [documents]; of chats 0."""
    joint: np.ndarray
    """int64 [tokenizers]: tokens that a joint between two texts adds, negative if special tokens vanish there."""

    @classmethod
    def of(
        cls,
        config: Config,
        kind: str,
        documents: Sequence[Mapping[str, Any]],
        tokenizers: Sequence[Any],
        joining: Joining | None,
    ) -> _Sample:
        """Tokenises documents."""
        import numpy as np

        lengths = _lengths(config, kind, documents, tokenizers)
        characters = np.array([len(document.get("text", "")) for document in documents], dtype=np.int64)
        if joining is None:
            return cls(lengths, characters, np.zeros(len(tokenizers), dtype=np.int64))
        separator, nothing = _lengths(config, kind, [{"text": joining.separator}, {"text": ""}], tokenizers)
        return cls(lengths, characters, separator - 2 * nothing)


def _steps(
    samples: Sequence[_Sample], shares: Sequence[float], batch_size: int, joining: Joining | None
) -> Iterator[np.ndarray]:
    """Yields int64 [documents, tokenizers] for several steps: the lengths of documents of all samples, joined if texts are.

    Each sample has its share of the documents. They are drawn evenly from it, and again if they are too few.
    """
    import numpy as np

    from distill_rl.data.order import random_order

    orders = [random_order(0, (i,), len(sample.lengths)) for i, sample in enumerate(samples)]
    given = np.zeros(len(samples), dtype=np.int64)
    for step in range(min(max(sum(map(len, orders)) // batch_size, 1), _STEPS)):
        before = given.copy()
        for place in range(step * batch_size, (step + 1) * batch_size):
            given[np.argmax(np.array(shares) * (place + 1) - given)] += 1  # the one that is furthest behind
        chosen = [
            np.sort(order[np.arange(first, end) % len(order)]) for order, first, end in zip(orders, before, given)
        ]
        lengths = np.concatenate([sample.lengths[rows] for sample, rows in zip(samples, chosen)])
        if joining is None:
            yield lengths
            continue
        characters = np.concatenate([sample.characters[rows] for sample, rows in zip(samples, chosen)])
        joint = samples[0].joint
        groups = joining.groups(characters.tolist())
        yield np.stack([lengths[group].sum(axis=0) + joint * (group.stop - group.start - 1) for group in groups])


def _lengths(
    config: Config, kind: str, documents: Sequence[Mapping[str, Any]], tokenizers: Sequence[Any]
) -> np.ndarray:
    """int64 [documents, tokenizers]: tokens of each document for each tokenizer, not cut."""
    import numpy as np

    from distill_rl.data.batch.tokenization import Tokenization

    columns = []
    for tokenizer in tokenizers:
        # What a template leaves out is checked with the chats (preflight/rows/chats.py).
        read = Tokenization(
            tokenizer, format=kind, loss_on="all", max_length=config.data.max_length, unrendered="warn"
        ).encode_all
        columns.append([len(read(document).input_ids) for document in documents])
    return np.array(columns, dtype=np.int64).T


def _pieces(lengths: np.ndarray, limits: np.ndarray, *, split: bool) -> np.ndarray:
    """int64 [pieces, sides]: the lengths of what rows hold of the documents: their beginnings, or all of them in pieces.

    A document longer than a row on some side is divided in the same proportion on all sides.
    """
    import numpy as np

    fill = (lengths / limits).max(axis=1)  # in rows, on the side that is full first
    whole = np.minimum(1 / np.maximum(fill, 1e-9), 1)[:, None]
    if not split:
        return np.minimum(np.rint(lengths * whole).astype(np.int64), limits)
    pieces = []
    for document, rows, part in zip(lengths, fill, whole):
        full = np.minimum(np.rint(document * part).astype(np.int64), limits)
        count = max(int(np.ceil(rows)), 1)
        pieces += [full] * (count - 1) + [np.minimum(document - full * (count - 1), limits)]
    return np.maximum(np.stack(pieces), 0)


def _positions(lengths: np.ndarray, limits: np.ndarray, plan: Any) -> int:
    """Positions that the student computes for a batch of documents with these lengths."""
    from distill_rl.data.batch.collate import arrange_lengths, widths

    members = arrange_lengths(lengths, limits, plan)
    return int(widths([int(lengths[row, 0].sum()) for row in members], plan).sum())
