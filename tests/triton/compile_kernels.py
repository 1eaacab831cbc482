"""Compiles every kernel for a GPU that need not exist, and prints what came out: one JSON object per line.

    python -m tests.triton.compile_kernels 80 90

Run in a process of its own: where Triton interprets kernels, it cannot compile them.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from distill_rl.losses.kernels import MOST_COLUMNS, MOST_ENTRIES, launch, rows

POINTERS = {
    "order": "*i64", "teacher_order": "*i64", "label": "*i64", "columns": "*i64", "counts": "*i1", "entries": "*i32",
    "ids": "*i64",
}  # fmt: skip
"""Types of pointers that are not fp32."""
LOGITS = ("logits", "teacher", "out")
NUMBERS = {"inverse_temperature": "fp32", "floor": "fp32"}
ALIGNED = ("stride", "teacher_stride", "out_stride", "num_columns")
"""Integers that are a multiple of 16 where the vocabulary is."""


def variants() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields each kernel with the constants that its uses give it."""
    block = launch._BLOCK
    for absent in (("totals_at_one",), (), ("entries", "totals_at_one")):
        yield rows.row_sums, {"order": None, **dict.fromkeys(absent), "BLOCK": block}
    for absent in (("order", "factor_at_one", "lse_at_one"), ("counts",)):
        yield rows.row_gradient, {**dict.fromkeys(absent), "BLOCK": block}
    yield rows.put_entries, {"order": None, "counts": None, "BLOCK": 64}
    for leads in (True, False):
        for absent in (("order", "teacher_order", "totals_at_one", "factor_at_one", "lse_at_one"), ()):
            flags = {**dict.fromkeys(absent), "counts": None, "TEACHER_LEADS": leads, "BLOCK": launch.PAIR_BLOCK}
            for kernel in (rows.pair_sums, rows.pair_gradient):
                names = inspect.signature(kernel.fn).parameters
                yield kernel, {name: value for name, value in flags.items() if name in names}
    yield rows.group_sums, {"GROUP": launch._GROUP, "GROUPS": 64}
    for columns in (MOST_COLUMNS // 2, MOST_COLUMNS):
        flags = {"GROUP": launch._GROUP, "ALL_GROUPS": columns // launch._GROUP, "K": MOST_ENTRIES}
        yield rows.best_columns, flags


def compile_one(kernel: Any, constants: dict[str, Any], dtype: str, capability: int) -> dict[str, Any]:
    """Compiles a kernel for logits of a dtype (`bf16`, `fp32`); returns registers, spills and the kinds of accesses."""
    names = list(inspect.signature(kernel.fn).parameters)
    signature, hints = {}, {}
    for i, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in NUMBERS:
            signature[name] = NUMBERS[name]
        elif name == "k" or name.startswith("num_") or name.endswith("stride"):
            signature[name] = "i32"
        else:
            signature[name] = f"*{dtype}" if name in LOGITS else POINTERS.get(name, "*fp32")
        if signature[name].startswith("*") or name in ALIGNED:
            hints[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, hints)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": launch._WARPS})
    ptx = compiled.asm["ptx"]
    return {
        "kernel": kernel.fn.__name__,
        "constants": constants,
        "dtype": dtype,
        "capability": capability,
        "vector_loads": len(re.findall(r"ld\.global\.[\w.:]*v[248]", ptx)),
        "vector_stores": len(re.findall(r"st\.global\.[\w.:]*v[248]", ptx)),
        "rounds_to_nearest": "cvt.rn.bf16" in ptx,
        **resources(ptx, capability),
    }


def resources(ptx: str, capability: int) -> dict[str, int]:
    """Registers per thread and bytes of spills, as ptxas reports them."""
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    name = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        done = subprocess.run(
            [ptxas, "-v", f"--gpu-name={name}", source, "-o", Path(folder) / "kernel.cubin"],
            capture_output=True,
            text=True,
            check=True,
        )
    stores, loads = map(int, re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr).groups())
    return {
        "registers": int(re.search(r"Used (\d+) registers", done.stderr)[1]),
        "spill_bytes": stores + loads,
    }


def main() -> None:
    for capability in map(int, sys.argv[1:]):
        for kernel, constants in variants():
            for dtype in ("bf16", "fp32"):
                print(json.dumps(compile_one(kernel, constants, dtype, capability)), flush=True)


if __name__ == "__main__":
    main()
