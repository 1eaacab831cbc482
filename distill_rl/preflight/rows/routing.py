"""What a sample of rows says of teachers that are chosen by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from distill_rl.config.facts import running_teachers
from distill_rl.config.schema import Config

if TYPE_CHECKING:
    from distill_rl.data.reading.source import Source

_SHOWN = 6
"""Most values of a column that are named."""


def routing_notes(config: Config, source: Source, documents: Mapping[int, Any]) -> Iterator[str]:
    """Yields how many rows of a sample each teacher is asked for, and values of `where` that no row of it has.

    Args:
        documents: of the sample, by index in the source.
    """
    from distill_rl.data.routing import plain_value, plain_values, weights_of

    routing = source.layout.routing
    found = [document for document in documents.values() if document is not None]
    if routing is None or not found:
        return
    rows = [source.columns(i) for i, document in documents.items() if document is not None]
    for i, (choice, teacher) in enumerate(zip(routing.choices, running_teachers(config))):
        if choice is None:
            continue
        count = sum((weights_of(document) or ())[i] > 0 for document in found)
        yield f"teachers.{i}: {teacher.name} is asked for {count} of {len(rows)} rows of a sample"
        for column, wanted in teacher.where.items():
            seen = {plain_value(row.get(column), "") for row in rows} - {None}
            for value in wanted if isinstance(wanted, list) else [wanted]:
                if not plain_values(value) <= seen:
                    shown = sorted(filter(None, seen))
                    others = ", ".join(repr(each) for each in shown[:_SHOWN]) + (", ..." if len(shown) > _SHOWN else "")
                    yield (
                        f"teachers.{i}.where.{column}: no row of a sample of {len(rows)} has {value!r}; they have "
                        f"{others or 'no value'}"
                    )
    nobody = sum(not any(weight > 0 for weight in weights_of(document) or ()) for document in found)
    if nobody:
        has_ce = config.loss.ce_weight > 0 or config.loss.dynamic_scale != "off"
        then = "they are trained on with CE alone" if has_ce else "loss.ce_weight is 0, so nothing is learnt from them"
        yield f"teachers: none is asked for {nobody} of {len(rows)} rows of a sample; {then}"
