"""Attention of a token's query heads: chains submitted to every device, results collected and merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import numpy as np

from plora.hw.defs.descriptor import DType
from plora.hw.defs.registers import RESET_CHAIN_LIMIT
from plora.sim.golden.bf16 import to_float
from plora.sw.attention.layout import KvLayout, array_type
from plora.sw.attention.merge import Float64, Partial, merge
from plora.sw.attention.plan import AttentionChain, AttentionStep, joined, plan_attention
from plora.sw.matrix import Values, slots_of
from plora.sw.queue_pair import Request, Ticket
from plora.sw.scaling import AttentionScaling
from plora.sw.session import Session


@dataclass(frozen=True)
class HeadPlace:
    """Where the tokens of one KV head lie on one device."""

    session: Session
    layout: KvLayout
    tiles: tuple[int, ...]
    """DPA of its tiles."""
    tokens: int


@dataclass(frozen=True)
class DevicePart:
    """What one planned chain of a device gave: attention of some query rows over some of the device's tokens."""

    device: int
    head: int
    """KV head."""
    chain: AttentionChain
    o: Values
    """(rows, head_dim) as the device wrote it."""
    partial: Partial


@dataclass(frozen=True)
class Attended:
    """Attention of all heads of a layer, and what it took."""

    output: Float64
    """(heads, head_dim), the query heads in their order."""
    parts: tuple[DevicePart, ...]
    descriptors: int
    cycles: tuple[int, ...]
    """Of each device: core cycles from first to last beat, summed over its descriptors."""
    numeric: int
    """Numeric flags of all completions together."""


@dataclass(frozen=True)
class _Submitted:
    """A chain under way."""

    device: int
    head: int
    session: Session
    chain: AttentionChain
    tickets: tuple[Ticket, ...]
    dtype: DType

    def collect(self, head_dim: int) -> DevicePart:
        """Wait for the chain."""
        o: Values = np.empty((len(self.chain.rows), head_dim), array_type(self.dtype))
        for step, ticket in zip(self.chain.steps, self.tickets, strict=True):
            self.session.queue.wait_for(ticket)
            if step.dims is not None:
                assert ticket.result is not None, "a completed descriptor without keep and acc_out has a result"
                o[:, step.dims.start : step.dims.stop] = ticket.result.view(o.dtype)
        anchors = self.tickets[-1].anchors
        assert anchors is not None, "the last descriptor of a chain is a transposed one"
        numbers = to_float(o) if self.dtype == DType.BF16 else o
        return DevicePart(self.device, self.head, self.chain, o, Partial.from_device(numbers, anchors))


@dataclass(frozen=True)
class Attending:
    """Attention that was submitted. Made by `begin`."""

    devices: int
    kv_heads: int
    group: int
    """Query heads of a KV head."""
    head_dim: int
    submitted: tuple[_Submitted, ...]

    def finish(self, others: Sequence[Sequence[Partial]] = ()) -> Attended:
        """Wait for the devices and merge what they say.

        Parameters:
            others: partial results over tokens elsewhere (on the GPU), a sequence for each KV head.

        Raises:
            DeviceError: a device failed. What else is under way goes on; its results are not waited for.
        """
        parts = tuple(chain.collect(self.head_dim) for chain in self.submitted)
        outputs = []
        for head in range(self.kv_heads):
            mine = [part.partial.placed(part.chain.rows, self.group) for part in parts if part.head == head]
            outside = list(others[head]) if others else []
            outputs.append(merge([*mine, *outside, Partial.none(self.group, self.head_dim)]))
        done = [
            (chain.device, ticket.completion)
            for chain in self.submitted
            for ticket in chain.tickets
            if ticket.completion is not None
        ]
        return Attended(
            output=np.concatenate(outputs),
            parts=parts,
            descriptors=len(done),
            cycles=tuple(sum(c.cycles for at, c in done if at == device) for device in range(self.devices)),
            numeric=reduce(or_, (completion.numeric for _, completion in done), 0),
        )


@dataclass(frozen=True)
class Queries:
    """What is asked of the devices."""

    q: Values
    """(heads, head_dim)."""
    dtype: DType
    """Of keys and values."""
    scaling: AttentionScaling
    """Of FP16 and integers the softmax scale alone counts."""

    def request(self, step: AttentionStep, rows: Values) -> Request:
        """The request of one step of a chain for these rows of q."""
        return Request(
            step.descriptor,
            rows if step.takes_queries else None,
            self.scaling.scale,
            self.scaling.values if step.descriptor.transpose else self.scaling.scores,
        )


def begin(places: Sequence[Sequence[HeadPlace]], asked: Queries) -> Attending:
    """Submit attention to every device: one `HeadPlace` for each device and KV head.

    Raises:
        DeviceError: a device failed.
    """
    kv_heads = len(places[0])
    group = len(asked.q) // kv_heads
    submitted = [chain for device, heads in enumerate(places) for chain in _submit(device, heads, asked)]
    return Attending(len(places), kv_heads, group, asked.q.shape[1], tuple(submitted))


def _submit(device: int, heads: Sequence[HeadPlace], asked: Queries) -> list[_Submitted]:
    group, session = len(asked.q) // len(heads), heads[0].session
    planned = [
        (head, chain)
        for head, place in enumerate(heads)
        for chain in plan_attention(place.layout, place.tiles, place.tokens, group, slots_of(session.queue))
    ]
    if not planned:
        return []
    rows = [asked.q[head * group :][chain.rows.start : chain.rows.stop] for head, chain in planned]
    # A chain is published as a whole: of half the ring, so that the next one is there when it ends.
    longest = min(session.queue.place.depth // 2, RESET_CHAIN_LIMIT)
    steps = [step for chain in joined([chain for _, chain in planned], longest) for step in chain]
    requests = [asked.request(step, np.ascontiguousarray(rows[number])) for number, step in steps]
    tickets: list[list[Ticket]] = [[] for _ in planned]
    for (number, _), ticket in zip(steps, session.queue.submit(requests), strict=True):
        tickets[number].append(ticket)
    return [
        _Submitted(device, head, session, chain, tuple(own), asked.dtype)
        for (head, chain), own in zip(planned, tickets, strict=True)
    ]
