"""distill-rl train --dry-run: the resolved configuration and a batch script for Slurm, ready to submit; nothing is started."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

from distill_rl.config.derive import compute_groups
from distill_rl.config.save import require_no_secret, save_config
from distill_rl.config.schema import Config
from distill_rl.errors import ConfigError, DistillError, problems_of
from distill_rl.observe.log import say, setup_console
from distill_rl.preflight import gather, run_directory
from distill_rl.system.files import write_atomic
from distill_rl.transport.choose import require_between_nodes

ROOT = Path(__file__).parents[2]
"""the repository: the batch script is a file of it"""


def dry_run(path: str, overrides: Sequence[str], *, gpus_per_node: int) -> int:
    """Checks a configuration as for a cluster, and writes `submit.yaml` and `submit.sbatch` into the run directory.

    Args:
        gpus_per_node: of the cluster; 0: nodes without GPUs.

    Raises:
        DistillError: bad input (all problems at once), or an installation without `launch/`.
    """
    setup_console()
    # What this machine has says nothing: a cluster will be joined. Its address is known when the job runs.
    checked = gather(path, [*overrides, "ray.address=auto"])
    problems = [*checked.problems, *checked.unreachable]
    if gpus_per_node < 0:
        problems.append(
            str(ConfigError("--gpus-per-node", "must be 0 or more", gpus_per_node, "0: nodes without GPUs"))
        )
    if checked.config is not None and checked.config.checkpoint.resume not in (None, "auto", "latest"):
        remedy = "leave it out, or start that run without a batch script"
        problems.append(
            str(
                ConfigError(
                    "--dry-run",
                    "a batch script goes on from the newest checkpoint of its run directory, and from no other",
                    f"--resume {checked.config.checkpoint.resume}",
                    remedy,
                )
            )
        )
    if checked.config is not None:
        problems += _unfit(checked.config, gpus_per_node)
    if checked.config is None or problems:
        raise ConfigError.many(problems)
    config = checked.config
    template = ROOT / "launch" / "slurm.sbatch"
    if not template.is_file():
        raise DistillError("--dry-run", "needs launch/ of the repository", f"no {template}", "install with pip -e")
    run = run_directory.paths_of(config).root.absolute()
    run.mkdir(parents=True, exist_ok=True)
    settings, script = (run / name for name in run_directory.SUBMISSION)
    submitted = replace(
        config, ray=replace(config.ray, address=None), checkpoint=replace(config.checkpoint, resume=None)
    )
    save_config(submitted, settings)
    nodes, gpus = layout(config, gpus_per_node)
    write_atomic(script, fill(template.read_text("utf-8"), settings, run, nodes=nodes, gpus=gpus, folder=Path.cwd()))
    say(f"layout    {nodes} {'node' if nodes == 1 else 'nodes'}, {gpus} {'GPU' if gpus == 1 else 'GPUs'} on each")
    say(f"wrote     {settings}")
    say(f"wrote     {script}")
    say(f"submit    sbatch --account=ACCOUNT --partition=PARTITION {shlex.quote(str(script))}")
    return 0


def _unfit(config: Config, gpus_per_node: int) -> list[str]:
    """What is wrong with a run for nodes like these alone, one line each."""
    apart = config.ray.placement == "disaggregated" and layout(config, gpus_per_node)[0] > 1
    between_nodes = [lambda: require_between_nodes(config.transport)] if apart else []
    return problems_of(lambda: require_no_secret(config), *between_nodes)


def layout(config: Config, gpus_per_node: int) -> tuple[int, int]:
    """(nodes, GPUs of each) that hold the run: colocated workers share a GPU rank by rank, disaggregated ones have one each."""
    if gpus_per_node < 1:
        return 1, 0
    ranks = compute_groups(config)
    needed = sum(ranks) if config.ray.placement == "disaggregated" else max(ranks)
    return ceil(needed / gpus_per_node), min(needed, gpus_per_node)


def fill(template: str, settings: Path, run: Path, *, nodes: int, gpus: int, folder: Path) -> str:
    """`launch/slurm.sbatch` for one run.

    Args:
        folder: what relative paths of the configuration are relative to.
    """
    options = {
        "nodes": f"{nodes}",
        "gpus-per-node": f"{gpus}" if gpus else None,
        "output": _in_option(run / "slurm-%j.log"),
        "chdir": _in_option(folder),
    }
    lines: list[str] = []
    for line in template.splitlines():
        name = re.match(r"#SBATCH --([a-z-]+)=", line)
        if name is None or name[1] not in options:
            lines.append(line)
        elif (value := options.pop(name[1])) is not None:
            lines.append(f"#SBATCH --{name[1]}={value}")
        if name is not None and name[1] == "output":
            lines.append(f"#SBATCH --chdir={options.pop('chdir')}")
    text = "\n".join(lines) + "\n"
    for variable, path in {"CONFIG": settings, "RUN_DIR": run, "DISTILL_RL_ROOT": ROOT}.items():
        found = re.findall(rf"^{variable}=\S+(?: *#.*)?$", text, flags=re.MULTILINE)
        if len(found) != 1:
            raise DistillError("launch/slurm.sbatch", f"must set {variable} on one line", f"{len(found)} such lines")
        text = text.replace(found[0], f"{variable}={shlex.quote(str(path))}", 1)
    return text


def _in_option(path: Path) -> str:
    """A path in a line of #SBATCH, which knows double quotes."""
    return f'"{path}"' if re.search(r"\s", str(path)) else str(path)
