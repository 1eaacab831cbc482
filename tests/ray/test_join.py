"""A run on an existing Ray cluster: it joins, takes resources, and gives all of them back."""

import pytest

from tests.cli.conftest import Material
from tests.helpers.command import distill_rl, series
from tests.helpers.corpus import write_corpus
from tests.helpers.models import write_tiny_model
from tests.helpers.ray_nodes import in_use, ray_nodes

pytestmark = [pytest.mark.ray, pytest.mark.cli]


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """The address of a one-node cluster with four logical CPUs."""
    with ray_nodes(tmp_path, monkeypatch, nodes=1, cpus=4) as address:
        yield address


def test_a_run_joins_a_cluster_and_leaves_it_running_and_empty(cluster, tmp_path):
    write_tiny_model(tmp_path / "teacher", hidden=32, seed=1)
    write_tiny_model(tmp_path / "student", hidden=16, seed=2)
    write_corpus(tmp_path / "corpus.jsonl", rows=80, seed=5)
    config = Material(tmp_path).config(tmp_path)
    ended = distill_rl("train", "-c", config, "train.steps=2", f"ray.address={cluster}")
    assert ended.code == 0, ended.err
    assert len(series(tmp_path / "runs" / "tiny", "train/kl_loss")) == 2
    assert in_use(cluster) == "0 4.0"
    too_large = distill_rl(
        "train", "-c", config, "--clean", f"ray.address={cluster}", "student.parallel.dp=4", "ray.placement_timeout_s=3"
    )
    assert too_large.code == 2
    assert "CPU: asked 6, cluster has 4, free 4" in too_large.errors[0]


def test_an_address_without_a_cluster_is_refused(tmp_path):
    write_tiny_model(tmp_path / "teacher", hidden=16)
    write_tiny_model(tmp_path / "student", hidden=16)
    write_corpus(tmp_path / "corpus.jsonl", rows=80)
    ended = distill_rl("train", "-c", Material(tmp_path).config(tmp_path), "ray.address=127.0.0.1:1")
    assert ended.code == 2
    assert "ray.address" in ended.errors[0]
