"""What `make docs` adds to MkDocs: pages from files outside docs/, links between them, and a check of every link.

README.md, CHANGELOG.md, CONTRIBUTING.md and examples/ are pages of the site, too, from the files where they are. Their
links are written for a reader of the repository; here they are turned to the pages of the site. After the build every
link of every page is followed: to a page and to a heading of it, or, for links to elsewhere, as far as their spelling.
MkDocs calls the functions by name; what they log as a warning fails a build with --strict.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any
from urllib.parse import unquote, urlsplit

import click
from mkdocs.structure.files import File, Files

from outcore.cli import main

ROOT = Path(__file__).parents[1]
log = logging.getLogger("mkdocs.hooks.site")

PAGES = {  # file of the repository -> page of the site
    "README.md": "index.md",
    "CHANGELOG.md": "project/changes.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "examples": "examples.md",
    "docs/design": "design/index.md",
}
COMMANDS = "reference/command-line.md"
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]*)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: Any) -> Files:
    for source, page in PAGES.items():
        if source.endswith(".md"):
            files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    files.append(File.generated(config, PAGES["examples"], content=_examples()))
    files.append(File.generated(config, PAGES["docs/design"], content=_decisions()))
    files.append(File.generated(config, COMMANDS, content=_commands()))
    return files


def _examples() -> str:
    """One section per example, under the name of its file."""
    files = sorted((ROOT / "examples").glob("*.py"))
    parts = [f"## {path.name}\n\n```python\n{path.read_text()}```\n" for path in files]
    return "\n".join(("# Examples\n\nEach is a file of `examples/`, and each is run by the tests.\n", *parts))


def _commands() -> str:
    """What `--help` says of every verb."""
    parts = ["# Command line\n\nEvery verb takes `--help`; most take `--json`, for programs.\n"]
    parts += [f"## {path}\n\n```text\n{text}\n```\n" for path, text in _helps(main, "outcore")]
    return "\n".join(parts)


def _helps(command: click.Command, path: str) -> Iterator[tuple[str, str]]:
    context = click.Context(command, info_name=path, max_content_width=100, terminal_width=100)
    yield path, command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            verb = command.get_command(context, name)
            if verb is not None and not verb.hidden:
                yield from _helps(verb, f"{path} {name}")


def _decisions() -> str:
    """The pages of docs/design, by their titles."""
    pages = sorted((ROOT / "docs" / "design").glob("*.md"))
    lines = [f"- [{path.read_text().partition(chr(10))[0].lstrip('# ')}]({path.name})" for path in pages]
    return "\n".join(("# Design decisions\n\nOne page each: the context, the decision, its consequences.\n", *lines))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links between files of the repository become links between pages; code blocks stay as they are."""
    uri = page.file.src_uri
    source = next((source for source, other in PAGES.items() if other == uri and source.endswith(".md")), f"docs/{uri}")
    if uri in (PAGES["examples"], PAGES["docs/design"], COMMANDS):
        return markdown

    def turned(found: re.Match[str]) -> str:
        return _target(source, found[1], found[2] or "", uri)

    blocks = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(block if block.startswith("```") else LINK.sub(turned, block) for block in blocks)


def _target(source: str, link: str, anchor: str, uri: str) -> str:
    path = normpath(f"{dirname(source)}/{link}").lstrip("/")
    if not (ROOT / path).exists():
        log.warning("%s links to %s, and there is no %s", source, link, path)
    if path.startswith("examples/"):
        path, anchor = "examples", "#" + path.removeprefix("examples/").replace(".", "").lower()
    if path in PAGES:
        page = PAGES[path]
    elif path.startswith("docs/"):
        page = path.removeprefix("docs/")
    else:
        log.warning("%s links to %s, which is no page of the site; write its name in `code` instead", source, path)
        return link + anchor
    return relpath(page, dirname(uri) or ".") + anchor


class _Links(HTMLParser):
    """The links and the anchors of one built page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value and tag != "base":
                self.links.add(value)
            if value and (name == "id" or (name == "name" and tag == "a")):
                self.anchors.add(value)


def on_post_build(config: Any) -> None:
    """Follows every link of every page. Links to elsewhere are read, not followed: there may be no network."""
    site = Path(config["site_dir"]).resolve()
    pages = {path: _Links(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    num = 0
    for path, found in pages.items():
        for link in sorted(found.links):
            num += 1
            why = _broken(link, path, pages)
            if why:
                log.warning("%s: the link %s %s", path.relative_to(site), link, why)
    log.info("%d links of %d pages lead somewhere", num, len(pages))


def _broken(link: str, page: Path, pages: dict[Path, _Links]) -> str:
    """Why a link leads nowhere, or nothing."""
    parts = urlsplit(link)
    if parts.scheme in ("http", "https"):
        return "" if re.fullmatch(r"[\w-]+(\.[\w-]+)+(:\d+)?", parts.netloc) else "has no host"
    if parts.scheme:
        return "" if parts.scheme in ("mailto", "data", "javascript") else f"has the unknown scheme {parts.scheme}"
    target = Path(os.path.normpath(page.parent / unquote(parts.path))) if parts.path else page
    if target.is_dir():
        target /= "index.html"
    if not target.exists():
        return "leads to no file"
    if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
        return "leads to no heading" if not parts.fragment.startswith("__") else ""
    return ""
