"""What a sample of documents says about a run: tokens, what is cut or split, padding, and the positions of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distill_rl.config.derive import splits_documents
from distill_rl.config.facts import SampleFacts, SourceFacts, StepFacts, running_teachers, teacher_length
from distill_rl.config.schema import Config, DataConfig
from distill_rl.preflight.opened import Opened

if TYPE_CHECKING:
    import numpy as np

    from distill_rl.data.mixture import Mixture
    from distill_rl.data.reading.source import Source


def source_facts(data: DataConfig, training: Source | Mixture) -> Iterator[SourceFacts]:
    """Yields the facts of each source of the training documents, without those that need a sample."""
    from distill_rl.data.mixture import Mixture
    from distill_rl.data.reading.sources import each_source

    parts = training.sources if isinstance(training, Mixture) else (training,)
    names = training.names if isinstance(training, Mixture) else (data.path or "",)
    weights = training.weights if isinstance(training, Mixture) else (1.0,)
    for part, name, weight, (_, settings) in zip(parts, names, weights, each_source(data)):
        recognised = settings.format == "auto" and part.layout.format in ("sharegpt", "alpaca")
        count = len(part) if part.exact else None
        yield SourceFacts(name, part.layout.format, count, weight / sum(weights), recognised)


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
    from distill_rl.data.joining import Joining

    data, batch = config.data, config.train.global_batch_size
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
    found: list[SourceFacts] = []
    of_step: list[np.ndarray] = []
    for source, documents in zip(sources, samples):
        texts = joining.join(documents) if joining else documents
        lengths = _lengths(config, kind, texts, tokenizers)
        per_batch = batch * len(texts) / len(documents)  # joined documents are fewer
        alone = _pieces(_repeated(lengths, per_batch), limits, split=plan.split)
        sample = SampleFacts(
            tokens_per_document=float(lengths[:, 0].sum() / len(documents)),
            too_long=float((lengths > limits).any(axis=1).mean()),
            padding=1 - float(alone[:, 0].sum()) / _positions(alone, limits, plan),
            split=plan.split,
        )
        found.append(replace(source, sample=sample))
        of_step.append(_repeated(lengths, per_batch * source.share))
    step = _pieces(np.concatenate(of_step), limits, split=plan.split)
    positions = _positions(step, limits, plan)
    return tuple(found), StepFacts(positions, float(step[:, 0].sum()) / positions)


def _lengths(
    config: Config, kind: str, documents: Sequence[Mapping[str, Any]], tokenizers: Sequence[Any]
) -> np.ndarray:
    """int64 [documents, tokenizers]: tokens of each document for each tokenizer, not cut."""
    import numpy as np

    from distill_rl.data.batch.tokenization import Tokenization

    columns = []
    for tokenizer in tokenizers:
        # What a template leaves out is checked with the chats (preflight/chats.py).
        read = Tokenization(
            tokenizer, format=kind, loss_on="all", max_length=config.data.max_length, unrendered="warn"
        ).encode_all
        columns.append([len(read(document).input_ids) for document in documents])
    return np.array(columns, dtype=np.int64).T


def _repeated(lengths: np.ndarray, count: float) -> np.ndarray:
    """`count` documents, rounded, at least one: the given ones over and over."""
    import numpy as np

    return lengths[np.arange(max(round(count), 1)) % len(lengths)]


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
