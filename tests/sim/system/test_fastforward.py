from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora.hw.defs.errors import UserError
from plora.sim.system.attention import add_attention
from plora.sim.system.compose import StepModel, layer_phases, split
from plora.sim.system.config import RunOptions, resolve
from plora.sim.system.decode import setting_of
from plora.sim.system.engine import TaskGraph, simulate
from plora.sim.system.fastforward import FastPhases, can_fast_forward
from plora.sim.system.fastwave import JobTable, Wave
from plora.sim.system.served import APART, last_served, served, served_by_readiness, served_in_turn
from plora.sim.system.spec import STRATEGIES, bundled_systems
from plora.sim.system.tasks import Load, Setting
from plora.sim.system.work import Batch, Placement, serving


def setting_for(system: str, tokens: int, **choices: Any) -> Setting:
    resolved = resolve(RunOptions(systems=(system,), **choices))
    return setting_of(resolved, resolved.systems[0], tokens)


def random_load(setting: Setting, rng: np.random.Generator, requests: int, longest: int) -> Load:
    contexts = rng.integers(1, longest, requests)
    batch = Batch(contexts, rng.integers(-1, 30, requests))
    ranks = rng.choice([8, 16, 32, 64, 128], 30)
    served_now = serving(batch, ranks, setting.machine.far_devices)
    able = [STRATEGIES.index(s) for s in setting.spec.adapters.strategies]
    share = rng.choice([0.0, 0.3, 1.0]) if setting.spec.kv.hbm_copies else 0.0
    near = np.floor(contexts * share).astype(np.int64)
    return Load(batch, served_now, Placement(rng.choice(able, len(served_now)), near))


def wave_of(load: Load) -> Wave:
    now = load.serving
    return Wave(now.rows, now.ranks, now.devices, load.placement.strategies)


def base_of(setting: Setting) -> list[int]:
    return [group.base_ps for group in setting.work.kinds[-1].groups]


def events_ps(setting: Setting, load: Load, grown: int) -> tuple[int, int]:
    """Time of a layer's groups and of its attention, as events."""
    kind, later = setting.work.kinds[-1], load.grown(grown)
    groups = 0
    for phase in layer_phases(setting, kind, later, "layer"):
        if phase.part != "attention":
            graph = TaskGraph()
            phase.build(graph, [])
            groups += simulate(graph).makespan_ps
    graph = TaskGraph()
    add_attention(graph, setting, kind, later, [], "layer")
    return groups, simulate(graph).makespan_ps


def check(setting: Setting, load: Load, steps: int) -> None:
    kind = setting.work.kinds[-1]
    fast = FastPhases(setting.spec, setting.machine, kind)
    groups = fast.groups_ps(base_of(setting), 2 * len(load.batch) * setting.work.hidden_size, wave_of(load))
    attention = fast.attention_ps(setting.work, load.batch.contexts, load.placement.near_tokens, steps)
    assert attention.shape == (steps,)
    for k in range(steps):
        expected = events_ps(setting, load, k)
        assert groups == expected[0], f"{setting.spec.name}: groups"
        assert attention[k] == expected[1], f"{setting.spec.name}: attention, step {k}"


@pytest.mark.parametrize("system", bundled_systems())
@pytest.mark.parametrize("preset", ["paper", "priced"])
def test_the_closed_form_gives_the_times_of_the_events(system: str, preset: str) -> None:
    rng = np.random.default_rng(0)
    for requests in (1, 3, 11):
        setting = setting_for(system, requests, preset=preset)
        check(setting, random_load(setting, rng, requests, 900), 2)
        check(setting, random_load(setting, rng, requests, 900), 6)


@settings(max_examples=40)
@given(
    st.integers(0, 10_000),
    st.sampled_from(["plora", "ns", "nd-e4", "pure-cxl-cached", "plora-nocxl", "cpu-lora-offload", "grace-hopper"]),
    st.integers(1, 12),
    st.integers(1, 7),
    st.sampled_from(["one-port", "per-device"]),
    st.sampled_from(["multicast", "unicast"]),
)
def test_it_does_so_for_any_batch_pool_and_port(
    seed: int, system: str, requests: int, devices: int, sharing: str, transfer: str
) -> None:
    choices = {"num_devices": devices, "link_sharing": sharing, "costs": {"q_transfer": transfer}}
    setting = setting_for(system, requests, **choices)
    check(setting, random_load(setting, np.random.default_rng(seed), requests, 300), 4)


@settings(max_examples=40)
@given(
    st.integers(0, 10_000),
    st.sampled_from(["plora", "nd-e3", "nd-e4", "pure-cxl-cached", "plora-nocxl", "cpu-lora-offload", "s-lora"]),
    st.sampled_from([2, 4]),
    st.sampled_from(["sharded", "naive"]),
    st.integers(1, 12),
    st.sampled_from([("llama3-8b", "all"), ("mixtral-8x7b", "all-experts")]),
)
def test_it_does_so_for_tensor_parallel_gpus_and_adapters_on_experts(
    seed: int, system: str, gpus: int, wave: str, requests: int, of: tuple[str, str]
) -> None:
    model, scope = of
    choices = {"model": model, "lora_scope": scope, "tensor_parallel_size": gpus, "adapter_wave": wave}
    setting = setting_for(system, requests, **choices)
    check(setting, random_load(setting, np.random.default_rng(seed), requests, 300), 4)


def test_windows_slide_alike() -> None:
    rng = np.random.default_rng(2)
    for system in ("plora", "all-hbm"):
        setting = setting_for(system, 5, model="gpt-oss-120b")
        assert setting.work.kinds[-1].window == 128
        check(setting, random_load(setting, rng, 5, 300), 9)


def test_a_step_is_the_sum_of_its_phases() -> None:
    rng = np.random.default_rng(4)
    setting = setting_for("plora", 9)
    load = random_load(setting, rng, 9, 500)
    ranks = np.full(30, 8)
    ranks[load.serving.ids] = load.serving.ranks
    model = StepModel(setting, split(setting, load.batch, load.placement, ranks, 1), "dependency")
    kind = setting.work.kinds[0]
    fast = FastPhases(setting.spec, setting.machine, kind)
    groups = fast.groups_ps(base_of(setting), 2 * 9 * setting.work.hidden_size, wave_of(load))
    attention = fast.attention_ps(setting.work, load.batch.contexts, load.placement.near_tokens, 5)
    for k in range(5):
        assert model.step(k).time_ps == 32 * (groups + int(attention[k])) + setting.work.head_ps


def test_many_steps_at_once_are_the_same_as_one_by_one() -> None:
    rng = np.random.default_rng(5)
    setting = setting_for("plora", 30)
    load = random_load(setting, rng, 30, 2000)
    fast = FastPhases(setting.spec, setting.machine, setting.work.kinds[0])
    together = fast.attention_ps(setting.work, load.batch.contexts, load.placement.near_tokens, 500)
    single = [
        int(fast.attention_ps(setting.work, load.batch.contexts + k, load.placement.near_tokens, 1)[0])
        for k in range(500)
    ]
    assert together.tolist() == single


@pytest.mark.parametrize("system", ["plora", "nd-e4", "pure-cxl", "pure-cxl-cached", "ns"])
def test_a_half_duplex_link_sends_all_commands_before_any_result(system: str) -> None:
    rng = np.random.default_rng(6)
    for sharing in ("one-port", "per-device"):
        setting = setting_for(system, 7, link_sharing=sharing)
        setting = replace(setting, machine=replace(setting.machine, up=setting.machine.down))
        assert can_fast_forward(setting.spec, setting.machine)
        check(setting, random_load(setting, rng, 7, 400), 4)


def test_launches_on_a_half_duplex_link_are_left_to_the_events() -> None:
    setting = setting_for("plora-nocxl", 1)
    assert can_fast_forward(setting.spec, setting.machine)
    assert not can_fast_forward(setting.spec, replace(setting.machine, up=setting.machine.down))


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 9)), min_size=1, max_size=12), st.integers(0, 15))
def test_a_resource_in_closed_form_serves_as_the_engine_does(jobs: list[tuple[int, int]], free: int) -> None:
    graph = TaskGraph()
    graph.add("r", free)
    waits = [graph.add(None, ready) for ready, _ in jobs]
    tasks = [graph.add("r", length, [wait]) for wait, (_, length) in zip(waits, jobs, strict=True)]
    schedule = simulate(graph)
    ends = np.array([schedule.start_ps[t] + graph.duration_ps[t] for t in tasks])
    ready, length = (np.array([[job[i] for job in jobs]]) for i in (0, 1))
    assert served_by_readiness(ready, length, 0, free)[0].tolist() == ends.tolist()
    order = np.argsort(ready[0], kind="stable")
    assert served(ready[:, order], length[:, order], free)[0].tolist() == ends[order].tolist()
    assert last_served(ready, length, free).tolist() == [ends.max()]


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 12))
def test_jobs_that_are_ready_in_turn_need_no_sorting(seed: int, groups: int, jobs: int) -> None:
    rng = np.random.default_rng(seed)
    resource = rng.integers(0, 4, jobs)
    ready = np.cumsum(rng.integers(0, 50, (groups, jobs)), axis=1)
    length = rng.integers(0, 60, (groups, jobs))
    in_turn = served_in_turn(ready, length, resource)
    assert in_turn.tolist() == served_by_readiness(ready, length, resource).tolist()


def test_jobs_that_last_longer_than_resources_are_apart_are_refused() -> None:
    half, resource = APART // 2, np.array([0, 1])
    ready, length = np.array([[half, 0]]), np.array([[half // 2, half // 2 - 1]])
    ends = [[half + half // 2, half // 2 - 1]]
    assert served_by_readiness(ready, length, resource).tolist() == ends
    assert served_in_turn(ready, length, resource).tolist() == ends
    for longer in (length + 1, np.array([[0, half]])):
        with pytest.raises(UserError, match="longer than 281 s"):
            served_by_readiness(ready, longer, resource)
        with pytest.raises(UserError, match="longer than 281 s"):
            served_in_turn(ready, longer, resource)
    with pytest.raises(UserError, match="longer than 281 s"):
        served_by_readiness(ready, length, resource, APART)
    assert served_by_readiness(ready, length + APART, 0).shape == (1, 2), "one resource needs no room beside it"


def test_a_job_is_remembered_under_its_own_number() -> None:
    setting = setting_for("plora", 4)
    groups = setting.work.kinds[0].lora_groups
    rows, ranks, strategies = np.array([1, 2, 1, 1, 300]), np.array([8, 8, 64, 8, 4096]), np.array([2, 2, 2, 3, 2])
    together = JobTable(setting.machine, groups).of(rows, ranks, strategies)
    for job in range(len(rows)):
        one = slice(job, job + 1)
        alone = JobTable(setting.machine, groups).of(rows[one], ranks[one], strategies[one])
        assert together[:, :, one].tolist() == alone.tolist()
