"""The pages in a real browser, as wide as a phone and as a screen: nothing overlaps, nothing runs out of the window."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.machines import machine_from
from outcore.planning.preparing import prepare
from outcore.reporting.page import page
from outcore.values import Budget, Span, Timeline
from tests.pure.test_reporting import MACHINE, small_trace

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)")

# Put into a copy of the page: text in pictures that is shown, as the browser lays it out.
LOOK = """<script>
const shown = [...document.querySelectorAll('svg text')].filter(text => text.getBoundingClientRect().width > 0);
const boxes = shown.map(text => ({words: text.textContent, ...text.getBoundingClientRect().toJSON(),
  picture: [...document.querySelectorAll('svg')].indexOf(text.closest('svg'))}));
const meet = (a, b) => a.picture === b.picture && a.left < b.right - 1 && b.left < a.right - 1
  && a.top < b.bottom - 2 && b.top < a.bottom - 2;
const overlaps = boxes.flatMap((a, i) => boxes.slice(i + 1).filter(b => meet(a, b)).map(b => [a.words, b.words]));
const outside = boxes.filter(box => box.left < -1 || box.right > innerWidth + 1).map(box => box.words);
const found = {overlaps, outside, num: boxes.length, least_px: Math.min(...boxes.map(box => box.height)),
  page_px: document.documentElement.scrollWidth, window_px: innerWidth};
document.body.setAttribute('data-found', JSON.stringify(found));
</script>"""


def looked_at(html: str, width_px: int, folder: Path) -> Any:
    path = folder / "page.html"
    path.write_text(html.replace("</body>", f"{LOOK}</body>"))
    assert CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width_px},900", "--dump-dom"]
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [CHROMIUM, *options, profile, path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found is not None, done.stderr
    return json.loads(unescape(found[1]))


def report() -> str:
    trace = small_trace(12)
    plan = outcore.plan(trace, MACHINE, Budget(6 << 20, 64 << 20))
    spans = (Span("compute", 0.1, 0.2, "rerun"), Span("compute", 0.3, 0.4, "stall"))
    measured = Timeline(True, 2.5, 5 << 20, "", spans=spans)
    return page(MACHINE, trace, prepare(trace, plan, MACHINE, detail=True), measured, 2.0)


def estimate() -> str:
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())])
    return outcore.estimate(model, torch.empty(4096, 256), machine=machine_from("rtx3060")).to_html()


@needs_browser
@pytest.mark.parametrize("width_px", [420, 1200])
def test_pages_can_be_read(width_px: int, tmp_path: Path) -> None:
    for name, html in (("report", report()), ("estimate", estimate())):
        found = looked_at(html, width_px, tmp_path)
        assert found["overlaps"] == [], name
        assert found["outside"] == [], name
        assert found["num"] > 5, name
        assert found["least_px"] >= 9, f"{name}: text of {found['least_px']} px"
        assert found["page_px"] <= found["window_px"], name
