from tests.cli.conftest import material  # noqa: F401  (the fixture)
