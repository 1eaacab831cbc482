"""The device of the tests, and what the GPU check learns from them: their figures and outcome, in a JSON file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distill_rl.system.files import write_atomic
from distill_rl.system.processes import end_with

LONGEST_REASON = 400


class Figures(dict[str, Any]):
    """Figures by name that the page shows: numbers, text, and lists of dicts, which become tables."""

    text = ""
    """Shown on the page instead of the figures, if there is any."""

    def within(self, name: str, error: float, bound: float) -> None:
        """Fails unless the error is at most its bound. The page shows the largest error of each name."""
        assert error <= bound, f"{name}: {error:.2g}, more than {bound:.2g}"
        self[name] = max(float(error), self.get(name, 0.0))


FIGURES = pytest.StashKey[Figures]()


class Outcome:
    """Writes the outcome so far after every test, so that a crash or a hang leaves what was measured before."""

    def __init__(self, path: Path, figures: Figures):
        self.path, self.figures = path, figures
        self.num_passed, self.failures, self.skips = 0, list[str](), list[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            self.failures.append(_reason(report.longrepr))
        elif report.skipped and isinstance(report.longrepr, tuple):
            self.skips.append(report.longrepr[2].removeprefix("Skipped: "))
        elif report.when == "call":
            self.num_passed += 1
        self.pytest_sessionfinish()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self.pytest_runtest_logreport(report)

    def pytest_sessionfinish(self) -> None:
        reason, more = "; ".join(self.failures[:1]), len(self.failures) - 1
        if more > 0:
            reason += f" (and {more} more)"
        status = "failed" if self.failures else "ok" if self.num_passed else "skipped"
        if status == "skipped":
            reason = next(iter(self.skips), "there is no such test")
        content = {"status": status, "reason": reason, "text": self.figures.text, "figures": self.figures}
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            content["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        write_atomic(self.path, json.dumps(content, default=float))


def _reason(error: Any) -> str:
    """The first line of an error's message; of another text, such as that of a failed import, the last line."""
    crash = getattr(error, "reprcrash", None)
    lines = [line.removeprefix("E ").strip() for line in str(error).splitlines() if line.strip()]
    line = crash.message.splitlines()[0].removeprefix("AssertionError: ") if crash is not None else lines[-1]
    return line if len(line) <= LONGEST_REASON else f"{line[: LONGEST_REASON - 1]}…"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu")
    group.addoption("--device", choices=("cuda", "cpu"), help="of tests in tests/gpu; default: cuda if there is one")
    group.addoption("--tiny", action="store_true", help="small sizes in tests/gpu; default without a GPU")
    group.addoption("--budget-s", type=float, help="seconds for a measurement in tests/gpu; default: none is made")
    group.addoption("--outcome", help="JSON file for the outcome and the figures of all tests together")
    group.addoption("--parent", type=int, help="process id: this process is killed when that one ends")


def pytest_configure(config: pytest.Config) -> None:
    figures = config.stash[FIGURES] = Figures()
    if (parent := config.getoption("parent", None)) is not None:
        end_with(parent)
    if (path := config.getoption("outcome", None)) is not None:
        config.pluginmanager.register(Outcome(Path(path), figures))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests that need a CUDA device where there is none, except for those that `--device cpu` runs elsewhere."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if config.getoption("device", None) == "cpu":
        on_gpu = [item for item in on_gpu if "device" not in item.fixturenames]  # type: ignore[attr-defined]
    if on_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in on_gpu:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def no_setting_of_a_run_stays() -> Iterator[None]:
    """Engines of deterministic runs change the whole process, and tests share it outside the GPU check."""
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Any:
    """`torch.device` of `--device`; by default the GPU, or the CPU where there is none."""
    import torch

    from distill_rl.models.determinism import start_vector_math

    start_vector_math()
    chosen = request.config.getoption("device", None) or ("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(chosen)


@pytest.fixture(scope="session")
def tiny(request: pytest.FixtureRequest, device: Any) -> bool:
    """Whether to use small sizes."""
    chosen = request.config.getoption("device", None) is not None
    return request.config.getoption("tiny", False) or (device.type == "cpu" and not chosen)


@pytest.fixture
def budget_s(request: pytest.FixtureRequest) -> float:
    """Seconds for a measurement, which is made only by the GPU check."""
    budget_s = request.config.getoption("budget_s", None)
    if budget_s is None:
        pytest.skip("launch/gpu_check.sh measures")
    return budget_s


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Figures:
    """For what the page of the GPU check shows; the tests of one part share it."""
    return request.config.stash[FIGURES]


@pytest.fixture
def world(device: Any) -> Iterator[Any]:
    """A world of one rank on the device."""
    from tests.bench.gpu.engines import one_rank

    with one_rank(device) as world:
        yield world
