"""Matrices, parameter counts and weight bytes against published figures."""

from __future__ import annotations

import numpy as np
import pytest

from plora.hw.defs.errors import UserError
from plora.sim.llm import (
    active_parameters,
    adapter_bytes,
    attended_tokens,
    decode_weight_bytes,
    expected_distinct_experts,
    kv_bytes,
    kv_bytes_per_token,
    load_model,
    lora_targets,
    parameters,
    projections,
    resident_weight_bytes,
)
from plora.sim.llm.config import parse_model
from plora.sim.llm.kv import kv_bytes_per_token_layer


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama2-7b", 6_738_415_616),  # the sum of the published checkpoint's tensors
        ("llama2-13b", 13_015_864_320),
        ("llama3-8b", 8_030_261_248),
        ("llama3.1-70b", 70_553_706_496),
        ("llama3.1-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-8b", 8_190_735_360),
        ("gpt-oss-120b", 116_829_156_672),
    ],
)
def test_parameter_count_is_the_published_one(name: str, published: int) -> None:
    assert parameters(load_model(name)) == published


OTHERS = {
    # one small model of each family that is not bundled; totals as their checkpoints list them
    "Qwen1.5-MoE-A2.7B": (
        14_315_784_192,
        {"model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24}
        | {"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 151936, "num_experts": 60}
        | {"num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    ),
    "Qwen2-7B": (
        7_615_616_512,
        {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
        | {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064},
    ),
    "Mistral-7B-v0.1": (
        7_241_732_096,
        {"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "sliding_window": 4096},
    ),
    "Llama-3.2-1B": (
        1_235_814_400,
        {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256}
        | {"tie_word_embeddings": True},
    ),
    "Qwen3-0.6B": (
        596_049_920,
        {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
        | {"tie_word_embeddings": True},
    ),
    "gpt-oss-20b": (
        20_914_757_184,
        {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088}
        | {"num_local_experts": 32, "num_experts_per_tok": 4, "attention_bias": True},
    ),
}


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_parameter_count_of_every_other_family(name: str) -> None:
    published, raw = OTHERS[name]
    assert parameters(parse_model(raw, name=name)) == published


@pytest.mark.parametrize(
    ("name", "published"), [("qwen3-30b-a3b", 3.3e9), ("mixtral-8x7b", 12.9e9), ("gpt-oss-120b", 5.13e9)]
)
def test_active_parameters_are_the_published_ones(name: str, published: float) -> None:
    # gpt-oss publishes its active count without the embedding table
    found = active_parameters(load_model(name), embedding=name != "gpt-oss-120b")
    assert found == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize(
    ("name", "gigabytes", "floor_ms"),
    [("llama2-7b", 14, 4.18), ("llama2-13b", 26, 7.76), ("llama3-8b", 16, 4.78)],
)
def test_nominal_weights_give_the_papers_hbm_floor(name: str, gigabytes: float, floor_ms: float) -> None:
    read = decode_weight_bytes(load_model(name), 32)
    assert read == gigabytes * 1e9
    assert read / 3350e9 * 1e3 == pytest.approx(floor_ms, abs=0.005)


def test_exact_weights_leave_out_the_embedding_table_of_a_step() -> None:
    model = load_model("llama2-7b", weights="exact")
    table = 32000 * 4096 * 2
    assert resident_weight_bytes(model) == 2 * 6_738_415_616
    assert decode_weight_bytes(model, 32) == 2 * 6_738_415_616 - table


def test_tied_embeddings_are_stored_once_and_read_as_the_head() -> None:
    raw = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "head_dim": 16,
        "vocab_size": 1000,
    }
    tied = parse_model(raw | {"tie_word_embeddings": True}, name="x")
    own = parse_model(raw, name="x")
    assert parameters(own) - parameters(tied) == 64_000
    assert decode_weight_bytes(tied, 1) == decode_weight_bytes(own, 1)


def test_qwen_moe_reads_6_gb_for_one_token_and_nearly_everything_for_a_batch() -> None:
    model = load_model("qwen3-30b-a3b")
    assert decode_weight_bytes(model, 32, experts="active") == 6e9
    assert decode_weight_bytes(model, 1) == 6e9
    # 111.8 of 128 experts a layer: 50.6 GB of expert weights alone
    exact = decode_weight_bytes(model, 32, "exact") - decode_weight_bytes(model, 32, "exact", experts="active")
    per_expert = 48 * 3 * 2048 * 768 * 2
    assert exact == pytest.approx((expected_distinct_experts(128, 8, 32) - 8) * per_expert)
    assert expected_distinct_experts(128, 8, 32) == pytest.approx(111.8, abs=0.1)


def test_mxfp4_experts_take_4_25_bits_each() -> None:
    # published checkpoint: 60.8 GiB
    assert resident_weight_bytes(load_model("gpt-oss-120b")) / 2**30 == pytest.approx(60.8, rel=0.01)


def test_expected_experts_is_the_mean_of_drawn_routings() -> None:
    rng = np.random.default_rng(7)
    draws = [len({e for _ in range(20) for e in rng.choice(16, 3, replace=False)}) for _ in range(2000)]
    assert expected_distinct_experts(16, 3, 20) == pytest.approx(float(np.mean(draws)), abs=0.05)


def test_expected_experts_at_its_ends() -> None:
    assert expected_distinct_experts(8, 2, 0) == 0
    assert expected_distinct_experts(8, 2, 1) == pytest.approx(2)
    assert expected_distinct_experts(8, 8, 1) == pytest.approx(8)


@pytest.mark.parametrize(("experts", "per_token", "tokens"), [(8, 0, 1), (8, 9, 1), (8, 2, -1), (8, 2, float("nan"))])
def test_impossible_routing_is_refused(experts: int, per_token: int, tokens: float) -> None:
    with pytest.raises(UserError):
        expected_distinct_experts(experts, per_token, tokens)


def test_projection_shapes_follow_gqa_and_head_dim() -> None:
    shapes = {p.name: (p.input_dim, p.output_dim) for p in projections(load_model("qwen3-8b"))}
    assert shapes == {
        "q": (4096, 4096),
        "k": (4096, 1024),
        "v": (4096, 1024),
        "o": (4096, 4096),
        "gate": (4096, 12288),
        "up": (4096, 12288),
        "down": (12288, 4096),
    }


def test_a_layer_has_four_distinct_inputs() -> None:
    inputs = [target.input_id for target in lora_targets(load_model("llama2-7b"))]
    assert inputs[:3] == ["attention_in"] * 3
    assert inputs[4:6] == ["mlp_in"] * 2
    assert len(set(inputs)) == 4


def test_square_shapes_give_the_papers_91_gb() -> None:
    model = load_model("llama2-7b")
    one_side = adapter_bytes(model, 49.6, part="A", shape="square")
    assert one_side * 1000 == pytest.approx(32 * 7 * 4096 * 49.6 * 2 * 1000)
    assert one_side * 1000 / 1e9 == pytest.approx(91.02, abs=0.01)


def test_true_shapes_give_113_and_135_gb() -> None:
    model = load_model("llama2-7b")
    assert adapter_bytes(model, 49.6, part="A") / 1e6 == pytest.approx(112.96, abs=0.01)
    assert adapter_bytes(model, 49.6, part="B") / 1e6 == pytest.approx(134.90, abs=0.01)


def test_adapter_bytes_are_the_sum_over_its_matrices() -> None:
    model = load_model("llama3-8b")
    by_hand = 32 * 2 * 16 * sum(p.input_dim + p.output_dim for p in projections(model))
    assert adapter_bytes(model, 16) == by_hand


def test_a_mixture_gets_attention_only_adapters_unless_told_otherwise() -> None:
    model = load_model("qwen3-30b-a3b")
    assert [t.name for t in lora_targets(model)] == ["q", "k", "v", "o"]
    # rank 49.6 on every expert: 5.2 GB an adapter
    assert adapter_bytes(model, 49.6, scope="all-experts") / 1e9 == pytest.approx(5.23, abs=0.2)


@pytest.mark.parametrize("rank", [0, -1, float("nan")])
def test_a_rank_that_is_not_positive_is_refused(rank: float) -> None:
    with pytest.raises(UserError, match="rank"):
        adapter_bytes(load_model("llama2-7b"), rank)


def test_kv_bytes_per_token_of_the_papers_models() -> None:
    assert kv_bytes_per_token(load_model("llama2-13b")) == 819_200
    assert kv_bytes_per_token(load_model("llama3-8b")) == 131_072


def test_integer_kv_carries_a_scale_per_head_unless_left_out() -> None:
    model = load_model("llama2-7b")
    assert kv_bytes_per_token_layer(model, "int8") == 2 * 32 * (128 + 2)
    assert kv_bytes_per_token_layer(model, "int4", scales=False) * 4 == kv_bytes_per_token_layer(model, "fp16")


def test_an_unknown_kv_type_is_refused() -> None:
    with pytest.raises(UserError, match="fp7"):
        kv_bytes_per_token(load_model("llama2-7b"), "fp7")


def test_sliding_layers_read_at_most_their_window() -> None:
    model = load_model("gpt-oss-120b")
    assert attended_tokens(model, 100) == 100
    assert attended_tokens(model, 1128) == (128 + 1128) / 2
    assert kv_bytes(model, 1128) == kv_bytes_per_token(model) * 628
