"""A store that nobody closes gives its descriptor, its threads and its disk space back when it is dropped."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import psutil
import torch

from outcore.memory.store import Store
from outcore.units import MIB


def test_nothing_is_left_of_a_store_that_is_dropped(tmp_path: Path) -> None:
    num_fds, num_threads = psutil.Process().num_fds(), threading.active_count()
    content = torch.arange(MIB, dtype=torch.int32).view(torch.uint8)
    for _ in range(3):
        store = Store(torch.device("cpu"), 0, 64 * MIB, tmp_path)
        parcel = store.send(content)
        assert parcel is not None
        assert psutil.Process().num_fds() == num_fds + 1
        del store  # the parcel holds it, and can still be read
        fetched = parcel.store.fetch(parcel)
        parcel.wait_in()
        assert torch.equal(fetched, content)
        del parcel, fetched
        assert psutil.Process().num_fds() == num_fds
        assert threading.active_count() == num_threads
    assert not os.listdir(tmp_path)


def test_a_closed_file_is_closed_once(tmp_path: Path) -> None:
    store = Store(torch.device("cpu"), 0, 64 * MIB, tmp_path)
    store.send(torch.zeros(MIB, dtype=torch.uint8))
    assert store.file is not None
    fd = store.file.fd
    store.close()
    other = os.dup2(1, fd)  # somebody else's by now
    store.close()
    del store
    os.fstat(other)
    os.close(other)
