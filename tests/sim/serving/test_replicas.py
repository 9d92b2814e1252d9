"""Several replicas: each on its own, or in step because they share their experts; and several GPUs in each."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora.hw.defs.errors import UserError
from plora.sim.serving.options import ServeOptions, check_options
from plora.sim.serving.outcome import Outcome
from plora.sim.serving.simulate import Simulation
from plora.sim.serving.steps import EMPTY, StepTimer
from plora.sim.system.config import RunOptions, resolve
from plora.sim.workload.popularity import Popularity
from plora.sim.workload.requests import Requests, synthetic

MIXTURE = {"model": "qwen3-30b-a3b", "num_adapters": 20}


def requests_of(count: int, rate: float = 20.0, seed: int = 0) -> Requests:
    return synthetic(
        count=count,
        rate_per_s=rate,
        popularity=Popularity("uniform", 20),
        input_tokens=150,
        output_tokens=30,
        input_cv=0.7,
        output_cv=0.7,
        seed=seed,
    )


def serve(system: str, requests: Requests, run: dict[str, Any], **options: Any) -> Outcome:
    resolved = resolve(RunOptions(systems=(system,), **run))
    return Simulation(resolved, resolved.systems[0], check_options(ServeOptions(**options)), requests).run()


def test_replicas_on_their_own_do_what_each_does_alone() -> None:
    requests = requests_of(21)
    both = serve("plora", requests, {"num_adapters": 20}, data_parallel_size=2)
    for replica in range(2):
        place = slice(replica, None, 2)
        alone = serve("plora", requests.part(place), {"num_adapters": 20})
        assert both.finished_ps[place].tolist() == alone.finished_ps.tolist()
    assert both.prompt_tokens == int(requests.input_tokens.sum())
    assert both.samples == sorted(both.samples, key=lambda sample: sample[0])
    assert both.samples[-1][1:3] == (0, 0)


def test_more_replicas_than_requests_leave_some_idle() -> None:
    found = serve("all-hbm", requests_of(3), {"num_adapters": 20}, data_parallel_size=8)
    assert (found.finished_ps > 0).all()


@settings(max_examples=10)
@given(
    st.integers(0, 1000),
    st.sampled_from(["plora", "s-lora", "all-hbm"]),
    st.sampled_from([2, 4]),
    st.booleans(),
    st.booleans(),
)
def test_replicas_in_step_are_advanced_exactly(
    seed: int, system: str, replicas: int, chunked: bool, ahead: bool
) -> None:
    requests = requests_of(17, rate=30.0, seed=seed)
    choices: dict[str, Any] = {
        "data_parallel_size": replicas,
        "enable_expert_parallel": True,
        "enable_chunked_prefill": chunked,
        "async_scheduling": ahead,
        "max_num_seqs": 4,
    }
    many, one = (asdict(serve(system, requests, MIXTURE, max_steps_at_once=n, **choices)) for n in (64, 1))
    for name, value in many.items():
        assert np.array_equal(np.asarray(value, dtype=object), np.asarray(one[name], dtype=object)), name
    assert sum(many["step_tokens"]) == int(requests.output_tokens.sum()) - len(requests)


def test_a_long_prompt_of_one_replica_holds_up_the_other() -> None:
    requests = requests_of(2, rate=1000.0)
    long = np.array([8000, 20], dtype=np.int32)
    choices: dict[str, Any] = {"data_parallel_size": 2, "max_num_batched_tokens": 8192}
    slow = requests.part(slice(None))
    slow.input_tokens[:] = long
    apart = serve("all-hbm", slow, MIXTURE, **choices)
    together = serve("all-hbm", slow, MIXTURE, enable_expert_parallel=True, **choices)
    assert together.first_token_ps[1] > 5 * apart.first_token_ps[1]


def test_sharing_experts_leaves_room_and_takes_less_time_where_weights_are_what_takes_it() -> None:
    resolved = resolve(RunOptions(systems=("all-hbm",), gpu="h200-sxm", **MIXTURE))  # type: ignore[arg-type]
    spec = resolved.systems[0]
    alone, shared = (StepTimer(resolved, spec, n) for n in (1, 4))
    context, near = np.full(32, 500), np.zeros(32, dtype=np.int64)
    one = int(alone.decode_ps(context, near, EMPTY, 1)[0])
    four = int(shared.decode_ps(context, near, EMPTY, 1, 128)[0])
    assert four < one


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"model": "llama3-8b"}, "llama3-8b has 0 routed experts"),
        ({"model": "mixtral-8x7b", "gpu": "h200-sxm", "tensor_parallel_size": 2}, "replicas of one GPU"),
        ({**MIXTURE, "preset": "paper"}, "with calibrated kernels"),
    ],
)
def test_experts_that_cannot_be_shared_out_are_refused(run: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        serve("all-hbm", requests_of(4), run, data_parallel_size=2, enable_expert_parallel=True)


@settings(max_examples=10)
@given(
    st.integers(0, 1000), st.sampled_from(["plora", "s-lora", "pure-cxl-cached"]), st.sampled_from(["sharded", "naive"])
)
def test_tensor_parallel_gpus_are_advanced_exactly(seed: int, system: str, wave: str) -> None:
    requests = requests_of(15, rate=30.0, seed=seed)
    run = {"tensor_parallel_size": 4, "adapter_wave": wave, "model": "llama3-8b", "num_adapters": 20}
    many, one = (asdict(serve(system, requests, run, max_steps_at_once=n, max_num_seqs=6)) for n in (64, 1))
    for name, value in many.items():
        assert np.array_equal(np.asarray(value, dtype=object), np.asarray(one[name], dtype=object)), name


def test_a_model_beyond_one_gpu_is_served_by_several() -> None:
    run = {"model": "llama3.1-70b", "num_adapters": 20}
    with pytest.raises(UserError, match=r"the weights take .* --tensor-parallel-size"):
        serve("plora", requests_of(4), run)
    found = serve("plora", requests_of(4), {**run, "tensor_parallel_size": 4})
    assert (found.finished_ps > 0).all()
