"""Which teachers a row is for: `teachers[].where` and `teachers[].weight_column`.

A row has a weight for every running teacher: 1 for a teacher without these settings. With `where`, it is 0 for rows that
do not match; with `weight_column`, it is the number in that column. A teacher is asked for the rows in which its weight is
above 0.

Values are compared as people read them: 1, 1.0 and the texts "1" and "1.0" are the same value, true is the same as the
text "true", and other texts are compared letter by letter. So it does not matter whether a file has types, as JSON lines
have, or none, as CSV.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from distill_rl.config.schema import Config
from distill_rl.errors import DataError

WEIGHTS = "teacher_weights"
"""Key of a document: the weights of the running teachers, in their order."""
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
"""A number as JSON writes it. An identifier such as 007 is not one."""
_LONGEST = 40
"""Characters of a text that may be a number."""


@dataclass(frozen=True, slots=True)
class RowChoice:
    """The rows that one teacher is asked for."""

    key: str
    """`teachers.0`, for messages."""
    where: Mapping[str, frozenset[str]]
    """Column → the values of which a row must have one in it, as `plain_value` writes them."""
    weight_column: str | None

    @property
    def named(self) -> dict[str, str]:
        """The columns that are read, each with the setting that names it."""
        found = dict.fromkeys(self.where, f"{self.key}.where")
        if self.weight_column is not None:
            found.setdefault(self.weight_column, f"{self.key}.weight_column")
        return found

    def weight(self, row: Mapping[str, Any], at: Callable[[str], str]) -> float:
        """The weight of a row, a number that fp32 has; other arguments and errors as of `Routing.weights`."""
        for column, values in self.where.items():
            if plain_value(row.get(column), at(column)) not in values:
                return 0.0
        return 1.0 if self.weight_column is None else _weight(row.get(self.weight_column), at(self.weight_column))


@dataclass(frozen=True, slots=True)
class Routing:
    """Which rows every running teacher is asked for."""

    choices: tuple[RowChoice | None, ...]
    """None for a teacher that is asked for all rows."""

    @classmethod
    def of(cls, config: Config) -> Routing | None:
        """As the settings say; None: all running teachers are asked for all rows."""
        choices: list[RowChoice | None] = []
        for i, teacher in enumerate(config.running_teachers):
            where = {column: plain_values(wanted) for column, wanted in teacher.where.items()}
            choice = RowChoice(f"teachers.{i}", where, teacher.weight_column)
            choices.append(choice if teacher.is_chosen_by_row else None)
        return cls(tuple(choices)) if any(choices) else None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read, each once."""
        return tuple(dict.fromkeys(column for choice in self.choices if choice for column in choice.named))

    def named_by(self, column: str) -> str:
        """The first setting that names a column."""
        return next(choice.named[column] for choice in self.choices if choice and column in choice.named)

    def weights(self, row: Mapping[str, Any], at: Callable[[str], str]) -> tuple[float, ...]:
        """The weight of a row for each running teacher.

        Args:
            row: the values of the columns.
            at: the name of a column → the words for file, row and column in error messages.

        Raises:
            DataError: a value that is no text, number, true, false or null; a weight that is no number of 0 or more.
        """
        return tuple(1.0 if choice is None else choice.weight(row, at) for choice in self.choices)


def plain_values(wanted: Any) -> frozenset[str]:
    """The values of one entry of `teachers[].where`, which is one value or a list of them, as `plain_value` writes them."""
    return frozenset(plain_value(value, "") or "" for value in (wanted if isinstance(wanted, list) else [wanted]))


def plain_value(value: Any, what: str) -> str | None:
    """A value as it is compared: numbers in their shortest form, `true` and `false`, other texts as they are; None for null.

    Args:
        what: file, column and row, for the message.

    Raises:
        DataError: a list, an object, or anything else that is not compared.
    """
    if value is None:
        return None
    if isinstance(value, str):
        if len(value) > _LONGEST or not _NUMBER.fullmatch(value):
            return value
        value = json.loads(value)
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, int | float):
        whole = isinstance(value, int) or value.is_integer()
        return str(int(value)) if whole else repr(value)
    rule = "text, a number, true or false, by which a teacher is chosen"
    raise DataError(what, rule, f"{type(value).__name__} {str(value)[:40]!r}")


def _weight(value: Any, what: str) -> float:
    """The number in a `weight_column`, or the text of one, in the precision of fp32."""
    number = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError), np.errstate(over="ignore"):
            number = float(np.float32(float(value)))
    if not (math.isfinite(number) and number >= 0):
        found = "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
        raise DataError(what, "a finite number of 0 or more, the weight of the row for a teacher", found)
    return number


def weights_of(document: Mapping[str, Any]) -> tuple[float, ...] | None:
    """The weights of the running teachers for a document; None if they are not chosen by row."""
    return document.get(WEIGHTS)


def asked(weights: Sequence[float] | None, teacher: int) -> bool:
    """Whether a teacher is asked for a document with these weights (`weights_of`)."""
    return weights is None or weights[teacher] > 0
