"""Reading HF config.json: what is accepted, what is refused, and with what words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plora.hw.defs.errors import UserError
from plora.sim.llm.config import bundled_models, load_model, parse_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "torch_dtype": "float16",
}
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def refusal(**changes: Any) -> str:
    with pytest.raises(UserError) as caught:
        parse_model(LLAMA | changes, name="x")
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"unknown model 'llama9'.*llama2-7b.*qwen3-8b"):
        load_model("llama9")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.json: no such file"):
        load_model(tmp_path / "absent.json")


def test_a_folder_with_config_json_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"rope_theta": 1e4, "some_future_key": [1]}))
    assert load_model(tmp_path).hidden_size == 64


@pytest.mark.parametrize("text", ["{", "[1]", '"x"'])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserError, match="JSON"):
        load_model(path)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gemma2", "mamba", "gpt2"])
def test_other_architectures_are_refused_by_name(model_type: str) -> None:
    assert f"model_type '{model_type}' is not covered" in refusal(model_type=model_type)


def test_an_architecture_that_contradicts_the_model_type_is_refused() -> None:
    assert "LlamaForSequenceClassification" in refusal(architectures=["LlamaForSequenceClassification"])


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
)
@pytest.mark.parametrize("value", [None, "64", 64.0, -1, 0, True, [64]])
def test_a_size_that_is_not_a_positive_integer_names_its_key(key: str, value: Any) -> None:
    assert key in refusal(**{key: value})


def test_kv_heads_that_do_not_divide_the_heads_are_refused() -> None:
    assert "num_attention_heads 4 is not a multiple of num_key_value_heads 3" in refusal(num_key_value_heads=3)


def test_a_hidden_size_that_heads_do_not_divide_needs_head_dim() -> None:
    assert "head_dim" in refusal(hidden_size=66)
    assert parse_model(LLAMA | {"hidden_size": 66, "head_dim": 16}, name="x").query_width == 64


def test_more_experts_per_token_than_experts_are_refused() -> None:
    with pytest.raises(UserError, match="num_experts_per_tok 9 exceeds num_local_experts 8"):
        parse_model(MIXTRAL | {"num_experts_per_tok": 9}, name="x")


def test_a_missing_expert_count_is_refused() -> None:
    with pytest.raises(UserError, match="num_local_experts"):
        parse_model({k: v for k, v in MIXTRAL.items() if k != "num_local_experts"}, name="x")


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "bitsandbytes", "mxfp4"])
def test_quantized_weights_that_are_not_modelled_are_refused(method: str) -> None:
    assert f"quant_method '{method}' is not covered for llama" in refusal(quantization_config={"quant_method": method})


def test_an_unknown_weight_type_is_refused() -> None:
    assert "int3" in refusal(torch_dtype="int3")


def test_unknown_keys_of_the_projects_own_table_are_refused() -> None:
    assert "plora.nominal_parameter;" in refusal(plora={"nominal_parameter": 7e9})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, 0, "7e9", True])
def test_nominal_parameters_must_be_a_positive_number(value: Any) -> None:
    assert "nominal_parameters" in refusal(plora={"nominal_parameters": value})


def test_nominal_weights_need_nominal_parameters() -> None:
    with pytest.raises(UserError, match=r"needs plora\.nominal_parameters"):
        parse_model(LLAMA, name="x", weights="nominal")


def test_query_width_is_not_the_hidden_size_where_the_model_says_so() -> None:
    assert (load_model("qwen3-30b-a3b").query_width, load_model("qwen3-30b-a3b").hidden_size) == (4096, 2048)
    assert (load_model("gpt-oss-120b").query_width, load_model("gpt-oss-120b").hidden_size) == (4096, 2880)


def test_alternating_sliding_layers_are_counted() -> None:
    model = load_model("gpt-oss-120b")
    assert (model.sliding_layers, model.sliding_window) == (18, 128)


def test_a_window_that_is_switched_off_does_not_count() -> None:
    qwen = LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "sliding_window": 16}
    assert parse_model(qwen | {"use_sliding_window": False}, name="x").sliding_window is None
    windowed = parse_model(qwen | {"use_sliding_window": True, "max_window_layers": 1}, name="x")
    assert (windowed.sliding_window, windowed.sliding_layers) == (16, 1)


def test_bundled_dimensions_are_those_of_the_published_configs(shared_data: Path) -> None:
    published = {
        "llama2-7b": "meta-llama--Llama-2-7b-hf",
        "llama2-13b": "meta-llama--Llama-2-13b-hf",
        "llama3-8b": "meta-llama--Meta-Llama-3-8B",
        "llama3.1-70b": "meta-llama--Meta-Llama-3.1-70B",
        "llama3.1-405b": "meta-llama--Meta-Llama-3.1-405B",
        "qwen3-30b-a3b": "Qwen--Qwen3-30B-A3B",
        "qwen3-8b": "Qwen--Qwen3-8B",
        "mixtral-8x7b": "mistralai--Mixtral-8x7B-v0.1",
        "gpt-oss-120b": "openai--gpt-oss-120b",
    }
    assert set(published) == set(bundled_models())
    for name, file in published.items():
        original = load_model(shared_data / "model_configs" / f"{file}_config.json")
        bundled = load_model(name, weights="exact")
        for field in original.__dataclass_fields__:
            if field not in ("name", "nominal_parameters", "nominal_active_parameters"):
                assert getattr(bundled, field) == getattr(original, field), (name, field)


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
        "sliding_window",
        "num_local_experts",
        "num_experts_per_tok",
    ],
)
def test_dimensions_that_no_model_has_are_refused_by_key(key: str) -> None:
    mixtral = {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    parse_model(mixtral, name="m")
    for value in (2**70, 10**400, 0, -1, 1.5, True, "8"):
        with pytest.raises(UserError, match=f"{key} is"):
            parse_model(mixtral | {key: value}, name="m")


def test_dimensions_that_are_possible_alone_but_not_together_are_refused() -> None:
    wide = {"hidden_size": 1 << 20, "intermediate_size": 1 << 22, "num_hidden_layers": 1000, "num_attention_heads": 64}
    with pytest.raises(UserError, match="describes a model of"):
        parse_model({"model_type": "llama", "vocab_size": 1000, **wide}, name="m")
