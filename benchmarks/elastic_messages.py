"""What does a sum over workers cost, packed or layer by layer, here and in gloo itself? One worker of the question.

Started by elastic.py, pinned like any worker, as `python benchmarks/elastic_messages.py OUT NUM_REPEATS`; member 0
writes what it measured to OUT. Every member makes the same calls in the same order.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroupGloo

sys.path.insert(0, str(Path(__file__).parents[1]))

from outcore.elastic import window, wire
from outcore.elastic.place import find_place
from outcore.elastic.roster import Roster
from outcore.elastic.wire import add_into


def resnet50_sizes() -> list[int]:
    """Elements of ResNet-50's 161 parameter tensors, in order."""
    sizes, width_in = [64 * 3 * 49, 64, 64], 64
    for width, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(num_blocks):
            sizes += [
                width_in * width,
                width,
                width,
                width * width * 9,
                width,
                width,
                width * width * 4,
                width * 4,
                width * 4,
            ]
            if block == 0:
                sizes += [width_in * width * 4, width * 4, width * 4]
            width_in = width * 4
    return [*sizes, 2048 * 1000, 1000]


def lenet_sizes() -> list[int]:
    return [20 * 25, 20, 50 * 20 * 25, 50, 500 * 800, 500, 10 * 500, 10]


def messages_worker(out: str, num_repeats: int) -> None:
    began_s = time.monotonic()
    torch.set_num_threads(1)
    place = find_place(60)
    group = Roster(place, 30, 60).regroup()
    own: Any = ProcessGroupGloo(place.sub_store("torch"), group.index, group.size, timedelta(seconds=30))
    found: dict[str, Any] = {"num_workers": group.size, "num_own_cores": len(os.sched_getaffinity(0))}
    for name, sizes, repeats in (
        ("lenet", lenet_sizes(), num_repeats),
        ("resnet50", resnet50_sizes(), max(3, num_repeats // 5)),
    ):
        vector = torch.zeros(sum(sizes))
        parts = list(vector.split(sizes))
        timed = {
            "packed_s": fixed(lambda: group.tree_sum(vector), repeats),  # noqa: B023
            "per_layer_s": fixed(lambda: [group.tree_sum(part) for part in parts], repeats),  # type: ignore[func-returns-value]  # noqa: B023
            "gloo_packed_s": fixed(lambda: own.allreduce([vector]).wait(), repeats),  # noqa: B023
            "gloo_per_layer_s": fixed(lambda: [own.allreduce([part]).wait() for part in parts], repeats),  # noqa: B023
        }
        found[name] = {"num_tensors": len(sizes), "num_bytes": vector.nbytes, **timed}
        found[name] |= {"gain": timed["per_layer_s"] / timed["packed_s"]}
        found[name] |= {"gain_over_gloo_per_layer": timed["gloo_per_layer_s"] / timed["packed_s"]}
        found[name] |= {"gain_within_gloo": timed["gloo_per_layer_s"] / timed["gloo_packed_s"]}
        found[name]["shares_memory"] = group._window is not None
        found[name]["routes"] = ways = routes(place, group, vector, max(3, repeats // 2))
        by_sockets_s = min(way["packed_s"] for way in ways if way["by"] == "sockets")
        found[name]["gain_by_sockets_alone"] = timed["gloo_per_layer_s"] / by_sockets_s
        found[name]["seconds_so_far"] = time.monotonic() - began_s
    found["pingpong"] = pingpong(group, num_repeats)
    vector, other = torch.ones(1 << 20), torch.ones(1 << 20)
    found["add_s_per_byte"] = fixed(lambda: add_into(vector, other), 20) / vector.nbytes
    if group.index == 0:
        Path(out).write_text(json.dumps(found))
    place.store.add("done", 1)
    while place.store.add("done", 0) < place.num_ranks:
        time.sleep(0.02)


def routes(place: Any, group: Any, vector: Any, num_repeats: int) -> list[dict[str, Any]]:
    """The packed sum by other ways than the default: sockets alone, and shared memory with other blocks."""
    rows, kept = [], (wire.NUM_LANES, wire.BLOCK_BYTES, wire.SHARED_BYTES, window.ROOM_BYTES)
    ways: list[tuple[str, int, int, int | None]] = [("sockets", lanes, 1 << 24, None) for lanes in (2, 4)]
    ways += [("memory", 4, block_bytes, 1 << 17) for block_bytes in (1 << 20, 1 << 21, 1 << 22, 1 << 23)]
    for number, (by, lanes, block_bytes, shared_bytes) in enumerate(ways):
        wire.NUM_LANES, wire.BLOCK_BYTES, wire.SHARED_BYTES, window.ROOM_BYTES = (
            lanes,
            block_bytes,
            shared_bytes,
            block_bytes,
        )
        store = place.sub_store(f"ways/{number}/{vector.numel()}")
        other = wire.Group(store, group.index, group.ranks, 30, num_lanes=lanes, host=place.address[0])
        seconds = fixed(lambda: other.tree_sum(vector), num_repeats)  # noqa: B023
        rows.append({"by": by, "num_lanes": lanes, "block_bytes": block_bytes, "packed_s": seconds})
        other.close()
    wire.NUM_LANES, wire.BLOCK_BYTES, wire.SHARED_BYTES, window.ROOM_BYTES = kept
    return rows


def fixed(act: Callable[[], Any], num_repeats: int) -> float:
    """The median of exactly `num_repeats` calls after two for warming up: all ranks must agree on the count."""
    times = []
    for _ in range(num_repeats + 2):
        began_s = time.perf_counter()
        act()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times[2:])


def pingpong(group: Any, num_repeats: int) -> list[dict[str, float]]:
    """Seconds of one message each way between members 0 and 1."""
    rows = []
    for num_bytes in (4, 4096, 65536, 1 << 20, 1 << 22, 1 << 24):
        vector = torch.ones(num_bytes // 4)

        def there_and_back() -> None:
            if group.index == 0:
                group.send(vector, 1)  # noqa: B023
                group.receive(vector, 1)  # noqa: B023
            elif group.index == 1:
                group.receive(vector, 0)  # noqa: B023
                group.send(vector, 0)  # noqa: B023

        rows.append({"num_bytes": num_bytes, "seconds": fixed(there_and_back, num_repeats) / 2})
    return rows


if __name__ == "__main__":
    messages_worker(sys.argv[1], int(sys.argv[2]))
