import os
import shutil
import subprocess
import sys

import pytest

from distill_rl.config.schema import Config
from distill_rl.errors import ConfigError
from distill_rl.run import run_directory
from tests.helpers.kill_at_call import Killer


@pytest.fixture
def config(tmp_path):
    config = Config()
    config.run.dir, config.run.name = str(tmp_path / "runs"), "mine"
    config.student.model = config.data.path = "x"
    return config


def used(config):
    with run_directory.occupy(config, clean=False) as paths:
        paths.metrics.write_text("old")
        (paths.checkpoints / "step-1").mkdir(parents=True)
    return paths


def test_checking_a_fresh_directory_creates_nothing(config):
    assert run_directory.problems(config, clean=False) == []
    assert not run_directory.paths_of(config).root.exists()


def test_run_directory_is_closed_whatever_the_umask(config):
    root = run_directory.paths_of(config).root
    before = os.umask(0o002)
    try:
        used(config)
        config.checkpoint.resume = "latest"
        with run_directory.occupy(config, clean=False):
            assert [oct(folder.stat().st_mode)[-3:] for folder in (root, root / "checkpoints")] == ["755", "755"]
        assert root.parent.stat().st_mode & 0o020, "the parent keeps its mode"
    finally:
        os.umask(before)


def test_used_directory_needs_resume_or_clean(config):
    paths = used(config)
    (line,) = run_directory.problems(config, clean=False)
    assert "in use; go on with --resume, start over with --clean" in line
    (paths.checkpoints / "step-1").rmdir()
    (line,) = run_directory.problems(config, clean=False)
    assert "in use; no checkpoint is saved: start over with --clean" in line
    assert run_directory.problems(config, clean=True) == []
    assert run_directory.problems(config, clean=None) == []
    config.checkpoint.resume = "latest"
    assert run_directory.problems(config, clean=False) == []
    assert run_directory.problems(config, clean=None) == []
    (line,) = run_directory.problems(config, clean=True)
    assert line.startswith("checkpoint.resume: --clean leaves nothing to resume from")


def test_a_start_without_a_step_leaves_the_directory_free(config):
    with run_directory.occupy(config, clean=False) as paths:
        paths.metrics.touch()
        paths.checkpoints.mkdir()
        (paths.logs / "driver.log").write_text("refused")
        paths.bad_rows.write_text("{}\n")
        paths.queue.write_text('{"place": 1}')
    assert run_directory.problems(config, clean=False) == []
    with run_directory.occupy(config, clean=False) as again:
        assert not again.queue.exists()
        assert (paths.logs / "driver.log").read_text() == "refused"
        assert (again.logs / "earlier_bad_rows.jsonl").exists(), "they do not count against the new run"
        assert not again.bad_rows.exists()


@pytest.mark.parametrize("kept", ["checkpoints/step-1/x", "checkpoints/.tmp-old-step-1-ab/x", "export/x", "evals/x",
                                  "metrics.jsonl", "report.html", "notes.txt"])  # fmt: skip
def test_what_a_step_or_a_user_wrote_keeps_the_directory_in_use(config, kept):
    with run_directory.occupy(config, clean=False) as paths:
        (paths.root / kept).parent.mkdir(exist_ok=True, parents=True)
        (paths.root / kept).write_text("mine")
    (line,) = run_directory.problems(config, clean=False)
    assert "the run directory is in use" in line
    with pytest.raises(ConfigError, match="in use"), run_directory.occupy(config, clean=False):
        pass
    assert (paths.root / kept).read_text() == "mine"


def test_files_beside_which_no_run_was_started_are_in_use(config):
    logs = run_directory.paths_of(config).root / "logs"
    logs.mkdir(parents=True)
    assert "in use" in run_directory.problems(config, clean=False)[0]


def test_clean_empties_a_run_directory(config):
    paths = used(config)
    with run_directory.occupy(config, clean=True) as again:
        assert sorted(entry.name for entry in paths.root.iterdir()) == [".lock", "config.yaml", "logs"]
        assert again.attempt == 1


def test_every_start_has_a_folder_of_logs(config):
    for number in (1, 2, 3):
        with run_directory.occupy(config, clean=False) as paths:
            assert (paths.attempt, paths.logs) == (number, paths.root / "logs" / f"attempt_{number}")
            assert (paths.root / "logs" / "latest").readlink().name == f"attempt_{number}"
            assert paths.tensorboard == paths.root / "logs" / "tensorboard"
            (paths.logs / "driver.log").write_text(f"{number}")
    (paths.root / "logs" / "attempt_x").mkdir()
    (paths.root / "logs" / "attempt_9").mkdir()
    with run_directory.occupy(config, clean=False) as paths:
        assert paths.attempt == 10
    assert (paths.root / "logs" / "attempt_2" / "driver.log").read_text() == "2"


def test_batch_script_sets_the_attempt(config, monkeypatch):
    folder = run_directory.paths_of(config).root / "logs" / "attempt_4"
    folder.mkdir(parents=True)
    (folder / "ray.log").write_text("by the batch script")
    monkeypatch.setenv("DISTILL_RL_ATTEMPT", "4")
    with run_directory.occupy(config, clean=False) as paths:
        assert paths.logs == folder
        assert (paths.root / "logs" / "latest" / "ray.log").read_text() == "by the batch script"


@pytest.mark.parametrize("attempt", ["", "0", "-1", "two", "1.5", "²"])
def test_invalid_attempt_is_refused(config, monkeypatch, attempt):
    monkeypatch.setenv("DISTILL_RL_ATTEMPT", attempt)
    refused = pytest.raises(ConfigError, match="DISTILL_RL_ATTEMPT: must be a whole number from 1")
    with refused, run_directory.occupy(config, clean=False):
        pass


def test_clean_refuses_other_folders(config):
    root = run_directory.paths_of(config).root
    root.mkdir(parents=True)
    (root / "thesis.tex").write_text("years of work")
    (root / "config.yaml").write_text("of another program")
    assert "no run directory" in run_directory.problems(config, clean=True)[0]


def test_clean_and_resume_exclude_each_other(config):
    used(config)
    config.checkpoint.resume = "latest"
    assert "nothing to resume from" in run_directory.problems(config, clean=True)[0]


def test_recorded_configuration_does_not_resume(config):
    config.checkpoint.resume = "latest"
    with run_directory.occupy(config, clean=False) as paths:
        assert "resume: null" in paths.config.read_text()


def test_file_instead_of_folder_is_named(config, tmp_path):
    (tmp_path / "runs").write_text("a file")
    (line,) = run_directory.problems(config, clean=False)
    assert "runs" in line


START = """\
import sys
from distill_rl.config.schema import Config
from distill_rl.run import run_directory
config = Config()
config.run.dir, config.run.name = sys.argv[1], 'mine'
config.student.model = config.data.path = 'x'
assert not run_directory.problems(config, clean=False)
with run_directory.occupy(config, clean=False) as paths:
    run_directory.record_config(config, paths)
"""


def test_a_start_that_is_killed_at_any_call_leaves_the_directory_free(tmp_path):
    """Such as while config.yaml gets its name."""
    killer, at_config = Killer(tmp_path), 0
    for place, killed in killer.every_kill(lambda place: ["-c", START, place / "runs"]):
        root = place / "runs" / "mine"
        at_config += any(root.glob(".config.yaml.*"))
        again = killer.run(["-c", START, place / "runs"])
        assert again.code == 0, (killed.calls[-1], again.err)
        assert sorted(entry.name for entry in root.iterdir()) == [".lock", "config.yaml", "logs"]
        assert (root / "logs" / "latest").is_symlink()
        assert not [entry for entry in (root / "logs").iterdir() if entry.name.startswith(".")]
    assert at_config > 1


def test_what_killed_replacements_left_is_removed_or_put_back(config):
    """An export that was set aside, and the weights of an evaluation that were not complete."""
    root = used(config).root
    (root / ".export.0123abcd" / "old").mkdir(parents=True)
    (root / ".export.0123abcd" / "old" / "config.json").write_text("{}")
    (root / "evals" / "..weights-8.0123abcd" / "new").mkdir(parents=True)
    (root / ".metrics.jsonl.0123abcd").write_text("half")
    config.checkpoint.resume = "latest"
    with run_directory.occupy(config, clean=False) as paths:
        assert (paths.export / "config.json").read_text() == "{}"
        assert not list(paths.evals.iterdir())
        assert paths.metrics.read_text() == "old"
        assert not [entry for entry in root.iterdir() if entry.name.startswith(".") and entry.name != ".lock"]


def test_a_copy_that_followed_links_is_used_like_the_run(config):
    paths = used(config)
    copy = shutil.copytree(paths.root, paths.root.with_name("copy"))
    assert (copy / "logs" / "latest").is_dir()
    assert not (copy / "logs" / "latest").is_symlink()
    config.run.name, config.checkpoint.resume = "copy", "latest"
    with run_directory.occupy(config, clean=False) as again:
        assert again.attempt == 2
        assert (copy / "logs" / "latest").readlink().name == "attempt_2"
    assert len(list((copy / "logs").glob("copied-latest-*"))) == 1


def test_two_processes_cannot_use_one_directory(config):
    code = (
        "import sys\n"
        "from distill_rl.run import run_directory\n"
        "from distill_rl.config.schema import Config\n"
        "from distill_rl.errors import ConfigError\n"
        "config = Config()\n"
        "config.run.dir, config.run.name = sys.argv[1], 'mine'\n"
        "config.student.model = config.data.path = 'x'\n"
        "try:\n"
        "    with run_directory.occupy(config, clean=True): print('taken')\n"
        "except ConfigError as error: print(error)\n"
    )

    def other_process():
        command = [sys.executable, "-c", code, config.run.dir]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    with run_directory.occupy(config, clean=False) as paths:
        paths.metrics.write_text("mine")
        assert "in use" in other_process()
        assert paths.metrics.read_text() == "mine"
        with pytest.raises(ConfigError, match="in use"), run_directory.occupy(config, clean=False):
            pass
    assert "taken" in other_process()


OCCUPY = """
import sys
from distill_rl.config.schema import Config
from distill_rl.errors import ConfigError
from distill_rl.run import run_directory
run_directory._SIGN_EVERY_S = 0.3
config = Config()
config.run.dir, config.run.name, config.student.model, config.data.path = sys.argv[1], "mine", "x", "x"
try:
    print(*run_directory.problems(config, clean=False), flush=True)
    with run_directory.occupy(config, clean=False):
        print("occupied", flush=True)
        sys.stdin.read()
except ConfigError as error:
    print(error)
"""


def test_a_file_system_without_locks_is_one_line(tmp_path):
    script = tmp_path / "occupy.py"
    script.write_text(OCCUPY)
    (tmp_path / "runs").mkdir()
    found = Killer(tmp_path, refuse="flock", paths="/runs").run([script, tmp_path / "runs"]).out.splitlines()
    assert len(set(found)) == 1
    assert found[0].startswith(f"{tmp_path}/runs/mine: must be on a file system with locks (flock); got ")
    assert found[0].endswith("mount it with them (Lustre: -o flock), or choose a folder elsewhere")


def test_a_process_of_another_node_is_seen_where_locks_hold_on_one_node_only(tmp_path):
    """The other node has another host name, and this process is granted a lock that the other one holds."""
    command = [sys.executable, "-c", OCCUPY, tmp_path / "runs"]
    lock = tmp_path / "runs" / "mine" / ".lock"
    with subprocess.Popen(["unshare", "--uts", "bash", "-c", 'hostname n7 && exec "$@"', "-", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:  # fmt: skip
        if other.stdout.readline() == "":
            pytest.skip("no other host name can be given")
        assert other.stdout.readline() == "occupied\n"
        assert lock.read_text() == f"{other.pid} on n7"
        done = subprocess.run([*command, "x"], stdin=subprocess.DEVNULL, capture_output=True, text=True, env=os.environ | {"LD_PRELOAD": str(blind(tmp_path))})  # fmt: skip
        assert f"the run directory is in use; got by process {other.pid} on n7" in done.stdout
        other.kill()
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert "occupied" in done.stdout, "one that was killed gives no signs of life"
    assert lock.read_text() == ""


def blind(folder):
    """A library with which every lock is granted."""
    source, library = folder / "blind.c", folder / "blind.so"
    source.write_text("int flock(int file, int operation) { return 0; }")
    subprocess.run(
        [shutil.which("cc") or pytest.skip("there is no cc"), "-shared", "-fPIC", "-o", library, source], check=True
    )
    return library
