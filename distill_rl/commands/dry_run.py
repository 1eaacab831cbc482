"""distill-rl train --dry-run: writes the resolved configuration and a Slurm batch script, and starts nothing."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

from distill_rl.config.facts import without_student
from distill_rl.config.layout import gpus_of_run
from distill_rl.config.load import texts
from distill_rl.config.reading.interpolate import OF_A_JOB, variables_in
from distill_rl.config.save import require_no_secret, save_config
from distill_rl.config.schema import Config
from distill_rl.errors import ConfigError, DistillError, problem, problems_of
from distill_rl.observe.log import say, setup_console
from distill_rl.preflight import gather, run_directory
from distill_rl.system.files import write_atomic
from distill_rl.system.install import LAUNCH, PACKAGE, clone
from distill_rl.transport.choose import require_between_nodes


def write_batch_script(
    path: str,
    overrides: Sequence[str],
    *,
    gpus_per_node: int,
    change: Callable[[Config, list[str]], Config] = lambda config, _: config,
    store: Path | None = None,
) -> int:
    """Writes `submit.yaml` and `submit.sbatch` into the run directory and prints how to submit them; returns 0.

    The configuration is checked first, for use on a cluster.

    The run directory is made if it does not exist. `submit.yaml` has no cluster address and no `checkpoint.resume`: the
    batch script sets them.

    Args:
        gpus_per_node: GPUs of each node of the cluster, 0 for none.
        change: as for `gather`.
        store: for a capture: the folder that it fills. The run directory is then that of the capture.

    Raises:
        DistillError: bad input, all problems at once.
    """
    setup_console()
    # With an address, this machine's own GPUs and cores are not checked. The job replaces it by its cluster's address.
    checked = gather(path, [*overrides, "ray.address=auto"], change=change, trains=store is None, ask=False)
    if gpus_per_node < 0:
        error = ConfigError("--gpus-per-node", "must be 0 or more", gpus_per_node, "0: nodes without GPUs")
        checked.problems.append(str(error))
    config = checked.require_valid(lambda config: _batch_script_problems(config, path, overrides, gpus_per_node))
    used = config if store is None else without_student(config)
    run = run_directory.paths_of(config).root.absolute()
    run.mkdir(parents=True, exist_ok=True)
    settings, script = (run / name for name in run_directory.SUBMISSION)
    submitted = replace(
        config, ray=replace(config.ray, address=None), checkpoint=replace(config.checkpoint, resume=None)
    )
    save_config(submitted, settings)
    nodes, gpus = layout(used, gpus_per_node)
    text = (LAUNCH / "slurm.sbatch").read_text("utf-8")
    write_atomic(script, fill(text, settings, run, nodes=nodes, gpus=gpus, folder=Path.cwd(), store=store))
    say(f"layout    {nodes} {'node' if nodes == 1 else 'nodes'}, {gpus} {'GPU' if gpus == 1 else 'GPUs'} on each")
    say(f"wrote     {settings}")
    say(f"wrote     {script}")
    say(f"submit    sbatch --account=ACCOUNT --partition=PARTITION {shlex.quote(str(script))}")
    return 0


def _batch_script_problems(config: Config, path: str, overrides: Sequence[str], gpus_per_node: int) -> list[str]:
    """Problems that only a run from a batch script on such nodes has, one line each.

    A secret in the settings, a variable that has another value in the job, a resume from a step folder, folders that
    Slurm cannot be told, or disaggregated workers on several nodes with a transport that works on one only.

    Args:
        path, overrides: as for `read_config`.
    """

    problems = problems_of(lambda: require_no_secret(config))
    for key, text in texts(path, overrides):
        for name in sorted(OF_A_JOB.intersection(variables_in(text))):
            rule = f"{name} is the job's own, and has no value, or another one, before the job runs"
            problems.append(problem(key, rule, text, "write the value"))
    for key, folder in (("run.dir", run_directory.paths_of(config).root), ("the working directory", Path.cwd())):
        if not str(folder).isprintable() or "\\" in str(folder):
            rule = "must have neither control characters nor backslashes, which #SBATCH lines cannot hold"
            problems.append(problem(key, rule, repr(str(folder)), "use another folder"))
    resume = config.checkpoint.resume
    if resume not in (None, "auto", "latest"):
        rule = "a batch script resumes from the newest checkpoint of its run directory only"
        remedy = "leave it out, or start that run without a batch script"
        problems.append(str(ConfigError("--dry-run", rule, f"--resume {resume}", remedy)))
    if config.ray.placement == "disaggregated" and layout(config, gpus_per_node)[0] > 1:
        problems += problems_of(lambda: require_between_nodes(config.transport))
    return problems


def layout(config: Config, gpus_per_node: int) -> tuple[int, int]:
    """(nodes, GPUs of each) that the run needs; (1, 0) for nodes without GPUs.

    Colocated: rank i of every worker group shares one GPU. Disaggregated: every rank has its own. An evaluator shares
    them, too, except with tensor parallelism in vLLM.
    """
    if gpus_per_node < 1:
        return 1, 0
    needed = gpus_of_run(config)
    return ceil(needed / gpus_per_node), min(needed, gpus_per_node)


def fill(
    template: str, settings: Path, run: Path, *, nodes: int, gpus: int, folder: Path, store: Path | None = None
) -> str:
    """The text of `launch/slurm.sbatch` for one run: its #SBATCH options and its variables for paths, filled in.

    Without GPUs the option `gpus-per-node` is dropped; `chdir` is added after `output`. Outside a clone, the job uses the
    environment of this process.

    Args:
        settings: the configuration file of the job.
        run: the run directory, in which Slurm's log is written.
        nodes, gpus: number of nodes, and of GPUs on each.
        folder: working directory of the job, to which relative paths of the configuration refer.
        store: the folder that a capture fills; None for a training run.

    Raises:
        DistillError: the template does not set one of these variables on exactly one line.
    """
    options = {
        "nodes": f"{nodes}",
        "gpus-per-node": f"{gpus}" if gpus else None,
        "output": _in_option(str(run).replace("%", "%%") + "/slurm-%j.log"),
        "chdir": _in_option(str(folder)),
    }
    lines: list[str] = []
    for line in template.splitlines():
        match = re.match(r"#SBATCH --([a-z-]+)=", line)
        option = match[1] if match else ""
        if option not in options:
            lines.append(line)
        elif (value := options.pop(option)) is not None:
            lines.append(f"#SBATCH --{option}={value}")
        if option == "output":  # the template has no --chdir
            lines.append(f"#SBATCH --chdir={options.pop('chdir')}")
    text = "\n".join(lines) + "\n"
    root = clone()
    paths = {"CONFIG": settings, "RUN_DIR": run, "DISTILL_RL_ROOT": root or PACKAGE}
    if root is None:
        paths["VENV"] = Path(sys.prefix)
    if store is not None:
        paths["STORE"] = store
    for variable, path in paths.items():
        assignments = re.findall(rf"^{variable}=\S+(?: *#.*)?$", text, flags=re.MULTILINE)
        if len(assignments) != 1:
            raise DistillError(
                "launch/slurm.sbatch", f"must set {variable} on one line", f"{len(assignments)} such lines"
            )
        text = text.replace(assignments[0], f"{variable}={shlex.quote(str(path))}", 1)
    return text


def _in_option(path: str) -> str:
    """A path as #SBATCH lines need it: in double quotes if it contains what ends a word there or begins a comment."""
    return '"' + path.replace('"', '\\"') + '"' if re.search(r"[\s\"'#]", path) else path
