"""A run that shall join a Ray cluster where none is. Joining one: tests/examples/test_two_nodes.py."""

import pytest

from tests.cli.conftest import Material
from tests.helpers.command import distill_rl
from tests.helpers.corpus import write_corpus
from tests.helpers.models import write_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.cli]


def test_an_address_without_a_cluster_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    write_tiny_model(tmp_path / "teacher", hidden=16)
    write_tiny_model(tmp_path / "student", hidden=16)
    write_corpus(tmp_path / "corpus.jsonl", rows=80)
    ended = distill_rl("train", "-c", Material(tmp_path).config(tmp_path), "ray.address=127.0.0.1:1")
    assert ended.code == 2
    assert "ray.address" in ended.errors[0]
