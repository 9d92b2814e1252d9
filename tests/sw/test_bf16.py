"""BF16 matrices and adapters through driver, rings and the functional device."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora.hw.defs.config import AccumulatorConfig, NdpConfig, preset
from plora.hw.defs.descriptor import DType
from plora.hw.defs.errors import UserError
from plora.hw.defs.queue import MAX_OPERAND_EXPONENT
from plora.sim.functional import FunctionalDevice
from plora.sim.golden.bf16 import from_float, golden_gemm_bf16, to_float
from plora.sw.adapters import LoraModule, read_adapter, to_device
from plora.sw.cli import main
from plora.sw.lora import DeviceAdapter, Strategy, run_and_compare
from plora.sw.matrix import PlacedMatrix, chain_exponents, multiply, multiply_twice, product_exponents, store_matrix
from plora.sw.scaling import device_exponent, kept_exponent, largest_row_sum, operand_exponent
from plora.sw.session import Session, open_session

TINY = preset("tiny")
Bits = npt.NDArray[np.uint16]


def session(config: NdpConfig = TINY) -> Session:
    device = FunctionalDevice(config, fill=0xA5)
    return open_session(device, memory_bytes=device.memory.size_bytes, depth=6)


def store(s: Session, matrix: Bits, name: str = "w") -> PlacedMatrix:
    return store_matrix(s.driver, s.allocator, matrix, name, DType.BF16)


def values(seed: int, rows: int, columns: int, size_log2: int = 0, spread: int = 4) -> Bits:
    rng = np.random.default_rng(seed)
    return from_float(rng.standard_normal((rows, columns)) * 2.0 ** (size_log2 + rng.integers(-spread, 1)))


@settings(max_examples=25)
@given(
    st.integers(1, 70),
    st.one_of(st.integers(1, 80), st.integers(250, 1400)),
    st.integers(1, 9),
    st.integers(-45, 110),
    st.integers(-45, 15),
    st.integers(0, 1000),
)
def test_y_is_x_w_transposed_at_any_size_of_the_values(
    n: int, k: int, b: int, x_log2: int, w_log2: int, seed: int
) -> None:
    s, x, w = session(), values(seed, b, k, x_log2), values(seed + 1, n, k, w_log2)
    placed = store(s, w)
    product = multiply(s.queue, placed, x)
    exponents = product_exponents(x, placed)
    golden = golden_gemm_bf16(x, w, exponents.operand, exponents.device, TINY.accumulator)
    np.testing.assert_array_equal(product.y, golden.values)
    assert product.numeric == 0
    exact = to_float(x).astype(np.float64) @ to_float(w).astype(np.float64).T
    size = np.abs(to_float(x)).astype(np.float64) @ np.abs(to_float(w)).astype(np.float64).T
    error = np.abs(to_float(product.y) - exact)
    if min(exponents.operand, exponents.device) < MAX_OPERAND_EXPONENT - 40:
        assert np.all(error <= np.abs(exact) * 2.0**-8 + size * 2.0**-20)


@settings(max_examples=25)
@given(st.integers(1, 40), st.integers(1, 60), st.integers(1, 300), st.integers(1, 5), st.integers(0, 1000))
def test_the_intermediate_of_a_chain_is_bf16(r: int, n: int, k: int, b: int, seed: int) -> None:
    s = session()
    x, a, w = values(seed, b, k, 9), values(seed + 1, r, k, -5), values(seed + 2, n, r, -3)
    placed = store(s, a), store(s, w)
    product = multiply_twice(s.queue, *placed, x)
    first, second = chain_exponents(x, *placed)
    m = golden_gemm_bf16(x, a, first.operand, first.device, TINY.accumulator).values
    golden = golden_gemm_bf16(m, w, second.operand, second.device, TINY.accumulator)
    np.testing.assert_array_equal(product.y, golden.values)
    assert product.numeric == 0


def test_two_products_have_the_bits_of_a_chain() -> None:
    # So wide that x is cut, and m cannot stay on the device.
    s, x, a, b = session(), values(1, 3, 1100), values(2, 40, 1100), values(3, 5, 40)
    placed = store(s, a), store(s, b)
    product = multiply_twice(s.queue, *placed, x)
    first, second = chain_exponents(x, *placed)
    m = golden_gemm_bf16(x, a, first.operand, first.device, TINY.accumulator).values
    golden = golden_gemm_bf16(m, b, second.operand, second.device, TINY.accumulator).values
    np.testing.assert_array_equal(product.y, golden)


@pytest.mark.parametrize("k", [1, 7, 8192, 8193, 65536])
@pytest.mark.parametrize("sign", [1, -1])
def test_no_choice_of_exponents_can_overflow(k: int, sign: int) -> None:
    # The largest significands everywhere, all of one sign.
    for largest in (255.0, 1.9921875 * 2.0**-80, 1.9921875 * 2.0**60):
        x, w = from_float(np.full((1, k), largest)), from_float(np.full((1, k), sign * 2.0**-10 * 1.9921875))
        got = golden_gemm_bf16(x, w, operand_exponent(x), device_exponent(w), AccumulatorConfig())
        assert not got.overflow.any()


def test_a_bound_of_the_intermediate_fits() -> None:
    x, a = from_float(np.full((1, 256), 3.0)), from_float(np.full((1, 256), 7.0))
    kept = kept_exponent(x, largest_row_sum(a))
    assert 256 <= 3 * 7 * 256 * 2.0**kept < 512
    assert kept_exponent(from_float(np.zeros((1, 2))), 3.0) == 0


@pytest.mark.parametrize("bad", [np.zeros((2, 2), np.float16), np.zeros((2, 2), np.float32), np.zeros(3, np.uint16)])
def test_what_is_no_bf16_matrix_is_refused(bad: npt.NDArray[np.generic]) -> None:
    s = session()
    with pytest.raises(UserError, match=r"give a matrix of BF16 values \(uint16\)"):
        store_matrix(s.driver, s.allocator, bad, "w", DType.BF16)
    with pytest.raises(UserError, match="give BF16 rows of 2 values"):
        multiply(s.queue, store(s, values(1, 3, 2)), bad)


def test_types_are_not_mixed() -> None:
    s = session()
    b = store_matrix(s.driver, s.allocator, np.zeros((3, 2), np.float16), "b")
    with pytest.raises(UserError, match="A is BF16 and B FP16"):
        multiply_twice(s.queue, store(s, values(1, 2, 4)), b, values(2, 1, 4))


def module(a: npt.ArrayLike, b: npt.ArrayLike, scaling: float = 2.0) -> LoraModule:
    return LoraModule("m", None, np.array(a, np.float32), np.array(b, np.float32), 16.0, scaling, "F32")


def test_b_is_scaled_in_float32_and_rounded_once_to_bf16() -> None:
    b = np.random.default_rng(1).standard_normal((40, 7)).astype(np.float32)
    form = to_device(module(np.ones((7, 3)), b, 1 / 3), DType.BF16)
    np.testing.assert_array_equal(form.b, from_float(b * np.float32(1 / 3)))
    assert form.a_rounding == 0.0
    assert 2.0**-9 < form.b_rounding <= 2.0**-8
    # What FP16 cannot hold, BF16 can.
    assert to_float(to_device(module([[1e30]], [[1.0]]), DType.BF16).a)[0, 0] == pytest.approx(1e30, rel=2**-8)
    with pytest.raises(UserError, match=r"lora_B times its scaling 1e.10 has 1 values beyond BF16's 3.38953e.38"):
        to_device(module([[1.0]], [[3e38]], 1e10), DType.BF16)


@pytest.mark.parametrize("strategy", Strategy)
def test_a_bf16_adapter_runs_in_its_own_type(fixtures_dir: Path, strategy: Strategy) -> None:
    adapter, s = read_adapter(fixtures_dir / "peft" / "lora_all_bf16_r16"), session()
    loaded = DeviceAdapter(s, adapter.modules[:4], strategy, dtype=None)
    for each in loaded.modules:
        assert each.device.dtype is DType.BF16
        assert each.device.a_rounding == 0.0
        x = values(5, 3, each.device.module.in_features)
        report = run_and_compare(loaded, each, x, s)
        assert report.match
        assert report.max_relative_error < 2.0**-7


@pytest.mark.parametrize(("name", "types"), [("lora_all_bf16_r16", {"BF16"}), ("lora_qv_r8", {"FP16"})])
def test_the_command_takes_each_module_in_its_type(
    capsys: pytest.CaptureFixture[str], fixtures_dir: Path, name: str, types: set[str]
) -> None:
    arguments = ["lora", "--adapter", str(fixtures_dir / "peft" / name), "--preset", "tiny", "--json"]
    assert main([*arguments, "--dtype", "auto"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["match"] is True
    assert {each["computed_in"] for each in data["modules"]} == types
    assert main([*arguments, "--dtype", "bf16", "--layers", "0"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {each["computed_in"] for each in data["modules"]} == {"BF16"}
