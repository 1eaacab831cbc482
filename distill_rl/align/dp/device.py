"""Whether Numba can compile and run CUDA kernels here, and if not, why."""

from __future__ import annotations

from typing import NamedTuple


class Missing(NamedTuple):
    """What the CUDA backend needs and this machine lacks."""

    rule: str
    remedy: str


_INSTALL = "pip install 'numba-cuda[cu13]', or set aligner.dp.backend=numba"


def missing_for_cuda() -> Missing | None:
    """What the CUDA backend needs and this machine lacks; None if the backend can run.

    It runs on a GPU, or in Numba's simulator (`NUMBA_ENABLE_CUDASIM=1`). Kernels are compiled by NVVM, which PyTorch's
    wheels do not include. The package numba-cuda does, and replaces Numba's own `numba.cuda`. This function initialises
    the CUDA driver but creates no context on any GPU.
    """
    try:
        import numba
        from numba import cuda
    except ImportError as error:
        return Missing(f"needs numba-cuda, which cannot be imported here ({_first_line(error)})", _INSTALL)
    if numba.config.ENABLE_CUDASIM or cuda.is_available():
        return None
    from numba.cuda.cudadrv import nvvm

    if not nvvm.is_available():
        has_numba_cuda = getattr(cuda, "implementation", "") == "NVIDIA"
        why = (
            "numba-cuda is installed without it" if has_numba_cuda else "numba-cuda, which brings it, is not installed"
        )
        return Missing(f"needs NVVM to compile its kernel; {why}", _INSTALL)
    rule = f"needs a GPU that Numba can use ({_first_line(cuda.cuda_error() or 'it finds none')})"
    return Missing(rule, "set aligner.dp.backend=numba")


def require_cuda() -> None:
    """Raises an error unless the CUDA backend can run on this machine; initialises the CUDA driver.

    Raises:
        ValueError: it cannot run; the message names what is missing and the remedy.
    """
    if missing := missing_for_cuda():
        raise ValueError(f"aligner.dp.backend: cuda {missing.rule}; {missing.remedy}")


def _first_line(error: object) -> str:
    """The first informative line of an error, "unknown" if it has none; the driver's errors begin with an empty one."""
    lines = [line.strip(" :") for line in str(error).splitlines()]
    return next((line for line in lines if line and not line.startswith("Error at driver init")), "unknown")
