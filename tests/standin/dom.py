"""The stand-in's documents: HTML as a tree, and what simple selectors find in it.

Selectors: `tag`, `#id`, `.class`, `[name]`, `[name=value]`, `*` and their combinations, descendants by spaces, lists
by commas, `text=` and `:has-text("…")`; parts chained by ` >> `, `nth=N` among them. Anything else is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser

VOID = frozenset(["area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"])
UNSHOWN = frozenset(["head", "script", "style", "template", "title", "noscript"])
BLOCKS = frozenset(["address", "article", "body", "div", "dl", "dt", "dd", "footer", "form", "h1", "h2", "h3", "h4"])
BLOCKS |= {"h5", "h6", "header", "li", "main", "nav", "ol", "p", "pre", "section", "table", "tr", "ul"}

_SIMPLE = re.compile(
    r"(?P<tag>\*|[A-Za-z][\w-]*)|#(?P<id>[\w-]+)|\.(?P<cls>[\w-]+)"
    r"|\[(?P<name>[\w-]+)(?:=(?P<quote>[\"']?)(?P<value>[^\"'\]]*)(?P=quote))?\]"
    r"|:has-text\((?P<mark>[\"'])(?P<text>.*?)(?P=mark)\)"
)


class SelectorError(ValueError):
    """A selector that the stand-in does not know, or that matched more than a strict read may."""


class Element:
    """An element: its name, attributes, parent, and what is in it (texts and elements)."""

    def __init__(self, tag: str, attributes: dict[str, str], parent: Element | None) -> None:
        self.tag = tag
        self.attributes = attributes
        self.parent = parent
        self.children: list[Element | str] = []

    def descendants(self) -> Iterator[Element]:
        for child in self.children:
            if isinstance(child, Element):
                yield child
                yield from child.descendants()

    def text_content(self) -> str:
        return "".join(child if isinstance(child, str) else child.text_content() for child in self.children)

    def inner_text(self) -> str:
        """The text as shown: white space collapsed, a line for each block."""
        lines = "".join(self._shown()).split("\n")
        kept = [re.sub(r"[ \t\r\f]+", " ", line).strip() for line in lines]
        return "\n".join(line for line in kept if line)

    def _shown(self) -> Iterator[str]:
        if self.tag == "pre":
            yield "\n" + self.text_content() + "\n"
            return
        for child in self.children:
            if isinstance(child, str):
                yield re.sub(r"\s+", " ", child)
            elif child.tag == "br":
                yield "\n"
            elif child.tag not in UNSHOWN:
                around = "\n" if child.tag in BLOCKS else ""
                yield around
                yield from child._shown()
                yield around

    def is_shown(self) -> bool:
        style = self.attributes.get("style", "").replace(" ", "")
        hidden = "hidden" in self.attributes or "display:none" in style or self.tag in UNSHOWN
        return not hidden and (self.parent is None or self.parent.tag == "#document" or self.parent.is_shown())

    def html(self) -> str:
        names = "".join(f' {name}="{value}"' for name, value in self.attributes.items())
        start = f"<{self.tag}{names}>"
        return start if self.tag in VOID else f"{start}{self.inner_html()}</{self.tag}>"

    def inner_html(self) -> str:
        return "".join(child if isinstance(child, str) else child.html() for child in self.children)


class Document:
    """What was parsed, and its source, which is also what `page.content()` returns."""

    def __init__(self, source: str, url: str) -> None:
        self.source = source
        self.url = url
        self.root = _Builder.tree(source)
        title = self.first("title")
        self.title = re.sub(r"\s+", " ", title.text_content()).strip() if title else ""

    def first(self, selector: str) -> Element | None:
        return next(iter(self.select(selector)), None)

    def select(self, selector: str) -> list[Element]:
        """All elements that match, in the document's order."""
        found = [self.root]
        for part in selector.split(" >> "):
            if re.fullmatch(r"nth=-?\d+", part):
                index = int(part.removeprefix("nth="))
                found = found[index : index + 1 or None]
            else:
                found = _unique(match for element in found for match in _matches(element, part.strip()))
        return found


def _unique(elements: Iterator[Element]) -> list[Element]:
    return list({id(element): element for element in elements}.values())


def _matches(scope: Element, part: str) -> list[Element]:
    if part.startswith("text=") or re.fullmatch(r"internal:text=\"[^\"]*\"[is]?", part):
        return _with_text(
            scope, part.partition("=")[2].rstrip("is" if part.startswith("internal") else "").strip("\"'")
        )
    wanted = [_chain(one) for one in part.removeprefix("css=").split(",")]
    return [element for element in scope.descendants() if any(_fits(element, chain) for chain in wanted)]


def _with_text(scope: Element, text: str) -> list[Element]:
    """The innermost elements that show the text, in any case."""
    shown = [one for one in scope.descendants() if one.tag not in UNSHOWN and text.lower() in one.inner_text().lower()]
    return [one for one in shown if not any(other.parent is one for other in shown)]


def _chain(selector: str) -> list[list[re.Match[str]]]:
    return [_compound(word) for word in re.findall(r"(?:\"[^\"]*\"|'[^']*'|[^\s])+", selector)]


def _compound(word: str) -> list[re.Match[str]]:
    tests, position = [], 0
    while position < len(word):
        match = _SIMPLE.match(word, position)
        if match is None:
            raise SelectorError(f"the stand-in engine does not know the selector {word!r}; see tests/standin/dom.py")
        tests.append(match)
        position = match.end()
    return tests


def _fits(element: Element, chain: list[list[re.Match[str]]]) -> bool:
    if not chain or not all(_passes(element, test) for test in chain[-1]):
        return False
    if len(chain) == 1:
        return True
    above = element.parent
    while above is not None and not _fits(above, chain[:-1]):
        above = above.parent
    return above is not None


def _passes(element: Element, test: re.Match[str]) -> bool:
    if test["tag"]:
        return test["tag"] in ("*", element.tag)
    if test["id"]:
        return element.attributes.get("id") == test["id"]
    if test["cls"]:
        return test["cls"] in element.attributes.get("class", "").split()
    if test["text"] is not None:
        return test["text"].lower() in element.inner_text().lower()
    value = element.attributes.get(test["name"])
    return value is not None and test["value"] in (None, value)


class _Builder(HTMLParser):
    """Builds the tree; what HTML lets one leave out (`</p>`, `</li>`) is closed by the next of its kind."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("#document", {}, None)
        self.at = self.root

    @classmethod
    def tree(cls, source: str) -> Element:
        """html, head and body are there, whatever the source has."""
        if not re.search(r"<body[\s>]", source, re.IGNORECASE):
            head = "".join(re.findall(r"<title.*?</title>|<meta[^>]*>", source, re.IGNORECASE | re.DOTALL))
            rest = re.sub(r"<!doctype[^>]*>|</?html[^>]*>|</?head[^>]*>|<title.*?</title>|<meta[^>]*>", "", source,
                          flags=re.IGNORECASE | re.DOTALL)  # fmt: skip
            source = f"<html><head>{head}</head><body>{rest}</body></html>"
        builder = cls()
        builder.feed(source)
        builder.close()
        return builder.root

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("p", "li", "tr", "td", "option") and self.at.tag == tag:
            self.at = self.at.parent or self.root
        element = Element(tag, {name: value or "" for name, value in attrs}, self.at)
        self.at.children.append(element)
        if tag not in VOID:
            self.at = element

    def handle_endtag(self, tag: str) -> None:
        above: Element | None = self.at
        while above is not None and above.tag != tag:
            above = above.parent
        if above is not None:
            self.at = above.parent or self.root

    def handle_data(self, data: str) -> None:
        self.at.children.append(data)
