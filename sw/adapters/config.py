"""``adapter_config.json`` of a LoRA adapter as PEFT writes it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plora.hw.defs.errors import UserError

CONFIG_NAME = "adapter_config.json"
ALL_LINEAR = "all-linear"

_USED = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "target_parameters",
        "modules_to_save",
        "use_dora",
        "lora_bias",
        "init_lora_weights",
        "base_model_name_or_path",
    }
)

# Keys that say how the adapter was trained, which modules it was put on, or where it comes from: the tensors
# tell the rest. `bias` and `trainable_token_indices` bring tensors of their own, which the reader reports.
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "bias",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "layer_replication",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
        "trainable_token_indices",
    }
)

_REFUSED = {
    "use_qalora": "QA-LoRA pools groups of x before A, which the device does not do",
    "use_bdlora": "BD-LoRA has block-diagonal matrices, which the device does not take apart",
    "kasa_config": "KaSA has a diagonal matrix between A and B, which the device does not apply",
    "alora_invocation_tokens": "an activated LoRA applies to part of a sequence, which this reader does not track",
    "arrow_config": "Arrow routes every token to several adapters, which this reader does not do",
    "monteclora_config": "MonteCLoRA samples its matrices, which the device does not do",
    "velora_config": "VeLoRA changes what is stored between layers, which this reader does not know",
}

_OTHER_METHODS = {
    "ADALORA": "AdaLoRA has singular values between A and B; merge them into B and save it as LORA",
    "VERA": "VeRA shares one random A and B among all modules and trains vectors between them",
    "LOHA": "LoHa is a product of two low-rank updates value by value, no x A B",
    "LOKR": "LoKr is a Kronecker product, no x A B",
}


@dataclass(frozen=True)
class AdapterConfig:
    """What of ``adapter_config.json`` decides the adapter's arithmetic."""

    where: str
    """The file, for messages."""
    base_model: str | None
    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: tuple[str, ...] | str | None
    """Names, a regular expression (or ``all-linear``), or None for the architecture's default."""
    target_parameters: tuple[str, ...]
    """Parameters that are no modules of their own: the fused matrices of experts."""
    modules_to_save: tuple[str, ...]
    """Modules of which the adapter holds whole tensors."""
    use_dora: bool
    lora_bias: bool
    changed_base: str | None
    """Initialisation that took its start out of the base weights, so that the base must be changed alike."""

    def rank_of(self, module: str) -> int:
        """Rank of the module at path ``module`` of the base model."""
        return int(self._by_pattern(self.rank_pattern, module, self.rank))

    def alpha_of(self, module: str) -> float:
        """Alpha of the module at path ``module``."""
        return float(self._by_pattern(self.alpha_pattern, module, self.alpha))

    def scaling_of(self, module: str) -> float:
        """Factor on x A^T B^T: alpha / r, with rsLoRA alpha / sqrt(r)."""
        rank = self.rank_of(module)
        return self.alpha_of(module) / (math.sqrt(rank) if self.use_rslora else rank)

    def targets_module(self, module: str) -> bool:
        """True if ``target_modules`` names the module."""
        targets = self.target_modules
        if targets is None or targets == ALL_LINEAR:
            return True
        if isinstance(targets, str):
            return re.fullmatch(targets, module) is not None
        return any(_ends_with(module, target) for target in targets)

    def parameters_in(self, module: str) -> tuple[str, ...]:
        """Names of the parameters of ``module`` that ``target_parameters`` names."""
        names = [target.rpartition(".")[2] for target in self.target_parameters]
        pairs = zip(self.target_parameters, names, strict=True)
        return tuple(dict.fromkeys(name for target, name in pairs if _ends_with(f"{module}.{name}", target)))

    def _by_pattern(self, patterns: Mapping[str, float], module: str, default: float) -> float:
        # PEFT: the first key that matches the end of the path, from a dot or from the start.
        return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _ends_with(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def read_config(folder: Path) -> AdapterConfig:
    """Read ``adapter_config.json`` in ``folder``.

    Raises:
        UserError: there is none, it is no JSON object, it is not a LoRA that the device computes, or a
            value is wrong. Unknown keys are refused unless they are null, false or empty.
    """
    path = folder / CONFIG_NAME
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} holds no {CONFIG_NAME}; give the folder of a PEFT adapter") from None
    except NotADirectoryError:
        raise UserError(f"{folder} is no folder; give the folder of a PEFT adapter") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); check the file and its permissions") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); mend the file") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: holds a {type(raw).__name__}; give a JSON object as PEFT writes it")
    return parse_config(raw, str(path))


def parse_config(raw: Mapping[str, Any], where: str) -> AdapterConfig:
    """Build an `AdapterConfig` from the parsed JSON object ``raw``; see `read_config`."""
    method = raw.get("peft_type")
    if method != "LORA":
        reason = _OTHER_METHODS.get(str(method), "only LoRA is x A B")
        raise UserError(f"{where}: peft_type is {method!r}, not 'LORA': {reason}")
    for key, value in raw.items():
        if key in _USED or key in _WITHOUT_EFFECT or _is_off(value):
            continue
        if key in _REFUSED:
            raise UserError(f"{where}: {key} is set: {_REFUSED[key]}; merge the adapter or train without it")
        raise UserError(
            f"{where}: unknown key {key!r}: it may change what the adapter computes; remove it if it does not"
        )
    rank = raw.get("r", 8)
    _positive_integer(rank, "r", where)
    alpha = raw.get("lora_alpha", 8)
    _finite(alpha, "lora_alpha", where)
    rank_pattern = _pattern(raw, "rank_pattern", where)
    alpha_pattern = _pattern(raw, "alpha_pattern", where)
    for key, value in rank_pattern.items():
        _positive_integer(value, f"rank_pattern[{key!r}]", where)
    for key, value in alpha_pattern.items():
        _finite(value, f"alpha_pattern[{key!r}]", where)
    base = raw.get("base_model_name_or_path")
    init = raw.get("init_lora_weights", True)
    return AdapterConfig(
        where=where,
        base_model=base if isinstance(base, str) else None,
        rank=rank,
        alpha=float(alpha),
        use_rslora=_flag(raw, "use_rslora", where),
        rank_pattern=rank_pattern,
        alpha_pattern={key: float(value) for key, value in alpha_pattern.items()},
        target_modules=_targets(raw, where),
        target_parameters=_names(raw, "target_parameters", where),
        modules_to_save=_names(raw, "modules_to_save", where),
        use_dora=_flag(raw, "use_dora", where),
        lora_bias=_flag(raw, "lora_bias", where),
        changed_base=_changed_base(init),
    )


def _is_off(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


def _changed_base(init: Any) -> str | None:
    """The initialisations that PEFT subtracts from the base weights."""
    changes = isinstance(init, str) and init.lower().startswith(("pissa", "olora", "corda", "loftq", "lora_ga"))
    return init if changes else None


def _positive_integer(value: Any, key: str, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{where}: {key} is {value!r}; give an integer of at least 1")


def _finite(value: Any, key: str, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UserError(f"{where}: {key} is {value!r}; give a finite number")


def _flag(raw: Mapping[str, Any], key: str, where: str) -> bool:
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise UserError(f"{where}: {key} is {value!r}; give true or false")
    return value


def _pattern(raw: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    table = raw.get(key)
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise UserError(f"{where}: {key} is {table!r}; give an object of module names or regular expressions")
    for expression in table:
        _check_expression(expression, key, where)
    return table


def _check_expression(expression: str, key: str, where: str) -> None:
    try:
        re.compile(expression)
    except re.error as error:
        raise UserError(f"{where}: {key} has {expression!r}, no regular expression ({error}); mend it") from None


def _names(raw: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    names = raw.get(key)
    if names is None:
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"{where}: {key} is {names!r}; give a list of names")
    return tuple(names)


def _targets(raw: Mapping[str, Any], where: str) -> tuple[str, ...] | str | None:
    targets = raw.get("target_modules")
    if targets is None:
        return None
    if isinstance(targets, str):
        if targets != ALL_LINEAR:
            _check_expression(targets, "target_modules", where)
        return targets
    return _names(raw, "target_modules", where)
