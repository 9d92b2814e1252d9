"""Tensors become modules, or one clear line says why not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.hw.defs.errors import UserError
from plora.sw.adapters import Adapter, read_adapter
from plora.sw.adapters.tensors import read_tensors

PREFIX = "base_model.model."
Q, V = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def array(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 8


def plain() -> dict[str, np.ndarray]:
    """Tensors of a sound adapter."""
    return {
        f"{PREFIX}{Q}.lora_A.weight": array(4, 16),
        f"{PREFIX}{Q}.lora_B.weight": array(12, 4),
        f"{PREFIX}{V}.lora_A.weight": array(4, 16),
        f"{PREFIX}{V}.lora_B.weight": array(6, 4),
    }


NAMES = {"float16": "F16", "float32": "F32", "float64": "F64", "uint16": "BF16"}


def save(path: Path, tensors: dict[str, np.ndarray], dtype: str | None = None) -> None:
    """Write the safetensors format by hand: length of the header, header, data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, value in tensors.items():
        offsets = [len(data), len(data) + value.nbytes]
        header[name] = {"dtype": dtype or NAMES[str(value.dtype)], "shape": value.shape, "data_offsets": offsets}
        data += value.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Adapter]:
    """Write an adapter, its configuration changed by keywords, and read it."""

    def write_and_read(tensors: dict[str, np.ndarray] | None = None, **keys: Any) -> Adapter:
        (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG | keys))
        save(tmp_path / "adapter_model.safetensors", plain() if tensors is None else tensors)
        return read_adapter(tmp_path)

    return write_and_read


def test_pairs_become_modules_in_order(read: Callable[..., Adapter]) -> None:
    tensors = {
        f"{PREFIX}model.layers.{layer}.q_proj.lora_{part}.weight": array(4, 4) for layer in (10, 2, 1) for part in "BA"
    }
    adapter = read(tensors, target_modules=["q_proj"])
    assert [module.name for module in adapter.modules] == [f"model.layers.{layer}.q_proj" for layer in (1, 2, 10)]
    module = read().modules[0]
    assert (module.label, module.in_features, module.rank, module.out_features) == (Q, 16, 4, 12)
    assert (module.scaling, module.dtype, module.expert) == (2.0, "F32", None)
    assert np.array_equal(module.a, array(4, 16))
    assert np.array_equal(module.b, array(12, 4)), "B is kept as stored"


def test_every_float_type_is_read_exactly(tmp_path: Path) -> None:
    values = np.array([0, -0.0, 1.5, -(2.0**-14), 2.0**-24, 65504, -3.0], np.float32)
    bf16 = (values.view(np.uint32) >> 16).astype(np.uint16)
    save(tmp_path / "x", {"h": values.astype(np.float16), "s": values, "d": values.astype(np.float64), "b": bf16})
    tensors = read_tensors(tmp_path / "x")
    for name in "hsd":
        assert np.array_equal(tensors[name].values.view(np.uint32), values.view(np.uint32))
    assert np.array_equal(tensors["b"].values.view(np.uint32), values.view(np.uint32) & 0xFFFF_0000)
    assert {tensor.dtype for tensor in tensors.values()} == {"F16", "F32", "F64", "BF16"}


def test_types_that_are_no_plain_floats_are_refused(tmp_path: Path) -> None:
    for value, dtype in ((np.zeros(4, np.int8), "I8"), (np.zeros(4, np.int8), "F8_E4M3")):
        save(tmp_path / "x", {"t": value}, dtype)
        with pytest.raises(UserError, match=f"tensor t has type {dtype}; save it as F16, BF16 or F32"):
            read_tensors(tmp_path / "x")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_are_refused(read: Callable[..., Adapter], bad: float) -> None:
    tensors = plain()
    tensors[f"{PREFIX}{V}.lora_B.weight"][2, 1] = bad
    with pytest.raises(UserError, match=r"v_proj\.lora_B\.weight has 1 values that are NaN or infinite"):
        read(tensors)


@given(st.integers(0, 1 << 30))
def test_a_truncated_file_is_refused(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = tmp_path_factory.mktemp("adapter")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    file = folder / "adapter_model.safetensors"
    save(file, plain())
    whole = file.read_bytes()
    file.write_bytes(whole[: cut % len(whole)])
    with pytest.raises(UserError, match="no whole safetensors file"):
        read_adapter(folder)


@given(st.integers(0, 1 << 30), st.integers(1, 255))
def test_a_damaged_header_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, place: int, flip: int
) -> None:
    folder = tmp_path_factory.mktemp("adapter")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    file = folder / "adapter_model.safetensors"
    save(file, plain())
    damaged = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(damaged[:8], "little")
    damaged[place % header] ^= flip
    file.write_bytes(damaged)
    try:
        adapter = read_adapter(folder)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert all(module.a.shape[0] == module.b.shape[1] == 4 for module in adapter.modules)


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"")
    (tmp_path / "x").chmod(0)
    if os.access(tmp_path / "x", os.R_OK):
        (tmp_path / "x").unlink()  # permissions do not stop this user: let the file be missing
    with pytest.raises(UserError, match="cannot be read"):
        read_tensors(tmp_path / "x")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adapter_model.bin", "a pickle that could run code.*safe_serialization=True"),
        ("adapter_model-00001-of-00002.safetensors", "in several files: save it as one"),
        ("adapter_model.safetensors.index.json", "in several files: save it as one"),
        ("something", "holds no adapter_model.safetensors"),
    ],
)
def test_weights_in_another_form_are_refused_with_the_mend(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=message):
        read_adapter(tmp_path)


def without(name: str) -> dict[str, np.ndarray]:
    return {key: value for key, value in plain().items() if key != PREFIX + name}


def with_(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    return plain() | {PREFIX + name: value}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "holds no pair of LoRA matrices"),
        (without(f"{Q}.lora_A.weight"), "q_proj has no lora_A tensor"),
        (without(f"{V}.lora_B.weight"), "v_proj has no lora_B tensor"),
        (with_(f"{Q}.lora_B.weight", array(12, 5)), "rows of A must be columns of B"),
        (with_(f"{Q}.lora_A.weight", array(16, 4).T[:, None]), "the device takes linear layers"),
        (with_(f"{Q}.lora_B.weight", array(0, 4)), "the device takes linear layers"),
        (with_(f"{Q}.lora_A.weight", array(64)), "the device takes linear layers"),
        (
            with_(f"{Q}.lora_A.weight", array(5, 16)) | {f"{PREFIX}{Q}.lora_B.weight": array(12, 5)},
            "q_proj has rank 5, but .*adapter_config.json says 4",
        ),
        (with_(f"{Q}.lora_C.weight", array(4, 4)), "of a kind that is not known"),
        (with_(f"{Q}.lora_A.default.weight", array(4, 4)), "of a kind that is not known"),
        (with_(f"{Q}.vera_lambda_b", array(4)), "of a kind that is not known"),
        (plain() | {"transformer.q_proj.lora_A.weight": array(4, 4)}, "does not start with base_model.model."),
        (with_(f"{Q}.lora_magnitude_vector", array(12)), "has a lora_magnitude_vector, but .* says use_dora false"),
        (with_(f"{Q}.lora_B.bias", array(12)), r"has a lora_B\.bias, but .* says lora_bias false"),
        (
            with_("model.k_proj.lora_A.weight", array(4, 4)) | {f"{PREFIX}model.k_proj.lora_B.weight": array(4, 4)},
            "k_proj has LoRA matrices, but target_modules .* does not name it",
        ),
        (
            {key: value for key, value in plain().items() if "v_proj" not in key},
            "holds nothing for target module 'v_proj'",
        ),
        (with_("model.embed.lora_embedding_A", array(4, 32)), "embed has no lora_embedding_B"),
    ],
)
def test_tensors_that_make_no_adapter_are_refused(
    read: Callable[..., Adapter], tensors: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read(tensors)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"use_dora": True}, "has no lora_magnitude_vector, but .* says use_dora true"),
        ({"lora_bias": True}, r"has no lora_B\.bias, but .* says lora_bias true"),
        ({"modules_to_save": ["lm_head"]}, "holds nothing for 'lm_head' of modules_to_save"),
        ({"target_parameters": ["down_proj"]}, "holds nothing for target parameter 'down_proj'"),
        ({"r": 8}, "has rank 4, but .* says 8"),
        ({"rank_pattern": {"v_proj": 2}}, "v_proj has rank 4, but .* says 2"),
        ({"target_modules": ".*k_proj"}, "does not name it"),
    ],
)
def test_a_configuration_that_the_tensors_contradict_is_refused(
    read: Callable[..., Adapter], keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read(**keys)


def test_what_the_gpu_must_do_is_listed(read: Callable[..., Adapter]) -> None:
    tensors = plain() | {
        f"{PREFIX}lm_head.weight": array(32, 16),
        f"{PREFIX}model.embed_tokens.lora_embedding_A": array(4, 32),
        f"{PREFIX}model.embed_tokens.lora_embedding_B": array(16, 4),
        f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": array(2, 16),
    }
    for module, rows in ((Q, 12), (V, 6)):
        tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = array(rows)
        tensors[f"{PREFIX}{module}.lora_B.bias"] = array(rows)
    adapter = read(
        tensors,
        target_modules=["q_proj", "v_proj", "embed_tokens"],
        modules_to_save=["lm_head"],
        use_dora=True,
        lora_bias=True,
        init_lora_weights="pissa",
    )
    listed = {(part.name, part.what.split(":")[0].split(",")[0]) for part in adapter.host_parts}
    assert listed == {
        ("lm_head.weight", "whole tensor beside the LoRA matrices"),
        ("model.embed_tokens.token_adapter.trainable_tokens_delta", "whole tensor beside the LoRA matrices"),
        ("model.embed_tokens", "LoRA of an embedding table"),
        (Q, "DoRA magnitude"),
        (V, "DoRA magnitude"),
        (Q, "bias behind B"),
        (V, "bias behind B"),
        ("base model", "initialised as pissa"),
    }
    assert np.array_equal(adapter.saved["lm_head.weight"], array(32, 16))
    assert adapter.embeddings["model.embed_tokens"][0].shape == (4, 32)


# --- fused experts ----------------------------------------------------------------------------

EXPERTS = "model.layers.0.mlp.experts"
FUSED = {"target_modules": ["q_proj", "v_proj"], "target_parameters": ["gate_up_proj", "mlp.experts.down_proj"]}


def fused(experts: int = 3, rank: int = 4) -> dict[str, np.ndarray]:
    rows = experts * rank
    return plain() | {
        f"{PREFIX}{EXPERTS}.base_layer.lora_A.weight": array(rows, 16),
        f"{PREFIX}{EXPERTS}.base_layer.lora_B.weight": array(20, rows),
        f"{PREFIX}{EXPERTS}.lora_A.weight": array(rows, 10),
        f"{PREFIX}{EXPERTS}.lora_B.weight": array(16, rows),
    }


def test_fused_experts_are_taken_apart(read: Callable[..., Adapter]) -> None:
    adapter = read(fused(), **FUSED, alpha_pattern={r".*\.gate_up_proj": 12})
    labels = [module.label for module in adapter.modules]
    assert labels[:3] == [f"{EXPERTS}.down_proj[{expert}]" for expert in range(3)]
    assert labels[3:6] == [f"{EXPERTS}.gate_up_proj[{expert}]" for expert in range(3)]
    down, gate = adapter.modules[1], adapter.modules[4]
    assert (down.in_features, down.out_features, down.scaling) == (10, 16, 2.0)
    assert (gate.in_features, gate.out_features, gate.scaling) == (16, 20, 3.0)
    # Expert 1: rows 4 ... 7 of A, and every third column of B from the second.
    assert np.array_equal(down.a, array(12, 10)[4:8])
    assert np.array_equal(down.b, array(16, 12)[:, 1::3])


@pytest.mark.parametrize(
    ("change", "keys", "message"),
    [
        ({}, {"target_parameters": ["down_proj"]}, "for 2 parameters, but target_parameters names down_proj of it"),
        ({}, {"target_parameters": None}, "for 2 parameters, but target_parameters names none of it"),
        ({}, {"target_parameters": ["w1", "w2"]}, "cannot tell which matrices"),
        ({}, {"rank_pattern": {".*gate_up_proj": 5}}, "has 12 rows in lora_A, no multiple of its rank 5"),
        ({f"{PREFIX}{EXPERTS}.lora_B.bias": array(16)}, {}, "which expert parameters do not have"),
        ({f"{PREFIX}{EXPERTS}.base_layer.base_layer.base_layer.lora_A.weight": array(4, 4)}, {}, "lacks the tensors"),
    ],
)
def test_fused_experts_that_do_not_fit_are_refused(
    read: Callable[..., Adapter], change: dict[str, np.ndarray], keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read(fused() | change, **(FUSED | keys))


def test_one_fused_parameter_needs_no_known_name(read: Callable[..., Adapter]) -> None:
    tensors = plain() | {
        f"{PREFIX}{EXPERTS}.lora_A.weight": array(12, 10),
        f"{PREFIX}{EXPERTS}.lora_B.weight": array(16, 12),
    }
    adapter = read(tensors, target_parameters=["experts.w7"])
    assert [module.label for module in adapter.modules if module.expert is not None] == [
        f"{EXPERTS}.w7[{expert}]" for expert in range(3)
    ]
