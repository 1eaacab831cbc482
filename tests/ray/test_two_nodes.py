"""Teacher and student on two Ray nodes, which are two raylets on this machine."""

import re

import pytest

from tests.cli.conftest import Material
from tests.helpers.command import distill_rl, records, series
from tests.helpers.corpus import write_corpus
from tests.helpers.models import write_tiny_model
from tests.helpers.ray_nodes import ray_nodes

pytestmark = [pytest.mark.ray, pytest.mark.cli]


@pytest.fixture
def address(tmp_path, monkeypatch):
    """The address of a cluster of two nodes with two logical CPUs each."""
    with ray_nodes(tmp_path, monkeypatch, nodes=2, cpus=2) as address:
        yield address


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Material:
    root = tmp_path_factory.mktemp("material")
    write_tiny_model(root / "teacher", hidden=32, seed=1)
    write_tiny_model(root / "student", hidden=16, seed=2)
    write_corpus(root / "corpus.jsonl", rows=40, seed=5)
    return Material(root)


def test_two_nodes_use_the_object_store_and_match_one_node(address, material, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    assert distill_rl("train", "-c", material.config(one), "train.steps=4").code == 0
    apart = ("train.steps=4", f"ray.address={address}", "ray.placement=disaggregated")
    ended = distill_rl("train", "-c", material.config(two), *apart)
    assert ended.code == 0, ended.err
    assert "transport object_store" in ended.out

    log = (two / "runs" / "tiny" / "logs" / "latest" / "driver.log").read_text()
    ((source, written, read),) = re.findall(r"(\S+) on node (\w+) \(cpu\) is read on node (\w+) \(cpu\)", log)
    assert source == "big/dp0-tp0"
    assert written != read
    steps = [record for record in records(two / "runs" / "tiny") if "train/kl_loss" in record]
    assert len(steps) == 4
    for record in steps:
        assert record["transport/bytes_between_nodes"] == record["transport/bytes"] > 0
    for metric in ("train/kl_loss", "train/grad_norm", "validation/kl_loss"):
        assert series(two / "runs" / "tiny", metric) == series(one / "runs" / "tiny", metric) != []

    refused = distill_rl("train", "-c", material.config(two), *apart, "transport=shared_memory", "--clean")
    assert refused.code == 2
    assert len(refused.errors) == 1
    assert re.search(r"transport: shared_memory works inside one node; got .*transport=auto", refused.errors[0])
