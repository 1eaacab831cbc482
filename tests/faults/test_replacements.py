"""Runs whose files and folders are replaced, copied and flushed: killed in the calls that do it, and looked at from outside."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Material
from tests.faults.conftest import assert_same_student
from tests.helpers.command import distill_rl, environment, records, series
from tests.helpers.kill_at_call import NO_EXCHANGE, Killer

pytestmark = pytest.mark.cli

TWO_SAVES = ("train.steps=2", "schedule.steps=2", "checkpoint.every=1", "checkpoint.keep_last=2")
NAMES = "rename renameat renameat2"


@pytest.fixture(scope="module")
def saved(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with the checkpoints of steps 1 and 2, and the export of the second."""
    folder = tmp_path_factory.mktemp("saved")
    ended = distill_rl("train", "-c", material.config(folder), *TWO_SAVES)
    assert ended.code == 0, ended.err
    return folder / "runs" / "tiny"


def weights(run: Path) -> bytes | None:
    file = run / "export" / "model.safetensors"
    return file.read_bytes() if file.exists() else None


@pytest.mark.parametrize("refuse", [None, NO_EXCHANGE])
def test_an_export_that_is_killed_at_any_rename_leaves_one_and_the_next_completes_it(saved, tmp_path, refuse):
    killer, found = Killer(tmp_path, refuse, only=NAMES), []

    def prepare(place: Path) -> list[str | Path]:
        shutil.copytree(saved, place / "tiny", symlinks=True)
        return ["-m", "distill_rl", "export", place / "tiny", "--checkpoint", "1"]

    for place, killed in killer.every_kill(prepare):
        new = weights(tmp_path / "at-0" / "tiny")
        assert new != weights(saved)
        found.append(weights(place / "tiny"))
        assert found[-1] in (new, weights(saved)) or (refuse and found[-1] is None), killed.calls[-1]
        again = killer.run(["-m", "distill_rl", "export", place / "tiny", "--checkpoint", "1"])
        assert again.code == 0, again.err
        assert weights(place / "tiny") == new
        assert not [path for path in (place / "tiny").glob(".*") if path.name != ".lock"]
    assert len(found) == (2 if refuse else 1)


def test_metrics_are_on_the_disk_before_a_checkpoint_has_its_name(material, tmp_path):
    config = material.config(tmp_path)
    ended = Killer(tmp_path, paths="/runs/tiny").run(["-m", "distill_rl", "train", "-c", config, *TWO_SAVES])
    assert ended.code == 0, ended.err
    run = tmp_path / "runs" / "tiny"
    for step in (1, 2):
        (named,) = [i for i, call in enumerate(ended.calls) if call.endswith(f" {run}/checkpoints/step-{step}")]
        assert ended.calls[named].startswith("rename ")
        flushed = ended.calls[:named]  # a save may be written while the run goes on to the next one
        assert flushed.count(f"fsync {run}/metrics.jsonl ") >= step
        assert f"fsync {run} " in flushed[flushed.index(f"fsync {run}/metrics.jsonl ") :]


def test_a_copy_that_followed_links_goes_on_bit_for_bit(material, saved, undisturbed, tmp_path):
    """Such as of `cp -rL`, `scp -r` or an archive; `logs/latest` is then a folder."""
    four = ("train.steps=4", "schedule.steps=4")
    config = material.config(tmp_path)
    half = distill_rl("train", "-c", config, *four, "checkpoint.every=2", "observe.every=1", "run.name=half")
    assert half.code == 0, half.err
    copy = shutil.copytree(tmp_path / "runs" / "half", tmp_path / "runs" / "tiny")
    assert not (copy / "logs" / "latest").is_symlink()
    shutil.rmtree(copy / "checkpoints" / "step-4")
    for resume in ((), ("--resume", "auto")):
        ended = distill_rl("train", "-c", config, *four, *(resume or ("--resume",)))
        assert ended.code == 0, ended.err
        assert_same_student(copy, undisturbed(*four))
    assert (copy / "logs" / "latest").readlink() == Path("attempt_3")


def test_a_start_that_is_killed_while_config_yaml_gets_its_name_leaves_the_directory_free(material, tmp_path):
    killer = Killer(tmp_path, paths="config.yaml", only=NAMES)
    arguments = ["-m", "distill_rl", "train", "-c", material.config(tmp_path), *TWO_SAVES]
    killer.run(arguments, kill_at=1)
    run = tmp_path / "runs" / "tiny"
    assert list(run.glob(".config.yaml.*"))
    assert not (run / "config.yaml").exists()
    ended = distill_rl(*arguments[2:])
    assert ended.code == 0, ended.err
    assert not list(run.glob(".config.yaml.*"))
    assert len(series(run, "train/loss")) == 2
    assert [record["step"] for record in records(run)][-1] == 2


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_all_files_of_an_export_have_the_mode_of_the_umask(saved, tmp_path, umask, mode):
    command = [sys.executable, "-m", "distill_rl", "export", saved, "--out", tmp_path / "out"]
    ended = subprocess.run(command, umask=umask, env=environment(), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert "model.safetensors" in modes
    assert set(modes.values()) == {mode}, modes
