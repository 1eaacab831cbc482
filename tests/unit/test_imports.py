"""Who may import whom, read from the sources: nothing is imported to find out."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import distill_rl

PACKAGE = Path(distill_rl.__file__).parent

BASE = {"errors", "types", "system"}
LIBRARY = BASE | {"align", "config", "losses", "models", "parallel", "observe", "data", "transport"}
ENGINES = LIBRARY | {"student", "teacher"}
RUN = ENGINES | {"workers", "preflight", "evals", "run"}

# Part of the package → the other parts that it may import. A part is a folder or a file directly under distill_rl/.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "types": set(),
    "system": {"errors"},
    "losses": set(),
    "align": {"system"},
    "config": {"errors", "system"},
    "store": BASE | {"config"},
    "observe": BASE | {"config"},
    "data": BASE | {"config", "align"},
    "transport": BASE,
    "parallel": BASE,
    "models": BASE | {"config", "parallel"},
    "teacher": LIBRARY | {"store"},
    "student": LIBRARY,
    "evals": BASE | {"config", "data", "models", "parallel", "observe"},
    "preflight": BASE
    | {"config", "losses", "data", "models", "align", "transport", "evals", "store", "teacher", "run"},
    "workers": ENGINES | {"evals", "store", "scaling"},
    "run": ENGINES | {"workers", "evals", "store", "scaling"},
    "service": BASE | {"config", "observe", "workers"},
    "commands": RUN | {"scaling", "service", "store", "demo"},
    "cli": BASE | {"commands", "observe", "evals"},
    "demo": BASE
    | {"align", "config", "data", "models", "observe", "evals", "parallel", "preflight", "run", "transport"},
    "scaling": {"errors", "types", "config"},
    "__main__": {"cli"},
    "api": BASE | {"commands", "config", "observe", "preflight", "run"},
    "__init__": {"api", "config", "errors", "system"},
}

RAY = ("workers/", "transport/object_store.py", "service/")
PROCESS_GROUPS = ("parallel/mesh.py",)
COLLECTIVES = ("parallel/", "losses/", "student/", "teacher/")

MAKES_GROUPS = {
    "init_process_group", "destroy_process_group", "new_group", "new_subgroups", "split_group", "init_device_mesh",
}  # fmt: skip
COLLECTIVE_NAMES = {
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single",
    "all_reduce_coalesced", "broadcast", "broadcast_object_list", "gather_object", "reduce_scatter",
    "reduce_scatter_tensor", "scatter_object_list", "barrier", "monitored_barrier",
}  # fmt: skip

LIBRARIES = set(sys.stdlib_module_names) | {"distill_rl"}
ONLY_LIBRARIES = {
    "losses": {"torch", "triton"},
    "config": {"omegaconf", "yaml"},
    "align": {"numpy", "numba", "safetensors"},
}


def part_of(file: str) -> str:
    """The folder or file directly under distill_rl/, of a path under it."""
    return file.partition("/")[0].removesuffix(".py")


@dataclass(frozen=True)
class Module:
    name: str
    """path under the package, as `config/load.py`"""
    tree: ast.Module

    @property
    def part(self) -> str:
        return part_of(self.name)

    def imports(self) -> Iterator[tuple[int, str]]:
        """(line, dotted name) of every import, wherever it stands; `from a import b` gives `a.b`."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                folder = ["distill_rl", *self.name.split("/")[: -node.level]] if node.level else []
                origin = ".".join([*folder, *([node.module] if node.module else [])])
                yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)

    def names(self) -> Iterator[tuple[int, str]]:
        """(line, name) of every attribute read and every name imported: how a function can be called."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute):
                yield node.lineno, node.attr
            elif isinstance(node, ast.Name):
                yield node.lineno, node.id
        yield from ((line, name.rpartition(".")[2]) for line, name in self.imports())

    def runtime_imports(self) -> Iterator[str]:
        """Dotted name of every import that can run: at the top, in a class or in a function, but not for type checking."""
        nodes: list[ast.AST] = [self.tree]
        while nodes:
            node = nodes.pop()
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield from (name for _, name in Module(self.name, ast.Module([node], [])).imports())
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                nodes += node.orelse
            else:
                nodes += ast.iter_child_nodes(node)


@cache
def read(package: Path) -> list[Module]:
    paths = sorted(package.rglob("*.py"))
    return [Module(path.relative_to(package).as_posix(), ast.parse(path.read_text("utf-8"))) for path in paths]


def own_directions(modules: list[Module]) -> Iterator[str]:
    parts = {module.part for module in modules}
    for module in modules:
        if module.part not in MAY_IMPORT:
            yield f"{module.name}: {module.part} has no entry in MAY_IMPORT"
            continue
        for line, name in module.imports():
            top, _, rest = name.partition(".")
            part = rest.partition(".")[0]
            if top == "distill_rl" and part in parts - {module.part} - MAY_IMPORT[module.part]:
                yield f"{module.name}:{line}: {module.part} must not import {part}"


def library_directions(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        for line, name in module.imports():
            top = name.partition(".")[0]
            if top == "ray" and not module.name.startswith(RAY):
                yield f"{module.name}:{line}: ray belongs in {', '.join(RAY)}"
            if module.part in ONLY_LIBRARIES and top not in LIBRARIES | ONLY_LIBRARIES[module.part]:
                yield f"{module.name}:{line}: {module.part} must not import {top}"


def distributed_calls(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        # `split`, `broadcast` and the like are methods of many things: they count where torch.distributed is in hand.
        distributed = any(name.startswith("torch.distributed") for _, name in module.imports())
        for line, name in module.names():
            if name in MAKES_GROUPS and not module.name.startswith(PROCESS_GROUPS):
                yield f"{module.name}:{line}: {name} belongs in {', '.join(PROCESS_GROUPS)}"
            if name in COLLECTIVE_NAMES and distributed and not module.name.startswith(COLLECTIVES):
                yield f"{module.name}:{line}: {name} belongs in {', '.join(COLLECTIVES)}"


def imported_files(modules: list[Module]) -> dict[str, set[str]]:
    """File → the other files of the package that it imports, wherever the import stands; not the folders around these."""
    dotted = {"distill_rl." + module.name.removesuffix(".py").replace("/", "."): module.name for module in modules}
    files = {name.removesuffix(".__init__"): file for name, file in dotted.items()}
    edges: dict[str, set[str]] = {}
    for module in modules:
        # `from a import b` imports the file a/b.py if there is one, otherwise a name of a.
        found = {files.get(name) or files.get(name.rpartition(".")[0]) for name in module.runtime_imports()}
        edges[module.name] = {file for file in found if file is not None and file != module.name}
    return edges


def circles(edges: Mapping[str, set[str]]) -> list[set[str]]:
    """The groups of names that reach each other."""

    def reached_from(name: str) -> set[str]:
        found, waiting = set[str](), [name]
        while waiting:
            for other in edges.get(waiting.pop(), set()) - found:
                found.add(other)
                waiting.append(other)
        return found

    reached = {name: reached_from(name) for name in edges}
    groups = {frozenset(other for other in found if name in reached[other]) for name, found in reached.items()}
    return [set(group) for group in groups if group]


def test_there_is_no_circle_between_files() -> None:
    found = circles(imported_files(read(PACKAGE)))
    assert [sorted(group) for group in found] == []


def test_there_is_no_circle_between_folders() -> None:
    edges: dict[str, set[str]] = {}
    for file, others in imported_files(read(PACKAGE)).items():
        parts = edges.setdefault(part_of(file), set())
        parts |= {part_of(other) for other in others} - {part_of(file)}
    assert circles(edges) == []


@pytest.mark.parametrize("rule", [own_directions, library_directions, distributed_calls])
def test_the_package_keeps_its_directions(rule) -> None:
    assert list(rule(read(PACKAGE))) == []


@pytest.mark.parametrize(
    ("file", "source", "rule"),
    [
        ("errors.py", "from distill_rl.types import Cursor", own_directions),
        ("types.py", "from .errors import DistillError", own_directions),
        ("losses/kd.py", "def f():\n    import distill_rl.config.schema", own_directions),
        ("data/loader.py", "from distill_rl.run import driver", own_directions),
        ("student/engine.py", "from distill_rl.workers.cluster.group import Group", own_directions),
        ("novelty/x.py", "", own_directions),
        ("run/driver.py", "import ray", library_directions),
        ("observe/report/report.py", "from ray.util import metrics", library_directions),
        ("losses/kd.py", "import numpy", library_directions),
        ("config/load.py", "def f():\n    import torch", library_directions),
        ("models/load.py", "import torch.distributed as dist\ndist.init_process_group()", distributed_calls),
        ("workers/actors/rank.py", "from torch.distributed import new_group", distributed_calls),
        ("models/load.py", "import torch.distributed as dist\ndist.all_reduce(x)", distributed_calls),
    ],
)
def test_a_breach_is_found(tmp_path: Path, file: str, source: str, rule) -> None:
    for name in ("config", "errors", "run", "types", "workers"):
        (tmp_path / f"{name}.py").touch()
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(source)
    found = list(rule(read(tmp_path)))
    assert len(found) >= 1
    assert all(line.startswith(file) for line in found)


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"a.py": "from distill_rl.b import f", "b.py": "def f():\n    from distill_rl import a"}, [{"a.py", "b.py"}]),
        ({"a.py": "import distill_rl.b", "b.py": "from distill_rl.c.d import x", "c/d.py": "class X:\n    from distill_rl.a import y"}, [{"a.py", "b.py", "c/d.py"}]),
        ({"a.py": "from .b import f", "b.py": "if TYPE_CHECKING:\n    from distill_rl.a import A"}, []),
        ({"a.py": "from distill_rl.c import d", "c/__init__.py": "", "c/d.py": "from distill_rl.c import x"}, []),
    ],
)  # fmt: skip
def test_a_circle_is_found_at_every_depth(tmp_path: Path, sources: dict[str, str], expected: list[set[str]]) -> None:
    for file, source in sources.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(source)
    assert circles(imported_files(read(tmp_path))) == expected


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("distill_rl, distill_rl.cli", "distill_rl.config.schema importlib.metadata"),  # all that --help needs
        (
            "distill_rl.cli, distill_rl.errors, distill_rl.types, distill_rl.config.schema",
            "torch transformers ray datasets tokenizers pandas",
        ),
    ],
)
def test_the_command_line_imports_nothing_heavy(modules: str, heavy: str) -> None:
    program = f"import sys, {modules}\nprint(*({set(heavy.split())} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_gpu_check_imports_no_more_than_gpu_machines_have() -> None:
    program = (
        "import importlib, sys\n"
        "from tests.gpu.check import PARTS\n"
        "for test in [test for part in PARTS for test in part.tests if test.endswith('.py')]:\n"
        "    importlib.import_module(test.removesuffix('.py').replace('/', '.'))\n"
        "print(*({'ray', 'omegaconf', 'pyarrow', 'datasets', 'hypothesis'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
