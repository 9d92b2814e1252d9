"""adapter_config.json: what decides the arithmetic is read as PEFT reads it, what the device cannot do is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from plora.hw.defs.errors import UserError
from plora.sw.adapters.config import AdapterConfig, parse_config, read_config


def parse(**keys: Any) -> AdapterConfig:
    return parse_config({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], **keys}, "x.json")


def test_patterns_match_the_end_of_a_path_and_the_first_one_counts() -> None:
    config = parse(
        rank_pattern={"^model.layers.1.self_attn.q_proj": 4, "down_proj": 32, r"layers\.0\..*": 2},
        alpha_pattern={"down_proj": 64.5},
    )
    assert config.rank_of("model.layers.1.self_attn.q_proj") == 4
    assert config.rank_of("model.layers.0.mlp.down_proj") == 32
    assert config.rank_of("model.layers.0.mlp.up_proj") == 2
    assert config.rank_of("model.layers.10.self_attn.q_proj") == 8
    assert config.rank_of("model.layers.1.mlp.updown_proj") == 8, "a pattern starts at a dot"
    assert config.rank_of("x.model.layers.1.self_attn.q_proj") == 8, "an anchor is an anchor"
    assert config.alpha_of("a.down_proj") == 64.5
    assert config.scaling_of("a.b.down_proj") == 64.5 / 32


@pytest.mark.parametrize(("rank", "alpha"), [(8, 16), (64, 64), (7, 3), (1, 0), (256, 0.5)])
def test_scaling_is_alpha_by_rank_or_by_its_root(rank: int, alpha: float) -> None:
    assert parse(r=rank, lora_alpha=alpha).scaling_of("q_proj") == alpha / rank
    assert parse(r=rank, lora_alpha=alpha, use_rslora=True).scaling_of("q_proj") == alpha / math.sqrt(rank)


@pytest.mark.parametrize(
    ("targets", "hits", "misses"),
    [
        (["q_proj"], ["q_proj", "a.q_proj"], ["a.kq_proj", "q_proj.a"]),
        (["to_out.0"], ["block.to_out.0"], ["block.to_out.1"]),
        (r".*layers\.[01]\.(q|v)_proj", ["m.layers.0.q_proj"], ["m.layers.2.q_proj", "m.layers.0.q_proj.x"]),
        ("all-linear", ["anything"], []),
        (None, ["anything"], []),
    ],
)
def test_targets_are_names_an_expression_or_all(targets: Any, hits: list[str], misses: list[str]) -> None:
    config = parse(target_modules=targets)
    assert all(config.targets_module(path) for path in hits)
    assert not any(config.targets_module(path) for path in misses)


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_unknown_keys_that_are_off_are_no_harm(value: Any) -> None:
    assert parse(use_something_of_next_year=value).rank == 8


@pytest.mark.parametrize("value", [True, 0, 1.5, "x", [0], {"a": None}])
def test_unknown_keys_that_are_on_are_refused_by_name(value: Any) -> None:
    with pytest.raises(UserError, match="unknown key 'use_something_of_next_year'"):
        parse(use_something_of_next_year=value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("kasa_config", {"beta": 1e-4}),
        ("alora_invocation_tokens", [1, 2]),
        ("arrow_config", {"top_k": 3}),
        ("monteclora_config", {"n": 1}),
        ("velora_config", {"n": 1}),
    ],
)
def test_variants_that_are_no_plain_x_a_b_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"{key} is set: .* merge the adapter or train without it"):
        parse(**{key: value})


@pytest.mark.parametrize("method", ["ADALORA", "VERA", "LOHA", "LOKR", "IA3", None, 3])
def test_other_methods_are_refused_by_name(method: Any) -> None:
    with pytest.raises(UserError, match=f"peft_type is {method!r}, not 'LORA'"):
        parse(peft_type=method)


@pytest.mark.parametrize(
    "keys",
    [
        {"r": 0},
        {"r": -4},
        {"r": 8.0},
        {"r": True},
        {"r": "8"},
        {"lora_alpha": "16"},
        {"lora_alpha": float("nan")},
        {"lora_alpha": float("inf")},
        {"use_rslora": 1},
        {"use_dora": "yes"},
        {"rank_pattern": {"q_proj": 0}},
        {"rank_pattern": {"q_proj": "4"}},
        {"rank_pattern": ["q_proj"]},
        {"rank_pattern": {"(": 4}},
        {"alpha_pattern": {"q_proj": None}},
        {"target_modules": [1]},
        {"target_modules": 3},
        {"target_modules": "(("},
        {"target_parameters": "down_proj"},
        {"modules_to_save": {"a": 1}},
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_refused_with_file_and_key(keys: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"x\.json: {next(iter(keys))}"):
        parse(**keys)


def test_a_base_that_the_initialisation_changed_is_noted() -> None:
    assert parse(init_lora_weights="pissa_niter_4").changed_base == "pissa_niter_4"
    assert parse(init_lora_weights="gaussian").changed_base is None
    assert parse(init_lora_weights=True).changed_base is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no adapter_config.json"),
        (b"{", "not valid JSON"),
        (b"[]", "holds a list"),
        (b"\xff\xfe", "cannot be read"),
        (b"{}", "peft_type is None"),
    ],
)
def test_files_that_are_no_configuration_are_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "adapter_config.json").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_config(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is no folder"):
        read_config(tmp_path / "file")
    with pytest.raises(UserError, match=r"holds no adapter_config\.json"):
        read_config(tmp_path / "absent")


REFUSED = {"adalora": "ADALORA", "vera": "VERA", "bdlora": "use_bdlora", "kasa": "kasa_config"}


def test_published_variants_are_read_or_refused_for_what_they_are(shared_data: Path) -> None:
    files = sorted((shared_data / "adapter_configs" / "peft_repo").glob("*.json"))
    assert len(files) > 10
    for file in files:
        raw = json.loads(file.read_text())
        reason = next((reason for part, reason in REFUSED.items() if part in file.name), None)
        if reason:
            with pytest.raises(UserError, match=reason):
                parse_config(raw, file.name)
        else:
            assert parse_config(raw, file.name).rank == raw["r"]
