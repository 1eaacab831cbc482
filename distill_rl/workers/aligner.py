"""The aligner actor: documents in, packed token rows for every rank out. CPU only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distill_rl.config.schema import Config
from distill_rl.types import DocumentBatch
from distill_rl.workers.rank import Process, identify

if TYPE_CHECKING:
    from distill_rl.data.collate import BatchPlan


class AlignerWorker:
    def __init__(self, rank: int, config: Config, data_format: str):
        self._config, self._data_format = config, data_format

    def identify(self) -> Process:
        return identify()

    def start(self) -> None:
        from distill_rl.data.collate import Tokenization
        from distill_rl.models.hub import tokenizer_of

        data = self._config.data
        tokenizer = tokenizer_of(self._config.student)
        self._tokenization = Tokenization(
            tokenizer, format=self._data_format, loss_on=data.loss_on, max_length=data.max_length
        )

    def build(self, batch: DocumentBatch, plan: BatchPlan) -> tuple[Any, ...]:
        """BatchInfo, then one RankBatch per student DP rank, then one per DP rank of each teacher in turn."""
        from distill_rl.data.collate import build_batch

        info, student, teachers = build_batch(batch, self._tokenization, plan)
        return info, *student, *(part for teacher in teachers for part in teacher)
