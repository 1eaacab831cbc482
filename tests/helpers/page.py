"""Parses an HTML page: its visible text, and the resources it could load."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "input", "hr", "base"}


class Page(HTMLParser):
    """Tags, attributes and text; asserts that all tags are closed."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.texts: list[str] = []
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
        if data.strip():
            self.texts.append(data.strip())

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    @property
    def reaches_out(self) -> list[tuple[str, str, str | None]]:
        """Attributes that load a resource, link elsewhere or run a script."""
        names = ("src", "href", "xlink:href", "action", "srcdoc")
        return [item for item in self.attributes if item[1] in names or item[1].startswith("on")]


ACTIVE = {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
HOSTILE = "</svg></script><script>alert(1)</script><img src=x onerror=alert(1)>\"'`{{ 7 * 7 }}"
"""Text that would run or be evaluated if it were not escaped."""
