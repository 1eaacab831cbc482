"""Static HTML from the templates beside this file: everything put into them is escaped, and no name may be undefined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distill_rl.system.files import write_atomic


def write_page(path: Path, template: str, **values: Any) -> None:
    """Raises: OSError: the page cannot be written."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("distill_rl.observe.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template(template).render(**values)
    write_atomic(path, page.encode("utf-8", errors="replace"))
