"""Push ids of one sender, with consecutive sequence numbers; at most 64 are in doubt at a time."""

import threading
import weakref

from paramserver import limits
from paramserver.errors import problem
from paramserver.net.calls import Call, Deadline, Pause
from paramserver.types import PushId


class PushNumbers:
    """Allocates each push its id (worker, epoch, seq).  Safe between threads.

    An id is in doubt from `take` until `settle`, or until it is garbage-collected: an interrupt may prevent a call from
    settling it, but a push whose id no code refers to cannot be sent again.  A new seq is allocated only while it is
    less than 64 above the oldest in doubt, so the shards' anti-replay windows still cover every push that may be sent
    again.
    """

    def __init__(self, worker: str, epoch: int) -> None:
        self.worker, self.epoch = worker, epoch
        self._lock = threading.Lock()
        self._next = 1
        self._in_doubt: dict[int, weakref.ref[PushId]] = {}
        """seq -> id, oldest first."""

    def take(self, deadline: Deadline) -> Call[PushId]:
        """Allocate the next push id, waiting while too many are in doubt.

        Raises Unavailable (`queue_full`) at the deadline.
        """
        while (push_id := self._try()) is None:
            if deadline.left_s() <= 0:
                raise problem("queue_full", f"{limits.WINDOW} pushes of '{self.worker}' are in flight already")
            yield Pause(0.002)
        return push_id

    def settle(self, push_id: PushId) -> None:
        """Release the id: its push will not be sent again."""
        with self._lock:
            if push_id.epoch == self.epoch:
                self._in_doubt.pop(push_id.seq, None)

    def any_in_doubt(self) -> bool:
        """Whether some push may still be sent, or sent again."""
        with self._lock:
            return any(held() is not None for held in self._in_doubt.values())

    def renew(self, epoch: int) -> None:
        """Begin a new epoch; the ids in doubt are dropped."""
        with self._lock:
            self.epoch, self._next = epoch, 1
            self._in_doubt.clear()

    def _try(self) -> PushId | None:
        with self._lock:
            seq = self._next
            while self._in_doubt:
                oldest, held = next(iter(self._in_doubt.items()))
                if held() is not None:
                    if seq - oldest >= limits.WINDOW:
                        return None
                    break
                del self._in_doubt[oldest]
            self._next += 1
            push_id = PushId(self.worker, self.epoch, seq)
            self._in_doubt[seq] = weakref.ref(push_id)
            return push_id
