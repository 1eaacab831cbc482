"""A real two-node Slurm on this machine, with its own munge, ports and folders. The system's Slurm is not touched."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.helpers.command import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0
ReturnToService=2
KillWait=30
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 RealMemory=1000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=n[1-2] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str | None:
    """The reason why Slurm cannot be started here, or None."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: apt-get install slurm-wlm munge)"
    return None if os.geteuid() == 0 else "slurmd and the test's munged need root"


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


@dataclass(frozen=True)
class Slurm:
    root: Path
    hidden: Path
    """A folder in whose place node n2 sees another one, like a file system that is not shared."""

    def run(self, *command: str, check: bool = True) -> str:
        """Runs one of Slurm's programs and returns its stdout."""
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=self.environment())
        assert not check or done.returncode == 0, (command, done.stderr)
        return done.stdout.strip()

    def environment(self, **more: str) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "DISTILL_RL_"))}
        return inherited | {"SLURM_CONF": f"{self.root}/slurm.conf", "PATH": _path()} | more

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`; empty for a job that Slurm has forgotten."""
        fields = self.run("scontrol", "--oneliner", "show", "job", job, check=False)
        return next((part.partition("=")[2] for part in fields.split() if part.startswith(f"{name}=")), "")

    def state(self, job: str) -> str:
        return self.field(job, "JobState")

    def ended(self, job: str) -> bool:
        return self.state(job) not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED")

    def exit_code(self, job: str) -> int:
        return int(self.field(job, "ExitCode").partition(":")[0])

    def start_requeued(self, job: str) -> None:
        """Starts a requeued job after 3 s, where Slurm would wait two minutes."""
        until(lambda: self.state(job) == "PENDING", f"job {job} requeued")
        # Within the second in which the job ended, a node would mistake the new start for the old one.
        self.run("scontrol", "update", f"jobid={job}", "StartTime=now+3")

    def clear(self) -> None:
        """Ends all jobs, and waits until the nodes are free."""
        self.run("scancel", "--user=root", check=False)
        self.run("scancel", "--user=root", "--full", "--signal=KILL", check=False)
        until(lambda: not self.run("squeue", "--noheader"), "an empty queue")


@contextlib.contextmanager
def slurm(root: Path, hidden: Path) -> Iterator[Slurm]:
    """Starts Slurm, and ends its daemons by their pid files. Munge needs `root` and its parents readable by others."""
    first = _free_ports(3)
    conf = CONF.format(
        host=socket.gethostname().partition(".")[0], root=root, control=first, first=first + 1, last=first + 2
    )
    (root / "slurm.conf").write_text(conf)
    (root / "state").mkdir()
    key = root / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    cluster = Slurm(root, hidden)
    private = f"mount -t tmpfs none {hidden} && exec slurmd -N n2 -f {root}/slurm.conf"
    munge = [f"--{name}={root}/munge.{end}" for name, end in (("socket", "sock"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"))]  # fmt: skip
    daemons = [
        ["munged", "--force", f"--key-file={key}", *munge],
        ["slurmctld", "-f", f"{root}/slurm.conf"],
        ["slurmd", "-N", "n1", "-f", f"{root}/slurm.conf"],
        ["unshare", "--mount", "bash", "-c", private],
    ]
    try:
        for command in daemons:
            subprocess.run(command, check=True, timeout=60, env=cluster.environment(), capture_output=True)
        until(
            lambda: cluster.run("sinfo", "--noheader", "--format=%D %t", check=False) == "2 idle", "two idle nodes", 60
        )
        yield cluster
        cluster.clear()
    finally:
        _end([root / name for name in ("slurmd-n1.pid", "slurmd-n2.pid", "slurmctld.pid", "munge.pid")])


def _free_ports(count: int) -> int:
    """The first of `count` consecutive free ports."""
    for start in range(17100, 17900, 10):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(start, start + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return start
    raise AssertionError("no free ports")


def _end(files: list[Path]) -> None:
    processes = []
    for file in files:
        with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
            processes.append(psutil.Process(int(file.read_text())))
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=20)
    for process in alive:
        process.kill()
