"""Sums vectors of all members as int8 or fp8 codes with error feedback, in a quarter of the bytes.

A block of 256 elements is sent as 8-bit codes and one float32 scale: the largest magnitude of the block maps to the
largest code. Rounding errors are kept and added to the next message (error feedback: Seide et al. 2014; Karimireddy et
al., arXiv 1901.09847), so nothing is lost over many exchanges. The sum is computed and rounded in both directions as in
DoubleSqueeze (Tang et al., arXiv 1905.05957), with a share of the vector at each member instead of one server:

    member i sends      q_ij = Q(d_i + e_i)            on share j, to its owner j, and keeps e_i <- d_i + e_i - q_ij;
    owner j adds up     y_j = d_j + e_j + sum_i q_ij   (its own part is exact), sends Q(y_j) to all,
                        and keeps e_j <- y_j - Q(y_j).

A member's own share and the others' do not overlap, so one vector e holds both errors. All members decode the same
codes and thus have the same bits. The traffic is 2 (P - 1) / P of the vector, with 1.016 bytes per element.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from outcore.elastic.wire import Group

BLOCK = 256  # elements that share a scale; scales are 1.6 % of the traffic
_PIECE = 127 * BLOCK  # elements coded at a time; below torch's threshold for threads
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the largest magnitude of a code


def num_code_bytes(num_elements: int) -> int:
    """Returns the bytes of the codes and scales of `num_elements`."""
    return num_elements + 4 * -(-num_elements // BLOCK)


def encode(vector: Tensor, out: Tensor, dtype: torch.dtype) -> None:
    """Writes the scales of all blocks, then the codes of all elements, to `out`."""
    num = vector.numel()
    scales, codes = out[: num_code_bytes(num) - num].view(torch.float32), out[num_code_bytes(num) - num :].view(dtype)
    for first in range(0, num, _PIECE):
        piece = vector[first : first + _PIECE]
        blocks = torch.nn.functional.pad(piece.float(), (0, -piece.numel() % BLOCK)).view(-1, BLOCK)
        scale = blocks.abs().amax(1) / LARGEST[dtype]
        scales[first // BLOCK :][: len(scale)] = scale
        scaled = (blocks / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).view(-1)[: piece.numel()]
        codes[first : first + piece.numel()] = (scaled.round_() if dtype == torch.int8 else scaled).to(dtype)


def decode(source: Tensor, out: Tensor, dtype: torch.dtype) -> None:
    """Decodes codes of `encode` into `out`, whose size gives the number of elements."""
    num = out.numel()
    scales, codes = source[: num_code_bytes(num) - num].view(torch.float32), source[num_code_bytes(num) - num :]
    codes = codes.view(dtype)
    for first in range(0, num, _PIECE):
        last = min(first + _PIECE, num)
        blocks = torch.nn.functional.pad(codes[first:last].float(), (0, -(last - first) % BLOCK)).view(-1, BLOCK)
        blocks.mul_(scales[first // BLOCK :][: len(blocks), None])
        out[first:last] = blocks.view(-1)[: last - first]


def compressed_sum(group: Group, vector: Tensor, error: Tensor, dtype: torch.dtype) -> None:
    """Replaces every member's `vector` by the sum over members, rounded to `dtype`; updates `error`."""
    shares = _shares(vector.numel(), group.size)
    vector.add_(error)
    mine, others = shares[group.index], [index for index in range(group.size) if index != group.index]
    senders, owners = _unless_empty(mine, others), [index for index in others if _unless_empty(shares[index], others)]
    sent = {index: _room(group, shares[index], f"code to {index}") for index in owners}
    received = {index: _room(group, mine, f"code of {index}") for index in senders}
    posted = [(index, work) for index in senders for work in group.post_receive(received[index], index)]
    for index in owners:
        encode(vector[shares[index]], sent[index], dtype)
        decode(sent[index], error[shares[index]], dtype)
        torch.sub(vector[shares[index]], error[shares[index]], out=error[shares[index]])
        posted += [(index, work) for work in group.post_send(sent[index], index)]
    for index, work in posted:
        group.wait(work, index)
    part = torch.empty_like(vector[mine])
    for index in senders:  # in the order of ranks; the owner alone adds its share up
        decode(received[index], part, dtype)
        vector[mine].add_(part)
    _share_sum(group, vector, error, shares, dtype)


def _share_sum(group: Group, vector: Tensor, error: Tensor, shares: list[slice], dtype: torch.dtype) -> None:
    """Sends every member's rounded share of the sum to all."""
    mine, others = shares[group.index], [index for index in range(group.size) if index != group.index]
    readers, owners = _unless_empty(mine, others), [index for index in others if _unless_empty(shares[index], others)]
    code = _room(group, mine, "code of the sum")
    encode(vector[mine], code, dtype)
    error[mine].copy_(vector[mine])
    decode(code, vector[mine], dtype)
    error[mine].sub_(vector[mine])
    received = {index: _room(group, shares[index], f"sum of {index}") for index in owners}
    posted = [(index, work) for index in owners for work in group.post_receive(received[index], index)]
    posted += [(index, work) for index in readers for work in group.post_send(code, index)]
    for index, work in posted:
        group.wait(work, index)
    for index in owners:
        decode(received[index], vector[shares[index]], dtype)


def _shares(num_elements: int, num_members: int) -> list[slice]:
    """Returns a share of whole blocks for every member; with few blocks some shares are empty."""
    num_blocks = -(-num_elements // BLOCK)
    edges = [min(num_elements, BLOCK * (num_blocks * index // num_members)) for index in range(num_members + 1)]
    edges[-1] = num_elements
    return [slice(first, last) for first, last in pairwise(edges)]


def _unless_empty(share: slice, members: list[int]) -> list[int]:
    return members if share.stop > share.start else []


def _room(group: Group, share: slice, name: str) -> Tensor:
    return group.spare(num_code_bytes(share.stop - share.start), torch.uint8, name)
