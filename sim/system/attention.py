"""One layer's attention: the GPU over HBM, the far side over its share, KV appends, and the merge."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plora.sim.system.clock import duration_ps
from plora.sim.system.engine import TaskGraph
from plora.sim.system.layers import LayerKind
from plora.sim.system.tasks import Builder, Load, Setting, attention_device_ps, attention_limit, device_ps
from plora.sim.system.work import IntArray, attended

CHAIN_DESCRIPTORS = 3
"""Descriptors of the integral attention of one request on one device: scores, softmax, weighted sum
(the paper, section V-B)."""


def add_attention(
    graph: TaskGraph, setting: Setting, kind: LayerKind, load: Load, start: Sequence[int], name: str
) -> list[int]:
    """Add one layer's attention; return the tasks that end it."""
    machine, work, spec = setting.machine, setting.work, setting.spec
    make = Builder(graph, setting, "attention")
    devices = machine.far_devices if spec.kv.home == "far" else 0
    contexts = load.batch.contexts
    near, far = attended(
        contexts, contexts if spec.kv.home == "hbm" else load.placement.near_tokens, kind.window, devices
    )
    ends: list[int] = []
    if spec.launch.per == "layer":
        ends.append(make.launch(1 / kind.phases, start, f"{name} launches"))
    local = int(near.sum())
    if local:
        time = machine.times.attention_ps(
            len(load.batch), np.array([local]), work.kv_token_bytes, work.attention_flops_per_token
        )
        ends.append(make.gpu(int(time[0]), local * work.kv_token_bytes, start, f"{name} attention in HBM"))
    if not devices:
        return ends or list(start)
    if spec.kv.attention == "gpu":
        return ends + _over_link(make, load, far, start, name)
    returned = _near_data(make, load, far, start, name)
    # The GPU rescales partial results and anchors into the exact output, in any order of arrival.
    merge = machine.times.merge_ps((devices + (1 if local else 0)) * len(load.batch) * work.partial_bytes)
    return [make.gpu(merge, 0, [*returned, *ends], f"{name} merge")] if merge else ends + returned


def newest_on_device(contexts: IntArray, devices: int) -> list[int]:
    """Return how many of the requests' newest tokens each device stores."""
    return [int(count) for count in np.bincount((contexts - 1) % devices, minlength=devices)]


def _over_link(make: Builder, load: Load, far: IntArray, start: Sequence[int], name: str) -> list[int]:
    """The GPU reads far KV with its own loads: requests down, KV up while the device's DRAM delivers it."""
    machine, work = make.setting.machine, make.setting.work
    ends: list[int] = []
    stored = newest_on_device(load.batch.contexts, machine.far_devices)
    for device, tokens in enumerate(far.sum(axis=0).tolist()):
        label = f"{name} KV dev{device}"
        appended = stored[device] * work.kv_token_bytes
        wrote, read = machine.wire.write(appended), machine.wire.read(tokens * work.kv_token_bytes)
        asked = make.down(device, wrote[0] + read[0], start, label)
        size = tokens * work.kv_token_bytes + appended
        streamed = make.device(device, size, device_ps(machine, size, 0, 0), [asked], label, computes=False)
        arrived = make.up(device, wrote[1] + read[1], [asked], label)
        # The kernel computes on what its loads bring; only its arithmetic could take longer.
        time = duration_ps(tokens * work.attention_flops_per_token, machine.times.flop_ps)
        ends.append(make.gpu(time, 0, [arrived, streamed], label))
    return ends


def chunk_bounds(rows: int, chunks: int) -> list[tuple[int, int]]:
    """Split `rows` requests into at most `chunks` runs of nearly equal length."""
    chunks = min(chunks, rows)
    return [(rows * c // chunks, rows * (c + 1) // chunks) for c in range(chunks)]


def _near_data(make: Builder, load: Load, far: IntArray, start: Sequence[int], name: str) -> list[int]:
    """Each device attends over its own tokens; partial results and anchors come back in chunks."""
    machine, work = make.setting.machine, make.setting.work
    wire, devices = machine.wire, machine.far_devices
    ends: list[int] = []
    for low, high in chunk_bounds(len(load.batch), machine.return_chunks):
        rows = high - low
        stored = newest_on_device(load.batch.contexts[low:high], devices)
        # One chain of descriptors for each request: scores, softmax, weighted sum.
        query = rows * (work.query_bytes + CHAIN_DESCRIPTORS * machine.descriptor_bytes)
        result = wire.read(rows * (work.partial_bytes + machine.flag_bytes))
        writes = [wire.write(query + count * work.kv_token_bytes) for count in stored]
        label = f"{name} q {low}"
        if machine.multicast:
            size = wire.write(query + rows * work.kv_token_bytes)[0] + devices * result[0]
            sends = [make.down(0, size, start, label, command=True)] * devices
        else:
            sends = [
                make.down(device, writes[device][0] + result[0], start, f"{label} dev{device}", command=True)
                for device in range(devices)
            ]
        for device, tokens in enumerate(far[low:high].sum(axis=0).tolist()):
            label = f"{name} attention {low} dev{device}"
            moved = (tokens + stored[device]) * work.kv_token_bytes
            took = int(attention_device_ps(machine, work, rows, tokens, stored[device])), attention_limit(machine, work)
            worked = make.device(device, moved, took, [sends[device]], label)
            ends.append(make.up(device, result[1] + writes[device][1], [worked], label))
    return ends
