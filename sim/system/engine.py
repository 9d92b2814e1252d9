"""The event-driven core: tasks that wait for one another and for resources.

A `TaskGraph` holds tasks; each runs on one resource (or on none, if it only waits or joins), takes
a whole number of picoseconds there, and may be followed by a latency during which its result
travels but the resource is free again. A resource serves one task at a time, in the order in which
tasks became ready; ties go to the task that was added first. `simulate` plays the graph with one
heap entry a task and is deterministic.

Assigning a task to its resource at the moment it becomes ready is exact: ready times leave the heap
in order, and nothing that becomes ready later may overtake in a first-come-first-served queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

WAIT = -1
"""The resource of a task that only waits: any number of these run at once."""

LATENCY = "latency"
"""What bounds a task that only waits, and a result in flight."""


class NoProgressError(RuntimeError):
    """The simulated system stopped before its work was done: the watchdog's report."""


@dataclass
class TaskGraph:
    """Tasks in the order in which they were added, as parallel lists.

    Attributes:
        resources: names by resource number.
        resource: resource number of each task, or `WAIT`.
        duration_ps: time each task occupies its resource.
        latency_ps: time between leaving the resource and being done.
        moved_bytes: bytes each task moves over its resource, for the conservation checks.
        kind: what each task is part of, for attribution ("base", "lora", "attention", ...).
        limit: what bounds each task's duration, for attribution; the resource's name unless said.
        label: name of each task, for the timeline.
        after: numbers of the tasks each task waits for.
    """

    resources: list[str] = field(default_factory=list)
    resource: list[int] = field(default_factory=list)
    duration_ps: list[int] = field(default_factory=list)
    latency_ps: list[int] = field(default_factory=list)
    moved_bytes: list[int] = field(default_factory=list)
    kind: list[str] = field(default_factory=list)
    limit: list[str] = field(default_factory=list)
    label: list[str] = field(default_factory=list)
    after: list[tuple[int, ...]] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.resource)

    def resource_number(self, name: str) -> int:
        """Return the number of the resource called `name`, which is made when first named."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.resources)
            self.resources.append(name)
        return number

    def add(
        self,
        resource: str | None,
        duration_ps: int,
        after: Iterable[int] = (),
        *,
        latency_ps: int = 0,
        moved_bytes: int = 0,
        kind: str = "",
        limit: str = "",
        label: str = "",
    ) -> int:
        """Add a task and return its number. Tasks wait only for tasks with smaller numbers.

        Raises:
            ValueError: a negative time or size, or a dependency that does not exist yet.
        """
        number = len(self.resource)
        before = tuple(after)
        if duration_ps < 0 or latency_ps < 0 or moved_bytes < 0:
            raise ValueError(f"task {label or number}: negative duration, latency or size")
        if before and not 0 <= min(before) <= max(before) < number:
            raise ValueError(f"task {label or number} waits for {before}, not all of which exist yet")
        self.resource.append(WAIT if resource is None else self.resource_number(resource))
        self.duration_ps.append(duration_ps)
        self.latency_ps.append(latency_ps)
        self.moved_bytes.append(moved_bytes)
        self.kind.append(kind)
        self.limit.append(limit or resource or LATENCY)
        self.label.append(label)
        self.after.append(before)
        return number

    def bytes_by_resource(self) -> dict[str, int]:
        """Return the bytes that the tasks ask each resource to move."""
        totals = dict.fromkeys(self.resources, 0)
        for resource, moved in zip(self.resource, self.moved_bytes, strict=True):
            if resource != WAIT:
                totals[self.resources[resource]] += moved
        return totals


@dataclass(frozen=True)
class Schedule:
    """When each task of a graph ran.

    Attributes:
        graph: the graph that was played.
        ready_ps, start_ps: when each task's dependencies were done, and when its resource took it.
        done_ps: when its result was there (latency included).
        cause: the task whose end let each task start (a dependency, or its predecessor on the
            resource), or -1 for a task that started at once.
        makespan_ps: when the last task was done.
    """

    graph: TaskGraph
    ready_ps: list[int]
    start_ps: list[int]
    done_ps: list[int]
    cause: list[int]
    makespan_ps: int

    def busy_ps(self) -> dict[str, int]:
        """Return the time each resource was occupied."""
        totals = dict.fromkeys(self.graph.resources, 0)
        for resource, duration in zip(self.graph.resource, self.graph.duration_ps, strict=True):
            if resource != WAIT:
                totals[self.graph.resources[resource]] += duration
        return totals

    def served_bytes(self) -> dict[str, int]:
        """Return the bytes each resource moved, counted from the tasks that were played to their end."""
        totals = dict.fromkeys(self.graph.resources, 0)
        for number, resource in enumerate(self.graph.resource):
            if resource != WAIT and self.done_ps[number] >= 0:
                totals[self.graph.resources[resource]] += self.graph.moved_bytes[number]
        return totals

    def critical_ps(self) -> dict[str, int]:
        """Split the makespan over what it waited for, along the critical path.

        Keys are the tasks' limits and `LATENCY` (results in flight). The values add up to the
        makespan exactly.
        """
        shares: dict[str, int] = {}
        if not self.done_ps:
            return shares
        graph = self.graph
        task = max(range(len(graph)), key=lambda number: (self.done_ps[number], -number))
        end = self.done_ps[task]
        while task >= 0:
            # Where the successor waited for the resource, `end` is when the task left it; where it
            # waited for the result, the latency lies between.
            leaves = self.start_ps[task] + graph.duration_ps[task]
            if end > leaves:
                shares[LATENCY] = shares.get(LATENCY, 0) + end - leaves
            limit = graph.limit[task]
            shares[limit] = shares.get(limit, 0) + leaves - self.start_ps[task]
            end = self.start_ps[task]
            task = self.cause[task]
        return shares


def simulate(graph: TaskGraph) -> Schedule:
    """Play `graph` from time 0 with every resource free.

    Raises:
        NoProgressError: tasks are left that can never become ready.
    """
    count = len(graph)
    after, resource = graph.after, graph.resource
    duration, latency = graph.duration_ps, graph.latency_ps
    waiting = [len(before) for before in after]
    successors: list[list[int]] = [[] for _ in range(count)]
    for number, before in enumerate(after):
        for earlier in before:
            successors[earlier].append(number)
    ready = [0] * count
    start = [-1] * count
    done = [-1] * count
    cause = [-1] * count
    free = [0] * len(graph.resources)
    last = [-1] * len(graph.resources)
    heap = [(0, number) for number in range(count) if not waiting[number]]
    push, pop = heapq.heappush, heapq.heappop
    played = 0
    while heap:
        now, task = pop(heap)
        played += 1
        begin = now
        where = resource[task]
        if where != WAIT:
            if free[where] > now:
                begin = free[where]
                cause[task] = last[where]
            free[where] = begin + duration[task]
            last[where] = task
        start[task] = begin
        end = begin + duration[task] + latency[task]
        done[task] = end
        for later in successors[task]:
            waiting[later] -= 1
            if end > ready[later] or cause[later] < 0:
                ready[later] = max(end, ready[later])
                cause[later] = task
            if not waiting[later]:
                push(heap, (ready[later], later))
    if played != count:
        stuck = [graph.label[number] or str(number) for number in range(count) if done[number] < 0]
        raise NoProgressError(f"{len(stuck)} of {count} tasks never became ready, first: {', '.join(stuck[:3])}")
    return Schedule(graph, ready, start, done, cause, max(done, default=0))


def check_conservation(schedule: Schedule, asked: dict[str, int]) -> None:
    """Check that every resource moved exactly the bytes it was asked for.

    Raises:
        AssertionError: bytes were lost or invented; the message names the resource.
    """
    served = schedule.served_bytes()
    for name in sorted(set(served) | set(asked)):
        if served.get(name, 0) != asked.get(name, 0):
            raise AssertionError(f"{name} moved {served.get(name, 0)} bytes, asked for {asked.get(name, 0)}")
