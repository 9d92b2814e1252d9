from __future__ import annotations

import math
import time
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora.hw.defs.errors import UserError
from plora.sim.hardware.gpu_step import Prefill, step_time
from plora.sim.llm import adapter_bytes, load_model
from plora.sim.serving.decoding import Decoding
from plora.sim.serving.metrics import summary
from plora.sim.serving.options import ServeOptions, check_options
from plora.sim.serving.outcome import Outcome
from plora.sim.serving.simulate import Simulation
from plora.sim.system.config import RunOptions, resolve
from plora.sim.workload.popularity import Popularity
from plora.sim.workload.requests import Requests, synthetic

SYSTEMS = [
    "plora",
    "s-lora",
    "all-hbm",
    "nd-e3",
    "pure-cxl-cached",
    "grace-hopper",
    "plora-nocxl",
    "cpu-lora-offload",
    "punica",
    "caraserve",
    "dlora",
]


def requests_of(count: int, rate: float = math.inf, seed: int = 0, **lengths: float) -> Requests:
    choices: dict[str, Any] = {"input_tokens": 60, "output_tokens": 20, "input_cv": 0.7, "output_cv": 0.7, **lengths}
    popularity = Popularity("uniform", 100)
    return synthetic(count=count, rate_per_s=rate, popularity=popularity, seed=seed, **choices)


def serve(system: str, requests: Requests, run: dict[str, Any] | None = None, **options: Any) -> Outcome:
    resolved = resolve(RunOptions(systems=(system,), num_adapters=100, **(run or {})))
    return Simulation(resolved, resolved.systems[0], check_options(ServeOptions(**options)), requests).run()


def small_memory(system: str, gigabytes: float) -> dict[str, Any]:
    """A GPU whose HBM holds the weights of Llama2-7B and `gigabytes` more."""
    return {"gpu_numbers": {"hbm_bytes": (13.5 + 4 + gigabytes) * 1e9}}


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("chunked", [True, False])
def test_every_request_gets_every_token_in_order(system: str, chunked: bool) -> None:
    requests = requests_of(60, rate=30.0)
    found = serve(system, requests, enable_chunked_prefill=chunked, max_num_seqs=16)
    arrival = np.rint(requests.arrival_s * 1e12)
    assert (found.admitted_ps >= arrival).all()
    assert (found.first_token_ps > found.admitted_ps).all()
    assert (found.finished_ps >= found.first_token_ps).all()
    assert found.duration_ps == found.finished_ps.max()
    assert found.prompt_tokens == int(requests.input_tokens.sum())
    # Every token but the first of each request came from a step in which its request ran.
    assert sum(found.step_tokens) == int(requests.output_tokens.sum()) - len(requests)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("system", SYSTEMS)
def test_steps_taken_together_give_the_same_bytes_as_one_by_one(system: str, ahead: bool) -> None:
    requests = requests_of(40, rate=40.0, output_tokens=60)
    choices: dict[str, Any] = {"max_num_seqs": 12, "async_scheduling": ahead}
    many, one = (asdict(serve(system, requests, max_steps_at_once=n, **choices)) for n in (256, 1))
    assert set(many) == set(one)
    for name, value in many.items():
        assert np.array_equal(np.asarray(value, dtype=object), np.asarray(one[name], dtype=object)), name


@settings(max_examples=12)
@given(
    st.integers(0, 1000),
    st.sampled_from(["plora", "s-lora"]),
    st.sampled_from([5.0, 60.0, math.inf]),
    st.booleans(),
    st.booleans(),
)
def test_they_do_so_under_preemption_too(seed: int, system: str, rate: float, chunked: bool, ahead: bool) -> None:
    requests = requests_of(25, rate=rate, seed=seed, input_tokens=120, output_tokens=80)
    # Memory for about 600 tokens and a few adapters.
    run = small_memory(system, 3.0) if system == "s-lora" else {"device_numbers": {"capacity_bytes": 7.0e9}}
    choices: dict[str, Any] = {
        "run": run,
        "max_num_seqs": 16,
        "enable_chunked_prefill": chunked,
        "async_scheduling": ahead,
    }
    many, one = (asdict(serve(system, requests, max_steps_at_once=n, **choices)) for n in (64, 1))
    for name, value in many.items():
        assert np.array_equal(np.asarray(value, dtype=object), np.asarray(one[name], dtype=object)), name


def test_blocks_that_run_out_preempt_the_last_request_and_all_still_finish() -> None:
    requests = requests_of(30, input_tokens=100, output_tokens=200, input_cv=0, output_cv=0)
    found = serve("s-lora", requests, run=small_memory("s-lora", 6.0), max_num_seqs=32)
    assert found.preemptions.sum() > 0
    assert found.preemptions[0] == 0, "the request admitted first is never preempted"
    assert (found.finished_ps > 0).all()
    assert found.kv_blocks is not None
    assert found.peak_blocks <= found.kv_blocks
    assert len(found.pauses_ps) == found.preemptions.sum(), "every preempted request was decoding here"
    tokens = int(requests.output_tokens.sum()) - len(requests)
    assert sum(found.step_tokens) + len(found.pauses_ps) == tokens


def test_what_was_ordered_before_a_preemption_is_still_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_of(32, input_tokens=30, output_tokens=150)
    run = {"device_numbers": {"capacity_bytes": 7.0e9}}
    before = serve("plora", requests, run=run, max_num_seqs=32)
    assert before.preemptions.sum() > 0
    decide, asked = Decoding.decide, []

    def costly(batch: Decoding) -> int:
        asked.append(batch)
        return decide(batch) + 1000

    monkeypatch.setattr(Decoding, "decide", costly)
    after = serve("plora", requests, run=run, max_num_seqs=32)
    assert sum(after.step_ps) - sum(before.step_ps) == 1000 * len(asked)


def test_a_request_that_could_never_run_is_refused_at_once() -> None:
    requests = requests_of(3, input_tokens=100_000, input_cv=0)
    with pytest.raises(UserError, match=r"request 0 with 100000 \+ .* tokens needs"):
        serve("s-lora", requests, run=small_memory("s-lora", 6.0))


def test_weights_that_do_not_fit_are_refused() -> None:
    for system in ("plora", "s-lora"):
        with pytest.raises(UserError, match=r"the weights take"):
            serve(system, requests_of(2), run={"gpu_numbers": {"hbm_bytes": 1e10}})


def one_after_another(second_s: float) -> Requests:
    """Two requests, of which the second comes at `second_s`."""
    both = requests_of(2, input_tokens=50, output_tokens=30, input_cv=0, output_cv=0)
    return replace(both, arrival_s=np.array([0.0, second_s]))


def test_a_step_scheduled_ahead_takes_a_request_one_step_later() -> None:
    at = serve("all-hbm", one_after_another(1.0)).finished_ps[0] * 0.5e-12  # while the first decodes
    now, ahead = (serve("all-hbm", one_after_another(at), async_scheduling=a) for a in (False, True))
    assert (ahead.admitted_ps == now.admitted_ps).all()
    before = int(np.searchsorted(np.cumsum(now.step_ps), now.admitted_ps[1], side="right"))
    assert ahead.step_ps[:before] == now.step_ps[:before]
    # The step under way when it was scheduled only decodes; its prompt is part of the next.
    assert ahead.first_token_ps[1] - ahead.admitted_ps[1] == sum(ahead.step_ps[before : before + 2])
    assert now.first_token_ps[1] - now.admitted_ps[1] == now.step_ps[before]
    assert ahead.step_tokens[before] == ahead.step_tokens[before + 1] == 1


def test_an_idle_system_has_nothing_to_schedule_ahead() -> None:
    now, ahead = (serve("all-hbm", one_after_another(5.0), async_scheduling=a) for a in (False, True))
    assert asdict(now)["step_ps"] == asdict(ahead)["step_ps"]
    assert (now.finished_ps == ahead.finished_ps).all()


@settings(max_examples=10)
@given(st.integers(0, 1000), st.sampled_from(SYSTEMS), st.sampled_from([10.0, 60.0, math.inf]), st.integers(17, 200))
def test_steps_scheduled_ahead_keep_seats_and_budget(seed: int, system: str, rate: float, budget: int) -> None:
    requests = requests_of(30, rate=rate, seed=seed)
    found = serve(system, requests, async_scheduling=True, max_num_seqs=16, max_num_batched_tokens=budget)
    assert (found.finished_ps >= found.first_token_ps).all()
    assert found.prompt_tokens == int(requests.input_tokens.sum())
    assert sum(found.step_tokens) == int(requests.output_tokens.sum()) - len(requests)
    assert max(found.step_tokens) <= 16


def test_no_more_seats_are_taken_than_there_are() -> None:
    found = serve("plora", requests_of(50), max_num_seqs=7)
    assert max(running for _, running, _, _ in found.samples) == 7


def test_a_step_holds_no_more_tokens_than_its_budget() -> None:
    requests = requests_of(20, input_tokens=900, input_cv=0)
    found = serve("plora", requests, max_num_batched_tokens=512, max_num_seqs=20)
    assert found.prompt_tokens == 20 * 900
    assert found.prompt_steps >= math.ceil(20 * 900 / 512)
    whole = serve("plora", requests, max_num_batched_tokens=512, max_num_seqs=20, enable_chunked_prefill=False)
    assert whole.prompt_steps == 20, "a prompt longer than the budget has a step of its own"


def test_a_single_request_takes_what_its_steps_take() -> None:
    requests = requests_of(1, input_tokens=500, output_tokens=3, input_cv=0, output_cv=0)
    bare = replace(requests, adapter=np.array([-1], dtype=np.int32))
    run: dict[str, Any] = {"model": "llama3-8b"}
    found = serve("all-hbm", bare, run=run)
    gpu, model = resolve(RunOptions(**run)).gpu, load_model("llama3-8b")
    prompt = step_time(gpu, model, prefills=[Prefill(500)]).total_ns * 1e3
    decode = step_time(gpu, model, decode_requests=1, decode_context=501.5).total_ns * 1e3
    arrival = round(float(requests.arrival_s[0]) * 1e12)
    assert found.first_token_ps[0] - arrival == pytest.approx(prompt, rel=0.01)
    assert (found.finished_ps[0] - found.first_token_ps[0]) / 2 == pytest.approx(decode, rel=0.01)


def test_an_adapter_is_fetched_before_its_first_request_runs() -> None:
    requests = requests_of(2, rate=0.001, input_cv=0, output_cv=0)
    requests = replace(requests, adapter=np.array([5, 5], dtype=np.int32))
    found = serve("s-lora", requests)
    first = found.first_token_ps - np.rint(requests.arrival_s * 1e12)
    resolved = resolve(RunOptions(systems=("s-lora",), num_adapters=100))
    size = adapter_bytes(resolved.model, int(resolved.source.adapter_ranks(0)[5]))
    assert found.loaded_bytes == size
    # 64 GB/s less packet headers
    assert (first[0] - first[1]) / 1e12 == pytest.approx(size / 64e9 / 0.9, rel=0.05)


def test_caraserve_hides_the_fetch_behind_the_prompt() -> None:
    requests = requests_of(2, rate=0.001, input_cv=0, output_cv=0)
    requests = replace(requests, adapter=np.array([5, 5], dtype=np.int32))
    arrival = np.rint(requests.arrival_s * 1e12)
    waiting, helped = (serve(name, requests).first_token_ps - arrival for name in ("s-lora", "caraserve"))
    assert waiting[1] == helped[1], "with the adapter in HBM the two are the same"
    assert helped[1] < helped[0] < waiting[0]


def test_a_slow_cpu_is_no_worse_than_waiting() -> None:
    requests = requests_of(40, rate=40.0, input_tokens=400)
    slow = {"systems_changed": {"caraserve": {"adapters": {"cold_start_tflops": 0.001}}}}
    waiting, helped = serve("s-lora", requests), serve("caraserve", requests, run=slow)
    assert helped.duration_ps <= 1.02 * waiting.duration_ps


def test_dlora_merges_an_adapter_that_all_requests_share() -> None:
    requests = requests_of(8, output_tokens=200)
    one = replace(requests, adapter=np.full(8, 5, dtype=np.int32))
    bare = replace(requests, adapter=np.full(8, -1, dtype=np.int32))
    merged, base, apart = serve("dlora", one), serve("dlora", bare), serve("s-lora", one)
    # The adapter is fetched and merged once; after that every step is one of the base model.
    assert merged.step_ps[1:] == base.step_ps[1:]
    # Weights of 13.5 GB once in and once out of HBM at 92.4 % of 3.35 TB/s.
    passed = 2 * 13.48e9 / (0.924 * 3.35e12) * 1e12
    assert merged.step_ps[0] - base.step_ps[0] == pytest.approx(passed, rel=0.01)
    assert merged.duration_ps < apart.duration_ps


def test_dlora_takes_a_merged_adapter_out_when_another_comes() -> None:
    requests = replace(requests_of(2, output_tokens=100, output_cv=0, rate=5.0), adapter=np.array([5, 6], np.int32))
    found = serve("dlora", requests)
    unmerged = found.adapter_steps.get("E1", 0)
    assert 0 < unmerged < sum(found.step_tokens)


def test_punica_stores_and_computes_all_adapters_at_one_rank() -> None:
    requests = requests_of(10, rate=40.0)
    resolved = resolve(RunOptions(systems=("punica",), num_adapters=100))
    ranks = resolved.source.adapter_ranks(0)
    found = serve("punica", requests)
    distinct = len(np.unique(requests.adapter))
    assert found.loaded_bytes == distinct * adapter_bytes(resolved.model, int(ranks.max()))


def test_more_adapters_than_fit_thrash_but_make_progress() -> None:
    """sglang reports a jump of TTFT from 8 to 16 adapters on 8 slots; the mechanism must be there."""
    few, many = (
        replace(requests_of(60, rate=20.0, seed=1), adapter=(np.arange(60) % n).astype(np.int32)) for n in (4, 30)
    )
    run = small_memory("s-lora", 2.5)
    cold, hot = (serve("s-lora", one, run=run, max_num_seqs=8) for one in (many, few))
    assert hot.evictions == 0
    assert cold.evictions > 20
    assert (cold.finished_ps > 0).all()
    waits = [(one.first_token_ps - one.admitted_ps).mean() for one in (hot, cold)]
    assert waits[1] > waits[0]


def test_requests_without_adapters_are_served_as_if_there_were_none() -> None:
    requests = requests_of(20, rate=20.0)
    bare = replace(requests, adapter=np.full(20, -1, dtype=np.int32))
    with_pool, without = (asdict(serve("plora", bare, run={"seed": seed})) for seed in (0, 1))
    assert with_pool["finished_ps"].tolist() == without["finished_ps"].tolist()
    assert with_pool["adapter_steps"] == {}
    assert with_pool["loaded_bytes"] == 0


def test_faster_arrivals_mean_longer_queues() -> None:
    means = []
    for rate in (2.0, 50.0, math.inf):
        requests = requests_of(80, rate=rate, output_tokens=60)
        found = summary(requests, serve("plora", requests, max_num_seqs=4), ServeOptions())
        means.append(found["queueing_ms"]["mean"])
    assert means == sorted(means)
    assert means[0] < means[-1] / 10


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"request_rate": 0.0}, "request_rate is 0"),
        ({"request_rate": math.nan}, "request_rate is nan"),
        ({"cv": -1.0}, "cv is -1"),
        ({"slo_ttft_ms": math.inf}, "slo_ttft_ms is inf"),
        ({"block_size": 0}, "block_size is 0"),
        ({"max_num_seqs": 256, "max_num_batched_tokens": 256}, "leaves no room for prompts"),
    ],
)
def test_bad_options_are_refused(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_options(ServeOptions(**choices))


def test_a_thousand_requests_take_little_time() -> None:
    requests = requests_of(1000, rate=100.0, input_tokens=400, output_tokens=100)
    start = time.process_time()
    serve("all-hbm", requests)
    assert time.process_time() - start < 3.0
