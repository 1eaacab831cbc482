"""The rules of `student.lora`, as far as they can be checked without the model."""

from __future__ import annotations

from collections.abc import Iterator

from distill_rl.config.schema import Config
from distill_rl.errors import problem


def lora_problems(config: Config) -> Iterator[str]:
    """Yields problems of the adapters' settings, one line each.

    An input that is dropped as a whole, lists of layers that are empty or hold an empty name, a name in both, and
    quantised weights without adapters.
    """
    lora, key = config.student.lora, "student.lora"
    if lora is None:
        if (quantization := config.student.quantization) is not None:
            rule = "is for the weights that adapters leave as they are, and all weights of this student are trained"
            yield problem("student.quantization", rule, quantization, "add student.lora={}, or leave it out")
        return
    if lora.dropout == 1:
        yield problem(f"{key}.dropout", "must be less than 1: the adapters would never see their input", lora.dropout)
    if lora.targets is not None and not lora.targets:
        yield problem(f"{key}.targets", "must name a layer", "[]", "leave it out: all linear layers get an adapter")
    for name in ("targets", "modules_to_save"):
        for i, target in enumerate(getattr(lora, name) or ()):
            if not target.strip(". "):
                yield problem(f"{key}.{name}.{i}", "must be the end of a name, such as q_proj", repr(target))
    for both in sorted({*(lora.targets or ())} & {*lora.modules_to_save}):
        rule = f"must not be in {key}.targets too: a module that is trained whole needs no adapter"
        yield problem(f"{key}.modules_to_save", rule, both, "leave one of the two out")
