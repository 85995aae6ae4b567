"""What takes long, such as an answer about hundreds of models, lets other requests be answered in between."""

import asyncio
from time import monotonic
from typing import Final

SLICE_S: Final = 0.01


class Pause:
    """To be awaited again and again during the work: it gives way once a slice of time is used up."""

    def __init__(self) -> None:
        self._began_s = monotonic()

    async def __call__(self) -> None:
        """Let others go first if it is time to."""
        if monotonic() - self._began_s > SLICE_S:
            await asyncio.sleep(0)
            self._began_s = monotonic()
