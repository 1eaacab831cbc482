"""The settings of a Slurm job (`slurm`), which `--dry-run` writes into its batch script. Nothing else reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Literal, Optional

from distill_rl.config.schema.fields import NOT_NEGATIVE, POSITIVE
from distill_rl.errors import problem

# OmegaConf reads these annotations at run time and knows Optional[...], not `X | None`.
# ruff: noqa: UP045

OPTIONS = {
    "account": "account", "partition": "partition", "qos": "qos", "time": "time", "constraint": "constraint",
    "reservation": "reservation", "comment": "comment", "mail_user": "mail-user", "mail_type": "mail-type", "mem": "mem",
    "mem_per_cpu": "mem-per-cpu", "cpus_per_task": "cpus-per-task", "nodes": "nodes", "gpus_per_node": "gpus-per-node",
    "gres": "gres", "job_name": "job-name", "exclusive": "exclusive",
}  # fmt: skip
"""Setting → the option of sbatch that it is."""


@dataclass
class SlurmConfig:
    account: Optional[str] = None
    """Account that is charged."""
    partition: Optional[str] = None
    """Partition, or several, separated by commas."""
    qos: Optional[str] = None
    """Quality of service."""
    time: Optional[str] = None
    """Time limit of a start of the job, in quotes: minutes, `H:MM:SS` or `D-HH:MM:SS`. null: 4 hours."""
    nodes: Optional[int] = field(default=None, metadata=POSITIVE)
    """Number of nodes. null: as many as the run needs."""
    gpus_per_node: Optional[int] = field(default=None, metadata=NOT_NEGATIVE)
    """GPUs that a node of the cluster has; a run takes as many of them as it needs. 0: none. null: 8. `--gpus-per-node` overrides it."""
    gres: Optional[str] = None
    """In place of GPUs per node, on a cluster that counts them in another way, such as gpu:h200:8."""
    cpus_per_task: Optional[int] = field(default=None, metadata=POSITIVE)
    """CPUs of a node, for a job that shares its nodes."""
    mem: Optional[str] = None
    """Memory of a node, such as 200G. null: all of it."""
    mem_per_cpu: Optional[str] = None
    """Memory per CPU, in place of mem."""
    exclusive: bool = True
    """Whether the job has its nodes for itself. If not, give mem and cpus_per_task."""
    constraint: Optional[str] = None
    """Features that the nodes must have."""
    reservation: Optional[str] = None
    """Reservation to use."""
    mail_user: Optional[str] = None
    """Who gets mail."""
    mail_type: Optional[str] = None
    """When mail is sent, such as END,FAIL."""
    comment: Optional[str] = None
    """Comment of the job."""
    job_name: Optional[str] = None
    """Name of the job. null: run.name."""
    signal_s: int = field(default=120, metadata=POSITIVE)
    """Seconds before the time limit at which the job is told to save and end."""
    requeue: Literal["requeue", "chain", "no"] = "requeue"
    """What happens at the time limit. requeue: the job is requeued. chain: it submits the next job, where requeueing is forbidden. no: it ends."""
    setup: list[str] = field(default_factory=list)
    """Lines of shell that the job runs first, such as `module load cuda`; it ends if one fails."""
    container: Optional[str] = None
    """What runs a command in a container on every node: a prefix such as `apptainer exec --nv image.sif`, or options of srun (pyxis) such as `--container-image=image.sqsh`. The job then runs the image's python3. null: no container."""
    extra: list[str] = field(default_factory=list)
    """Further options of sbatch, such as `--licenses=scratch:1`, one per line."""


_MAIL = {"NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "INVALID_DEPEND", "STAGE_OUT", "TIME_LIMIT", "TIME_LIMIT_90",
         "TIME_LIMIT_80", "TIME_LIMIT_50", "ARRAY_TASKS"}  # fmt: skip
_OF_THE_SCRIPT = {
    "signal",
    "requeue",
    "no-requeue",
    "open-mode",
    "output",
    "chdir",
    "ntasks",
    "ntasks-per-node",
    "array",
    "export",
}
"""Options that the batch script needs as they are, or that `--dry-run` sets."""
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)


def slurm_problems(slurm: SlurmConfig) -> Iterator[str]:
    """Yields problems of the section, one line each."""
    texts = [(entry.name, getattr(slurm, entry.name)) for entry in fields(SlurmConfig)]
    texts += [(f"{name}.{i}", line) for name in ("setup", "extra") for i, line in enumerate(getattr(slurm, name))]
    for name, text in texts:
        if isinstance(text, str) and (not text.strip() or not text.isprintable()):
            remedy = "write a list of lines" if "." in name else ""
            yield problem(f"slurm.{name}", "must be one line of text", repr(text), remedy)
        elif isinstance(text, str) and name in OPTIONS and ("\\" in text or '"' in text):
            yield problem(f"slurm.{name}", "must have neither backslashes nor double quotes, for #SBATCH lines", text)
    for name in ("mem", "mem_per_cpu"):
        if (size := getattr(slurm, name)) is not None and not _MEMORY.fullmatch(size):
            yield problem(f"slurm.{name}", "must be a number with K, M, G or T", size, "such as 200G")
    for one, other in (("mem", "mem_per_cpu"), ("gres", "gpus_per_node")):
        if getattr(slurm, one) is not None and getattr(slurm, other) is not None:
            yield problem(f"slurm.{one}", f"excludes slurm.{other}", getattr(slurm, one), "leave one of the two out")
    if slurm.mail_type is not None and (unknown := {*slurm.mail_type.split(",")} - _MAIL):
        yield problem("slurm.mail_type", f"must be of {', '.join(sorted(_MAIL))}", ",".join(sorted(unknown)))
    if slurm.time is not None:
        limit = seconds(slurm.time)
        if limit is None:
            yield problem("slurm.time", "must be minutes, H:MM:SS or D-HH:MM:SS", slurm.time, 'such as "04:00:00"')
        elif limit <= slurm.signal_s:
            rule = f"must be more than slurm.signal_s={slurm.signal_s}: the job would be told to end when it starts"
            yield problem("slurm.time", rule, slurm.time, "raise it, or lower slurm.signal_s")
    for i, line in enumerate(slurm.extra):
        option = re.match(r"--([a-z-]+)", line)
        if option is None:
            yield problem(f"slurm.extra.{i}", "must be a long option of sbatch", line, "such as --licenses=scratch:1")
        elif option[1] in OPTIONS.values():
            key = next(key for key, name in OPTIONS.items() if name == option[1])
            yield problem(f"slurm.extra.{i}", f"--{option[1]} has a setting of its own", line, f"set slurm.{key}")
        elif option[1] in _OF_THE_SCRIPT:
            remedy = "set slurm.signal_s" if option[1] == "signal" else "leave it out"
            yield problem(f"slurm.extra.{i}", f"--{option[1]} is set by the batch script", line, remedy)


def seconds(limit: str) -> int | None:
    """A time limit of Slurm's in seconds; None if it is none."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if found is None:
        return None
    days, first, second, third = (int(part or 0) for part in found.groups())
    if found[1] is None and found[4] is None:  # M[:S]
        return first * 60 + second
    return ((days * 24 + first) * 60 + second) * 60 + third  # H:M:S, or D-H[:M[:S]]
