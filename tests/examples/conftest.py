"""The Ray cluster that the runs of this folder join, their tiny models and corpus, and the reference run."""

from tests.cli.conftest import cluster, material, straight

__all__ = ["cluster", "material", "straight"]
