"""The reference decoder refuses what it would compute wrongly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plora.hw.defs.errors import UserError
from plora.sw.reference.decoder import load_decoder


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gpt_oss"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("sliding_window", 128),
        ("tie_word_embeddings", True),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 1e4}),
    ],
)
def test_models_that_it_does_not_cover_are_refused(fixtures_dir: Path, tmp_path: Path, key: str, value: Any) -> None:
    config = json.loads((fixtures_dir / "peft" / "tiny-llama-gqa" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(UserError, match=key):
        load_decoder(tmp_path)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_decoder(tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(UserError, match="cannot be read"):
        load_decoder(tmp_path)


def test_only_the_last_token_is_asked_for_and_the_order_of_the_others_matters(fixtures_dir: Path) -> None:
    model = load_decoder(fixtures_dir / "peft" / "tiny-llama-gqa")
    forward, backward = model.logits([3, 5, 7]), model.logits([5, 3, 7])
    assert forward.shape == (128,)
    assert abs(forward - backward).max() > 1e-3
