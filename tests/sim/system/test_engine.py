from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.sim.system.engine import LATENCY, NoProgressError, TaskGraph, check_conservation, simulate


def test_a_resource_serves_in_order_of_readiness_and_ties_go_to_the_older_task() -> None:
    graph = TaskGraph()
    slow = graph.add("a", 10)
    late = graph.add("b", 5, [slow])
    early = graph.add("b", 7)
    tied = graph.add("b", 3)
    schedule = simulate(graph)
    assert [schedule.start_ps[t] for t in (slow, early, tied, late)] == [0, 0, 7, 10]
    assert schedule.makespan_ps == 15


def test_latency_delays_successors_but_frees_the_resource() -> None:
    graph = TaskGraph()
    sent = graph.add("link", 4, latency_ps=100)
    graph.add("link", 4)
    graph.add("dev", 1, [sent])
    schedule = simulate(graph)
    assert schedule.start_ps == [0, 4, 104]


def test_tasks_without_a_resource_run_at_once() -> None:
    graph = TaskGraph()
    waits = [graph.add(None, 9) for _ in range(3)]
    graph.add(None, 0, waits)
    assert simulate(graph).makespan_ps == 9


def test_a_graph_that_cannot_finish_is_reported_with_the_stuck_task() -> None:
    graph = TaskGraph()
    graph.add("a", 1, label="first")
    stuck = graph.add("a", 1, label="stuck")
    graph.after[stuck] = (stuck,)
    with pytest.raises(NoProgressError, match=r"1 of 2 tasks never became ready, first: stuck"):
        simulate(graph)


def test_a_dependency_on_a_later_task_is_refused() -> None:
    with pytest.raises(ValueError, match="waits for"):
        TaskGraph().add("a", 1, [0])


def test_negative_durations_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        TaskGraph().add("a", -1)


def test_lost_bytes_are_seen() -> None:
    graph = TaskGraph()
    graph.add("link", 1, moved_bytes=5)
    schedule = simulate(graph)
    check_conservation(schedule, {"link": 5})
    with pytest.raises(AssertionError, match="link moved 5 bytes, asked for 6"):
        check_conservation(schedule, {"link": 6})


def test_an_empty_graph_takes_no_time() -> None:
    schedule = simulate(TaskGraph())
    assert schedule.makespan_ps == 0
    assert schedule.critical_ps() == {}


@st.composite
def graphs(draw: st.DrawFn) -> TaskGraph:
    graph = TaskGraph()
    for number in range(draw(st.integers(1, 25))):
        after = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        graph.add(
            draw(st.sampled_from(["a", "b", "c", None])),
            draw(st.integers(0, 9)),
            sorted(after),
            latency_ps=draw(st.integers(0, 4)),
            moved_bytes=draw(st.integers(0, 100)),
        )
    return graph


@given(graphs())
def test_schedules_respect_dependencies_and_never_share_a_resource(graph: TaskGraph) -> None:
    schedule = simulate(graph)
    for task, before in enumerate(graph.after):
        assert all(schedule.start_ps[task] >= schedule.done_ps[earlier] for earlier in before)
    for resource in range(len(graph.resources)):
        mine = sorted(
            (schedule.start_ps[t], schedule.start_ps[t] + graph.duration_ps[t])
            for t in range(len(graph))
            if graph.resource[t] == resource
        )
        assert all(end <= start for (_, end), (start, _) in pairwise(mine))


@given(graphs())
def test_no_resource_idles_while_a_task_is_ready_for_it(graph: TaskGraph) -> None:
    schedule = simulate(graph)
    for task in range(len(graph)):
        if schedule.start_ps[task] > schedule.ready_ps[task]:
            before = schedule.cause[task]
            assert graph.resource[before] == graph.resource[task]
            assert schedule.start_ps[before] + graph.duration_ps[before] == schedule.start_ps[task]


@given(graphs())
def test_the_critical_path_accounts_for_every_picosecond(graph: TaskGraph) -> None:
    schedule = simulate(graph)
    shares = schedule.critical_ps()
    assert sum(shares.values()) == schedule.makespan_ps
    assert set(shares) <= {*graph.resources, LATENCY}


@given(graphs())
def test_playing_a_graph_twice_gives_the_same_times(graph: TaskGraph) -> None:
    assert simulate(graph) == simulate(graph)
