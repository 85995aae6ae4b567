"""What a client keeps of models that it used once: it may run for months, with another model each hour."""

import weakref

import paramserver as ps
from paramserver import limits
from paramserver.client.cluster import MAPS_KEPT_MAX, Cluster
from paramserver.net.calls import Deadline, Outcome, Request

from .sharding import Now, Shards, drive


def test_the_maps_of_models_used_long_ago_are_dropped(shards: Shards, now: Now, cluster: Cluster) -> None:
    """Only the maps fetched last are kept, each a model's whole layout; a model used again is asked for once more."""

    def fetch(name: str) -> None:
        document = shards.document()
        document["spec"]["name"] = name
        drive(cluster.store_document(document, Deadline.after(30, now)), shards, now)

    def refuse(request: Request) -> Outcome:
        raise AssertionError(request.path)

    fetch("first")
    first = weakref.ref(drive(cluster.map_of("first", Deadline.after(30, now)), refuse))
    fetch("kept")
    for i in range(MAPS_KEPT_MAX - 1):
        fetch(f"m{i}")

    assert first() is None
    assert cluster.generation("first") is None
    assert drive(cluster.map_of("kept", Deadline.after(30, now)), refuse).name == "kept"


def test_a_map_that_is_fetched_again_is_the_newest(shards: Shards, now: Now, cluster: Cluster) -> None:
    """A model in use, whose partitions move now and then, outlasts those that came after its first map."""
    for i in range(MAPS_KEPT_MAX + 1):
        for name in ("m", f"m{i}"):
            document = shards.document()
            document["spec"]["name"] = name
            drive(cluster.store_document(document, Deadline.after(30, now)), shards, now)

    assert cluster.generation("m") == shards.generation
    assert cluster.generation("m1") is None


def test_as_many_push_numbers_are_kept_as_models_can_exist() -> None:
    """Beyond that the oldest are dropped: what is pushed to that model later has another sender's ids."""
    with ps.Client("http://127.0.0.1:1") as client:
        oldest = weakref.ref(client.numbers("first"))
        second = client.numbers("second")
        for i in range(limits.MODELS_MAX - 1):
            client.numbers(f"m{i}")

        assert oldest() is None
        assert client.numbers("second") is second
