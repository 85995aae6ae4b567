"""Prebuilt kernel libraries: they give the same bytes as numba, and one built from other source is not loaded."""

import itertools
import re
import shutil
import subprocess
import sys
from mmap import mmap
from pathlib import Path

import numpy as np
import pytest
from tests.unit.moved_bodies import both_ways, connected_pair

from paramserver import kernels
from paramserver.core.optimizer import SegmentStep, slot_count
from paramserver.core.optimizer_spec import OptimizerSpec
from paramserver.core.ranges import elements, of_pairs, union
from paramserver.kernels import calls, prebuilt, sockets
from paramserver.types import F32, AnyArray

SIZE = 5003
NAMES = ("sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam", "adamw", "ftrl", "sum")
STEPS = [SegmentStep(0, 1000, 0.1), SegmentStep(1500, SIZE, 0.05, 0.01, 3, 0.5, 2.0)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the libraries for this machine's architecture."""
    if not all(map(shutil.which, ("cc", "nm", "objdump"))):
        pytest.skip("needs a C compiler and binutils: apt install gcc libc6-dev")
    target = tmp_path_factory.mktemp("prebuilt")
    subprocess.run([sys.executable, "-m", "paramserver.kernels.build", str(target)], check=True, timeout=280)
    return target


def gradients(rng: np.random.Generator) -> dict[str, AnyArray]:
    """One gradient in each dtype; the float32 one begins at an odd address, as a received one may."""
    g = rng.standard_normal(SIZE).astype(np.float32)
    raw = np.zeros(4 * SIZE + 1, np.uint8)[1:]
    raw[:] = g.view(np.uint8)
    scales = np.ones(-(-SIZE // 256), np.float32)
    at = np.arange(7, SIZE, 11, dtype=np.uint32)
    return {
        "float32": raw.view(np.float32),
        "float64": g.astype(np.float64),
        "float16": g.astype(np.float16),
        "bfloat16": (g.view(np.uint32) >> 16).astype(np.uint16),
        "int8": np.concatenate([scales.view(np.uint8), rng.integers(0, 255, SIZE, np.uint8)]),
        "topk": np.concatenate([at.view(np.uint8), g[: at.size].view(np.uint8)]),
    }


def everything() -> list[bytes | float | bool]:
    """Return the results of every kernel function, for every optimizer and dtype."""
    rng = np.random.default_rng(7)
    grads = gradients(rng)
    found: list[bytes | float | bool] = []
    w: F32 = rng.standard_normal(SIZE).astype(np.float32)
    for name, (dtype, grad) in itertools.product(NAMES, grads.items()):
        o = OptimizerSpec(name, momentum=0.9 if name in ("momentum", "nesterov", "rmsprop") else 0.0)
        slots = [np.abs(w) + np.float32(i) for i in range(slot_count(o))]
        for nontemporal in (False, True):
            out = [np.frombuffer(mmap(-1, 4 * SIZE), np.float32) for _ in range(1 + len(slots))]
            finite = kernels.apply(o, STEPS, w, slots, grad, dtype, out[0], out[1:], nontemporal=nontemporal)
            found += [finite, *(a.tobytes() for a in out)]
            means = [(grads["float32"], 0.5), (w, 2.0)]
            finite = kernels.apply_mean(o, STEPS, w, slots, means, 3.0, out[0], out[1:], nontemporal=nontemporal)
            found += [finite, *(a.tobytes() for a in out)]
    mean = np.empty(SIZE, np.float32)
    kernels.mean([(g, dtype, 0.5, None) for dtype, g in grads.items()], 3.0, mean)
    found.append(mean.tobytes())
    ranges = of_pairs([(0, 3), (40, 900), (SIZE - 2, SIZE)])
    few = grads["float16"][: elements(ranges)].copy()
    kernels.apply(OptimizerSpec("sgd"), STEPS, w, (), few, "float16", mean, (), ranges=ranges)
    found.append(mean.tobytes())
    several = union([ranges, of_pairs([(1, 50)])])
    into = np.empty(elements(several), np.float32)
    kernels.mean([(few, "float16", 0.5, ranges), (w[:49], "float32", 2.0, of_pairs([(1, 50)]))], 3.0, into, several)
    found.append(into.tobytes())
    for dtype, grad in grads.items():
        found += [kernels.norm2(grad, dtype), kernels.all_finite(grad, dtype)]
    bad = w.copy()
    bad[-1] = np.inf
    return [*found, kernels.all_finite(bad)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_library_gives_the_bytes_that_numba_gives(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every library that this processor can run gives numba's bytes, for every optimizer and dtype.

    The input includes a non-finite value, which must be detected, and a gradient at an odd address.
    """
    expected = everything()
    assert expected[-1] is False
    runnable = prebuilt.levels()
    assert runnable
    for level in runnable:
        monkeypatch.setattr(prebuilt, "levels", lambda only=level: [only])
        prebuilt.load.cache_clear()
        loops = prebuilt.load(folder)
        assert loops is not None
        monkeypatch.setattr(calls, "loops", loops)

        assert everything() == expected, level
    prebuilt.load.cache_clear()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_library_can_write_past_the_caches(folder: Path) -> None:
    """Every library has nontemporal vector stores: without them results are the same, large updates slower by half."""
    for library in folder.iterdir():
        text = subprocess.run(["objdump", "-d", library], capture_output=True, text=True, check=True).stdout
        assert len(re.findall(r"\bv?movntp[sd]\b.*[xyz]mm|\bstnp\b", text)) > 10, library.name


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: elsewhere the event loop moves all bodies")
def test_a_library_moves_bodies_as_the_compiler_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket loops of a prebuilt library, which images use without numba, move bodies in both directions."""
    monkeypatch.setattr(sockets, "_loops", prebuilt.load(folder))
    with connected_pair() as ends:
        both_ways(*ends)
    prebuilt.load.cache_clear()


def test_a_library_of_another_source_is_not_taken(tmp_path: Path) -> None:
    """A library whose name has the digest of other source is ignored; neither that nor a missing folder is an error."""
    for level in prebuilt.levels():
        (tmp_path / f"{level}-0123456789abcdef.so").write_bytes(b"of another version")

    assert prebuilt.load(tmp_path) is None
    assert prebuilt.load(tmp_path / "nothing") is None


def test_a_fitting_library_that_is_damaged_is_an_error(tmp_path: Path) -> None:
    """A library with the right digest that cannot be loaded raises OSError: an image without numba has nothing else."""
    for level in prebuilt.levels():
        (tmp_path / f"{level}-{prebuilt.digest()}.so").write_bytes(b"\x7fELF no more")

    with pytest.raises(OSError, match=r"\.so"):
        prebuilt.load(tmp_path)
