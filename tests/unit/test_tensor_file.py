"""Safetensors files are read as the library that defines them writes them, and other threads run meanwhile."""

import json
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from paramserver.tensor_file import TensorFile

LARGE_BYTES = 512 << 20


def written(path: Path, head: Any, size: int) -> Path:
    """Write a file with that header and as many bytes of zeros, which take no space on the disk."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with path.open("r+b") as f:
        f.truncate(8 + len(text) + size)
    return path


def test_other_threads_run_while_a_large_tensor_is_read(tmp_path: Path) -> None:
    """A thread gets its turn again and again, not just once, while another one reads a large tensor."""
    head = {"w": {"dtype": "F32", "shape": [LARGE_BYTES // 4], "data_offsets": [0, LARGE_BYTES]}}
    path = written(tmp_path / "large.safetensors", head, LARGE_BYTES)
    count, during = 0, -1
    over = threading.Event()

    def read() -> None:
        nonlocal during
        with TensorFile(path) as file:
            before = count
            file.read("w")
            during = count - before
        over.set()

    thread = threading.Thread(target=read)
    thread.start()
    while not over.wait(0.001):
        count += 1
    thread.join()

    assert during > 5


def test_every_dtype_of_numpy_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Arrays of every dtype that NumPy and safetensors share, scalars and empty ones too, come back bit for bit."""
    kinds = "float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool".split()
    arrays = {kind: np.arange(6).reshape(2, 3).astype(kind) for kind in kinds}
    arrays |= {"scalar": np.full((), 3.5, np.float32), "empty": np.zeros((0, 4), np.float32)}
    save_file(arrays, tmp_path / "all.safetensors", metadata={"format": "np"})

    with TensorFile(tmp_path / "all.safetensors") as file:
        assert file.shapes == {name: a.shape for name, a in arrays.items()}
        for name, array in arrays.items():
            found = file.read(name)
            assert (found.dtype, found.shape) == (array.dtype, array.shape)
            assert found.tobytes() == array.tobytes()


def test_bfloat16_is_read_as_float32(tmp_path: Path) -> None:
    """A tensor of bfloat16, the dtype of most published models, is read exactly, as float32; a scalar too."""
    head = {
        "b": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]},
        "s": {"dtype": "BF16", "shape": [], "data_offsets": [8, 10]},
    }
    path = written(tmp_path / "b.safetensors", head, 10)
    values = (np.array([1.0, -2.5, 0.0, 3e38, 0.15625], "<f4").view("<u4") >> 16).astype("<u2")
    with path.open("r+b") as f:
        f.seek(-10, 2)
        f.write(values.tobytes())

    with TensorFile(path) as file:
        found, scalar = file.read("b"), file.read("s")
    assert found.dtype == scalar.dtype == np.float32
    assert scalar.shape == ()
    assert found.reshape(-1)[:3].tolist() == [1.0, -2.5, 0.0]
    assert found[1, 1] == pytest.approx(3e38, rel=2**-8)
    assert float(scalar) == 0.15625


W = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("head", "size"),
    [
        ({"w": W}, 7),
        ({"w": W | {"shape": [3]}}, 8),
        ({"w": W | {"shape": [-2]}}, 8),
        ({"w": W | {"shape": "2"}}, 8),
        ({"w": W | {"data_offsets": [8, 0]}}, 8),
        ({"w": W | {"data_offsets": [-8, 0]}}, 8),
        ({"w": W | {"data_offsets": [0]}}, 8),
        ({"w": {"dtype": "F32"}}, 8),
        ({"w": 1}, 8),
        ([], 8),
        (b"{", 8),
    ],
)
def test_a_damaged_file_is_a_value_error(tmp_path: Path, head: Any, size: int) -> None:
    """A header that is damaged, or names bytes that the file does not have, raises ValueError at once."""
    path = written(tmp_path / "bad.safetensors", head, size)

    with pytest.raises(ValueError, match="safetensors"):
        TensorFile(path)


@pytest.mark.parametrize("data", [b"", b"\x00\x01", struct.pack("<Q", 1 << 40)])
def test_a_file_without_a_header_is_a_value_error(tmp_path: Path, data: bytes) -> None:
    """A file that is too short for its header raises ValueError, and no memory is taken for what it announces."""
    (tmp_path / "bad.safetensors").write_bytes(data)

    with pytest.raises(ValueError, match="safetensors"):
        TensorFile(tmp_path / "bad.safetensors")


def test_a_dtype_that_numpy_lacks_is_a_value_error(tmp_path: Path) -> None:
    """A tensor of 8-bit floats is refused by name when it is read; others of the same file are readable."""
    head = {"b": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}, "w": W | {"data_offsets": [8, 16]}}

    with TensorFile(written(tmp_path / "b.safetensors", head, 16)) as file:
        assert file.read("w").tolist() == [0.0, 0.0]
        with pytest.raises(ValueError, match="F8_E4M3"):
            file.read("b")
