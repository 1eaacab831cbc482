"""Checks a run before any worker starts, by opening its files: models, tokenizers, data, suites and the run directory.

All problems are collected and reported together. Nothing here loads a model's weights or starts Ray.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distill_rl.config.derive import total_steps
from distill_rl.config.facts import Facts
from distill_rl.config.load import read_config
from distill_rl.config.measured import unmeasured
from distill_rl.config.rules import chunk_problems
from distill_rl.config.schema import Config
from distill_rl.data.reading.cache import Cache
from distill_rl.errors import ConfigError
from distill_rl.models.files import gpu_bytes, visible_gpus
from distill_rl.preflight import data, endpoints, machine, models, pairs, stores, suites
from distill_rl.run import run_directory
from distill_rl.run.opened import OpenedRun, RunFindings
from distill_rl.system.memory import total_bytes

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Checked:
    """A configuration, its problems and what is open of its files. Every line begins with the key that it is about."""

    config: Config | None
    """None if one of its own files could not be read."""
    problems: list[str]
    unreachable: list[str]
    """What could not be checked, and why."""
    facts: Facts
    notes: tuple[str, ...] = ()
    """What is allowed, as far as the files show, but may surprise."""
    opened: OpenedRun | None = None
    """None without a configuration."""

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

    def say_notes(self, say: Say) -> None:
        """Says the notes, a line each, before the run begins."""
        for note in self.notes:
            say(f"note      {note}")

    def require_run(self) -> OpenedRun:
        """The run, which is open; raises as `require_valid`."""
        self.require_valid()
        assert self.opened is not None
        return self.opened


def gather(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    *,
    clean: bool | None = False,
    download: bool = True,
    say: Say = lambda _: None,
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
        clean: whether the run will delete an earlier one in the run directory; nothing is deleted here. None: no run is
            started now, so that there may be an earlier one.
        download, say: as for `inspect`.
        change: what a command makes of the settings before they are checked; it may add and remove problems, which are
            lines.
        trains, ask: as for `inspect`.
    """
    config, invalid = read_config(source, overrides, settings)
    if config is None:
        return Checked(None, invalid.lines, [], Facts())
    run = OpenedRun.of(change(config, invalid.lines))
    inspected = inspect(run, download=download, say=say, trains=trains, ask=ask)
    later = [*run.rules, *inspected.problems]
    if not any(text.startswith("run.name: ") for text in later):
        later += run_directory.problems(run.config, clean=clean)
    lines = invalid.lines + [text for text in later if text.partition(":")[0] not in invalid.keys]
    return replace(inspected, problems=list(dict.fromkeys(lines)), notes=(*invalid.notes, *inspected.notes))


def inspect(
    run: OpenedRun, *, download: bool = True, say: Say = lambda _: None, trains: bool = True, ask: bool = True
) -> Checked:
    """Opens the models, tokenizers, data and suites of a run, and compares them with its configuration and this machine.

    What is wrong raises nothing; it is listed in the result's `problems`. A hub name that cannot be reached is listed
    as `unreachable`. Neither the configuration's own rules nor the run directory are checked; see `gather`.

    Args:
        run: nothing of it is open yet.
        download: download a hub data set to inspect it, and convert data that must be; otherwise of the former only the
            existence is checked, of the latter the first rows, and nothing is written.
        say: called with a line before data are converted or counted.
        trains: False: no student is started, which then takes no GPU, memory or disk.
        ask: ask the servers of teachers with backend endpoint; False: they need not run yet.
    """
    config, gpus, findings = run.config, visible_gpus(), RunFindings()
    problems = findings.problems
    # Models and tokenizers.
    run.open_stores(findings)
    stores.store_problems(run, findings)
    run.open_models(findings)
    if trains:
        models.look_at_adapters(run, findings)
    problems += models.fit_problems(run, gpus=gpus)
    compared, lines = pairs.compare_vocabularies(run)
    for teacher, comparison in zip(run.teachers, compared):
        teacher.comparison = comparison
    problems += lines
    problems += stores.stored_ids_problems(run)
    problems += pairs.projection_problems(run)
    problems += stores.cache_problems(run, findings, on_gpu=gpus > 0, captures=not trains)
    # Data.
    facts, documents = data.data_facts(run, findings, Cache(write=download, say=say), on_gpu=gpus > 0)
    facts = replace(
        run.with_models(facts),
        total_steps=total_steps(config, facts.num_documents),
        gpus=gpus,
        cpus=len(os.sched_getaffinity(0)),
    )
    # What both are used for, on this machine.
    problems += chunk_problems(config, facts) if trains else ()
    endpoints.check_endpoints(run, documents, findings, ask=ask)
    suites.check_suites(config, run.student, run.teachers, findings)
    problems += unmeasured(config, facts) if config.checkpoint.keep_best else ()
    problems += machine.extra_problems(config)
    problems += models.attention_problems(config, run.models, gpus=gpus)
    problems += models.class_problems(config, run.models, gpus=gpus)
    problems += models.stored_problems(run.teachers, gpus=gpus)
    problems += machine.head_problems(config, run.teachers, gpus)
    findings.notes += models.packing_notes(config, run.models)
    findings.notes += pairs.beginning_notes(facts.data_kind, run.models)
    problems += machine.kernel_problems(config, run.student, gpus) if trains else ()
    problems += machine.router_problems(config, run.student) if trains else ()
    problems += machine.backend_problems(config, run.teachers, gpus)
    problems += machine.gpu_problems(config if trains else config.without_student(), gpus)
    problems += machine.space_problems(config, facts) if trains else ()
    problems += stores.room_problems(config, facts, captures=not trains) if not problems else ()
    started = facts if trains else replace(facts, student=None)
    gpu_memory = gpu_bytes() if gpus else ()
    machine.compare_memory(config, started, findings, host=total_bytes(), gpus=gpu_memory, valid=not run.rules)
    return Checked(config, problems, findings.unreachable, facts, tuple(findings.notes), run)
