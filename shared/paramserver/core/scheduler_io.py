"""Events and effects of the scheduler's core.

`SchedulerCore.handle(event, now)` returns a list of effects, which the runtime performs in order: at most one `Store`,
then everything that may become visible only once that has succeeded.  So nobody outside ever learns of a commit, an
epoch or an owner that a restarted scheduler would not know.  Only a `Reply` with `waits=False` (to most
heartbeats, a refusal) comes before them and waits for no store: it reveals nothing that is not stored yet.

An event with a `request` is answered by exactly one `Reply` with the same number, at once or later (long polls), unless
`RequestGone` came first.  Values are plain JSON as received; the core checks them and refuses with a `PsError`.  Times
are in seconds; `now` is monotonic.  GET routes read from `SchedulerCore.read` (`core.reading`) instead.
"""

from typing import TypeAlias

from msgspec import Struct

from paramserver.core.model_events import CheckpointFailed as CheckpointFailed
from paramserver.core.model_events import CheckpointWritten as CheckpointWritten
from paramserver.core.model_events import CreateModel as CreateModel
from paramserver.core.model_events import DeleteCheckpoint as DeleteCheckpoint
from paramserver.core.model_events import DeleteModel as DeleteModel
from paramserver.core.model_events import FilesLoaded as FilesLoaded
from paramserver.core.model_events import ModelForgotten as ModelForgotten
from paramserver.core.model_events import ModelRestored as ModelRestored
from paramserver.core.model_events import ParameterUploaded as ParameterUploaded
from paramserver.core.model_events import PatchModel as PatchModel
from paramserver.core.model_events import RequestCheckpoint as RequestCheckpoint
from paramserver.core.model_events import RestoreFinished as RestoreFinished
from paramserver.core.model_events import StartRestore as StartRestore
from paramserver.core.node_events import JoinShard as JoinShard
from paramserver.core.node_events import LeaveShard as LeaveShard
from paramserver.core.node_events import OpenFeed as OpenFeed
from paramserver.core.node_events import RedisEmptied as RedisEmptied
from paramserver.core.node_events import SetShardState as SetShardState
from paramserver.core.node_events import ShardHeartbeat as ShardHeartbeat
from paramserver.core.node_events import StorageChanged as StorageChanged
from paramserver.core.run_events import CreateRun as CreateRun
from paramserver.core.run_events import JoinPool as JoinPool
from paramserver.core.run_events import LeavePool as LeavePool
from paramserver.core.run_events import PatchRun as PatchRun
from paramserver.core.run_events import PlaceDone as PlaceDone
from paramserver.core.run_events import PoolHeartbeat as PoolHeartbeat
from paramserver.core.scheduler_effects import ForgetModel as ForgetModel
from paramserver.core.scheduler_effects import ForgetOthers as ForgetOthers
from paramserver.core.scheduler_effects import LoadFiles as LoadFiles
from paramserver.core.scheduler_effects import Publish as Publish
from paramserver.core.scheduler_effects import RemoveCheckpoint as RemoveCheckpoint
from paramserver.core.scheduler_effects import Reply as Reply
from paramserver.core.scheduler_effects import Store as Store
from paramserver.core.scheduler_effects import WriteCheckpoint as WriteCheckpoint
from paramserver.core.worker_events import ClockStaged as ClockStaged
from paramserver.core.worker_events import DrainWorker as DrainWorker
from paramserver.core.worker_events import JoinWorker as JoinWorker
from paramserver.core.worker_events import LeaseTask as LeaseTask
from paramserver.core.worker_events import LeaveWorker as LeaveWorker
from paramserver.core.worker_events import RegisterDataset as RegisterDataset
from paramserver.core.worker_events import ReportClock as ReportClock
from paramserver.core.worker_events import ReportMetrics as ReportMetrics
from paramserver.core.worker_events import RequestEvaluation as RequestEvaluation
from paramserver.core.worker_events import TaskDone as TaskDone
from paramserver.core.worker_events import WorkerHeartbeat as WorkerHeartbeat


class RequestGone(Struct, frozen=True):
    """The client of a parked request has disconnected; it gets no `Reply`."""

    request: int


class Tick(Struct, frozen=True):
    """Time has passed.  Sent whenever `SchedulerCore.deadline()` is reached, and at least once a second."""


class ClockStepped(Struct, frozen=True):
    """The clock of this machine was set, or the machine has slept: Unix time is `now` plus this from here on."""

    wall_offset_s: float


Event: TypeAlias = (
    JoinShard | ShardHeartbeat | LeaveShard | SetShardState | OpenFeed | RedisEmptied | StorageChanged | CreateModel
    | PatchModel | DeleteModel | ParameterUploaded | FilesLoaded | StartRestore | RestoreFinished | DeleteCheckpoint
    | ModelRestored | JoinWorker
    | WorkerHeartbeat | LeaveWorker | DrainWorker | ClockStaged | ReportClock | ReportMetrics | RegisterDataset
    | LeaseTask | TaskDone | RequestEvaluation | RequestCheckpoint | CheckpointWritten | CheckpointFailed | CreateRun
    | PatchRun | JoinPool | PoolHeartbeat | LeavePool | PlaceDone | ModelForgotten | RequestGone | Tick | ClockStepped
)  # fmt: skip

Effect: TypeAlias = (
    Store | Publish | Reply | LoadFiles | WriteCheckpoint | RemoveCheckpoint | ForgetModel | ForgetOthers
)
