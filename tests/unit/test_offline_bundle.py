"""launch/offline_bundle.sh: what it refuses, what it finds that a host lacks, and Ray's slimmed wheel."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("offline_bundle", ROOT / "launch" / "offline_bundle.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bundle(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", ROOT / "launch" / "offline_bundle.sh", *arguments]
    env = os.environ | {"DISTILL_RL_PYTHON": sys.executable} | variables
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--nope",), "unrecognized arguments: --nope; see the options by --help"),
        (("--python", "2.7"), "--python must be 3.N with N of 11 or more; got 2.7"),
        (("--glibc", "new"), "--glibc must be 2.N with N of 5 or more; got new"),
        (("--has", "torch,torhc"), "--has: torhc is not needed at all"),
        (("--extras", "trition"), "--extras: pyproject.toml has no trition; its extras are: cpu, dashboard,"),
    ],
)
def test_a_wrong_option_gives_one_line(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = bundle(tmp_path / "new", *options)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"offline_bundle: error: {message}")
    assert not list(tmp_path.iterdir())


def test_a_folder_with_files_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    done = bundle(tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "must be a new or empty folder; name another one, or remove it" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_failure_of_pip_gives_one_line_and_no_bundle(program: ModuleType, tmp_path: Path, capsys) -> None:
    empty = ["--no-index", "--find-links", tmp_path, "no-such-package"]
    with pytest.raises(SystemExit) as ended:
        program.pip(["download", "--dest", tmp_path, *empty], "fetch the wheels")
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith(
        "offline_bundle: error: pip could not fetch the wheels: No matching distribution found for no-such"
    )


def package(folder: Path, name: str, *requires: str) -> None:
    """A wheel without files."""
    info = f"{name}-1.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as wheel:
        lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1", *(f"Requires-Dist: {one}" for one in requires)]
        wheel.writestr(f"{info}/METADATA", "\n".join(lines) + "\n\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_what_the_host_lacks_is_fetched_for_its_python_and_processor(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, wheels = tmp_path / "registry", tmp_path / "wheels"
    registry.mkdir()
    wheels.mkdir()
    package(wheels, "distill_rl", "torch", "aa[more]>=1", "cc; extra == 'x'", "dd; extra == 'y'")
    package(registry, "aa", "bb; extra == 'more'", "old; python_version < '3.12'", "arm; platform_machine == 'aarch64'")
    package(registry, "bb", "aa")
    for name in ("cc", "arm"):
        package(registry, name)
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(registry)), ("PIP_CONSTRAINT", "")):
        monkeypatch.setenv(name, value)
    options = ["offline_bundle", str(tmp_path / "new"), "--python", "3.12", "--machine", "aarch64", "--has", "torch"]
    monkeypatch.setattr(sys, "argv", options)
    parsed = program.arguments()
    parsed.extras = "x"
    program.collect(wheels, parsed)
    assert sorted(map(program.package_name, wheels.iterdir())) == ["aa", "arm", "bb", "cc", "distill-rl"]


def test_slimmed_ray_keeps_modes_and_its_record_is_right(program: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "ray-1-py3-none-any.whl"
    binary = Path(shutil.which("true")).read_bytes()
    files = {
        "ray/core/raylet": (0o755, binary),
        "ray/__init__.py": (0o644, b"x = 1\n"),
        "ray/jars/a.jar": (0o644, b"java"),
        "ray/rllib/__init__.py": (0o644, b""),
        "ray/thirdparty_files/psutil.dist-info/RECORD": (0o644, b""),
        "ray-1.dist-info/METADATA": (0o644, b"Metadata-Version: 2.1\nName: ray\nVersion: 1\n\n"),
        "ray-1.dist-info/WHEEL": (0o644, b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
        "ray-1.dist-info/RECORD": (0o644, b"ray/core/raylet,sha256=stale,1\n"),
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, (mode, content) in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o100000 | mode) << 16
            archive.writestr(info, content)
    program.slim(wheel)
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]
    target = tmp_path / "installed"
    install = ["install", "-q", "--no-index", "--no-deps", "--no-compile", "--target", target, wheel]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True, timeout=120)
    assert os.access(target / "ray/core/raylet", os.X_OK)
    assert not os.access(target / "ray/__init__.py", os.X_OK)
    assert subprocess.run([target / "ray/core/raylet"]).returncode == 0
    assert not list(target.glob("ray/jars")) + list(target.glob("ray/rllib"))
    with zipfile.ZipFile(wheel) as archive:
        record = [line.split(",") for line in archive.read("ray-1.dist-info/RECORD").decode().splitlines()]
        assert sorted(name for name, _, _ in record) == sorted(archive.namelist())
        for name, digest, size in record[:-1]:
            content = archive.read(name)
            told = base64.urlsafe_b64decode(digest.removeprefix("sha256=") + "=")
            assert (told, int(size)) == (hashlib.sha256(content).digest(), len(content)), name
