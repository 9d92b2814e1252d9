"""The queue engine in time: which of its small jobs it does when, for descriptors that wait in rings."""

from __future__ import annotations

from collections import deque
from math import floor, inf
from typing import Any

from plora.hw.defs.config import NdpConfig
from plora.hw.defs.registers import RESET_CHAIN_TIMEOUT, RESET_POLL_INTERVAL
from plora.sim.core.constants import CoreConstants
from plora.sim.core.demand import Demand
from plora.sim.core.memory import Channels
from plora.sim.core.pipeline import CorePipeline


class Posted:
    """A descriptor in a submission slot, and what becomes of it. Times are `math.inf` until they are known."""

    __slots__ = ("chain", "completed", "cycles", "demand", "fetched", "published", "ring", "tag")

    def __init__(self, demand: Demand | None, *, chain: bool, published: float, tag: Any = None) -> None:
        self.demand = demand
        """None: it will be refused."""
        self.chain = chain
        self.published = published
        """Cycle from which it is in memory."""
        self.tag = tag
        self.ring: Ring | None = None
        self.fetched = inf
        """Cycle in which the core took it."""
        self.cycles = 0.0
        """First to last beat."""
        self.completed = inf
        """Cycle in which its completion line is in memory."""


class Ring:
    """A queue: its rings, and where it stands.

    Parameters:
        index: its number.
        depth: slots.
        submission_line, result_line: first line (DPA / 64) of slot 0.
        submission_lines, result_lines: lines of a slot.
        interrupts: completions are to be signalled.
    """

    __slots__ = (
        "backoff",
        "depth",
        "done",
        "flights",
        "head",
        "index",
        "interrupts",
        "look",
        "next_count",
        "poll",
        "posted",
        "published",
        "result_line",
        "result_lines",
        "runs",
        "submission_line",
        "submission_lines",
        "tail",
    )

    def __init__(
        self,
        index: int,
        depth: int,
        *,
        submission_line: int,
        submission_lines: int,
        result_line: int,
        result_lines: int,
        interrupts: bool = False,
    ) -> None:
        self.index = index
        self.depth = depth
        self.submission_line, self.submission_lines = submission_line, submission_lines
        self.result_line, self.result_lines = result_line, result_lines
        self.interrupts = interrupts
        self.posted: dict[int, Posted] = {}
        """Descriptors published and not handed over, by their count since enabling."""
        self.published = 0
        self.next_count = 0
        """Number of the slot to be read next."""
        self.flights = 0
        """Reads on their way that matter."""
        self.done = 0
        """Completion lines sent."""
        self.tail = 0
        """Completion lines acknowledged."""
        self.head = 0
        """Completions that the host has taken."""
        self.look = True
        self.runs = False
        self.backoff = 0
        self.poll = inf
        """Cycle in which the poll clock next wants a look."""


class _Flight:
    __slots__ = ("arrived", "count", "dead", "probe", "ring", "sampled")

    def __init__(self, ring: Ring, count: int, sampled: float, arrived: float, probe: bool) -> None:
        self.ring = ring
        self.count = count
        self.sampled = sampled
        """Cycle in which memory looked at the slot."""
        self.arrived = arrived
        self.probe = probe
        self.dead = False


class QueueEngine:
    """Finds descriptors in rings, feeds the core, and completes them, one small job after the other.

    `plora.hw.rtl.front.queue_engine.QueueEngine` says what the jobs are and which goes first; here each is one
    step, however long the engine waited for it. Usage: `publish`, `ring_doorbell` and `take` in the order of
    their cycles and not later than the cycle they speak of; `advance` to follow everything up to a cycle.
    """

    def __init__(
        self,
        config: NdpConfig,
        channels: Channels,
        core: CorePipeline,
        constants: CoreConstants,
        *,
        poll_interval_cycles: float = RESET_POLL_INTERVAL,
        chain_timeout_cycles: float = RESET_CHAIN_TIMEOUT,
    ) -> None:
        self._c = constants
        self._channels = channels
        self._core = core
        self._count = config.channels
        self.poll_interval_cycles = poll_interval_cycles
        self.chain_timeout_cycles = chain_timeout_cycles
        self.rings: dict[int, Ring] = {}
        self.completions: list[Posted] = []
        """What was completed since the caller emptied the list, in order."""
        self.interrupts: list[tuple[float, int]] = []
        """Cycle and queue of interrupts, likewise."""
        self._cycle = 0.0
        """First cycle in which the engine may choose its next job."""
        self._doorbells: deque[tuple[float, Ring]] = deque()
        self._heads: deque[tuple[float, Ring, int]] = deque()
        self._flights: deque[_Flight] = deque()
        self._request_free = self._line_free = self._interrupt_free = 0.0
        self._offered: tuple[float, Posted] | None = None
        self._fetched_free = 0.0
        self._writes: deque[tuple[float, Ring]] = deque()
        self._last_issue = self._last_interrupt = -1
        self._signals: set[int] = set()
        self._chain: Ring | None = None
        self._chain_expiry = inf
        self._poll = inf

    # --- the host's side --------------------------------------------------------------------

    def enable(self, ring: Ring, cycle: float) -> None:
        """Enable a queue, so that the engine looks at its first slot from ``cycle`` on."""
        self.rings[ring.index] = ring
        ring.look = False
        self._doorbells.append((cycle, ring))

    def publish(self, queue: int, posted: Posted) -> None:
        """Put a descriptor into the next slot of ``queue``; ``posted.published`` says from when it is in memory."""
        ring = self.rings[queue]
        posted.ring = ring
        ring.posted[ring.published] = posted
        ring.published += 1

    def ring_doorbell(self, queue: int, cycle: float) -> None:
        """A doorbell takes effect in ``cycle``."""
        self._doorbells.append((cycle, self.rings[queue]))

    def take(self, queue: int, head: int, cycle: float) -> None:
        """The host says that it has taken ``head`` completions in all; the command is at the engine in ``cycle``."""
        self._heads.append((cycle, self.rings[queue], head))

    # --- the walk ---------------------------------------------------------------------------

    def advance(self, present: float) -> float:
        """Follow every job chosen up to cycle ``present``; return the cycle of the next thing known to happen."""
        c, core = self._c, self._core
        while self._cycle <= present:
            cycle = self._cycle
            burst = core.advance(cycle)
            if self._offered is not None:
                self._hand_over()
            if self._doorbells:
                self._hear(cycle)
            if self._poll <= cycle:
                self._tick(cycle)
            oldest = core.oldest()
            completed = inf if oldest is None else oldest.completed
            if self._writes and self._writes[0][0] <= cycle:
                self._retire()
            elif completed <= cycle and self._line_free <= cycle and len(self._writes) < c.completion_writes:
                self._complete(cycle)
            elif self._heads and self._heads[0][0] <= cycle:
                self._command()
            elif self._flights and self._flights[0].arrived <= cycle and self._fetched_free <= cycle:
                self._inspect(cycle)
            elif self._signals and self._interrupt_free <= cycle:
                self._signal(cycle)
            elif (
                self._request_free <= cycle
                and len(self._flights) < c.slot_reads
                and (ring := self._next_to_issue(cycle)) is not None
            ):
                self._issue(ring, cycle)
            else:
                following = min(burst, self._next_event(cycle, completed))
                if following > present or following == inf:
                    return following  # the engine still chooses in every cycle: something earlier may come
                self._cycle = following
                continue
            self._cycle = cycle + c.engine_job
        return self._cycle

    def _next_event(self, cycle: float, completed: float) -> float:
        """First cycle after ``cycle`` in which there can be something to do, as far as is known."""
        following = self._poll
        if self._doorbells:
            following = min(following, self._doorbells[0][0])
        if self._writes:
            following = min(following, self._writes[0][0])
        if len(self._writes) < self._c.completion_writes:
            following = min(following, max(completed, self._line_free))
        if self._heads:
            following = min(following, self._heads[0][0])
        if self._flights:
            following = min(following, max(self._flights[0].arrived, self._fetched_free))
        if self._signals:
            following = min(following, self._interrupt_free)
        if self._request_free > cycle:
            following = min(following, self._request_free)
        if self._chain is not None and self._chain_expiry > cycle:
            following = min(following, self._chain_expiry)
        return following

    def _hear(self, cycle: float) -> None:
        """Note the doorbells rung up to ``cycle``."""
        while self._doorbells and self._doorbells[0][0] <= cycle:
            ring = self._doorbells.popleft()[1]
            ring.look = True
            self._back_off(ring, 0, cycle)

    def _back_off(self, ring: Ring, backoff: int, cycle: float) -> None:
        """Look at the ring every ``2**backoff`` poll intervals from now on."""
        ring.backoff = backoff
        interval = self.poll_interval_cycles
        if interval == inf:
            return
        turn = floor(cycle / interval)  # the tick at (turn + 1) * interval is the next
        ring.poll = (turn + 1 + -(turn + ring.index) % (1 << backoff)) * interval
        self._poll = min(self._poll, ring.poll)

    def _tick(self, cycle: float) -> None:
        for ring in self.rings.values():
            if ring.poll <= cycle:
                ring.look = True
                self._back_off(ring, ring.backoff, cycle)
        self._poll = min(ring.poll for ring in self.rings.values())

    # --- jobs -------------------------------------------------------------------------------

    def _retire(self) -> None:
        cycle, ring = self._writes.popleft()
        ring.tail += 1
        self._back_off(ring, 0, cycle)
        if ring.interrupts:
            self._signals.add(ring.index)

    def _complete(self, cycle: float) -> None:
        c = self._c
        job = self._core.take(cycle + c.engine_job - 1)
        posted: Posted = job.tag
        ring = posted.ring
        assert ring is not None
        line = ring.result_line + ring.done % ring.depth * ring.result_lines
        ring.done += 1
        taken, stored = self._channels.write_line(line % self._count, cycle + c.engine_job)
        self._line_free = taken + 1
        self._writes.append((stored + c.write_return + c.acknowledged, ring))
        posted.cycles = job.last_beat - job.first_beat + 1 if job.demand is not None else 0
        posted.completed = stored
        self.completions.append(posted)

    def _command(self) -> None:
        _, ring, head = self._heads.popleft()
        ring.head = head
        ring.look = True

    def _signal(self, cycle: float) -> None:
        chosen = self._turn(self._signals, self._last_interrupt)
        self._last_interrupt = chosen
        self._signals.discard(chosen)
        sent = cycle + self._c.engine_job + self._channels.one
        self._interrupt_free = sent + 1
        self.interrupts.append((sent, chosen))

    def _turn(self, wanting: set[int], last: int) -> int:
        """Round robin: the lowest above the one chosen last, or the lowest."""
        return min((index for index in wanting if index > last), default=min(wanting))

    def _next_to_issue(self, cycle: float) -> Ring | None:
        """The queue whose next slot is to be read, if there is one."""
        chain = self._chain
        if chain is not None:
            wants = chain.runs or ((chain.look or self._chain_expiry <= cycle) and not chain.flights)
            return chain if wants else None
        wanting = {r.index for r in self.rings.values() if r.runs or (r.look and not r.flights)}
        return self.rings[self._turn(wanting, self._last_issue)] if wanting else None

    def _issue(self, ring: Ring, cycle: float) -> None:
        c = self._c
        self._last_issue = ring.index
        self._hear(cycle + c.engine_job - 1)
        if not ring.flights:
            ring.look = False
        probe = ring is self._chain and self._chain_expiry <= cycle
        if ring.next_count - ring.head >= ring.depth:
            ring.runs = False
            if probe:
                self._chain, self._chain_expiry = None, inf
            return
        request = cycle + c.engine_job
        self._core.advance(request)
        line = ring.submission_line + ring.next_count % ring.depth * ring.submission_lines
        arrived = self._channels.read_line(line % self._count, request)
        self._flights.append(_Flight(ring, ring.next_count, arrived - c.read_return, arrived + c.slot_arrived, probe))
        ring.next_count += 1
        ring.flights += 1
        self._request_free = request + self._channels.one + 1

    def _go_back(self, flight: _Flight) -> None:
        """Let the next slot be that of ``flight`` again, and disown the later reads of its queue."""
        flight.ring.next_count = flight.count
        flight.ring.flights = 0
        for other in self._flights:
            if other.ring is flight.ring:
                other.dead = True

    def _inspect(self, cycle: float) -> None:
        flight = self._flights.popleft()
        if flight.dead:
            return
        ring = flight.ring
        ring.flights -= 1
        posted = ring.posted.get(flight.count)
        if self._chain is not None and self._chain is not ring:
            self._go_back(flight)
            ring.look = True
        elif posted is None or posted.published > flight.sampled:
            self._go_back(flight)
            ring.runs = False
            if self._chain is ring:
                if flight.probe:
                    self._chain, self._chain_expiry = None, inf
            elif ring.backoff < self._c.backoff_log2:
                self._back_off(ring, ring.backoff + 1, cycle)
        else:
            del ring.posted[flight.count]
            ring.runs = True
            self._back_off(ring, 0, cycle)
            self._chain, self._chain_expiry = (ring, inf) if posted.chain else (None, inf)
            self._offered = cycle + self._c.engine_job, posted
            self._fetched_free = inf

    def _hand_over(self) -> None:
        """Give the core the descriptor that is on offer, once it is known when there is room."""
        assert self._offered is not None
        offer, posted = self._offered
        cycle = max(offer, self._core.room_cycle())
        if cycle == inf:
            return
        posted.fetched = cycle
        self._core.accept(cycle, posted.demand, posted)
        self._fetched_free = cycle + 1
        self._offered = None
        if self._chain is not None:
            self._chain_expiry = cycle + self.chain_timeout_cycles
