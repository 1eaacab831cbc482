"""The aligner actor: documents in, token rows for every rank out."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

import ray

from distill_rl.config.facts import running_teachers
from distill_rl.config.schema import Config
from distill_rl.data.collate import BatchPlan
from distill_rl.errors import ConfigError
from distill_rl.types import Cursor, DocumentBatch
from distill_rl.workers.actors.rank import Worker
from distill_rl.workers.cluster.gauges import Gauges


class AlignerWorker(Worker):
    """Tokenises documents, aligns them with teachers of another tokenizer, and lays them out in rows.

    Its only state is tokenizers, so any aligner gives the same rows for a batch.

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
        if ray.is_initialized() and ray.get_gpu_ids():
            os.environ["CUDA_VISIBLE_DEVICES"] = str(ray.get_gpu_ids()[0])
        if any(self._other_tokenizer) and self._config.aligner.dp.backend == "cuda":
            _require_cuda()
        from distill_rl.data.collate import Tokenization
        from distill_rl.data.cross_tokenizer_batch import BatchBuilder, CrossTokenizerTeacher
        from distill_rl.models.hub import stops_of, tokenizer_of

        data = self._config.data
        tokenizer = tokenizer_of(self._config.student)
        tokenization = Tokenization(
            tokenizer, format=self._data_format, loss_on=data.loss_on, max_length=data.max_length
        )
        teachers: list[CrossTokenizerTeacher | None] = []
        for settings, other_tokenizer in zip(running_teachers(self._config), self._other_tokenizer):
            if not other_tokenizer:
                teachers.append(None)
                continue
            teacher = CrossTokenizerTeacher.of(
                settings.name,
                tokenizer,
                tokenizer_of(settings),
                self._config.aligner,
                student_stops=stops_of(self._config.student),
                stops=stops_of(settings),
            )
            teacher.aligner.warm_up()
            teachers.append(teacher)
        self._builder = BatchBuilder(tokenization, self._plan, teachers)

    def build(self, batch: DocumentBatch, skip: Collection[int] = ()) -> tuple[Any, ...]:
        """The rows of a batch without the rows in `skip`.

        Returns:
            The BatchInfo, then one RankBatch per DP rank of the student, then one per DP rank of each teacher in turn.
        """
        info, student, teachers = self._builder.build(batch, skip)
        self._gauges.set("aligner_seconds", info.seconds)
        self._gauges.add("aligner_rows", info.num_rows)
        self._gauges.add("aligner_tokens", info.num_tokens)
        return info, *student, *(part for teacher in teachers for part in teacher)

    def try_row(self, document: Mapping[str, Any]) -> None:
        """Does what `build` does, with one document. It raises, dies or hangs if that document makes `build` do so."""
        self._builder.build(DocumentBatch(0, (document,), Cursor()))


def _require_cuda() -> None:
    """Repeats the check of preflight, because this aligner may run on another node than the driver.

    Raises:
        ConfigError: this node lacks something that the CUDA backend needs.
    """
    from distill_rl.align.dp.device import missing_for_cuda

    if missing := missing_for_cuda():
        raise ConfigError("aligner.dp.backend", missing.rule, "cuda", missing.remedy)
