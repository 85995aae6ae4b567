"""Codecs: their bytes, their error feedback, what is refused, and that kernels read encoded gradients alike."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tests.decoding import decode_partition
from tests.golden.codecs import generate
from tests.refusals import refused_with

from paramserver import kernels
from paramserver.client.encoding import Draft, Encoded, Encoding, Feedback, draft_for, ready
from paramserver.codecs.codec import Codec, int8_bytes, topk_count_max
from paramserver.codecs.parts import check_content, check_encoded_size, encode_partition, topk_count
from paramserver.codecs.stage import pack, packed_bytes_max, unpack
from paramserver.core.layout import Layout
from paramserver.core.optimizer import SegmentStep, initial_slots
from paramserver.core.optimizer_spec import OptimizerSpec
from paramserver.core.ranges import of_pairs
from paramserver.core.spec import ModelSpec
from paramserver.errors import RequestError
from paramserver.types import F32, AnyArray

GOLDEN = Path(__file__).parents[1] / "golden" / "codecs"
PER_PARTITION = ("int8", "topk:0.05", "topk:0.5")


@pytest.fixture(scope="module")
def golden() -> Iterator[Any]:
    with np.load(GOLDEN / "codecs.npz") as stored:
        yield stored


def noise(size: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


def encoded(text: str, values: F32) -> tuple[AnyArray, F32]:
    """Return (encoded bytes, the values they decode to)."""
    codec = Codec.parse(text)
    data, _ = encode_partition(codec, values, None, None)
    return data, decode_partition(codec.coding, data, values.size)


@pytest.mark.parametrize("text", generate.CODECS)
def test_bytes_are_those_that_were_written_down(text: str, golden: Any) -> None:
    """Encoding the golden gradients with error feedback gives the golden bytes and leaves the golden residual."""
    parts, left = generate.encoded(text)

    for i, part in enumerate(parts):
        assert np.array_equal(golden[f"gradient.{i}"], generate.gradients()[i])
        assert part.tobytes() == golden[f"{text}.{i}"].tobytes()
    assert left.tobytes() == golden[f"{text}.left"].tobytes()


@pytest.mark.parametrize("stage", generate.STAGES)
@pytest.mark.parametrize("text", generate.CODECS)
def test_stored_second_stages_are_read(text: str, stage: str, golden: Any) -> None:
    """Golden parts packed with zstd or LZ4 are unpacked to the original bytes.

    Packing is not compared: other versions of these libraries may produce other bytes.
    """
    raw = golden[f"{text}.0"]

    assert unpack(stage, golden[f"{text}+{stage}"], raw.size).tobytes() == raw.tobytes()


def test_the_bytes_of_int8_are_those_of_the_page() -> None:
    """int8 is scales, then numbers: a scale is the largest magnitude times 1/127, numbers are rounded half to even."""
    values = np.array([127.0, -63.5, 0.5, 1.5, 0.0], np.float32)

    data, decoded = encoded("int8", values)

    assert (
        data.tobytes()
        == np.float32(127.0 * np.float32(1 / 127)).tobytes() + np.array([127, -64, 0, 2, 0], "i1").tobytes()
    )
    assert np.array_equal(decoded, np.array([127, -64, 0, 2, 0], np.float32))


def test_the_bytes_of_topk_are_those_of_the_page() -> None:
    """topk is ascending indices, then values; of equal magnitudes those with the lowest indices are taken."""
    values = np.array([0.0, -3.0, 2.0, 3.0, 2.0, 0.0, 0.0, 0.0], np.float32)

    data, decoded = encoded("topk:0.3", values)

    assert data.tobytes() == np.array([1, 2, 3], "<u4").tobytes() + np.array([-3, 2, 3], "<f4").tobytes()
    assert np.array_equal(decoded, np.array([0, -3, 2, 3, 0, 0, 0, 0], np.float32))


def test_the_page_shows_the_bytes_of_the_examples() -> None:
    """The bytes of the two examples in docs/codecs.md are those that the encoders produce."""
    page = (Path(__file__).parents[2] / "docs" / "codecs.md").read_text()
    shown = [bytes.fromhex(block) for block in re.findall(r"```\n([0-9a-f \n]+)```", page)]
    first = encoded("int8", np.array([127.0, -63.5, 0.5, 1.5, 0.0], np.float32))[0]
    second = encoded("topk:0.3", np.array([0, -3, 2, 3, 2, 0, 0, 0], np.float32))[0]

    assert shown == [first.tobytes(), second.tobytes()]


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 5000])
@pytest.mark.parametrize("text", PER_PARTITION)
def test_what_is_left_out_is_exactly_the_rest(text: str, size: int) -> None:
    """The residual is the values minus the decoded ones, in float32; sizes and norm are as announced.

    For int8 the residual is at most half the largest scale.
    """
    codec, values, new_residual = Codec.parse(text), noise(size), np.empty(size, np.float32)

    data, norm = encode_partition(codec, values, None, new_residual)
    decoded = decode_partition(codec.coding, data, size)

    check_encoded_size(codec, data.size, size)
    check_content(codec.coding, data, size)
    assert np.array_equal(new_residual, values - decoded)
    assert norm == pytest.approx(float(np.linalg.norm(decoded.astype(np.float64))), rel=1e-6)
    if codec.coding == "int8":
        assert data.size == int8_bytes(size) <= 4 * size + 4
        assert np.abs(new_residual).max() <= np.abs(values).max() / 127 * 0.5001
    else:
        assert data.size == 8 * topk_count(size, codec.fraction) <= max(8, 4 * size)


@pytest.mark.parametrize("text", PER_PARTITION)
def test_error_feedback_loses_nothing_over_time(text: str) -> None:
    """With error feedback, the sum of the decoded gradients and the last residual equals the sum of the gradients."""
    codec, total, sent = Codec.parse(text), np.zeros(3000), np.zeros(3000)
    residual: F32 | None = None
    for i in range(20):
        g, new_residual = noise(3000, i), np.empty(3000, np.float32)
        data, _ = encode_partition(codec, g, residual, new_residual)
        total += g
        sent += decode_partition(codec.coding, data, 3000)
        residual = new_residual

    assert residual is not None
    assert np.allclose(sent + residual, total, atol=1e-4)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=600))
def test_any_finite_gradient_can_be_encoded(numbers: list[float]) -> None:
    """Any finite gradient has the announced size encoded, and decodes to finite values within its largest magnitude."""
    values = np.array(numbers, np.float32)
    for text in PER_PARTITION:
        data, decoded = encoded(text, values)
        check_encoded_size(Codec.parse(text), data.size, values.size)
        check_content(Codec.parse(text).coding, data, values.size)
        assert np.isfinite(decoded).all()
        assert kernels.all_finite(data, Codec.parse(text).coding) or np.abs(values).max() > 1e38
        assert float(np.abs(decoded).max()) <= float(np.abs(values).max()) * 1.000001


@pytest.mark.parametrize("text", PER_PARTITION)
def test_a_sum_with_the_residual_that_overflows_is_found_by_the_norm(text: str) -> None:
    """If a gradient and its residual are finite, but not their sum, the norm is infinite, and nothing warns."""
    values = np.full(4, 3e38, np.float32)

    assert encode_partition(Codec.parse(text), values, values, np.empty(4, np.float32))[1] == np.inf


# ------------------------------------------------------------------------------------------------ in the kernels


@pytest.mark.parametrize("text", PER_PARTITION)
@pytest.mark.parametrize("name", ["sgd", "adam", "ftrl"])
def test_a_fused_step_equals_decoding_first(text: str, name: str) -> None:
    """A step on encoded bytes gives the same bytes as one on the decoded gradient, also for segments at odd offsets."""
    size = 10_007
    optimizer = OptimizerSpec(name, lr=0.1)
    w, (data, g) = noise(size, 3), encoded(text, noise(size, 4))
    slots = initial_slots(optimizer, w)
    steps = [
        SegmentStep(0, 301, 0.1),
        SegmentStep(301, 999, 0.1, active=False),
        SegmentStep(999, size, 0.05, 0.01, 3, 0.5, 2.0),
    ]
    results = []
    for grad, coding in ((data, Codec.parse(text).coding), (g, "float32")):
        out, after = np.empty(size, np.float32), [np.empty(size, np.float32) for _ in slots]
        assert kernels.apply(optimizer, steps, w, slots, grad, coding, out, after)
        results.append(b"".join(a.tobytes() for a in (out, *after)))

    assert results[0] == results[1]


@pytest.mark.parametrize("text", PER_PARTITION)
def test_a_mean_takes_encoded_and_plain_parts_together(text: str) -> None:
    """A mean is the same from whole encoded parts beside plain elements as from decoded ones."""
    size, a, b = 70_000, 1_234, 69_001
    data, g = encoded(text, noise(size, 1))
    plain = noise(b - a, 2)
    out, want = np.empty(size, np.float32), np.empty(size, np.float32)

    kernels.mean([(data, Codec.parse(text).coding, 0.5, None), (plain, "float32", 2.0, of_pairs([(a, b)]))], 3.0, out)
    kernels.mean([(g, "float32", 0.5, None)], 3.0, want)
    kernels.mean([(g[a:b].copy(), "float32", 0.5, None), (plain, "float32", 2.0, None)], 3.0, want[a:b])

    assert out.tobytes() == want.tobytes()
    assert kernels.norm2(data, Codec.parse(text).coding) == pytest.approx(float(np.linalg.norm(g.astype(np.float64))))


def test_kernels_refuse_bytes_of_another_partition() -> None:
    """Kernels raise ValueError for encoded bytes that do not fit the values, and write nothing.

    It is not a RequestError, because such bytes would be a bug of ours.
    """
    w, out = noise(100), np.zeros(100, np.float32)
    steps = [SegmentStep(0, 100, 0.1)]
    with pytest.raises(ValueError, match="lengths differ"):
        kernels.apply(OptimizerSpec("sgd"), steps, w, (), encoded("int8", noise(300))[0], "int8", out, ())
    with pytest.raises(ValueError, match="lengths differ"):
        kernels.mean([(encoded("int8", noise(90))[0], "int8", 1.0, None)], 1.0, out)
    with pytest.raises(ValueError, match="does not hold"):
        kernels.mean([(w, "int8", 1.0, None)], 1.0, out)
    for coding, size in (("int8", 3), ("int8", 264), ("topk", 12)):
        with pytest.raises(ValueError, match=f"no gradient in {coding} has {size} bytes"):
            kernels.all_finite(np.zeros(size, np.uint8), coding)
    assert not out.any()


@pytest.mark.parametrize("last", [100, 163, 2**32 - 1])
@pytest.mark.parametrize("first", [0, 99, 2**31])
def test_indices_that_change_after_their_check_write_nothing_else(first: int, last: int) -> None:
    """Indices beyond the partition, or that no longer ascend, end no shard and write to nothing but the values.

    A client may write to its slot of shared memory while the shard applies what is in it.
    """
    data = np.array([first, last], np.uint32).tobytes() + np.ones(2, np.float32).tobytes()
    raw, memory = np.frombuffer(data, np.uint8), np.full(300, 7.0, np.float32)
    out, w = memory[100:200], np.zeros(100, np.float32)

    assert kernels.apply(OptimizerSpec("sum"), [SegmentStep(0, 100, 1.0)], w, (), raw, "topk", out, ())

    assert out.tolist() == [float(i == first) for i in range(100)]
    kernels.mean([(raw, "topk", 1.0, None)], 1.0, out)
    assert out.tolist() == [float(i == first) for i in range(100)]
    assert (memory[:100] == 7.0).all()
    assert (memory[200:] == 7.0).all()


def test_scales_that_overflow_are_not_finite() -> None:
    """A gradient is not finite if a scale is NaN or its largest number would be infinite."""
    data, _ = encoded("int8", noise(300))
    for wrong in (np.inf, np.nan, 3e38, -3e38):
        bad = data.copy()
        bad[:4] = np.array([wrong], np.float32).view(np.uint8)
        assert not kernels.all_finite(bad, "int8")
    assert kernels.all_finite(data, "int8")


# ------------------------------------------------------------------------------------------------ names and refusals


@pytest.mark.parametrize(
    ("text", "coding", "stage", "frame"),
    [
        ("fp32", "float32", None, "fp32"),
        ("float16", "float16", None, "fp16"),
        ("bf16+zstd", "bfloat16", "zstd", "bf16+zstd"),
        ("int8+lz4", "int8", "lz4", "int8+lz4"),
        ("topk:0.02+zstd", "topk", "zstd", "topk+zstd"),
    ],
)
def test_names_say_coding_and_stage(text: str, coding: str, stage: str | None, frame: str) -> None:
    """A codec name is parsed into coding and stage, and a frame carries all of it but the fraction."""
    codec = Codec.parse(text)

    assert (codec.coding, codec.stage, codec.text) == (coding, stage, frame)
    assert Codec.of_frame(frame).coding == coding


@pytest.mark.parametrize(
    "text", ["", "int4", "int8+", "int8+gzip", "+zstd", "fp32:0.1", "zstd", "INT8", "int8+zstd+lz4"]
)
def test_unknown_names_are_415(text: str) -> None:
    """An unknown codec name is refused with 415 and the list of codecs."""
    with pytest.raises(RequestError, match="topk") as e:
        Codec.parse(text)

    assert (e.value.code, e.value.status) == ("unknown_codec", 415)


@pytest.mark.parametrize("text", ["topk:", "topk:0", "topk:0.6", "topk:nan", "topk:-1", "topk:x"])
def test_fractions_are_between_0_and_a_half(text: str) -> None:
    """A topk fraction that is not above 0 and at most 0.5 is refused, and so is any fraction in a frame.

    With more than half of its elements a partition would be larger than as float32.
    """
    with refused_with("invalid_field", RequestError):
        Codec.parse(text)
    with pytest.raises(RequestError):
        Codec.of_frame("topk:0.1")


@pytest.mark.parametrize(
    ("coding", "size_bytes", "elements"),
    [("int8", 263, 256), ("int8", 1300, 1304), ("topk", 0, 10), ("topk", 12, 10), ("topk", 48, 10), ("topk", 80, 10)],
)
def test_lengths_that_cannot_be_are_refused(coding: str, size_bytes: int, elements: int) -> None:
    """A part of an impossible length, or larger than the partition as float32, is refused with 422."""
    with pytest.raises(RequestError) as e:
        check_encoded_size(Codec.parse(coding), size_bytes, elements)

    assert (e.value.code, e.value.status) == ("invalid_encoding", 422)
    assert topk_count_max(10) == 5


@pytest.mark.parametrize("at", [[3, 3], [4, 2], [0, 100], [0, 0xFFFFFFFF]])
def test_indices_that_do_not_ascend_within_the_partition_are_refused(at: list[int]) -> None:
    """topk indices that repeat, descend, or lie beyond the partition are refused."""
    data = np.concatenate((np.array(at, "<u4").view(np.uint8), np.ones(2, np.float32).view(np.uint8)))

    with pytest.raises(RequestError, match="ascend"):
        check_content("topk", data, 100)


@pytest.mark.parametrize("stage", ["zstd", "lz4"])
def test_second_stages_are_undone_within_their_bound(stage: str) -> None:
    """A packed part that is truncated, damaged, or not of the announced size is refused (422).

    Incompressible bytes pack to no more than `packed_bytes_max`.
    """
    raw = np.zeros(1 << 20, np.uint8)
    packed = pack(stage, raw)
    assert packed.size < 10_000

    assert np.array_equal(unpack(stage, packed, raw.size), raw)
    for wrong, size in (
        (packed, 1000),
        (packed, raw.size + 1),
        (packed[:-1], raw.size),
        (packed[::-1].copy(), raw.size),
    ):
        with refused_with("invalid_encoding", RequestError):
            unpack(stage, wrong, size)
    assert pack(stage, np.random.default_rng(0).integers(0, 256, 100_000, np.uint8)).size <= packed_bytes_max(100_000)


def test_a_zstd_frame_may_not_ask_for_a_big_window() -> None:
    """A zstd frame without a content size that needs a window of 64 MiB is refused.

    Otherwise a small part could make the decoder allocate that much.
    """
    params = zstandard.ZstdCompressionParameters(window_log=26, compression_level=1)
    writer = zstandard.ZstdCompressor(compression_params=params).compressobj()
    packed = np.frombuffer(writer.compress(bytes(1 << 20)) + writer.flush(), np.uint8)

    with refused_with("invalid_encoding", RequestError):
        unpack("zstd", packed, 1 << 20)


# ------------------------------------------------------------------------------------------------ at the worker


def layout() -> Layout:
    return Layout(
        ModelSpec.parse({"name": "m", "params": {"w": {"shape": [700]}, "b": {"shape": [33]}}, "partitions": 3})
    )


def pushed(feedback: Feedback, grads: dict[str, F32], text: str = "int8", generation: int = 1) -> bytes:
    """Encode a push that is accepted, and return its bytes."""
    with draft_for(feedback) as draft:
        made = ready(layout(), generation, grads, Encoding(Codec.parse(text)), draft)
    assert isinstance(made, Encoded)
    return b"".join(data.tobytes() for data, _ in made.parts.values())


def refused(feedback: Feedback, grads: dict[str, F32], text: str = "int8") -> bytes:
    """Encode a push that is not accepted, and return its bytes."""
    draft = Draft(feedback)
    made = ready(layout(), 1, grads, Encoding(Codec.parse(text)), draft)
    draft.give_back()
    assert isinstance(made, Encoded)
    return b"".join(data.tobytes() for data, _ in made.parts.values())


def test_a_push_that_was_not_accepted_leaves_the_memory_as_it_was() -> None:
    """A push that was not accepted leaves the residuals unchanged, so that the same gradient gives the same bytes.

    After an accepted push it gives other bytes; a new model generation starts without residuals.
    """
    feedback, grads = Feedback(), {"w": noise(700), "b": noise(33, 1)}

    first, again = refused(feedback, grads), refused(feedback, grads)
    assert pushed(feedback, grads) == first == again
    second = refused(feedback, grads)
    assert first != second == pushed(feedback, grads)
    assert pushed(feedback, grads, generation=2) == first  # the model was created again


def test_a_push_of_an_earlier_creation_of_the_model_leaves_nothing() -> None:
    """A push that ends after the model was created again leaves no residual for later gradients."""
    feedback, grads = Feedback(), {"w": noise(700), "b": noise(33, 1)}
    pushed(feedback, grads)
    with draft_for(feedback) as draft:
        ready(layout(), 1, grads, Encoding(Codec.parse("int8")), draft)
        first = pushed(feedback, grads, generation=2)

    other = Feedback()
    assert first == pushed(other, grads)
    assert pushed(feedback, grads, generation=2) == pushed(other, grads)


class Refused(Exception):
    """Raised to end a push as not accepted."""


@pytest.mark.parametrize("text", ["int8", "topk:0.05"])
@pytest.mark.parametrize("accepted", [(True, True), (True, False), (False, True), (False, False)])
def test_pushes_under_way_at_once_leave_each_element_out_once(text: str, accepted: tuple[bool, bool]) -> None:
    """After concurrent pushes, decoded values plus residuals are the sum of the gradients that were accepted."""
    feedback, codec, sizes = Feedback(), Codec.parse(text), [layout().partition_size(i) for i in range(3)]
    arrived, wanted = np.zeros(733), np.zeros(733)

    def push(seed: int, accept: bool) -> Iterator[None]:
        given = noise(733, seed)
        try:
            with draft_for(feedback) as draft:
                made = ready(layout(), 1, given, Encoding(codec), draft)
                yield
                if not accept:
                    raise Refused
        except Refused:
            return
        assert isinstance(made, Encoded)
        parts = [decode_partition(codec.coding, made.parts[i][0], n) for i, n in enumerate(sizes)]
        arrived[:] += np.concatenate(parts)
        wanted[:] += given

    list(push(0, True))
    first, second = push(1, accepted[0]), push(2, accepted[1])
    next(first), next(second)
    list(first), list(second)

    with draft_for(feedback) as draft:
        assert draft is not None
        left = [draft.arrays(1, i, n)[0] for i, n in enumerate(sizes)]
    np.testing.assert_allclose(arrived + np.concatenate([a for a in left if a is not None]), wanted, atol=1e-5)


@pytest.mark.parametrize("text", ["int8", "topk"])
def test_bad_numbers_are_named_wherever_they_lie(text: str) -> None:
    """NaN and infinity are refused by the name of their parameter, and no other is named.

    This holds for partitions of one parameter, which is encoded in place, and of several.
    """
    feedback, grads = Feedback(), {"w": noise(700), "b": noise(33, 1)}
    pushed(feedback, grads, text)
    for memory in (feedback, Feedback()):
        for name, other, at in (("w", "b", 3), ("w", "b", 650), ("b", "w", 32)):
            for bad in (np.nan, np.inf, -np.inf):
                given = {n: a.copy() for n, a in grads.items()}
                given[name][at] = bad
                with pytest.raises(RequestError, match=f"'{name}' holds NaN") as e:
                    pushed(memory, given, text)
                assert f"'{other}'" not in str(e.value)


def test_an_array_that_is_encoded_as_it_lies_stays_as_it_is() -> None:
    """An array that is encoded in place may be read-only, and keeps its values."""
    grads = {"w": noise(700), "b": noise(33, 1)}
    for a in grads.values():
        a.flags.writeable = False
    for text in ("int8", "topk"):
        feedback, before = Feedback(), {n: a.tobytes() for n, a in grads.items()}
        for _ in range(2):
            pushed(feedback, grads, text)
        assert {n: a.tobytes() for n, a in grads.items()} == before


@pytest.mark.parametrize("text", ["int8", "topk:0.05"])
def test_codecs_of_whole_partitions_take_nothing_less(text: str) -> None:
    """They refuse a push that leaves out parameters or holds NaN, and one of a sender without error feedback."""
    codec = Codec.parse(text)
    with pytest.raises(RequestError, match="whole partitions"):
        pushed(Feedback(), {"b": noise(33)}, text)
    with pytest.raises(RequestError, match="which only a worker keeps"):
        ready(layout(), 1, {"w": noise(700), "b": noise(33)}, Encoding(codec), None)
    with pytest.raises(RequestError, match="'b' holds NaN"):
        pushed(Feedback(), {"w": noise(700), "b": np.full(33, np.nan, np.float32)}, text)


def test_a_calls_codec_goes_before_the_default() -> None:
    """A call's codec= or dtype= takes precedence over the worker's codec; both together are refused."""
    default = Codec.parse("int8")

    assert Encoding(default).of_call().codec is default
    assert Encoding(default).of_call(dtype="float16").codec is None
    assert Encoding(default).of_call(codec="fp32").codec == Codec.parse("fp32")
    with pytest.raises(RequestError, match="exclude"):
        Encoding().of_call(codec="fp32", dtype="float16")
