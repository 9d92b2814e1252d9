"""Trace readers on small samples of each format, on malformed rows, and on the public files."""

from __future__ import annotations

from pathlib import Path

import pytest

from plora.hw.defs.errors import UserError
from plora.sim.workload import NO_ADAPTER, Popularity, read_trace

VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,10,3\n0.25,20,4\n"


def write(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_vidur_rows_are_sorted_and_start_at_zero(tmp_path: Path) -> None:
    requests = read_trace(write(tmp_path, VIDUR))
    assert requests.arrival_s.tolist() == [0.0, 0.25]
    assert requests.input_tokens.tolist() == [20, 10]
    assert requests.adapter.tolist() == [NO_ADAPTER, NO_ADAPTER]
    assert requests.metadata["adapters"].startswith("none: base model only")


def test_a_lora_id_column_gives_identities_by_popularity(tmp_path: Path) -> None:
    text = "arrived_at,num_prefill_tokens,num_decode_tokens,lora_id\n0,1,1,b\n1,1,1,a\n2,1,1,b\n3,1,1,\n4,1,1,-1\n"
    requests = read_trace(write(tmp_path, text))
    assert requests.adapter.tolist() == [0, 1, 0, NO_ADAPTER, NO_ADAPTER]
    assert requests.adapters == 2
    assert requests.metadata["adapters"].startswith("trace: identities")


def test_a_law_stands_in_where_a_trace_has_no_identities_and_says_so(tmp_path: Path) -> None:
    requests = read_trace(write(tmp_path, VIDUR), popularity=Popularity("uniform", 50), seed=1)
    assert requests.adapters == 50
    assert "law: uniform over 50 adapters" in requests.metadata["adapters"]
    assert "no adapter identities" in requests.metadata["adapters"]


def test_a_law_for_a_trace_with_identities_is_refused(tmp_path: Path) -> None:
    text = "req_id,arrival_s,adapter,prompt_tokens,output_tokens\n0,0.0,x,5,6\n"
    with pytest.raises(UserError, match="identities of its own"):
        read_trace(write(tmp_path, text), popularity=Popularity("uniform", 5))


def test_azure_dates_keep_their_fractions(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 23:59:59.9799600,4808,10\n2023-11-17 00:00:00.0319600,3180,8\n"
    )
    assert read_trace(write(tmp_path, text)).arrival_s.tolist() == pytest.approx([0, 0.052])


def test_mooncake_lines_keep_their_prefix_blocks(tmp_path: Path) -> None:
    text = (
        '{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}\n\n'
        '{"timestamp": 1000, "input_length": 10, "output_length": 6, "hash_ids": [3]}\n'
    )
    requests = read_trace(write(tmp_path, text, "trace.jsonl"))
    assert requests.arrival_s.tolist() == [0.0, 2.0]
    assert requests.prefix_blocks is not None and requests.prefix_offsets is not None
    assert requests.prefix_blocks.tolist() == [3, 0, 7]
    assert requests.prefix_offsets.tolist() == [0, 1, 3]
    assert requests.prefix_block_tokens == 512


def test_recorded_runs_in_seconds_and_nanoseconds(tmp_path: Path) -> None:
    seconds = '{"input_toks": 5, "output_toks": 6, "arrival_time": 1777144890.5}\n'
    nanoseconds = '{"input_toks": 5, "output_toks": 6, "arrival_time_ns": 2000000000}\n'
    for text in (seconds, nanoseconds):
        assert read_trace(write(tmp_path, text, "t.jsonl")).input_tokens.tolist() == [5]


def test_burstgpt_failed_calls_are_left_out(tmp_path: Path) -> None:
    text = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,m,472,18,490,x\n6,m,10,0,10,x\n"
    assert len(read_trace(write(tmp_path, text))) == 1


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ("x,10,3", "arrived_at is 'x'"),
        ("nan,10,3", "arrived_at is 'nan'"),
        ("1,ten,3", "num_prefill_tokens is 'ten'"),
        ("1,10.5,3", "num_prefill_tokens"),
        ("1,0,3", "num_prefill_tokens is 0"),
        ("1,-4,3", "num_prefill_tokens is -4"),
        ("1,10,99999999999", "num_decode_tokens"),
        ("1,10", "columns of the header"),
        ("1,10,3,4", "columns of the header"),
    ],
)
def test_a_malformed_row_names_its_line_and_the_mend(tmp_path: Path, row: str, word: str) -> None:
    with pytest.raises(UserError, match=word) as caught:
        read_trace(write(tmp_path, VIDUR + row + "\n"))
    assert "trace.csv:4: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "not valid JSON"),
        ("[1]", "one JSON object a line"),
        ('{"timestamp": 1, "output_length": 2}', "input_length is missing"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 2, "hash_ids": ["a"]}', "hash_ids"),
        ('{"timestamp": 1, "input_length": 2.5, "output_length": 2}', "input_length"),
        ('{"timestamp": 1, "input_length": true, "output_length": 2}', "input_length"),
    ],
)
def test_a_malformed_json_line_names_its_line(tmp_path: Path, line: str, word: str) -> None:
    good = '{"timestamp": 0, "input_length": 1, "output_length": 1}\n'
    with pytest.raises(UserError, match=word) as caught:
        read_trace(write(tmp_path, good + line + "\n", "t.jsonl"))
    assert "t.jsonl:2: " in str(caught.value)


def test_a_first_line_that_is_a_list_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"t.jsonl:1: holds a list; give one JSON object a line"):
        read_trace(write(tmp_path, "[1]\n", "t.jsonl"))


def test_an_unknown_format_shows_the_columns_and_the_one_to_use(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="arrived_at,num_prefill_tokens"):
        read_trace(write(tmp_path, "when,what\n1,2\n"))


@pytest.mark.parametrize("text", ["", "arrived_at,num_prefill_tokens,num_decode_tokens\n"])
def test_an_empty_trace_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="no requests"):
        read_trace(write(tmp_path, text))


def test_a_missing_file_and_a_binary_one_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_trace(tmp_path / "absent.csv")
    (tmp_path / "binary.csv").write_bytes(bytes(range(128, 256)))
    with pytest.raises(UserError, match=r"binary\.csv: cannot be read"):
        read_trace(tmp_path / "binary.csv")


@pytest.mark.parametrize(
    ("file", "count", "adapters"),
    [
        ("azure2023/AzureLLMInferenceTrace_code.csv", 8819, 0),
        ("mooncake/conversation_trace.jsonl", 12031, 0),
        ("lmsys_vtc/lmsys_arena_27adapter_trace.csv", 1500, 27),
    ],
)
def test_public_traces_are_read_whole(shared_data: Path, file: str, count: int, adapters: int) -> None:
    requests = read_trace(shared_data / "traces" / file)
    assert (len(requests), requests.adapters) == (count, adapters)
    assert requests.arrival_s[0] == 0 and (requests.arrival_s[1:] >= requests.arrival_s[:-1]).all()


def test_the_lmsys_workload_is_the_public_trace(shared_data: Path) -> None:
    from plora.sim.workload import load_workload

    trace = read_trace(shared_data / "traces" / "lmsys_vtc" / "lmsys_arena_27adapter_trace.csv")
    workload = load_workload("lmsys")
    counts = sorted((int((trace.adapter == a).sum()) for a in range(trace.adapters)), reverse=True)
    assert tuple(counts) == workload.popularity.shares
    assert trace.input_tokens.mean() == pytest.approx(workload.input_tokens, rel=0.01)
    assert trace.output_tokens.mean() == pytest.approx(workload.output_tokens, rel=0.01)
