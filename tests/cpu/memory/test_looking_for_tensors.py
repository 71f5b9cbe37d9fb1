"""Every tensor that Python can see is found, and no other thread is disturbed by that."""

from __future__ import annotations

import threading

import torch
from torch import nn

from outcore.memory.meter import existing_storages


def test_other_threads_fill_tuples_meanwhile() -> None:
    """A tuple that is being filled must not be held by anybody else: Python raises SystemError then."""
    model, failed, is_over = nn.Linear(2, 2), list[BaseException](), threading.Event()
    others: list[list[int]] = [[] for _ in range(200_000)]  # to look through these takes longer than a thread's turn

    def fill() -> None:
        while not is_over.is_set():
            try:
                tuple(number for number in range(3000))
            except SystemError as error:
                failed.append(error)
                return

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        for _ in range(60):
            list(existing_storages(model, ()))
            if failed:
                break
    finally:
        is_over.set()
        thread.join()
    assert not failed, len(others)


def test_tensors_in_containers_are_found() -> None:
    hidden = {"somewhere": [torch.randn(3)]}
    found = {storage.data_ptr() for storage in existing_storages(nn.Linear(2, 2), ())}
    assert hidden["somewhere"][0].data_ptr() in found
