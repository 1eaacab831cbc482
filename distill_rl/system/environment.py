"""What a process runs on: commit, package versions, processor, memory, GPUs. Neither torch nor CUDA is started to find out."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

# Where this package is installed, what lies beside its code, and how to install an extra of it: no registry has it.

PACKAGE = Path(__file__).parents[1]
CONFIGS, LAUNCH = PACKAGE / "configs", PACKAGE / "launch"
"""In a clone links to the folders of the repository; elsewhere copies of what a user needs of them."""


def clone() -> Path | None:
    """The repository, if the package is used from a clone of it."""
    root = PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and LAUNCH.is_symlink() else None


def install_extra(extra: str) -> str:
    """The command that adds an extra of pyproject.toml to this installation, for a shell.

    In a clone it installs the clone again, with the extra; elsewhere it names the packages of the extra.
    """
    if (root := clone()) is not None:
        return f"{_pip()} install -e {shlex.quote(f'{root}[{extra}]')}"
    return f"{_pip()} install {shlex.join(_packages(extra))}"


def _pip() -> str:
    """`pip` if that is the one of this interpreter, otherwise `PYTHON -m pip`."""
    found = shutil.which("pip")
    own = found is not None and Path(found).parent == Path(sys.executable).parent
    return "pip" if own else f"{shlex.quote(sys.executable)} -m pip"


def _packages(extra: str) -> list[str]:
    """The requirements of an extra, without markers, from the metadata of the installed package."""
    try:
        lines = requires("distill_rl") or []
    except PackageNotFoundError:
        lines = []
    named = re.compile(rf"""extra\s*==\s*["']{re.escape(extra)}["']""")
    return [line.partition(";")[0].strip() for line in lines if named.search(line.partition(";")[2])]


ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "ray", "numpy", "datasets", "triton", "flash-attn", "liger-kernel", "vllm")
NOT_INSTALLED = "not installed"
_GPU_TIMEOUT_S = 20.0


def environment() -> dict[str, Any]:
    """This machine and the installed software, as JSON types.

    `commit` and `dirty` as `commit()`; `version` of this package, `python`, `packages` (name → version of the installed ones of
    PACKAGES); `host`, `cpu` (the processor's name), `cores`, `memory_gib`; `gpus` (a name per GPU) and `driver`, which are
    empty without nvidia-smi.
    """
    from distill_rl import __version__

    gpus, versions = _gpus(), {name: package_version(name) for name in PACKAGES}
    return {
        **commit(),
        "version": __version__,
        "python": platform.python_version(),
        "packages": {name: installed for name, installed in versions.items() if installed != NOT_INSTALLED},
        "host": socket.gethostname(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": memory_gib(),
        "gpus": [name for name, _ in gpus],
        "driver": gpus[0][1] if gpus else "",
    }


def commit() -> dict[str, Any]:
    """`commit`, the hash of HEAD, and `dirty`: whether tracked files outside docs/benchmarks differ from it.

    If this package does not lie in a git clone of its own they are empty and False.
    """
    if not (ROOT / ".git").exists():  # an installed package may lie in the clone of something else
        return {"commit": "", "dirty": False}
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/benchmarks")),
    }


def cpu_name() -> str:
    """The processor's name as Linux reports it, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def memory_gib() -> float:
    """The machine's memory in GiB."""
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def package_version(name: str) -> str:
    """The version of an installed package, or `not installed`."""
    try:
        return version(name)
    except PackageNotFoundError:
        return NOT_INSTALLED


def _git(*arguments: str) -> str:
    """The output of a git command in the repository; empty if git is missing or fails."""
    try:
        result = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True)
    except OSError:  # git is not installed
        return ""
    return result.stdout.strip()


def _gpus() -> list[tuple[str, str]]:
    """(name, driver's version) of every GPU of this machine; empty if nvidia-smi is missing or fails."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_GPU_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rpartition(",") for line in result.stdout.splitlines() if "," in line]
    return [(name.strip(), driver.strip()) for name, _, driver in rows]
