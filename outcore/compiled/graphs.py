"""Runs compiled graphs inside a step launch by launch, so that the tensors they save are planned with the step.

`torch.compile` turns a function into pairs of graphs, a forward and a backward. When one is called inside a step, the
*session* of that step (the recorder, or the execution of a plan) sees its launches as ops of the step, receives every
value that the backward needs as soon as it is complete (pack), and returns it just before its first use (unpack).
Autograd saves a token instead. Eager and compiled parts, and any number of graphs, thus share one trace and one plan,
and nothing is compiled a second time.

A graph with a statement that is not known runs as it was compiled; its saved tensors are kept or swapped, which is
reported in one line of the log.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from outcore.compiled.program import Launch, UnknownStatement
from outcore.errors import OutcoreError
from outcore.memory.tensors import below_everything, make_token, token_of

if TYPE_CHECKING:
    from torch._inductor.output_code import CompiledFxGraph

    from outcore.compiled.writer import Functions, Rerun

log = logging.getLogger("outcore")
_COMPILER = "torch._inductor.output_code"  # a module that is imported by the first use of torch.compile
Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Kernel:
    """One launch of a graph, as a session sees it."""

    number: int  # in its graph
    name: str
    is_generated: bool  # code of the compiler, whose result does not depend on switches of the process
    is_pure: bool  # generated, with bitwise reproducible results
    is_product: bool
    overwrites: tuple[int, ...]  # places in its reads that it changes without a version change
    operator: Any  # the PyTorch operator, if it calls one
    rerun: Rerun | None  # (reads, changed inputs, numbers) -> (fresh, overwritten)


class Launches(Protocol):
    """Receives the launches of one run of a graph."""

    busy: Collection[int]  # the launches it observes

    def before(self, kernel: Kernel, reads: Tensors, changes: Tensors, numbers: Sequence[Any]) -> Any: ...
    def after(self, mark: Any, fresh: Tensors, overwritten: Tensors) -> None: ...


class Claim(Protocol):
    """Tells whether an unpacked tensor is in memory that is read again later."""

    def own(self, tensor: torch.Tensor) -> torch.Tensor: ...


class Session(Protocol):
    """A running step: the recorder, or the execution of a plan."""

    def enter_graph(self, kernels: Sequence[Kernel]) -> Launches: ...
    def pack(self, tensor: torch.Tensor) -> Any: ...
    def open(self, handle: Any) -> tuple[torch.Tensor, Claim]: ...


# --- sessions ------------------------------------------------------------------------------------------------------

FindSession = Callable[[Sequence[Any] | None], "Session | None"]
_sessions: list[FindSession] = []  # at most one: steps do not overlap
_is_watching = False


def listen(session: FindSession) -> bool:
    """Makes graphs ask `session` whether their call belongs to a step; returns whether there can be graphs at all.

    `session` receives the inputs of a graph that may be the first op of a step, and None for other graphs.
    """
    global _is_watching
    _sessions[:] = [session]
    if not _is_watching and _COMPILER in sys.modules:
        from outcore.compiled import inductor

        inductor.watch(_on_call)  # permanently, because a backward may come after its step
        _is_watching = True
    return _is_watching


def stop_listening() -> None:
    _sessions.clear()


def _on_call(compiled: CompiledFxGraph, inputs: Sequence[Any]) -> None:
    """Replaces a graph that is called for the first time inside a step, or with tokens."""
    if type(compiled.current_callable) is not Graph and (_sessions or _has_tokens(inputs)):
        compiled.current_callable = Graph(compiled, inputs)


def _has_tokens(inputs: Sequence[Any]) -> bool:
    return any(isinstance(item, torch.Tensor) and token_of(item) is not None for item in inputs)


# --- saved tensors ----------------------------------------------------------------------------------------------------


class _Stored:
    """A packed buffer, and the number of its views that the backward has not unpacked yet."""

    __slots__ = ("base", "claim", "handle", "held", "num_views")

    def __init__(self, handle: Any, held: list[Any]) -> None:
        self.handle = handle
        self.held = held  # handles of inputs of reruns, kept alive while anything is saved for the backward
        self.base: torch.Tensor | None = None
        self.claim: Claim | None = None
        self.num_views = 0

    def open(self) -> torch.Tensor:
        """Returns the buffer. If the graph is retained, it may be unpacked again, as another copy."""
        base = self.base
        if base is None:
            base, self.claim = self.handle.run.open(self.handle)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self.num_views -= 1
            self.base = base if self.num_views else None
            self.handle = self.handle if self.num_views else None
        return base


class _Saved:
    """The content of a token: a view of a packed buffer."""

    __slots__ = ("offset", "size", "stored", "stride")

    def __init__(self, stored: _Stored, view: torch.Tensor) -> None:
        self.stored, self.size, self.stride = stored, view.size(), view.stride()
        self.offset = view.storage_offset()
        stored.num_views += 1

    def open(self) -> torch.Tensor:
        return self.stored.open().as_strided(self.size, self.stride, self.offset)


class _Run:
    """One run of a graph, with the functions that the written code calls (`outcore.compiled.writer`)."""

    __slots__ = ("_graph", "_held", "_launches", "_opened", "_owned", "_session")

    def __init__(self, graph: Graph, session: Session | None, launches: Launches | None) -> None:
        self._graph, self._session, self._launches = graph, session, launches
        self._opened: dict[int, _Stored] = {}  # by the number of the input
        self._owned: set[int] = set()  # inputs that were unpacked and overwritten
        self._held: list[Any] = []

    def pack(self, tensor: torch.Tensor) -> _Stored:
        assert self._session is not None
        return _Stored(self._session.pack(tensor), self._held)

    def hold(self, tensor: torch.Tensor) -> None:
        assert self._session is not None
        self._held.append(self._session.pack(tensor))

    def token(self, stored: _Stored, view: torch.Tensor) -> torch.Tensor:
        return make_token(_Saved(stored, view))

    def open(self, given: Any, number: int) -> Any:
        if type(given) is not _Saved:
            return given
        self._opened[number] = given.stored
        return given.open()

    def own(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """Returns a tensor with the same content whose memory may be overwritten."""
        stored = self._opened.pop(number, None)
        if stored is None:
            return tensor
        self._owned.add(number)
        return stored.claim.own(tensor) if stored.claim is not None else tensor

    def before(self, number: int, reads: Tensors, changes: Tensors, numbers: Sequence[Any]) -> Any:
        """Called before a launch; `changes` are inputs that it writes into. The memory of unpacked inputs passes to the
        values that overwrite them, which are ordinary buffers from then on."""
        assert self._launches is not None
        kernel, inputs = self._graph.kernels[number], self._graph.changes[number]
        first = [place for place, buffer in enumerate(inputs) if buffer in self._opened]
        again = [place for place, buffer in enumerate(inputs) if buffer in self._owned]
        others = [place for place in range(len(inputs)) if place not in first and place not in again]
        own = [changes[place] for place in (*first, *again)]
        mark = self._launches.before(kernel, (*reads, *own), [changes[place] for place in others], numbers)
        return mark, first, (*again, *others)

    def after(self, mark: Any, fresh: Tensors, overwritten: Tensors, changes: Tensors) -> None:
        assert self._launches is not None
        noted, first, others = mark
        made = (*fresh, *(changes[place] for place in first))
        self._launches.after(noted, made, (*overwritten, *(changes[place] for place in others)))


# --- graphs -----------------------------------------------------------------------------------------------------------


class Graph:
    """A compiled graph that replaces the compiler's callable."""

    def __init__(self, compiled: CompiledFxGraph, inputs: Sequence[Any]) -> None:
        from outcore.compiled import inductor

        self._as_compiled: Callable[..., Any] | None = compiled.current_callable
        self._facts = inductor.facts_of(compiled)
        if self._facts.uses_cuda_graphs and not self._facts.is_inference:
            raise OutcoreError(
                "the model is compiled with CUDA graphs, whose memory stays allocated between launches and cannot be "
                "planned; compile it with mode='default' or mode='max-autotune-no-cudagraphs'"
            )
        lasting = self._facts.lasting
        self._own_places = tuple(place for place in range(len(inputs)) if place not in lasting)
        self.kernels: tuple[Kernel, ...] = ()
        self.changes: tuple[list[int], ...] = ()
        self._functions: Functions | None = None
        try:
            self._read(compiled, inputs)
        except UnknownStatement as error:
            kind = "backward" if self._facts.is_backward else "forward"
            log.info("a compiled %s runs as it is, and what it saves is kept or swapped: %s", kind, error)

    def _read(self, compiled: CompiledFxGraph, inputs: Sequence[Any]) -> None:
        from outcore.compiled import inductor
        from outcore.compiled.writer import write

        facts = self._facts
        program = inductor.read(facts.source, [isinstance(item, torch.Tensor) for item in inputs])
        saved = () if facts.is_backward else inductor.saved_outputs(compiled, len(program.outputs))
        names = [program.inputs[place] for place in facts.lasting]
        stays = {program.input_buffers[name] for name in names if name in program.input_buffers}
        self._functions = write(
            program,
            facts.namespace,
            saved=saved,
            stays=stays,
            opens=facts.is_backward,
            reruns=not facts.is_backward,
        )
        self.changes = tuple(launch.changes for launch in program.launches)
        reruns = self._functions.reruns or (None,) * len(program.launches)
        self.kernels = tuple(_kernel(launch, rerun) for launch, rerun in zip(program.launches, reruns))

    def __call__(self, inputs: list[Any]) -> Any:
        from outcore.compiled import inductor

        begins_steps = not (self._facts.is_backward or self._facts.is_inference)
        first = self._own_inputs(inputs) if begins_steps and _sessions else None
        session = _sessions[0](first) if _sessions else None
        opened = self._facts.is_backward and _replace_tokens(inputs)
        if self._functions is None or not (session or opened) or not inductor.align(self._facts, inputs):
            inputs[:] = [item.open() if type(item) is _Saved else item for item in inputs]
            assert self._as_compiled is not None
            return self._as_compiled(inputs)
        if session is None:
            return self._functions.call(inputs, _Run(self, None, None), ())
        with below_everything():
            launches = session.enter_graph(self.kernels)
            return self._functions.call(inputs, _Run(self, session, launches), launches.busy)

    def _own_inputs(self, inputs: Sequence[Any]) -> list[Any]:
        """Returns the inputs without parameters and buffers."""

        return [inputs[place] for place in self._own_places]


def _replace_tokens(inputs: list[Any]) -> bool:
    found = False
    for place, item in enumerate(inputs):
        if isinstance(item, torch.Tensor) and (saved := token_of(item)) is not None:
            inputs[place], found = saved, True
    return found


def _kernel(launch: Launch, rerun: Rerun | None) -> Kernel:
    from outcore.compiled import inductor

    return Kernel(
        number=launch.number,
        name=launch.name,
        is_generated=launch.is_kernel,
        is_pure=launch.is_pure,
        is_product=launch.is_product,
        overwrites=tuple(launch.reads.index(buffer) for buffer in launch.overwrites),
        operator=inductor.operator_of(launch.operator) if launch.operator else None,
        rerun=rerun,
    )
