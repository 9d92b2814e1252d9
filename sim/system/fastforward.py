"""Steps without an event queue: the same times as the events, for many steps at once.

Within a phase every resource serves in order of readiness, so the end of the k-th job on a resource is

    end_k = c_k + max over j <= k of (ready_j - c_(j-1)),    c the running sum of the durations,

a running maximum. Phases of adapters are worked out for all groups at once and remembered while the
batch stays; attention, the only phase that depends on the contexts, for as many steps at once as
are asked for. Times are whole picoseconds, and tests hold every value against the event engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from plora.sim.system.attention import CHAIN_DESCRIPTORS, chunk_bounds
from plora.sim.system.clock import duration_ps, durations_ps
from plora.sim.system.layers import ROW_PARALLEL, Group, LayerKind, ModelWork
from plora.sim.system.lora import lora_job
from plora.sim.system.machine import Machine
from plora.sim.system.spec import SystemSpec
from plora.sim.system.tasks import device_ps
from plora.sim.system.work import E1, E2, E3, IntArray

Times = npt.NDArray[np.int64]


FEW_STEPS = 3
"""Up to as many steps are cheaper one by one than as arrays."""


def served(ready: Times, duration: Times, free: Any = 0) -> Times:
    """Return when each job ends on one resource that serves them in the order of the last axis."""
    total = duration.cumsum(axis=-1)
    begin = np.maximum.accumulate(ready - (total - duration), axis=-1)
    return np.asarray(np.maximum(begin, free) + total)


APART = 1 << 48
"""Distance between resources on the time axis of `served_by_readiness`: 281 s, longer than any phase."""


def served_by_readiness(ready: Times, duration: Times, resource: Any = 0, free: Any = 0) -> Times:
    """Return when each job (..., jobs) ends on its `resource` (jobs,), which serves in order of readiness.

    Ties go to the earlier position. Resources are laid one after another on one time axis, far
    apart, so that one running maximum serves them all. `free` is when they can start, at most.
    """
    place = resource * APART
    order = (ready + place).argsort(axis=-1, kind="stable")
    key = np.maximum(ready, free) + place
    if key.ndim == 2:
        order += np.arange(0, key.size, key.shape[1])[:, None]
    length = duration.reshape(-1)[order]
    total = length.cumsum(axis=-1)
    ends = np.maximum.accumulate(key.reshape(-1)[order] - total + length, axis=-1)
    ends += total
    unsorted = np.empty(key.size, dtype=np.int64)
    unsorted[order] = ends
    return np.asarray(unsorted.reshape(key.shape) - place)


def served_in_turn(ready: Times, duration: Times, resource: IntArray) -> Times:
    """The same for jobs (groups, jobs) that become ready in the order of their positions on each resource."""
    order = resource.argsort(kind="stable")
    place = resource[order] * APART
    length = duration[:, order]
    total = length.cumsum(axis=1)
    ends = np.maximum.accumulate(ready[:, order] + (place - total + length), axis=1)
    ends += total - place
    unsorted = np.empty_like(ends)
    unsorted[:, order] = ends
    return unsorted


def last_served(ready: Times, duration: Times, free: Any = 0) -> Times:
    """Return when the last of the jobs (groups, jobs) of one resource ends that serves in order of readiness.

    It does not depend on the order of jobs that are ready at the same time.
    """
    order = ready.argsort(axis=1)
    if len(order) > 1:
        order += np.arange(0, ready.size, ready.shape[1])[:, None]
    length = duration.reshape(-1)[order]
    total = length.cumsum(axis=1)
    begin = np.maximum(ready, free).reshape(-1)[order] - total + length
    return np.asarray(np.maximum.reduce(begin, axis=1) + total[:, -1])


def can_fast_forward(spec: SystemSpec, machine: Machine) -> bool:
    """Return whether phases of `spec` have the closed form.

    They do not where a half-duplex link has to interleave commands that wait for launches with results.
    """
    shared = bool(machine.down) and machine.down[0] == machine.up[0]
    return not (shared and spec.launch.per.startswith("adapter"))


RANK_SHIFT, ROWS_SHIFT = 2, 32
"""Where rank and rows begin in the number of a job; the strategy takes the lowest bits."""


class JobTable:
    """Durations of one adapter's job in every group of a kind of layer, remembered by rows, rank and strategy.

    Columns of `of`: down, device, up, gpu (without constants of kernels), and the GPU's HBM bytes and
    operations, for every group (6, groups, jobs).
    """

    def __init__(self, machine: Machine, groups: Sequence[Group]) -> None:
        self._machine, self._groups = machine, groups
        self._numbers: dict[int, int] = {}
        self._table = np.zeros((6, len(groups), 256), dtype=np.int64)

    def of(self, rows: IntArray, ranks: IntArray, strategies: IntArray) -> Times:
        """Return the durations of several adapters."""
        # One whole number a job: a lookup of it costs a fraction of that of a tuple.
        keys = ((rows << ROWS_SHIFT) + (ranks << RANK_SHIFT) + strategies).tolist()
        try:
            index = list(map(self._numbers.__getitem__, keys))
        except KeyError:
            for key in dict.fromkeys(keys):
                if key not in self._numbers:
                    self._add(key)
            index = list(map(self._numbers.__getitem__, keys))
        return np.asarray(self._table.take(index, axis=2))

    def _add(self, key: int) -> None:
        number = self._numbers[key] = len(self._numbers)
        low = key & ((1 << ROWS_SHIFT) - 1)
        rows, rank, strategy = key >> ROWS_SHIFT, low >> RANK_SHIFT, low & ((1 << RANK_SHIFT) - 1)
        if number == self._table.shape[2]:
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=2)
        machine = self._machine
        for position, group in enumerate(self._groups):
            job = lora_job(machine, group, rows, rank, strategy)
            device, _ = device_ps(machine, job.dram, job.far_flops, machine.far_flop_ps)
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
class _WaveBound:
    """A wave without its order (groups,): enough where the GPU is busy until everything has come back.

    Attributes:
        jobs: durations of its jobs, as `JobTable.of` gives them.
        fused: GPU time of the kernels that serve all adapters in HBM.
        latest: when everything is back at the latest: link and devices busy one after the other.
        length: GPU time of all results that need more work there.
        added: GPU time to add what came back.
    """

    jobs: Times
    fused: Times
    latest: Times
    length: Times
    added: int


@dataclass(frozen=True)
class _WaveTimes:
    """What a wave adds to each group (groups, ...), counted from the phase's start.

    Attributes:
        fused: GPU time of the kernels that serve all adapters in HBM.
        returned: when the last result that needs no more work arrives.
        ready, length: arrival and GPU time of results that need more work on the GPU.
        launched: when the host has launched everything.
        added: GPU time to add what came back.
    """

    fused: Times
    returned: Times
    ready: Times
    length: Times
    launched: Times
    added: int


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


@dataclass(frozen=True)
class _Layout:
    """How the requests of a batch are split into chunks.

    Attributes:
        bounds: first request of each chunk.
        counts: requests of each chunk.
        place: (requests,) position of device 0 of its chunk in a (chunks, devices) table.
    """

    bounds: list[int]
    counts: list[int]
    place: IntArray


class FastPhases:
    """Phases of one system for one kind of layer."""

    def __init__(self, spec: SystemSpec, machine: Machine, kind: LayerKind) -> None:
        self._spec, self._machine, self._kind = spec, machine, kind
        lora = [g for g in kind.groups if g.output_dims]
        self._jobs = JobTable(machine, lora)
        self._touched = [position for position, g in enumerate(kind.groups) if g.output_dims]
        self._reductions = sum(1 for g in kind.groups if g.name in ROW_PARALLEL)
        self._per_adapter = spec.launch.per.startswith("adapter")
        self._blocking = self._per_adapter and spec.launch.blocking
        per_layer = spec.launch.per == "adapter-layer"
        self._shares = [1 / len(lora) if per_layer else float(len(g.output_dims)) for g in lora]
        self._wave: Wave | None = None
        self._wave_bound: _WaveBound
        self._wave_times: dict[tuple[int, ...], _WaveTimes] = {}
        self._queries: dict[tuple[int, int], tuple[int, int]] = {}
        self._layouts: dict[int, _Layout] = {}
        names = list(dict.fromkeys(machine.down))
        self._ports = np.array([names.index(name) for name in machine.down], dtype=np.int64)
        self._one_port = len(names) == 1
        self._half_duplex = bool(names) and machine.down == machine.up

    def groups_ps(self, base_ps: Sequence[int], message_bytes: int, wave: Wave, extra_ps: Sequence[int] = ()) -> int:
        """Return the time of all phases of a layer but attention.

        Args:
            base_ps: base times of the groups.
            message_bytes: what GPUs sum after a group, where there are several.
            wave: the adapters.
            extra_ps: further GPU time of each group that adapters touch, after its base (prompts).
        """
        spec, machine = self._spec, self._machine
        ends = list(base_ps)
        if len(wave.rows) or len(extra_ps):
            starts = [base_ps[position] for position in self._touched]
            if extra_ps:
                starts = [base + extra for base, extra in zip(starts, extra_ps, strict=True)]
            for position, end in zip(self._touched, self._wave_ends(starts, base_ps, wave), strict=True):
                ends[position] = end
        if spec.launch.per == "layer":
            launch = round(spec.launch.count * machine.launch_ps / self._kind.phases)
            ends = [max(end, launch) for end in ends]
        total = sum(ends)
        if machine.gpus > 1:
            total += self._reductions * machine.times.all_reduce_ps(message_bytes)
        return total

    def _wave_ends(self, starts: list[int], base_ps: Sequence[int], wave: Wave) -> list[int]:
        """Return the end of each touched group's phase, whose base (and prompts) take until `starts`."""
        if not len(wave.rows):
            return starts
        start = np.array(starts, dtype=np.int64)
        every = tuple(range(len(starts)))
        if self._blocking:
            base = np.array([[base_ps[p]] for p in self._touched], dtype=np.int64)
            ends = self._played(start, self._times_of(wave, base, every))
        else:
            if self._wave is not wave:
                self._wave, self._wave_bound, self._wave_times = wave, self._bound_of(wave), {}
            bound = self._wave_bound
            ends = start + bound.fused + bound.length + bound.added
            open_groups = every
            if not self._per_adapter:
                open_groups = tuple(np.flatnonzero(bound.latest > start + bound.fused).tolist())
            if open_groups:
                times = self._wave_times.get(open_groups)
                if times is None:
                    times = self._wave_times[open_groups] = self._times_of(wave, 0, open_groups)
                which = list(open_groups)
                ends[which] = self._played(start[which], times)
        found: list[int] = ends.tolist()
        return found

    def _played(self, start: Times, times: _WaveTimes) -> Times:
        """Return the ends of groups whose base takes until `start`."""
        gpu = start + times.fused
        ends = gpu
        if times.ready.shape[1]:
            ends = last_served(times.ready, times.length, gpu[:, None])
        return np.asarray(np.maximum(np.maximum(ends, times.returned), times.launched) + times.added)

    def _bound_of(self, wave: Wave) -> _WaveBound:
        """Work out what does not depend on the order of jobs."""
        machine, times = self._machine, self._machine.times
        jobs = self._jobs.of(wave.rows, wave.ranks, wave.strategies)
        down, device, up, gpu, hbm, flops = jobs
        e1 = wave.strategies == E1
        fused = np.zeros(len(self._touched), dtype=np.int64)
        if e1.any() and not self._per_adapter:
            sizes, work = hbm[:, e1].sum(axis=1).tolist(), flops[:, e1].sum(axis=1).tolist()
            fused = np.array([times.lora_ps(s, w, 1.0) for s, w in zip(sizes, work, strict=True)], dtype=np.int64)
        latency = 2 * machine.one_way_ps + machine.command_ps + machine.return_ps
        devices, groups = max(1, machine.far_devices), len(self._touched)
        place = wave.devices + np.arange(0, devices * groups, devices)[:, None]
        on_device = np.bincount(place.ravel(), device.ravel(), devices * groups).reshape(groups, devices)
        latest = np.add.reduce(down + up, 1) + np.maximum.reduce(on_device, 1) + latency
        length = np.add.reduce(np.where(e1, 0, gpu), 1)
        return _WaveBound(jobs, fused, latest, length, 0 if e1.all() else times.merge_ps(0))

    def _times_of(self, wave: Wave, launch_from: Any, which: tuple[int, ...]) -> _WaveTimes:
        """Work a wave out for the groups `which`; launches, where adapters need them, start at `launch_from`."""
        spec, machine, times = self._spec, self._machine, self._machine.times
        groups, count = len(which), len(wave.rows)
        bound = self._bound_of(wave) if self._blocking else self._wave_bound
        down, device, up, gpu, _, _ = bound.jobs if groups == len(self._touched) else bound.jobs[:, list(which)]
        e1 = wave.strategies == E1
        far = ~e1
        nothing = np.zeros(groups, dtype=np.int64)
        fused = bound.fused[list(which)]
        launched, ready = nothing, np.zeros((groups, count), dtype=np.int64)
        if self._per_adapter:
            launch = [round(spec.launch.count * machine.launch_ps * share) for share in self._shares]
            ready = launch_from + np.array(launch, dtype=np.int64)[:, None] * np.arange(1, count + 1)
            launched = ready[:, -1]
            own = [round(times.lora_kernels_ps * min(1.0, share)) for share in self._shares]
            gpu = gpu + np.array(own, dtype=np.int64)[:, None]
        later = wave.strategies != E3
        if not self._per_adapter:
            later &= far
        if not far.any():
            on_gpu = np.flatnonzero(later)
            return _WaveTimes(fused, nothing, ready[:, on_gpu], gpu[:, on_gpu], launched, 0)
        on_gpu = np.flatnonzero(later)
        sent = self._sent(down, device, up, ready, wave, far)
        if self._one_port and not len(on_gpu) and far.all():
            last = last_served(sent.can_go, sent.up, sent.free) + machine.one_way_ps
            return _WaveTimes(fused, last, sent.up[:, :0], sent.up[:, :0], launched, times.merge_ps(0))
        returned, worked = self._returned(sent, far)
        last = returned[:, wave.strategies == E3].max(axis=1, initial=0)
        arrived = returned[:, on_gpu]
        if len(on_gpu):
            strategy = wave.strategies[on_gpu]
            arrived = np.where(strategy == E2, np.maximum(arrived, worked[:, on_gpu]), arrived)
            arrived = np.where(strategy == E1, ready[:, on_gpu], arrived)
        return _WaveTimes(fused, last, arrived, gpu[:, on_gpu], launched, times.merge_ps(0))

    def _sent(
        self, down: Times, device: Times, up: Times, ready: Times, wave: Wave, far: npt.NDArray[np.bool_]
    ) -> _Sent:
        """Play the exchanges of the adapters `far` up to their way back."""
        machine = self._machine
        mine = np.flatnonzero(far)
        if len(mine) < len(far):
            down, device, up, ready = (column[:, mine] for column in (down, device, up, ready))
        devices, reads = wave.devices[mine], wave.strategies[mine] == E2
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
        if reads.any():
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

    def _query(self, work: ModelWork, rows: int, stored: int) -> tuple[int, int]:
        """Link time down and up of a device's exchange for `rows` requests; it keeps `stored` newest tokens."""
        found = self._queries.get((rows, stored))
        if found is None:
            machine, wire, size = self._machine, self._machine.wire, work.kv_token_bytes
            query = rows * (work.query_bytes + CHAIN_DESCRIPTORS * machine.descriptor_bytes)
            result = wire.read(rows * (work.partial_bytes + machine.flag_bytes))
            write = wire.write(query + stored * size)
            sent = write[0] + result[0]
            if machine.multicast:
                sent = wire.write(query + rows * size)[0] + machine.far_devices * result[0]
            found = (
                duration_ps(round(sent), machine.link_byte_ps),
                duration_ps(round(result[1] + write[1]), machine.link_byte_ps),
            )
            self._queries[rows, stored] = found
        return found

    def attention_ps(
        self, work: ModelWork, contexts: IntArray, near_tokens: IntArray, steps: int, extra_ps: int = 0
    ) -> Times:
        """Return the time (steps,) of one layer's attention as every context grows by a token a step.

        `extra_ps` is further GPU time (attention of prompts), before the attention over HBM.
        """
        spec, machine = self._spec, self._machine
        devices = machine.far_devices if spec.kv.home == "far" else 0
        grown = np.arange(steps)
        launch = 0
        if spec.launch.per == "layer":
            launch = round(spec.launch.count * machine.launch_ps / self._kind.phases)
        if not len(contexts):
            return np.full(steps, max(launch, extra_ps), dtype=np.int64)
        if steps <= FEW_STEPS and devices and spec.kv.attention == "distributed":
            each = (self._attention_once(work, contexts + k, near_tokens, extra_ps) for k in range(steps))
            return np.array([max(launch, one) for one in each], dtype=np.int64)
        near, far = self._attended(contexts, near_tokens, devices, steps)
        gpu = machine.times.attention_ps(
            len(contexts), near, work.kv_token_bytes, work.attention_flops_per_token
        ) + np.int64(extra_ps)
        ends = np.maximum(gpu, launch)
        if not devices:
            return np.asarray(ends)
        newest = np.stack([self._newest(contexts, devices, k) for k in range(min(steps, devices))])[grown % devices]
        if spec.kv.attention == "gpu":
            return np.asarray(np.maximum(ends, self._over_link(work, far.sum(axis=1), newest.sum(axis=1), gpu)))
        returned = self._near_data(work, len(contexts), far, newest)
        merges = (devices + (near > 0)) * len(contexts) * work.partial_bytes
        merge = np.array([machine.times.merge_ps(int(size)) for size in np.unique(merges)], dtype=np.int64)
        added = merge[np.searchsorted(np.unique(merges), merges)]
        return np.asarray(np.maximum(ends, returned) + added)

    def _attention_once(self, work: ModelWork, contexts: IntArray, near_tokens: IntArray, extra_ps: int) -> int:
        """The same for one step of attention near data, in plain numbers where there are few."""
        machine, size, flops = self._machine, work.kv_token_bytes, work.attention_flops_per_token
        devices, rows = machine.far_devices, len(contexts)
        near, far = self._attended_once(contexts, near_tokens, devices)
        local = int(near[0])
        gpu = extra_ps
        if local:
            gpu += int(machine.times.attention_ps(rows, near, size, flops)[0])
        stored = self._newest(contexts, devices, 0)
        memory = np.rint((far + stored) * size * machine.far_dram_ps)
        compute = np.rint(far * flops * machine.far_attention_flop_ps)
        lengths, newest = np.maximum(memory, compute).astype(np.int64).tolist(), stored.tolist()
        free = dict.fromkeys(machine.down, 0)
        busy = [0] * devices
        results: dict[str, list[tuple[int, int, int]]] = {name: [] for name in machine.up}
        delay, back, number = machine.one_way_ps + machine.command_ps, machine.return_ps, 0
        queries = self._queries
        ports, up_ports, multicast = machine.down, machine.up, machine.multicast
        for count, of_lengths, of_newest in zip(self._layout(rows).counts, lengths, newest, strict=True):
            for device in range(devices):
                kept, port = of_newest[device], ports[device]
                down, up = queries.get((count, kept)) or self._query(work, count, kept)
                if not multicast or device == 0:
                    free[port] += down
                begin, ready = busy[device], free[port] + delay
                end = busy[device] = (ready if ready > begin else begin) + of_lengths[device]
                results[up_ports[device]].append((end + back, number, up))
                number += 1
        last = 0
        for name, waiting in results.items():
            now = free[name] if self._half_duplex else 0
            for ready, _, length in sorted(waiting):
                now = (ready if ready > now else now) + length
            last = max(last, now)
        merge = machine.times.merge_ps((devices + (local > 0)) * rows * work.partial_bytes)
        return max(gpu, last + machine.one_way_ps) + merge

    def _layout(self, rows: int) -> _Layout:
        """Return how `rows` requests are split into chunks."""
        found = self._layouts.get(rows)
        if found is None:
            chunks = self._machine.return_chunks if self._spec.kv.attention == "distributed" else 1
            bounds = [low for low, _ in chunk_bounds(rows, chunks)]
            counts = np.diff([*bounds, rows])
            place = np.repeat(np.arange(len(bounds)) * max(1, self._machine.far_devices), counts)
            found = self._layouts[rows] = _Layout(bounds, counts.tolist(), place)
        return found

    def _newest(self, contexts: IntArray, devices: int, grown: int) -> Times:
        """Newest tokens (chunks, devices) `grown` steps on."""
        layout = self._layout(len(contexts))
        chunks = len(layout.bounds)
        on = layout.place + (contexts + (grown - 1)) % devices
        return np.bincount(on, minlength=chunks * devices).reshape(chunks, devices)

    def _attended(self, contexts: IntArray, near_tokens: IntArray, devices: int, steps: int) -> tuple[Times, Times]:
        """Tokens read from HBM (steps,) and on devices (steps, chunks, devices)."""
        window, grown = self._kind.window, np.arange(steps)
        if self._spec.kv.home == "hbm":
            near_tokens = contexts + steps
        if window is not None and int(contexts.max()) + steps > window:
            # Windows that slide lose a token for each they gain: no shortcut, but few tokens.
            later = contexts[None, :] + grown[:, None]
            first = np.maximum(later - window, 0)
            copied = np.minimum(near_tokens, later)
            near = np.maximum(copied - first, 0).sum(axis=1)
            far_from = np.maximum(copied, first)
            return near, self._on_devices(later, far_from, devices)
        if self._spec.kv.home == "hbm":
            return int(contexts.sum()) + grown * len(contexts), np.zeros((steps, 0, 0), dtype=np.int64)
        copied = np.minimum(near_tokens, contexts)
        near = np.full(steps, int(copied.sum()), dtype=np.int64)
        # Within `devices` steps every request adds one token to every device.
        first_steps = grown[: min(steps, devices)]
        later = contexts[None, :] + first_steps[:, None]
        one_round = self._on_devices(later, np.broadcast_to(copied, later.shape), devices)
        rows = np.array(self._layout(len(contexts)).counts)
        return near, one_round[grown % devices] + (grown // devices)[:, None, None] * rows[None, :, None]

    def _attended_once(self, contexts: IntArray, near_tokens: IntArray, devices: int) -> tuple[Times, Times]:
        """Tokens read from HBM (1,) and on devices (chunks, devices) in one step."""
        first = 0 if self._kind.window is None else np.maximum(contexts - self._kind.window, 0)
        copied = np.minimum(near_tokens, contexts)
        near = np.array([int(np.maximum(copied - first, 0).sum())])
        return near, self._on_devices(contexts[None, :], np.maximum(copied, first)[None, :], devices)[0]

    def _on_devices(self, contexts: IntArray, first: IntArray, devices: int) -> Times:
        """Tokens (steps, chunks, devices) of [first, contexts), both (steps, requests)."""
        if not devices:
            return np.zeros((len(contexts), 0, 0), dtype=np.int64)
        shift = devices - 1 - np.arange(devices)
        until, since = contexts[:, :, None] + shift, first[:, :, None] + shift
        if devices & (devices - 1):
            on = until // devices - since // devices
        else:  # division by a power of two is a shift, many times faster
            bits = devices.bit_length() - 1
            on = (until >> bits) - (since >> bits)
        return np.asarray(np.add.reduceat(on, self._layout(contexts.shape[1]).bounds, axis=1))

    def _over_link(self, work: ModelWork, far: Times, newest: Times, gpu: Times) -> Times:
        """The GPU reads far KV (steps, devices) with its own loads."""
        machine, size = self._machine, work.kv_token_bytes
        wrote, read = machine.wire.write(newest * size), machine.wire.read(far * size)
        down = durations_ps(np.rint(wrote[0] + read[0]), machine.link_byte_ps)
        up = durations_ps(np.rint(wrote[1] + read[1]), machine.link_byte_ps)
        streamed = durations_ps(far * size + newest * size, machine.far_dram_ps)
        kernel = durations_ps(far * work.attention_flops_per_token, machine.times.flop_ps)
        arrived = np.zeros_like(down)
        for name in dict.fromkeys(machine.down):
            mine = [d for d, n in enumerate(machine.down) if n == name]
            asked = served(np.zeros_like(down[:, mine]), down[:, mine])
            ready = asked + machine.one_way_ps
            free = asked[:, -1:] if machine.up[mine[0]] == name else 0
            came = served_by_readiness(ready, up[:, mine], 0, free) + machine.one_way_ps
            arrived[:, mine] = np.maximum(came, ready + streamed[:, mine])
        return np.asarray(served_by_readiness(arrived, kernel, 0, gpu[:, None]).max(axis=1))

    def _near_data(self, work: ModelWork, requests: int, far: Times, newest: Times) -> Times:
        """Each device attends over its tokens (steps, chunks, devices); return when the last result is there."""
        machine, wire, size = self._machine, self._machine.wire, work.kv_token_bytes
        steps, chunks, devices = far.shape
        rows = np.array(self._layout(requests).counts)
        query = rows * (work.query_bytes + CHAIN_DESCRIPTORS * machine.descriptor_bytes)
        result = wire.read(rows * (work.partial_bytes + machine.flag_bytes))
        write = wire.write(query[None, :, None] + newest * size)
        if machine.multicast:
            sent = wire.write(query + rows * size)[0] + devices * result[0]
            down = durations_ps(np.rint(sent), machine.link_byte_ps)
            left = np.broadcast_to(np.cumsum(down)[None, :, None], far.shape)
        else:
            down = durations_ps(np.rint(write[0] + result[0][None, :, None]), machine.link_byte_ps)
            left = np.empty_like(down)
            for name in dict.fromkeys(machine.down):
                mine = [d for d, n in enumerate(machine.down) if n == name]
                flat = np.cumsum(down[:, :, mine].reshape(steps, -1), axis=1)
                left[:, :, mine] = flat.reshape(steps, chunks, len(mine))
        memory = durations_ps((far + newest) * size, machine.far_dram_ps)
        compute = durations_ps(far * work.attention_flops_per_token, machine.far_attention_flop_ps)
        ready = left + machine.one_way_ps + machine.command_ps
        worked = np.swapaxes(served(np.swapaxes(ready, 1, 2), np.swapaxes(np.maximum(memory, compute), 1, 2)), 1, 2)
        up = durations_ps(np.rint(result[1][None, :, None] + write[1]), machine.link_byte_ps)
        returned = np.zeros(steps, dtype=np.int64)
        for name in dict.fromkeys(machine.up):
            mine = [d for d, n in enumerate(machine.up) if n == name]
            free = left[:, -1, mine].max(axis=1)[:, None] if machine.down[mine[0]] == name else 0
            can_go = (worked[:, :, mine] + machine.return_ps).reshape(steps, -1)
            ends = served_by_readiness(can_go, up[:, :, mine].reshape(steps, -1), 0, free)
            returned = np.maximum(returned, ends.max(axis=1))
        return returned + machine.one_way_ps
