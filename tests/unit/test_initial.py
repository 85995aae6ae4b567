"""Initial values: pinned to golden numbers, independent of partitioning, and distributed as in torch."""

from itertools import pairwise
from math import sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.core.param_spec import InitSpec, ParamSpec
from paramserver.core.shard.initial import BLOCK, draw, fans

RANDOM = {
    "normal": InitSpec("normal", mean=0.5, std=2.0, seed=7),
    "uniform": InitSpec("uniform", low=-3.0, high=1.0, seed=7),
    "xavier_uniform": InitSpec("xavier_uniform", gain=2.0, seed=7),
    "xavier_normal": InitSpec("xavier_normal", gain=2.0, seed=7),
    "kaiming_uniform": InitSpec("kaiming_uniform", a=sqrt(5.0), seed=7),
    "kaiming_normal": InitSpec("kaiming_normal", mode="fan_out", nonlinearity="relu", seed=7),
}
SHAPE = (700, 200)  # more than two blocks


def param(init: InitSpec, name: str = "layers.0.weight", shape: tuple[int, ...] = SHAPE) -> ParamSpec:
    return ParamSpec(name, shape, init=init)


GOLDEN = {
    "normal": [
        "-0x1.84d7fc0000000p+1",
        "-0x1.d724a40000000p+0",
        "0x1.9e22800000000p-7",
        "-0x1.fd61ac0000000p-1",
        "-0x1.454af40000000p-1",
        "0x1.a9fccc0000000p-2",
    ],
    "uniform": [
        "-0x1.763e600000000p-3",
        "0x1.f6c9300000000p-2",
        "-0x1.328a6a0000000p+1",
        "-0x1.8a56980000000p-1",
        "-0x1.e25d3c0000000p+0",
        "-0x1.58d7ce0000000p+1",
    ],
    "xavier_uniform": [
        "0x1.1152c40000000p-4",
        "0x1.f2a5700000000p-4",
        "-0x1.d27d380000000p-4",
        "0x1.336ce00000000p-6",
        "-0x1.27b8900000000p-4",
        "-0x1.1b48520000000p-3",
    ],
    "xavier_normal": [
        "-0x1.558e5c0000000p-3",
        "-0x1.c3e6ee0000000p-4",
        "-0x1.7869d00000000p-6",
        "-0x1.20a4ba0000000p-4",
        "-0x1.b670400000000p-5",
        "-0x1.037fae0000000p-8",
    ],
    "kaiming_uniform": [
        "0x1.d968e80000000p-6",
        "0x1.afd71c0000000p-5",
        "-0x1.93fdd00000000p-5",
        "0x1.0a3cf00000000p-7",
        "-0x1.001a140000000p-5",
        "-0x1.eaa8e20000000p-5",
    ],
    "kaiming_normal": [
        "-0x1.8349c80000000p-4",
        "-0x1.0034520000000p-4",
        "-0x1.aad0080000000p-7",
        "-0x1.474a7a0000000p-5",
        "-0x1.f1247c0000000p-6",
        "-0x1.263e720000000p-9",
    ],
}


@pytest.mark.parametrize("kind", sorted(RANDOM))
def test_initial_values_are_pinned(kind: str) -> None:
    """The same spec gives the same model in every release: the first values of the first and third blocks."""
    p = param(RANDOM[kind])

    values = np.concatenate([draw(p, 0, 3), draw(p, 2 * BLOCK, 2 * BLOCK + 3)])

    assert [float(v).hex() for v in values] == GOLDEN[kind]


@given(cuts=st.lists(st.integers(0, 700 * 200), max_size=6), kind=st.sampled_from(sorted(RANDOM)))
@settings(max_examples=40, deadline=None)
def test_no_partitioning_changes_initial_values(cuts: list[int], kind: str) -> None:
    """Values drawn slice by slice have the bits of those drawn all at once, wherever the slices begin and end."""
    p = param(RANDOM[kind])
    bounds = [0, *sorted(cuts), p.size]

    parts = [draw(p, a, b) for a, b in pairwise(bounds)]

    np.testing.assert_array_equal(np.concatenate(parts), draw(p, 0, p.size))


def test_blocks_parameters_and_seeds_differ() -> None:
    """No two blocks, parameters or seeds share a random stream."""
    init = InitSpec("normal", seed=1)
    whole = draw(param(init), 0, 3 * BLOCK // 2)
    heads = [
        whole[:100],
        whole[BLOCK : BLOCK + 100],
        draw(param(init, "other"), 0, 100),
        draw(param(InitSpec("normal", seed=2)), 0, 100),
    ]

    assert len({h.tobytes() for h in heads}) == 4
    assert draw(param(InitSpec("normal", seed=1 << 53)), 0, 10).size == 10


@pytest.mark.parametrize(
    ("kind", "mean", "std", "low", "high"),
    [
        ("normal", 0.5, 2.0, None, None),
        ("uniform", -1.0, 4.0 / sqrt(12.0), -3.0, 1.0),
        ("xavier_uniform", 0.0, 2.0 * sqrt(2.0 / 900), -2.0 * sqrt(6.0 / 900), 2.0 * sqrt(6.0 / 900)),
        ("xavier_normal", 0.0, 2.0 * sqrt(2.0 / 900), None, None),
        # torch.nn.Linear's default: a = sqrt(5) gives the bound 1/sqrt(fan_in)
        ("kaiming_uniform", 0.0, 1.0 / sqrt(600.0), -1.0 / sqrt(200.0), 1.0 / sqrt(200.0)),
        ("kaiming_normal", 0.0, sqrt(2.0 / 700), None, None),
    ],
)
def test_values_are_spread_as_their_kind_says(
    kind: str, mean: float, std: float, low: float | None, high: float | None
) -> None:
    """Mean, standard deviation and bounds of drawn values are those of torch for the shape (out, in)."""
    p = param(RANDOM[kind])

    values = draw(p, 0, p.size).astype(np.float64)

    assert values.mean() == pytest.approx(mean, abs=5 * std / sqrt(p.size))
    assert values.std() == pytest.approx(std, rel=0.01)
    if low is not None and high is not None:
        width = high - low
        assert low <= values.min() < low + width / 1000
        assert high - width / 1000 < values.max() <= high
    else:
        assert 4.0 * std < np.abs(values - mean).max() < 6.0 * std


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((8, 3), (3, 8)), ((8, 3, 5, 5), (75, 200)), ((8, 3, 7), (21, 56)), ((10,), (10, 10)), ((), (1, 1))],
)
def test_fans_are_torch_s(shape: tuple[int, ...], expected: tuple[int, int]) -> None:
    """Fans are those of torch for a shape (out, in, ...); vectors and scalars, which torch refuses, have fans, too."""
    assert fans(shape) == expected


@pytest.mark.parametrize(
    ("nonlinearity", "gain"),
    [("linear", 1.0), ("sigmoid", 1.0), ("tanh", 5 / 3), ("relu", sqrt(2)), ("leaky_relu", 1.0), ("selu", 0.75)],
)
def test_kaiming_takes_torch_s_gains(nonlinearity: str, gain: float) -> None:
    """The standard deviation is torch's calculate_gain over the root of the fan; with a = 1, leaky_relu is linear."""
    p = param(InitSpec("kaiming_normal", a=1.0, nonlinearity=nonlinearity))

    assert draw(p, 0, p.size).std() == pytest.approx(gain / sqrt(200.0), rel=0.01)


def test_values_that_are_not_random() -> None:
    """`zeros` and `upload` give zeros, `constant` its value, `normal` with std 0 its mean; drawing `file` raises."""
    assert not draw(param(InitSpec("zeros")), 5, 10).any()
    assert not draw(param(InitSpec("upload")), 5, 10).any()
    np.testing.assert_array_equal(draw(param(InitSpec("constant", value=0.3)), 5, 8), np.full(3, 0.3, np.float32))
    assert draw(param(InitSpec("normal", std=0.0, mean=0.25), shape=()), 0, 1).tolist() == [0.25]
    with pytest.raises(ValueError, match="not drawn"):
        draw(param(InitSpec("file", path="x")), 0, 1)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3), (0, 140_001)])
def test_a_slice_outside_the_parameter_raises(start: int, stop: int) -> None:
    """Drawing a slice outside the parameter, or one that ends before it starts, raises ValueError."""
    with pytest.raises(ValueError, match="outside"):
        draw(param(RANDOM["normal"]), start, stop)


def test_extreme_numbers_give_finite_values() -> None:
    """The largest deviations and bounds of a spec still give finite initial values."""
    for init in (InitSpec("normal", std=9e37), InitSpec("uniform", low=-9e37, high=9e37)):
        p = param(init)
        values = draw(p, 0, p.size)
        assert np.isfinite(values).all()
        assert np.abs(values).max() > 8e37
