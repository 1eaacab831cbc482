"""The settings of a Slurm job (`slurm`), which `--dry-run` writes into its batch script. Nothing else reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Optional

from distill_rl.config.schema.fields import NOT_NEGATIVE, POSITIVE

# OmegaConf reads these annotations at run time and knows Optional[...], not `X | None`.
# ruff: noqa: UP045

GPUS_PER_NODE = 8
"""Unless `gpus_per_node` says otherwise."""
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
