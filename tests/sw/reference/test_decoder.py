"""The reference decoder refuses what it would compute wrongly, and lets devices do its attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plora.hw.defs.config import preset
from plora.hw.defs.errors import UserError
from plora.hw.defs.queue import ordinary_softmax_scale
from plora.sim.functional import FunctionalDevice
from plora.sw.attention import KvStore
from plora.sw.reference.decoder import Attention, Decoder, Float64, load_decoder
from plora.sw.session import open_session


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


def attention_on_devices(model: Decoder, count: int, *, forget: int | None = None) -> Attention:
    """Attention of a prompt as decoding does it: a token is appended to the cache, then attends to all of it.

    ``forget``: a number of token whose key is zero in the cache, to see that it shows.
    """
    sessions = []
    for _ in range(count):
        device = FunctionalDevice(preset("tiny"))
        sessions.append(open_session(device, memory_bytes=device.memory.size_bytes))
    config = model.config
    store = KvStore(
        sessions,
        head_dim=config["head_dim"],
        kv_heads=config["num_key_value_heads"],
        layers=config["num_hidden_layers"],
        tile_tokens=32,
    )

    def attend(layer: int, q: Float64, k: Float64, v: Float64) -> Float64:
        q, k, v = (each.astype(np.float16) for each in (q, k, v))  # type: ignore[assignment]
        scale, outputs = ordinary_softmax_scale(q.shape[2]), []
        for token in range(len(q)):
            new = slice(token, token + 1)
            store.append(k[new] * np.float16(token != forget), v[new], layer)
            outputs.append(store.attend(q[token], scale, layer).output)
        return np.stack(outputs)

    return attend


@pytest.mark.parametrize(("name", "count"), [("tiny-llama-gqa", 1), ("tiny-llama-gqa", 2), ("tiny-qwen3-moe", 3)])
def test_a_model_whose_attention_runs_on_devices_says_the_same(fixtures_dir: Path, name: str, count: int) -> None:
    model = load_decoder(fixtures_dir / "peft" / name)
    token_ids = [(7 * i + 3) % 128 for i in range(40)]
    exact = model.logits(token_ids)
    on_devices = model.logits(token_ids, attention=attention_on_devices(model, count))
    assert np.abs(on_devices - exact).max() < 1e-3 * np.abs(exact).max()
    wrong = model.logits(token_ids, attention=attention_on_devices(model, count, forget=20))
    assert np.abs(wrong - exact).max() > 3 * np.abs(on_devices - exact).max(), "one key in 40 does not show"
