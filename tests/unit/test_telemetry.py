"""A shard's telemetry: rates, times and version lag, for heartbeats and for Prometheus."""

import resource
from time import process_time

import pytest
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from paramserver.core.shard.effects import PartVersion, PushDone
from paramserver.types import ModelKey, PushState
from paramserver.wire.frame import PushFrame, PushPart
from paramserver_node import tally
from paramserver_node.usage import Usage
from paramserver_shard.memory import Memory
from paramserver_shard.telemetry import RECENT_S, Telemetry, frame_lag, name_lag

TOKEN = 7


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def done(model: str, version: int, *, state: PushState = "applied", duplicate: bool = False) -> PushDone:
    parts = (PartVersion(0, version, TOKEN, 0), PartVersion(1, version + 2, TOKEN, 0))
    return PushDone(ModelKey(model, 1), 0, state, duplicate, parts)


def frame(model: str, base: tuple[int, int] | None) -> PushFrame:
    return PushFrame(model, (PushPart(0, base, None), PushPart(1, base, None)), worker="a/w0", epoch=1, seq=1)


def test_heartbeats_tell_rates_times_and_lags() -> None:
    """A heartbeat reports requests and bytes per second, time quantiles, and each worker's mean lag."""
    clock = Clock()
    telemetry = Telemetry(clock, ["rates"])
    for i in range(100):
        clock.now += 0.02
        telemetry.pushed(done("rates", i + 1), 1000, clock.now - 0.001 * (i + 1), "a/w0", i % 3)
        telemetry.pulled("rates", 500, clock.now - 0.004)
    told = telemetry.rates()
    model = told["models"]["rates"]

    assert (told["pushes_per_s"], told["pulls_per_s"]) == (50.0, 50.0)
    assert (model["in_bytes_per_s"], model["out_bytes_per_s"]) == (50_000, 25_000)
    assert model["push_p50_s"] == pytest.approx(0.051, abs=0.002)
    assert model["push_p99_s"] == pytest.approx(0.1, abs=0.002)
    assert model["pull_p99_s"] == pytest.approx(0.004)
    assert model["lag"] == {"a/w0": 0.99}
    assert told["rss_bytes"] > 1 << 20
    assert telemetry.rates() == told


def test_heartbeats_tell_for_a_minute_that_values_were_kept() -> None:
    """How often results were not finite is in the heartbeats until a minute has passed without one."""
    clock = Clock()
    telemetry = Telemetry(clock, ["diverges"])
    for _ in range(2):
        telemetry.values_kept("diverges")
        clock.now += 40.0
        assert telemetry.rates()["models"]["diverges"]["values_kept"] >= 1

    clock.now += 19.0
    assert telemetry.rates()["models"]["diverges"]["values_kept"] == 2
    clock.now += 2.0
    assert "values_kept" not in telemetry.rates()["models"]["diverges"]
    assert REGISTRY.get_sample_value("paramserver_values_kept_total", {"model": "diverges"}) == 2


def test_a_model_that_is_still_is_told_of_no_more() -> None:
    """A model without requests keeps its times and lags for RECENT_S, and then leaves the heartbeat."""
    clock = Clock()
    telemetry = Telemetry(clock, ["still"])
    telemetry.pushed(done("still", 1), 8, clock.now - 0.5, "a/w0", 4)
    clock.now += 1
    assert telemetry.rates()["models"]["still"]["pushes_per_s"] == 1
    clock.now += 1
    assert telemetry.rates()["models"]["still"]["pushes_per_s"] == 0.5
    clock.now += 1
    assert telemetry.rates()["models"]["still"]["pushes_per_s"] == 0.33, "a burst is seen in three heartbeats"
    clock.now += 1
    still = telemetry.rates()["models"]["still"]
    assert (still["pushes_per_s"], still["push_p50_s"], still["lag"]) == (0, 0.5, {"a/w0": 4})
    clock.now += RECENT_S
    telemetry.rates()
    clock.now += 1

    assert telemetry.rates()["models"] == {}


def test_a_model_that_is_gone_leaves_prometheus() -> None:
    """A deleted model's series leave Prometheus for good, so their number is bounded by the models that exist.

    A request that was being answered brought them back.
    """
    models = {"gone"}
    telemetry = Telemetry(Clock(), models)
    telemetry.pushed(done("gone", 1, duplicate=True), 8, 99.0, "a/w0", 0)
    telemetry.pushed(done("gone", 1, state="staged"), 8, 99.0)
    telemetry.pulled("gone", 8, 99.0)

    def series() -> int:
        return sum(s.labels.get("model") == "gone" for m in REGISTRY.collect() for s in m.samples)

    assert series() > 30
    models.clear()
    telemetry.forget("gone")
    telemetry.forget("never-there")
    assert series() == 0
    telemetry.pushed(done("gone", 2), 8, 99.0, "a/w0", 0)
    telemetry.pulled("gone", 8, 99.0)
    telemetry.values_kept("gone")
    assert series() == 0


def test_lag_is_the_versions_between_base_and_push() -> None:
    """Lag is the most versions since the base of any part; another incarnation, a duplicate or staged push has none."""
    assert frame_lag(done("m", 10), frame("m", (9, TOKEN))) == 2
    assert frame_lag(done("m", 10), frame("m", (11, TOKEN))) == 0
    assert frame_lag(done("m", 10), frame("m", (9, TOKEN + 1))) is None
    assert frame_lag(done("m", 10), frame("m", None)) is None
    assert frame_lag(done("m", 10, state="staged"), frame("m", (9, TOKEN))) is None
    assert frame_lag(done("m", 10, duplicate=True), frame("m", (9, TOKEN))) is None
    assert (name_lag(done("m", 10), 4), name_lag(done("m", 10), None)) == (5, None)


def test_usage_counts_what_this_process_spends() -> None:
    """`Usage.look` returns the average number of cores that this process kept busy since the last look."""
    clock = Clock()
    usage = Usage(clock)
    began_s = process_time()
    while process_time() - began_s < 0.02:
        sum(range(10_000))
    clock.now += 0.1

    assert usage.look()["cpu_cores"] >= 0.2
    clock.now += 1000
    assert usage.look()["cpu_cores"] < 0.2


def test_usage_needs_no_file_descriptor() -> None:
    """Without a free file descriptor, memory is reported as it was, and nothing is raised: that ended the process."""
    usage, memory = Usage(Clock()), Memory(1 << 40)
    rss = usage.look()["rss_bytes"], memory.document()["used_bytes"]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        found = usage.look()["rss_bytes"], memory.document()["used_bytes"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found == rss


def test_what_is_counted_is_what_prometheus_reads() -> None:
    """Prometheus reads totals and cumulative buckets under their labels, and none of a removed series."""
    counts = tally.Counter("paramserver_test_things_total", "Things", ["kind"])
    times = tally.Histogram("paramserver_test_seconds", "Times", ["kind"], buckets=(0.1, 1, 5))
    try:
        counts.labels("a").inc()
        counts.labels("a").inc(4)
        counts.labels("b").inc()
        counts.remove("b")
        for seconds in (0.05, 0.1, 0.7, 5.0, 60.0):
            times.labels("a").observe(seconds)
        with pytest.raises(ValueError, match="labels"):
            counts.labels("a", "b")
        found = {
            (s.name, s.labels.get("kind"), s.labels.get("le")): s.value
            for family in text_string_to_metric_families(generate_latest().decode())
            for s in family.samples
            if s.name.startswith("paramserver_test_")
        }
    finally:
        REGISTRY.unregister(counts)
        REGISTRY.unregister(times)
    assert found == {
        ("paramserver_test_things_total", "a", None): 5.0,
        ("paramserver_test_seconds_bucket", "a", "0.1"): 2.0,
        ("paramserver_test_seconds_bucket", "a", "1.0"): 3.0,
        ("paramserver_test_seconds_bucket", "a", "5.0"): 4.0,
        ("paramserver_test_seconds_bucket", "a", "+Inf"): 5.0,
        ("paramserver_test_seconds_count", "a", None): 5.0,
        ("paramserver_test_seconds_sum", "a", None): pytest.approx(65.85),
    }
