from __future__ import annotations

import time
from typing import Any

import pytest

from plora.hw.defs.errors import UserError
from plora.sim.system.config import RunOptions, resolve
from plora.sim.system.decode import DecodeRun, decode_run, fast_steps_ps
from plora.sim.system.report import config_of, steps_csv, system_result


def decoded(system: str, **choices: Any) -> DecodeRun:
    resolved = resolve(RunOptions(systems=(system,), **choices))
    return decode_run(resolved, resolved.systems[0])


def test_the_same_seed_gives_the_same_results_and_another_one_others() -> None:
    first, again, other = (system_result(decoded("pure-cxl", seed=s)) for s in (3, 3, 4))
    assert first == again
    assert first["tpot_ms"] != other["tpot_ms"]


def test_steps_grow_by_one_token_and_centre_on_the_context() -> None:
    run = decoded("plora", context_tokens=1000, steps=10)
    assert run.batch.contexts.tolist() == [995] * 32
    assert list(run.step_ps) == sorted(run.step_ps)
    assert steps_csv([run]).count("\n") == 11


@pytest.mark.parametrize("model", ["llama2-7b", "gpt-oss-120b"])
def test_phases_of_the_layers_add_up_to_the_step(model: str) -> None:
    result = system_result(decoded("plora", model=model, tensor_parallel_size=2, num_adapters=50))
    phases = result["layer_phases"]
    assert sum(p["layers"] * p["time_us"] for p in phases) / 1e3 == pytest.approx(result["tpot_ms"]["mean"])
    names = [p["phase"] for p in phases]
    assert names[:2] == ["attention_in", "attention"] and names[-1] == "head"
    for phase in phases:
        assert sum(phase["bound_share"].values()) == pytest.approx(1.0)
        assert phase["bound_by"] == max(phase["bound_share"], key=lambda n: (phase["bound_share"][n], n))
    assert system_result(decoded("plora", composition="overlap"))["layer_phases"] == []


def test_hbm_holds_only_what_fits_and_the_others_wait() -> None:
    run = decoded("s-lora", workload="uniform-long", batch_size=256)
    assert run.running < run.requested == 256
    assert run.hbm.fits
    assert not decoded("all-hbm", workload="uniform-long", batch_size=256).hbm.fits


def test_kv_copies_and_cached_adapters_stay_within_hbm() -> None:
    for workload in ("uniform", "skewed-long"):
        for batch in (32, 256, 1024):
            run = decoded("plora", workload=workload, batch_size=batch, steps=1, composition="additive")
            assert run.hbm.fits, f"{workload} {batch}: {run.hbm}"


def test_a_pool_that_cannot_hold_adapters_and_kv_is_refused() -> None:
    with pytest.raises(UserError, match=r"adapters and KV cache take .* TB, far memory has 2\.05 TB"):
        decoded("plora", num_adapters=20_000)


def test_weights_beyond_hbm_are_refused() -> None:
    with pytest.raises(UserError, match=r"the weights take .* GB"):
        decoded("plora", model="llama3.1-70b", num_adapters=10)
    with pytest.raises(UserError, match="one request's KV cache"):
        decoded("s-lora", model="llama3.1-70b", num_adapters=10)


def test_results_state_every_number_that_went_in() -> None:
    resolved = resolve(RunOptions(gpu_numbers={"hbm_gb_per_s": 4000}, costs={"polls": 3.0}))
    config = config_of(resolved)
    assert config["gpu"]["hbm_gb_per_s"] == 4000
    assert config["costs"]["polls"] == 3.0
    assert config["preset"] == "priced"
    assert config["system_specs"]["plora"]["adapters"]["strategies"] == ("E1", "E2", "E3", "E4")


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"gpu_numbers": {"hbm": 1.0}}, "gpu_numbers: unknown key 'hbm'"),
        ({"gpu_numbers": {"hbm_gb_per_s": float("nan")}}, "give a finite number"),
        ({"device_numbers": {"dram_gb_per_s": -1.0}}, "give a finite number of at least 0"),
        ({"costs": {"descriptor": 1}}, "costs: unknown key 'descriptor'"),
        ({"costs": {"gpu_mode": "calibrated", "weights": "nominal"}}, "use weights exact"),
        ({"systems_changed": {"pure-cxl": {}}}, "not among the systems"),
        ({"systems_changed": {"plora": {"kv": {"home": "hbm"}}}}, "distributed attention needs"),
        ({"batch_size": 0}, "batch size is 0"),
        ({"num_devices": 0}, "number of devices is 0"),
        ({"steps": 0}, "number of steps is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"num_adapters": -1}, "number of adapters is -1"),
        ({"workload": "lmsys", "num_adapters": 5}, "cannot be changed"),
        ({"workload": "nowhere.csv"}, "nowhere.csv"),
        ({"systems": ()}, "no system named"),
        ({"device": "cxl-expander"}, "has no ndp_tflops"),
        ({"tensor_parallel_size": 0}, "tensor parallel size is 0|gpus.count is 0"),
        ({"tensor_parallel_size": 3}, "do not divide over 3 GPUs"),
    ],
)
def test_bad_choices_are_refused_in_one_line(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        resolved = resolve(RunOptions(**choices))
        decode_run(resolved, resolved.systems[0])
    assert "\n" not in str(caught.value)


def test_tensor_parallel_gpus_share_weights_and_each_has_a_pool_of_its_own() -> None:
    run = decoded("plora", model="llama3.1-70b", tensor_parallel_size=4)
    assert system_result(run)["far_bytes"]["capacity"] == 4 * 4 * 512e9
    assert run.hbm.budget == 4 * 76e9
    one = decoded("plora", model="llama3-8b")
    four = decoded("plora", model="llama3-8b", tensor_parallel_size=4)
    assert four.step_ps.mean() < one.step_ps.mean()
    naive = decoded("plora", model="llama3-8b", tensor_parallel_size=4, adapter_wave="naive")
    assert naive.far_bytes > four.far_bytes, "halves of matrices are replicated"


def test_one_gpu_is_the_same_whatever_the_wave() -> None:
    sharded, naive = (decoded("plora", adapter_wave=w).step_ps.tolist() for w in ("sharded", "naive"))
    assert sharded == naive


@pytest.mark.parametrize("composition", ["dependency", "overlap", "additive"])
def test_adapters_on_routed_experts_cost_more_than_those_on_attention(composition: str) -> None:
    choices = {"model": "mixtral-8x7b", "tensor_parallel_size": 2, "num_adapters": 40, "composition": composition}
    attention, experts = (decoded("plora", lora_scope=s, **choices) for s in ("attention", "all-experts"))
    assert experts.step_ps.mean() >= attention.step_ps.mean()
    assert experts.demand.busy_ps["dev0"] > 2 * attention.demand.busy_ps["dev0"]
    assert experts.far_bytes > 10 * attention.far_bytes


@pytest.mark.parametrize("system", ["plora", "all-hbm", "s-lora", "pure-cxl"])
def test_no_adapters_serve_the_base_model(system: str) -> None:
    run = decoded(system, num_adapters=0)
    assert run.strategy_counts() == {"E1": 0, "E2": 0, "E3": 0, "E4": 0}
    assert run.demand.part_ps.get("lora", 0) == 0
    assert run.hbm.adapters == 0


def test_long_runs_are_advanced_exactly_as_short_ones_are_played() -> None:
    short, long = (decoded("plora", steps=n) for n in (16, 60))
    assert len(short.played) == 16
    assert len(long.played) < 60
    assert fast_steps_ps(short.setting, short.loads[0], 16).tolist() == short.step_ps.tolist()
    assert all(step.time_ps == long.step_ps[number] for number, step in long.played.items())


def test_two_thousand_steps_of_a_long_context_take_little_time() -> None:
    start = time.process_time()
    run = decoded("plora", steps=2000, workload="uniform-long")
    assert len(run.step_ps) == 2000
    assert time.process_time() - start < 3.0
