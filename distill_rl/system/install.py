"""Where this package is installed, what lies beside its code, and how to install an extra of it: no registry has it."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

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
