"""Named workloads and generators."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from plora.hw.defs.errors import UserError
from plora.sim.workload import Popularity, adapter_ranks, load_workload, load_workloads, slora, synthetic
from plora.sim.workload.requests import gamma_arrivals


@pytest.mark.parametrize(
    ("name", "adapters", "context", "distinct"),
    [
        ("lmsys", 27, 264, 13.0),
        ("uniform", 1000, 384, 31.5),
        ("skewed", 1000, 384, 26.5),
        ("uniform-long", 1000, 3072, 31.5),
        ("skewed-long", 1000, 3072, 26.5),
    ],
)
def test_named_workloads_are_as_reconstructed(name: str, adapters: int, context: float, distinct: float) -> None:
    workload = load_workload(name)
    assert (workload.adapters, workload.context_tokens, workload.batch_size) == (adapters, context, 32)
    assert workload.popularity.expected_distinct(32) == pytest.approx(distinct, abs=0.1)
    assert workload.mean_rank == 49.6


def test_every_value_of_every_workload_keeps_its_tag() -> None:
    assert load_workload("uniform-long").tags["input_tokens"] == "F"
    assert load_workload("skewed").tags["batch_size"] == "P"
    for workload in load_workloads().values():
        assert all(fact.status != "user" and len(fact.source) > 5 for fact in workload.facts.values())


def test_same_seed_same_bytes() -> None:
    workload = load_workload("lmsys")
    first, again, other = (workload.requests(500, 10.0, seed=seed).to_csv() for seed in (3, 3, 4))
    assert first == again != other


def test_changing_one_thing_leaves_the_others_as_they_were() -> None:
    workload = load_workload("lmsys")
    slow, fast = workload.requests(500, 1.0, seed=3), workload.requests(500, 10.0, cv=2.0, seed=3)
    assert not np.array_equal(slow.arrival_s, fast.arrival_s)
    assert np.array_equal(slow.adapter, fast.adapter)
    assert np.array_equal(slow.input_tokens, fast.input_tokens)


def test_a_million_requests_take_less_than_a_second() -> None:
    begin = time.process_time()
    requests = load_workload("lmsys").requests(1_000_000, 100.0)
    assert time.process_time() - begin < 1.0
    assert len(requests) == 1_000_000


def test_lengths_have_the_stated_mean_and_spread() -> None:
    requests = load_workload("lmsys").requests(100_000, 100.0)
    assert requests.input_tokens.mean() == pytest.approx(136, rel=0.03)
    assert requests.output_tokens.mean() == pytest.approx(256, rel=0.02)
    assert requests.input_tokens.std() / requests.input_tokens.mean() == pytest.approx(1.51, rel=0.1)
    assert requests.input_tokens.min() >= 1


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_arrivals_have_the_stated_rate_and_burstiness(cv: float) -> None:
    gaps = np.diff(gamma_arrivals(4.0, cv, 100_000, 0))
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=0.1)
    assert (gaps >= 0).all()


def test_an_infinite_rate_brings_everything_at_once() -> None:
    assert gamma_arrivals(float("inf"), 1.0, 5, 0).tolist() == [0.0] * 5


def test_slora_generator_has_its_published_laws() -> None:
    requests = slora(
        adapters=200,
        alpha=1.0,
        rate_per_s=50,
        cv=1.0,
        duration_s=400,
        input_range=(8, 512),
        output_range=(8, 512),
    )
    assert len(requests) == 20_000
    assert requests.arrival_s[-1] == pytest.approx(400, rel=0.05)
    assert (requests.input_tokens.min(), requests.input_tokens.max()) == (8, 511)
    shares = np.bincount(requests.adapter, minlength=200) / 20_000
    assert shares == pytest.approx(np.full(200, 1 / 200), abs=0.003)
    assert requests.metadata["adapters"].startswith("law: power")


def test_ranks_are_drawn_evenly_from_the_papers_five() -> None:
    ranks = adapter_ranks(50_000, seed=1)
    assert sorted(set(ranks.tolist())) == [8, 16, 32, 64, 128]
    assert ranks.mean() == pytest.approx(49.6, rel=0.02)
    assert np.array_equal(ranks, adapter_ranks(50_000, seed=1))


def test_the_csv_reads_back_as_itself(tmp_path: Path) -> None:
    from plora.sim.workload import read_trace

    written = load_workload("skewed").requests(200, 5.0, seed=9)
    path = tmp_path / "trace.csv"
    path.write_text(written.to_csv())
    back = read_trace(path)
    assert back.arrival_s == pytest.approx(written.arrival_s - written.arrival_s[0])
    assert np.array_equal(back.input_tokens, written.input_tokens)
    same = back.adapter[:, None] == back.adapter[None, :]
    assert np.array_equal(same, written.adapter[:, None] == written.adapter[None, :])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"count": 0}, "number of requests"),
        ({"rate_per_s": 0.0}, "request rate"),
        ({"rate_per_s": float("nan")}, "request rate"),
        ({"cv": -1.0}, "cv of the arrivals"),
        ({"cv": 1e300}, "cv of the arrivals"),
        ({"cv": 1e-300}, "cv of the arrivals"),
        ({"cv": float("nan")}, "cv of the arrivals"),
        ({"output_cv": 1e300}, "output lengths"),
        ({"input_tokens": 0.0}, "input length"),
        ({"output_tokens": float("nan")}, "output length"),
        ({"input_cv": -0.5}, "input lengths"),
        ({"seed": -1}, "seed"),
    ],
)
def test_impossible_workloads_are_refused(change: dict[str, float], word: str) -> None:
    arguments = {
        "count": 10,
        "rate_per_s": 1.0,
        "popularity": Popularity("uniform", 4),
        "input_tokens": 10.0,
        "output_tokens": 10.0,
    }
    with pytest.raises(UserError, match=word):
        synthetic(**(arguments | change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"duration_s": 0.0}, "duration"),
        ({"duration_s": 0.1}, "less than one request"),
        ({"input_range": (8, 8)}, "input range"),
        ({"output_range": (0, 8)}, "output range"),
        ({"alpha": 0.0}, "alpha"),
    ],
)
def test_impossible_slora_settings_are_refused(change: dict[str, object], word: str) -> None:
    arguments: dict[str, object] = {
        "adapters": 4,
        "alpha": 1.0,
        "rate_per_s": 2.0,
        "cv": 1.0,
        "duration_s": 10.0,
        "input_range": (8, 16),
        "output_range": (8, 16),
    }
    with pytest.raises(UserError, match=word):
        slora(**(arguments | change))  # type: ignore[arg-type]


MINE = "[mine]\nadapters = 10\nbatch_size = 4\ninput_tokens = 100\noutput_tokens = 50\n"


def test_a_users_workload_needs_a_few_bare_numbers(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    path.write_text(MINE + 'popularity = "skewed"\nalpha = 1.5\nranks = [16]\n')
    workload = load_workload("mine", path)
    assert (workload.context_tokens, workload.mean_rank, workload.tags["adapters"]) == (125, 16, "user")


@pytest.mark.parametrize(
    ("lines", "word"),
    [
        ('popularity = "zipf"', "unknown popularity law"),
        ('popularity = "hot-set"', "hot set"),
        ('popularity = "uniform"\nranks = []', "ranks"),
        ('popularity = "uniform"\nranks = [0]', "ranks"),
        ('popularity = "uniform"\nadaptors = 3', "adaptors"),
        ('popularity = "uniform"\ninput_cv = nan', "input_cv is nan"),
        ("", "popularity"),
    ],
)
def test_bad_workload_data_names_the_table_and_the_key(tmp_path: Path, lines: str, word: str) -> None:
    path = tmp_path / "w.toml"
    path.write_text(MINE + lines)
    with pytest.raises(UserError, match=word) as caught:
        load_workloads(path)
    assert "w.toml: [mine]" in str(caught.value)


def test_fractions_of_adapters_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    path.write_text(MINE.replace("= 10\n", "= 10.5\n") + 'popularity = "uniform"')
    with pytest.raises(UserError, match=r"adapters is 10\.5; give a whole number"):
        load_workloads(path)


def test_an_unknown_workload_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"unknown workload 'x'; known: lmsys, skewed, skewed-long, uniform"):
        load_workload("x")
