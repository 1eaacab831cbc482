import json
import sys
import time
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from tests.bench.gpu import losses_cuda
from tests.bench.gpu.losses_cuda import EAGER, LIGER, NO_TIME, NOT_INSTALLED, OURS, PLAIN, TOP_K, compare_on

SIZES = {"rows": 8, "hidden": 12, "columns": 32}
TINY = ["--device", "cpu", "--rows", "8", "--hidden", "12", "--repeats", "2"]


def results(tmp_path, columns: int) -> list[dict]:
    out = tmp_path / "out.json"
    assert losses_cuda.main([*TINY, "--columns", str(columns), "--out", str(out)]) == 0
    return json.loads(out.read_text())["results"]


@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
def test_all_compute_the_same_loss_when_top_k_is_everything(tmp_path, divergence):
    lines = [line for line in results(tmp_path, TOP_K - 16) if line["divergence"] == divergence and line["value"]]
    cases = {(line["inputs"], line["by"], line["target"]) for line in lines}
    assert {(inputs, by) for inputs, by, _ in cases} >= {(i, b) for i in ("hidden", "logits") for b in (PLAIN, OURS)}
    assert len([line for line in lines if line["by"] == OURS]) == 4
    assert [line["value"] for line in lines] == pytest.approx([lines[0]["value"]] * len(lines), rel=1e-5)
    assert all(line["milliseconds"] > 0 and line["ratio"] > 0 and line["peak_mib"] is None for line in lines)


def test_top_k_of_hidden_states_and_logits_agree_and_differ_from_dense(tmp_path):
    lines = [line for line in results(tmp_path, 5 * TOP_K) if line["by"] == OURS and line["divergence"] == "jsd"]
    value = {(line["inputs"], line["target"]): line["value"] for line in lines}
    top = f"top {TOP_K}"
    assert value["hidden", top] == pytest.approx(value["logits", top], rel=1e-5)
    assert value["hidden", top] < value["hidden", "dense"] == pytest.approx(value["logits", "dense"], rel=1e-5)


def test_gradients_agree_too():
    for inputs, group in losses_cuda.cases(*losses_cuda.draw({"rows": 8, "hidden": 12, "columns": TOP_K}, "cpu")):
        found: dict[str, list[torch.Tensor]] = {}
        for figures, step in group:
            if figures.by.startswith(LIGER):
                continue
            leaves = [tensor.detach().requires_grad_() for tensor in inputs]
            assert step is not None
            step(*leaves).backward()
            gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
            assert len(gradients) == len(leaves)
            for gradient, expected in zip(gradients, found.setdefault(figures.divergence, gradients)):
                torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_liger_that_is_not_installed_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    lines = [line for line in results(tmp_path, 32) if line["by"].startswith(LIGER)]
    assert len(lines) == 4
    assert {line["status"] for line in lines} == {"not installed"}


def test_liger_is_called_by_its_interface_and_what_it_raises_is_recorded(tmp_path, monkeypatch):
    class LigerFusedLinearJSDLoss:
        def __init__(self, weight_hard_loss, weight_soft_loss, beta, compiled):
            assert (weight_hard_loss, weight_soft_loss, compiled) == (0.0, 1.0, False)
            self.beta = beta

        def __call__(self, states, weight, teacher_states, teacher_weight, labels, student_bias, teacher_bias):
            assert labels.shape == states.shape[:1]
            assert teacher_states.shape == states.shape
            if self.beta:
                raise RuntimeError("no kernel\nfor this")
            return (states @ weight.T).sum()

    chunked = ModuleType("liger_kernel.chunked_loss")
    chunked.LigerFusedLinearJSDLoss = LigerFusedLinearJSDLoss
    for module in (ModuleType("liger_kernel"), chunked, ModuleType("liger_kernel.transformers")):
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    lines = {(line["by"], line["divergence"]): line for line in results(tmp_path, 32) if line["by"].startswith(LIGER)}
    assert lines["liger LigerFusedLinearJSDLoss", "forward_kl"]["status"] == "ok"
    assert lines["liger LigerFusedLinearJSDLoss", "jsd"]["status"] == "failed: RuntimeError: no kernel"
    assert lines["liger LigerFusedLinearJSD", "jsd"]["status"] == "not in this version"


@pytest.mark.parametrize("works", [True, False])
def test_torch_is_measured_beside_triton_where_triton_works(monkeypatch, works):
    monkeypatch.setattr(losses_cuda, "uses_triton", lambda backend, logits: works)
    lines, _ = compare_on("cpu", SIZES, 1)
    by_torch = [line for line in lines if line.by == EAGER]
    assert len(by_torch) == (8 if works else 0)
    ours = {(line.inputs, line.divergence, line.target): line for line in lines if line.by == OURS}
    for line in by_torch:
        twin = ours[line.inputs, line.divergence, line.target]
        assert (line.value, line.bound_milliseconds) == (twin.value, twin.bound_milliseconds)


def test_no_case_is_started_after_the_deadline(monkeypatch):
    monkeypatch.setattr(losses_cuda, "kd_loss", None)
    lines, _ = compare_on("cpu", SIZES, 1, deadline=time.monotonic())
    assert {line.status for line in lines if not line.by.startswith(LIGER)} == {NO_TIME}
    assert all(line.value is line.milliseconds is line.ratio is None for line in lines)


def test_no_case_is_started_that_would_not_end_in_time(monkeypatch):
    def slow(figures, step, inputs, repeats):
        clock["now"] += 10
        return figures

    clock = {"now": 0.0}
    monkeypatch.setattr(losses_cuda, "measure", slow)
    monkeypatch.setattr(losses_cuda.time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(losses_cuda, "cases", lambda *_: [([], [_case()] * 3)])
    lines, _ = compare_on("cpu", SIZES, 1, deadline=25)
    assert [line.status for line in lines] == ["ok", "ok", NO_TIME]


def _case() -> losses_cuda.Case:
    return losses_cuda.Figures("logits", "jsd", PLAIN, "dense"), torch.sum


@pytest.mark.parametrize(
    ("installed", "reason", "text"),
    [
        (False, None, NOT_INSTALLED),
        (True, None, "3.6.0, used"),
        (True, "no C compiler", "3.6.0, not used; no C compiler"),
        (True, "", "3.6.0, not used on this device"),
    ],
)
def test_the_use_of_triton_is_described(monkeypatch, installed, reason, text):
    def uses_triton(backend, logits):
        if reason:
            warnings.warn(reason, stacklevel=1)
        return reason is None

    monkeypatch.setattr(losses_cuda.importlib.util, "find_spec", lambda name: installed or None)
    monkeypatch.setattr(losses_cuda.record, "package_version", lambda name: "3.6.0")
    monkeypatch.setattr(losses_cuda, "uses_triton", uses_triton)
    assert losses_cuda.describe_triton("cpu") == text


def test_out_of_memory_is_a_result_and_other_errors_of_ours_are_raised():
    def fails(error):
        def step(leaf):
            raise error

        return losses_cuda.Figures("logits", "jsd", OURS, "dense"), step

    leaf = torch.zeros(2, 3)
    assert losses_cuda.measure(*fails(torch.OutOfMemoryError()), [leaf], 1).status == "out of memory"
    with pytest.raises(ValueError, match="broken"):
        losses_cuda.measure(*fails(ValueError("broken")), [leaf], 1)


def test_without_a_cuda_device_it_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert losses_cuda.main([]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "losses_cuda: error: no CUDA device; --device cpu runs its small twin"
    ]


def test_the_twin_writes_no_record_unasked(monkeypatch, capsys):
    monkeypatch.setattr(losses_cuda.harness.record, "write", None)
    assert losses_cuda.main([*TINY, "--columns", "32"]) == 0
    assert "not written" in capsys.readouterr().out
