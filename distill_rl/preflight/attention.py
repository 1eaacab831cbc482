"""Checks that models support the requested attention and the width of the rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from distill_rl.config.facts import CPU_WIDTH_MULTIPLE, GPU_WIDTH_MULTIPLE, row_width, running_teachers
from distill_rl.config.schema import Config, StudentConfig, TeacherConfig
from distill_rl.models.attention.choice import VARLEN, installed, obstacles
from distill_rl.models.families import family_of
from distill_rl.preflight.opened import line, model_name


def attention_problems(config: Config, models: Sequence[tuple[str, Any]], *, gpus: int) -> Iterator[str]:
    """Why a model cannot use the attention `varlen` or `flash_attention_2` that its settings request, one line each.

    Other values of the setting are not checked.

    Args:
        models: key and transformers configuration (None: not readable) of the student and of each running teacher.
        gpus: number visible on this machine. Those of a cluster are not known before it is joined.
    """
    settings: list[StudentConfig | TeacherConfig] = [config.student, *running_teachers(config)]
    for (key, hf_config), model in zip(models, settings):
        attention, remedy = model.attention, f"set {key}.attention=auto"
        if attention not in ("varlen", "flash_attention_2"):
            continue
        no_gpu = config.ray.address is None and not gpus
        if no_gpu:
            yield line(f"{key}.attention", "needs a GPU; none is visible", attention, remedy)
        if attention == "flash_attention_2":
            if not installed("flash_attn"):
                rule = "needs the package flash_attn, which is not installed"
                yield line(f"{key}.attention", rule, attention, f"pip install flash-attn, or {remedy}")
            if model.dtype == "fp32":
                yield line(f"{key}.attention", f"needs {key}.dtype: bf16", attention, f"{remedy}, or {key}.dtype=bf16")
            continue
        by_kernel = [list(obstacles(name, hf_config, dtype=model.dtype, training=key == "student")) for name in VARLEN]
        if all(by_kernel) and not no_gpu:  # no kernel works; report torch's, which needs no extra package
            for rule in by_kernel[-1]:
                yield line(f"{key}.attention", rule, attention, remedy)


def width_problems(config: Config, key: str, hf_config: Any, *, gpus: int) -> Iterator[str]:
    """Problems if a model has too few positions for `data.max_length`, or for the padded width of such rows; at most
    one.

    The padding matters only if positions beyond the last may be an error: in a table of learned positions, or in a
    family that is not tested. A model that states no number of positions has no problem.

    Args:
        key: `student` or `teachers.N`.
        hf_config: the model's transformers configuration.
        gpus: number of GPUs; the padded width differs with and without.
    """
    positions = getattr(hf_config, "max_position_embeddings", None)
    if positions is None:
        return
    longest, owner = config.data.max_length, model_name(key, config)
    if longest > positions:
        rule = f"must not exceed the {positions} positions of {owner}"
        yield line("data.max_length", rule, longest, f"use {positions} or less")
        return
    family, on_gpu = family_of(hf_config), gpus > 0
    width = row_width(longest, on_gpu=on_gpu)
    if width > positions and (family.learned_positions or not family.proven):
        multiple = GPU_WIDTH_MULTIPLE if on_gpu else CPU_WIDTH_MULTIPLE
        rule = f"rows of {longest} tokens are padded to {width} positions, a multiple of {multiple}; {owner} has {positions}"
        largest = positions // multiple * multiple
        yield line("data.max_length", rule, None, f"use {largest} or less" if largest else "take another model")
