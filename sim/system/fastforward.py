"""Steps without an event queue: the same times as the events, for many steps at once.

Within a phase every resource serves in order of readiness, which has a closed form (`served`). Phases of
adapters are worked out for all groups at once and remembered while the batch stays (`fastwave`);
attention, the only phase that depends on the contexts, for as many steps at once as are asked for. Times
are whole picoseconds, and tests hold every value against the event engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plora.sim.system.attention import CHAIN_DESCRIPTORS, chunk_bounds
from plora.sim.system.clock import duration_ps, durations_ps
from plora.sim.system.fastwave import FastWave, Wave
from plora.sim.system.layers import ROW_PARALLEL, LayerKind, ModelWork
from plora.sim.system.lora import Part, middle_bytes
from plora.sim.system.machine import Machine
from plora.sim.system.served import Times, served, served_by_readiness
from plora.sim.system.spec import SystemSpec
from plora.sim.system.tasks import attention_device_ps
from plora.sim.system.work import E1, IntArray

FEW_STEPS = 3
"""Up to as many steps are cheaper one by one than as arrays."""


def can_fast_forward(spec: SystemSpec, machine: Machine) -> bool:
    """Return whether phases of `spec` have the closed form.

    They do not where a half-duplex link has to interleave commands that wait for launches with results.
    """
    shared = bool(machine.down) and machine.down[0] == machine.up[0]
    return not (shared and spec.launch.per.startswith("adapter"))


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
        self._lora = [g for g in kind.groups if g.output_dims]
        parts = (Part.FIRST, Part.SECOND) if machine.sharded_waves else (Part.WHOLE,)
        self._waves = [FastWave(spec, machine, self._lora, p, launches=p is not Part.SECOND) for p in parts]
        self._touched = [position for position, g in enumerate(kind.groups) if g.output_dims]
        self._reductions = sum(1 for g in kind.groups if g.name in ROW_PARALLEL)
        self._per_adapter = spec.launch.per.startswith("adapter")
        self._queries: dict[tuple[int, int], tuple[int, int]] = {}
        self._layouts: dict[int, _Layout] = {}
        self._half_duplex = bool(machine.down) and machine.down == machine.up

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
        every = range(len(starts))
        first = self._waves[0]
        base = np.array([[base_ps[p]] for p in self._touched], dtype=np.int64) if first.blocking else 0
        added = 0 if np.count_nonzero(wave.strategies == E1) == len(wave.rows) else self._machine.times.merge_ps(0)
        if len(self._waves) == 2:
            ends = self._in_two_parts(start, base, wave)
        elif self._per_adapter:
            ends = np.maximum(*first.play(start, wave, every, base))
        else:
            bound = first.bound(wave)
            ends = start + bound.fused + bound.length
            which = (bound.latest > start + bound.fused).nonzero()[0].tolist()
            if which:
                ends[which] = np.maximum(*first.play(start[which], wave, which))
        found: list[int] = (ends + added).tolist()
        return found

    def _in_two_parts(self, start: Times, base: Times | int, wave: Wave) -> Times:
        """Return the ends where GPUs sum the intermediates x A between the two parts of the products."""
        first, second = self._waves
        every = range(len(self._lora))
        there, free = first.play(start, wave, every, base)
        sums = [self._machine.times.all_reduce_ps(middle_bytes(g, wave.rows, wave.ranks)) for g in self._lora]
        again = there + np.array(sums, dtype=np.int64)
        done, after = second.play(np.maximum(free - again, 0), wave, every)
        return np.asarray(again + np.maximum(done, after))

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
        near, far, stored = self._attended_once(contexts, near_tokens, devices)
        local = int(near[0])
        gpu = extra_ps
        if local:
            gpu += int(machine.times.attention_ps(rows, near, size, flops)[0])
        rows_of = np.array(self._layout(rows).counts)[:, None]
        lengths, newest = attention_device_ps(machine, work, rows_of, far, stored).tolist(), stored.tolist()
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

    def _attended_once(self, contexts: IntArray, near_tokens: IntArray, devices: int) -> tuple[IntArray, Times, Times]:
        """Tokens read from HBM (1,), and read and newly stored on devices (chunks, devices), in one step."""
        first: IntArray = np.minimum(near_tokens, contexts)
        near = np.add.reduce(first, keepdims=True)
        if self._kind.window is not None:
            seen = np.maximum(contexts - self._kind.window, 0)
            near = np.add.reduce(np.maximum(first - seen, 0), keepdims=True)
            first = np.maximum(first, seen)
        # Of tokens 0 ... c - 1 device d has c // N, and one more if c mod N is above d.
        layout = self._layout(len(contexts))
        shape = len(layout.bounds), devices
        rounds, over = np.divmod(contexts, devices)
        skipped, beyond = np.divmod(first, devices)
        ends = np.bincount(over + layout.place, minlength=shape[0] * devices).reshape(shape)
        begins = np.bincount(beyond + layout.place, minlength=shape[0] * devices).reshape(shape)
        whole = np.add.reduceat(rounds - skipped, layout.bounds)
        far = whole[:, None] - (ends - begins).cumsum(axis=1)
        # The newest token c - 1 is on the device after which c mod N counts.
        newest = np.concatenate([ends[:, 1:], ends[:, :1]], axis=1)
        return near, far, newest

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
        length = attention_device_ps(machine, work, rows[None, :, None], far, newest)
        ready = left + machine.one_way_ps + machine.command_ps
        worked = np.swapaxes(served(np.swapaxes(ready, 1, 2), np.swapaxes(length, 1, 2)), 1, 2)
        up = durations_ps(np.rint(result[1][None, :, None] + write[1]), machine.link_byte_ps)
        returned = np.zeros(steps, dtype=np.int64)
        for name in dict.fromkeys(machine.up):
            mine = [d for d, n in enumerate(machine.up) if n == name]
            free = left[:, -1, mine].max(axis=1)[:, None] if machine.down[mine[0]] == name else 0
            can_go = (worked[:, :, mine] + machine.return_ps).reshape(steps, -1)
            ends = served_by_readiness(can_go, up[:, :, mine].reshape(steps, -1), 0, free)
            returned = np.maximum(returned, ends.max(axis=1))
        return returned + machine.one_way_ps
