"""The Ray cluster that the runs of this folder join, and their tiny models and corpus."""

from tests.cli.conftest import cluster, material

__all__ = ["cluster", "material"]
