"""Encoding float32 gradients: the compiled loops and NumPy's block-wise passes write the same bytes."""

import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from paramserver.client.gradients import Scan, prepare
from paramserver.codecs import elements
from paramserver.core.layout import Layout
from paramserver.core.spec import ModelSpec
from paramserver.kernels.elements import encoder
from paramserver.types import F32, ITEMSIZE, AnyArray
from paramserver.wire.tensor import bf16_to_f32, f32_to_bf16

BITS = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}
ALL_16 = np.arange(1 << 16, dtype=np.uint32)
Compile = Callable[[int], None]


@pytest.fixture
def compiled_from(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compile]:
    """Return a function that sets the gradient size, in elements, from which on compiled encoders are used."""
    yield lambda count: monkeypatch.setattr(elements, "COMPILED_FROM", dict.fromkeys(BITS, count))
    elements._compiled.cache_clear()


def nearest(values: F32, dtype: str) -> AnyArray:
    """Return the bits that NumPy rounds to; bfloat16 is computed here: ties to even, one bit pattern for all NaNs."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return values.astype(dtype).view(BITS[dtype])
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def interesting() -> F32:
    """Return all float16 and bfloat16 values, the midpoints between them, close neighbors, and random bit patterns."""
    halves = ALL_16.astype(np.uint16).view(np.float16).astype(np.float32)
    finite = np.sort(halves[np.isfinite(halves)])
    middles = np.concatenate([(finite[1:] + finite[:-1]) / 2, np.array([65520, -65520], np.float32)])
    exact = np.concatenate([halves, middles])
    exact = exact[~np.isnan(exact)]
    beside = [np.nextafter(exact, np.float32(to)) for to in (np.inf, -np.inf)]
    lows = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    brains = ((ALL_16[:, None] << np.uint32(16)) | lows).ravel().view(np.float32)
    anything = np.random.default_rng(3).integers(0, 1 << 32, 1 << 20, np.uint32).view(np.float32)
    return np.concatenate([exact, *beside, brains, anything])


def same(found: AnyArray, values: F32, dtype: str) -> bool:
    """Return whether `found` holds the nearest bits; a float16 NaN may have any payload."""
    expected = nearest(values, dtype)
    if dtype == "float16":
        nan = np.isnan(values)
        return np.array_equal(found[~nan], expected[~nan]) and bool(np.isnan(found[nan].view(np.float16)).all())
    return np.array_equal(found, expected)


@pytest.mark.parametrize("dtype", BITS)
def test_every_kind_of_number_becomes_the_bits_that_numpy_makes_of_it(dtype: str) -> None:
    """Every kind of float32 is encoded as NumPy rounds it, from read-only memory and to an unaligned address.

    Kinds are subnormals, ties, the largest numbers, infinities and NaNs.
    """
    values = interesting()
    values.flags.writeable = False
    out = np.zeros(values.size * ITEMSIZE[dtype] + 1, np.uint8)[1:].view(BITS[dtype])

    squares = encoder(dtype)(values, out)

    assert same(out, values, dtype)
    assert squares == np.inf
    if dtype == "bfloat16":
        assert np.array_equal(f32_to_bf16(values), nearest(values, dtype))


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("size", [0, 1, 7, 127, 128, 129, 2047, 2048, 2049, 5003])
def test_the_squares_are_all_there_and_exact(dtype: str, size: int) -> None:
    """The sum of squares covers every element at any size, and nothing beyond the end of the output is written.

    The elements are small integers, whose sum is exact in any order.
    """
    values = np.random.default_rng(size).integers(-100, 100, size).astype(np.float32)
    out = np.full(size + 3, 7, BITS[dtype])

    squares = encoder(dtype)(values, out[:size])

    assert squares == float((values.astype(np.float64) ** 2).sum())
    assert same(out[:size], values, dtype)
    assert (out[size:] == 7).all()


@pytest.mark.parametrize(
    ("dtype", "largest"), [("float32", 0x7F7FFFFF), ("float16", 0x477FEFFF), ("bfloat16", 0x7F7F7FFF)]
)
def test_what_rounds_to_infinity_is_seen(dtype: str, largest: int) -> None:
    """A single element that rounds to infinity makes the sum of squares infinite; the largest finite one does not."""
    values, out = np.zeros(5003, np.float32), np.empty(5003, BITS[dtype])
    bits = values.view(np.uint32)
    for at in (0, 2048, 5002):
        for sign in (0, 1 << 31):
            bits[at] = sign | largest
            assert encoder(dtype)(values, out) == float(values[at]) ** 2
            for more in (largest + 1, 0x7F800000, 0x7F800001, 0x7FC00000):
                bits[at] = sign | more
                assert encoder(dtype)(values, out) == np.inf
            bits[at] = 0


@pytest.mark.parametrize("dtype", [*BITS, "float64"])
@pytest.mark.parametrize("source", ["float32", "float64", "float16"])
def test_a_push_is_the_same_whoever_does_the_pass(dtype: str, source: str, compiled_from: Compile) -> None:
    """The compiled loop and NumPy write the same bytes and agree on the norm to 1e-14, for whole arrays and ranges."""
    document = {"name": "m", "params": {"w": {"shape": [3000]}, "b": {"shape": [77]}}, "partitions": 3}
    layout, rng = Layout(ModelSpec.parse(document)), np.random.default_rng(5)
    grads = {"w": rng.standard_normal(3000).astype(source), "b": rng.standard_normal(77).astype(source)}
    for ranges in (None, {"w": [(5, 9), (1000, 2500)]}):
        given = grads if ranges is None else {"w": np.concatenate([grads["w"][a:b] for a, b in ranges["w"]])}
        gradient = prepare(layout, given, ranges, dtype)
        found = []
        for count in (1, 1 << 40):
            compiled_from(count)
            body, scan = np.empty(gradient.body_bytes(gradient.selection.parts) + 1, np.uint8)[1:], Scan()
            gradient.write(gradient.selection.parts, body.data, scan)
            assert not scan.bad
            found.append((body.tobytes(), scan.norm))
        assert found[0][0] == found[1][0]
        assert found[0][1] == pytest.approx(found[1][1], rel=1e-14)


@pytest.mark.parametrize("dtype", BITS)
def test_a_push_that_is_not_finite_is_named_whoever_does_the_pass(dtype: str, compiled_from: Compile) -> None:
    """The compiled loop and NumPy both report each parameter with NaN or infinity once, and no other."""
    document = {"name": "m", "params": {"a": {"shape": [300]}, "b": {"shape": [300]}, "c": {"shape": [300]}}}
    layout = Layout(ModelSpec.parse({**document, "partitions": 4}))
    grads = {name: np.ones(300, np.float32) for name in "abc"}
    grads["a"][[0, 299]] = np.nan, np.inf
    grads["c"][150] = -np.inf
    gradient = prepare(layout, grads, dtype=dtype)
    for count in (1, 1 << 40):
        compiled_from(count)
        body, scan = np.empty(gradient.body_bytes(gradient.selection.parts), np.uint8), Scan()
        gradient.write(gradient.selection.parts, body.data, scan)
        assert list(scan.bad) == ["a", "c"]


def test_where_numba_is_not_installed_numpy_does_it(compiled_from: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without numba there is no compiled encoder, so NumPy is used."""
    compiled_from(1)
    elements._compiled.cache_clear()
    monkeypatch.delattr("paramserver.kernels.elements")
    monkeypatch.setitem(sys.modules, "paramserver.kernels.elements", None)

    assert elements.encoder("bfloat16", 1 << 20) is None


def test_small_pushes_do_not_load_numba() -> None:
    """Numba is not imported for small pushes, nor for large ones in float32 whose norm need not be exact."""
    program = """
import sys, numpy as np
from paramserver.client.gradients import Scan, prepare
from paramserver.core.layout import Layout
from paramserver.core.spec import ModelSpec
for size, dtype, exact in ((1 << 17, "bfloat16", True), (1 << 19, "float32", True), (1 << 20, "float32", False)):
    layout = Layout(ModelSpec.parse({"name": "m", "params": {"w": {"shape": [size]}}}))
    gradient = prepare(layout, {"w": np.ones(size, np.float32)}, dtype=dtype)
    body = np.empty(gradient.body_bytes(gradient.selection.parts), np.uint8)
    gradient.write(gradient.selection.parts, body.data, Scan(exact=exact))
sys.exit("numba" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=50)


def test_bfloat16_of_any_shape_and_layout() -> None:
    """bfloat16 conversion works element by element on scalars, empty, transposed and strided arrays."""
    values = np.random.default_rng(1).standard_normal((30, 700)).astype(np.float32)
    for a in (values, values.T, values[:, ::3], np.asarray(np.float32(1.5)), values[:0]):
        bits = f32_to_bf16(a)
        assert bits.shape == a.shape
        assert np.array_equal(bits, nearest(np.ascontiguousarray(a).reshape(-1), "bfloat16").reshape(a.shape))
        back = bf16_to_f32(bits)
        assert back.shape == a.shape
        assert back.dtype == np.float32
        assert np.array_equal(f32_to_bf16(back), bits)
