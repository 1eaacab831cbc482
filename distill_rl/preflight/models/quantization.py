"""Checks what quantised teachers need: their checkpoint, and the packages that read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distill_rl.config.facts import runs_model
from distill_rl.config.quantization import AS_STORED
from distill_rl.config.schema import TeacherConfig
from distill_rl.errors import problem
from distill_rl.models.files.headers import holds_several
from distill_rl.preflight.models.opened import Opened


def stored_problems(teachers: Sequence[Opened], *, gpus: int) -> Iterator[str]:
    """Yields what is against loading a teacher as it is stored, one line each.

    Whether its method works on a GPU that this process does not look at is found out when it is loaded, before step 1.

    Args:
        teachers: the running ones.
        gpus: number visible on this machine.
    """
    from distill_rl.models.stored import as_stored_problem, method_of, missing_packages

    for opened in teachers:
        settings, key = opened.settings, f"{opened.key}.quantization"
        assert isinstance(settings, TeacherConfig)
        if settings.quantization != AS_STORED or not runs_model(settings) or opened.config is None:
            continue
        assert opened.folder is not None
        rule = as_stored_problem(opened.config, several=holds_several(opened.folder), tp=1)
        if rule:
            yield problem(key, rule, AS_STORED, f"set {key}=int8, int4, fp8 or null")
            continue
        method = method_of(opened.config) or ""
        if missing := missing_packages(method, on_gpu=gpus > 0):
            rule = f"{method} weights need {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed"
            yield problem(key, rule, AS_STORED, f"pip install {' '.join(missing)}")
