"""Assignment of partitions without an owner to shards, balanced by bytes.

Greedy, largest partition first, onto the shard that holds the least of the model (Graham 1969, longest processing
time): starting from nothing, the loads of two shards differ by at most one partition.
"""

from collections.abc import Iterable, Mapping


def assign(
    orphans: Mapping[int, int], shards: Iterable[str], held: Mapping[str, int], total: Mapping[str, int]
) -> dict[int, str]:
    """Return the shard for each partition in `orphans` (index -> bytes); empty if there are no shards.

    `held`: bytes of this model that each shard has already; `total`: bytes of all models, which breaks ties so that
    many small models spread as well.
    """
    load = {s: (held.get(s, 0), total.get(s, 0)) for s in shards}
    out: dict[int, str] = {}
    if not load:
        return out
    for index in sorted(orphans, key=lambda i: (-orphans[i], i)):
        shard = min(load, key=lambda s: (*load[s], s))
        own, everything = load[shard]
        load[shard] = (own + orphans[index], everything + orphans[index])
        out[index] = shard
    return out
