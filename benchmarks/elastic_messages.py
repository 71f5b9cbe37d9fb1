"""One worker that measures the cost of a sum over workers, packed or layer by layer, in outcore and in gloo.

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
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from outcore.elastic import wire
from outcore.elastic.muster import Fingerprint, Muster
from outcore.elastic.place import Place, find_place
from outcore.elastic.roster import Roster
from outcore.elastic.wire import Group, add_into


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
    muster = Muster(place, Fingerprint([], {}), min_members=None, join_limit_s=60)
    group = Roster(muster, 30).regroup()
    gloo: Any = dist.ProcessGroupGloo
    own = gloo(place.sub_store("torch"), group.index, group.size, timedelta(seconds=30))
    found: dict[str, Any] = {"num_workers": group.size, "num_own_cores": len(os.sched_getaffinity(0))}
    for name, sizes, repeats in (
        ("lenet", lenet_sizes(), num_repeats),
        ("resnet50", resnet50_sizes(), max(3, num_repeats // 5)),
    ):
        found[name] = sums_of(sizes, place, group, own, repeats)
        found[name]["seconds_so_far"] = time.monotonic() - began_s
    found["pingpong"] = pingpong(group, num_repeats)
    vector, other = torch.ones(1 << 20), torch.ones(1 << 20)
    found["add_s_per_byte"] = fixed(lambda: add_into(vector, other), 20) / vector.nbytes
    if group.index == 0:
        Path(out).write_text(json.dumps(found))
    place.store.add("done", 1)
    while place.store.add("done", 0) < place.num_ranks:
        time.sleep(0.02)


def sums_of(sizes: list[int], place: Place, group: Group, gloo: Any, num_repeats: int) -> dict[str, Any]:
    """A vector of these parts summed in the four ways in turn, round by round: what else the machine does, it does to
    all of them."""
    here = wire.Group(place.sub_store(f"own/{sum(sizes)}"), group.index, group.ranks, 30, address=place.local)
    message, vector = here.make_message(sum(sizes), torch.float32), torch.zeros(sum(sizes))
    parts, layers = list(message.split(sizes)), list(vector.split(sizes))
    sockets = wire.Group(
        place.sub_store(f"sockets/{sum(sizes)}"),
        group.index,
        group.ranks,
        30,
        num_lanes=wire.NUM_LANES,
        address=place.local,
    )
    ways: dict[str, Callable[[], Any]] = {
        "packed_s": lambda: here.tree_sum(message),
        "per_layer_s": lambda: [here.tree_sum(part) for part in parts],  # type: ignore[func-returns-value]
        "gloo_packed_s": lambda: gloo.allreduce([vector]).wait(),
        "gloo_per_layer_s": lambda: [gloo.allreduce([layer]).wait() for layer in layers],
        "sockets_packed_s": lambda: sockets.tree_sum(vector),
    }
    rounds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(num_repeats + 2):  # two for warming up; all ranks must agree on the count
        for name, act in ways.items():
            took_s = timed(act)
            if number >= 2:
                rounds[name].append(took_s)
    found: dict[str, Any] = {name: statistics.median(times) for name, times in rounds.items()}
    found |= {"num_tensors": len(sizes), "num_bytes": vector.nbytes, "shares_memory": here._window is not None}
    if here._window is not None:
        shared = here._window
        found["meeting_s"] = fixed(lambda: shared.meet(here.index, 30), num_repeats)
    found |= gains(rounds)
    found["rounds"] = rounds
    for other in (here, sockets):
        other.close()
    return found


def gains(rounds: dict[str, list[float]]) -> dict[str, float]:
    """Ratios within a round, their median over rounds."""

    def median(over: str, under: str) -> float:
        return statistics.median(a / b for a, b in zip(rounds[over], rounds[under]))

    return {
        "gain": median("per_layer_s", "packed_s"),
        "gain_over_gloo_per_layer": median("gloo_per_layer_s", "packed_s"),
        "gain_within_gloo": median("gloo_per_layer_s", "gloo_packed_s"),
        "gain_by_sockets_alone": median("gloo_per_layer_s", "sockets_packed_s"),
    }


def timed(act: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


def fixed(act: Callable[[], Any], num_repeats: int) -> float:
    """The median of exactly `num_repeats` calls after two for warming up: all ranks must agree on the count."""
    return statistics.median([timed(act) for _ in range(num_repeats + 2)][2:])


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
