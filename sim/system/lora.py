"""One group of matrices: the base GEMM, and the adapter wave by strategies E1 to E4."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from plora.sim.system.coretime import Product
from plora.sim.system.engine import TaskGraph
from plora.sim.system.layers import ROW_PARALLEL, Group, LayerKind
from plora.sim.system.machine import Machine
from plora.sim.system.tasks import DRAM_LIMIT, NDP_LIMIT, Builder, Load, Setting, device_ps, tiles
from plora.sim.system.work import E1, E2, E3, E4, IntArray


@dataclass(frozen=True)
class JobBytes:
    """What one adapter's share of a group asks for under its strategy. Sizes in bytes, `*_wire` on the link."""

    down_wire: float
    up_wire: float
    dram: int
    far_flops: int
    hbm: int
    gpu_flops: int


class Part(Enum):
    """How much of an adapter's product one exchange does: x A B, or, where the intermediate m = x A is summed
    over GPUs in between, x A first and m B second."""

    WHOLE = 0
    FIRST = 1
    SECOND = 2

    @property
    def kernels(self) -> float:
        """Share of a shrink and an expand kernel that this part starts."""
        return 1.0 if self is Part.WHOLE else 0.5

    @property
    def served_as(self) -> tuple[int, int, int, int]:
        """By strategy, the one whose course of events this part has.

        x A under E4 comes back as a result of E3 does; m B under E2 and E4 needs nothing but the GPU.
        """
        return {Part.WHOLE: (E1, E2, E3, E4), Part.FIRST: (E1, E2, E3, E3), Part.SECOND: (E1, E1, E3, E1)}[self]


def lora_job(machine: Machine, group: Group, rows: int, rank: int, strategy: int, part: Part = Part.WHOLE) -> JobBytes:
    """Return the demand of one adapter on one group (the paper, Table IV, with x sent once a group).

    The link carries payload, descriptors, flags and polls, and the messages in the other direction
    that each transfer causes. On routed experts an adapter has matrices for each; those that the rows
    are expected to touch are read.
    """
    count, wire, flag = len(group.output_dims), machine.wire, machine.flag_bytes
    touched, pairs = group.touched(rows), rows * group.used
    first, second = part is not Part.SECOND, part is not Part.FIRST
    a = round(2 * rank * group.a_columns * touched) if first else 0
    b = round(2 * rank * group.b_columns * touched) if second else 0
    a_flops = 2 * pairs * rank * group.a_columns if first else 0
    b_flops = 2 * pairs * rank * group.b_columns if second else 0
    if strategy == E1:
        return JobBytes(0, 0, 0, 0, a + b, a_flops + b_flops)
    if strategy == E2:
        if part is Part.SECOND:
            return JobBytes(0, 0, 0, 0, 0, b_flops)
        # Both matrices come at once.
        size = a + round(2 * rank * group.b_columns * touched)
        down, up = wire.read(size)
        return JobBytes(float(down), float(up), size, 0, 0, a_flops + b_flops)
    if strategy == E4 and part is Part.SECOND:
        return JobBytes(0, 0, 0, 0, b, b_flops)
    a_tiles, b_tiles = count * tiles(rank, group.input_dim), sum(tiles(rank, width) for width in group.output_dims)
    middle = 2 * pairs * rank * count
    on_device = second and strategy == E3
    descriptors = math.ceil(touched * (a_tiles * first + b_tiles * on_device))
    operand = 2 * rows * group.inputs * group.input_dim if first else middle
    result = 2 * pairs * group.b_columns if on_device else middle
    hbm, gpu_flops = (b, b_flops) if second and strategy == E4 else (0, 0)
    sent = wire.write(operand + descriptors * machine.descriptor_bytes)
    got = wire.read(result + flag)
    dram, flops = (a + b, a_flops + b_flops) if on_device else (a, a_flops)
    return JobBytes(float(sent[0] + got[0]), float(sent[1] + got[1]), dram, flops, hbm, gpu_flops)


def job_device_ps(
    machine: Machine, group: Group, rows: int, rank: int, strategy: int, job: JobBytes, part: Part = Part.WHOLE
) -> tuple[int, str]:
    """Return a device's time for `job`, and what bounds it."""
    if machine.core is None or not job.far_flops:
        return device_ps(machine, job.dram, job.far_flops, machine.far_flop_ps)
    # Every expert that is touched gets its share of the rows.
    touched = group.touched(rows)
    share = max(1, round(rows * group.used / touched))
    first = [(rank, group.input_dim, False)] * (part is not Part.SECOND)
    products: list[Product] = []
    for width in group.output_dims:
        products += first
        if strategy == E3 and part is not Part.FIRST:
            products.append((width, rank, bool(first)))
    time, memory = machine.core.products_ps(share, products)
    return round(time * touched), DRAM_LIMIT if memory else NDP_LIMIT


def middle_bytes(group: Group, rows: IntArray, ranks: IntArray) -> int:
    """Return the bytes of all adapters' intermediates m = x A of one group, which GPUs sum."""
    return 2 * group.used * len(group.output_dims) * int((rows * ranks).sum())


def add_group(
    graph: TaskGraph, setting: Setting, kind: LayerKind, group: Group, load: Load, start: Sequence[int], name: str
) -> list[int]:
    """Add one group's base GEMM and adapter wave; return the tasks that end the phase."""
    rows, launch = len(load.batch), setting.spec.launch
    make = Builder(graph, setting, "base")
    base = make.gpu(group.base_ps, group.weight_bytes, start, f"{name} base")
    ends = [base]
    if launch.per == "layer":
        ends.append(make.launch(1 / kind.phases, start, f"{name} launches"))
    if group.output_dims and len(load.serving):
        share = {"adapter-layer": 1 / len(kind.lora_groups), "adapter-matrix": float(len(group.output_dims))}
        ends += _adapters(Builder(graph, setting, "lora"), group, load, start, base, share.get(launch.per), name)
    if setting.machine.gpus > 1 and group.name in ROW_PARALLEL:
        ends = [make.all_reduce(2 * rows * setting.work.hidden_size, ends, f"{name} all-reduce")]
    return ends


def _adapters(
    make: Builder, group: Group, load: Load, start: Sequence[int], base: int, launch_share: float | None, name: str
) -> list[int]:
    """Add the products of every adapter of the batch, and the kernel that adds what came back."""
    if make.setting.machine.sharded_waves:
        # A by rows leaves partial intermediates on every GPU: they are summed before B, which is split by columns.
        first = _wave(make, group, load, start, base, launch_share, f"{name} A", Part.FIRST)
        message = middle_bytes(group, load.serving.rows, load.serving.ranks)
        summed = make.all_reduce(message, first, f"{name} lora all-reduce")
        ends = _wave(make, group, load, [summed], base, None, f"{name} B", Part.SECOND)
    else:
        ends = _wave(make, group, load, start, base, launch_share, name, Part.WHOLE)
    far = bool((load.placement.strategies != E1).any())
    added = make.setting.machine.times.merge_ps(0) if far else 0
    return [make.gpu(added, 0, [*ends, base], f"{name} lora add")] if added else ends


def _wave(
    make: Builder,
    group: Group,
    load: Load,
    start: Sequence[int],
    base: int,
    launch_share: float | None,
    name: str,
    part: Part,
) -> list[int]:
    """Add one part of every adapter's product. Adapters in HBM share one pair of kernels unless each is launched."""
    setting, served = make.setting, load.serving
    machine, times = setting.machine, setting.machine.times
    launch_after = [base] if setting.spec.launch.blocking else start
    own_kernels = 0.0 if launch_share is None else min(1.0, launch_share)
    ends: list[int] = []
    fused_bytes, fused_flops, fused = 0, 0, False
    columns = (served.ids, served.rows, served.ranks, served.devices, load.placement.strategies)
    for adapter, rows, rank, device, strategy in zip(*(c.tolist() for c in columns), strict=True):
        label = f"{name} lora {adapter}"
        job = lora_job(machine, group, rows, rank, strategy, part)
        ready = start if launch_share is None else [make.launch(launch_share, launch_after, f"{label} launch")]
        course = part.served_as[strategy]
        if course == E1:
            if launch_share is None:
                fused_bytes, fused_flops, fused = fused_bytes + job.hbm, fused_flops + job.gpu_flops, True
            else:
                ends.append(make.gpu(times.lora_ps(job.hbm, job.gpu_flops, own_kernels), job.hbm, ready, label))
            continue
        computes = course != E2
        sent = make.down(device, job.down_wire, ready, f"{label} down", command=computes)
        took = job_device_ps(machine, group, rows, rank, strategy, job, part)
        worked = make.device(device, job.dram, took, [sent], f"{label} device", computes=computes)
        # Under E2 the link streams what the device reads, at the same time.
        returned = make.up(device, job.up_wire, [worked if computes else sent], f"{label} up")
        if course == E3:
            ends.append(returned)
        else:
            time = times.lora_ps(job.hbm, job.gpu_flops, own_kernels)
            ends.append(make.gpu(time, job.hbm, [returned] if computes else [returned, worked], f"{label} gpu"))
    if fused:
        time = times.lora_ps(fused_bytes, fused_flops, part.kernels)
        ends.append(make.gpu(time, fused_bytes, start, f"{name} lora in HBM"))
    return ends
