"""distill-rl submit, status, logs, stop: manages runs on an existing Ray cluster by name."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from distill_rl.config.paths import absolute
from distill_rl.config.save import require_no_secret, save_config
from distill_rl.config.schema import Config
from distill_rl.errors import DistillError, problems_of
from distill_rl.observe.log import printable, say, setup_console
from distill_rl.preflight import gather
from distill_rl.run.run_directory import paths_of
from distill_rl.service import runs
from distill_rl.service.client import Service
from distill_rl.service.runs import JobRun
from distill_rl.system.signals import EXIT_PREEMPTED

_POLL_S, _LONGEST_POLL_S = 0.5, 5.0
"""Interval of requests for the log. It grows while nothing new arrives, because Ray sends the whole log every time."""
_LEAST_STOP_S = 600
"""Minimum number of seconds that a job has to save after it was asked to stop; then Ray kills it."""


def submit(path: str, overrides: Sequence[str], *, address: str | None, python: str | None, follow: bool) -> int:
    """Checks a configuration here, as `train` does, and submits it to the cluster as the next submission of `run.name`.

    The resolved configuration is written below `run.dir`, where the cluster must be able to read it; it is removed
    again if the submission fails.

    Args:
        address: URL of the cluster's dashboard; None: the default of `Service`.
        python: interpreter on the cluster; None: the path of this one.
        follow: print the run's output until it ends.

    Returns:
        0; with `follow`, the exit code of the run.

    Raises:
        ConfigError: bad input (all problems at once), no cluster, or a run of this name that has not ended.
        WorkerError: the cluster cannot carry out the request.
    """
    setup_console()
    checked = gather(path, [*overrides, "ray.address=auto"], ask=False)
    config = absolute(checked.require_valid(_cluster_problems))
    service, name = Service(address), config.run.name
    submission_id, attempt = runs.next_submission(service.jobs(), name)
    file = submission_file(config, submission_id)
    save_config(config, file)
    interpreter = python or sys.executable
    metadata = {runs.NAME: name, runs.ATTEMPT: str(attempt), runs.PYTHON: interpreter}
    metadata[runs.RUN] = str(paths_of(config).root)
    if checked.facts.total_steps is not None:
        metadata[runs.STEPS] = str(checked.facts.total_steps)
    command = entrypoint([interpreter, "-m", "distill_rl.service.entry", str(file)])
    try:
        service.submit(command, submission_id, runtime_env={"env_vars": _environment(config)}, metadata=metadata)
    except DistillError:
        _withdraw(service, file)
        raise
    say(f"submitted {name}, submission {attempt}, to {service.address}")
    say(f"watch     distill-rl status {name}; distill-rl logs {name} --follow; distill-rl stop {name}")
    return _follow(service, runs.find(service.jobs(), name)) if follow else 0


def status(name: str | None, *, address: str | None) -> int:
    """Prints a table of all runs on a cluster, or of the one called `name`; returns 0.

    Raises:
        ConfigError: no cluster, or no run of this name.
    """
    jobs = Service(address).jobs()
    listed = [runs.find(jobs, name)] if name else list(runs.runs(jobs).values())
    none = ["no runs since this cluster was started; earlier ones by their folders: distill-rl follow RUN.DIR/*"]
    for line in runs.table(listed) if listed else none:
        print(printable(line))
    return 0


def logs(name: str, *, address: str | None, follow: bool) -> int:
    """Prints the output of a run so far and returns 0.

    With `follow`, prints until the run ends, and returns its exit code.

    Raises:
        ConfigError: no cluster, or no run of this name.
    """
    service = Service(address)
    run = runs.find(service.jobs(), name)
    if follow:
        return _follow(service, run)
    _show(service.logs(run.submission_id))
    return 0


def stop(name: str, *, address: str | None, now: bool, deadline_s: float) -> int:
    """Lets a run finish its step, save and end, and waits for its end; with `now`, ends it without saving.

    Args:
        deadline_s: seconds to wait; a run that has not ended by then goes on ending by itself.

    Returns:
        0 if it has ended, or had ended before; 1 if it has not ended in time.

    Raises:
        ConfigError: no cluster, or no run of this name.
    """
    service = Service(address)
    run = runs.find(service.jobs(), name)
    if run.ended:
        say(f"{run.name} has already ended: {run.state}")
        return 0
    if now:
        _kill(service, run)
    else:
        service.stop(run.submission_id)
    say(f"stopping  {run.name}: {'immediately, without saving' if now else 'it finishes the step and saves'}")
    if not _wait(service, run, deadline_s):
        remedy = f"wait for it, or end it without saving: distill-rl stop {name} --now"
        print(f"distill-rl: {run.name} has not ended within {deadline_s:g} s; {remedy}", file=sys.stderr)
        return 1
    output = service.logs(run.submission_id)
    code = runs.exit_code(runs.find(service.jobs(), name), output)
    outcome = f"exit code {code}"
    words = [line for line in output.splitlines() if line.startswith("stopped ")]
    if code == EXIT_PREEMPTED and words:  # the last ones say whether there was anything to save
        outcome = f"{words[-1].partition(' ')[2].strip()}; continue with: distill-rl submit ... --resume auto"
    say(f"stopped   {run.name}: {outcome}")
    return 0


def entrypoint(command: Sequence[str]) -> str:
    """The shell command of a job. `exec` replaces the shell by our process, so that Ray's signals reach it."""
    return f"exec {shlex.join(command)}"


def submission_file(config: Config, submission_id: str) -> Path:
    """Path for the configuration of a submission, with a random part; nothing is written.

    If two submissions of a run happen at the same time, the cluster accepts one, which must not read the file of
    the other.
    """
    return Path(config.run.dir) / ".submitted" / f"{submission_id}.{token_hex(4)}.yaml"


def _cluster_problems(config: Config) -> list[str]:
    return problems_of(lambda: runs.require_usable(config.run.name), lambda: require_no_secret(config))


def _withdraw(service: Service, file: Path) -> None:
    """Removes the configuration of a failed submission, unless a job uses it or the cluster does not answer."""
    # A request can succeed although its answer was lost.
    with suppress(DistillError):
        if not any(file.name in job.entrypoint for job in service.jobs()):
            file.unlink(missing_ok=True)


def _environment(config: Config) -> dict[str, str]:
    # The run has 600 seconds to save when Ray stops it, or two step timeouts if that is more.
    from distill_rl.workers.cluster import access
    from distill_rl.workers.cluster.session import worker_environment

    patience = max(_LEAST_STOP_S, 2 * int(config.ray.step_timeout_s))
    variables = {name: value for name, value in worker_environment().items() if name != "DISTILL_RL_ATTEMPT"}
    return variables | {
        "RAY_JOB_STOP_WAIT_TIME_S": str(patience),  # Ray's own 3 s are not enough to save
        "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",  # lets the run set these variables for its actors again
        **({} if access.required() else {"RAY_AUTH_MODE": "disabled"}),
    }


def _kill(service: Service, run: JobRun) -> None:
    """Ends a run without saving, with a second job on the machine of its driver; Ray has no request for this."""
    where = {"entrypoint_label_selector": {"ray.io/node-id": run.node}} if run.node else {}
    command = entrypoint([run.python, "-m", "distill_rl.service.end", run.submission_id])
    service.submit(command, f"{run.submission_id}.end-{token_hex(3)}", **where)


def _wait(service: Service, run: JobRun, deadline_s: float) -> bool:
    """Waits until a run has ended, for at most `deadline_s` seconds, and returns whether it has."""
    deadline = time.monotonic() + deadline_s
    while not runs.runs([service.job(run.submission_id)])[run.name].ended:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _follow(service: Service, run: JobRun) -> int:
    """Prints the log of a run line by line, from its beginning, until the run ends, and returns its exit code."""
    shown, pause = 0, _POLL_S
    while True:
        current = runs.runs([service.job(run.submission_id)])[run.name]
        text = service.logs(run.submission_id)
        complete = len(text) if current.ended else text.rfind("\n") + 1
        _show(text[shown:complete])
        pause = _POLL_S if complete > shown else min(1.5 * pause, _LONGEST_POLL_S)
        shown = max(shown, complete)
        if current.ended:
            return runs.exit_code(current, text)
        time.sleep(pause)


def _show(text: str) -> None:
    for line in text.splitlines():
        print(printable(line.expandtabs()))
    sys.stdout.flush()
