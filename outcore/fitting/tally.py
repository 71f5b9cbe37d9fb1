"""Steps -> Tally: what they did and cost so far, for `ooc.stats()`, and why the last one followed no plan."""

from __future__ import annotations

from collections import Counter

from outcore.values import Timeline

Stats = dict[str, float]
WAYS = ("recorded", "planned", "left", "unplanned")


class Tally:
    """Counts, seconds and bytes, summed over steps."""

    def __init__(self) -> None:
        self.counts = Counter(dict.fromkeys(WAYS, 0))  # steps, by how they went
        self.unplanned_because = ""  # why the last step followed no plan; empty if it was recorded or planned
        self._seconds: Counter[str] = Counter()
        self._num_in_core = self._swapped_bytes = self._recomputed_bytes = self._num_measured = 0
        self._waited_s = 0.0
        self.num_peaks = self.peak_bytes = 0  # steps whose peak was measured, and the highest of these peaks

    def note(self, way: str, seconds: float, followed: Timeline | None) -> None:
        """Adds a step that went one of the ways. `followed` is the prediction of its plan."""
        self._seconds[way] += seconds  # type: ignore[assignment]
        if way == "planned" and followed is not None:
            self._num_in_core += not followed.swapped_bytes and not followed.recomputed_bytes
            self._swapped_bytes += followed.swapped_bytes
            self._recomputed_bytes += followed.recomputed_bytes

    def note_measured(self, measured: Timeline) -> None:
        self._num_measured += 1
        self._waited_s += measured.stall_s
        self.note_peak(measured.peak_bytes)

    def note_peak(self, peak_bytes: int) -> None:
        self.num_peaks += 1
        self.peak_bytes = max(self.peak_bytes, peak_bytes)

    def stats(self) -> Stats:
        return {
            **{way: self.counts[way] for way in WAYS},
            "in_core": self._num_in_core,
            **{f"{way}_s": self._seconds[way] for way in WAYS},
            "swapped_bytes": self._swapped_bytes,
            "recomputed_bytes": self._recomputed_bytes,
            "measured": self._num_measured,
            "waited_s": self._waited_s,
            "peak_bytes": self.peak_bytes,
        }
