"""distill-rl try: checks a pair of models and a text, trains with the teacher and without it, compares, and says how to go on.

The two trainings are `distill-rl train` in processes of their own, with the same configuration but for the weights of the
two losses. The first, with the teacher, takes `--minutes` (`train.minutes`), the other as many steps, so that the comparison
does not depend on the load of the machine. Models are measured before and after them, in other processes.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import numpy as np

from distill_rl import __version__
from distill_rl.config.load import load_config
from distill_rl.config.schema import Config
from distill_rl.demo.measure import BEGUN, Measured, Prompt, Subject, TrialFindings, measure
from distill_rl.demo.runs import WITHOUT_TEACHER, ChildRun, figures, run_all
from distill_rl.demo.trial_setup import (
    FEWEST_HELD_OUT,
    WITHOUT,
    TrialPair,
    TrialPaths,
    TrialRequest,
    begin,
    claimed,
    count,
    default_out,
    examine,
    write_configuration,
)
from distill_rl.evals.compare import of_run
from distill_rl.models.files import ADVICE
from distill_rl.observe.log import open_console, printable, say, status
from distill_rl.observe.report.report import write_report
from distill_rl.system.files import write_json
from distill_rl.system.processes import call_in_child
from distill_rl.system.signals import requests

# The result of a trial: bits per byte of four models on the same text, and whether the teacher made a difference.

BEFORE, TAUGHT, CONTROL, TEACHER = "student_before", "with_teacher", "without_teacher", "teacher"
ROWS = {
    TEACHER: "teacher",
    BEFORE: "student, before",
    CONTROL: "student, trained without the teacher",
    TAUGHT: "student, trained with the teacher",
}
_BAR = 24
_RESAMPLES = 2000
_SHOWN = 160
"""Characters of a sample that are shown."""


@dataclass(frozen=True, slots=True)
class BitsDifference:
    """Bits per byte that the teacher saved: those without it minus those with it."""

    saved: float
    low: float
    high: float
    """95 % interval, over documents."""
    documents: int
    """Held out."""

    @property
    def interval(self) -> list[float] | None:
        """None for too few documents, among which an interval is narrow by chance."""
        return [self.low, self.high] if self.documents >= FEWEST_HELD_OUT else None

    @property
    def verdict(self) -> str:
        if self.interval is None:
            held = f"{self.documents} document{'' if self.documents == 1 else 's'} held out, at least {FEWEST_HELD_OUT} needed"
            return f"Too little text to tell whether the teacher helped: {held}; give more documents."
        interval = f"(95 % interval {self.low:+.3f} to {self.high:+.3f})"
        if self.low > 0:
            found = f"The teacher helped: {self.saved:.3f} bits per byte fewer than the same steps without it"
        elif self.high < 0:
            found = f"The teacher did harm: {-self.saved:.3f} bits per byte more than the same steps without it"
        else:
            found = f"No difference that this much held-out text could show: {self.saved:+.3f} bits per byte saved"
        return f"{found} {interval}."


def difference(taught: Measured, control: Measured, seed: int = 0) -> BitsDifference:
    """What the teacher saved, with an interval from documents that are drawn again, with replacement, for both models alike."""
    pairs = np.array([taught.bits, control.bits, taught.num_bytes], dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(pairs.shape[1], size=(_RESAMPLES, pairs.shape[1]))
    with_it, without, size = pairs[:, drawn].sum(axis=2)
    low, high = np.quantile((without - with_it) / size, (0.025, 0.975))
    return BitsDifference(control.bits_per_byte - taught.bits_per_byte, float(low), float(high), len(taught.bits))


def print_result(
    models: Mapping[str, Measured], outcome: BitsDifference, trainings: Mapping[str, Mapping[str, Any]]
) -> None:
    """Prints a table of bits per byte with bars, and what it says.

    Args:
        models: the models of ROWS.
        trainings: steps and seconds by model, of those that were trained.
    """
    from rich import box
    from rich.table import Table

    some = models[BEFORE]
    title = f"Bits per byte on {len(some.bits):,} held-out documents, {sum(some.num_bytes):,} bytes (less is better)"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("model", "bits per byte", "", "training"):
        table.add_column(heading, justify="right" if heading == "bits per byte" else "left", no_wrap=True)
    most = max(measured.bits_per_byte for measured in models.values())
    for name, label in ROWS.items():
        value, told = models[name].bits_per_byte, ""
        bar = "█" * max(1, round(_BAR * value / most))
        if training := trainings.get(name):
            told = f"{training['steps']:,} step{'' if training['steps'] == 1 else 's'} in {training['seconds']:.0f} s"
        table.add_row(label, f"{value:.3f}", bar, told, style="bold" if name == TAUGHT else None)
    console = open_console(110)
    console.print()
    console.print(table)
    seconds = [trainings[name]["seconds"] / max(trainings[name]["steps"], 1) for name in (TAUGHT, CONTROL)]
    cost = f" A step with the teacher took {seconds[0] / seconds[1]:.1f} times as long." if min(seconds) > 0 else ""
    print(outcome.verdict + cost)


def print_samples(prompts: Sequence[Prompt], models: Mapping[str, Measured]) -> None:
    """Prints held-out prompts, how they go on, and how each student goes on with them."""
    for i, prompt in enumerate(prompts):
        print(f"\n  prompt           {_shown(prompt.shown, end=True)}")
        print(f"  text             {_shown(prompt.reference)}")
        for name, label in ((BEFORE, "before"), (CONTROL, "without teacher"), (TAUGHT, "with teacher")):
            print(f"  {label:<16} {_shown(models[name].samples[i])}")
    print(flush=True)


def _shown(text: str, *, end: bool = False) -> str:
    """A text on one line, cut; at its beginning with `end`."""
    line = printable(" ".join(text.split()))
    if len(line) <= _SHOWN:
        return line or "(nothing)"
    return f"… {line[-_SHOWN:]}" if end else f"{line[:_SHOWN]} …"


OVERHEAD_S = 60.0
"""What starting four processes with their workers takes, roughly; large models take longer to load."""
MEASURING_TIMES_S = 600.0, 20.0
"""Most seconds of one measuring process: these, and this many times the time of a training."""
WORSE = 0.97
"""A first token that leaves no more than this part of the bits is worth writing."""
TIMES_LONGER = 10
"""How much longer the training is that is proposed to go on with."""


def try_pair(request: TrialRequest) -> int:
    """Tries a student and a teacher on a text, and prints and writes what came of it; returns the exit code.

    0 at the end, whatever the comparison says; that of a training that failed or was stopped. Everything is written into
    `out`, and nothing but a lock before the first training begins.

    Raises:
        ConfigError: why the pair cannot be tried, all problems at once; or another trial uses the folder.
        GpuMemoryError: a model is too large to be measured.
        WorkerError: a process that measures models died or took too long.
        KeyboardInterrupt: Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP, while no training was running.
    """
    start = time.perf_counter()
    paths = TrialPaths(request.out)
    with _stopped_by_signals(), claimed(request.out, clean=request.clean, resume=request.continued):
        with status("checking  models and text"):
            pair = examine(request)
        _introduce(request, pair)
        found = _measured(pair, "teacher, student", [
            Subject(TEACHER, pair.teacher, teacher=True, begin=True),
            Subject(BEFORE, pair.student, begin=True),
        ])  # fmt: skip
        before = found.models[BEFORE].bits_per_byte
        say(f"measured  teacher {found.models[TEACHER].bits_per_byte:.3f}, student {before:.3f} bits per byte")
        for line in beginning_lines(found.models):
            say(line)
        if not (request.continued and paths.configuration.exists()):
            begin(paths, clean=request.clean)
            write_configuration(paths.configuration, pair.config, _comments(request, pair))
        if code := _train(paths):
            again = "the same command goes on" if request.continued else "go on with --resume"
            say(f"stopped   {again}, or start over with --clean")
            return code
        trained = _measured(pair, "both students", [
            Subject(CONTROL, paths.control.export), Subject(TAUGHT, paths.taught.export),
        ])  # fmt: skip
        models = {**found.models, **trained.models}
        _conclude(request, pair, paths, replace(found, models=models), start)
    return 0


def _introduce(request: TrialRequest, pair: TrialPair) -> None:
    """Prints what was found, what was chosen and why, and how long it will take."""
    known = pair.known
    (student, teacher), held = pair.models, pair.config.data.validation.max_documents
    kind = "chats" if known.chats else "documents"
    longest = pair.reading.longest
    cut = "" if longest is None else f"; of each the first {longest:,} tokens are measured"
    say(f"student   {request.student}: {student.family}, {count(student.parameters)} parameters")
    say(f"teacher   {request.teacher}: {teacher.family}, {count(teacher.parameters)} parameters")
    say(f"text      {request.text}: {known.documents:,} {kind}, of which about {held:,} are held out{cut}")
    for line in (*pair.reasons, *(f"note      {note}" for note in pair.notes)):
        say(line)
    epochs = pair.config.train.epochs
    cap = "" if epochs is None else f" (at most {epochs:g} passes over the text)"
    if request.steps is not None:
        time_taken = f"{request.length} without it{cap}; each says how long it will take"
        say(f"time      {request.length} with the teacher, {time_taken}")
        return
    total = 2 * request.minutes + OVERHEAD_S / 60
    say(
        f"time      {request.length} with the teacher{cap}, at most as long for as many steps without it, and about "
        f"{OVERHEAD_S:.0f} s for starting and measuring: {total:.1f} min in all, more if models are slow to load"
    )


def _measured(pair: TrialPair, what: str, subjects: Sequence[Subject]) -> TrialFindings:
    """Measures models in a process of their own."""
    say(f"measure   {what}: bits per byte of the held-out text, continuations")
    least, times = MEASURING_TIMES_S
    deadline_s = least + times * 60 * pair.known.minutes
    arguments = pair.config, subjects, pair.reading, os.getpid()
    return call_in_child("the measurement", measure, *arguments, deadline_s=deadline_s)


def beginning_lines(models: Mapping[str, Measured]) -> list[str]:
    """A line for each model that reads the text worse because its tokenizer does not write the model's first token."""
    read = (("teacher", "teachers.0", TEACHER), ("student", "student", BEFORE))
    return [
        f"note      {name}: {begun.as_read:.3f} bits per byte of {BEGUN} documents as its tokenizer reads them, {begun.begun:.3f} "
        f"with {begun.token} before each; give one that writes it ({key}.tokenizer=FOLDER; {ADVICE})"
        for name, key, model in read
        if (begun := models[model].begun) is not None and begun.begun < WORSE * begun.as_read
    ]


def _train(paths: TrialPaths) -> int:
    """Trains with the teacher, then without it; returns 0, or the exit code of the one that failed."""
    control = (f"run.name={WITHOUT}", *WITHOUT_TEACHER)
    # The configuration of the first training, once it has ended, has the steps that its minutes have become.
    for what, run, configuration, overrides in (
        ("with the teacher", paths.taught, paths.configuration, ()),
        ("without the teacher", paths.control, paths.taught.config, control),
    ):
        if run.export.exists():  # of a trial that is resumed: this training had ended
            continue
        begun = "--resume" if run.checkpoints.exists() and any(run.checkpoints.iterdir()) else "--clean"
        command = ("train", "-c", os.fspath(configuration), begun, *overrides)
        if code := run_all([ChildRun(command, what, f"the training {what}")], {"RAY_USAGE_STATS_ENABLED": "0"}):
            return code
    return 0


def _conclude(request: TrialRequest, pair: TrialPair, paths: TrialPaths, found: TrialFindings, start: float) -> None:
    """Writes the configuration that repeats the training, the result and the report; prints all that is to be seen."""
    models, trained = found.models, load_config(paths.taught.config)
    config = replace(pair.config, train=trained.train, schedule=trained.schedule)
    write_configuration(paths.configuration, config, _comments(request, pair))
    shutil.rmtree(paths.control.checkpoints, ignore_errors=True)
    trainings: dict[str, dict[str, Any]] = {}
    for name, run in ((TAUGHT, paths.taught), (CONTROL, paths.control)):
        done = figures(run.metrics)
        trainings[name] = {"steps": done.steps, "seconds": round(done.seconds, 2)}
    outcome = difference(models[TAUGHT], models[CONTROL], request.seed)
    seconds = time.perf_counter() - start
    result = {
        "version": __version__,
        "student": request.student,
        "teacher": request.teacher,
        "text": request.text,
        "minutes": request.minutes if request.steps is None else None,
        "steps": request.steps,
        "seed": request.seed,
        "method": pair.method,
        "bits_per_byte": {name: models[name].bits_per_byte for name in ROWS},
        "saved_by_teacher": {"bits_per_byte": outcome.saved, "interval": outcome.interval},
        "verdict": outcome.verdict,
        "held_out": {"documents": len(models[BEFORE].bits), "bytes": sum(models[BEFORE].num_bytes)},
        "trainings": trainings,
        "samples": [
            {
                "prompt": prompt.shown,
                "text": prompt.reference,
                **{name: measured.samples[i] for name, measured in models.items() if measured.samples},
            }
            for i, prompt in enumerate(found.prompts)
        ],
        "export": os.fspath(paths.taught.export.absolute()),
        "seconds": round(seconds, 1),
    }
    write_json(paths.result, result)
    evaluation = of_run(paths.taught.root, [paths.control.root])
    write_report(paths.taught.root, evaluation=evaluation, comparisons=[paths.control.root], out=paths.report)
    print_result(models, outcome, trainings)
    print_samples(found.prompts, models)
    for name, path in (("student", paths.taught.export), ("report", paths.report), ("result", paths.result)):
        say(f"{name:<9} {path}")
    say(f"settings  {paths.configuration}: repeats the training with the teacher, bit for bit")
    longer = longer_training(pair.config, trainings[TAUGHT]["steps"])
    say(f"go on     {shlex.join(['distill-rl', 'train', '-c', os.fspath(paths.configuration), *longer])}")
    say(f"time      {seconds:.0f} s in all")


def longer_training(config: Config, steps: int) -> list[str]:
    """The overrides with which a written configuration trains longer.

    Args:
        config: of the trial, before the training settled its schedule.
        steps: of the training.
    """
    overrides = ["run.name=longer", f"train.steps={TIMES_LONGER * steps}", "train.epochs=null"]
    # A training that ended within its warm-up has written an end into the schedule, after which the rate is 0.
    return overrides + (["schedule.steps=null"] if config.schedule.steps is None else [])


def _comments(request: TrialRequest, pair: TrialPair) -> list[str]:
    """The comment above the settings."""
    command = ["distill-rl", "try", request.student, request.teacher, request.text]
    command += ["--minutes", f"{request.minutes:g}"] if request.steps is None else ["--steps", str(request.steps)]
    if request.seed:
        command += ["--seed", str(request.seed)]
    if request.out != default_out(request.student, request.teacher):
        command += ["--out", os.fspath(request.out)]
    return [f"Chosen by `{shlex.join([*command, *request.overrides])}`:", "", *pair.reasons]


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Lets SIGTERM, SIGUSR1 and SIGHUP end what runs inside like Ctrl-C, so that no process is left behind."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, stop) for number in requests()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
