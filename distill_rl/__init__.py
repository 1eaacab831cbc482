"""Off-policy knowledge distillation of causal language models.

distill_rl.distill("my.yaml")                 a run, from its configuration to the exported student
distill_rl.capture("my.yaml", out="targets")  its teachers' targets, stored for students that are trained later
distill_rl.check("my.yaml")                   its derived sizes and every problem; starts nothing
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distill_rl.api import Check, Distilled, capture, check, distill
    from distill_rl.config.schema import Config
    from distill_rl.errors import ConfigError, DistillError
    from distill_rl.system.signals import Preempted

__version__ = "0.1.0"
__all__ = ["Check", "Config", "ConfigError", "DistillError", "Distilled", "Preempted", "capture", "check", "distill"]

# Transformers imports torchao wherever it is installed, and that logs each of its compiled kernels that this torch cannot load.
for _logger in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_logger).setLevel(logging.ERROR)

_HOME = {
    "Config": "distill_rl.config.schema",
    "ConfigError": "distill_rl.errors",
    "DistillError": "distill_rl.errors",
    "Preempted": "distill_rl.system.signals",
}
"""Where a public name is, if not in `distill_rl.api`."""


def __getattr__(name: str) -> Any:
    """Imports public names when they are used: every process of a run imports this package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME.get(name, "distill_rl.api")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
