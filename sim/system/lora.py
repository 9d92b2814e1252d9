"""One group of matrices: the base GEMM, and the adapter wave by strategies E1 to E4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plora.sim.system.engine import TaskGraph
from plora.sim.system.layers import ROW_PARALLEL, Group, LayerKind
from plora.sim.system.machine import Machine
from plora.sim.system.tasks import Builder, Load, Setting, tiles
from plora.sim.system.work import E1, E2, E3, E4


@dataclass(frozen=True)
class JobBytes:
    """What one adapter's share of a group asks for under its strategy. Sizes in bytes, `*_wire` on the link."""

    down_wire: float
    up_wire: float
    dram: int
    far_flops: int
    hbm: int
    gpu_flops: int


def lora_job(machine: Machine, group: Group, rows: int, rank: int, strategy: int) -> JobBytes:
    """Return the demand of one adapter on one group (the paper, Table IV, with x sent once a group).

    The link carries payload, descriptors, flags and polls, and the messages in the other direction
    that each transfer causes.
    """
    a, b, count = group.a_columns, group.b_columns, len(group.output_dims)
    wire, flag = machine.wire, machine.flag_bytes
    if strategy == E1:
        return JobBytes(0, 0, 0, 0, 2 * rank * (a + b), 2 * rows * rank * (a + b))
    if strategy == E2:
        down, up = wire.read(2 * rank * (a + b))
        return JobBytes(float(down), float(up), 2 * rank * (a + b), 0, 0, 2 * rows * rank * (a + b))
    descriptors = count * tiles(rank, group.input_dim)
    if strategy == E3:
        descriptors += sum(tiles(rank, width) for width in group.output_dims)
        result, dram, flops, hbm, gpu_flops = 2 * rows * b, 2 * rank * (a + b), 2 * rows * rank * (a + b), 0, 0
    else:
        assert strategy == E4
        result, dram, flops = 2 * rows * rank * count, 2 * rank * a, 2 * rows * rank * a
        hbm, gpu_flops = 2 * rank * b, 2 * rows * rank * b
    sent = wire.write(2 * rows * group.input_dim + descriptors * machine.descriptor_bytes)
    got = wire.read(result + flag)
    return JobBytes(float(sent[0] + got[0]), float(sent[1] + got[1]), dram, flops, hbm, gpu_flops)


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
        ends += _wave(Builder(graph, setting, "lora"), group, load, start, base, share.get(launch.per), name)
    if setting.machine.gpus > 1 and group.name in ROW_PARALLEL:
        ends = [make.all_reduce(rows, ends, f"{name} all-reduce")]
    return ends


def _wave(
    make: Builder, group: Group, load: Load, start: Sequence[int], base: int, launch_share: float | None, name: str
) -> list[int]:
    """Add every adapter of the batch. Adapters in HBM share one pair of kernels unless each is launched."""
    setting, served = make.setting, load.serving
    machine, times = setting.machine, setting.machine.times
    launch_after = [base] if setting.spec.launch.blocking else start
    own_kernels = 0.0 if launch_share is None else min(1.0, launch_share)
    ends: list[int] = []
    fused_bytes, fused_flops = 0, 0
    far = False
    columns = (served.ids, served.rows, served.ranks, served.devices, load.placement.strategies)
    for adapter, rows, rank, device, strategy in zip(*(c.tolist() for c in columns), strict=True):
        label = f"{name} lora {adapter}"
        job = lora_job(machine, group, rows, rank, strategy)
        ready = start if launch_share is None else [make.launch(launch_share, launch_after, f"{label} launch")]
        if strategy == E1:
            if launch_share is None:
                fused_bytes, fused_flops = fused_bytes + job.hbm, fused_flops + job.gpu_flops
            else:
                ends.append(make.gpu(times.lora_ps(job.hbm, job.gpu_flops, own_kernels), job.hbm, ready, label))
            continue
        far = True
        computes = strategy != E2
        sent = make.down(device, job.down_wire, ready, f"{label} down", command=computes)
        worked = make.device(device, job.dram, job.far_flops, [sent], f"{label} device", computes=computes)
        # Under E2 the link streams what the device reads, at the same time.
        returned = make.up(device, job.up_wire, [worked if computes else sent], f"{label} up")
        if strategy == E3:
            ends.append(returned)
        else:
            time = times.lora_ps(job.hbm, job.gpu_flops, own_kernels)
            ends.append(make.gpu(time, job.hbm, [returned] if computes else [returned, worked], f"{label} gpu"))
    if fused_bytes:
        ends.append(make.gpu(times.lora_ps(fused_bytes, fused_flops, 1.0), fused_bytes, start, f"{name} lora in HBM"))
    added = times.merge_ps(0) if far else 0
    return [make.gpu(added, 0, [*ends, base], f"{name} lora add")] if added else ends
