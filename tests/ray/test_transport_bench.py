"""The transport benchmark in a small size: it runs, checks what arrives, and gives a verdict."""

import copy
import json
from pathlib import Path

import pytest
import torch

from tests.bench.targets.transport import WARM_UP, measure, verdict

pytestmark = pytest.mark.ray


@pytest.mark.parametrize("name", ["shared_memory", "object_store"])
def test_the_measured_bytes_have_arrived(ray_cluster, name):
    figures = measure(name, num_bytes=1 << 18, rounds=3)
    assert figures["rounds"] == 3 < WARM_UP
    assert 0.99 * 2**18 < figures["bytes"] <= 2**18
    assert min(figures[key] for key in ("publish_s", "fetch_s", "memcpy_s", "share_of_memcpy")) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_ipc_is_measured_on_a_gpu(ray_cluster):
    assert measure("cuda_ipc", num_bytes=1 << 20, rounds=3, device="cuda")["bytes"] > 0


def test_a_transport_slower_than_promised_is_named():
    good = {"cpu": {"shared_memory": {"share_of_memcpy": 0.9}}, "cuda": {"cuda_ipc": {"fetch_s": 50e-6}}}
    assert verdict(good) == verdict({"cpu": good["cpu"]}) == []
    bad = copy.deepcopy(good)
    bad["cpu"]["shared_memory"]["share_of_memcpy"] = 0.69
    bad["cuda"]["cuda_ipc"]["fetch_s"] = 150e-6
    assert [problem.split()[0:2] for problem in verdict(bad)] == [["shared_memory", "reaches"], ["a", "cuda_ipc"]]
    assert "150 µs" in verdict(bad)[1]


def test_the_published_record_keeps_the_promise_and_names_its_commit():
    record = json.loads((Path(__file__).parents[2] / "docs/benchmarks/transport.json").read_text())
    assert verdict(record) == []
    assert record["environment"]["commit"]
    assert record["cpu"]["shared_memory"]["bytes"] >= 64e6
