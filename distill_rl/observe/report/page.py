"""The templates beside this file. An undefined name is an error, and HTML pages escape everything put into them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill_rl.system.files import write_atomic

if TYPE_CHECKING:
    from jinja2 import Environment


def environment(**options: Any) -> Environment:
    """A Jinja environment for the templates of this folder."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("distill_rl.observe.report", "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )


def write_page(path: Path, template: str, **values: Any) -> None:
    """Render an HTML template and write it. Raises OSError if the page cannot be written."""
    page = environment(autoescape=True).get_template(template).render(**values)
    write_atomic(path, page.encode("utf-8", errors="replace"))
