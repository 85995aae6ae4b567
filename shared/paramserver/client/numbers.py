"""Push numbers of one sender: handed out in order, at most 64 of them in doubt."""

import secrets
import threading
import weakref

from paramserver import limits
from paramserver.client.calls import Call, Deadline, Pause
from paramserver.errors import problem
from paramserver.types import PushId


class PushNumbers:
    """Gives each push its (worker, epoch, seq); safe between threads.

    A number is in doubt from `take` until `settle`, or until nobody holds its id any more: an interrupt may come
    between the two, wherever a call settles it, and who has no id delivers nothing.  A new one is handed out only while
    it lies less than 64 above the oldest in doubt, so the windows of the shards still know every number that may be
    delivered again.
    """

    def __init__(self, worker: str, epoch: int) -> None:
        self.worker, self.epoch = worker, epoch
        self._lock = threading.Lock()
        self._next = 1
        self._in_doubt: dict[int, weakref.ref[PushId]] = {}
        """Oldest first."""

    def take(self, deadline: Deadline) -> Call[PushId]:
        """The next push id; waits while too many are in doubt.  Raises Unavailable at the deadline."""
        while (push_id := self._try()) is None:
            if deadline.left_s() <= 0:
                raise problem("queue_full", f"{limits.WINDOW} pushes of '{self.worker}' are in flight already")
            yield Pause(0.002)
        return push_id

    def settle(self, push_id: PushId) -> None:
        """That push will not be delivered again."""
        with self._lock:
            if push_id.epoch == self.epoch:
                self._in_doubt.pop(push_id.seq, None)

    def renew(self, epoch: int) -> None:
        """Begin a new epoch; what was in doubt is given up."""
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


def private_numbers() -> PushNumbers:
    """Numbers of a sender that joined nothing; its id holds no '/', which only the scheduler gives out."""
    return PushNumbers(f"c-{secrets.token_hex(8)}", 1)
