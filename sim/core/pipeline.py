"""The NDP core, descriptor by descriptor and burst by burst.

Times are cycles in which something happens, as an observer of the RTL's signals counts them. Nothing here
walks through cycles: between two decisions of the core everything follows from when its inputs were there.
The two decisions are which burst goes next, an operand's or a device operand's, and with that the order in
which memory delivers. Bursts are therefore handled in the order of time, all else as soon as it is known.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Any

from plora.hw.defs.config import NdpConfig
from plora.sim.core.constants import CoreConstants
from plora.sim.core.demand import TO_ACCUMULATORS, TO_MEMORY, Demand
from plora.sim.core.memory import Channels


class Job:
    """A descriptor in the core, and when it got where. A time is `math.inf` until it is known."""

    __slots__ = (
        "accepted",
        "arrived",
        "collected",
        "completed",
        "demand",
        "done",
        "emptied",
        "first_beat",
        "given",
        "granted",
        "last_beat",
        "left",
        "number",
        "pieces",
        "tag",
    )

    def __init__(self, number: int, demand: Demand | None, tag: Any) -> None:
        self.number = number
        self.demand = demand
        """None: refused, there is no work."""
        self.tag = tag
        self.accepted = inf
        """Taken by the instruction buffer."""
        self.given = inf
        """Left the decoder."""
        self.arrived = inf
        """The operand counts as arrived."""
        self.granted = inf
        self.first_beat = inf
        self.last_beat = inf
        self.collected = inf
        """The last result is in the output buffer."""
        self.emptied = inf
        """The last result line has left the output buffer."""
        self.completed = inf
        """Offered to the queue engine as completed."""
        self.done = inf
        """The queue engine has taken it."""
        self.left = 0
        """Stripes that the array has not seen yet."""
        self.pieces: deque[tuple[float, float, int]] = deque()
        """Stripes that have arrived: cycles in which the first and last count, and their number."""


class CorePipeline:
    """The core between the queue engine's ``fetched`` and ``completed`` ports.

    Usage: `accept` descriptors in order, `advance` to the present, look at `completed`, and say when one was
    taken with `take`. All times given must be known to the present.
    """

    def __init__(self, config: NdpConfig, channels: Channels, constants: CoreConstants) -> None:
        self._c = constants
        self._channels = channels
        self._count = config.channels
        self._depth = config.instruction_buffer_depth
        self._buffer = config.dram_buffer_stripes
        self._longest = min(constants.page_words, config.dram_buffer_stripes // constants.burst_share)
        self._jobs: dict[int, Job] = {}
        """Every descriptor that is not done, and as many before it as later ones look back to."""
        self._accepted = self._given = self._retired = 0
        """Descriptors accepted, given by the decoder, and completed so far."""
        self._work: dict[int, Job] = {}
        """Jobs with work, by their own count; kept like ``_jobs``."""
        self._work_given = self._work_ended = 0
        self._decoder_free = 0.0
        # Reads.
        self._operands: deque[list[float]] = deque()
        self._operand_idle = 0.0
        self._operand_job: Job | None = None
        self._operand_left = self._operand_address = 0
        self._operand_offer = inf
        self._weight_job: Job | None = None
        self._weights_taken = 0
        self._weight_idle = 0.0
        self._weight_left = self._weight_address = self._group = self._group_left = 0
        self._weight_offer = inf
        self._asked = 0
        self._broadcast_free = 0.0
        self._burst_ends: deque[float] = deque(maxlen=constants.bursts_in_flight)
        self._requests: deque[float] = deque(maxlen=constants.request_queue)
        # Stripes freed: position after the run, its last cycle, and how it was freed.
        self._freed: deque[tuple[int, float, int, float]] = deque()
        self._freed_count = 0
        # Input buffer: space given away, and returns to come.
        self._space = 2 * config.input_half_stripes
        self._returns: deque[tuple[float, int]] = deque()
        self._resident = 0
        # Array.
        self._issue = self._move = self._array = self._merge_free = -1.0
        # Results.
        self._collected = -1.0
        self._memory_jobs: deque[Job] = deque(maxlen=2)
        self._consumed = 0
        self._retire_free = 0.0

    # --- in and out -------------------------------------------------------------------------

    def room_cycle(self) -> float:
        """Cycle from which the instruction buffer takes another descriptor, or infinity while that is not known."""
        if self._accepted < self._depth:
            return 0.0
        return self._jobs[self._accepted - self._depth].given + 1.0

    def accept(self, cycle: float, demand: Demand | None, tag: Any = None) -> Job:
        """Give the core a descriptor in ``cycle``, not before `room_cycle`; ``demand`` is None if it is refused."""
        job = Job(self._accepted, demand, tag)
        job.accepted = cycle
        self._jobs[job.number] = job
        self._accepted += 1
        return job

    def oldest(self) -> Job | None:
        """The descriptor that completes next; None if the core is empty."""
        return self._jobs.get(self._retired) if self._retired < self._accepted else None

    def take(self, cycle: float) -> Job:
        """The queue engine takes the completion of the oldest descriptor in ``cycle``."""
        job = self._jobs[self._retired]
        job.done = cycle
        self._retired += 1
        self._retire_free = cycle + self._c.retire
        self._jobs.pop(self._retired - 1 - 2 * max(self._depth, self._c.records), None)
        return job

    # --- the walk ---------------------------------------------------------------------------

    def advance(self, present: float) -> float:
        """Follow everything that is decided up to cycle ``present``; return the cycle of the next decision known."""
        while True:
            self._decode()
            self._begin_weights()
            self._consume()
            self._retire()
            operand = max(self._operand_offer, self._broadcast_free)
            weight = max(self._weight_offer, self._room(), self._broadcast_free)
            if operand <= weight:
                if operand > present or operand == inf:
                    return operand
                self._send_operand(operand)
            else:
                if weight > present or weight == inf:
                    return weight
                self._send_weight(weight)

    def _decode(self) -> None:
        """Let the decoder give what it can."""
        c = self._c
        while self._given < self._accepted:
            job = self._jobs[self._given]
            demand = job.demand
            cycle = max(job.accepted + c.instruction_buffer, self._decoder_free) + c.decode
            if self._given >= c.records:
                cycle = max(cycle, self._jobs[self._given - c.records].done + 1)
            if demand is not None:
                if self._work_given >= c.job_slots:
                    cycle = max(cycle, self._work[self._work_given - c.job_slots].last_beat + 1)
                if demand.load:
                    if self._operand_job is not None:
                        return
                    cycle = max(cycle, self._operand_idle, self._space_cycle(demand.operand_space))
            if cycle == inf:
                return
            job.given = cycle
            self._decoder_free = cycle + 1
            self._given += 1
            if demand is None:
                continue
            self._work[self._work_given] = job
            self._work_given += 1
            job.left = demand.stripes
            if demand.load:
                self._take_space(demand.operand_space, cycle)
                self._operand_job = job
                self._operand_left = demand.operand_stripes
                self._operand_address = demand.operand_stripe
                self._operand_offer = cycle + c.burst_cut

    def _space_cycle(self, wanted: int) -> float:
        """First cycle in which the input buffer has ``wanted`` stripes free, as far as is known."""
        if wanted <= self._space:
            return 0.0
        free = self._space
        for cycle, amount in self._returns:
            free += amount
            if wanted <= free:
                return cycle
        return inf

    def _take_space(self, wanted: int, cycle: float) -> None:
        while self._returns and self._returns[0][0] <= cycle:
            self._space += self._returns.popleft()[1]
        self._space -= wanted

    def _begin_weights(self) -> None:
        """Hand the next job's device operand to the weight reader."""
        c = self._c
        if self._weight_job is not None or self._weights_taken >= self._work_given:
            return
        job = self._work[self._weights_taken]
        demand = job.demand
        assert demand is not None
        self._weight_job = job
        self._weight_left = demand.stripes
        self._weight_address = demand.device_stripe
        held = demand.pairs > 1 and demand.beats >= self._longest
        self._group = self._group_left = demand.beats if held else 0
        self._weight_offer = max(job.given + c.queue, self._weight_idle) + c.burst_cut

    def _weight_words(self) -> int:
        return min(
            self._longest,
            self._weight_left,
            self._c.page_words - self._weight_address % self._c.page_words,
            self._group_left or self._longest,
        )

    def _room(self) -> float:
        """First cycle in which the DRAM buffer has room for the next weight burst, as far as is known."""
        if self._weight_job is None:
            return inf
        wanted = self._asked + self._weight_words() - self._buffer
        if wanted <= 0:
            return 0.0
        # Runs whose stripes were all free before are of no use any more.
        while len(self._freed) > 1 and self._freed[0][0] < wanted:
            self._freed.popleft()
        for end, last, beats, period in self._freed:
            if wanted <= end:
                groups, beat = divmod(end - wanted, beats)
                return last - groups * period - beat + 1
        return inf

    def _burst(self, offer: float, words: int) -> tuple[float, float]:
        """A burst that the broadcast takes in cycle ``offer``: cycles with its first and last stripe on the bus."""
        c = self._c
        taken = offer + 1
        if len(self._burst_ends) == c.bursts_in_flight:
            taken = max(taken, self._burst_ends[0] + 1)
        if len(self._requests) == c.request_queue:
            taken = max(taken, self._requests[0] + 1)
        self._broadcast_free = taken
        request = taken + c.burst_request
        first, last = self._channels.read_all(request, words)
        self._requests.append(request + self._channels.one)
        self._burst_ends.append(last)
        return first, last

    def _send_operand(self, cycle: float) -> None:
        c, job = self._c, self._operand_job
        assert job is not None
        words = min(self._operand_left, c.page_words - self._operand_address % c.page_words)
        _, last = self._burst(cycle, words)
        self._operand_left -= words
        self._operand_address += words
        if self._operand_left:
            self._operand_offer = cycle + c.burst_cut
        else:
            job.arrived = last + c.rendezvous
            self._operand_job = None
            self._operand_offer = inf
            self._operand_idle = cycle + 1

    def _send_weight(self, cycle: float) -> None:
        c, job = self._c, self._weight_job
        assert job is not None
        words = self._weight_words()
        first, last = self._burst(cycle, words)
        job.pieces.append((first + c.rendezvous, last + c.rendezvous, words))
        self._asked += words
        self._weight_left -= words
        self._weight_address += words
        if self._group:
            self._group_left = self._group_left - words or self._group
        if self._weight_left:
            self._weight_offer = cycle + c.burst_cut
        else:
            self._weight_job = None
            self._weights_taken += 1
            self._weight_offer = inf
            self._weight_idle = cycle + 1

    # --- beats ------------------------------------------------------------------------------

    def _consume(self) -> None:
        """Walk the array through every stripe that has arrived."""
        while self._work_ended < self._work_given:
            job = self._work[self._work_ended]
            if job.granted == inf and not self._grant(job):
                return
            while job.pieces and job.left:
                if not self._pass_over(job):
                    return
            if job.left:
                return
            self._end(job)

    def _grant(self, job: Job) -> bool:
        """Let the job into the array; False if it is not known when."""
        c, demand = self._c, job.demand
        assert demand is not None
        cycle = job.given + c.queue
        if demand.load:
            cycle = max(cycle, job.arrived)
        elif demand.from_kept:
            cycle = max(cycle, self._collected + 1)
        if self._work_ended:
            cycle = max(cycle, self._work[self._work_ended - 1].last_beat + 1)
        if self._work_ended >= c.finished:
            cycle = max(cycle, self._work[self._work_ended - c.finished].done + 1)
        if demand.destination == TO_MEMORY and len(self._memory_jobs) == 2:
            cycle = max(cycle, self._memory_jobs[0].emptied + 1)
        if cycle == inf:
            return False
        job.granted = cycle
        if demand.load:
            if self._resident:
                self._returns.append((cycle + 1, self._resident))
            self._resident = demand.operand_space
        if demand.destination == TO_MEMORY:
            self._memory_jobs.append(job)
        self._issue = max(self._issue, cycle)  # the first beat comes in the next cycle at the earliest
        return True

    def _pass_over(self, job: Job) -> bool:
        """Beats on the arrived stripes as far as whole row groups allow; False if more must arrive first."""
        demand = job.demand
        assert demand is not None
        beats, pairs = demand.beats, demand.pairs
        done = demand.stripes - job.left
        begun = done % beats
        first, last, words = job.pieces[0]
        if begun or words < beats or pairs > 1:
            # Within a row group: the stripes that are still to come of it.
            return self._one_group(job, beats - begun)
        groups = words // beats
        slope = (last - first) / (words - 1) if words > 1 else 1.0
        taken = groups * beats
        end = first + slope * (taken - 1)
        self._passes(job, groups, first, end)
        self._use(job, taken)
        return True

    def _use(self, job: Job, stripes: int) -> None:
        """Take ``stripes`` off the front of the first piece."""
        first, last, words = job.pieces[0]
        if stripes == words:
            job.pieces.popleft()
        else:
            slope = (last - first) / (words - 1)
            job.pieces[0] = (first + slope * stripes, last, words - stripes)
        job.left -= stripes

    def _one_group(self, job: Job, missing: int) -> bool:
        """The rest of one row group, from as many pieces as it takes."""
        demand = job.demand
        assert demand is not None
        pairs = demand.pairs
        if pairs > 1 and sum(piece[2] for piece in job.pieces) < missing:
            return False
        while missing and job.pieces:
            first, last, words = job.pieces[0]
            here = min(words, missing)
            slope = (last - first) / (words - 1) if words > 1 else 1.0
            missing -= here
            self._run(job, here, first, first + slope * (here - 1), final=not missing)
            if pairs == 1:
                self._freed.append((self._freed_count + here, self._issue, here, 0.0))
                self._freed_count += here
            self._use(job, here)
        if missing:
            return False
        if pairs > 1:
            self._repeat(job, pairs - 1)
            self._freed.append((self._freed_count + demand.beats, self._issue, demand.beats, 0.0))
            self._freed_count += demand.beats
        return True

    def _passes(self, job: Job, groups: int, first: float, last: float) -> None:
        """``groups`` whole row groups of one pair, whose stripes arrive from ``first`` to ``last``."""
        demand = job.demand
        assert demand is not None
        beats = demand.beats
        slope = (last - first) / (groups * beats - 1) if groups * beats > 1 else 1.0
        group = slope * beats
        exact = min(groups, 3)
        for index in range(exact):
            start = first + index * group
            self._run(job, beats, start, start + slope * (beats - 1), final=True)
        period = max(beats, demand.beat_cycles, 1 + demand.merge_cycles if self._drains(job) else 1)
        if groups > exact:
            more = groups - exact
            ahead = max(more * period, last - self._issue)
            self._shift(ahead)
        self._freed.append((self._freed_count + groups * beats, self._issue, beats, max(period, group)))
        self._freed_count += groups * beats

    def _drains(self, job: Job) -> bool:
        assert job.demand is not None
        return job.demand.destination != TO_ACCUMULATORS

    def _repeat(self, job: Job, passes: int) -> None:
        """Further passes over a group that is all there."""
        demand = job.demand
        assert demand is not None
        exact = min(passes, 3)
        for _ in range(exact):
            self._run(job, demand.beats, 0.0, 0.0, final=True)
        if passes > exact:
            drain = 1 + demand.merge_cycles if self._drains(job) else 1
            self._shift((passes - exact) * max(demand.beats, demand.beat_cycles, drain))

    def _shift(self, cycles: float) -> None:
        self._issue += cycles
        self._move += cycles
        self._array += cycles
        self._merge_free += cycles

    def _run(self, job: Job, beats: int, first: float, last: float, *, final: bool) -> None:
        """``beats`` beats of one pass whose stripes arrive from ``first`` to ``last``; ``final``: they end a sum.

        A beat is issued, moves to the feeder's second stage, and is accepted by the array; each stage holds one.
        Without a wait these are a cycle apart, so that only the first and the last beat need be looked at.
        """
        demand = job.demand
        assert demand is not None
        issue = max(self._issue + 1, self._move, first)
        move = max(issue + 1, self._array)
        if job.first_beat == inf:
            job.first_beat = issue
        if beats > 1:
            issue = max(issue + beats - 1, move + beats - 2, last)
            move = max(issue + 1, move + beats - 1)
        array = move + 1
        if final and self._drains(job):
            array = max(array, self._merge_free)
            self._merge_free = array + 1 + demand.merge_cycles
        self._issue, self._move = issue, move
        self._array = array + demand.beat_cycles - 1

    def _end(self, job: Job) -> None:
        """The job had its last beat."""
        c, demand = self._c, job.demand
        assert demand is not None
        job.last_beat = self._issue
        if demand.destination != TO_ACCUMULATORS:
            job.collected = self._array + c.array + demand.merge_cycles + c.collect
            self._collected = job.collected
        self._work_ended += 1
        self._work.pop(self._work_ended - 2 * max(c.job_slots, c.finished), None)

    # --- results ----------------------------------------------------------------------------

    def _retire(self) -> None:
        """Write the oldest descriptor's result and offer its completion, once it is known when."""
        if self._retired >= self._given:
            return
        job = self._jobs[self._retired]
        if job.completed != inf:
            return
        c, demand = self._c, job.demand
        ready = max(job.given + c.queue, self._retire_free)
        if demand is not None:
            if job.last_beat == inf:
                return
            ready = max(ready, job.last_beat + c.queue)
            if demand.destination != TO_ACCUMULATORS:
                ready = max(ready, job.collected + c.queue)
        if demand is None or demand.destination != TO_MEMORY:
            job.completed = ready + c.retire
            return
        offer = ready + c.retire + c.write_start
        acknowledged = taken = 0.0
        for line in range(demand.result_line, demand.result_line + demand.lines):
            taken, stored = self._channels.write_line(line % self._count, offer)
            acknowledged = max(acknowledged + 1, stored + 1)
            offer = taken + 1
        job.emptied = taken
        job.completed = max(taken, acknowledged) + c.write_end + c.retire
