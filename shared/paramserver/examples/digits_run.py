"""Starts a training of the digits by the cluster's worker pool, unless one is under way.

    python -m paramserver.examples.digits_run          (PARAMSERVER_URL says where the cluster is)

Each run has a model of its own, `digits-1`, `digits-2`, …; the run ends after `MINUTES`, or when it is stopped.
"""

import sys
from typing import Final

import paramserver as ps
from paramserver.examples import digits

ENTRY: Final = "paramserver.examples.digits:train"
WORKERS: Final = 4
MINUTES: Final = 10.0
EVALUATE_EVERY: Final = 10
ENDED: Final = ("finished", "failed", "stopped")
WAIT_S: Final = 60.0
"""For shards that are still starting."""


def start(client: ps.Client, *, workers: int = WORKERS, minutes: float = MINUTES) -> tuple[str, str, bool]:
    """(run, model, whether it is new) of a digits training that has not ended.

    Raises Unavailable when no shard is there within the client's timeout.
    """
    for run in client.runs():
        if run["entry"] == ENTRY and run["state"] not in ENDED:
            return run["id"], run["model"], False
    taken = set(client.models())
    name = next(f"digits-{n}" for n in range(1, len(taken) + 2) if f"digits-{n}" not in taken)
    # As the demo's async training: a step that gets smaller with every update, for several gradients are in flight.
    client.create_model(
        name, digits.spec(), optimizer=ps.Adam(lr=1e-3, schedule=ps.Exponential(gamma=0.9995)), consistency=ps.Async()
    )
    run = client.create_run(name, ENTRY, workers=workers, stop={"minutes": minutes}, evaluate_every=EVALUATE_EVERY)
    return run["id"], name, True


def main() -> None:
    """Start it, and say what was done."""
    run, model, new = start(ps.connect(timeout=WAIT_S))
    sys.stdout.write(f"{run} {'trains' if new else 'is already training'} model {model}\n")


if __name__ == "__main__":
    main()
