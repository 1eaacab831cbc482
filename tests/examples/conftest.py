"""The Ray cluster that all runs of this folder join."""

from tests.cli.conftest import cluster

__all__ = ["cluster"]
