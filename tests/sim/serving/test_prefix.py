from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora.hw.defs.errors import UserError
from plora.sim.serving.memory import Blocks
from plora.sim.serving.options import ServeOptions, check_options
from plora.sim.serving.outcome import Outcome
from plora.sim.serving.prefix import PrefixCache
from plora.sim.serving.simulate import Simulation
from plora.sim.system.config import RunOptions, resolve
from plora.sim.workload.popularity import Popularity
from plora.sim.workload.requests import Requests, synthetic


def requests_of(count: int, rate: float = 5.0, seed: int = 0, **lengths: Any) -> Requests:
    choices: dict[str, Any] = {"input_tokens": 200, "output_tokens": 10, **lengths}
    return synthetic(count=count, rate_per_s=rate, popularity=Popularity("uniform", 5), seed=seed, **choices)


def serve(system: str, requests: Requests, run: dict[str, Any] | None = None, **options: Any) -> Outcome:
    resolved = resolve(RunOptions(systems=(system,), num_adapters=5, **(run or {})))
    choices = check_options(ServeOptions(**{"enable_prefix_caching": True, **options}))
    return Simulation(resolved, resolved.systems[0], choices, requests).run()


def alike(count: int, adapters: list[int], prefix: int = 96) -> Requests:
    requests = requests_of(count, rate=0.2, input_cv=0, output_cv=0).with_shared_prefix(prefix, 16)
    return replace(requests, adapter=np.array(adapters, dtype=np.int32))


@pytest.mark.parametrize("system", ["plora", "s-lora", "all-hbm"])
def test_a_prefix_is_computed_once_for_an_adapter_and_never_taken_from_another(system: str) -> None:
    same = serve(system, alike(3, [2, 2, 2]))
    assert (same.prefix_tokens, same.prompt_tokens) == (2 * 96, 3 * 200 - 2 * 96)
    other = serve(system, alike(3, [0, 1, 2]))
    assert (other.prefix_tokens, other.prompt_tokens) == (0, 600)
    base = serve(system, alike(3, [2, -1, 2]))
    assert base.prefix_tokens == 96, "the base model's keys are not an adapter's either"


def test_what_is_found_shortens_the_time_to_the_first_token() -> None:
    found = serve("all-hbm", alike(2, [2, 2], prefix=192))
    first = found.first_token_ps - found.admitted_ps
    assert first[1] < first[0]


def test_a_prompt_that_is_all_prefix_still_computes_its_last_token() -> None:
    requests = alike(2, [2, 2], prefix=192)
    requests = replace(requests, input_tokens=np.array([200, 193], dtype=np.int32))
    assert serve("plora", requests).prefix_tokens == 192
    shorter = replace(requests, input_tokens=np.array([200, 192], dtype=np.int32))
    assert serve("plora", shorter).prefix_tokens == 0


def test_keys_read_back_from_far_memory_cost_link_time() -> None:
    requests = alike(2, [2, 2], prefix=20_000)
    requests = replace(requests, input_tokens=np.full(2, 20_100, dtype=np.int32))
    requests = requests.with_shared_prefix(20_000, 16)
    quick, slow = (
        serve("plora", requests, run={"link_numbers": {"gb_per_s": rate}}).first_token_ps for rate in (1000.0, 10.0)
    )
    assert slow[1] - quick[1] > 0.5 * 20_000 * 524_288 / 10e9 * 1e12


def test_without_the_flag_nothing_is_shared() -> None:
    assert serve("plora", alike(3, [2, 2, 2]), enable_prefix_caching=False).prefix_tokens == 0


def test_blocks_of_hashes_must_be_whole_kv_blocks() -> None:
    with pytest.raises(UserError, match="blocks of 96 tokens, which are no whole number of KV blocks of 7"):
        serve("plora", alike(2, [0, 0]), block_size=7)


def traced(seed: int, count: int, rate: float) -> Requests:
    """Requests whose prompts are chains of blocks, some alike."""
    rng = np.random.default_rng(seed)
    requests = requests_of(count, rate=rate, seed=seed, input_cv=0.8, output_tokens=40, output_cv=0.6)
    lengths = requests.input_tokens // 32
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    # A block's hash is that of everything before it, too: the first few of three conversations.
    chains = rng.integers(0, 3, count)
    blocks = np.concatenate([1000 * chain + np.arange(n) for chain, n in zip(chains, lengths, strict=True)])
    return replace(requests, prefix_blocks=blocks.astype(np.int32), prefix_offsets=offsets, prefix_block_tokens=32)


@settings(max_examples=15)
@given(st.integers(0, 1000), st.sampled_from(["plora", "s-lora"]), st.sampled_from([20.0, 1000.0]), st.booleans())
def test_steps_taken_together_are_those_one_by_one_with_a_cache_that_overflows(
    seed: int, system: str, rate: float, chunked: bool
) -> None:
    requests = traced(seed, 25, rate)
    run = (
        {"gpu_numbers": {"hbm_bytes": 20.2e9}} if system == "s-lora" else {"device_numbers": {"capacity_bytes": 7.5e8}}
    )
    choices: dict[str, Any] = {"run": run, "max_num_seqs": 12, "enable_chunked_prefill": chunked}
    many, one = (asdict(serve(system, requests, max_steps_at_once=n, **choices)) for n in (64, 1))
    for name, value in many.items():
        assert np.array_equal(np.asarray(value, dtype=object), np.asarray(one[name], dtype=object)), name
    assert (many["finished_ps"] > 0).all()
    assert many["samples"][-1][3] == 0, "every block came back"


def test_the_longest_unused_blocks_go_when_room_is_needed() -> None:
    blocks = Blocks(16, 10)
    cache = PrefixCache(blocks, 2)
    for key in ((0, 1), (0, 2), (1, 1)):
        blocks.take(2)
        assert cache.add(key)
    assert not cache.add((0, 1))
    cache.leave([(0, 1)])
    cache.leave([(0, 2)])
    assert cache.held([(0, 1), (0, 2), (1, 2)]) == (2, 2)
    blocks.take(6)
    assert cache.held([(0, 1)]) == (0, 0), "used longest ago"
    assert cache.held([(0, 2)]) == (1, 1)
    cache.use([(0, 2)])
    assert (blocks.used, cache.held([(0, 2)])) == (10, (1, 0))
