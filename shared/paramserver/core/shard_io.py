"""Events and effects of the shard's core.

`ShardCore.handle(event, now)` takes one event and returns effects, which the runtime performs in order; their outcome
comes back as new events.  All of them are frozen; big arrays are passed by reference and never written after they were
handed over.  A `request` is a number chosen by the runtime, unique among its open requests.
"""

from paramserver.core.commit import Commit as Commit
from paramserver.core.commit import Contribution as Contribution
from paramserver.core.journal import JournalEntry as JournalEntry
from paramserver.core.partition_state import Capture as Capture
from paramserver.core.partition_state import HeldPart as HeldPart
from paramserver.core.partition_state import LoadedState as LoadedState
from paramserver.core.partition_state import PartitionState as PartitionState
from paramserver.core.shard_effects import Apply as Apply
from paramserver.core.shard_effects import AskWorker as AskWorker
from paramserver.core.shard_effects import AssignTask as AssignTask
from paramserver.core.shard_effects import Effect as Effect
from paramserver.core.shard_effects import Journal as Journal
from paramserver.core.shard_effects import LoadPartition as LoadPartition
from paramserver.core.shard_effects import Outcome as Outcome
from paramserver.core.shard_effects import PartVersion as PartVersion
from paramserver.core.shard_effects import Piece as Piece
from paramserver.core.shard_effects import PullDone as PullDone
from paramserver.core.shard_effects import PulledPart as PulledPart
from paramserver.core.shard_effects import PushDone as PushDone
from paramserver.core.shard_effects import Reply as Reply
from paramserver.core.shard_effects import Report as Report
from paramserver.core.shard_effects import Resync as Resync
from paramserver.core.shard_effects import StoreSnapshot as StoreSnapshot
from paramserver.core.shard_effects import Task as Task
from paramserver.core.shard_effects import UpdateTask as UpdateTask
from paramserver.core.shard_events import Applied as Applied
from paramserver.core.shard_events import AssignPart as AssignPart
from paramserver.core.shard_events import CaptureReceived as CaptureReceived
from paramserver.core.shard_events import CommitDecided as CommitDecided
from paramserver.core.shard_events import Event as Event
from paramserver.core.shard_events import Journaled as Journaled
from paramserver.core.shard_events import JournalLost as JournalLost
from paramserver.core.shard_events import JournalRefused as JournalRefused
from paramserver.core.shard_events import LoadFailed as LoadFailed
from paramserver.core.shard_events import MapChanged as MapChanged
from paramserver.core.shard_events import ModelGone as ModelGone
from paramserver.core.shard_events import ModelView as ModelView
from paramserver.core.shard_events import PartitionLoaded as PartitionLoaded
from paramserver.core.shard_events import PullReceived as PullReceived
from paramserver.core.shard_events import PushPart as PushPart
from paramserver.core.shard_events import PushReceived as PushReceived
from paramserver.core.shard_events import Request as Request
from paramserver.core.shard_events import RequestGone as RequestGone
from paramserver.core.shard_events import RosterChanged as RosterChanged
from paramserver.core.shard_events import SaveAll as SaveAll
from paramserver.core.shard_events import SetReceived as SetReceived
from paramserver.core.shard_events import SnapshotFailed as SnapshotFailed
from paramserver.core.shard_events import SnapshotStored as SnapshotStored
from paramserver.core.shard_events import Source as Source
from paramserver.core.shard_events import StorageChanged as StorageChanged
from paramserver.core.shard_events import TaskResult as TaskResult
from paramserver.core.shard_events import Tick as Tick
from paramserver.core.shard_events import WorkerAnswered as WorkerAnswered
