"""What psctl says of partitions that are slow to move."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

import paramserver as ps
from paramserver_cli import moves
from paramserver_cli.launch import Failed

AWAY = "Redis does not answer: async training continues, but nothing new can be decided or stored"


@pytest.mark.parametrize(
    ("under_way", "problems", "says"),
    [
        ([("m", 3), ("m", 1)], [AWAY], "slow, by way of Redis: m/3 to shard-0, m/1 to shard-0"),
        ([("m", i) for i in range(7)], [], "m/2 to shard-0, m/3 to shard-0 and 3 more"),
        ([], [AWAY], f"or no other shard has room; the status says: {AWAY}"),
        ([], [], "no move has begun: its models are being loaded, restored or saved, or no other shard has room"),
    ],
)
def test_a_drain_that_does_not_get_on_says_what_it_waits_for(
    under_way: list[tuple[str, int]],
    problems: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where no partition has moved for a while, the moves under way are named, or why there are none, once each."""
    begun = [{"model": model, "partition": index, "to": "shard-0"} for model, index in under_way]
    line = {"name": "shard-1", "state": "draining", "partitions": 8, "bytes": 1 << 20, "moves": begun}
    client: Any = SimpleNamespace(status=lambda: {"cluster": {"problems": problems}})
    polls = iter([[line | {"partitions": 9, "moves": []}], *[[line]] * 9, [line | {"partitions": 7, "moves": []}]])
    monkeypatch.setattr(moves, "_shards", lambda client: next(polls))
    monkeypatch.setattr(moves, "POLL_S", 0.0)
    monkeypatch.setattr(moves, "SLOW_S", 0.0)
    with pytest.raises(StopIteration):
        moves.until_empty(cast(ps.Client, client), ["shard-1"], 100.0)
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "0 of 9 partitions moved; 1.0 MiB left on shard-1"
    assert told[1] == "1 of 9 partitions moved; 1.0 MiB left on shard-1"
    assert says in told[2]
    assert told[3:] == ["2 of 9 partitions moved; 1.0 MiB left on shard-1"]

    monkeypatch.setattr(moves, "_shards", lambda client: [line])
    with pytest.raises(Failed) as failed:
        moves.until_empty(cast(ps.Client, client), ["shard-1"], -1.0)
    assert "timed out: shard-1 still own 8 partitions; " in str(failed.value)
    assert says in str(failed.value)
