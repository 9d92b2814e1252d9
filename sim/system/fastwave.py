"""The adapters of a batch without an event queue: when everything of a wave is there, for all groups at once.

What follows from a wave is remembered while the batch stays. Tests hold every value against the event
engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from plora.sim.system.clock import duration_ps
from plora.sim.system.layers import Group
from plora.sim.system.lora import Part, job_device_ps, lora_job
from plora.sim.system.machine import Machine
from plora.sim.system.served import Times, last_served, served, served_by_readiness, served_in_turn
from plora.sim.system.spec import STRATEGIES, SystemSpec
from plora.sim.system.work import E1, E2, E3, IntArray


class JobTable:
    """Durations of one adapter's job in every group of a kind of layer, remembered by rows, rank and strategy.

    Columns of `of`: down, device, up, gpu (without constants of kernels), and the GPU's HBM bytes and
    operations, for every group (6, groups, jobs).
    """

    def __init__(self, machine: Machine, groups: Sequence[Group], part: Part = Part.WHOLE) -> None:
        self._machine, self._groups, self._part = machine, groups, part
        self._ranks = np.zeros(0, dtype=np.int64)  # those known, ascending
        self._numbers = np.zeros((0, 0, len(STRATEGIES)), dtype=np.int32)  # by rows, place of the rank, strategy
        self._known = 1
        self._table = np.zeros((6, len(groups), 256), dtype=np.int64)

    def of(self, rows: IntArray, ranks: IntArray, strategies: IntArray) -> Times:
        """Return the durations of several adapters."""
        place = self._ranks.searchsorted(ranks)
        try:
            index = self._numbers[rows, place, strategies]
            known = np.count_nonzero(index) == np.count_nonzero(self._ranks[place] == ranks) == len(index)
        except IndexError:
            known = False
        if not known:
            self._learn(rows, ranks, strategies)
            index = self._numbers[rows, self._ranks.searchsorted(ranks), strategies]
        return np.asarray(self._table.take(index, axis=2))

    def _learn(self, rows: IntArray, ranks: IntArray, strategies: IntArray) -> None:
        """Make room for the jobs of several adapters, and work out those that are new; number 0 is no job."""
        old, before = self._numbers, self._ranks
        most = max(old.shape[0], 1 << int(rows.max()).bit_length())
        self._ranks = np.union1d(before, ranks)
        self._numbers = np.zeros((most, len(self._ranks), len(STRATEGIES)), dtype=np.int32)
        self._numbers[: old.shape[0], self._ranks.searchsorted(before)] = old
        for job in dict.fromkeys(zip(rows.tolist(), ranks.tolist(), strategies.tolist(), strict=True)):
            self._add(*job)

    def _add(self, rows: int, rank: int, strategy: int) -> None:
        place = int(self._ranks.searchsorted(rank))
        if self._numbers[rows, place, strategy]:
            return
        number = self._numbers[rows, place, strategy] = self._known
        self._known += 1
        if number == self._table.shape[2]:
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=2)
        machine = self._machine
        for position, group in enumerate(self._groups):
            job = lora_job(machine, group, rows, rank, strategy, self._part)
            device, _ = job_device_ps(machine, group, rows, rank, strategy, job, self._part)
            self._table[:, position, number] = (
                duration_ps(round(job.down_wire), machine.link_byte_ps),
                device,
                duration_ps(round(job.up_wire), machine.link_byte_ps),
                machine.times.lora_ps(job.hbm, job.gpu_flops, 0.0),
                job.hbm,
                job.gpu_flops,
            )


class Wave(msgspec.Struct, frozen=True, eq=False):
    """The adapters of a batch as the phases see them; what follows from one is remembered by its identity.

    Attributes:
        rows, ranks, devices, strategies: (adapters,) ascending by adapter.
    """

    rows: IntArray
    ranks: IntArray
    devices: IntArray
    strategies: IntArray


@dataclass(frozen=True)
class WaveBound:
    """A wave without its order (groups,): enough where the GPU is busy until everything has come back.

    Attributes:
        jobs: durations of its jobs, as `JobTable.of` gives them.
        course: (jobs,) the strategy whose course of events each has.
        at_once: whether kernels serve adapters in HBM all together.
        fused: GPU time of the kernels that serve all adapters in HBM.
        latest: when everything is back at the latest: link and devices busy one after the other.
        length: GPU time of all results that need more work there.
    """

    jobs: Times
    course: IntArray
    at_once: bool
    fused: Times
    latest: Times
    length: Times


@dataclass(frozen=True)
class _WaveTimes:
    """What a wave adds to each group (groups, ...), counted from its start.

    Attributes:
        fused: GPU time of the kernels that serve all adapters in HBM.
        returned: when the last result that needs no more work arrives.
        ready, length: arrival and GPU time of results that need more work on the GPU.
        launched: when the host has launched everything.
    """

    fused: Times
    returned: Times
    ready: Times
    length: Times
    launched: Times


@dataclass(frozen=True)
class _Sent:
    """Exchanges before their way back (groups, jobs).

    Attributes:
        can_go: when each result may leave.
        worked: when each device is done.
        up: link time of the result.
        port: number of each job's port (jobs,), or 0 for one port.
        free: when the ports can start, at most.
    """

    can_go: Times
    worked: Times
    up: Times
    port: Any
    free: Any


class FastWave:
    """One part of the adapters' products in the groups of one kind of layer.

    `launches` is whether the host's launches, where adapters need them, belong to this part.
    """

    def __init__(
        self, spec: SystemSpec, machine: Machine, groups: Sequence[Group], part: Part, *, launches: bool
    ) -> None:
        self._spec, self._machine, self._part = spec, machine, part
        self._groups = len(groups)
        self._jobs = JobTable(machine, groups, part)
        self._course = np.array(part.served_as, dtype=np.int64)
        self._per_adapter = launches and spec.launch.per.startswith("adapter")
        self.blocking = self._per_adapter and spec.launch.blocking
        per_layer = spec.launch.per == "adapter-layer"
        self._shares = [1 / len(groups) if per_layer else float(len(g.output_dims)) for g in groups]
        self._wave: Wave | None = None
        self._bound: WaveBound
        self._times: dict[tuple[int, ...], _WaveTimes] = {}
        names = list(dict.fromkeys(machine.down))
        self._ports = np.array([names.index(name) for name in machine.down], dtype=np.int64)
        self._one_port = len(names) == 1
        self._half_duplex = bool(names) and machine.down == machine.up

    def bound(self, wave: Wave) -> WaveBound:
        """Return what does not depend on the order of jobs."""
        if self._wave is not wave:
            self._wave, self._times = wave, {}
            self._bound = self._bound_of(wave)
        return self._bound

    def play(self, busy: Times, wave: Wave, which: Sequence[int], launch_from: Any = 0) -> tuple[Times, Times]:
        """Return when everything of the wave is there, and when the GPU is free, in the groups `which`.

        `busy` is until when the GPU works on something else. Launches start at `launch_from`.
        """
        self.bound(wave)
        times = self._times.get(tuple(which))
        if times is None or self.blocking:
            times = self._times[tuple(which)] = self._times_of(wave, launch_from, which)
        gpu = busy + times.fused
        free = gpu
        if times.ready.shape[1]:
            free = last_served(times.ready, times.length, gpu[:, None])
        there = np.maximum(times.returned, times.launched)
        if times.ready.shape[1] or self._bound.at_once:
            there = np.maximum(there, free)
        return there, free

    def _bound_of(self, wave: Wave) -> WaveBound:
        machine, times = self._machine, self._machine.times
        jobs = self._jobs.of(wave.rows, wave.ranks, wave.strategies)
        course = self._course[wave.strategies]
        on_gpu = (course == E1).nonzero()[0]
        at_once = len(on_gpu) > 0 and not self._per_adapter
        down, _, up, length, _, _ = np.add.reduce(jobs, 2)
        fused = np.zeros(self._groups, dtype=np.int64)
        if len(on_gpu):
            gpu, hbm, flops = np.add.reduce(jobs[3:, :, on_gpu], 2)
            length = length - gpu
            if at_once:
                share, both = self._part.kernels, zip(hbm.tolist(), flops.tolist(), strict=True)
                fused = np.array([times.lora_ps(s, w, share) for s, w in both], dtype=np.int64)
        latency = 2 * machine.one_way_ps + machine.command_ps + machine.return_ps
        devices, groups = max(1, machine.far_devices), self._groups
        place = wave.devices + np.arange(0, devices * groups, devices)[:, None]
        on_device = np.bincount(place.ravel(), jobs[1].ravel(), devices * groups).reshape(groups, devices)
        latest = down + up + np.maximum.reduce(on_device, 1) + latency
        return WaveBound(jobs, course, at_once, fused, latest, length)

    def _times_of(self, wave: Wave, launch_from: Any, which: Sequence[int]) -> _WaveTimes:
        """Work a wave out for the groups `which`."""
        spec, machine, times = self._spec, self._machine, self._machine.times
        groups, count = len(which), len(wave.rows)
        bound, mine = self._bound, list(which)
        down, device, up, gpu, _, _ = bound.jobs if groups == self._groups else bound.jobs[:, mine]
        course = bound.course
        far = course != E1
        nothing = np.zeros(groups, dtype=np.int64)
        fused = bound.fused[mine]
        launched, ready = nothing, np.zeros((groups, count), dtype=np.int64)
        if self._per_adapter:
            launch = [round(spec.launch.count * machine.launch_ps * self._shares[g]) for g in mine]
            ready = launch_from + np.array(launch, dtype=np.int64)[:, None] * np.arange(1, count + 1)
            launched = ready[:, -1]
            own = [round(times.lora_kernels_ps * min(1.0, self._shares[g])) for g in mine]
            gpu = gpu + np.array(own, dtype=np.int64)[:, None]
        later = course != E3
        if not self._per_adapter:
            later &= far
        on_gpu = later.nonzero()[0]
        if not np.count_nonzero(far):
            return _WaveTimes(fused, nothing, ready[:, on_gpu], gpu[:, on_gpu], launched)
        sent = self._sent(down, device, up, ready, wave.devices, course, far)
        if self._one_port and not len(on_gpu):
            last = last_served(sent.can_go, sent.up, sent.free) + machine.one_way_ps
            return _WaveTimes(fused, last, sent.up[:, :0], sent.up[:, :0], launched)
        returned, worked = self._returned(sent, far)
        last = returned[:, course == E3].max(axis=1, initial=0)
        arrived = returned[:, on_gpu]
        if len(on_gpu):
            those = course[on_gpu]
            arrived = np.where(those == E2, np.maximum(arrived, worked[:, on_gpu]), arrived)
            arrived = np.where(those == E1, ready[:, on_gpu], arrived)
        return _WaveTimes(fused, last, arrived, gpu[:, on_gpu], launched)

    def _sent(
        self,
        down: Times,
        device: Times,
        up: Times,
        ready: Times,
        devices: IntArray,
        course: IntArray,
        far: npt.NDArray[np.bool_],
    ) -> _Sent:
        """Play the exchanges of the adapters `far` up to their way back."""
        machine = self._machine
        mine = far.nonzero()[0]
        if len(mine) < len(far):
            down, device, up, ready = (column[:, mine] for column in (down, device, up, ready))
        devices, reads = devices[mine], course[mine] == E2
        port: Any = self._ports[devices]
        if self._one_port:
            # Without launches every command is ready at once, and the link sends one after the other.
            port = 0
            left = served(ready, down) if self._per_adapter else down.cumsum(axis=1)
        else:
            left = served_by_readiness(ready, down, port)
        # A half-duplex link has sent every command, all ready at once, before any result is.
        free: Any = 0
        if self._half_duplex:
            free = np.zeros_like(left)
            for name in range(len(set(machine.down))):
                here = np.flatnonzero(np.broadcast_to(port == name, devices.shape))
                free[:, here] = left[:, here].max(axis=1, initial=0)[:, None]
        if np.count_nonzero(reads):
            sent = left + np.where(reads, machine.one_way_ps, machine.one_way_ps + machine.command_ps)
            worked = served_by_readiness(sent, device, devices)
            can_go = np.where(reads, sent, worked + machine.return_ps)
        else:
            sent = left + (machine.one_way_ps + machine.command_ps)
            worked = served_in_turn(sent, device, devices)
            can_go = worked + machine.return_ps
        return _Sent(can_go, worked, up, port, free)

    def _returned(self, sent: _Sent, far: npt.NDArray[np.bool_]) -> tuple[Times, Times]:
        """Return when results have come back, and when devices are done (groups, adapters)."""
        came = served_by_readiness(sent.can_go, sent.up, sent.port, sent.free) + self._machine.one_way_ps
        if far.all():
            return came, sent.worked
        mine = np.flatnonzero(far)
        returned, done = np.zeros((2, len(came), len(far)), dtype=np.int64)
        returned[:, mine], done[:, mine] = came, sent.worked
        return returned, done
