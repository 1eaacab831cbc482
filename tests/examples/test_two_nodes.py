"""A run on an existing Ray cluster of two nodes, which are two raylets on this machine: teacher and student apart."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Material
from tests.helpers.command import distill_rl, records, series
from tests.helpers.corpus import write_corpus
from tests.helpers.models import write_tiny_model
from tests.helpers.ray_nodes import in_use, ray_nodes

pytestmark = [pytest.mark.ray, pytest.mark.cli]

APART = ("train.steps=4", "ray.placement=disaggregated")


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    """The address of a cluster of two nodes with two logical CPUs each."""
    folder = tmp_path_factory.mktemp("nodes")
    with pytest.MonkeyPatch.context() as patch, ray_nodes(folder, patch, nodes=2, cpus=2) as address:
        yield address


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Material:
    root = tmp_path_factory.mktemp("material")
    write_tiny_model(root / "teacher", hidden=32, seed=1)
    write_tiny_model(root / "student", hidden=16, seed=2)
    write_corpus(root / "corpus.jsonl", rows=40, seed=5)
    return Material(root)


@pytest.fixture(scope="module")
def joined(address, material, tmp_path_factory) -> Path:
    """The folder of a run that has joined the cluster, with teacher and student on different nodes."""
    folder = tmp_path_factory.mktemp("joined")
    ended = distill_rl("train", "-c", material.config(folder), *APART, f"ray.address={address}")
    assert ended.code == 0, ended.err
    assert "transport object_store" in ended.out
    return folder


def test_a_run_joins_a_cluster_and_leaves_it_running_and_empty(address, joined):
    assert len(series(joined / "runs" / "tiny", "train/kl_loss")) == 4
    assert in_use(address) == "0 4.0"
    config = joined / "tiny.yaml"
    too_large = distill_rl(
        "train", "-c", config, f"ray.address={address}", "run.name=large", "student.parallel.dp=4",
        "ray.placement_timeout_s=3",
    )  # fmt: skip
    assert too_large.code == 2
    assert "CPU: asked 6, cluster has 4, free 4" in too_large.errors[0]


def test_two_nodes_use_the_object_store_and_match_one_node(address, joined, material, tmp_path):
    settings = ("train.steps=4", "aligner.workers=0")
    assert distill_rl("train", "-c", material.config(tmp_path), *settings).code == 0
    one, two = tmp_path / "runs" / "tiny", joined / "runs" / "tiny"

    log = (two / "logs" / "latest" / "driver.log").read_text()
    ((source, written, read),) = re.findall(r"(\S+) on node (\w+) \(cpu\) is read on node (\w+) \(cpu\)", log)
    assert source == "big/dp0-tp0"
    assert written != read
    steps = [record for record in records(two) if "train/kl_loss" in record]
    assert len(steps) == 4
    for record in steps:
        assert record["transport/bytes_between_nodes"] == record["transport/bytes"] > 0
    for metric in ("train/kl_loss", "train/grad_norm", "validation/kl_loss"):
        assert series(two, metric) == series(one, metric) != []

    refused = distill_rl(
        "train", "-c", material.config(tmp_path), *APART, f"ray.address={address}", "transport=shared_memory", "--clean"
    )
    assert refused.code == 2
    assert len(refused.errors) == 1
    assert re.search(r"transport: shared_memory works inside one node; got .*transport=auto", refused.errors[0])
