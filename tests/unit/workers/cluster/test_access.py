"""Refusals before any cluster is contacted; real clusters are in tests/ray/test_access.py."""

import sys

import pytest

from distill_rl.errors import ConfigError
from distill_rl.workers.cluster import access


def test_missing_grpc_refuses_to_join_if_tokens_are_in_use(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a-secret")
    monkeypatch.setitem(sys.modules, "grpc", None)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(ConfigError, match=r"joining a Ray cluster: needs grpcio.*pip install grpcio") as caught:
        access.require_entry("127.0.0.1:1")
    assert "a-secret" not in str(caught.value)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    access.require_entry("127.0.0.1:1")
