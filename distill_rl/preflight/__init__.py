"""Checks a run before any worker starts, by opening its files: models, tokenizers, data, suites and the run directory.

All problems are collected and reported together. Nothing here loads a model's weights or starts Ray.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distill_rl.config.derive import total_steps
from distill_rl.config.facts import Facts, without_student
from distill_rl.config.load import read_config
from distill_rl.config.measured import unmeasured
from distill_rl.config.rules import validate
from distill_rl.config.rules.long_rows import chunk_problems
from distill_rl.config.schema import Config
from distill_rl.data.reading.cache import Cache
from distill_rl.errors import ConfigError, problem
from distill_rl.models.files.facts import gpu_bytes, visible_gpus
from distill_rl.preflight import run_directory
from distill_rl.preflight.data import data_facts
from distill_rl.preflight.endpoints import check_endpoints
from distill_rl.preflight.machine import (
    backend_problems,
    extra_problems,
    gpu_problems,
    head_problems,
    kernel_problems,
    router_problems,
    space_problems,
)
from distill_rl.preflight.memory import compare_memory
from distill_rl.preflight.models.attention import attention_problems, class_problems, packing_notes, width_problems
from distill_rl.preflight.models.lora import look_at_adapters
from distill_rl.preflight.models.opened import Findings, Opened, open_models
from distill_rl.preflight.models.pairs import (
    beginning_notes,
    compared_ids,
    projection_problems,
    teacher_facts,
    vocabulary_problems,
)
from distill_rl.preflight.models.quantization import stored_problems
from distill_rl.preflight.stores.check import cache_problems, room_problems, stored_ids_problems
from distill_rl.preflight.suites import check_suites
from distill_rl.system.memory import total_bytes


@dataclass(frozen=True, slots=True)
class Checked:
    """A configuration, its problems and the facts about its files. Every line begins with the key that it is about."""

    config: Config | None
    """None if one of its own files could not be read."""
    problems: list[str]
    unreachable: list[str]
    """What could not be checked, and why."""
    facts: Facts
    notes: tuple[str, ...] = ()
    """What is allowed, as far as the files show, but may surprise."""

    def require_valid(self, further: Callable[[Config], Iterable[str]] = lambda _: ()) -> Config:
        """The configuration, for a command that starts something with it.

        Args:
            further: returns problems that only this command has, one line each; those with a key that has a problem
                already are dropped. It is not called if there is no configuration.

        Raises:
            ConfigError: there is a problem, or something could not be checked; all lines at once.
        """
        lines = [*self.problems, *self.unreachable]
        reported = {text.partition(":")[0] for text in lines}
        if self.config is not None:
            lines += [text for text in further(self.config) if text.partition(":")[0] not in reported]
        if self.config is None or lines:
            raise ConfigError.many(lines)
        return self.config


def gather(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    *,
    clean: bool = False,
    download: bool = True,
    say: Callable[[str], None] = lambda _: None,
    change: Callable[[Config, list[str]], Config] = lambda config, _: config,
    trains: bool = True,
    ask: bool = True,
) -> Checked:
    """Reads, validates and inspects a configuration and the run directory, so that a user sees every problem at once.

    Bad input raises nothing; its problems are in the result. A key with an invalid value has its default in the later
    checks, and their problems with that key are dropped. If a file of the configuration cannot be read, nothing else is
    checked.

    Args:
        source, overrides, settings: as for `read_config`.
        clean: whether the run directory may hold an earlier run, which the run will delete; nothing is deleted here.
        download, say: as for `inspect`.
        change: what a command makes of the settings before they are checked; it may add and remove problems, which are
            lines.
        trains, ask: as for `inspect`.
    """
    config, invalid = read_config(source, overrides, settings)
    if config is None:
        return Checked(None, invalid.lines, [], Facts())
    config = change(config, invalid.lines)
    inspected = inspect(config, download=download, say=say, trains=trains, ask=ask)
    later = [*validate.problems(config), *inspected.problems]
    if not any(text.startswith("run.name: ") for text in later):
        later += run_directory.problems(config, clean=clean)
    lines = invalid.lines + [text for text in later if text.partition(":")[0] not in invalid.keys]
    return replace(inspected, problems=list(dict.fromkeys(lines)))


def inspect(
    config: Config,
    *,
    download: bool = True,
    say: Callable[[str], None] = lambda _: None,
    trains: bool = True,
    ask: bool = True,
) -> Checked:
    """Opens the models, tokenizers, data and suites of a configuration, and compares them with it and this machine.

    What is wrong raises nothing; it is listed in the result's `problems`. A hub name that cannot be reached is listed
    as `unreachable`. Neither the configuration's own rules nor the run directory are checked; see `gather`.

    Args:
        download: download a hub data set to inspect it, and convert data that must be; otherwise of the former only the
            existence is checked, of the latter the first rows, and nothing is written.
        say: called with a line before data are converted or counted.
        trains: False: no student is started, which then takes no GPU, memory or disk.
        ask: ask the servers of teachers with backend endpoint; False: they need not run yet.
    """
    findings = Findings()
    problems = findings.problems
    student, teachers = open_models(config, findings)
    models = [student, *teachers]
    if trains:
        look_at_adapters(config, student, findings)
    problems += _fit_problems(config, models)
    problems += vocabulary_problems(config, student, teachers)
    problems += stored_ids_problems(student, teachers)
    problems += projection_problems(config, student, teachers)
    problems += cache_problems(config, teachers, findings, on_gpu=visible_gpus() > 0, captures=not trains)
    facts = data_facts(config, student, teachers, findings, Cache(write=download, say=say))
    facts = replace(
        facts,
        vocabulary_size=compared_ids(student, teachers),
        total_steps=total_steps(config, facts.num_documents),
        student=student.facts,
        teachers=tuple(teacher_facts(student, teachers)),
        gpus=visible_gpus(),
        cpus=len(os.sched_getaffinity(0)),
    )
    problems += chunk_problems(config, facts) if trains else ()
    check_endpoints(config, teachers, findings.documents, findings, ask=ask)
    check_suites(config, student, teachers, findings)
    problems += unmeasured(config, facts) if config.checkpoint.keep_best else ()
    problems += extra_problems(config)
    problems += attention_problems(config, models, gpus=facts.gpus)
    problems += class_problems(config, models, gpus=facts.gpus)
    problems += stored_problems(teachers, gpus=facts.gpus)
    problems += head_problems(config, teachers, facts.gpus)
    findings.notes += packing_notes(config, models)
    findings.notes += beginning_notes(facts.data_kind, models)
    problems += kernel_problems(config, student, facts.gpus) if trains else ()
    problems += router_problems(config, student) if trains else ()
    problems += backend_problems(config, teachers, facts.gpus)
    problems += gpu_problems(config if trains else without_student(config), facts.gpus)
    problems += space_problems(config, facts) if trains else ()
    problems += room_problems(config, facts, captures=not trains) if not problems else ()
    started = facts if trains else replace(facts, student=None)
    compare_memory(config, started, findings, host=total_bytes(), gpus=gpu_bytes() if facts.gpus else ())
    return Checked(config, problems, findings.unreachable, facts, tuple(findings.notes))


def _fit_problems(config: Config, models: Sequence[Opened]) -> Iterator[str]:
    """Yields settings that exceed a model, one line each.

    These are rows too long for its positions, a `parallel.tp`, its own or that of the evaluator, over which it cannot be
    split, a `parallel.sp` over which its heads cannot, and a tokenizer with more ids than the model has embedding rows.

    Args:
        models: student and running teachers; one without a readable configuration is skipped.
    """
    from distill_rl.models.attention.choice import spread_problems
    from distill_rl.models.families import (
        engine_length_problem,
        fused_loss_problems,
        length_limit,
        sequence_parallel_problems,
        split_problems,
    )

    evaluate = config.evaluate
    for model in models:
        if model.config is None:
            continue
        yield from width_problems(config, model, gpus=visible_gpus())
        tp, backend = model.settings.parallel.tp, "vllm" if model.in_vllm else "hf"
        if tp > 0:
            lines = split_problems(model.config, tp, backend=backend, setting="parallel.tp")
            yield from (f"{model.key}.parallel.tp: {text}" for text in lines)
            sp = model.settings.parallel.sp
            if sp > 0 and not model.in_vllm:
                yield from sequence_parallel_problems(model.config, sp, tp, f"{model.key}.parallel.sp")
                yield from spread_problems(model.config, f"{model.key}.parallel.sp") if sp > 1 else ()
        split = evaluate.parallel.tp
        if split > 1 and evaluate.suites and (model.key == "student" or evaluate.teachers):
            lines = split_problems(model.config, split, backend=evaluate.backend, setting="evaluate.parallel.tp")
            yield from (f"evaluate.parallel.tp: {model.name}: {text}" for text in lines)
        if evaluate.suites and evaluate.backend == "vllm" and (model.key == "student" or evaluate.teachers):
            limit = length_limit(model.config)
            if limit is not None and limit.kind == "dynamic":
                rule = engine_length_problem(model.config, "vLLM", limit.length, limit.length)
                yield problem("evaluate.backend", f"{model.name}: {rule}", "vllm", "set evaluate.backend=hf")
        if model.key == "student" and config.loss.fused == "on":
            yield from fused_loss_problems(model.config)
        needed, columns = model.vocabulary_size, model.config.vocab_size
        if needed is not None and columns < needed:
            rule = f"the model has fewer embedding rows ({columns}) than its tokenizer has ids ({needed})"
            yield problem(f"{model.key}.model", rule, None, "give the tokenizer that belongs to the model")
