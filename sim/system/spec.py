"""What a system is: who computes what, where data lives, and what it costs to reach.

A system is one TOML file of a page; `docs/system-model.md` explains every key. The files under
``data/systems`` are the paper's systems and ablations; a user's own file has the same keys.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from plora.hw.defs.errors import UserError
from plora.sim.datafile import LARGEST, SMALLEST_POSITIVE, convert, read_toml

_SYSTEMS = Path(__file__).parent / "data" / "systems"

Strategy = Literal["E1", "E2", "E3", "E4"]
"""How one adapter is served (the paper, section V-A).

``E1`` the GPU computes from A and B in HBM; ``E2`` the GPU computes and reads A and B over the link;
``E3`` the far side computes x A B and returns y; ``E4`` the far side computes m = x A, and the GPU
m B from B in HBM."""

MOST_PARTS = 4096
"""GPUs, devices, ports or channels at most."""

STRATEGIES: tuple[Strategy, ...] = ("E1", "E2", "E3", "E4")

ALIASES = {"nsd": "plora"}
"""Further names of bundled systems: the paper's ablation calls the complete system NSD."""

LaunchPer = Literal["none", "layer", "adapter-layer", "adapter-matrix"]
"""What needs a kernel launched by the host: nothing (one graph, loads and stores), a number of
kernels a layer, one for each distinct adapter in each layer, or one for each adapter and matrix."""


class Gpus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The GPUs: `count` of them share every matrix and head evenly (tensor parallelism)."""

    count: int = 1


class Far(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The memory behind the link.

    ``devices``: the run's pool devices over the run's link. ``host``: the memory of the host CPU.
    ``none``: nothing but HBM. `compute` is what can work beside that memory. `link` overrides the
    run's link; `host_gb_per_s`, `host_capacity_bytes` and `host_tflops` describe the host.
    """

    memory: Literal["devices", "host", "none"]
    compute: Literal["ndp", "cpu", "none"] = "none"
    link: str | None = None
    host_gb_per_s: float = 0.0
    host_capacity_bytes: float = 0.0
    host_tflops: float = 0.0


class Kv(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The KV cache: where it lives, who attends over it, and whether spare HBM may hold copies."""

    home: Literal["hbm", "far"]
    attention: Literal["gpu", "distributed"]
    hbm_copies: bool = False


class Adapters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The adapters: where they live and which strategies may serve them.

    With one strategy it is applied to all; with several the manager chooses. `assume_fits` leaves
    cached matrices out of the HBM budget, as the paper's idealised ND(E4) does. `load_link` is the
    link over which adapters that live in HBM are fetched from the host before their first request
    runs; without it they are all there from the start. With `cold_start_tflops` above 0 the request
    does not wait for it: the CPU computes the adapter's part of the prompt at that rate meanwhile.
    `merge` adds the adapter to the base weights while all requests that run share one. `one_rank`
    pads every adapter to the largest rank there is.
    """

    home: Literal["hbm", "far"]
    strategies: tuple[Strategy, ...]
    assume_fits: bool = False
    load_link: str | None = None
    cold_start_tflops: float = 0.0
    merge: bool = False
    one_rank: bool = False

    def stored_ranks(self, ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the ranks (adapters,) at which adapters of `ranks` are stored and computed."""
        return np.full_like(ranks, ranks.max()) if self.one_rank and len(ranks) else ranks


class Launch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Kernels that the host launches.

    `count` launches for each unit of `per`; `time_us` overrides the GPU's launch time; a `blocking`
    launch stops the GPU's other work meanwhile (a kernel boundary and a host-driven copy), one that
    is not overlaps with it.
    """

    per: LaunchPer = "none"
    count: float = 1.0
    time_us: float | None = None
    blocking: bool = False


class SystemSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One system.

    `overflow` says what happens when what lives in HBM does not fit: ``report`` runs as if it did
    and says so, ``limit-batch`` runs as many requests as fit and lets the others wait.
    """

    name: str
    title: str
    source: str
    gpus: Gpus
    far: Far
    kv: Kv
    adapters: Adapters
    launch: Launch = Launch()
    overflow: Literal["report", "limit-batch"] = "report"


def _refuse(spec: SystemSpec) -> str | None:
    """Return why `spec` makes no sense, or None."""
    far = spec.far
    strategies = spec.adapters.strategies
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}", spec.name) is None:
        return f"name is {spec.name!r}; it names files of results: give 1 to 64 letters, digits, '.', '_', '+' or '-'"
    if not 1 <= spec.gpus.count <= MOST_PARTS:
        return f"gpus.count is {spec.gpus.count}; give 1 to {MOST_PARTS}"
    for key in ("host_gb_per_s", "host_capacity_bytes", "host_tflops"):
        value = getattr(far, key)
        if value != 0 and not SMALLEST_POSITIVE <= value <= LARGEST:
            return f"far.{key} is {value:g}; give {SMALLEST_POSITIVE:g} to {LARGEST:g}"
    if not strategies or len(set(strategies)) != len(strategies):
        return f"adapters.strategies is {list(strategies)}; list each of E1 ... E4 at most once and at least one"
    if far.memory == "none" and (spec.kv.home == "far" or spec.adapters.home == "far"):
        return "kv.home or adapters.home is far, but far.memory is none; give far memory or keep both in hbm"
    if spec.adapters.home == "hbm" and strategies != ("E1",):
        return f"adapters live in hbm, so only E1 applies, not {list(strategies)}"
    if spec.adapters.load_link is not None and spec.adapters.home != "hbm":
        return "adapters.load_link needs adapters.home hbm"
    if not 0 <= spec.adapters.cold_start_tflops < 1e6:
        return f"adapters.cold_start_tflops is {spec.adapters.cold_start_tflops}; give 0 to 1e6"
    if spec.adapters.cold_start_tflops and spec.adapters.load_link is None:
        return "adapters.cold_start_tflops needs adapters.load_link, over which adapters are fetched meanwhile"
    if spec.adapters.merge and spec.adapters.home != "hbm":
        return "adapters.merge needs adapters.home hbm"
    if far.compute == "none" and {"E3", "E4"} & set(strategies):
        return "E3 and E4 need far.compute to be ndp or cpu"
    if spec.kv.attention == "distributed" and (spec.kv.home != "far" or far.compute != "ndp"):
        return "distributed attention needs kv.home far and far.compute ndp"
    if spec.kv.hbm_copies and spec.kv.home != "far":
        return "kv.hbm_copies needs kv.home far"
    if (far.compute == "ndp") != (far.memory == "devices") and far.compute != "none":
        return f"far.compute {far.compute} does not go with far.memory {far.memory} (ndp: devices, cpu: host)"
    if far.memory == "host" and not (far.host_gb_per_s > 0 and far.host_capacity_bytes > 0):
        return "far.memory host needs host_gb_per_s and host_capacity_bytes above 0"
    if far.compute == "cpu" and not far.host_tflops > 0:
        return "far.compute cpu needs host_tflops above 0"
    if not 0 <= spec.launch.count < 1e6:
        return f"launch.count is {spec.launch.count}; give 0 to 1e6"
    if spec.launch.time_us is not None and not 0 <= spec.launch.time_us < 1e6:
        return f"launch.time_us is {spec.launch.time_us}; give 0 to 1e6"
    return None


def check_system(spec: SystemSpec, where: str) -> SystemSpec:
    """Return `spec` if its parts go together; raises `UserError` naming `where` otherwise."""
    reason = _refuse(spec)
    if reason is not None:
        raise UserError(f"{where}: {reason}")
    return spec


def bundled_systems() -> tuple[str, ...]:
    """Names of the systems that come with the project, sorted."""
    return tuple(sorted(path.stem for path in _SYSTEMS.glob("*.toml")))


def load_system(system: str | Path) -> SystemSpec:
    """Read a system by name or from a TOML file.

    Raises:
        UserError: unknown name, unreadable file, unknown key, or parts that do not go together.
    """
    system = ALIASES.get(str(system), system)
    path = _SYSTEMS / f"{system}.toml"
    if str(system) not in bundled_systems():
        path = Path(system)
        if path.suffix != ".toml" and not os.path.exists(path):
            raise UserError(f"unknown system {str(system)!r}; known: {', '.join(bundled_systems())}, or a .toml file")
    return check_system(convert(read_toml(path), SystemSpec, path.name), path.name)
