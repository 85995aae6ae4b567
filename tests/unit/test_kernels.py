"""The fused optimizer steps and reductions: exact arithmetic, segments, NaN checks, dtypes, order of summation."""

from collections.abc import Sequence
from itertools import pairwise
from mmap import mmap
from tracemalloc import get_traced_memory, start, stop
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from paramserver import kernels
from paramserver.core.optimizer import SegmentStep, initial_slots, slot_count, slot_names
from paramserver.core.optimizer_spec import OptimizerSpec
from paramserver.kernels import compiled
from paramserver.types import F32, AnyArray

SIZE = 5000  # more than two blocks, and not a multiple of one
F = np.float32
ALL = (
    OptimizerSpec("sgd"),
    OptimizerSpec("momentum", momentum=0.9),
    OptimizerSpec("nesterov", momentum=0.9),
    OptimizerSpec("adagrad", eps=1e-10),
    OptimizerSpec("rmsprop"),
    OptimizerSpec("rmsprop", momentum=0.9),
    OptimizerSpec("rmsprop", centered=True),
    OptimizerSpec("rmsprop", centered=True, momentum=0.9),
    OptimizerSpec("adam"),
    OptimizerSpec("adamw"),
    OptimizerSpec("ftrl", l1=0.01, l2=0.1),
    OptimizerSpec("sum"),
)
every_optimizer = pytest.mark.parametrize(
    "o", ALL, ids=lambda o: o.name + " centered" * o.centered + " momentum" * (o.name == "rmsprop" and o.momentum > 0)
)


def vector(seed: int, size: int = SIZE) -> F32:
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(size).astype(F)


def state(o: OptimizerSpec, size: int = SIZE) -> list[F32]:
    """Return the optimizer's slots, filled with nonnegative numbers."""
    return [np.abs(vector(10 + i, size)) + F(2 - i) for i in range(slot_count(o))]


def run(
    o: OptimizerSpec, steps: Sequence[SegmentStep], w: F32, slots: Sequence[F32], grad: AnyArray, dtype: str = "float32"
) -> tuple[bool, list[F32]]:
    """Return whether the step was finite, and [values, *slots] after it; the output buffers start with garbage."""
    out = [np.full(w.size, 7e7, F) for _ in range(1 + len(slots))]
    ok = kernels.apply(o, steps, w, slots, grad, dtype, out[0], out[1:])
    return ok, out


def same(a: Sequence[AnyArray], b: Sequence[AnyArray]) -> None:
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


def bf16(a: F32) -> AnyArray:
    """Return the upper halves, which are bfloat16 bits, as uint16."""
    return (a.view(np.uint32) >> 16).astype(np.uint16)


def test_sgd_is_exactly_two_roundings() -> None:
    """SGD gives the bytes of w - lr * g in float32, the same on every machine."""
    w, g = vector(0), vector(1)

    _, (plain,) = run(OptimizerSpec("sgd"), [SegmentStep(0, SIZE, 0.1)], w, (), g)
    _, (full,) = run(OptimizerSpec("sgd"), [SegmentStep(0, SIZE, 0.1, 0.01, 1, 0.5, 3.0)], w, (), g)

    np.testing.assert_array_equal(plain, w - F(0.1) * g)
    used = np.clip(F(3.0) * g, F(-0.5), F(0.5)) + F(0.01) * w
    np.testing.assert_array_equal(full, w - F(0.1) * used)


def test_adam_is_exactly_its_formula_in_float32() -> None:
    """Adam gives the bytes of its formula with each operation rounded once, and none fused."""
    o, w, g = OptimizerSpec("adam"), vector(0), vector(1)
    m, v = vector(2), np.abs(vector(3))

    _, (out, m_out, v_out) = run(o, [SegmentStep(0, SIZE, 0.01, step=7)], w, (m, v), g)

    first = F(0.9) * m + F(1 - 0.9) * g
    second = F(0.999) * v + F(1 - 0.999) * (g * g)
    size, grow = F(0.01 / (1 - 0.9**7)), F(1 / (1 - 0.999**7) ** 0.5)
    same([out, m_out, v_out], [w - size * (first / (np.sqrt(second) * grow + F(1e-8))), first, second])


@pytest.mark.parametrize("nontemporal", [False, True])
@pytest.mark.parametrize("o", [o for o in ALL if o.name in ("momentum", "nesterov", "rmsprop", "adam", "adamw")])
def test_state_that_decays_ends_at_zero(o: OptimizerSpec, nontemporal: bool) -> None:
    """State below float32's normal numbers becomes 0: on what stays denormal each step would take ten times as long."""
    w, zero, slots = vector(0), np.zeros(SIZE, F), [np.full(SIZE, np.finfo(F).tiny)] * slot_count(o)
    out = [np.frombuffer(mmap(-1, 4 * SIZE), F) for _ in range(1 + len(slots))]

    kernels.apply(o, [SegmentStep(0, SIZE, 0.1)], w, slots, zero, "float32", out[0], out[1:], nontemporal=nontemporal)

    same(out, [w, *np.zeros_like(slots)])


@pytest.mark.parametrize(
    "o",
    [
        OptimizerSpec("adam", eps=0.0),
        OptimizerSpec("rmsprop", eps=0.0),
        OptimizerSpec("rmsprop", eps=0.0, centered=True),
    ],
)
def test_without_eps_no_second_moment_ends_at_zero(o: OptimizerSpec) -> None:
    """Where only the root of a second moment is divided by, one that has been above 0 stays so: 0/0 is no step."""
    w, zero = vector(0), np.zeros(SIZE, F)
    slots = [np.full(SIZE, np.finfo(F).tiny) for _ in range(slot_count(o))]
    slots[1 if o.name == "adam" else 0][:] = np.finfo(F).tiny

    for step in range(1, 4):
        ok, (w, *slots) = run(o, [SegmentStep(0, SIZE, 0.1, step=step)], w, slots, zero)
        assert ok
        assert np.isfinite(w).all()


@every_optimizer
def test_a_step_leaves_its_inputs_alone(o: OptimizerSpec) -> None:
    """A step does not change its inputs, so the old version stays valid while the new one is computed."""
    w, g, slots = vector(0), vector(1), state(o)
    kept = [a.copy() for a in (w, g, *slots)]

    ok, out = run(o, [SegmentStep(0, SIZE, 0.1, 0.01)], w, slots, g)

    assert ok
    same([w, g, *slots], kept)
    assert all((new != old).any() for new, old in zip(out, [w, *slots], strict=True))


@every_optimizer
def test_each_segment_steps_by_its_own_numbers(o: OptimizerSpec) -> None:
    """A segment's rate, decay, step count, clip and scale act on its elements as if it were the whole partition."""
    w, g, slots = vector(0), vector(1), state(o)
    cuts = [0, 17, 18, 2050, 2100, SIZE]
    steps = [
        SegmentStep(a, b, 0.01 * (i + 1), 0.1 * i, i + 1, None if i % 2 else 0.3, 1.0 + i)
        for i, (a, b) in enumerate(pairwise(cuts))
    ]

    ok, out = run(o, steps, w, slots, g)

    assert ok
    for s in steps:
        part = slice(s.start, s.stop)
        alone = replace(s, start=0, stop=s.stop - s.start)
        _, expected = run(o, [alone], w[part].copy(), [a[part].copy() for a in slots], g[part].copy())
        same([a[part] for a in out], expected)


@every_optimizer
def test_neighboring_segments_with_the_same_numbers_step_as_one(o: OptimizerSpec) -> None:
    """Adjacent segments with the same numbers give the same result as one, wherever parameters begin."""
    w, g, slots = vector(0), vector(1), state(o)
    cuts = [0, 1, 2, 900, 4000, SIZE]
    many = [SegmentStep(a, b, 0.1, 0.01, 3) for a, b in pairwise(cuts)]

    _, whole = run(o, [SegmentStep(0, SIZE, 0.1, 0.01, 3)], w, slots, g)
    _, parts = run(o, many, w, slots, g)

    same(parts, whole)


@every_optimizer
def test_untouched_and_frozen_elements_are_copied(o: OptimizerSpec) -> None:
    """Elements of inactive segments or of none keep values and slots, and their gradient is not even read."""
    w, g, slots = vector(0), vector(1), state(o)
    steps = [SegmentStep(100, 2500, 0.1), SegmentStep(2500, 2600, 0.1, active=False), SegmentStep(4000, 4000, 0.1)]
    touched = np.zeros(SIZE, bool)
    touched[100:2500] = True
    poisoned = np.where(touched, g, F(np.nan))

    ok, out = run(o, steps, w, slots, poisoned)

    assert ok
    same([a[~touched] for a in out], [a[~touched] for a in (w, *slots)])
    _, whole = run(o, [SegmentStep(0, SIZE, 0.1)], w, slots, g)
    same([a[touched] for a in out], [a[touched] for a in whole])


def test_a_step_of_nothing_copies_everything() -> None:
    """A step without segments, or of FTRL at a rate of zero, leaves values and slots as they are."""
    w, g = vector(0), vector(1)
    for o, steps in ((OptimizerSpec("adam"), []), (OptimizerSpec("ftrl"), [SegmentStep(0, SIZE, 0.0)])):
        slots = state(o)
        ok, out = run(o, steps, w, slots, g)
        assert ok
        same(out, [w, *slots])


@every_optimizer
def test_the_new_values_may_take_the_gradient_s_own_buffer(o: OptimizerSpec) -> None:
    """New values may overwrite a float32 gradient in place, so its receive buffer can become the next version."""
    w, g, slots = vector(0), vector(1), state(o)
    steps = [SegmentStep(0, SIZE, 0.1)]
    _, expected = run(o, steps, w, slots, g)

    assert kernels.apply(o, steps, w, slots, g, "float32", g, slots)

    same([g, *slots], expected)


@every_optimizer
@pytest.mark.parametrize("first", [0, 5], ids=["at the start", "in between"])
def test_written_past_the_caches_the_bytes_are_the_same(o: OptimizerSpec, first: int) -> None:
    """Nontemporal stores write the same bytes, and none outside the outputs, whatever the alignment.

    Segments may begin anywhere, and the arrays need not begin at a cache line.
    """
    size = 5000
    w, g, slots = vector(0, size), vector(1, size), state(o, size)
    steps = [SegmentStep(0, first, 0.1, active=False), SegmentStep(first, 4099, 0.1), SegmentStep(4099, size, 0.2)]
    _, expected = run(o, steps, w, slots, g)

    for aside in (0, 3):
        room = [np.full(size + 64, 7e7, F) for _ in expected]
        at = [-(a.ctypes.data // 4) % 16 + aside for a in room]
        out = [a[i : i + size] for a, i in zip(room, at, strict=True)]
        assert kernels.apply(o, steps, w, slots, g, "float32", out[0], out[1:], nontemporal=True)

        same(out, expected)
        assert all((a[:i] == 7e7).all() and (a[i + size :] == 7e7).all() for a, i in zip(room, at, strict=True))


def test_steps_of_many_segments_are_not_kept() -> None:
    """Pushes of thousands of rows, each with rows of its own, leave nothing of their steps in memory."""
    w, out, o = vector(0), np.empty(SIZE, F), OptimizerSpec("sgd")
    start()
    before = get_traced_memory()[0]
    for push in range(100):
        steps = [SegmentStep(i, i + 1, 0.1, active=i % 2 == 0, scale=1.0 + push) for i in range(1000)]
        kernels.apply(o, steps, w, (), w, "float32", out, ())
        del steps
    kept = get_traced_memory()[0] - before
    stop()

    assert kept < 1 << 20


def test_what_is_beyond_the_caches_counts_the_state() -> None:
    """`exceeds_cache` counts the slots: it is true of Adam at a size at which it is not of plain SGD."""
    sgd, adam = OptimizerSpec("sgd"), OptimizerSpec("adam")

    assert kernels.exceeds_cache(adam, 2_500_000)
    assert not kernels.exceeds_cache(sgd, 2_500_000)
    assert kernels.exceeds_cache(sgd, 25_000_000)


DTYPES = ("float32", "float64", "float16", "bfloat16")


def encoded(values: F32, dtype: str) -> AnyArray:
    return bf16(values) if dtype == "bfloat16" else values.astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@every_optimizer
def test_gradients_of_every_element_type_count_as_their_float32_values(o: OptimizerSpec, dtype: str) -> None:
    """A gradient of any dtype gives the same bytes as its values in float32.

    That includes steps without clip, decay or scale, in which float32 is read in place.
    """
    w, slots = vector(0), state(o)
    g = (bf16(vector(1)).astype(np.uint32) << 16).view(F).astype(np.float16).astype(F)  # exact in all four
    for step in (SegmentStep(3, 4001, 0.1, 0.01, 2, 2.0, 0.5), SegmentStep(3, 4001, 0.1)):
        _, expected = run(o, [step], w, slots, g)

        ok, out = run(o, [step], w, slots, encoded(g, dtype), dtype)

        assert ok
        same(out, expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@every_optimizer
def test_a_gradient_with_nan_or_infinity_is_refused(o: OptimizerSpec, dtype: str, bad: float) -> None:
    """A step is refused for one NaN or infinity anywhere, even if a clip or a rate of zero would hide it."""
    w, slots, good = vector(0), state(o), encoded(vector(1), dtype)
    zero = 0.1 if o.name == "ftrl" else 0.0  # FTRL makes no step at a rate of zero
    for at, clip, lr in ((0, None, 0.1), (2047, 1.0, 0.1), (SIZE - 1, None, 0.1), (2048, None, zero)):
        grad = good.copy()
        grad[at : at + 1] = encoded(np.array([bad], F), dtype)
        assert not run(o, [SegmentStep(0, SIZE, lr, clip_value=clip)], w, slots, grad, dtype)[0]
    assert run(o, [SegmentStep(0, SIZE, 0.1)], w, slots, good, dtype)[0]


def test_a_finite_gradient_whose_result_is_not_finite_is_refused() -> None:
    """A step is refused if a value or a slot overflows, or a float64 gradient exceeds float32."""
    w, big = vector(0, 8), np.full(8, 3e38, F)
    huge = np.full(8, 1e300)

    assert not run(OptimizerSpec("sgd"), [SegmentStep(0, 8, 10.0)], w, (), big)[0]
    assert not run(OptimizerSpec("sum"), [SegmentStep(0, 8, 0.0)], big, (), big)[0]
    assert not run(OptimizerSpec("adam"), [SegmentStep(0, 8, 1e-3)], w, (w, np.abs(w)), big)[0]
    assert not run(OptimizerSpec("sgd"), [SegmentStep(0, 8, 1e-3)], w, (), huge, "float64")[0]
    assert kernels.all_finite(big)


def test_what_counts_of_float64_is_what_it_is_in_float32() -> None:
    """A float64 element counts as finite exactly if it rounds to a finite float32."""
    beyond = np.float64(2.0**128 - 2.0**103)
    below = np.nextafter(beyond, 0.0)
    with np.errstate(over="ignore"):
        assert np.isinf(np.float32(beyond))
        assert np.isfinite(np.float32(below))
    numbers = np.linspace(-1.0, 1.0, 1001)

    for at in (0, 500, 1000):
        for number, fits in ((below, True), (-below, True), (beyond, False), (-beyond, False), (1e300, False)):
            numbers[at] = number
            assert kernels.all_finite(numbers, "float64") is fits
        numbers[at] = 0.0
    for bad in (np.inf, -np.inf, np.nan):
        assert not kernels.all_finite(np.array([bad]), "float64")


def test_centered_rmsprop_stays_finite_when_rounding_makes_its_variance_negative() -> None:
    """Centered RMSprop stays finite under a constant gradient, whose variance of about zero may round below zero."""
    o = OptimizerSpec("rmsprop", centered=True, alpha=0.9)
    g = np.abs(vector(0)) + F(0.1)
    w, slots = np.zeros(SIZE, F), list(initial_slots(o, np.zeros(SIZE, F)))
    below = False
    for t in range(300):
        ok, (w, *slots) = run(o, [SegmentStep(0, SIZE, 1e-6, step=t + 1)], w, slots, g)
        assert ok
        below = below or bool((slots[0] - slots[1] * slots[1] < 0).any())
    assert below


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_half_precision_number_converts_exactly(dtype: str) -> None:
    """All 65,536 bit patterns, including subnormals, infinities and NaNs, convert to the float32 of the same value."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    if dtype == "float16":
        expected = bits.view(np.float16).astype(F)
    else:
        expected = (bits.astype(np.uint32) << 16).view(F)
    out = np.empty(1 << 16, F)

    kernels.mean([(bits, dtype, 1.0, None)], 1.0, out)

    np.testing.assert_array_equal(out, expected)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.signbit(out[finite]), np.signbit(expected[finite]))
    assert kernels.all_finite(bits[finite], dtype)
    assert not kernels.all_finite(bits, dtype)


def test_gradients_may_be_read_only_and_unaligned() -> None:
    """A gradient may be read-only and unaligned, as a slice of a received body is."""
    w, g = vector(0), vector(1)
    body = b"x" + g.tobytes()
    received = np.frombuffer(body, F, offset=1)
    assert not received.flags.aligned
    assert not received.flags.writeable

    _, out = run(OptimizerSpec("adam"), [SegmentStep(0, SIZE, 0.1)], w, state(OptimizerSpec("adam")), received)

    same(out, run(OptimizerSpec("adam"), [SegmentStep(0, SIZE, 0.1)], w, state(OptimizerSpec("adam")), g)[1])
    assert kernels.norm2(received) == kernels.norm2(g)


@pytest.mark.parametrize(
    "change",
    [
        {"grad": vector(1, 9)},
        {"grad": vector(1, 8), "dtype": "float64"},
        {"grad": vector(1, 8), "dtype": "int8"},
        {"grad": vector(1, 16)[::2]},
        {"slots": []},
        {"slots": [vector(1, 7)]},
        {"w_out": vector(1, 9)},
        {"steps": [SegmentStep(0, 9, 0.1)]},
        {"steps": [SegmentStep(4, 8, 0.1), SegmentStep(0, 4, 0.1)]},
        {"steps": [SegmentStep(0, 5, 0.1), SegmentStep(4, 8, 0.1)]},
        {"steps": [SegmentStep(-1, 5, 0.1)]},
    ],
)
def test_arguments_that_do_not_fit_raise_before_anything_is_written(change: dict[str, Any]) -> None:
    """A wrong length, dtype, stride or order of segments raises ValueError, and nothing is written."""
    call: dict[str, Any] = {
        "steps": [SegmentStep(0, 8, 0.1)], "w": vector(0, 8), "slots": [vector(2, 8)], "grad": vector(1, 8),
        "dtype": "float32", "w_out": np.zeros(8, F), "slots_out": [np.zeros(8, F)],
    }  # fmt: skip
    kernels.apply(OptimizerSpec("momentum"), **{**call, "w_out": np.zeros(8, F), "slots_out": [np.zeros(8, F)]})

    with pytest.raises(ValueError, match=r"need|hold|slots|lengths|segment"):
        kernels.apply(OptimizerSpec("momentum"), **(call | change))

    assert not call["w_out"].any()
    assert not call["slots_out"][0].any()


@every_optimizer
@pytest.mark.parametrize("nontemporal", [False, True], ids=["", "nontemporal"])
def test_a_step_by_a_mean_is_the_mean_and_then_the_step(o: OptimizerSpec, nontemporal: bool) -> None:
    """`apply_mean` gives the bytes of `mean` and then `apply`, in any order of gradients and for an unaligned one."""
    w, slots = vector(0), state(o)
    raw = np.zeros(4 * SIZE + 1, np.uint8)[1:]
    raw[:] = vector(3).view(np.uint8)
    parts = [(vector(1), 0.3), (vector(2), 1.0), (raw.view(F), 2.5)]
    steps = [SegmentStep(0, 2001, 0.1, 0.01, 3, 0.5), SegmentStep(2500, SIZE, 0.05)]
    for held in (parts, parts[::-1], parts[:1]):
        gradient = np.empty(SIZE, F)
        kernels.mean([(g, "float32", weight, None) for g, weight in held], 1.7, gradient)
        _, expected = run(o, steps, w, slots, gradient)
        out = [np.frombuffer(mmap(-1, 4 * SIZE), F) for _ in expected]

        assert kernels.apply_mean(o, steps, w, slots, held, 1.7, out[0], out[1:], nontemporal=nontemporal)

        same(out, expected)


def test_a_mean_that_is_not_finite_is_seen_by_the_step() -> None:
    """`apply_mean` refuses a mean that overflows, though each of its gradients is finite."""
    w, parts = vector(0, 8), [(np.full(8, 3e38, F), 1.0)] * 2
    sgd, steps = OptimizerSpec("sgd"), [SegmentStep(0, 8, 0.0)]

    assert not kernels.apply_mean(sgd, steps, w, (), parts, 1.0, np.empty(8, F), ())


@pytest.mark.parametrize(
    ("parts", "divisor"), [([], 1.0), ([(vector(0, 8), 1.0)], 0.0), ([(vector(0, 8), 1.0), (vector(0, 9), 1.0)], 1.0)]
)
def test_a_step_by_a_mean_needs_parts_of_its_length(parts: list[tuple[F32, float]], divisor: float) -> None:
    """`apply_mean` raises ValueError, and writes nothing, without parts, with divisor 0, or with unequal lengths."""
    out = np.zeros(8, F)

    with pytest.raises(ValueError, match=r"mean needs|lengths"):
        kernels.apply_mean(OptimizerSpec("sgd"), [SegmentStep(0, 8, 0.1)], vector(0, 8), (), parts, divisor, out, ())

    assert not out.any()


BIG = (1 << 16) + 777  # `mean` works in blocks of 65,536


def test_a_mean_is_the_float32_sum_in_the_order_given() -> None:
    """A mean has the bytes of a float32 sum from left to right, and another order gives other bytes."""
    parts = [(vector(i, BIG) * F(10.0**i), "float32", 1.0 + 0.25 * i, None) for i in range(5)]
    out, other = np.empty(BIG, F), np.empty(BIG, F)

    kernels.mean(parts, 7.5, out)
    kernels.mean(parts[::-1], 7.5, other)

    expected = F(parts[0][2]) * parts[0][0]
    for a, _, weight, _ in parts[1:]:
        expected = expected + F(weight) * a
    np.testing.assert_array_equal(out, expected / F(7.5))
    assert (out != other).any()


def test_a_mean_takes_parts_of_different_element_types() -> None:
    """Each part of a mean is read as its own dtype and added in float32."""
    a = vector(1)
    parts = [(encoded(a, d), d, 1.0, None) for d in DTYPES]
    out = np.empty(SIZE, F)

    kernels.mean(parts, 4.0, out)

    half = (bf16(a).astype(np.uint32) << 16).view(F)
    np.testing.assert_array_equal(out, (((a + a) + a.astype(np.float16).astype(F)) + half) / F(4.0))


def test_a_mean_of_one_part_is_the_part() -> None:
    """Synchronous training with one contributor applies its gradient bit for bit, negative zeros included."""
    a = np.array([-0.0, 1.5, -2.0], F)
    out = np.empty(3, F)

    kernels.mean([(a, "float32", 1.0, None)], 1.0, out)

    assert out.tobytes() == a.tobytes()


@pytest.mark.parametrize(("parts", "divisor"), [([], 1.0), ([(vector(0, 3), "float32", 1.0, None)], 0.0)])
def test_a_mean_of_nothing_raises(parts: list[Any], divisor: float) -> None:
    """A mean without parts, or with a divisor of 0, raises ValueError."""
    with pytest.raises(ValueError, match="mean"):
        kernels.mean(parts, divisor, np.empty(3, F))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_is_summed_in_float64(dtype: str) -> None:
    """The 2-norm agrees with NumPy's in float64 for every dtype, also of few elements or none."""
    g = encoded(vector(1, BIG) * F(1e3), dtype)
    exact = (g.astype(np.uint32) << 16).view(F) if dtype == "bfloat16" else g

    assert kernels.norm2(g, dtype) == pytest.approx(np.linalg.norm(exact.astype(np.float64)), rel=1e-13)
    assert kernels.norm2(g[:5], dtype) == pytest.approx(np.linalg.norm(exact[:5].astype(np.float64)), rel=1e-13)
    assert kernels.norm2(g[:0], dtype) == 0.0


def test_the_norm_of_elements_whose_squares_leave_float32_is_finite() -> None:
    """The norm of float32 elements whose squares overflow float32 is finite, as float64 holds these squares."""
    assert kernels.norm2(np.array([3e38, 0.0], F)) == pytest.approx(float(F(3e38)))


def test_nothing_is_compiled_after_warm_up() -> None:
    """After warm-up every function keeps its one compiled signature, whatever arrays it is given."""
    kernels.warm_up()
    frozen = vector(0, 64)
    frozen.flags.writeable = False
    for dtype in DTYPES:
        for o in ALL:
            run(o, [SegmentStep(0, 64, 0.1)], frozen, state(o, 64), encoded(vector(1, 64), dtype), dtype)
        kernels.norm2(encoded(frozen, dtype), dtype)
        kernels.all_finite(encoded(frozen, dtype), dtype)
    for function, _ in compiled.SIGNATURES:
        assert len(function.signatures) == 1


def test_slots_have_names_and_first_values() -> None:
    """Each slot has a name, and starts at zero for zero values, except for Adagrad's initial accumulator value."""
    for o in ALL:
        assert len(slot_names(o)) == slot_count(o)
        assert all(not s.any() for s in initial_slots(o, np.zeros(4, F)))
    assert slot_names(ALL[7]) == ("square_avg", "grad_avg", "momentum_buffer")
    (accumulator,) = initial_slots(OptimizerSpec("adagrad", initial_accumulator_value=0.5), np.ones(3, F))
    np.testing.assert_array_equal(accumulator, np.full(3, 0.5, F))
