"""The model card of a run's student: what its configuration, its files and its measurements say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distill_rl.config.measured import is_suite_score, is_validated
from distill_rl.config.schema import Config
from distill_rl.models.files import Licence, licence_of
from distill_rl.observe.report.card import model_card
from distill_rl.observe.sinks import read_records
from distill_rl.types import RunPaths


def card_of(
    config: Config,
    *,
    step: int,
    data_fingerprint: str,
    scores: Mapping[str, float],
    dtype: str = "as_stored",
    licence: Licence | None = None,
    methods: Sequence[str | None] = (),
) -> str:
    """Returns the text of the card of a run's student. Licences are read from the models' own files.

    Args:
        step, data_fingerprint, scores, dtype, methods: as in `model_card`.
        licence: of the student, if it is not that of the model that it was trained from.
    """
    return model_card(
        config,
        step=step,
        data_fingerprint=data_fingerprint,
        scores=scores,
        dtype=dtype,
        licence=licence or licence_of(config.student),
        teacher_licences=[licence_of(teacher) for teacher in config.teachers],
        methods=methods,
    )


def measured_at(paths: RunPaths, step: int) -> dict[str, float]:
    """What validation and suites measured at a step, by metric; empty if nothing was, or the records are gone."""
    try:
        records = read_records(paths.metrics)
    except OSError:
        return {}
    return {
        name: float(value)
        for record in records
        if record.get("step") == step
        for name, value in record.items()
        if (is_validated(name) or is_suite_score(name)) and isinstance(value, int | float)
    }
