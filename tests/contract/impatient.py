"""A shard that gives slow clients a third of the usual time: `python -m tests.contract.impatient`, with its options."""

import sys
from typing import Final

from paramserver import limits

PATIENCE_S: Final = limits.PATIENCE_S / 3

if __name__ == "__main__":
    vars(limits).update(PATIENCE_S=PATIENCE_S, PACE_BYTES_PER_S=limits.MIB)
    from paramserver_shard.main import app

    app(sys.argv[1:])
