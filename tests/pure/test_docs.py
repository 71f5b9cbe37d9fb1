"""The documentation says what is there: its links, its commands and the messages that it explains."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from posixpath import normpath

import click
import pytest

import outcore
from outcore.cli import main
from outcore.planning import PLANNERS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
FENCE = re.compile(r"^(```+)(\w*)\n(.*?)^\1$", re.DOTALL | re.MULTILINE)
ELSEWHERE = (
    "tiling/",
    "elastic/",
    "tuning/",
    "planning/families/",
    "__init__.py",
)  # their messages are about what was passed, and say all there is
INTERNAL = ("ScheduleError", "UnknownStatement", "AssertionError", "KeyError", "TypeError", "ValueError")


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def slug(heading: str) -> str:
    """The anchor of a heading, as MkDocs and GitHub make it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text))


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://[\w.-]+\.\w+(/\S*)?$", link):
            continue
        path, _, anchor = link.partition("#")
        target = Path(normpath(page.parent / path)) if path else page
        assert target.exists(), f"{link} leads to no file"
        if anchor and target.suffix == ".md" and target.parent.name != "reference":
            anchors = [slug(heading) for heading in re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)]
            assert anchor in anchors, f"{link} leads to no heading"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    for page in DOCS.rglob("*.md"):
        name = str(page.relative_to(DOCS))
        assert name in navigation or name.startswith(("design/", "log/")), f"{name} is in no menu"


def test_the_readme_fits_three_screens_before_its_links() -> None:
    """95 lines with the picture and three tables are 2,850 pixels at GitHub's width, measured in Chromium."""
    before, _, links = (ROOT / "README.md").read_text().partition("## More")
    assert links
    assert before.count("\n") <= 95


def commands() -> Iterator[tuple[str, list[str]]]:
    for page in PAGES:
        if page.parts[-2] not in ("log", "design"):
            for _, kind, code in FENCE.findall(page.read_text()):
                for line in code.splitlines() if kind in ("sh", "") else ():
                    if line.startswith("outcore "):
                        yield page.name, shlex.split(line, comments=True)[1:]


def test_commands_and_their_options_exist() -> None:
    num = 0
    for page, words in commands():
        command: click.Command = main
        while isinstance(command, click.Group) and words:
            found = command.get_command(click.Context(command), words[0])
            assert found is not None, f"{page}: there is no outcore {words[0]}"
            command, words = found, words[1:]
        options = {name: option for option in command.params for name in option.opts}
        for word, value in zip(words, [*words[1:], ""]):
            if word == "--":
                break
            if word.startswith("-"):
                assert word in options, f"{page}: {command.name} has no {word}"
                if isinstance(options[word].type, click.Choice):
                    options[word].type.convert(value, options[word], None)
        num += 1
    assert num >= 10


def text_of(node: ast.expr) -> str:
    """The words of a message, with `…` for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return "…"


def parsed() -> Iterator[tuple[str, ast.AST]]:
    """(file, node) of the package."""
    for path in (ROOT / "outcore").rglob("*.py"):
        name = str(path.relative_to(ROOT / "outcore"))
        for node in ast.walk(ast.parse(path.read_text())):
            yield name, node


def message_of(node: ast.expr) -> str:
    return re.sub("…( ?…)*", "…", text_of(node)).removeprefix("outcore: ")


def sentences() -> set[str]:
    """Every text in the package."""
    texts = (ast.Constant, ast.JoinedStr, ast.BinOp)
    return {message_of(node) for _, node in parsed() if isinstance(node, texts)}


def messages() -> dict[str, str]:
    """Every error and warning -> the file it is in."""
    found = {}
    for name, node in parsed():
        if isinstance(node, ast.Call) and node.args:
            called, text = ast.unparse(node.func).rpartition(".")[2], message_of(node.args[0])
            is_told = called == "warn" or called.endswith(("Error", "Exception", "Mismatch", "BadFile", "BadSize"))
            is_told |= called == "__init__" and name == "errors.py"
            if is_told and called not in INTERNAL and len(text) > 15:
                found[text] = name
    return found


def explained() -> list[str]:
    page = (DOCS / "troubleshooting.md").read_text()
    return [line for _, kind, code in FENCE.findall(page) if kind == "text" for line in code.splitlines()]


def test_messages_that_are_explained_are_those_of_the_code() -> None:
    known = sentences()
    for message in explained():
        assert message in known, f"no code says: {message}"


def test_every_planner_is_described() -> None:
    page, doc = (DOCS / "reference" / "limit.md").read_text(), outcore.limit.__doc__ or ""
    for planner in PLANNERS:
        assert f"| `{planner}` |" in page
        assert f"`{planner}`" in doc


def test_every_message_is_explained() -> None:
    there = set(explained())
    missing = {
        text: name
        for text, name in messages().items()
        if text not in there and not name.startswith(ELSEWHERE) and "which is a bug" not in text
    }
    told = "\n".join(f"{name}: {text}" for text, name in missing.items())
    assert not missing, f"docs/troubleshooting.md does not have\n{told}"
