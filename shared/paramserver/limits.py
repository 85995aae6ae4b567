"""Every bound in one place: what a node accepts, keeps or waits for at most.

A queue, buffer, window or loop without an entry here is a bug.  Units are in the names.
"""

from typing import Final

MIB: Final = 1 << 20

# What one request may be.
BODY_BYTES_MAX: Final = 1 << 30
"""Largest body of a direct frame; a whole shard's slice of a model travels in one."""
NAMED_BODY_BYTES_MAX: Final = 64 * MIB
"""Largest msgpack or `.npy` body of the name-level routes."""
JSON_BODY_BYTES_MAX: Final = 8 * MIB
"""Largest JSON body of theirs: nothing else is done while it is parsed."""
CONTROL_BODY_BYTES_MAX: Final = 4 * MIB
"""Largest body of a control route (models, workers, runs, ...)."""
FRAME_HEADER_BYTES_MAX: Final = 1 * MIB
MSGPACK_DEPTH_MAX: Final = 8
MSGPACK_CONTAINER_MAX: Final = 4096
MSGPACK_ITEMS_MAX: Final = 1 << 17
"""Values in one msgpack body; numbers of a tensor are one value together."""
JSON_DEPTH_MAX: Final = 32
FIELDS_MAX: Final = 4096
"""Fields of one JSON object that are named by the interface, and so are told apart one by one."""
ERRORS_FOUND_MAX: Final = 1024
"""Wrong parts of one request after which nobody looks for more."""
ERRORS_LISTED_MAX: Final = 32
"""Wrong parts that one refusal lists; of more it says how many."""
HINTS_MAX: Final = 3
"""Wrong names in one request for which the nearest known one is looked for: among 4,096 that takes 0.1 s."""
PATTERN_TESTS_MAX: Final = 1 << 18
"""Names that the patterns of one request are compared with, all patterns together."""
CHUNK_BYTES: Final = 1 * MIB
"""Size of the pieces in which responses are written."""
SEND_BUFFER_BYTES: Final = 384 * 1024
"""Asked of the kernel for what is sent to the same machine; Linux keeps twice as much, or 416 KiB by default."""
WAITED_BYTES: Final = MIB // 4
"""A body's reader is woken for no less: to be woken is dear.  That buffer holds more, else both would wait."""

# What a model may be.
PARAM_NAME_BYTES_MAX: Final = 256
PARAMS_PER_MODEL_MAX: Final = 4096
RANK_MAX: Final = 8
"""Largest number of dimensions of a parameter."""
PARTITIONS_MAX: Final = 4096
PARTITION_BYTES_MAX: Final = 64 * MIB
PARTITION_BYTES_DEFAULT: Final = 4 * MIB
PARTITIONS_SMALL: Final = 4
PARTITION_BYTES_SMALL: Final = MIB // 2
"""By default a model is cut by this into at most `PARTITIONS_SMALL`, and into more by `PARTITION_BYTES_DEFAULT`."""
MODELS_MAX: Final = 1024
MODEL_ELEMENTS_MAX: Final = 1 << 36
RANGES_PER_PUSH_MAX: Final = 4096
VERSION_MAX: Final = 1 << 52
"""The greatest version at which a checkpoint may have a partition go on: beyond it there is room for all updates."""

# Push ids.
WINDOW: Final = 64
"""Sequence numbers remembered behind the highest one of a (worker, epoch), and kept in doubt by a client at most."""
IDEMPOTENCY_KEYS_MAX: Final = 1024
"""`Idempotency-Key` values each partition remembers, oldest forgotten first."""
IDEMPOTENCY_KEY_BYTES_MAX: Final = 256
WORKER_NAME_BYTES_MAX: Final = 128
WORKERS_PER_MODEL_MAX: Final = 4096
SHARDS_MAX: Final = 1024
SHARD_NAMES_MAX: Final = 4096
"""Names of shards that a scheduler remembers, those that are gone too; of more only the highest epoch is kept."""
SHARD_LEFT_LISTED_S: Final = 60.0
"""How long a shard that has said goodbye stays in lists."""
SHARD_DEAD_LISTED_S: Final = 3600.0
"""How long a shard that has died stays in lists."""

# What a shard keeps for others.
QUEUED_REQUESTS_MAX: Final = 4096
"""Pushes and pulls that wait in one shard (for a busy partition, a load, a version)."""
STAGED_BYTES_MAX: Final = 4 << 30
"""Bytes of staged and buffered gradients in one shard."""
CLOCKS_AHEAD_MAX: Final = 4096
"""Clocks that a worker may push for, or report, beyond the one that is open in sync."""
CONNECTIONS_MAX: Final = 16384
"""Connections to one shard, idle ones too; a further one is hung up on."""
CLIENT_REQUESTS_MAX: Final = 1024
"""Requests of one address that are in flight in one shard."""
RECEIVING_BYTES_MAX: Final = 2 << 30
"""Bytes of request bodies that are in flight in one shard; less where memory is short, half of it for one address."""
JOURNAL_QUEUE_BYTES_MAX: Final = 256 * MIB
"""Bytes of journal entries in one shard that are not durable yet; above it pushes that need the journal get 503."""
JOURNAL_GROUP_BYTES: Final = 64 * MIB
"""Journal entries that one write to Redis carries at most; what has come meanwhile goes with the next."""
JOURNAL_SCRIPT_BYTES: Final = 8 * MIB
"""Journal entries after which a write goes on in another script: Redis does nothing else while one runs."""
MOVES_AT_ONCE: Final = 4
"""Partitions that one shard hands over or takes over at one time."""
MOVE_S: Final = 30.0
"""An owner that has not handed a partition over by then keeps it, and is not asked again for as long."""
BALANCE_INTERVAL_S: Final = 10.0
"""How often loads are compared, once bytes are level."""
PATIENCE_S: Final = 15.0
"""How long a body, or a reader of an answer, may lag behind its pace before it is cut off."""
PACE_BYTES_PER_S: Final = 64 << 10
"""The least that a request's body must bring, on the whole."""
SHARED_BYTES_MAX: Final = 16 << 30
"""Shared memory that one shard takes at most; also at most four fifths of what its file system has free."""
LEASES_MAX: Final = 4096
"""Pulls through shared memory that clients of one shard hold at one time."""
LEASED_BYTES_MAX: Final = 8 << 30
"""Bytes of versions that they cover; beyond it pulls travel over HTTP."""
SLOT_BYTES_MAX: Final = 2 << 30
"""Bytes of slots that one shard lends for pushes."""
POOL_KEPT_BYTES_MAX: Final = 512 * MIB
"""Free buffer memory that one shard keeps for reuse."""
JSON_ELEMENTS_MAX: Final = 1 << 18
"""Numbers that one JSON answer, or push, holds at most: a tenth of a second or so; msgpack and frames are for more."""

# Time.
HEARTBEAT_S: Final = 1.0
LEASE_S: Final = 5.0
"""A node or worker that has not been heard of for so long is dead."""
WORKER_LEASE_S_MAX: Final = 3600.0
"""Longest lease that a worker may ask for (a person with curl); barriers wait for it that long."""
LEADER_LEASE_S: Final = 3.0
"""A leading scheduler that has not renewed its lease in Redis for so long may be replaced."""
SHARED_LEASE_S: Final = 15.0
"""How long a client may hold a pull or an idle slot in shared memory."""
SERVE_WITHOUT_CONTACT_S: Final = 3.0
WAIT_S_MAX: Final = 60.0
"""Longest `wait_s` of a long poll."""
CLIENT_TIMEOUT_S: Final = 30.0
UPLOAD_TOKEN_S: Final = 60.0
SNAPSHOT_INTERVAL_S: Final = 5.0
SNAPSHOT_JOURNAL_BYTES: Final = 64 * MIB
"""After so much journal a partition is snapshotted before the interval is over."""
JOURNAL_WAIT_S: Final = 10.0
"""Longest time a reply waits for its push to be durable; then it is 503, and the push in doubt."""
SNAPSHOT_BLOCK_BYTES: Final = 4 * MIB
SNAPSHOT_BYTES_PER_S: Final = 64 * MIB
CHECKPOINT_INTERVAL_MIN: Final = 10.0

# Who comes in.
TOKENS_KNOWN_MAX: Final = 1024
"""Tokens that a node has seen and need not be computed again."""

# What the scheduler keeps.
METRIC_POINTS_MAX: Final = 10_000
"""Points of one metric's time series; the oldest go first."""
METRIC_POINTS_STORED: Final = 500
"""Newest points of each series that a restarted scheduler still has."""
METRICS_STORE_INTERVAL_S: Final = 10.0
METRIC_NAMES_MAX: Final = 64
TASKS_PER_DATASET_MAX: Final = 100_000
TASKS_MAX: Final = 1_000_000
"""Ranges of all datasets of all models; 130 MB in the scheduler, for requests of 60 bytes each."""
RUNS_KEPT_MAX: Final = 200
WAITERS_MAX: Final = 8192
"""Long polls that one scheduler holds open."""
STATUS_EVENTS_MAX: Final = 500
"""Events of the recent past that `GET /status/events` can tell."""
STATUS_SERIES_MAX: Final = 2048
"""Series of numbers over time; 27 KiB each."""
STATUS_POINTS_MAX: Final = 2000
"""Points of one series in an answer."""
STATUS_SPAN_S_MAX: Final = 30 * 86400.0
"""How far back a series can be asked for."""
STATUS_METRICS_MAX: Final = 32
"""Metrics that one request may name."""
STATUS_STREAMS_MAX: Final = 64
"""Status streams (open pages) of one scheduler."""
