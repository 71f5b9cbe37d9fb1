"""A program that fails -> a smaller one that fails alike, and as a script that needs only torch and outcore."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace

from tests.fuzz import pieces
from tests.fuzz.check import Verdict, check
from tests.fuzz.program import Frame, Part, Program, source

Fails = Callable[[Program], bool]


def fails_like(verdict: Verdict) -> Fails:
    """Whether a program fails as `verdict` says: the same planner, budget and kind of failure."""
    what = verdict.detail.split(":")[0] if verdict.outcome == "crash" else ""
    if verdict.outcome == "prediction":
        what = "measured only" if verdict.detail.startswith("measured only") else "measured 1"

    def fails(program: Program) -> bool:
        combinations = () if verdict.planner == "keep-all" else ((verdict.planner, verdict.share),)
        report = check(program, combinations)
        return any(
            seen.planner == verdict.planner and seen.outcome == verdict.outcome and seen.detail.startswith(what)
            for seen in report.verdicts
        )

    return fails


def shrink(program: Program, fails: Fails) -> Program:
    """Takes away what the failure does not need, until nothing can go."""
    before = None
    while before != program:
        before = program
        for smaller in _smaller(program):
            if smaller != program and fails(smaller):
                program = smaller
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Large cuts first."""
    parts = [part.uid for part in program.everything()]
    size = len(parts) // 2
    while size >= 1:
        for start in range(0, len(parts), size):
            yield program.without(set(parts[start : start + size]))
        size //= 2
    for name in fields(Frame):
        yield replace(program, frame=replace(program.frame, **{name.name: getattr(Frame(), name.name)}))
    yield replace(program, outputs=())
    for part in program.everything():
        for change in ({"only": ""}, {"when": "True"}, {"place": "now"}, {"write": ""}):
            yield _changed(program, part.uid, change)
        yield _changed(program, part.uid, {"inputs": (part.inputs[0], part.inputs[0])})
    for num_steps in range(2, program.num_steps):
        yield replace(program, num_steps=num_steps)


def _changed(program: Program, uid: int, change: Mapping[str, object]) -> Program:
    def of(part: Part) -> Part:
        part = replace(part, inner=tuple(of(inner) for inner in part.inner))
        return replace(part, **change) if part.uid == uid else part  # type: ignore[arg-type]

    return replace(program, parts=tuple(of(part) for part in program.parts))


SCRIPT = '''"""{title}"""
import copy, warnings
from contextlib import nullcontext
from typing import Any
import numpy as np, outcore, torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
torch.set_num_threads(1); warnings.simplefilter("ignore")
{pieces}
{program}
def data(rows, t): return torch.randn(rows, 32, generator=torch.Generator().manual_seed(1000 * t + rows))
def bits(t): return None if t is None else t.detach().clone().contiguous().numpy().tobytes()
def run(planner=None, memory=None, plain=None):
    torch.manual_seed({seed}); m = Net(); opt = torch.optim.SGD(m.parameters(), lr=0.05, momentum={momentum})
    torch.manual_seed({seed} + 1); ooc = outcore.limit(m, memory, planner=planner, measure=True) if planner else None
    out, peak, before = [], 0, None
    for t in range({num_steps}):
        loss, given = step(m, opt, t, ooc.step if ooc else nullcontext, data)
        s = dict(loss=bits(loss), input=bits(given), rng=bits(torch.get_rng_state()), log=[*map(bits, m.log)])
        s.update({{f"{{n}}.grad": bits(p.grad) for n, p in m.named_parameters()}}); m.log.clear()
        s.update({{n: bits(p) for n, p in [*m.named_parameters(), *m.named_buffers()]}})
        s.update({{n: bits(p) for n, p in vars(m).items() if isinstance(p, Tensor)}})
        out.append(s)
        if ooc and ooc.timeline is not None and ooc.timeline is not before:
            before, p = ooc.timeline, ooc.predicted.peak_bytes; peak = max(peak, ooc.plan.in_core_peak_bytes)
            q = before.peak_bytes
            word = "OVER" if q > memory else "BELOW" if q > p else "ABOVE" if q < p * 0.99 else ""
            print("  step", t, "budget", memory, "predicted", p, "measured", q, word)
        bad = [n for n in s if plain and s[n] != plain[t][n]]
        if bad: print("  step", t, "DIFFERS in", bad)
    if ooc: opt.zero_grad(); vars(m).pop("kept", None); ooc.close(); print("  in the store", ooc.store.num_parcels)
    return out, peak
plain, again = run()[0], run()[0]; print("plain twice the same:", plain == again)
print("keep-all"); in_core = run("keep-all", 2**32, plain)[1]
for planner, share in {combinations}:
    memory = int(in_core * share)
    for _ in range(3):
        print(planner, share, memory)
        try: run(planner, memory, plain); break
        except outcore.BudgetTooSmall as e: memory = e.needed_bytes; print("  BudgetTooSmall:", e)
'''


def script(program: Program, title: str, combinations: object) -> str:
    """As Python that prints what differs. Times of ops are measured there, so that the plan may be another one."""
    text = source(program)
    used = [item for name, item in vars(pieces).items() if re.search(rf"\b{name}\b", text)]
    own = [inspect.getsource(item) for item in used if getattr(item, "__module__", "") == pieces.__name__]
    if "outcore_fuzz" in text:
        own.append(inspect.getsource(pieces._define) + "\n\n_define()\n")
    return SCRIPT.format(
        title=title,
        pieces="\n".join(own),
        program=text,
        seed=program.seed,
        momentum=program.frame.momentum,
        num_steps=program.num_steps,
        combinations=combinations,
    )
