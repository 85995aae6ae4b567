"""What the routes of a leader use."""

from dataclasses import dataclass, field
from time import monotonic

from paramserver.core.scheduler.reading import Reading
from paramserver_node.forward import Forwarder
from paramserver_scheduler.history import History
from paramserver_scheduler.jobs import Jobs
from paramserver_scheduler.large_bodies import LargeBodies
from paramserver_scheduler.leadership import Leadership
from paramserver_scheduler.lease import Lease
from paramserver_scheduler.redis_file import RedisFile
from paramserver_scheduler.redis_memory import RedisMemory
from paramserver_scheduler.runtime import Runtime
from paramserver_scheduler.status_broadcast import StatusBroadcast


@dataclass(frozen=True, slots=True)
class Service:
    """Stored in `app.state.service` while this scheduler leads."""

    runtime: Runtime
    leadership: Leadership
    jobs: Jobs
    forwarder: Forwarder
    history: History
    lease: Lease
    started_s: float
    """When this scheduler began to lead; monotonic."""
    broadcast: StatusBroadcast = field(default_factory=StatusBroadcast)
    """The source of the status streams."""
    large_bodies: LargeBodies = field(default_factory=LargeBodies)
    redis_memory: RedisMemory = field(default_factory=RedisMemory)
    redis_file: RedisFile = field(default_factory=RedisFile)

    @property
    def url(self) -> str:
        """URL under which others reach this scheduler."""
        return self.lease.url

    @property
    def read(self) -> Reading:
        """The core's current state as JSON documents."""
        return self.runtime.core.read

    @property
    def now(self) -> float:
        """The core's time, in monotonic seconds."""
        return monotonic()
