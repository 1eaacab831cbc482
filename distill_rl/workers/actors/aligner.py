"""The aligner actor: documents in, token rows for every rank out."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray

from distill_rl.config.schema import Config
from distill_rl.data.batch.collate import BatchPlan
from distill_rl.errors import ConfigError
from distill_rl.system.memory import peak_gib
from distill_rl.types import Cursor, DocumentBatch, Row
from distill_rl.workers.actors.rank import Worker
from distill_rl.workers.cluster.telemetry import Gauges

if TYPE_CHECKING:
    from distill_rl.data.batch.document_aligner import AlignedDocument

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AlignerUse:
    """What a call of `align` took."""

    seconds: float
    peak_gib: float
    """The most memory that the aligner has held so far."""


class AlignerWorker(Worker):
    """Tokenises documents, aligns them with teachers of another tokenizer, and lays them out in rows.

    `align` does the documents of a part of a batch, `assemble` the rows of the batch from all of its parts, `build` both for
    a batch that has no parts. Its only state is tokenizers, so any aligner gives the same.

    Args:
        config: the run's settings.
        data_format: `text` or `messages`.
        plan: how rows are laid out and divided.
        other_tokenizer: per running teacher, whether its tokenizer differs from the student's.
    """

    def __init__(
        self, rank: int, config: Config, data_format: str, plan: BatchPlan, other_tokenizer: tuple[bool, ...] = ()
    ):
        self._config, self._data_format, self._plan, self._other_tokenizer = config, data_format, plan, other_tokenizer
        self._gauges = Gauges(config.run.name)

    def start(self) -> None:
        """Loads the tokenizers and prepares the aligners; called once, before all else.

        In an actor to which Ray assigned a GPU, sets CUDA_VISIBLE_DEVICES to that GPU alone.

        Raises:
            ConfigError: some teacher has another tokenizer, `aligner.dp.backend` is `cuda`, and this node cannot run
                it.
        """
        if ray.is_initialized() and ray.get_gpu_ids():
            os.environ["CUDA_VISIBLE_DEVICES"] = str(ray.get_gpu_ids()[0])
        if any(self._other_tokenizer) and self._config.aligner.dp.backend == "cuda":
            # The same check was made before the run on the driver's node, but this actor may be on another one.
            from distill_rl.align.dp.windows import missing_for_cuda

            if missing := missing_for_cuda():
                raise ConfigError("aligner.dp.backend", missing.rule, "cuda", missing.remedy)
        from distill_rl.workers.pipeline.batches import open_builder

        self._builder = open_builder(self._config, self._data_format, self._plan, self._other_tokenizer)
        log.info("tokenizers are loaded")

    def align(
        self, documents: Sequence[Mapping[str, Any]], skip: Collection[Row] = ()
    ) -> tuple[AlignerUse, list[AlignedDocument]]:
        """Tokenises documents and aligns them with teachers of other tokenizers. Needs `start`.

        Args:
            documents: of a batch, or of a part of one.
            skip: rows of documents to leave out; they count as empty.

        Returns:
            What it took, for the driver; the documents, for `assemble`.

        Raises:
            DataError: a document that the user has to fix.
        """
        began = time.perf_counter()
        aligned = self._builder.align(documents, skip)
        seconds = time.perf_counter() - began
        self._gauges.set("aligner_seconds", seconds)
        tokens = sum(len(piece.encoded.input_ids) for document in aligned for piece in document.pieces)
        self._gauges.add("aligner_tokens", tokens)
        return AlignerUse(seconds, peak_gib()), aligned

    def assemble(self, index: int, cursor: Cursor, *parts: list[AlignedDocument]) -> tuple[Any, ...]:
        """Lays a batch out as token rows for every rank. Needs `start`.

        Args:
            index, cursor: of the batch.
            parts: what `align` returned for all of its documents, in order.

        Returns:
            The BatchInfo (a summary, with the documents that could not be aligned); then for each data-parallel rank of
            the student its RankBatches, one per sub-batch; then the same for each running teacher in turn.
        """
        info, student, teachers = self._builder.assemble(index, cursor, parts)
        self._gauges.add("aligner_rows", info.num_rows)
        return replace(info, peak_gib=peak_gib()), *student, *(rank for teacher in teachers for rank in teacher)

    def build(
        self, index: int, cursor: Cursor, documents: Sequence[Mapping[str, Any]], skip: Collection[Row] = ()
    ) -> tuple[Any, ...]:
        """`align` for all documents of a batch, then `assemble`; the arguments are theirs. Needs `start`.

        Returns:
            What `assemble` returns, with the time of both.
        """
        use, aligned = self.align(documents, skip)
        info, *rows = self.assemble(index, cursor, aligned)
        return replace(info, seconds=info.seconds + use.seconds), *rows

    def try_row(self, document: Mapping[str, Any]) -> None:
        """Builds a batch of this document alone and discards it, to test whether it makes `align` or `assemble` fail.

        Returns normally if it does not; otherwise raises, dies or hangs as they do.
        """
        self._builder.build(DocumentBatch(0, (document,), Cursor()))
