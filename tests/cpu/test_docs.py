"""The Python blocks of the documentation run on the CPU, page by page, one block after the other.

A page is one program: its blocks share their names and run in a folder of their own. A block that needs what is not
here (a GPU, several processes) stands behind `<!-- not run: why -->`; it must compile all the same.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"(?:<!-- not run: (?P<why>.+?) -->\n+)?```python\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
NEEDS = {"hugging-face": "transformers", "accelerate": "accelerate", "lightning": "lightning"}
PRINTED = {"getting-started": "no plan fits 6.00 MiB on cpu: "}  # an error that a page shows must be raised by its code
ELSEWHERE = {"tour.md"}  # test_tour.py runs it, and looks at what it prints
PAGES = sorted(
    path
    for path in DOCS.rglob("*.md")
    if "```python" in path.read_text() and path.relative_to(DOCS).parts[0] not in ("design", "log", *ELSEWHERE)
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS).with_suffix("")))
def test_the_blocks_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if page.stem in NEEDS:
        pytest.importorskip(NEEDS[page.stem], reason=f"the guide is for users of {NEEDS[page.stem]}")
    monkeypatch.chdir(tmp_path)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)  # as torchrun sets them, for one process
    names: dict[str, Any] = {"__name__": "docs"}
    text = page.read_text()
    num = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for found in BLOCK.finditer(text):
            line = text.count("\n", 0, found.start("code"))
            compiled = compile("\n" * line + found["code"], str(page), "exec")  # errors name the page and its line
            if found["why"] is None:
                exec(compiled, names)
                num += 1
    assert num or "not run" in text
    printed = PRINTED.get(page.stem, "")
    assert printed in text
    assert printed in capsys.readouterr().out


def test_every_block_is_found() -> None:
    """A fence that is indented or misspelt would not be run."""
    for page in PAGES:
        text = page.read_text()
        assert len(BLOCK.findall(text)) == text.count("```python"), page.name
