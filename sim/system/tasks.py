"""How the parts of a step become tasks: transfers, kernels, device work, launches.

Resources: ``gpu`` (kernels in order; each streams from HBM and computes), ``host`` (kernel launches),
``link.down``, ``link.up``, ``dev0`` ... (a device executes one descriptor at a time, streaming its
operand from DRAM through its compute units), ``fabric`` (between GPUs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plora.hw.defs.descriptor import MAX_OPERAND_BYTES
from plora.sim.system.clock import duration_ps
from plora.sim.system.engine import TaskGraph
from plora.sim.system.layers import ModelWork
from plora.sim.system.machine import Machine
from plora.sim.system.spec import SystemSpec
from plora.sim.system.work import Batch, Placement, Serving

GPU = "gpu"
HOST = "host"
FABRIC = "fabric"

HBM_LIMIT = "hbm"
GPU_LIMIT = "gpu kernels"
DRAM_LIMIT = "device dram"
NDP_LIMIT = "device compute"
HOST_LIMIT = "host launches"
DOWN_LIMIT = "link down"
UP_LIMIT = "link up"
FABRIC_LIMIT = "gpu fabric"


@dataclass(frozen=True)
class Setting:
    """What stays the same over a run: the system, its hardware, the model's work for a batch size."""

    spec: SystemSpec
    machine: Machine
    work: ModelWork


@dataclass(frozen=True)
class Load:
    """One (sub-)batch with its adapters and placement."""

    batch: Batch
    serving: Serving
    placement: Placement

    def grown(self, tokens: int) -> Load:
        """Return the load when every context is `tokens` longer."""
        return Load(self.batch.grown(tokens), self.serving, self.placement)


def tiles(rows: int, columns: int) -> int:
    """Return the descriptors that an FP16 operand of `rows` x `columns` takes: its byte size has 20 bits."""
    per_tile = MAX_OPERAND_BYTES // (2 * min(rows, columns))
    return -(-max(rows, columns) // per_tile)


def device_ps(machine: Machine, dram_bytes: float, flops: float, flop_ps: float) -> tuple[int, str]:
    """Return a device's time for an operand streamed through its units, and what bounds it."""
    memory, compute = duration_ps(dram_bytes, machine.far_dram_ps), duration_ps(flops, flop_ps)
    return max(memory, compute), DRAM_LIMIT if memory >= compute else NDP_LIMIT


def attention_device_ps(machine: Machine, work: ModelWork, rows: Any, tokens: Any, stored: Any) -> Any:
    """Return a device's time (int64, of the arrays' common shape) for one layer's attention.

    `rows` requests attend to `tokens` tokens on the device, which also stores `stored` new ones.
    """
    size = work.kv_token_bytes
    if machine.attention is None:
        memory = np.rint((tokens + stored) * size * machine.far_dram_ps)
        compute = np.rint(tokens * work.attention_flops_per_token * machine.far_attention_flop_ps)
        return np.maximum(memory, compute).astype(np.int64)
    streamed = np.rint(tokens * machine.attention.token_ps + stored * (size * machine.far_dram_ps)).astype(np.int64)
    return streamed + (tokens > 0) * rows * machine.attention.request_ps


def attention_limit(machine: Machine, work: ModelWork) -> str:
    """Return what bounds a device's attention."""
    if machine.attention is not None:
        memory = machine.attention.memory
    else:
        compute = work.attention_flops_per_token * machine.far_attention_flop_ps
        memory = work.kv_token_bytes * machine.far_dram_ps >= compute
    return DRAM_LIMIT if memory else NDP_LIMIT


@dataclass
class Builder:
    """Adds the tasks of one part ("base", "lora", "attention") of a step to a graph.

    Every method returns the number of its task. `after` are tasks that it waits for.
    """

    graph: TaskGraph
    setting: Setting
    kind: str

    def down(self, device: int, wire_bytes: float, after: Sequence[int], label: str, *, command: bool = False) -> int:
        """Send bytes to a device; a `command` also has to be seen and decoded before the device works."""
        machine = self.setting.machine
        moved = round(wire_bytes)
        return self.graph.add(
            machine.down[device],
            duration_ps(moved, machine.link_byte_ps),
            after,
            latency_ps=machine.one_way_ps + (machine.command_ps if command else 0),
            moved_bytes=moved,
            kind=self.kind,
            limit=DOWN_LIMIT,
            label=label,
        )

    def up(self, device: int, wire_bytes: float, after: Sequence[int], label: str) -> int:
        """Receive bytes from a device."""
        machine = self.setting.machine
        moved = round(wire_bytes)
        return self.graph.add(
            machine.up[device],
            duration_ps(moved, machine.link_byte_ps),
            after,
            latency_ps=machine.one_way_ps,
            moved_bytes=moved,
            kind=self.kind,
            limit=UP_LIMIT,
            label=label,
        )

    def gpu(self, time_ps: int, hbm_bytes: float, after: Sequence[int], label: str) -> int:
        """Run a kernel of `time_ps` that moves `hbm_bytes`; it is bound by HBM if that is most of its time."""
        moved = round(hbm_bytes)
        streaming = 2 * duration_ps(moved, self.setting.machine.times.hbm_ps) >= time_ps
        return self.graph.add(
            GPU,
            time_ps,
            after,
            moved_bytes=moved,
            kind=self.kind,
            limit=HBM_LIMIT if streaming else GPU_LIMIT,
            label=label,
        )

    def device(
        self,
        device: int,
        dram_bytes: float,
        took: tuple[int, str],
        after: Sequence[int],
        label: str,
        *,
        computes: bool = True,
    ) -> int:
        """Stream `dram_bytes` on a device, through its compute units if it `computes`, in the time `took` states.

        A computed result waits in the device's memory until the GPU has seen its flag.
        """
        machine = self.setting.machine
        time, limit = took
        return self.graph.add(
            f"dev{device}",
            time,
            after,
            latency_ps=machine.return_ps if computes else 0,
            moved_bytes=round(dram_bytes),
            kind=self.kind,
            limit=limit,
            label=label,
        )

    def launch(self, share: float, after: Sequence[int], label: str) -> int:
        """Launch kernels from the host: `share` of the unit that the system launches per."""
        time = round(self.setting.spec.launch.count * self.setting.machine.launch_ps * share)
        return self.graph.add(HOST, time, after, kind="launch", limit=HOST_LIMIT, label=label)

    def all_reduce(self, message_bytes: int, after: Sequence[int], label: str) -> int:
        """Sum `message_bytes` over the GPUs."""
        time, moved = self.setting.machine.times.all_reduce_ps(message_bytes), message_bytes
        return self.graph.add(FABRIC, time, after, moved_bytes=moved, kind=self.kind, limit=FABRIC_LIMIT, label=label)
