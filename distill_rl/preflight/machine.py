"""Settings that need a package of an extra."""

from __future__ import annotations

from collections.abc import Iterator

from distill_rl.config.schema import Config
from distill_rl.models.attention.choice import installed
from distill_rl.preflight.opened import line


def extra_problems(config: Config) -> Iterator[str]:
    dashboard = config.ray.dashboard and config.ray.address is None
    needed = {
        "student.kernels": (config.student.kernels == "liger", "liger", "liger_kernel", "liger"),
        "observe.wandb": (config.observe.wandb, "true", "wandb", "wandb"),
        "observe.mlflow": (config.observe.mlflow, "true", "mlflow", "mlflow"),
        "ray.dashboard": (dashboard, "true", "aiohttp_cors", "dashboard"),
    }
    for key, (wanted, value, package, extra) in needed.items():
        if wanted and not installed(package):
            rule, remedy = f"needs {package}, which is not installed", f"pip install 'distill_rl[{extra}]'"
            yield line(key, rule, value, remedy)
