"""Property tests draw the same examples every time, so that a change is judged by what it changes.

OUTCORE_EXPLORE=1 draws new ones: a failure then is a counterexample to keep as a test of its own.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
if not os.environ.get("OUTCORE_EXPLORE"):
    settings.load_profile("repeatable")
