"""A recorded step -> the same step, whose ops may use memory that its plan leaves free for a moment."""

from __future__ import annotations

from dataclasses import replace

from outcore.values import Trace


def less_workspace(trace: Trace, num_bytes: int) -> Trace:
    """The step with so many bytes less in the workspace of each op, as far as it has one."""
    ops = tuple(
        replace(op, workspace_bytes=max(0, op.workspace_bytes - num_bytes)) if op.workspace_bytes else op
        for op in trace.ops
    )
    return replace(trace, ops=ops)
