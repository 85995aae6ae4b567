"""What the blocking and the asyncio client share: the cluster's URLs and map, deadlines, and push numbers."""

import secrets
import threading

from paramserver import limits
from paramserver.client.cluster import Cluster
from paramserver.client.numbers import PushNumbers
from paramserver.client.shared_arrays import SharedArrays
from paramserver.net.calls import Deadline, seconds
from paramserver.net.forks import call_in_forked_child


class ClientBase:
    """Base class of clients."""

    def __init__(self, urls: tuple[str, ...], timeout: float) -> None:
        self.urls = urls
        self.timeout = seconds(timeout)
        """Default timeout of a call, in seconds."""
        self.cluster = Cluster(urls)
        self.shared = SharedArrays(self.cluster)
        self._begin()
        call_in_forked_child(self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[str, PushNumbers] = {}

    @property
    def url(self) -> str:
        """The first of the given URLs."""
        return self.urls[0]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(self.urls)}>"

    def deadline(self, timeout: float | None, wait_s: float = 0.0, *, default: float | None = None) -> Deadline:
        """Return the deadline `timeout` seconds from now; without one `default`, or the client's, plus `wait_s`."""
        default = self.timeout if default is None else default
        return Deadline.after(default + seconds(wait_s, "wait_s") if timeout is None else timeout)

    def numbers(self, model: str) -> PushNumbers:
        """Return what numbers this client's pushes to a model; a forked child gets its own."""
        with self._lock:
            if model not in self._numbers:
                if len(self._numbers) >= limits.MODELS_MAX:  # the oldest one's model was most likely deleted
                    del self._numbers[next(iter(self._numbers))]
                # Of a sender that has not joined: only ids issued by the scheduler contain a '/'.
                self._numbers[model] = PushNumbers(f"c-{secrets.token_hex(8)}", 1)
            return self._numbers[model]
