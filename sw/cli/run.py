"""``plora run``: decode steps of a workload's batch on one system or on many."""

from __future__ import annotations

import argparse
import json
from typing import Any

from plora.sw.cli.command import CommandParser, Result, as_json, say
from plora.sw.cli.run_flags import add_system_flags, options_of

SUMMARY = "decode steps of a batch on PLoRA and its baselines: time per token, throughput, bottleneck"

DEFAULT_SYSTEMS = (
    "plora",
    "nd-e3",
    "nd-e4",
    "ns",
    "pure-cxl",
    "pure-cxl-cached",
    "cpu-lora-offload",
    "grace-hopper",
    "plora-nocxl",
    "s-lora",
    "s-lora-4gpu",
    "all-hbm",
)

_EPILOG = """\
Without flags: Llama2-7B, 1000 adapters, one H100 and four devices, PLoRA against its baselines.
docs/system-model.md explains compositions, presets and every key of --config FILE.toml.

  plora run --model llama2-7b --workload uniform --batch-size 32 --system plora --composition overlap --json
"""


def configure(parser: CommandParser) -> None:
    """Add the flags of ``plora run``."""
    parser.epilog = _EPILOG
    add = parser.add_argument
    add(
        "--system",
        nargs="+",
        metavar="NAME|FILE",
        dest="systems",
        help="systems by name or .toml file, or `all` (default: PLoRA and its baselines)",
    )
    add("--batch-size", type=int, metavar="N", help="requests that decode together (default: the workload's)")
    add("--context-tokens", type=int, metavar="N", help="context of every request in the middle of the run")
    add("--steps", type=int, metavar="N", help="decode steps, each one token longer (default: 16)")
    add(
        "--composition",
        choices=("dependency", "overlap", "additive"),
        help="dependency: event-driven (default); overlap: the slowest resource; additive: base + adapters + attention",
    )
    add("--sub-batches", type=int, metavar="N", help="parts of the batch that overlap (dependency; default: 1)")
    add_system_flags(parser)
    add("--trace-layers", type=int, default=4, metavar="N", help="layers in the timeline of --out; 0: all (default: 4)")
    add("--list", action="store_true", dest="list_names", help="list models, workloads, systems, GPUs, links, devices")


def _names() -> Result:
    from plora.sim.hardware.device import load_devices
    from plora.sim.hardware.gpu import load_gpus
    from plora.sim.hardware.link import load_links
    from plora.sim.llm.config import bundled_models
    from plora.sim.system.spec import bundled_systems
    from plora.sim.workload.named import load_workloads

    names = {
        "models": sorted(bundled_models()),
        "workloads": sorted(load_workloads()),
        "systems": sorted(bundled_systems()),
        "gpus": sorted(load_gpus()),
        "links": sorted(load_links()),
        "devices": sorted(load_devices()),
    }
    return Result(names, "\n".join(f"{kind:<10} {', '.join(known)}" for kind, known in names.items()))


def _row(result: dict[str, Any], plora_ms: float | None) -> str:
    mean = result["tpot_ms"]["mean"]
    running, requested = result["batch"]["running"], result["batch"]["requested"]
    ratio = f"{mean / plora_ms:8.2f}" if plora_ms else " " * 8
    notes = []
    if running < requested:
        notes.append(f"{running} of {requested} requests fit")
    if not result["fits_in_hbm"]:
        hbm = result["hbm_bytes"]
        needed = hbm["weights"] + hbm["adapters"] + hbm["kv_cache"]
        notes.append(f"needs {needed / 1e9:.0f} of {hbm['budget'] / 1e9:.0f} GB HBM")
    bound, share = next(iter(result["bound_share"].items()))
    return (
        f"{result['title']:<18}{mean:10.3f}{result['throughput_tokens_per_s']:12.0f}{ratio}"
        f"  {bound} ({share:.0%})".ljust(72)
        + "; ".join(notes)
    ).rstrip()


def _table(results: list[dict[str, Any]], config: dict[str, Any]) -> str:
    plora = next((r["tpot_ms"]["mean"] for r in results if r["system"] == "plora"), None)
    head = (
        f"{config['model']}, {config['workload']}: batch {config['batch_size']}, {config['num_adapters']} adapters, "
        f"mean context {results[0]['context_tokens_mean']:.0f} tokens; {config['num_devices']} devices "
        f"behind {config['link']['name']}\n"
        f"composition {config['composition']}, costs {config['preset']}, link {config['link_sharing']}, "
        f"weights {config['weights']}, seed {config['seed']}"
    )
    phases = results[0]["layer_phases"] if len(results) == 1 else []
    columns = f"{'system':<18}{'TPOT ms':>10}{'tokens/s':>12}{'/ PLoRA':>8}  bound by (share of the step)"
    return "\n".join([head, "", columns, *(_row(result, plora) for result in results), *_phases(phases)])


def _phases(phases: list[dict[str, Any]]) -> list[str]:
    """Show the phases of a layer, where one system was run."""
    if not phases:
        return []
    rows = []
    for phase in phases:
        shares = ", ".join(f"{limit} {share:.0%}" for limit, share in list(phase["bound_share"].items())[:3])
        layers = f"{phase['layers']} x" if phase["phase"] != "head" else ""
        rows.append(f"{layers:<6}{phase['phase']:<16}{phase['time_us']:10.2f}  {shares}")
    return ["", f"{'layers':<6} {'phase':<15}{'us':>10}  bound by", *rows]


def run(args: argparse.Namespace) -> Result:
    """Run every system that was asked for.

    Raises:
        UserError: a flag, file or combination that the user can mend.
    """
    if args.list_names:
        return _names()
    from plora.hw.defs.errors import UserError
    from plora.sim.system.config import RunOptions, resolve
    from plora.sim.system.decode import decode_run
    from plora.sim.system.report import config_of, steps_csv, system_result
    from plora.sim.system.timeline import step_trace

    if args.trace_layers < 0:
        raise UserError(f"--trace-layers is {args.trace_layers}; give 0 (all) or more")
    resolved = resolve(options_of(args, RunOptions(systems=DEFAULT_SYSTEMS)), args.config)
    runs = []
    refused: dict[str, str] = {}
    for spec in resolved.systems:
        try:
            runs.append(decode_run(resolved, spec))
        except UserError as error:
            # Among many systems, one that cannot hold the model is a finding, not the end of the run.
            if len(resolved.systems) == 1:
                raise
            refused[spec.name] = str(error)
            say(f"left out: {error}")
    if not runs:
        raise UserError(f"no system can run this: {next(iter(refused.values()))}")
    config = config_of(resolved)
    results = [system_result(one) for one in runs]
    common = {
        "config": config,
        "seed": resolved.options.seed,
        "composition": resolved.options.composition,
        "preset": resolved.preset,
        "link_sharing": resolved.options.link_sharing,
    }
    data: dict[str, Any] = {**results[0], **common} if len(resolved.systems) == 1 else {"systems": results, **common}
    if refused:
        data["left_out"] = refused
    files: dict[str, str | bytes] = {}
    if getattr(args, "out", None) is not None:
        layers = args.trace_layers or None
        files["config.json"] = json.dumps(as_json(config), indent=2) + "\n"
        files["summary.json"] = json.dumps(as_json(data), indent=2) + "\n"
        files["steps.csv"] = steps_csv(runs)
        files |= {f"trace-{one.spec.name}.json": step_trace(one, layers) for one in runs}
    return Result(data=data, text=_table(results, config), files=files)
