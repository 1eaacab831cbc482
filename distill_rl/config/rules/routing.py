"""The rules of teachers that are chosen by row, as far as they can be checked without opening a file."""

from __future__ import annotations

from collections.abc import Iterator

from distill_rl.config.schema import Config
from distill_rl.errors import problem


def routing_problems(config: Config) -> Iterator[str]:
    """Yields problems of `teachers[].where` and `teachers[].weight_column`, and of settings that do not go with them."""
    chosen = [i for i, teacher in enumerate(config.teachers) if teacher.is_chosen_by_row]
    for i in chosen:
        for column, values in config.teachers[i].where.items():
            key = f"teachers.{i}.where"
            if not column.strip():
                yield problem(key, "must name columns of the data", repr(column))
            if values == []:
                yield problem(f"{key}.{column}", "must have at least one value", "[]", "leave the teacher out instead")
        if config.teachers[i].score != "static":
            rule = "compares the teachers on the same tokens, and where or weight_column gives each tokens of its own"
            yield problem(f"teachers.{i}.score", rule, config.teachers[i].score, "use score=static, or no such column")
    if not chosen:
        return
    key = f"teachers.{chosen[0]}.{'where' if config.teachers[chosen[0]].where else 'weight_column'}"
    if config.data.concatenate:
        rule = f"joins texts into one, and {key} may ask different teachers for them"
        yield problem("data.concatenate", rule, "true", "leave it out; data.packing puts several texts into a row")
    if config.projection.learnable:
        rule = f"needs chunks on every rank in every step, and with {key} a rank may have no row of the teacher"
        yield problem("projection.learnable", rule, "true", "leave one of them out")
