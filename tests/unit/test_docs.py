"""What the pages in docs show is run as it stands and prints what stands below it; the files that they name exist."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$\n?", re.MULTILINE | re.DOTALL)
NAMED_FILE = re.compile(r"(?<![\w./*-])(?:[\w.-]+/)*[\w-]+\.(?:py|sh|sbatch)\b")
FILES_OF_USERS = {"capitals.py", "my_suite.py", "runs/my/submit.sbatch", "submit.sbatch"}
FOLDERS = ("distill_rl", "tests", "launch", "configs")
MUST_RUN = {"alignment.md", "library.md", "losses.md"}
STARTS_RAY = {"python.md"}
"""Run by `tests/cli/test_python.py`, in a process of its own."""


@dataclass(frozen=True)
class Snippet:
    line: int
    code: str
    printed: str | None
    """the block marked `text` right below, if there is one"""


def snippets(page: str) -> list[Snippet]:
    """The blocks marked `python`, in order."""
    found = []
    blocks = list(FENCE.finditer(page))
    for block, after in zip(blocks, [*blocks[1:], None]):
        if block[1] != "python":
            continue
        below = after is not None and after[1] == "text" and not page[block.end() : after.start()].strip()
        line = page.count("\n", 0, block.start()) + 2
        found.append(Snippet(line, block[2], after[2] if after is not None and below else None))
    return found


PAGES = {path.name: snippets(path.read_text("utf-8")) for path in sorted(DOCS.glob("*.md"))}


@pytest.mark.parametrize("name", [name for name, found in PAGES.items() if found and name not in STARTS_RAY])
def test_snippets_run_in_order_and_print_what_the_page_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "snippet"}
    for snippet in PAGES[name]:
        printed = io.StringIO()
        padded = "\n" * (snippet.line - 1) + snippet.code  # so that a traceback names the page's line
        with contextlib.redirect_stdout(printed):
            exec(compile(padded, str(DOCS / name), "exec"), names)
        if snippet.printed is not None:
            assert printed.getvalue().rstrip() == snippet.printed.rstrip(), f"{name}:{snippet.line}"


def test_library_pages_have_snippets_with_their_output() -> None:
    assert {name for name, found in PAGES.items() if found} >= MUST_RUN
    for name in MUST_RUN:
        assert any(snippet.printed for snippet in PAGES[name]), name


def test_snippets_are_distinguished_from_other_blocks() -> None:
    page = "# T\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n\n```text\nx\n```\n\n```python\na = 2\n```\nwords\n```text\n2\n```\n"
    assert snippets(page) == [Snippet(4, "print(1)\n", "1\n"), Snippet(16, "a = 2\n", None)]


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    files = [f"/{file.relative_to(ROOT)}" for folder in FOLDERS for file in (ROOT / folder).rglob("*.*")]
    named = set(NAMED_FILE.findall(page.read_text("utf-8"))) - FILES_OF_USERS
    assert {name for name in named if not any(file.endswith(f"/{name}") for file in files)} == set()


def test_architecture_names_every_folder_of_the_package() -> None:
    package = ROOT / "distill_rl"
    folders = {f"`{file.parent.relative_to(package)}/`" for file in package.rglob("*/__init__.py")} - {"`./`"}
    page = (DOCS / "architecture.md").read_text("utf-8")
    assert {folder for folder in folders if folder not in page} == set()
