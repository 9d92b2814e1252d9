"""The time of one decode step, by one of three compositions.

A step is a chain of phases: for each layer its groups of matrices and its attention, then the head.
A phase starts when the one before it is done, entirely, because it needs the activations that the
previous one made. It therefore finds all resources free, and equal phases may be played once and
counted. Sub-batches have chains of their own, which overlap.


``dependency`` plays the phases of every layer as events; ``overlap`` takes the slowest of HBM,
devices and link over the whole step, which section VIII of the paper needs; ``additive`` adds base
model, adapters and attention, each at the pace of its own slowest resource, which Figs. 9 and 11
need. All three take their demands from the same task graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from plora.sim.system.attention import add_attention
from plora.sim.system.engine import LATENCY, Schedule, TaskGraph, check_conservation, simulate
from plora.sim.system.layers import Group, LayerKind
from plora.sim.system.lora import add_group
from plora.sim.system.tasks import (
    DOWN_LIMIT,
    FABRIC,
    FABRIC_LIMIT,
    GPU,
    HBM_LIMIT,
    HOST,
    HOST_LIMIT,
    UP_LIMIT,
    Builder,
    Load,
    Setting,
)
from plora.sim.system.work import E1, E4, Batch, IntArray, Placement, serving

Composition = Literal["dependency", "overlap", "additive"]

COMPOSITIONS: tuple[Composition, ...] = ("dependency", "overlap", "additive")


@dataclass
class Demand:
    """What a step asks of each resource, and where the time of its critical path goes.

    Attributes:
        busy_ps: time each resource is occupied.
        moved_bytes: bytes each resource moves.
        part_ps: time on the way of "base", "lora", "attention": of phases in `dependency`, of the
            parts' own bounds in the other compositions.
        limit_ps: the step's time split over what bounded it.
        kind_busy_ps: occupation by (part, resource).
        phase_ps: time of each phase, in `dependency` played phase by phase, split over what bounded it:
            by (kind of layer, phase, limit).
    """

    busy_ps: dict[str, int] = field(default_factory=dict)
    moved_bytes: dict[str, int] = field(default_factory=dict)
    part_ps: dict[str, int] = field(default_factory=dict)
    limit_ps: dict[str, int] = field(default_factory=dict)
    kind_busy_ps: dict[tuple[str, str], int] = field(default_factory=dict)
    phase_ps: dict[tuple[int, str, str], int] = field(default_factory=dict)

    def __iadd__(self, other: Demand) -> Demand:
        for name in ("busy_ps", "moved_bytes", "part_ps", "limit_ps", "kind_busy_ps", "phase_ps"):
            self.add(name, getattr(other, name).items())
        return self

    def add(self, target: str, amounts: Iterable[tuple[object, int]], times: int = 1) -> None:
        """Add `times` the `amounts` to the table named `target`."""
        table = getattr(self, target)
        for key, amount in amounts:
            table[key] = table.get(key, 0) + amount * times


@dataclass(frozen=True)
class Step:
    """One decode step.

    Attributes:
        time_ps: its length.
        demand: what it asked for and what bounded it.
        bound_by: what bounded most of it.
    """

    time_ps: int
    demand: Demand

    @property
    def bound_by(self) -> str:
        """What bounded the largest part of the step."""
        limits = self.demand.limit_ps
        return max(limits, key=lambda name: (limits[name], name)) if limits else "nothing"


class Phase(NamedTuple):
    """A part of a step that begins when the one before is done.

    Attributes:
        kind: number of its kind of layer, -1 for the head.
        name: its group of matrices, or attention.
        part: "base", "lora" or "attention".
        times: how often it occurs in a step.
        build: adds its tasks to a graph after given ones, and returns those that end it.
    """

    kind: int
    name: str
    part: str
    times: int
    build: Callable[[TaskGraph, list[int]], list[int]]


def layer_phases(setting: Setting, kind: LayerKind, load: Load, name: str, number: int = 0) -> list[Phase]:
    """Return the phases of one layer of kind `number` in order; each occurs `kind.count` times a step."""

    def group(which: Group) -> Phase:
        def build(graph: TaskGraph, start: list[int]) -> list[int]:
            return add_group(graph, setting, kind, which, load, start, f"{name} {which.name}")

        return Phase(number, which.name, "lora", kind.count, build)

    def attention(graph: TaskGraph, start: list[int]) -> list[int]:
        return add_attention(graph, setting, kind, load, start, name)

    middle = Phase(number, "attention", "attention", kind.count, attention)
    return [*map(group, kind.before), middle, *map(group, kind.after)]


def _add_head(graph: TaskGraph, setting: Setting, start: list[int]) -> list[int]:
    work = setting.work
    return [Builder(graph, setting, "base").gpu(work.head_ps, work.head_bytes, start, "head")]


def step_phases(setting: Setting, load: Load) -> list[Phase]:
    """Return the phases of a step: those of each kind of layer, and the head."""
    found: list[Phase] = []
    for number, kind in enumerate(setting.work.kinds):
        found += layer_phases(setting, kind, load, f"kind{number}", number)

    def head(graph: TaskGraph, start: list[int]) -> list[int]:
        return _add_head(graph, setting, start)

    return [*found, Phase(-1, "head", "base", 1, head)]


def split(setting: Setting, batch: Batch, placement: Placement, ranks: IntArray, parts: int) -> list[Load]:
    """Return the loads of `parts` sub-batches of `batch` under one placement."""
    devices = setting.machine.far_devices
    whole = serving(batch, ranks, devices)
    if parts == 1:
        return [Load(batch, whole, placement)]
    strategy_of = dict(zip(whole.ids.tolist(), placement.strategies.tolist(), strict=True))
    loads = []
    for number in range(min(parts, len(batch))):
        part = batch.part(number, parts)
        served = serving(part, ranks, devices)
        strategies = np.array([strategy_of[a] for a in served.ids.tolist()], dtype=np.int64)
        loads.append(Load(part, served, Placement(strategies, placement.near_tokens[number::parts])))
    return loads


def full_graph(setting: Setting, loads: list[Load]) -> TaskGraph:
    """Return the whole step as one graph: a chain of phases for each sub-batch, over shared resources."""
    graph = TaskGraph()
    ends: list[list[int]] = [[] for _ in loads]
    layer = 0
    for kind in setting.work.kinds:
        for _ in range(kind.count):
            for number, load in enumerate(loads):
                name = f"layer{layer}" if len(loads) == 1 else f"layer{layer}.{number}"
                for phase in layer_phases(setting, kind, load, name):
                    ends[number] = phase.build(graph, ends[number])
            layer += 1
    for number in range(len(loads)):
        ends[number] = _add_head(graph, setting, ends[number])
    return graph


def _played(graph: TaskGraph) -> Schedule:
    schedule = simulate(graph)
    check_conservation(schedule, graph.bytes_by_resource())
    return schedule


def asked_of_memory(setting: Setting, loads: Iterable[Load]) -> tuple[int, int]:
    """Return the bytes that a step asks of far memory, from the placement alone, and how far rounding may be off.

    Of every adapter outside HBM the matrices that its strategy leaves there; of every request the keys and values
    of attended tokens that have no copy in HBM, and its newest token's.
    """
    spec, work = setting.spec, setting.work
    asked, pieces = 0.0, 0
    for load in loads:
        contexts, served = load.batch.contexts, load.serving
        columns = served.rows.tolist(), served.ranks.tolist(), load.placement.strategies.tolist()
        for kind in work.kinds:
            for group in kind.lora_groups:
                for rows, rank, strategy in zip(*columns, strict=True):
                    if strategy != E1:
                        width = group.a_columns + (group.b_columns if strategy != E4 else 0)
                        asked += kind.count * 2 * rank * width * group.touched(rows)
                        pieces += 4 * kind.count
            if spec.kv.home == "far":
                first = contexts - (contexts if kind.window is None else np.minimum(contexts, kind.window))
                copied = np.minimum(load.placement.near_tokens, contexts)
                tokens = int((contexts - np.maximum(first, copied)).sum()) + len(contexts)
                asked += kind.count * tokens * work.kv_token_bytes
                pieces += kind.count * len(contexts) * setting.machine.far_devices
    return round(asked), pieces


def _conserved(setting: Setting, loads: list[Load], demand: Demand) -> None:
    """Check that far memory moves what the placement asks of it.

    Raises:
        AssertionError: bytes were lost or invented on the way from the placement to the tasks.
    """
    moved = sum(size for name, size in demand.moved_bytes.items() if name.startswith("dev"))
    asked, rounding = asked_of_memory(setting, loads)
    if abs(moved - asked) > rounding:
        raise AssertionError(f"far memory moved {moved} bytes in a step, asked for {asked}")


def _count(demand: Demand, graph: TaskGraph, times: int) -> None:
    """Add a graph's bytes and durations, `times` over."""
    busy: dict[tuple[str, str], int] = {}
    for number, resource in enumerate(graph.resource):
        if resource >= 0:
            key = graph.kind[number], graph.resources[resource]
            busy[key] = busy.get(key, 0) + graph.duration_ps[number]
    demand.add("kind_busy_ps", busy.items(), times)
    demand.add("busy_ps", ((resource, time) for (_, resource), time in busy.items()), times)
    demand.add("moved_bytes", graph.bytes_by_resource().items(), times)


def _exposed_ps(setting: Setting, loads: list[Load]) -> int:
    """Time in which the devices can have nothing to do: round trips, first operands, last results."""
    machine, work = setting.machine, setting.work
    if not machine.has_far:
        return 0
    per_layer = machine.layer_round_trips * 2 * machine.one_way_ps
    if machine.expose_transfers and setting.spec.far.compute != "none":
        for load in loads:
            served = load.serving
            if setting.spec.kv.attention == "distributed":
                size = work.query_bytes * (1 if machine.multicast else machine.far_devices)
                per_layer += (size + work.partial_bytes * machine.far_devices) * machine.link_byte_ps
            if len(served):
                group = work.kinds[0].lora_groups[0]
                first, last = int(served.rows[0]), int(served.rows[-1])
                per_layer += (2 * first * group.input_dim + 2 * last * group.b_columns) * machine.link_byte_ps
    return round(per_layer * work.layers)


_LIMIT_OF = {GPU: HBM_LIMIT, HOST: HOST_LIMIT, FABRIC: FABRIC_LIMIT}


def _limit_name(resource: str) -> str:
    if resource.startswith("dev"):
        return "devices"
    if resource.startswith("link"):
        return DOWN_LIMIT if resource.endswith("down") else UP_LIMIT
    return _LIMIT_OF.get(resource, resource)


class StepModel:
    """Times the steps of one batch under one placement, as its contexts grow.

    What does not depend on the contexts (every phase but attention) is worked out once. Growing by
    k tokens is the same as playing the step k tokens later, so steps may be asked for in any order.
    """

    def __init__(self, setting: Setting, loads: list[Load], composition: Composition) -> None:
        self._setting = setting
        self._loads = loads
        self._composition = composition
        self._static_ps, self._static = 0, Demand()
        if not self._interleaved:
            for load in loads:
                wanted = [phase for phase in step_phases(setting, load) if phase.part != "attention"]
                time, demand = self._play(wanted)
                self._static_ps += time
                self._static += demand

    @property
    def _interleaved(self) -> bool:
        """Whether phases of several sub-batches share resources, so that none can be played alone."""
        return self._composition == "dependency" and len(self._loads) > 1

    def _play(self, wanted: list[Phase]) -> tuple[int, Demand]:
        demand, total = Demand(), 0
        for kind, name, part, times, build in wanted:
            graph = TaskGraph()
            build(graph, [])
            _count(demand, graph, times)
            if self._composition != "dependency":
                continue
            schedule = _played(graph)
            total += schedule.makespan_ps * times
            limits = schedule.critical_ps()
            demand.add("limit_ps", limits.items(), times)
            demand.add("phase_ps", (((kind, name, limit), time) for limit, time in limits.items()), times)
            # What the base model alone would take is base; the rest is the adapters', or the launches'.
            if part == "lora" and "lora" not in graph.kind:
                part = "launch"
            alone = sum(graph.duration_ps[n] for n in range(len(graph)) if graph.kind[n] == "base")
            alone = min(alone, schedule.makespan_ps)
            demand.add("part_ps", [("base", alone), (part, schedule.makespan_ps - alone)], times)
        return total, demand

    def step(self, grown: int = 0) -> Step:
        """Return the step in which every context is `grown` tokens longer than in the loads."""
        loads = [load.grown(grown) for load in self._loads]
        if self._interleaved:
            return _interleaved_step(self._setting, loads)
        demand = Demand()
        demand += self._static
        total = self._static_ps
        for load in loads:
            wanted = [phase for phase in step_phases(self._setting, load) if phase.part == "attention"]
            time, attention = self._play(wanted)
            total += time
            demand += attention
        _conserved(self._setting, loads, demand)
        if self._composition == "overlap":
            return _overlap_step(self._setting, loads, demand)
        if self._composition == "additive":
            return _additive_step(self._setting, loads, demand)
        return Step(total, demand)


def _interleaved_step(setting: Setting, loads: list[Load]) -> Step:
    """Play the whole step with its sub-batches as one graph."""
    graph = full_graph(setting, loads)
    schedule = _played(graph)
    demand = Demand()
    _count(demand, graph, 1)
    _conserved(setting, loads, demand)
    demand.add("limit_ps", schedule.critical_ps().items())
    demand.add("part_ps", [("overlapped", schedule.makespan_ps)])
    return Step(schedule.makespan_ps, demand)


def _overlap_step(setting: Setting, loads: list[Load], demand: Demand) -> Step:
    """The slowest of GPU, devices, link directions and launches, each busy without gaps.

    Devices additionally wait for the exposed transfers. Blocking launches stop everything else, so
    they are added.
    """
    exposed = _exposed_ps(setting, loads)
    bounds: dict[str, int] = {}
    blocked = 0
    for resource, busy in demand.busy_ps.items():
        if resource == HOST and setting.spec.launch.blocking:
            blocked = busy
            continue
        name = _limit_name(resource)
        time = busy + exposed if resource.startswith("dev") else busy
        bounds[name] = max(bounds.get(name, 0), time)
    slowest = max(bounds, key=lambda name: (bounds[name], name))
    demand.add("limit_ps", [(slowest, bounds[slowest])])
    if blocked:
        demand.add("limit_ps", [(HOST_LIMIT, blocked)])
    demand.add("part_ps", [("overlapped", bounds[slowest]), ("launches", blocked)])
    return Step(bounds[slowest] + blocked, demand)


def _additive_step(setting: Setting, loads: list[Load], demand: Demand) -> Step:
    """Base model, adapters and attention one after the other, each at the pace of its slowest resource."""
    exposed = _exposed_ps(setting, loads)
    launching = demand.busy_ps.get(HOST, 0)
    blocking = setting.spec.launch.blocking
    total = 0
    for part in ("base", "lora", "attention", *(("launch",) if blocking else ())):
        bounds: dict[str, int] = {}
        for (kind, resource), busy in demand.kind_busy_ps.items():
            if kind == part:
                name = _limit_name(resource)
                bounds[name] = max(bounds.get(name, 0), busy)
        if bounds:
            slowest = max(bounds, key=lambda name: (bounds[name], name))
            total += bounds[slowest]
            demand.add("limit_ps", [(slowest, bounds[slowest])])
            demand.add("part_ps", [(part, bounds[slowest])])
    if exposed:
        total += exposed
        demand.add("limit_ps", [(LATENCY, exposed)])
        demand.add("part_ps", [("exposed", exposed)])
    if not blocking and launching > total:
        # The host cannot launch as fast as the GPU runs.
        demand.add("limit_ps", [(HOST_LIMIT, launching - total)])
        demand.add("part_ps", [("launch", launching - total)])
        total = launching
    return Step(total, demand)
