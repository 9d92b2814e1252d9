"""Adapters made by PEFT give the logits that PEFT gave: names, patterns, scaling, experts, DoRA and all."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from plora.sw.adapters import Adapter, read_adapter, to_device
from plora.sw.reference.decoder import Decoder, load_decoder

ADAPTERS = [
    "lora_all_bf16_r16",
    "lora_all_linear_r16",
    "lora_dora_r8",
    "lora_modules_to_save_lm_head",
    "lora_qv_r8",
    "lora_qwen3moe_attn_r8",
    "lora_qwen3moe_experts_r4",
    "lora_rank_pattern",
    "lora_rslora_r64",
]


@cache
def load(folder: Path) -> tuple[Adapter, Decoder, dict[str, list[float]]]:
    adapter = read_adapter(folder)
    assert adapter.config.base_model is not None
    expected = json.loads((folder / "expected.json").read_text())
    return adapter, load_decoder(folder.parent / adapter.config.base_model), expected


def rounded(adapter: Adapter) -> Adapter:
    """The adapter as the device holds it."""
    forms = [to_device(module) for module in adapter.modules]
    modules = [
        replace(form.module, a=form.a.astype(np.float32), b=form.b.astype(np.float32), scaling=1.0) for form in forms
    ]
    return replace(adapter, modules=tuple(modules))


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_logits_are_those_of_peft(fixtures_dir: Path, name: str) -> None:
    adapter, model, expected = load(fixtures_dir / "peft" / name)
    (token_ids,) = expected["input_ids"]
    base, changed = model.logits(token_ids), model.logits(token_ids, adapter)  # type: ignore[arg-type]
    assert np.abs(base - expected["base_logits_last_token"]).max() < 2e-6
    # The BF16 adapter's logits were computed in BF16, all others in float32.
    tolerance = 8e-3 if "bf16" in name else 2e-6
    assert np.abs(changed - expected["logits_last_token"]).max() < tolerance
    assert np.abs(changed - base).max() > 0.1, "the adapter changes nothing: this shows nothing"


@pytest.mark.parametrize("name", ADAPTERS)
def test_rounding_to_fp16_changes_the_logits_little(fixtures_dir: Path, name: str) -> None:
    adapter, model, expected = load(fixtures_dir / "peft" / name)
    (token_ids,) = expected["input_ids"]
    exact, device = model.logits(token_ids, adapter), model.logits(token_ids, rounded(adapter))  # type: ignore[arg-type]
    assert np.abs(exact - device).max() < 1e-3


def test_a_wrong_scaling_or_a_mixed_up_expert_would_be_seen(fixtures_dir: Path) -> None:
    adapter, model, expected = load(fixtures_dir / "peft" / "lora_qwen3moe_experts_r4")
    (token_ids,) = expected["input_ids"]
    wrong = [replace(module, scaling=1.0) for module in adapter.modules]
    mixed = [replace(m, expert=m.expert ^ 1) if m.expert is not None else m for m in adapter.modules]
    for modules in (wrong, mixed):
        logits = model.logits(token_ids, replace(adapter, modules=tuple(modules)))  # type: ignore[arg-type]
        assert np.abs(logits - expected["logits_last_token"]).max() > 1e-3


def test_the_tensors_are_those_that_peft_listed(fixtures_dir: Path) -> None:
    for name in ADAPTERS:
        adapter, _, expected = load(fixtures_dir / "peft" / name)
        listed: dict[str, tuple[str, list[int]]] = expected["tensors"]  # type: ignore[assignment]
        for module in adapter.modules:
            if module.expert is None:
                dtype, shape = listed[f"base_model.model.{module.name}.lora_A.weight"]
                assert (module.dtype, list(module.a.shape)) == (dtype, shape)
