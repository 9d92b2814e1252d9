"""How the host's lines reach the device: over the test bench's bus, or over a link that others share."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from plora.hw.defs.config import NdpConfig
from plora.hw.defs.errors import UserError
from plora.hw.defs.queue import LINE_BYTES
from plora.sim.core.constants import load_constants
from plora.sim.hardware.link import Link, one_way_ns, wire_bytes
from plora.sim.hardware.link import Protocol as WireProtocol


class HostPath(Protocol):
    """The way of single lines between host and device. Cycles are those of the device's clock."""

    def depart(self, cycle: float, *, store: bool) -> float:
        """Cycle in which a load or store begins that the host has ready in ``cycle``: credits and order allow it."""
        ...

    def reach(self, departed: float, *, store: bool) -> float:
        """Cycle in which the line is at its memory channel."""
        ...

    def answer(self, at_memory: float, *, store: bool) -> float:
        """Cycle in which the host has the answer to a line that memory was done with in ``at_memory``."""
        ...


class BusPath:
    """The RTL's test bench: one line a cycle in each direction, so many under way at a time."""

    def __init__(self) -> None:
        c = load_constants()
        self._c = c
        self._last = {True: -1.0, False: -1.0}
        self._answers: dict[bool, deque[float]] = {
            True: deque(maxlen=c.host_lines),
            False: deque(maxlen=c.host_lines),
        }

    def depart(self, cycle: float, *, store: bool) -> float:
        """See `HostPath`."""
        answers = self._answers[store]
        waited = answers[0] if len(answers) == self._c.host_lines else 0.0
        self._last[store] = max(cycle, self._last[store] + 1, waited)
        return self._last[store]

    def reach(self, departed: float, *, store: bool) -> float:
        """See `HostPath`."""
        return departed + self._c.host_request

    def answer(self, at_memory: float, *, store: bool) -> float:
        """See `HostPath`. A store is acknowledged on the channel's bus a cycle after it is in memory."""
        back = at_memory + self._c.host_return + (self._c.write_return if store else 0)
        self._answers[store].append(back)
        return back


class LinkPort:
    """One port of a link: messages of a line each, in the order in which they are sent, each direction for itself.

    A message occupies its direction for the bytes that it puts on the wire, protocol included, and arrives a
    latency later. A store carries its line down and a completion up, a load a request down and its line up. At
    most ``credits`` loads and as many stores have no answer yet: then the host waits, which is the link's
    back-pressure. Several devices and hosts may share one port: they take turns as they come.

    Parameters:
        link: rate, latency and flit format.
        config: the device whose clock counts.
        protocol: ``flit``, or ``none`` to charge payload only.
        credits: messages of each kind without an answer.

    Raises:
        UserError: ``credits`` is not positive.
    """

    def __init__(self, link: Link, config: NdpConfig, *, protocol: WireProtocol = "flit", credits: int = 256) -> None:
        if credits < 1:
            raise UserError(f"link {link.name}: {credits} credits; give at least 1")
        self.link = link
        clock_ghz = config.clock_mhz / 1000
        # What a line costs in a long run of its kind: flits are filled by several lines.
        many = 1000
        store = wire_bytes(link, write_bytes=many * LINE_BYTES, protocol=protocol)
        load = wire_bytes(link, read_bytes=many * LINE_BYTES, protocol=protocol)
        cycles_per_byte = clock_ghz / link.gb_per_s
        self._down = {True: store.down / many * cycles_per_byte, False: load.down / many * cycles_per_byte}
        self._up = {True: store.up / many * cycles_per_byte, False: load.up / many * cycles_per_byte}
        self._latency = one_way_ns(link) * clock_ghz
        self._full_duplex = link.full_duplex
        self._down_free = self._up_free = 0.0
        self._credits = credits
        self._answers: dict[bool, deque[float]] = {True: deque(maxlen=credits), False: deque(maxlen=credits)}
        self.down_busy_cycles = self.up_busy_cycles = 0.0
        """Cycles for which a direction was occupied."""

    def depart(self, cycle: float, *, store: bool) -> float:
        """See `HostPath`."""
        answers = self._answers[store]
        waited = answers[0] if len(answers) == self._credits else 0.0
        start = max(cycle, waited, self._down_free)
        self._down_free = start + self._down[store]
        if not self._full_duplex:
            self._up_free = max(self._up_free, self._down_free)
        self.down_busy_cycles += self._down[store]
        return start

    def reach(self, departed: float, *, store: bool) -> float:
        """See `HostPath`."""
        return departed + self._down[store] + self._latency

    def answer(self, at_memory: float, *, store: bool) -> float:
        """See `HostPath`."""
        start = max(at_memory, self._up_free)
        self._up_free = start + self._up[store]
        if not self._full_duplex:
            self._down_free = max(self._down_free, self._up_free)
        self.up_busy_cycles += self._up[store]
        back = self._up_free + self._latency
        self._answers[store].append(back)
        return back


__all__ = ["BusPath", "HostPath", "LinkPort"]
