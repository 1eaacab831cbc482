"""The program of offline_bundle.sh: which wheels a host without a registry lacks, and Ray's without what is not needed."""

from __future__ import annotations

import argparse
import base64
import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from email.parser import HeaderParser
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "launch" / "constraints-ops.txt"
HAS = "torch,transformers,tokenizers,safetensors,numpy,numba,llvmlite,pyarrow,pandas"
"""What a PyTorch container with Transformers has, of the packages that are large or that must suit its torch."""
SOURCES = ("distill_rl", "configs", "launch", "docs", "pyproject.toml", "README.md")
"""What the package's own wheel is built from."""
NOT_OF_RAY = ("ray/jars/", "ray/rllib/", "ray/dashboard/client/", "ray/cpp/", "ray/tune/examples/")


def fail(message: str) -> NoReturn:
    print(f"offline_bundle: error: {message}", file=sys.stderr)
    sys.exit(2)


try:
    from pip._vendor.packaging.markers import default_environment
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.utils import canonicalize_name
except ImportError:
    fail(f"{sys.executable} has no pip; install pip, or set DISTILL_RL_PYTHON to an interpreter that has it")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(f"{message}; see the options by --help")


def arguments() -> argparse.Namespace:
    parser = Parser(prog="offline_bundle.sh", description="Packs the wheels that a host without a registry lacks.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="new or empty folder")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", default=here, metavar="3.N", help="Python of the host (%(default)s)")
    parser.add_argument("--machine", default=platform.machine(), help="its processor, as `uname -m` says (%(default)s)")
    parser.add_argument("--glibc", default="2.28", metavar="2.N", help="its C library, at least (%(default)s)")
    parser.add_argument("--has", default=HAS, metavar="NAMES", help="packages that it has already (%(default)s)")
    parser.add_argument("--all", action="store_true", help="it has none")
    parser.add_argument("--extras", default="", metavar="NAMES", help="extras of pyproject.toml")
    parsed = parser.parse_args()
    check(parsed)
    return parsed


def check(parsed: argparse.Namespace) -> None:
    """Ends with one line if a value cannot be right."""
    for option, lowest in (("python", 11), ("glibc", 5)):
        value = getattr(parsed, option)
        major, _, minor = value.partition(".")
        if not minor.isdecimal() or int(minor) < lowest or major != ("3" if option == "python" else "2"):
            fail(f"--{option} must be {'3' if option == 'python' else '2'}.N with N of {lowest} or more; got {value}")
    known = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    if unknown := sorted(names(parsed.extras) - known):
        fail(f"--extras: pyproject.toml has no {', '.join(unknown)}; its extras are: {', '.join(sorted(known))}")
    pinned = {canonicalize_name(line.partition("==")[0]) for line in CONSTRAINTS.read_text().splitlines()}
    if unknown := sorted(names(parsed.has) - pinned):
        fail(f"--has: {', '.join(unknown)} is not needed at all; the packages are those of launch/{CONSTRAINTS.name}")
    if parsed.folder.exists() and (not parsed.folder.is_dir() or any(parsed.folder.iterdir())):
        fail(f"{parsed.folder} must be a new or empty folder; name another one, or remove it")


def names(text: str) -> set[str]:
    return {canonicalize_name(name.strip()) for name in text.split(",") if name.strip()}


def main() -> None:
    parsed = arguments()
    folder = parsed.folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Filled beside its place and renamed at the end, so that a bundle is whole or not there.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as work:
        wheels = Path(work) / "wheels"
        wheels.mkdir()
        build_own(wheels, Path(work) / "source")
        collect(wheels, parsed)
        for wheel in wheels.glob("ray-*.whl"):
            slim(wheel)
        if folder.exists():
            folder.rmdir()
        wheels.rename(folder)
    found = sorted(folder.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in found) / 1e6
    wanted = f"distill_rl[{parsed.extras}]" if parsed.extras else "distill_rl"
    print(f"{len(found)} wheels, {size:.0f} MB, in {folder}. On the host, with Python {parsed.python}:")
    print("    python3 -m venv --system-site-packages ENV      # sees the packages that the host has")
    print(f"    ENV/bin/python -m pip install --no-index --find-links {folder} '{wanted}'")


def build_own(wheels: Path, copy: Path) -> None:
    """Builds this package's wheel, from a copy, since setuptools writes into the folder that it builds."""
    copy.mkdir()
    for name in SOURCES:
        subprocess.run(["cp", "-a", ROOT / name, copy / name], check=True)
    pip(["wheel", "--no-deps", "--wheel-dir", wheels, copy], "build this package's wheel")


def collect(wheels: Path, parsed: argparse.Namespace) -> None:
    """Fetches what the wheels need and the host lacks, and what those need in turn. What only a package of the host needs is there."""
    target = default_environment() | {
        "python_version": parsed.python,
        "python_full_version": f"{parsed.python}.0",
        "implementation_version": f"{parsed.python}.0",
        "platform_machine": parsed.machine,
        "platform_system": "Linux",
        "sys_platform": "linux",
    }
    has = set() if parsed.all else names(parsed.has)
    done: set[tuple[str, str]] = set()
    """Package and extra ("" for none) whose requirements were read."""
    open_ = {("distill-rl", extra) for extra in ("", *names(parsed.extras))}
    while open_:
        wanted = [one for name, extra in sorted(open_) for one in requirements(wheels, name, extra, target)]
        done |= open_
        wanted = [one for one in wanted if canonicalize_name(one.name) not in has]
        present = {package_name(wheel) for wheel in wheels.iterdir()}
        missing = {f"{one.name}{one.specifier}" for one in wanted if canonicalize_name(one.name) not in present}
        if missing:
            fetch(wheels, sorted(missing), parsed)
        open_ = {(str(canonicalize_name(one.name)), extra) for one in wanted for extra in ("", *one.extras)} - done


def package_name(wheel: Path) -> str:
    return canonicalize_name(wheel.name.partition("-")[0])


def requirements(wheels: Path, name: str, extra: str, target: Mapping[str, str]) -> list[Requirement]:
    """What a fetched package requires on the host: with an extra, what the extra adds too."""
    (wheel,) = (wheel for wheel in wheels.iterdir() if package_name(wheel) == name)
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (
            file for file in archive.namelist() if file.endswith(".dist-info/METADATA") and file.count("/") == 1
        )
        lines = HeaderParser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist") or []
    read = map(Requirement, lines)
    return [one for one in read if one.marker is None or one.marker.evaluate({**target, "extra": extra})]


def fetch(wheels: Path, wanted: Iterable[str], parsed: argparse.Namespace) -> None:
    platforms = [f"manylinux_2_{minor}_{parsed.machine}" for minor in range(int(parsed.glibc[2:]), 4, -1)]
    platforms += [f"{kind}_{parsed.machine}" for kind in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
    chosen = [word for name in platforms for word in ("--platform", name)]
    what = ["download", "--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", parsed.python]
    pip([*what, *chosen, "--constraint", CONSTRAINTS, "--dest", wheels, *wanted], "fetch the wheels")


def pip(command: list[str | Path], what: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *command, "-q", "--no-input", "--disable-pip-version-check"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.startswith("ERROR: ")] or [done.stdout.strip()]
        why = lines[-1].removeprefix("ERROR: ")
        fail(f"pip could not {what}: {why}; check where `pip config list` looks, --python, --machine and --glibc")


def slim(wheel: Path) -> None:
    """Rewrites Ray's wheel without Java, RLlib, the dashboard's pages and debug symbols, with the modes of its files and a new RECORD."""
    strip = shutil.which("strip")
    if strip is None:
        print("offline_bundle: no `strip` here, so Ray keeps its debug symbols (install binutils)", file=sys.stderr)
    whole = wheel.rename(wheel.with_suffix(".whole"))
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as out:
        # Ray holds copies of other packages, which have a RECORD of their own.
        top = (info for info in source.infolist() if info.filename.count("/") == 1)
        (record,) = (info for info in top if info.filename.endswith(".dist-info/RECORD"))
        lines = []
        for info in source.infolist():
            if info.is_dir() or info.filename.startswith(NOT_OF_RAY) or info is record:
                continue
            content = source.read(info)
            if strip is not None and content.startswith(b"\x7fELF"):
                content = stripped(content, strip, info.filename)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            lines.append(f"{info.filename},sha256={digest},{len(content)}\n")
            out.writestr(info, content, zipfile.ZIP_DEFLATED)
        out.writestr(record, "".join(lines) + f"{record.filename},,\n", zipfile.ZIP_DEFLATED)
    whole.unlink()


def stripped(content: bytes, strip: str, name: str) -> bytes:
    """A program or library without its symbols; as it is if `strip` does not know its processor."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "binary"
        file.write_bytes(content)
        if subprocess.run([strip, "--strip-all", file], capture_output=True).returncode:
            print(f"offline_bundle: `strip` cannot read {name}, which keeps its debug symbols", file=sys.stderr)
            return content
        return file.read_bytes()


if __name__ == "__main__":
    main()
