from __future__ import annotations

import pytest

from plora.hw.defs.errors import UserError
from plora.sim.hardware.gpu import load_gpu
from plora.sim.hardware.link import load_link
from plora.sim.llm import bundled_models, decode_weight_bytes, load_model
from plora.sim.system.gputime import GpuTimes
from plora.sim.system.layers import ModelWork, WorkOptions, model_work


def work(model: str, tokens: int = 32, gpus: int = 1, mode: str = "roofline", **options: object) -> ModelWork:
    times = GpuTimes(load_gpu("h100-sxm"), load_model(model), mode, gpus, load_link("nvlink4"))  # type: ignore[arg-type]
    return model_work(load_model(model), tokens, times, WorkOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", bundled_models())
@pytest.mark.parametrize("weights", [None, "exact"])
@pytest.mark.parametrize("tokens", [1, 32])
def test_groups_and_head_add_up_to_the_weights_of_a_step(name: str, weights: str | None, tokens: int) -> None:
    model = load_model(name)
    expected = decode_weight_bytes(model, tokens, weights)  # type: ignore[arg-type]
    assert work(name, tokens, weights=weights).weight_bytes == round(expected)


@pytest.mark.parametrize("name", bundled_models())
def test_every_layer_occurs_once(name: str) -> None:
    assert work(name).layers == load_model(name).num_hidden_layers


def test_gpus_share_weights_heads_and_kv() -> None:
    one, four = work("llama3-8b"), work("llama3-8b", gpus=4)
    assert 4 * four.weight_bytes == pytest.approx(one.weight_bytes, abs=200)
    assert 4 * four.kv_token_bytes == one.kv_token_bytes
    assert 4 * four.query_bytes == one.query_bytes
    assert 4 * four.attention_flops_per_token == one.attention_flops_per_token


def test_adapters_are_sharded_as_the_weights_are() -> None:
    before, after = (work("llama2-7b", gpus=g).kinds[0].groups for g in (1, 4))
    shapes = {g.name: (g.input_dim, g.output_dims) for g in after}
    assert shapes["attention_in"] == (4096, (1024, 1024, 1024))
    assert shapes["attention_out"] == (1024, (4096,))
    assert shapes["mlp_mid"] == (2752, (4096,))
    assert [g.output_dims for g in before] == [(4096,) * 3, (4096,), (11008, 11008), (4096,)]


def test_query_width_that_differs_from_the_hidden_size_shapes_adapters() -> None:
    groups = {g.name: g for g in work("qwen3-30b-a3b").kinds[0].groups}
    assert groups["attention_in"].output_dims == (4096, 512, 512)
    assert groups["attention_out"].input_dim == 4096
    assert groups["experts"].output_dims == ()


def test_sliding_layers_are_a_kind_of_their_own() -> None:
    windows = {kind.window: kind.count for kind in work("gpt-oss-120b").kinds}
    assert windows == {None: 18, 128: 18}


def test_integer_kv_may_carry_scales() -> None:
    plain = work("llama2-7b", kv_dtype="int8").kv_token_bytes
    scaled = work("llama2-7b", kv_dtype="int8", kv_scales=True).kv_token_bytes
    assert (plain, scaled) == (2 * 32 * 128, 2 * 32 * 130)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match="do not divide over 3 GPUs"):
        work("llama2-7b", gpus=3)


def test_adapters_on_routed_experts_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="all experts are not covered"):
        work("mixtral-8x7b", lora_scope="all-experts")
