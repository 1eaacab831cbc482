"""distill-rl submit, status, logs, stop: runs by name on a Ray cluster that is always there."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

from distill_rl.config.load import save_config
from distill_rl.config.paths import absolute
from distill_rl.config.save import require_no_secret
from distill_rl.config.schema import Config
from distill_rl.errors import ConfigError, DistillError, problems_of
from distill_rl.observe.log import printable, say, setup_console
from distill_rl.preflight import gather
from distill_rl.preflight.run_directory import paths_of
from distill_rl.service import runs
from distill_rl.service.runs import Run
from distill_rl.system.signals import EXIT_PREEMPTED

if TYPE_CHECKING:
    from distill_rl.service.client import Service

_POLL_S, _LONGEST_POLL_S = 0.5, 5.0
"""Ray hands over the whole log each time: the longer nothing comes, the more seldom it is asked for."""
_LEAST_STOP_S = 600
"""Ray kills a job so many seconds after it was asked to stop, unless ray.step_timeout_s is longer."""


def submit(path: str, overrides: Sequence[str], *, address: str | None, python: str | None, follow: bool) -> int:
    """Checks a run here, as `train` does, and hands it to the cluster.

    Raises:
        ConfigError: bad input, all problems at once; no cluster; or a run of this name that is running.
    """
    setup_console()
    checked = gather(path, [*overrides, "ray.address=auto"], clean=False)
    problems = [*checked.problems, *checked.unreachable]
    if checked.config is not None:
        told = {line.partition(":")[0] for line in problems}
        problems += [line for line in _unfit(checked.config) if line.partition(":")[0] not in told]
    if checked.config is None or problems:
        raise ConfigError.many(problems)
    config = absolute(checked.config)
    service = _service(address)
    chosen, attempt = runs.next_submission(service.jobs(), config.run.name)
    file = submission_file(config, chosen)
    save_config(config, file)
    interpreter = python or sys.executable
    steps = {} if checked.facts.total_steps is None else {runs.STEPS: str(checked.facts.total_steps)}
    try:
        service.submit(
            entrypoint([interpreter, "-m", "distill_rl.service.entry", str(file)]),
            chosen,
            runtime_env={"env_vars": _environment(config)},
            metadata={
                runs.NAME: config.run.name,
                runs.RUN: str(paths_of(config).root),
                runs.ATTEMPT: str(attempt),
                runs.PYTHON: interpreter,
                **steps,
            },
        )
    except DistillError:
        _withdraw(service, file)
        raise
    name = config.run.name
    say(f"submitted {name}, submission {attempt}, to {service.address}")
    say(f"watch     distill-rl status {name}; distill-rl logs {name} --follow; distill-rl stop {name}")
    return _follow(service, runs.find(service.jobs(), name)) if follow else 0


def status(name: str | None, *, address: str | None) -> int:
    """Prints a table of the runs on a cluster, or of one."""
    jobs = _service(address).jobs()
    found = [runs.find(jobs, name)] if name else list(runs.runs(jobs).values())
    if not found:
        print("no runs")
    for line in runs.table(found) if found else ():
        print(printable(line))
    return 0


def logs(name: str, *, address: str | None, follow: bool) -> int:
    """Prints what a run's process wrote; with `follow` until it has ended, and its exit code is the result."""
    service = _service(address)
    run = runs.find(service.jobs(), name)
    if follow:
        return _follow(service, run)
    _show(service.logs(run.submission_id))
    return 0


def stop(name: str, *, address: str | None, now: bool, deadline_s: float) -> int:
    """Has a run finish its step, save and end, or, with `now`, end without; waits for it. 0 when it has ended."""
    service = _service(address)
    run = runs.find(service.jobs(), name)
    if run.ended:
        say(f"{run.name} has ended already: {run.state}")
        return 0
    if now:
        _kill(service, run)
    else:
        service.stop(run.submission_id)
    say(f"stopping  {run.name}: {'at once, without saving' if now else 'it finishes the step and saves'}")
    if not _wait(service, run, deadline_s):
        remedy = f"wait for it, or end it without saving: distill-rl stop {name} --now"
        print(f"distill-rl: {run.name} has not ended within {deadline_s:g} s; {remedy}", file=sys.stderr)
        return 1
    code = runs.exit_code(runs.find(service.jobs(), name), service.logs(run.submission_id))
    last = "saved; go on with: distill-rl submit ... --resume auto" if code == EXIT_PREEMPTED else f"exit code {code}"
    say(f"stopped   {run.name}: {last}")
    return 0


def entrypoint(command: Sequence[str]) -> str:
    """The shell command of a job. Ray's signals must reach our process, so the shell becomes it."""
    return f"exec {shlex.join(command)}"


def submission_file(config: Config, submission_id: str) -> Path:
    """Where the configuration of a submission goes: never where another one's is. Of two that are submitted at the same
    moment the cluster takes one, and that one must not find the file of the other."""
    return Path(config.run.dir) / ".submitted" / f"{submission_id}.{token_hex(4)}.yaml"


def _unfit(config: Config) -> list[str]:
    """What is wrong with a run for a cluster alone, one line each."""
    return problems_of(lambda: runs.require_usable(config.run.name), lambda: require_no_secret(config))


def _withdraw(service: Service, file: Path) -> None:
    """Removes the configuration of a submission that failed, but where a job of the cluster needs it or nobody can tell:
    the answer to a request may be lost when it was granted."""
    with suppress(DistillError):
        if not any(file.name in job.entrypoint for job in service.jobs()):
            file.unlink(missing_ok=True)


def _service(address: str | None) -> Service:
    from distill_rl.service.client import Service

    return Service(address)


def _environment(config: Config) -> dict[str, str]:
    """What the run's process gets beside the environment that the cluster was started with."""
    from distill_rl.workers.cluster import access
    from distill_rl.workers.cluster.session import worker_environment

    patience = max(_LEAST_STOP_S, 2 * int(config.ray.step_timeout_s))
    passed = {name: value for name, value in worker_environment().items() if name != "DISTILL_RL_ATTEMPT"}
    return passed | {
        "RAY_JOB_STOP_WAIT_TIME_S": str(patience),  # Ray's own 3 s are not enough to save
        "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",  # the run sets these variables for its actors once more
        **({} if access.required() else {"RAY_AUTH_MODE": "disabled"}),
    }


def _kill(service: Service, run: Run) -> None:
    """By a job of its own on the machine of the run's driver: Ray has no call for it."""
    where = {"entrypoint_label_selector": {"ray.io/node-id": run.node}} if run.node else {}
    service.submit(
        entrypoint([run.python, "-m", "distill_rl.service.end", run.submission_id]),
        f"{run.submission_id}.end-{token_hex(3)}",
        **where,
    )


def _wait(service: Service, run: Run, deadline_s: float) -> bool:
    deadline = time.monotonic() + deadline_s
    while not runs.runs([service.job(run.submission_id)])[run.name].ended:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _follow(service: Service, run: Run) -> int:
    """Prints what comes, line by line, to the end of the run; its exit code."""
    shown, pause = 0, _POLL_S
    while True:
        now = runs.runs([service.job(run.submission_id)])[run.name]
        text = service.logs(run.submission_id)
        whole = len(text) if now.ended else text.rfind("\n") + 1
        _show(text[shown:whole])
        pause = _POLL_S if whole > shown else min(1.5 * pause, _LONGEST_POLL_S)
        shown = max(shown, whole)
        if now.ended:
            return runs.exit_code(now, text)
        time.sleep(pause)


def _show(text: str) -> None:
    for line in text.splitlines():
        print(printable(line.expandtabs()))
    sys.stdout.flush()
