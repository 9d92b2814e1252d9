"""Workloads: who asks for which adapter, when, and for how many tokens.

`named` holds the paper's workloads, `popularity` the laws, `requests` the generators and the
request table, `traces` the readers of public trace formats.
"""

from plora.sim.workload.named import Workload, load_workload, load_workloads
from plora.sim.workload.popularity import Popularity
from plora.sim.workload.requests import NO_ADAPTER, Requests, adapter_ranks, slora, synthetic
from plora.sim.workload.traces import read_trace

__all__ = [
    "NO_ADAPTER",
    "Popularity",
    "Requests",
    "Workload",
    "adapter_ranks",
    "load_workload",
    "load_workloads",
    "read_trace",
    "slora",
    "synthetic",
]
