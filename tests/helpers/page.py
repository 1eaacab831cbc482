"""Parses an HTML page: its visible text, and the resources it could load."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "link", "br", "img", "input", "hr", "base"}


class Page(HTMLParser):
    """Tags, attributes, visible text and scripts; asserts that all tags are closed."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        """The content of script elements; the first one of a report holds its data."""
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], "every tag is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> without a start"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)
        elif data.strip() and self.open[-1:] != ["style"]:
            self.texts.append(data.strip())

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    @property
    def data(self) -> dict[str, Any]:
        """What a report's script draws."""
        return json.loads(self.scripts[0])

    def curves(self, title: str) -> dict[tuple[str, str], list[tuple[float, float | None]]]:
        """(run, label) → (step, value) of every curve in the chart of that title."""
        (chart,) = [chart for chart in self.data["charts"] if chart["title"] == title]
        return {
            (self.data["runs"][curve["run"]], curve["label"]): list(
                zip(self.data["steps"][curve["steps"]], curve["values"], strict=True)
            )
            for curve in chart["curves"]
        }

    def require_self_contained(self) -> None:
        """Asserts that the page can load nothing and run nothing but its own scripts, which its policy names by hash."""
        allowed = {"script"} if self.scripts else set()
        assert not (ACTIVE - allowed) & set(self.tags)
        assert not self.reaches_out
        (policy,) = [
            value or "" for _, name, value in self.attributes if name == "content" and "default-src" in f"{value}"
        ]
        assert policy.startswith("default-src 'none'; ")
        hashes = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in self.scripts[1:]}
        assert set(re.findall("'sha256-([^']+)'", policy)) == hashes
        assert policy.count("'unsafe-inline'") == 1, "for styles only"

    @property
    def reaches_out(self) -> list[tuple[str, str, str | None]]:
        """Attributes that load a resource, link elsewhere or run a script."""
        names = ("src", "href", "xlink:href", "action", "srcdoc")
        return [item for item in self.attributes if item[1] in names or item[1].startswith("on")]


ACTIVE = {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
HOSTILE = "</svg></script><script>alert(1)</script><img src=x onerror=alert(1)>\"'`{{ 7 * 7 }}"
"""Text that would run or be evaluated if it were not escaped."""
