"""How to install an extra of this package where it is installed: no registry has the package itself."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The clone, if the package is used from one."""


def install_extra(extra: str) -> str:
    """The command that adds an extra of pyproject.toml to this installation, for a shell.

    In a clone it installs the clone again, with the extra; elsewhere it names the packages of the extra.
    """
    if (ROOT / "pyproject.toml").is_file():
        return f"{_pip()} install -e {shlex.quote(f'{ROOT}[{extra}]')}"
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
