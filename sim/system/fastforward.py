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
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from plora.sim.system.attention import CHAIN_DESCRIPTORS, chunk_bounds
from plora.sim.system.clock import duration_ps, durations_ps
from plora.sim.system.layers import ROW_PARALLEL, Group, LayerKind, ModelWork
from plora.sim.system.lora import lora_job
from plora.sim.system.machine import Machine
from plora.sim.system.spec import SystemSpec
from plora.sim.system.tasks import device_ps
from plora.sim.system.work import E1, E2, E4, IntArray

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


def can_fast_forward(spec: SystemSpec, machine: Machine) -> bool:
    """Return whether phases of `spec` have the closed form.

    They do not where a half-duplex link has to interleave commands that wait for launches with results.
    """
    shared = bool(machine.down) and machine.down[0] == machine.up[0]
    return not (shared and spec.launch.per.startswith("adapter"))


class JobTable:
    """Durations of one adapter's job in every group of a kind of layer, remembered by rows, rank and strategy.

    Columns of `of`: down, device, up, gpu (without constants of kernels), and the GPU's HBM bytes and
    operations, for every group (6, groups, jobs).
    """

    def __init__(self, machine: Machine, groups: Sequence[Group]) -> None:
        self._machine, self._groups = machine, groups
        self._numbers: dict[tuple[int, int, int], int] = {}
        self._table = np.zeros((6, len(groups), 256), dtype=np.int64)

    def of(self, rows: IntArray, ranks: IntArray, strategies: IntArray) -> Times:
        """Return the durations of several adapters."""
        numbers = self._numbers
        index = [
            numbers[key] if key in numbers else self._add(key)
            for key in zip(rows.tolist(), ranks.tolist(), strategies.tolist(), strict=True)
        ]
        return self._table[:, :, index]

    def _add(self, key: tuple[int, int, int]) -> int:
        number = self._numbers[key] = len(self._numbers)
        if number == self._table.shape[2]:
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=2)
        machine = self._machine
        for position, group in enumerate(self._groups):
            job = lora_job(machine, group, *key)
            device, _ = device_ps(machine, job.dram, job.far_flops, machine.far_flop_ps)
            self._table[:, position, number] = (
                duration_ps(round(job.down_wire), machine.link_byte_ps),
                device,
                duration_ps(round(job.up_wire), machine.link_byte_ps),
                machine.times.lora_ps(job.hbm, job.gpu_flops, 0.0),
                job.hbm,
                job.gpu_flops,
            )
        return number


@dataclass(frozen=True)
class Wave:
    """The adapters of a batch as the phases see them.

    Attributes:
        rows, ranks, devices, strategies: (adapters,) ascending by adapter.
    """

    rows: IntArray
    ranks: IntArray
    devices: IntArray
    strategies: IntArray


class FastPhases:
    """Phases of one system for one kind of layer. `work` may change with the number of tokens."""

    def __init__(self, spec: SystemSpec, machine: Machine, kind: LayerKind) -> None:
        self._spec, self._machine, self._kind = spec, machine, kind
        self._lora = [g for g in kind.groups if g.output_dims]
        self._jobs = JobTable(machine, self._lora)
        self._queries: dict[tuple[int, int], tuple[int, int]] = {}
        names = list(dict.fromkeys(machine.down))
        self._ports = np.array([names.index(name) for name in machine.down], dtype=np.int64)
        self._one_port = len(names) == 1
        self._half_duplex = bool(names) and machine.down == machine.up

    def groups_ps(self, kind: LayerKind, work: ModelWork, tokens: int, wave: Wave, extra_ps: Sequence[int] = ()) -> int:
        """Return the time of all phases of a layer but attention.

        Args:
            kind: the layer with base times for `tokens`.
            work: the model's work for `tokens`.
            tokens: tokens of the step.
            wave: the adapters.
            extra_ps: further GPU time after the base matrices of each group that adapters touch (prompts).
        """
        spec, machine = self._spec, self._machine
        base = np.array([g.base_ps for g in kind.groups], dtype=np.int64)
        ends = base.copy()
        touched = [position for position, g in enumerate(kind.groups) if g.output_dims]
        if touched and (len(wave.rows) or len(extra_ps)):
            extra = np.array(extra_ps, dtype=np.int64) if len(extra_ps) else np.zeros(len(touched), dtype=np.int64)
            ends[touched] = self._wave_ends(base[touched], wave, extra)
        if spec.launch.per == "layer":
            launch = round(spec.launch.count * machine.launch_ps / kind.phases)
            ends = np.maximum(ends, launch)
        total = int(ends.sum())
        if machine.gpus > 1:
            reduced = sum(1 for g in kind.groups if g.name in ROW_PARALLEL)
            total += reduced * machine.times.all_reduce_ps(2 * tokens * work.hidden_size)
        return total

    def _wave_ends(self, base: Times, wave: Wave, extra: Times) -> Times:
        """Return the end (groups,) of each group's phase."""
        spec, machine, times = self._spec, self._machine, self._machine.times
        groups, count = len(base), len(wave.rows)
        down, device, up, gpu, hbm, flops = self._jobs.of(wave.rows, wave.ranks, wave.strategies)
        e1, far = wave.strategies == E1, wave.strategies != E1
        per_adapter = spec.launch.per.startswith("adapter")
        ready = np.zeros((groups, count), dtype=np.int64)
        share = np.zeros(groups)
        if per_adapter:
            if spec.launch.per == "adapter-layer":
                share = np.full(groups, 1 / len(self._lora))
            else:
                share = np.array([float(len(g.output_dims)) for g in self._lora])
            launch = np.array([round(spec.launch.count * machine.launch_ps * s) for s in share], dtype=np.int64)
            ready = launch[:, None] * np.arange(1, count + 1)
            if spec.launch.blocking:
                ready = ready + base[:, None]
        own = np.array([round(times.lora_kernels_ps * min(1.0, s)) for s in share], dtype=np.int64)
        ends = base + extra
        if not far.any():
            if not per_adapter:
                return ends + self._fused(hbm, flops, e1, groups)
            arrivals, lengths = ready, gpu + own[:, None]
            return self._gpu_ends(base, extra, arrivals, lengths, np.zeros(groups, dtype=np.int64))
        returned, worked = self._exchange(down, device, up, ready, wave, far)
        on_gpu = np.flatnonzero((wave.strategies == E4) | (wave.strategies == E2) | (e1 & per_adapter))
        arrivals = np.where(e1, ready, np.where(wave.strategies == E2, np.maximum(returned, worked), returned))
        fused = (
            self._fused(hbm, flops, e1, groups) if e1.any() and not per_adapter else np.zeros(groups, dtype=np.int64)
        )
        ends = self._gpu_ends(base, extra, arrivals[:, on_gpu], gpu[:, on_gpu] + own[:, None], fused)
        silent = np.flatnonzero(far & (wave.strategies != E4) & (wave.strategies != E2))
        if len(silent):
            ends = np.maximum(ends, returned[:, silent].max(axis=1))
        if per_adapter:
            ends = np.maximum(ends, ready[:, -1])
        return np.asarray(ends + times.merge_ps(0))

    def _fused(self, hbm: Times, flops: Times, e1: npt.NDArray[np.bool_], groups: int) -> Times:
        """Time of the kernels that serve all adapters in HBM together."""
        times = self._machine.times
        return np.array(
            [times.lora_ps(int(hbm[g, e1].sum()), int(flops[g, e1].sum()), 1.0) for g in range(groups)], dtype=np.int64
        )

    def _gpu_ends(self, base: Times, extra: Times, ready: Times, duration: Times, fused: Times) -> Times:
        """Ends of the GPU's tasks: base first, prompts and fused adapters at once, then whatever arrives."""
        start = base + extra + fused
        if not ready.shape[1]:
            return start
        return np.asarray(served_by_readiness(ready, duration, 0, start[:, None]).max(axis=1))

    def _exchange(
        self, down: Times, device: Times, up: Times, ready: Times, wave: Wave, far: npt.NDArray[np.bool_]
    ) -> tuple[Times, Times]:
        """Return when results have come back, and when devices are done (groups, adapters)."""
        machine = self._machine
        mine = np.flatnonzero(far)
        whole = len(mine) == len(far)
        if not whole:
            down, device, up, ready = (column[:, mine] for column in (down, device, up, ready))
        devices, reads = wave.devices[mine], wave.strategies[mine] == E2
        port = self._ports[devices]
        left = served(ready, down) if self._one_port else served_by_readiness(ready, down, port)
        # A half-duplex link has sent every command, all ready at once, before any result is.
        free: Any = 0
        if self._half_duplex:
            free = np.zeros_like(left)
            for name in range(len(set(machine.down))):
                free[:, port == name] = left[:, port == name].max(axis=1, initial=0)[:, None]
        if reads.any():
            sent = left + np.where(reads, machine.one_way_ps, machine.one_way_ps + machine.command_ps)
            worked = served_by_readiness(sent, device, devices)
            can_go = np.where(reads, sent, worked + machine.return_ps)
        else:
            sent = left + (machine.one_way_ps + machine.command_ps)
            worked = served_by_readiness(sent, device, devices)
            can_go = worked + machine.return_ps
        came = served_by_readiness(can_go, up, port, free) + machine.one_way_ps
        if whole:
            return came, worked
        returned, done = np.zeros((2, len(came), len(far)), dtype=np.int64)
        returned[:, mine], done[:, mine] = came, worked
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
        """The same for one step of attention near data, with fewer and smaller arrays."""
        machine, size = self._machine, work.kv_token_bytes
        devices, rows = machine.far_devices, len(contexts)
        near, far = self._attended(contexts, near_tokens, devices, 1)
        gpu = int(machine.times.attention_ps(rows, near, size, work.attention_flops_per_token)[0]) + extra_ps
        newest = self._newest(contexts, devices, 0)
        tokens = far[0]
        memory = durations_ps((tokens + newest) * size, machine.far_dram_ps)
        compute = durations_ps(tokens * work.attention_flops_per_token, machine.far_attention_flop_ps)
        lengths = np.maximum(memory, compute).tolist()
        bounds = [*self._bounds(rows), rows]
        free = dict.fromkeys(machine.down, 0)
        busy = [0] * devices
        results: dict[str, list[tuple[int, int, int]]] = {name: [] for name in machine.up}
        delay, number = machine.one_way_ps + machine.command_ps, 0
        for chunk, (low, high) in enumerate(pairwise(bounds)):
            for device, stored in enumerate(newest[chunk].tolist()):
                port = machine.down[device]
                down, up = self._query(work, high - low, stored)
                if not machine.multicast or device == 0:
                    free[port] += down
                busy[device] = max(busy[device], free[port] + delay) + lengths[chunk][device]
                results[machine.up[device]].append((busy[device] + machine.return_ps, number, up))
                number += 1
        last = 0
        for name, waiting in results.items():
            now = free[name] if self._half_duplex else 0
            for ready, _, length in sorted(waiting):
                now = max(now, ready) + length
            last = max(last, now)
        merge = machine.times.merge_ps((devices + (int(near[0]) > 0)) * rows * work.partial_bytes)
        return max(gpu, last + machine.one_way_ps) + merge

    def _bounds(self, rows: int) -> list[int]:
        chunks = self._machine.return_chunks if self._spec.kv.attention == "distributed" else 1
        return [low for low, _ in chunk_bounds(rows, chunks)]

    def _newest(self, contexts: IntArray, devices: int, grown: int) -> Times:
        """Newest tokens (chunks, devices) `grown` steps on."""
        on = ((contexts + (grown - 1)) % devices)[:, None] == np.arange(devices)
        return np.add.reduceat(on.astype(np.int64), self._bounds(len(contexts)), axis=0)

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
        bounds = self._bounds(len(contexts))
        rows = np.diff([*bounds, len(contexts)])
        return near, one_round[grown % devices] + (grown // devices)[:, None, None] * rows[None, :, None]

    def _on_devices(self, contexts: IntArray, first: IntArray, devices: int) -> Times:
        """Tokens (steps, chunks, devices) of [first, contexts), both (steps, requests)."""
        if not devices:
            return np.zeros((len(contexts), 0, 0), dtype=np.int64)
        shift = devices - 1 - np.arange(devices)
        on = (contexts[:, :, None] + shift) // devices - (first[:, :, None] + shift) // devices
        return np.asarray(np.add.reduceat(on, self._bounds(contexts.shape[1]), axis=1))

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
        rows = np.diff([*self._bounds(requests), requests])
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
