"""distill-rl train --dry-run: writes the resolved configuration and a Slurm batch script, and starts nothing."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import ceil
from pathlib import Path

from distill_rl.config import GPUS_PER_NODE
from distill_rl.config.layout import gpus_of_run
from distill_rl.config.load import OF_A_JOB, load_config, read_config, texts, variables_in
from distill_rl.config.save import require_no_secret, save_config
from distill_rl.config.schema import Config, SlurmConfig
from distill_rl.config.schema.slurm import OPTIONS, slurm_problems
from distill_rl.errors import ConfigError, DistillError, problem, problems_of
from distill_rl.observe.log import say, setup_console
from distill_rl.preflight import gather
from distill_rl.run import run_directory
from distill_rl.system.environment import LAUNCH, PACKAGE, clone
from distill_rl.system.files import name_problem, write_atomic
from distill_rl.transport.choose import require_between_nodes

ARRAY, EVALUATION = "array.tsv", "evaluate.sbatch"
"""Files beside `run_directory.SUBMISSION`."""
_SETUP = "# The lines of slurm.setup."
"""Line of the template after which they follow."""


def write_batch_script(
    path: str,
    overrides: Sequence[str],
    *,
    gpus_per_node: int | None,
    change: Callable[[Config, list[str]], Config] = lambda config, _: config,
    store: Path | None = None,
    arrays: Sequence[str] = (),
    then: str | None = None,
) -> int:
    """Writes `submit.yaml` and `submit.sbatch` into the run directory and prints how to submit them; returns 0.

    The configuration is checked first, for use on a cluster, with the settings of every run of an array.

    The run directory is made if it does not exist. `submit.yaml` has no cluster address and no `checkpoint.resume`: the
    batch script sets them.

    Args:
        gpus_per_node: overrides `slurm.gpus_per_node` unless it is None.
        change: as for `gather`.
        store: for a capture: the folder that it fills. The run directory is then that of the capture.
        arrays: `KEY=VALUE,VALUE,…` each: a run for every combination, in folders of the run directory (`array.tsv`).
        then: `eval`: also writes `evaluate.sbatch`, which asks the suites of the run's export, in place of the run's own evaluation.

    Raises:
        DistillError: bad input, all problems at once.
    """
    setup_console()
    points = _points(arrays)
    configs, (nodes, gpus) = _checked(path, overrides, points, gpus_per_node, change, trains=store is None, then=then)
    config = load_config(path, [*overrides, "ray.address=auto"]) if points else configs[0]
    run = run_directory.paths_of(config).root.absolute()
    run.mkdir(parents=True, exist_ok=True)
    settings, script = (run / name for name in run_directory.SUBMISSION[:2])
    ray, checkpoint = replace(config.ray, address=None), replace(config.checkpoint, resume=None)
    evaluate = replace(config.evaluate, suites=[]) if then else config.evaluate
    save_config(replace(config, ray=ray, checkpoint=checkpoint, evaluate=evaluate), settings)
    if points:
        lines = ["\t".join([name, *each]) for name, each in points]
        write_atomic(run / ARRAY, "".join(f"{line}\n" for line in lines))
    common = _where_it_runs(config) | {"RUN_DIR": str(run), "ARRAY": str(run / ARRAY) if points else ""}
    stored, dashboard = "" if store is None else str(store), "true" if config.ray.dashboard else ""
    values = {"CONFIG": str(settings), "STORE": stored, "REQUEUE": config.slurm.requeue, "RAY_DASHBOARD": dashboard}
    options = sbatch_options(config, run, nodes=nodes, gpus=gpus, folder=Path.cwd(), tasks=len(points))
    write_atomic(script, fill((LAUNCH / "slurm.sbatch").read_text("utf-8"), options, config.slurm, common | values))
    say(f"layout    {nodes} {'node' if nodes == 1 else 'nodes'}, {gpus} {'GPU' if gpus == 1 else 'GPUs'} on each")
    if points:
        say(f"array     {len(points)} runs: {', '.join(name for name, _ in points)}")
    say(f"wrote     {settings}")
    say(f"wrote     {script}")
    command = _sbatch(config, script)
    if then:
        of_a_node = _gpus_of_a_node(config, gpus_per_node)
        follows = _write_following_evaluation(config, run, common, of_a_node, tasks=len(points))
        command = f"job=$({command.replace('sbatch', 'sbatch --parsable', 1)}) && {follows}"
    say(f"submit    {command}")
    return 0


def require_no_batch_options(what: str, gpus_per_node: int | None, others: Mapping[str, object] | None = None) -> None:
    """Refuses options that only a batch script has."""
    rule, remedy = "has no effect without --dry-run", "add --dry-run to write a batch script"
    for option, value in (others or {}).items():
        if value:
            raise ConfigError(option, rule, remedy=remedy)
    if gpus_per_node is not None:
        remedy = f"{remedy}, or leave it out: {what} takes the GPUs that its dp and tp need"
        raise ConfigError("--gpus-per-node", rule, gpus_per_node, remedy)


def _checked(
    path: str,
    overrides: Sequence[str],
    points: Sequence[tuple[str, list[str]]],
    gpus_per_node: int | None,
    change: Callable[[Config, list[str]], Config],
    *,
    trains: bool,
    then: str | None,
) -> tuple[list[Config], tuple[int, int]]:
    """The settings of every run, checked for a cluster, and the nodes, and GPUs on each, that all of them need."""
    # With an address, this machine's own GPUs and cores are not checked. The job replaces it by its cluster's address.
    checked = [
        gather(path, [*overrides, *settings, "ray.address=auto"], change=change, trains=trains, ask=False)
        for _, settings in points or [("", [])]
    ]
    if gpus_per_node is not None and gpus_per_node < 0:
        line = problem("--gpus-per-node", "must be 0 or more", gpus_per_node, "0: nodes without GPUs")
        checked[0].problems.append(line)
    configs: list[Config] = []
    problems: list[str] = []
    further = partial(_batch_script_problems, path=path, overrides=overrides, gpus_per_node=gpus_per_node)
    for each in checked:
        try:
            configs.append(each.require_valid(further))
        except ConfigError as error:
            problems += error.problems
    if not problems and then and not configs[0].evaluate.suites:
        remedy = "set them, or leave it out"
        problems.append(problem("--then eval", "needs evaluate.suites and evaluate.data", remedy=remedy))
    if not problems and then:
        node, split = _gpus_of_a_node(configs[0], gpus_per_node), configs[0].evaluate.parallel.tp
        problems += problems_of(lambda: _gpus_of_evaluation("evaluate.parallel.tp", node, split))
    used = [config if trains else config.without_student() for config in configs]
    layouts = {layout(config, _gpus_of_a_node(config, gpus_per_node)) for config in used}
    if len(layouts) > 1:
        rule = "all runs must need as many nodes and GPUs"
        problems.append(problem("--array", rule, remedy="write a script for each"))
    ConfigError.raise_all(dict.fromkeys(problems))
    return configs, layouts.pop()


def _write_following_evaluation(
    config: Config, run: Path, values: Mapping[str, str], gpus_per_node: int, *, tasks: int
) -> str:
    # Writes the script that evaluates the export of a run, or of each of its array, as the run would ask its suites at the end; returns the
    # command that submits it.
    script, where, asked = run / EVALUATION, "{run}" if tasks else str(run), config.evaluate
    assert asked.data is not None
    options = {
        "--model": f"student={where}/export", "--suites": ",".join(asked.suites), "--data": asked.data,
        "--out": f"{where}/evals", "--backend": asked.backend, "--tp": asked.parallel.tp, "--limit": asked.final_limit,
        "--num-fewshot": asked.num_fewshot, "--max-new-tokens": asked.max_new_tokens, "--batch-size": asked.batch_size,
    }  # fmt: skip
    arguments = [word for option, value in options.items() if value is not None for word in (option, str(value))]
    gpus = _gpus_of_evaluation("evaluate.parallel.tp", gpus_per_node, asked.parallel.tp)
    _write_evaluation(script, config, arguments, {**values, "OUT": f"{where}/evals"}, run, gpus, tasks)
    say(f"wrote     {script}")
    return _sbatch(config, script, f"--dependency={'aftercorr' if tasks else 'afterok'}:$job")


def write_evaluation_script(
    out: Path, arguments: Sequence[str], settings: Sequence[str], *, split: int, copies: int, share: float | None
) -> int:
    """Writes `submit.sbatch` for an evaluation into `out`, and prints how to submit it; returns 0.

    Args:
        out: folder of the results; made if it does not exist.
        arguments: of `distill-rl eval`.
        settings: `KEY=VALUE` of the section `slurm`.
        split, copies, share: `--tp`, `--shards` and `--gpus-per-shard` of the evaluation.

    Raises:
        ConfigError: settings that the section refuses, or more GPUs than a node has, all problems at once.
    """
    setup_console()
    needed = {"student.model": "-", "data.path": "-"}  # of a run; an evaluation has neither
    config, findings = read_config(needed, [f"slurm.{setting}" for setting in settings])
    ConfigError.raise_all([*findings.lines, *(slurm_problems(config.slurm) if config else ())])
    assert config is not None
    gpus = _gpus_of_evaluation("--tp", _gpus_of_a_node(config, None), split, copies, share)
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    values = _where_it_runs(config) | {"OUT": str(out)}
    script = out / run_directory.SUBMISSION[1]
    config = replace(config, run=replace(config.run, name=f"eval-{out.name}"))
    _write_evaluation(script, config, arguments, values, out, gpus, 0)
    say(f"wrote     {script}")
    say(f"submit    {_sbatch(config, script)}")
    return 0


def _gpus_of_evaluation(key: str, of_a_node: int, split: int, copies: int = 1, share: float | None = None) -> int:
    """The GPUs of an evaluation: those that every copy is split over, or `share` for each; else one for each, while the node has them.

    Raises:
        ConfigError: a node has fewer, and copies that are split, or have a share, need them all.
    """
    copies = max(copies, 1)  # --shards 0: one, in the process itself
    each = split if split > 1 else share
    if not of_a_node or each is None:
        return min(copies, of_a_node)
    if (needed := ceil(copies * each)) > of_a_node:
        rule = f"{copies} {'copy' if copies == 1 else 'copies'} of {each:g} GPUs must fit into a node, which has {of_a_node}"
        remedy = "lower it, or say how many it has (slurm.gpus_per_node)"
        raise ConfigError(key if split > 1 else "--gpus-per-shard", rule, f"{each:g}", remedy)
    return needed


def _write_evaluation(
    script: Path,
    config: Config,
    arguments: Sequence[str],
    values: Mapping[str, str],
    folder: Path,
    gpus: int,
    tasks: int,
) -> None:
    """Writes a batch script that evaluates, with Slurm's log in `folder`."""
    options = sbatch_options(config, folder, nodes=1, gpus=gpus, folder=Path.cwd(), tasks=tasks, name="eval")
    options |= {"nodes": "1", "exclusive": None, "mem": config.slurm.mem}
    template, values = (LAUNCH / "eval.sbatch").read_text("utf-8"), {**values, "ARGUMENTS": shlex.join(arguments)}
    write_atomic(script, fill(template, options, config.slurm, values))


def _points(arrays: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Name and settings of every run of an array, the last setting varying fastest; empty without one."""
    axes = []
    for text in arrays:
        key, equals, values = text.partition("=")
        if not (key and equals and values) or "[" in values:
            raise ConfigError("--array", "must be KEY=VALUE,VALUE,…", text, "such as run.seed=0,1,2")
        axes.append([(f"{key.rpartition('.')[2]}-{value}", f"{key}={value}") for value in values.split(",")])
    points = [("_".join(name for name, _ in each), [setting for _, setting in each]) for each in product(*axes)]
    for name, _ in points if axes else ():
        if broken := name_problem(name):
            raise ConfigError("--array", f"names a run after its values, and a name {broken}", name)
    if len({name for name, _ in points}) < len(points):
        raise ConfigError("--array", "must give every run a name of its own", ", ".join(name for name, _ in points))
    return points if axes else []


def _sbatch(config: Config, script: Path, *options: str) -> str:
    """The command that submits a script, with the account and partition that the configuration does not name."""
    missing = [f"--{name}={name.upper()}" for name in ("account", "partition") if getattr(config.slurm, name) is None]
    return " ".join(["sbatch", *missing, *options, shlex.quote(str(script))])


def _where_it_runs(config: Config) -> dict[str, str]:
    root, container = str(clone() or PACKAGE), config.slurm.container
    return {"DISTILL_RL_ROOT": root, "VENV": "" if container else sys.prefix, "CONTAINER": container or ""}


def _gpus_of_a_node(config: Config, given: int | None) -> int:
    known = config.slurm.gpus_per_node if given is None else given
    return GPUS_PER_NODE if known is None else known


def _batch_script_problems(config: Config, path: str, overrides: Sequence[str], gpus_per_node: int | None) -> list[str]:
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
        problems.append(problem("--dry-run", rule, f"--resume {resume}", remedy))
    needed, _ = layout(config, _gpus_of_a_node(config, gpus_per_node))
    if (config.slurm.nodes or needed) < needed:
        rule, remedy = f"must be {needed} or more, for the GPUs that the run needs", "raise it, or leave it out"
        problems.append(problem("slurm.nodes", rule, config.slurm.nodes, remedy))
    if config.ray.placement == "disaggregated" and max(needed, config.slurm.nodes or 1) > 1:
        problems += problems_of(lambda: require_between_nodes(config.transport))
    return problems


def layout(config: Config, gpus_per_node: int) -> tuple[int, int]:
    """(nodes, GPUs of each) that the run needs; (1, 0) for nodes without GPUs.

    Colocated: rank i of every worker group shares one GPU. Disaggregated: every rank has its own. An evaluator shares
    them, too, except with tensor parallelism in an engine.
    """
    if gpus_per_node < 1:
        return 1, 0
    needed = gpus_of_run(config)
    return ceil(needed / gpus_per_node), min(needed, gpus_per_node)


def sbatch_options(
    config: Config, run: Path, *, nodes: int, gpus: int, folder: Path, tasks: int = 0, name: str = ""
) -> dict[str, str | None]:
    """The options of the job by their names; None for one of the template that this job has not.

    Args:
        run: the run directory, in which Slurm's log is written.
        nodes, gpus: number of nodes, and of GPUs on each.
        folder: working directory of the job, to which relative paths of the configuration refer.
        tasks: of an array of jobs; 0: none.
        name: of the log and, after that of the run, of the job; empty for the run's own.
    """
    slurm = config.slurm
    given = {option: getattr(slurm, key) for key, option in OPTIONS.items() if key != "exclusive"}
    options: dict[str, str | None] = {
        "job-name": _in_option("-".join(filter(None, (slurm.job_name or config.run.name, name)))),
        "nodes": f"{slurm.nodes or nodes}",
        "gpus-per-node": f"{gpus}" if gpus and slurm.gres is None else None,
        "signal": f"B:USR1@{slurm.signal_s}",
        "output": _in_option(str(run).replace("%", "%%") + f"/{name or 'slurm'}-{'%A_%a' if tasks else '%j'}.log"),
        "array": f"0-{tasks - 1}" if tasks else None,
        "chdir": _in_option(str(folder)),
    }
    if not slurm.exclusive:
        options["exclusive"] = None
    if not slurm.exclusive or slurm.mem_per_cpu is not None:
        options["mem"] = None
    for option, value in given.items():
        if value is not None:
            options.setdefault(option, _in_option(str(value)))
    return options | ({"mem": slurm.mem} if slurm.mem else {})


def fill(template: str, options: Mapping[str, str | None], slurm: SlurmConfig, values: Mapping[str, str]) -> str:
    """The text of `launch/slurm.sbatch` for one run: its #SBATCH options, lines of set-up and variables, filled in.

    Args:
        options: as of `sbatch_options`; those that the template lacks follow its own.
        values: variable → value; empty: as the template has it.

    Raises:
        DistillError: the template does not set one of these variables on exactly one line.
    """
    lines: list[str] = []
    left = dict(options)
    for line in template.splitlines():
        match = re.match(r"##?SBATCH --([a-z-]+)", line)
        if match is None and lines and re.match("##?SBATCH", lines[-1]):
            lines += [f"#SBATCH --{option}={value}" for option, value in left.items() if value is not None]
            lines += [f"#SBATCH {option}" for option in slurm.extra]
            left = {}
        if match is None or match[1] not in options:
            lines.append(line)
        elif (value := left.pop(match[1])) is not None:
            lines.append(f"#SBATCH --{match[1]}={value}")
        if line == _SETUP:
            lines += [
                f"{command} || {{ echo {shlex.quote(f'slurm.sbatch: error: slurm.setup: {command}')} >&2; exit 1; }}"
                for command in slurm.setup
            ]
    text = "\n".join(lines) + "\n"
    for variable, value in values.items():
        assignments = re.findall(rf"^{variable}=\S+(?: *#.*)?$", text, flags=re.MULTILINE)
        if len(assignments) != 1:
            rule = f"must set {variable} on one line"
            raise DistillError("launch/slurm.sbatch", rule, f"{len(assignments)} such lines")
        if value:
            text = text.replace(assignments[0], f"{variable}={shlex.quote(value)}", 1)
    return text


def _in_option(path: str) -> str:
    """A path as #SBATCH lines need it: in double quotes if it contains what ends a word there or begins a comment."""
    return '"' + path.replace('"', '\\"') + '"' if re.search(r"[\s\"'#]", path) else path
