"""The CUDA kernel without a CUDA device: in Numba's simulator, which must be selected before numba is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]

EQUAL_ANSWERS = """
import numpy as np
from numba import cuda
from distill_rl.align.dp import cuda as dp_cuda
from distill_rl.align.dp.problem import CanonicalTables
from distill_rl.align.dp.windows import align_windows
from tests.helpers.windows import STUDENT, TEACHER, random_windows, same, vocabulary

launched = []
launch = dp_cuda._launch
dp_cuda._launch = lambda problems: launched.append(len(problems)) or launch(problems)
tables = CanonicalTables(vocabulary(STUDENT), vocabulary(TEACHER))
windows = random_windows(3, 12, 12)
for band in (1, 3, 64):
    found, wanted = (align_windows(windows, tables, backend=backend, band=band) for backend in ("cuda", "numpy"))
    assert same(found, wanted), (band, found, wanted)
joins = sum(int((np.bincount(side[side >= 0]) > 1).sum()) for pair in wanted for side in pair)
together = list(launched)
dp_cuda.SCRATCH_BYTES = 400
assert same(align_windows(windows, tables, backend="cuda"), wanted)
print(cuda.config.ENABLE_CUDASIM, joins, *together, "|", *launched[3:])
"""

NO_DEVICE = """
import numpy as np
from distill_rl.align.dp.problem import CanonicalTables
from tests.helpers.windows import align_window, vocabulary
tables = CanonicalTables(vocabulary(["a"]), vocabulary(["a"]))
align_window(np.array([0]), np.array([0]), tables, backend="cuda")
"""


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_kernel_agrees_with_numpy_in_any_number_of_launches() -> None:
    done = run(EQUAL_ANSWERS, NUMBA_ENABLE_CUDASIM="1")
    assert done.returncode == 0, done.stderr
    together, _, apart = done.stdout.partition("|")
    simulated, joins, *launches = map(int, together.split())
    assert simulated == 1
    assert joins >= 5
    assert len(launches) == 3
    assert len(apart.split()) > 1
    assert sum(map(int, apart.split())) == launches[2] >= 10


def test_backend_is_rejected_without_a_cuda_target() -> None:
    done = run(NO_DEVICE, NUMBA_ENABLE_CUDASIM="0", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError: aligner.dp.backend: cuda needs ")
    assert last.endswith("set aligner.dp.backend=numba")


def test_missing_cuda_bindings_are_reported() -> None:
    """numba-cuda raises ImportError if the CUDA bindings are missing."""
    program = (
        "import sys; sys.modules['numba.cuda'] = None\n"
        "from distill_rl.align.dp.windows import missing_for_cuda\n"
        "print(*missing_for_cuda(), sep='|')"
    )
    rule, remedy = run(program).stdout.strip().split("|")
    assert rule.startswith("needs numba-cuda, which cannot be imported here (")
    assert remedy.startswith("pip install 'numba-cuda[cu13]'")


@pytest.mark.parametrize(("backend", "module"), [("numpy", "numpy"), ("numba", "numba")])
def test_numba_is_imported_only_by_its_backend(backend: str, module: str) -> None:
    program = (
        "import sys, distill_rl.align.dp.windows as dp\n"
        "before = 'numba' in sys.modules\n"
        f"dp.load_backend({backend!r})\n"
        "print(before, 'numba' in sys.modules)"
    )
    done = run(program)
    assert done.stdout.split() == ["False", str(module == "numba")]
