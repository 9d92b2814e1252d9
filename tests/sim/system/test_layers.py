from __future__ import annotations

import json

import pytest

from plora.hw.defs.errors import UserError
from plora.sim.hardware.gpu import load_gpu
from plora.sim.hardware.link import load_link
from plora.sim.llm import adapter_bytes, bundled_models, decode_weight_bytes, load_model
from plora.sim.llm.config import parse_model
from plora.sim.system.gputime import GpuTimes
from plora.sim.system.layers import ModelWork, WorkOptions, model_work

CONFIG = """{
  "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 24,
  "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 5632, "moe_intermediate_size": 1408,
  "shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4, "vocab_size": 151936
}"""


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


def test_a_sharded_wave_splits_the_rows_of_a_and_the_columns_of_b() -> None:
    shapes = {g.name: (g.input_dim, g.output_dims) for g in work("llama2-7b", gpus=4).kinds[0].groups}
    assert shapes["attention_in"] == (1024, (1024, 1024, 1024))
    assert shapes["attention_out"] == (1024, (1024,))
    assert shapes["mlp_mid"] == (2752, (1024,))
    assert 4 * work("llama2-7b", gpus=4).rank_bytes == work("llama2-7b").rank_bytes


def test_a_naive_wave_is_sharded_as_the_weights_are() -> None:
    before, after = (work("llama2-7b", gpus=g, adapter_wave="naive").kinds[0].groups for g in (1, 4))
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


def test_adapters_on_routed_experts_come_between_the_matrices_of_the_fused_kernel() -> None:
    whole, split = (
        work("mixtral-8x7b", mode="calibrated"),
        work("mixtral-8x7b", mode="calibrated", lora_scope="all-experts"),
    )
    (experts,) = [g for g in whole.kinds[0].groups if g.name == "experts"]
    gate_up, down = [g for g in split.kinds[0].groups if g.name.startswith("experts")]
    assert gate_up.base_ps + down.base_ps == pytest.approx(experts.base_ps, abs=2)
    assert split.weight_bytes == whole.weight_bytes
    assert (gate_up.input_dim, gate_up.output_dims) == (4096, (14336, 14336))
    assert (down.input_dim, down.output_dims) == (14336, (4096,))
    assert [(g.experts, g.used, g.inputs) for g in (gate_up, down)] == [(8, 2, 1), (8, 2, 2)]
    assert split.rank_bytes == adapter_bytes(load_model("mixtral-8x7b"), 1, scope="all-experts")


def test_adapters_beside_a_shared_expert_are_refused_by_name() -> None:
    config = json.loads(CONFIG)
    model = parse_model(config, name="qwen2-moe")
    times = GpuTimes(load_gpu("h100-sxm"), model, "roofline", 1, load_link("nvlink4"))
    with pytest.raises(UserError, match="qwen2-moe has a shared expert"):
        model_work(model, 4, times, WorkOptions(lora_scope="all-experts"))
