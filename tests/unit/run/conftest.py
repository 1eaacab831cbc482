"""The material of the checks, from which runs are opened, too."""

from tests.unit.preflight.conftest import material

__all__ = ["material"]
