"""Tensors of a safetensors file as float32 arrays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize

from plora.hw.defs.errors import UserError

MODEL_NAME = "adapter_model.safetensors"
Float32 = npt.NDArray[np.float32]

_NUMPY = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}


@dataclass(frozen=True)
class Tensor:
    """A tensor, and the type in which it is stored."""

    values: Float32
    dtype: str
    """Safetensors' name of the type: F16, BF16, F32 or F64."""


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return every tensor of the safetensors file ``path`` by name, in the order of the names.

    Raises:
        UserError: the file cannot be read, is truncated or corrupt, or holds a tensor of a type that is
            no plain floating-point type, or a value that is NaN or infinite.
    """
    try:
        entries = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the file and its permissions") from None
    except (SafetensorError, ValueError, OverflowError) as error:
        raise UserError(f"{path}: no whole safetensors file ({error}); copy or download it again") from None
    # The library's order is that of a hash map: another on every run.
    return {name: _tensor(entry, f"{path}: tensor {name}") for name, entry in sorted(entries, key=lambda pair: pair[0])}


def _tensor(entry: dict[str, object], where: str) -> Tensor:
    dtype, shape, data = str(entry["dtype"]), entry["shape"], entry["data"]
    assert isinstance(shape, list) and isinstance(data, (bytes, bytearray))
    if dtype == "BF16":
        # BF16 is the upper half of float32.
        values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    elif dtype in _NUMPY:
        with np.errstate(over="ignore"):
            values = np.frombuffer(data, _NUMPY[dtype]).astype(np.float32)
    else:
        raise UserError(f"{where} has type {dtype}; save it as F16, BF16 or F32")
    bad = np.count_nonzero(~np.isfinite(values))
    if bad:
        raise UserError(
            f"{where} has {bad} values that are NaN or infinite; the adapter is damaged, train or copy it again"
        )
    return Tensor(values.reshape(shape), dtype)


def model_file(folder: Path) -> Path:
    """Return the weights file of the adapter in ``folder``.

    Raises:
        UserError: there is none, or only in a form that is refused (a pickle, shards).
    """
    path = folder / MODEL_NAME
    if path.is_file():
        return path
    if (folder / "adapter_model.bin").exists():
        raise UserError(
            f"{folder} holds adapter_model.bin, a pickle that could run code: load it with PEFT and save it with"
            " save_pretrained(..., safe_serialization=True)"
        )
    if any(folder.glob("adapter_model*-of-*.safetensors")) or (folder / f"{MODEL_NAME}.index.json").exists():
        raise UserError(f"{folder} holds an adapter in several files: save it as one {MODEL_NAME}")
    raise UserError(f"{folder} holds no {MODEL_NAME}; give the folder of a PEFT adapter with its weights")
