"""Transformers in less time: without PyTorch, for processes that need its configurations and tokenizers only, and without
reading all of its files.

PyTorch takes two seconds to import, more than all that `check` does, and Transformers imports it with its first
configuration. There is no setting against that. Besides, every process that imports Transformers reads the two thousand files
of its model families, twice, to find out which names they export, and the list of files of every installed package.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import cache_from_source
from pathlib import Path
from types import ModuleType
from typing import Any

_GPU_NODES = ("nvidia*", "nvhost*", "nvgpu*", "nvmap", "kfd", "dxg")
"""Device files of GPUs that torch may use: NVIDIA, its Jetson boards, AMD, Windows' subsystem for Linux."""


def gpu_possible() -> bool:
    """Whether this machine may have a GPU that torch can use: there is a device file of one, or it is not Linux."""
    return sys.platform != "linux" or any(any(Path("/dev").glob(name)) for name in _GPU_NODES)


def import_transformers_without_torch() -> None:
    """Imports Transformers so that it works without PyTorch, as where that is not installed, until the process ends.

    Only for a process that loads no model. Anything else in it may still import torch. Does nothing if torch or
    Transformers has been imported. Pillow and attrs, which are imported only to recognise their objects, are left out, too.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    hidden = [name for name in ("torch", "PIL", "attr") if name not in sys.modules]
    variable = "TRANSFORMERS_NO_ADVISORY_WARNINGS"  # it would advise to install PyTorch
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        # It looks for torch once, and remembers the answer.
        import_module("transformers.utils").is_torch_available()
        import_module("omegaconf")
    finally:
        for name in hidden:
            del sys.modules[name]
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


_READER = "transformers.utils.import_utils"
"""The module that finds out which packages there are, and which names the families export."""


def remember_families() -> None:
    """Lets Transformers, once this process imports it, remember the names that its model families export, and the packages that
    are installed, as bytecode is kept.

    Where bytecode is not written, or the package is not an installed one, nothing changes. What is remembered is of one version
    of Transformers and of the packages beside it.
    """
    if _READER not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds `_READER` like Python does, with another loader."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _READER:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(name, spec.origin)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        import importlib.metadata

        find = importlib.metadata.packages_distributions
        models = Path(self.path).parent.parent / "models" / "__init__.py"
        if models.parent.parent.parent != Path(sysconfig.get_paths()["purelib"]):
            return super().exec_module(module)
        importlib.metadata.packages_distributions = lambda: _kept(Path(self.path), "packages", _installed(), find)
        try:
            super().exec_module(module)
        finally:
            importlib.metadata.packages_distributions = find
        if read := getattr(module, "create_import_structure_from_path", None):
            version = getattr(sys.modules.get("transformers"), "__version__", None)

            def read_once(path: Any) -> Any:
                if Path(path) not in (models, models.parent):
                    return read(path)
                about = [version, models.stat().st_mtime_ns]
                return _from_json(_kept(models, "exports", about, lambda: _as_json(read(path))))

            module.create_import_structure_from_path = read_once  # type: ignore[attr-defined]


def _installed() -> list[Any]:
    """The names of all folders that describe an installed package, by the entry of `sys.path` in which they are."""
    found = []
    for entry in sys.path:
        with suppress(OSError):
            names = [path.name for path in Path(entry).iterdir() if path.suffix in (".dist-info", ".egg-info")]
            found.append([entry, sorted(names)] if names else [])
    return found


def _kept(source: Path, what: str, about: list[Any], find: Callable[[], Any]) -> Any:
    """What `find` returns, in JSON's types; or what an earlier process has found that was `about` the same."""
    file = Path(cache_from_source(str(source), optimization=what)).with_suffix(".json")
    with suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(file.read_bytes())
        if kept["about"] == about:
            return kept[what]
    found = find()
    if not sys.dont_write_bytecode:
        from distill_rl.system.files import write_atomic

        with suppress(OSError, ValueError):
            write_atomic(file, json.dumps({"about": about, what: found}).encode())
    return found


def _as_json(exports: Any) -> Any:
    """Nested dictionaries, whose keys are words or sets of words, and sets of words, as lists: JSON has no such keys."""
    if isinstance(exports, dict):
        return [[_as_json(key), _as_json(value)] for key, value in exports.items()]
    return exports if isinstance(exports, str) else {"set": sorted(exports), "frozen": isinstance(exports, frozenset)}


def _from_json(kept: Any) -> Any:
    """What `_as_json` was given."""
    if isinstance(kept, list):
        return {_from_json(key): _from_json(value) for key, value in kept}
    return kept if isinstance(kept, str) else (frozenset if kept["frozen"] else set)(kept["set"])
