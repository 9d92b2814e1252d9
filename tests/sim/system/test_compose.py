from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora.sim.hardware.gpu_step import decode_step_time
from plora.sim.llm import load_model
from plora.sim.system.compose import StepModel, full_graph, split
from plora.sim.system.config import Resolved, RunOptions, resolve
from plora.sim.system.decode import DecodeRun, decode_batch, decode_run, setting_of
from plora.sim.system.engine import simulate
from plora.sim.system.spec import bundled_systems
from plora.sim.system.work import Batch


def options(**choices: Any) -> Resolved:
    return resolve(RunOptions(**{"steps": 2, **choices}))


def decoded(system: str, **choices: Any) -> DecodeRun:
    resolved = options(systems=(system,), **choices)
    return decode_run(resolved, resolved.systems[0])


def tpot_ms(system: str, **choices: Any) -> float:
    return float(decoded(system, **choices).step_ps.mean()) / 1e9


@pytest.mark.parametrize(
    ("model", "floor_ms", "tokens_per_s"),
    [("llama2-7b", 4.18, 7657), ("llama2-13b", 7.76, 4123), ("llama3-8b", 4.78, 6700)],
)
def test_overlap_meets_the_hbm_floor_of_the_paper(model: str, floor_ms: float, tokens_per_s: float) -> None:
    time = tpot_ms("plora", model=model, composition="overlap")
    assert round(time, 2) == floor_ms
    assert round(32e3 / time) == pytest.approx(tokens_per_s, abs=1)


@pytest.mark.parametrize("system", bundled_systems())
@pytest.mark.parametrize("preset", ["paper", "priced"])
def test_counting_equal_layers_is_the_same_as_playing_them_all(system: str, preset: str) -> None:
    resolved = options(systems=(system,), preset=preset, batch_size=6)
    run = decode_run(resolved, resolved.systems[0])
    played = simulate(full_graph(run.setting, list(run.loads)))
    assert played.makespan_ps == run.played[0].time_ps
    assert played.busy_ps() == {
        name: busy for name, busy in run.played[0].demand.busy_ps.items() if name in played.busy_ps()
    }


def test_layers_with_and_without_a_window_are_played_alike() -> None:
    run = decoded("plora", model="gpt-oss-120b", batch_size=4, context_tokens=1000)
    assert simulate(full_graph(run.setting, list(run.loads))).makespan_ps == run.played[0].time_ps


@pytest.mark.parametrize("system", bundled_systems())
def test_what_bounds_a_step_adds_up_to_it(system: str) -> None:
    for composition in ("dependency", "overlap", "additive"):
        step = decoded(system, composition=composition, batch_size=6).played[0]
        assert sum(step.demand.limit_ps.values()) == step.time_ps, composition
        assert sum(step.demand.part_ps.values()) == step.time_ps, composition


@pytest.mark.parametrize("system", ["plora", "nd-e4", "ns", "pure-cxl", "plora-nocxl", "all-hbm"])
def test_compositions_move_the_same_bytes_and_only_order_them_differently(system: str) -> None:
    resolved = options(systems=(system,), preset="paper", batch_size=8)
    run = decode_run(resolved, resolved.systems[0])
    loads = list(run.loads)
    steps = {c: StepModel(run.setting, loads, c).step() for c in ("dependency", "overlap", "additive")}
    moved = {name: step.demand.moved_bytes for name, step in steps.items()}
    assert moved["dependency"] == moved["overlap"] == moved["additive"]
    # Whatever waits for nothing is at least as fast as what waits.
    assert steps["overlap"].time_ps <= steps["additive"].time_ps
    bare = max(t for name, t in steps["dependency"].demand.busy_ps.items() if name != "host")
    assert steps["dependency"].time_ps >= bare


def test_sub_batches_read_the_weights_again_and_overlap() -> None:
    # Without copies in HBM the GPU is idle during attention, unless another sub-batch uses it.
    alone = {"plora": {"kv": {"hbm_copies": False}}}
    whole, halves = (decoded("plora", sub_batches=n, workload="uniform-long", systems_changed=alone) for n in (1, 2))
    one, two = whole.played[0].demand.moved_bytes, halves.played[0].demand.moved_bytes
    assert two["gpu"] - one["gpu"] == pytest.approx(whole.setting.work.weight_bytes, rel=1e-6)
    assert sum(two[f"dev{d}"] for d in range(4)) == pytest.approx(sum(one[f"dev{d}"] for d in range(4)), rel=0.05)
    chain = sum(StepModel(halves.setting, [load], "dependency").step().time_ps for load in halves.loads)
    assert halves.played[0].time_ps < chain


def test_a_batch_without_adapters_costs_what_the_base_model_costs() -> None:
    resolved = options(systems=("plora",))
    spec = resolved.systems[0]
    batch = decode_batch(resolved)
    bare = Batch(batch.contexts, batch.adapters * 0 - 1)
    run = decode_run(resolved, spec)
    placement = replace(run.loads[0].placement, strategies=run.strategies[:0])
    setting = setting_of(resolved, spec, len(bare))
    step = StepModel(setting, split(setting, bare, placement, resolved.source.adapter_ranks(0), 1), "dependency").step()
    attention = {k: v for k, v in step.demand.part_ps.items() if k != "base"}
    assert attention.get("lora", 0) == 0
    assert (
        step.demand.part_ps["base"]
        == sum(k.count * g.base_ps for k in setting.work.kinds for g in k.groups) + setting.work.head_ps
    )


@pytest.mark.parametrize("model", ["llama3-8b", "qwen3-30b-a3b", "gpt-oss-120b"])
@pytest.mark.parametrize("batch", [1, 64])
def test_a_gpu_without_adapters_takes_what_the_calibrated_kernels_take(model: str, batch: int) -> None:
    resolved = options(systems=("all-hbm",), model=model, batch_size=batch, steps=1, context_tokens=2048)
    spec = resolved.systems[0]
    run = decode_run(resolved, spec)
    placement = replace(run.loads[0].placement, strategies=run.strategies[:0])
    bare = Batch(run.batch.contexts, run.batch.adapters * 0 - 1)
    loads = split(run.setting, bare, placement, resolved.source.adapter_ranks(0), 1)
    step = StepModel(run.setting, loads, "dependency").step()
    expected = decode_step_time(resolved.gpu, load_model(model), batch, 2048.0).total_ns * 1e3
    assert step.time_ps == pytest.approx(expected, rel=0.01)


def test_a_faster_link_never_slows_a_step_down() -> None:
    times = [tpot_ms("ns", link_numbers={"gb_per_s": rate}) for rate in (32.0, 64.0, 128.0, 256.0)]
    assert times == sorted(times, reverse=True)


def test_a_port_for_each_device_relieves_what_the_link_bounds() -> None:
    assert tpot_ms("pure-cxl", link_sharing="per-device") < 0.5 * tpot_ms("pure-cxl")


def test_a_smaller_kv_cache_shortens_long_contexts() -> None:
    times = [tpot_ms("plora", workload="uniform-long", kv_cache_dtype=t) for t in ("fp16", "int8", "int4")]
    assert times == sorted(times, reverse=True)


def test_latency_is_hidden_at_short_contexts_and_second_order_at_long_ones() -> None:
    """The paper, section VIII, finding 4: nothing at short contexts, 0.3 % at 200 ns and 2.6 % at 2000 ns."""

    def step(workload: str, latency: float) -> float:
        return tpot_ms("plora", workload=workload, composition="overlap", link_numbers={"one_way_latency_ns": latency})

    assert step("uniform", 2000.0) == step("uniform", 0.0)
    long = [step("uniform-long", latency) for latency in (0.0, 200.0, 2000.0)]
    assert 1.0 < long[1] / long[0] < 1.01 < long[2] / long[0] < 1.05


@settings(max_examples=12)
@given(st.integers(1, 40), st.integers(1, 3000), st.integers(1, 9), st.integers(0, 5))
def test_every_step_conserves_bytes_and_starts_with_free_resources(
    batch: int, context: int, devices: int, seed: int
) -> None:
    run = decoded("plora", batch_size=batch, context_tokens=context, num_devices=devices, seed=seed)
    step = run.played[0]
    kv = run.setting.work.kv_token_bytes * run.setting.work.layers
    reads = sum(step.demand.moved_bytes.get(f"dev{d}", 0) for d in range(devices))
    far_tokens = int(run.batch.contexts.sum() - run.loads[0].placement.near_tokens.sum())
    in_far = run.strategies != 0
    lora = sum(
        2 * int(r) * (g.a_columns + (g.b_columns if s == 2 or s == 1 else 0)) * k.count
        for r, s, far in zip(run.serving.ranks, run.strategies, in_far, strict=True)
        if far
        for k in run.setting.work.kinds
        for g in k.lora_groups
    )
    assert reads == pytest.approx(lora + (far_tokens + batch) * kv, rel=1e-9, abs=64 * devices * 32 * 4)


def _losing(function: Any, change: Any) -> Any:
    return lambda *given, **named: change(function(*given, **named))


@pytest.mark.parametrize("sub_batches", [1, 2])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("lora.lora_job", lambda job: replace(job, dram=job.dram - 64)),
        ("attention.newest_on_device", lambda stored: [0] * len(stored)),
        ("attention.attended", lambda found: (found[0], found[1] * 2)),
    ],
)
def test_bytes_lost_between_placement_and_tasks_stop_the_run(
    monkeypatch: pytest.MonkeyPatch, name: str, change: Any, sub_batches: int
) -> None:
    module, function = name.split(".")
    found = import_module(f"plora.sim.system.{module}")
    monkeypatch.setattr(found, function, _losing(getattr(found, function), change))
    with pytest.raises(AssertionError, match="far memory moved"):
        decoded("n-e3", batch_size=8, context_tokens=500, sub_batches=sub_batches)


@pytest.mark.parametrize(
    "options",
    [
        {"systems": ("ns",), "model": "gpt-oss-120b", "kv_cache_dtype": "int4", "tensor_parallel_size": 2},
        {"systems": ("nd-e4",), "model": "mixtral-8x7b", "lora_scope": "all-experts", "tensor_parallel_size": 4},
        {"systems": ("grace-hopper",), "workload": "skewed"},
        {"systems": ("pure-cxl-cached",), "composition": "additive", "adapter_shape": "square"},
        {"systems": ("plora",), "model": "llama3.1-70b", "tensor_parallel_size": 8, "adapter_wave": "naive"},
    ],
)
def test_far_memory_moves_what_the_placement_asks_on_other_models_and_systems(options: dict[str, Any]) -> None:
    system = options["systems"][0]
    run = decoded(system, **{"num_adapters": 20, **{k: v for k, v in options.items() if k != "systems"}})
    assert sum(size for name, size in run.demand.moved_bytes.items() if name.startswith("dev")) > 0
