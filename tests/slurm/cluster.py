"""A real Slurm on this machine, with its own munge, ports and folders. The system's Slurm is not touched.

`two_nodes` share the network, the files and the memory of this machine. `three_nodes` are what a cluster's are: each has its own
network, hostname, /tmp and /dev/shm, and slurmdbd accounts for its jobs, with accounts and QOS enforced.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.helpers import guard
from tests.helpers.command import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
THREE_NODE_PROGRAMS = (*PROGRAMS, "slurmdbd", "sacctmgr", "mariadbd", "mariadb", "mariadb-install-db", "ip", "unshare", "nsenter")  # fmt: skip

CONF = """\
ClusterName=test
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock
CredType=cred/munge
ProctrackType=proctrack/linuxproc
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,bf_interval=2
ReturnToService=2
KillWait=30
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
TWO_NODES = """\
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 RealMemory=1000
"""
THREE_NODES = """\
SlurmctldHost=login(10.77.0.254)
TaskPlugin=task/affinity
JobAcctGatherType=jobacct_gather/linux
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=login
AccountingStoragePass={root}/munge.sock
AccountingStorageEnforce=associations,limits,qos
AccountingStorageTRES=gres/gpu
GresTypes=gpu
SelectTypeParameters=CR_Core_Memory
SlurmdTimeout=20
NodeName=n[1-2] NodeAddr=10.77.0.[1-2] CPUs=4 RealMemory=7000 Features=fast
NodeName=n3 NodeAddr=10.77.0.3 CPUs=4 RealMemory=7000 Features=slow
"""
ACCOUNTING = """\
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock
DbdHost=login
SlurmUser=root
LogFile={root}/slurmdbd.log
PidFile={root}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StorageUser=slurm
StoragePass=slurm
"""
GRANTS = """\
create database slurm_acct_db;
create user 'slurm'@'127.0.0.1' identified by 'slurm';
create user 'slurm'@'localhost' identified by 'slurm';
grant all on slurm_acct_db.* to 'slurm'@'127.0.0.1';
grant all on slurm_acct_db.* to 'slurm'@'localhost';
"""
ASSOCIATIONS = (
    "add cluster test",
    "add qos long,short",
    "add account team Description=team Organization=lab",
    "add user root account=team",
    "modify user root set defaultaccount=team qos=normal,long,short",
)
START_S = 60


def why_not(programs: Sequence[str] = PROGRAMS) -> str | None:
    """The reason why Slurm cannot be started here, or None."""
    missing = [program for program in programs if shutil.which(program, path=_path()) is None]
    if missing:
        packages = "slurm-wlm munge" + (" slurmdbd mariadb-server iproute2" if programs != PROGRAMS else "")
        return f"not installed: {', '.join(missing)} (Debian: apt-get install {packages})"
    return None if os.geteuid() == 0 else "slurmd and the test's munged need root"


def why_not_three_nodes() -> str | None:
    """The reason why the nodes cannot have their own networks and mounts here, or None."""
    if reason := why_not(THREE_NODE_PROGRAMS):
        return reason
    tries = "mount -t tmpfs none /dev/shm && ip link add br0 type bridge && ip link add veth0 type veth peer name veth1"
    command = ["unshare", "--net", "--mount", "--uts", "bash", "-c", tries]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | {"PATH": _path()})
    return None if done.returncode == 0 else f"namespaces are forbidden: {done.stderr.strip()}"


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


@dataclass(frozen=True)
class Machine:
    """Namespaces for network, mounts and hostname, which end with all of their processes. The first one only sleeps."""

    pid: int

    @property
    def enter(self) -> list[str]:
        """What a command begins with that runs on this machine."""
        return ["nsenter", f"--target={self.pid}", "--net", "--mount", "--uts"]

    @property
    def files(self) -> Path:
        """The root of its files, as this process sees them."""
        return Path(f"/proc/{self.pid}/root")

    def run(self, script: str) -> None:
        """Runs a script of shell, which stops at its first error."""
        command = [*self.enter, "bash", "-euc", script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | {"PATH": _path()})
        assert done.returncode == 0, (script, done.stderr)


@dataclass(frozen=True)
class Slurm:
    root: Path
    hidden: Path | None = None
    """A folder in whose place node n2 sees another one, like a file system that is not shared."""
    login: Machine | None = None
    """Where Slurm's programs run; None: on this machine itself."""
    nodes: Mapping[str, Machine] = field(default_factory=dict)
    """By name; empty if they share this machine."""

    def run(self, *command: str, check: bool = True) -> str:
        """Runs one of Slurm's programs and returns its stdout."""
        done = self.done(*command)
        assert not check or done.returncode == 0, (command, done.stderr)
        return done.stdout.strip()

    def done(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs one of Slurm's programs to its end."""
        prefix = [*self.login.enter, "env", f"--chdir={Path.cwd()}"] if self.login else []
        return subprocess.run([*prefix, *command], capture_output=True, text=True, timeout=60, env=self.environment())

    def environment(self) -> dict[str, str]:
        """Of the daemons, programs and jobs; the guard of this process ends them if it is killed. Jobs get the settings of the launch
        scripts from their test alone."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "DISTILL_RL_", "VENV"))
        }
        mark = {guard.VARIABLE: os.environ.get(guard.VARIABLE, "")}
        return kept | mark | {"SLURM_CONF": f"{self.root}/slurm.conf", "PATH": _path()}

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

    def folders(self, path: str) -> list[Path]:
        """The folders that processes of jobs may see at an absolute path, as this process sees them."""
        return [machine.files / path.lstrip("/") for machine in self.nodes.values()] or [Path(path)]


@contextlib.contextmanager
def two_nodes(root: Path, hidden: Path) -> Iterator[Slurm]:
    """Starts Slurm with two nodes that share this machine. Munge needs `root` and its parents readable by others."""
    first = _free_ports(3)
    host = socket.gethostname().partition(".")[0]
    _write(root, TWO_NODES.format(host=host, control=first, first=first + 1, last=first + 2))
    cluster = Slurm(root, hidden)
    private = f"mount -t tmpfs none {hidden} && exec slurmd -D -N n2"
    with contextlib.ExitStack() as stack:
        _start_munge(stack, cluster)
        _daemon(stack, cluster, "slurmctld", "-D")
        _daemon(stack, cluster, "slurmd", "-D", "-N", "n1")
        _daemon(stack, cluster, "unshare", "--mount", "bash", "-c", private)
        _until_idle(cluster, 2)
        yield cluster
        cluster.clear()


@contextlib.contextmanager
def three_nodes(root: Path, shared: Sequence[Path]) -> Iterator[Slurm]:
    """Starts Slurm with slurmdbd, a login node and three nodes, each with its own network, hostname, /tmp and /dev/shm.

    The nodes have two networks: eth0, over which Slurm and the default route go, and ib0, which only the nodes have.

    Args:
        root: folder of keys, state and logs. Munge needs it and its parents readable by others.
        shared: further folders that all nodes see even if they are in /tmp.
    """
    _write(root, THREE_NODES.format(root=root))
    (root / "slurmdbd.conf").touch(mode=0o600)
    (root / "slurmdbd.conf").write_text(ACCOUNTING.format(root=root))
    addresses = {"login": "10.77.0.254", **{f"n{i}": f"10.77.0.{i}" for i in (1, 2, 3)}}
    hosts = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
    (root / "hosts").write_text("".join(f"{line}\n" for line in hosts))
    with contextlib.ExitStack() as stack:
        login, *machines = (stack.enter_context(_machine()) for _ in addresses)
        nodes = dict(zip(("n1", "n2", "n3"), machines, strict=True))
        cluster = Slurm(root, login=login, nodes=nodes)
        common = f"ip link set lo up; mount --bind {root}/hosts /etc/hosts"
        login.run(f"hostname login; {common}; ip link add eth0 type bridge; ip addr add 10.77.0.254/24 dev eth0; "
                  "ip link set eth0 up; ip link add ib0 type bridge; ip link set ib0 up")  # fmt: skip
        for number, (name, node) in enumerate(nodes.items(), 1):
            for device in ("eth0", "ib0"):
                here = f"{device}-{name}"
                login.run(f"ip link add {here} type veth peer name {device} netns {node.pid}; ip link set {here} master {device} up")  # fmt: skip
            node.run(f"hostname {name}; {common}; {_own_memory(root / f'tmp-{name}', [root, *shared])}; "
                     f"ip addr add 10.77.0.{number}/24 dev eth0; ip link set eth0 up; ip route add default via 10.77.0.254; "
                     f"ip addr add 10.78.0.{number}/24 dev ib0; ip link set ib0 up")  # fmt: skip
        _start_munge(stack, cluster)
        _start_accounting(stack, cluster)
        _daemon(stack, cluster, "slurmctld", "-D")
        for name, node in nodes.items():
            _daemon(stack, cluster, "slurmd", "-D", "-N", name, machine=node)
        _until_idle(cluster, 3)
        yield cluster
        cluster.clear()


@contextlib.contextmanager
def _machine() -> Iterator[Machine]:
    sleeping = ["unshare", "--net", "--mount", "--uts", "sleep", "infinity"]
    with subprocess.Popen(sleeping, env=os.environ | {"PATH": _path()}) as process:
        try:
            until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n", "namespaces")
            yield Machine(process.pid)
        finally:
            process.kill()


def _own_memory(view: Path, shared: Sequence[Path]) -> str:
    """The script that gives a node its own /dev/shm and /tmp, in which only the shared folders are seen."""
    inside = [path for path in shared if path.is_relative_to("/tmp")]
    binds = [f"mkdir -p {view / path.relative_to('/tmp')}; mount --bind {path} {view / path.relative_to('/tmp')}" for path in inside]  # fmt: skip
    view.mkdir()
    return "; ".join(
        [
            f"mount -t tmpfs tmp {view}",
            *binds,
            f"mount --rbind {view} /tmp",
            "mount -t tmpfs -o size=3g shm /dev/shm",
            "chmod 1777 /tmp /dev/shm",
        ]
    )


def _write(root: Path, rest: str) -> None:
    """Writes slurm.conf, whose lines of partitions must follow those of nodes, and a new key for munge."""
    common, partitions = CONF.format(root=root).split("PartitionName", 1)
    (root / "slurm.conf").write_text(f"{common}{rest}PartitionName{partitions}")
    (root / "state").mkdir()
    key = root / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))


def _start_munge(stack: contextlib.ExitStack, cluster: Slurm) -> None:
    root = cluster.root
    munge = [f"--{name}={root}/munge.{end}" for name, end in (("socket", "sock"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"))]  # fmt: skip
    _daemon(stack, cluster, "munged", "--foreground", "--force", f"--key-file={root}/key", *munge)
    until((root / "munge.sock").exists, "munge", START_S)


def _start_accounting(stack: contextlib.ExitStack, cluster: Slurm) -> None:
    """Starts a database and slurmdbd, and adds accounts and QOS."""
    database, sock = cluster.root / "mysql", cluster.root / "mysql.sock"
    cluster.run("mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={database}")
    options = ["--bind-address=127.0.0.1", f"--pid-file={cluster.root}/mysql.pid", "--innodb-buffer-pool-size=128M"]
    _daemon(stack, cluster, "mariadbd", "--no-defaults", "--user=root", f"--datadir={database}", f"--socket={sock}", *options)  # fmt: skip
    until(
        lambda: cluster.done("mariadb", f"--socket={sock}", "-e", "select 1").returncode == 0, "the database", START_S
    )
    cluster.run("mariadb", f"--socket={sock}", "-e", GRANTS)
    _daemon(stack, cluster, "slurmdbd", "-D")
    until(lambda: cluster.done("sacctmgr", "show", "cluster").returncode == 0, "slurmdbd", START_S)
    for association in ASSOCIATIONS:
        cluster.run("sacctmgr", "-i", *shlex.split(association))


def _daemon(stack: contextlib.ExitStack, cluster: Slurm, *command: str, machine: Machine | None = None) -> None:
    """Starts a daemon in the foreground, where Slurm's programs run or on a node, and ends it with the stack."""
    machine = machine or cluster.login
    process = psutil.Popen(
        [*(machine.enter if machine else []), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=cluster.environment(),
    )
    stack.callback(_end, process)


def _end(process: psutil.Popen) -> None:
    process.terminate()
    try:
        process.wait(timeout=20)
    except psutil.TimeoutExpired:
        process.kill()
        process.wait(timeout=20)


def _until_idle(cluster: Slurm, nodes: int) -> None:
    def idle() -> bool:
        return cluster.run("sinfo", "--noheader", "--partition=main", "--format=%D %t", check=False) == f"{nodes} idle"

    until(idle, f"{nodes} idle nodes", START_S)


def _free_ports(count: int) -> int:
    """The first of `count` consecutive free ports."""
    for start in range(17100, 17900, 10):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(start, start + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return start
    raise AssertionError("no free ports")
