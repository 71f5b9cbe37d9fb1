"""Every tunable number of tuning says its unit and where it comes from."""

from __future__ import annotations

import inspect
import re

from outcore.tuning import settings

FIELD = re.compile(r"^    (\w+): [^=]+ = .*$", re.M)


def test_every_setting_says_where_it_comes_from() -> None:
    lines = [line for line in inspect.getsource(settings).splitlines() if FIELD.match(line)]
    lines = [line for line in lines if "default_factory" not in line]
    assert len(lines) > 90
    for line in lines:
        comment = line.partition("  # ")[2]
        assert re.search(r"\((measured|derived|guessed)[^)]*\)$", comment), line
