"""Recorded step -> the same step, in which what ops make twice is one value.

Under autocast every linear layer casts its input for itself: queries, keys and values have three equal copies of what
they read, and autograd saves all three. An op that calls the same operator on the same values as one before it is its
*echo*: what it makes has the same bits. So whatever was saved of it is saved of the first one, is kept, swapped or
recomputed once, and the echo's own storage dies when the program lets it go. The runtime looks whether an echo still is
one, at every step (`outcore.running.execute`).

Only what can be evicted is merged: an echo that the program holds until it is asked for, or that is small, is there
anyway. The first is the one that is saved first, too: what is saved is what the runtime holds.

A value that is recomputed stays until autograd has asked for it for the last time. Echoes that are asked for far apart
would fill memory in between, and stay what they are. Where everything can be kept as it is, plans leave echoes alone:
nobody has to look at ops then. So do the planners that recompute nothing: they are the way out where something writes
into tensors unseen. It is the same step: its fingerprint stays.
"""

from __future__ import annotations

from dataclasses import replace

from outcore.planning.terrain import remembered, terrain_of
from outcore.values import Plan, Schedule, Trace

NEAR_SLOTS, NEAR_SHARE = 128, 0.02  # between the first and the last time they are asked for; the share is of all slots


def merged(trace: Trace) -> Trace:
    return remembered(trace, _merge)


def step_of(trace: Trace, made: Plan | Schedule) -> Trace:
    """The step that a plan or a schedule was made for, of a recorded one."""
    return merged(trace) if made.echoes else trace


def _merge(trace: Trace) -> Trace:
    first_of = _echoes(trace)
    if not first_of:
        return trace
    found = replace(
        trace,
        ops=tuple(
            replace(
                op,
                reads=tuple(first_of.get(value, value) for value in op.reads),
                is_echo=op.repeats >= 0 and op.writes[0] in first_of,
            )
            for op in trace.ops
        ),
        ticks=tuple(replace(tick, value=first_of.get(tick.value, tick.value)) for tick in trace.ticks),
    )
    vars(found)["fingerprint"] = trace.fingerprint
    return found


def _echoes(trace: Trace) -> dict[int, int]:
    """Value -> the first one like it."""
    terrain, found = terrain_of(trace), {}
    near_slots = max(NEAR_SLOTS, int(NEAR_SHARE * trace.num_slots))
    evictable = set(terrain.evictable)

    def is_plain(value: int) -> bool:
        return value in evictable and bool(terrain.unpacks[value])

    ticks: dict[int, list[int]] = {}  # first value -> the ticks of all that are like it
    for op in trace.ops:
        if op.repeats < 0:
            continue
        first, value = trace.ops[op.repeats].writes[0], op.writes[0]
        if not is_plain(first) or not is_plain(value) or terrain.packs[first][0] > terrain.packs[value][0]:
            continue
        asked = [*ticks.get(first, terrain.unpacks[first]), *terrain.unpacks[value]]
        slots = [terrain.tick_slots[tick] for tick in asked]
        if max(slots) - min(slots) <= near_slots and terrain.packs[value][-1] < min(asked):
            found[value], ticks[first] = first, asked
    return found
