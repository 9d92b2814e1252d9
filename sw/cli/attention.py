"""``plora attention``: attention of a decode step on devices, compared with the golden model and with float64."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plora.hw.defs.config import PRESETS, NdpConfig, preset
from plora.hw.defs.errors import UserError
from plora.sw.cli.command import CommandParser, Result

if TYPE_CHECKING:
    from plora.hw.defs.port import DevicePort
    from plora.sw.attention.run import Inputs, StepReport

SUMMARY = "run decode attention over a KV cache on device models or the RTL and compare the bits"

EXIT_MISMATCH = 1
KV_DTYPES = ("fp16", "int8", "int4")
MAX_DEVICES, MAX_HEADS, MAX_TOKENS, MAX_STEPS = 64, 1024, 1 << 20, 4096

_EPILOG = """\
Tokens are dealt over the devices; each device runs one chain of descriptors for every KV head and returns one
partial result with its anchors; the host merges them, with those of tokens that stay on the GPU.

  plora attention --model llama3-8b --tokens 2048 --devices 4 --preset full
  plora attention --heads 8 --kv-heads 2 --head-dim 64 --tokens 100 --steps 3 --device rtl --json
  plora attention --input qkv.npz --gpu-tokens 32 --dtype bf16
  plora attention --kv-dtype int8 --tokens 1000

With --kv-dtype int8 or int4 the devices hold keys and values as integers with a scale a token; the error and its bound
are those of attention over them, and one column more has the error with the keys and values that were given.

--input is a .npz or a safetensors file with q (heads, head_dim) or (steps, heads, head_dim), and k and v (tokens,
kv_heads, head_dim).
"""


def configure(parser: CommandParser) -> None:
    """Add the verb's flags."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "--model", metavar="NAME", default=None, help="heads of one layer of this model: a name, or a config.json"
    )
    parser.add_argument("--heads", type=int, default=None, help="query heads (default: 8)")
    parser.add_argument("--kv-heads", type=int, default=None, help="KV heads (default: 2)")
    parser.add_argument("--head-dim", type=int, default=None, help="dimension of a head (default: 128)")
    parser.add_argument("--tokens", type=int, default=None, help="context of the first step (default: 512)")
    parser.add_argument("--steps", type=int, default=None, help="decode steps, each with one token more (default: 1)")
    parser.add_argument("--input", metavar="FILE", type=Path, default=None, help="q, k and v instead of random ones")
    parser.add_argument("--gpu-tokens", type=int, default=0, help="first tokens that stay on the GPU (default: 0)")
    parser.add_argument("--devices", type=int, default=1, help="devices that share the tokens (default: 1)")
    parser.add_argument(
        "--device",
        choices=("functional", "timed", "rtl"),
        default="functional",
        help="functional model, the cycle model, or the RTL under Verilator (default: functional)",
    )
    parser.add_argument("--preset", default="small", help=f"size of a device: {', '.join(PRESETS)} (default: small)")
    parser.add_argument(
        "--tile-tokens", type=int, default=None, help="tokens for which memory is taken at a time (default: the most)"
    )
    parser.add_argument(
        "--dtype", choices=("fp16", "bf16"), default="fp16", help="type of q, k, v and results (default: fp16)"
    )
    parser.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        default=None,
        help="type of keys and values on the devices; integers beside FP16 only (default: as --dtype)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of q, k, v and of the RTL's timing (default: 0)")


def run(args: argparse.Namespace) -> Result:
    """Place the cache, run the steps, compare and report."""
    from plora.hw.defs.descriptor import DType
    from plora.hw.defs.queue import ordinary_softmax_scale, softmax_scale_value
    from plora.sw.attention.run import decode
    from plora.sw.session import open_session

    _in_range("--devices", args.devices, 1, MAX_DEVICES)
    if args.seed < 0:
        raise UserError(f"--seed {args.seed}: choose 0 or more")
    kv_dtype = args.kv_dtype or args.dtype
    if args.dtype != "fp16" and kv_dtype != args.dtype:
        raise UserError(f"--kv-dtype {kv_dtype}: with --dtype {args.dtype} the devices hold that; leave it out")
    config = preset(args.preset)
    inputs = _inputs(args)
    steps, heads, head_dim = inputs.q.shape
    tokens, kv_heads = len(inputs.k) - steps + 1, inputs.k.shape[1]
    _in_range("--gpu-tokens", args.gpu_tokens, 0, tokens)
    scale = ordinary_softmax_scale(head_dim)
    with ExitStack() as stack:
        sessions = []
        for device in range(args.devices):
            port, memory_bytes = _open_device(args.device, config, args.seed + device, stack)
            sessions.append(open_session(port, memory_bytes=memory_bytes))
        reports = []
        running = decode(
            sessions,
            inputs,
            scale,
            gpu_tokens=args.gpu_tokens,
            tile_tokens=args.tile_tokens,
            kv_dtype=DType[kv_dtype.upper()],
        )
        for report in running:
            reports.append(report)
        memory = sum(
            region.size_bytes
            for session in sessions
            for region in session.allocator.held
            if region.name.startswith("KV cache")
        )
        for session in sessions:
            session.queue.close()
    match = all(report.match and report.within_bound for report in reports)
    timed = args.device != "functional"
    data: dict[str, Any] = {
        "device": args.device,
        "devices": args.devices,
        "preset": config.name,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "tokens": tokens,
        "gpu_tokens": args.gpu_tokens,
        "dtype": args.dtype,
        "kv_dtype": kv_dtype,
        "seed": args.seed,
        "softmax_scale": softmax_scale_value(scale),
        "match": all(report.match for report in reports),
        "within_bound": all(report.within_bound for report in reports),
        "steps": [_step_data(report, timed) for report in reports],
        "device_memory_bytes": memory,
    }
    return Result(
        data=data, text=_text(args, config, inputs, reports, timed), exit_status=0 if match else EXIT_MISMATCH
    )


def _in_range(flag: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise UserError(f"{flag} {value}: choose {low} ... {high}")
    return value


def _inputs(args: argparse.Namespace) -> Inputs:
    from plora.hw.defs.descriptor import DType
    from plora.sw.attention.run import read_inputs, synthetic_inputs

    dtype = DType[args.dtype.upper()]
    sizes = {"--heads": args.heads, "--kv-heads": args.kv_heads, "--head-dim": args.head_dim}
    given = [flag for flag, value in sizes.items() if value is not None]
    if args.input is not None:
        given += [flag for flag, value in (("--tokens", args.tokens), ("--steps", args.steps)) if value is not None]
        if given or args.model is not None:
            raise UserError(f"--input has the shape: leave out {(given or ['--model'])[0]}")
        return read_inputs(args.input, dtype)
    if args.model is not None:
        if given:
            raise UserError(f"--model has the shape of a head: leave out {given[0]}")
        from plora.sim.llm import load_model

        model = load_model(args.model)
        heads, kv_heads, head_dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    else:
        heads, kv_heads, head_dim = (
            default if value is None else value for value, default in zip(sizes.values(), (8, 2, 128), strict=True)
        )
    _in_range("--heads", heads, 1, MAX_HEADS)
    _in_range("--kv-heads", kv_heads, 1, heads)
    _in_range("--head-dim", head_dim, 1, 256)
    tokens = _in_range("--tokens", 512 if args.tokens is None else args.tokens, 1, MAX_TOKENS)
    steps = _in_range("--steps", 1 if args.steps is None else args.steps, 1, MAX_STEPS)
    if heads % kv_heads:
        raise UserError(f"--heads {heads}: choose a multiple of --kv-heads {kv_heads}")
    return synthetic_inputs(heads, kv_heads, head_dim, tokens, steps, args.seed, dtype)


def _open_device(name: str, config: NdpConfig, seed: int, stack: ExitStack) -> tuple[DevicePort, int]:
    """Return a device and the bytes of its memory."""
    if name == "rtl":
        from plora.hw.cosim.device import RtlDevice

        rtl = stack.enter_context(RtlDevice(config, seed=seed))
        return rtl, rtl.memory.size
    if name == "timed":
        from plora.sim.device.timed import TimedDevice

        timed = TimedDevice(config)
        return timed, timed.memory.size_bytes
    from plora.sim.functional import FunctionalDevice

    model = FunctionalDevice(config)
    return model, model.memory.size_bytes


def _step_data(report: StepReport, timed: bool) -> dict[str, Any]:
    attended = report.attended
    data: dict[str, Any] = {
        "tokens": report.tokens,
        "match": report.match,
        "max_abs_error": report.max_abs_error,
        "error_bound": report.bound,
        "within_bound": report.within_bound,
        "rounding_error": report.rounding_error,
        "max_abs_output": report.largest,
        "partial_results": len(attended.parts),
        "descriptors": attended.descriptors,
        "append_link_bytes": report.append_traffic.total_bytes,
        "attend_link_bytes": report.attend_traffic.total_bytes,
        "link_result_bytes": report.attend_traffic.result_bytes,
    }
    if timed:
        data["core_cycles"] = list(attended.cycles)
    return data


def _text(
    args: argparse.Namespace, config: NdpConfig, inputs: Inputs, reports: Sequence[StepReport], timed: bool
) -> str:
    head = ["tokens", "chains", "descriptors", "link bytes", "error vs float64", "bound", "match"]
    rounds = args.kv_dtype not in (None, args.dtype)
    if rounds:
        head.insert(6, f"error of {args.kv_dtype.upper()}")
    rows = [[*head[:4], "core cycles", *head[4:]] if timed else head]
    for report in reports:
        row = [
            str(report.tokens),
            str(len(report.attended.parts)),
            str(report.attended.descriptors),
            str(report.append_traffic.total_bytes + report.attend_traffic.total_bytes),
            f"{report.max_abs_error:.1e}",
            f"{report.bound:.1e}",
            "yes" if report.match and report.within_bound else "NO",
        ]
        if rounds:
            row.insert(6, f"{report.rounding_error:.1e}")
        if timed:
            row.insert(4, "/".join(str(cycles) for cycles in report.attended.cycles))
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    _, heads, head_dim = inputs.q.shape
    devices = f"{args.devices} {config.name} {'RTL' if args.device == 'rtl' else args.device} device" + (
        "s" if args.devices > 1 else ""
    )
    wrong = sum(not (report.match and report.within_bound) for report in reports)
    verdict = (
        "every partial result equals the golden model bit for bit, every output lies within its bound"
        if not wrong
        else f"{wrong} steps DIFFER from the golden model or leave the bound"
    )
    title = (
        f"attention of {heads} query heads on {inputs.k.shape[1]} KV heads of {head_dim} in {inputs.dtype.name}:"
        f" {devices}, seed {args.seed}"
    )
    return "\n".join([title, "", *lines, "", verdict])
