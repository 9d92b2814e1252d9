"""``plora serve``: requests that arrive over time, served with continuous batching by one system or many."""

from __future__ import annotations

import argparse
import gc
import json
from typing import Any

from plora.sw.cli.command import CommandParser, Result, as_json, say
from plora.sw.cli.run_flags import add_system_flags, options_of

SUMMARY = "serve requests over time: TTFT, TPOT, ITL, throughput and goodput under continuous batching"

DEFAULT_REQUESTS = 512

LAST_ARRIVAL_S = 8e6
"""Arrivals of a trace: 64-bit picoseconds end at 9.2e6 s."""

_EPILOG = """\
Without flags: 512 requests of the uniform workload, all at once, on PLoRA. A trace brings its own arrivals.
docs/serving.md explains the scheduler and every metric.

  plora serve --workload skewed --num-requests 1000 --request-rate 20 --system plora s-lora
  plora serve --workload trace.csv --num-adapters 200 --model llama3-8b --json
"""

_SERVING = (
    "num_requests",
    "request_rate",
    "cv",
    "input_tokens",
    "output_tokens",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "async_scheduling",
    "block_size",
    "enable_prefix_caching",
    "shared_prefix_tokens",
    "data_parallel_size",
    "enable_expert_parallel",
    "slo_ttft_ms",
    "slo_tpot_ms",
)


def configure(parser: CommandParser) -> None:
    """Add the flags of ``plora serve``."""
    parser.epilog = _EPILOG
    add = parser.add_argument
    add(
        "--system",
        nargs="+",
        metavar="NAME|FILE",
        dest="systems",
        help="systems by name or .toml file (default: plora)",
    )
    add("--num-requests", type=int, metavar="N", help="requests (default: 512, or the whole trace)")
    add(
        "--request-rate",
        type=float,
        metavar="X",
        help="arrivals per second of a named workload (default: inf, all at once)",
    )
    add("--cv", type=float, metavar="X", help="coefficient of variation of their intervals (default: 1, Poisson)")
    add("--input-tokens", type=int, metavar="N", help="mean prompt instead of the workload's")
    add("--output-tokens", type=int, metavar="N", help="mean output instead of the workload's")
    add("--max-num-seqs", type=int, metavar="N", help="requests that run together (default: 256)")
    add("--max-num-batched-tokens", type=int, metavar="N", help="tokens of a step, prompts included (default: 8192)")
    add(
        "--no-enable-chunked-prefill",
        action="store_const",
        const=False,
        dest="enable_chunked_prefill",
        help="steps are prompts or decoding, prompts first",
    )
    add(
        "--async-scheduling",
        action="store_const",
        const=True,
        help="schedule a step while the one before it runs: a request joins the step after the next",
    )
    add("--block-size", type=int, metavar="N", help="tokens of a KV block (default: 16)")
    add(
        "--enable-prefix-caching",
        action="store_const",
        const=True,
        help="keep keys and values of prompts for later ones of the same adapter that begin alike",
    )
    add(
        "--shared-prefix-tokens",
        type=int,
        metavar="N",
        help="tokens with which every prompt of a named workload begins (default: 0)",
    )
    add("--data-parallel-size", type=int, metavar="N", help="replicas of each system, served in turn (default: 1)")
    add(
        "--enable-expert-parallel",
        action="store_const",
        const=True,
        help="the replicas share their routed experts and step together",
    )
    add("--slo-ttft-ms", type=float, metavar="X", help="goodput: TTFT at most (default: 2000)")
    add("--slo-tpot-ms", type=float, metavar="X", help="goodput: TPOT at most (default: 100)")
    add_system_flags(parser)


def _serving_options(args: argparse.Namespace) -> Any:
    from plora.sim.serving.options import ServeOptions, check_options

    flags = {name: getattr(args, name) for name in _SERVING if getattr(args, name) is not None}
    return check_options(ServeOptions(**flags))


def _requests(resolved: Any, options: Any) -> Any:
    """Return the requests to serve.

    Raises:
        UserError: arrival flags that a trace does not take.
    """
    from dataclasses import replace

    from plora.hw.defs.errors import UserError

    source, seed = resolved.source, resolved.options.seed
    if source.trace is not None:
        given = [
            n
            for n in ("request_rate", "input_tokens", "output_tokens", "shared_prefix_tokens")
            if getattr(options, n) not in (None, float("inf"), 0)
        ]
        if given:
            raise UserError(f"a trace has arrivals and lengths of its own; leave --{given[0].replace('_', '-')} out")
        count = options.num_requests if options.num_requests is not None else len(source.trace)
        requests = source.requests(count, seed)
        if requests.arrival_s[-1] > LAST_ARRIVAL_S:
            raise UserError(
                f"trace {source.name} has an arrival after {requests.arrival_s[-1]:g} s; give --num-requests so that "
                f"the last comes within {LAST_ARRIVAL_S:g} s"
            )
        return requests
    workload = source.workload
    if options.input_tokens is not None:
        workload = replace(workload, input_tokens=float(options.input_tokens))
    if options.output_tokens is not None:
        workload = replace(workload, output_tokens=float(options.output_tokens))
    count = options.num_requests if options.num_requests is not None else DEFAULT_REQUESTS
    requests = workload.requests(count, options.request_rate, cv=options.cv, seed=seed)
    requests = requests.with_shared_prefix(options.shared_prefix_tokens, options.block_size)
    return source.without_adapters(requests)


def _table(results: list[dict[str, Any]], config: dict[str, Any], requests: Any) -> str:
    rate = config["serving"]["request_rate"]
    head = (
        f"{config['model']}, {config['workload']}: {len(requests)} requests, {requests.total_tokens} tokens, "
        f"{config['num_adapters']} adapters, "
        + (
            f"{rate} requests/s"
            if rate is not None
            else "arrivals of the trace"
            if config["is_trace"]
            else "all at once"
        )
    )
    columns = (
        f"{'system':<18}{'TTFT ms':>12}{'p99':>11}{'TPOT ms':>10}{'p99':>9}{'ITL p99':>9}{'E2E s':>9}"
        f"{'tokens/s':>10}{'good/s':>8}{'preempted':>11}  decoding bound by"
    )
    rows = [
        f"{r['title']:<18}{r['ttft_ms']['mean']:12.1f}{r['ttft_ms']['p99']:11.1f}{r['tpot_ms']['mean']:10.2f}"
        f"{r['tpot_ms']['p99']:9.2f}{r['itl_ms']['p99']:9.2f}{r['e2e_ms']['mean'] / 1e3:9.2f}"
        f"{r['throughput_tokens_per_s']:10.0f}{r['goodput_requests_per_s']:8.2f}{r['preemptions']:11d}"
        f"  {_bound(r)}"
        for r in results
    ]
    return "\n".join([head, "", columns, *rows])


def _bound(result: dict[str, Any]) -> str:
    shares = result["decode_bound_share"]
    return next((f"{limit} ({share:.0%})" for limit, share in shares.items()), "")


def run(args: argparse.Namespace) -> Result:
    """Serve the workload on every system that was asked for.

    Raises:
        UserError: a flag, file or combination that the user can mend.
    """
    # A run makes no cycles of references; the collector would only walk what it has made, again and again.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _serve(args)
    finally:
        if collecting:
            gc.enable()


def _serve(args: argparse.Namespace) -> Result:
    import math

    import msgspec

    from plora.hw.defs.errors import UserError
    from plora.sim.serving.metrics import requests_csv, samples_csv, summary
    from plora.sim.serving.simulate import Simulation
    from plora.sim.serving.timeline import run_trace
    from plora.sim.system.config import RunOptions, resolve
    from plora.sim.system.report import config_of

    options = _serving_options(args)
    resolved = resolve(options_of(args, RunOptions(systems=("plora",))), args.config)
    if resolved.options.composition != "dependency":
        raise UserError(
            f"composition {resolved.options.composition} has no order of events, which serving needs: requests "
            "come and go between steps; use composition dependency, or `plora run` for single steps"
        )
    if resolved.options.sub_batches != 1:
        raise UserError("serving steps one batch at a time; leave sub_batches to `plora run`")
    requests = _requests(resolved, options)
    config = config_of(resolved)
    for name in ("batch_size", "context_tokens", "steps", "sub_batches"):
        del config[name]
    config["serving"] = msgspec.to_builtins(options) | {
        "request_rate": None if math.isinf(options.request_rate) else options.request_rate
    }
    config["is_trace"] = resolved.source.trace is not None
    config["workload_origin"] = dict(requests.metadata)
    results: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    files: dict[str, str | bytes] = {}
    for spec in resolved.systems:
        try:
            simulation = Simulation(resolved, spec, options, requests)
            outcome = simulation.run()
        except UserError as error:
            if len(resolved.systems) == 1:
                raise
            refused[spec.name] = str(error)
            say(f"left out: {error}")
            continue
        bounds = {"decode_bound_share": simulation.decode_bounds()}
        results.append({"system": spec.name, "title": spec.title, **summary(requests, outcome, options), **bounds})
        if getattr(args, "out", None) is not None:
            files[f"requests-{spec.name}.csv"] = requests_csv(requests, outcome)
            files[f"samples-{spec.name}.csv"] = samples_csv(outcome)
            files[f"trace-{spec.name}.json"] = run_trace(spec.title, requests, outcome)
    if not results:
        raise UserError(f"no system can serve this: {next(iter(refused.values()))}")
    common = {"config": config, "seed": resolved.options.seed, "preset": resolved.preset}
    data: dict[str, Any] = {**results[0], **common} if len(resolved.systems) == 1 else {"systems": results, **common}
    if refused:
        data["left_out"] = refused
    if files:
        files["config.json"] = json.dumps(as_json(config), indent=2) + "\n"
        files["summary.json"] = json.dumps(as_json(data), indent=2) + "\n"
    return Result(data=data, text=_table(results, config, requests), files=files)
