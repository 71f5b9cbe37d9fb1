"""What holds for all tests.

One thread each, also for the processes they start: two test workers on two cores with two threads each would wait for
each other at every small op, and a CPU's sums have other bits on other numbers of threads.

Property tests draw the same examples every time, so that a change is judged by what it changes. OUTCORE_EXPLORE=1 draws
new ones: a failure then is a counterexample to keep as a test of its own.

What a test records is not kept for the next one, nor for the next run: no cache, unless a test names a folder for it.
"""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import settings

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is there
os.environ["OUTCORE_CACHE"] = "off"
os.environ.setdefault("OUTCORE_NATIVE", "off")  # no test compiles the fast path but those that ask for it

settings.register_profile("repeatable", derandomize=True, deadline=None)  # a busy machine decides nothing
if not os.environ.get("OUTCORE_EXPLORE"):
    settings.load_profile("repeatable")


def pytest_configure() -> None:
    import torch

    torch.set_num_threads(1)  # a plugin may have had it before us


@pytest.fixture(scope="module", autouse=True)
def _small_heap() -> None:
    """What libraries and earlier tests hold is not walked over at every recorded step: the compiler alone has millions
    of objects, and a collection of them takes longer than most tests."""
    gc.collect()
    gc.freeze()
