"""The bounds that users meet or several parts share: the most that a node accepts, keeps or waits for.

Others are beside their use.  A queue, buffer, window or wait without a bound is a bug.  Units are in the names.
"""

from typing import Final

MIB: Final = 1 << 20

# Bounds of one request.
BODY_BYTES_MAX: Final = 1 << 30
"""Largest body of a frame, which carries one shard's whole slice of a model; also the most that a shard collects from
others for a pull by frame."""
NAMED_BODY_BYTES_MAX: Final = 64 * MIB
"""Largest msgpack body of the name-level routes."""
NPY_BODY_BYTES_MAX: Final = 64 * MIB + 16 * 1024
"""Largest `.npy` body: a parameter, or the part of it in one partition, and the header."""
JSON_BODY_BYTES_MAX: Final = 8 * MIB
"""Largest JSON body of the name-level routes; parsing it blocks the event loop."""
CONTROL_BODY_BYTES_MAX: Final = 4 * MIB
"""Largest body of a control route (models, workers, runs, ...)."""
SHARD_HEARTBEAT_BYTES_MAX: Final = 16 * MIB
"""Largest heartbeat of a shard: of 150,000 partitions or more, beyond what a leader can check every second."""
CONTROL_BODIES_BYTES_MAX: Final = 256 * MIB
"""Bytes of large bodies of control routes that one scheduler reads at once; half of that per client address."""
PAGE_BYTES_MAX: Final = 4 * MIB
"""Size of one page of a list, as encoding it blocks the event loop; a page has at least one item."""
FRAME_HEADER_BYTES_MAX: Final = 1 * MIB
MSGPACK_DEPTH_MAX: Final = 8
MSGPACK_CONTAINER_MAX: Final = 4096
MSGPACK_ITEMS_MAX: Final = 1 << 17
"""Values in one msgpack body; a tensor counts as one value, whatever its size."""
JSON_DEPTH_MAX: Final = 32
FIELDS_MAX: Final = 4096
"""Fields of one JSON object whose keys the API defines, so that each is checked by itself."""
ERRORS_FOUND_MAX: Final = 1024
"""Errors in one request after which validation stops."""
ERRORS_LISTED_MAX: Final = 32
"""Errors that one reply lists; it only counts the others."""
HINTS_MAX: Final = 3
"""Wrong names in one request for which the nearest known one is searched, which takes 0.1 s among 4,096."""
PATTERN_TESTS_MAX: Final = 1 << 18
"""Comparisons of a name with a pattern in one request, over all its patterns."""
PATTERNS_MAX: Final = 256
"""Patterns of names in one request."""
PATTERN_CHARACTERS_MAX: Final = 8192
"""Characters of all of them: a regular expression is compiled of each, which takes about 10 us a character."""
CHUNK_BYTES: Final = 1 * MIB
"""Size of the chunks in which responses are written."""
SEND_BUFFER_BYTES: Final = 384 * 1024
"""Send buffer requested towards the same machine; Linux doubles it, up to a limit that is 416 KiB by default."""
RECEIVE_LOW_WATER_BYTES: Final = MIB // 4
"""Low-water mark for reading bodies, as wakeups are costly; below the send buffer, or both ends would stall."""

# Bounds of a model.
PARAM_NAME_BYTES_MAX: Final = 256
PARAMS_PER_MODEL_MAX: Final = 4096
NDIM_MAX: Final = 8
"""Largest number of dimensions of a parameter."""
PARTITIONS_MAX: Final = 4096
PARTITION_BYTES_MAX: Final = 64 * MIB
PARTITION_BYTES_DEFAULT: Final = 4 * MIB
PARTITIONS_SMALL: Final = 4
PARTITION_BYTES_SMALL: Final = MIB // 2
"""By default a model is cut at this size, into at most `PARTITIONS_SMALL`; into more, at `PARTITION_BYTES_DEFAULT`."""
MODELS_MAX: Final = 1024
MODEL_ELEMENTS_MAX: Final = 1 << 36
RANGES_PER_REQUEST_MAX: Final = 32_768
"""Ranges that one request may name, so that they are half of the longest header of a frame."""
VERSION_MAX: Final = 1 << 52
"""Highest version that a checkpoint may restore a partition to; leaves room for all updates after it."""

# Push ids.
WINDOW: Final = 64
"""Width of the push window of a (worker, epoch), in seqs; also the most pushes that a client may have in doubt."""
IDEMPOTENCY_KEYS_MAX: Final = 1024
"""`Idempotency-Key` values that each partition remembers; the oldest are forgotten first."""
IDEMPOTENCY_KEY_BYTES_MAX: Final = 256
WORKER_NAME_BYTES_MAX: Final = 128
BARE_NAME_BYTES_MAX: Final = WORKER_NAME_BYTES_MAX - 65
"""Length of the name, without '/', under which a worker joins: the model's name and a '/' go before it."""
WORKERS_PER_MODEL_MAX: Final = 4096
SHARDS_MAX: Final = 1024
SHARD_NAMES_MAX: Final = 4096
"""Shard names that a scheduler remembers, including dead ones; of forgotten ones only the highest epoch is kept."""
SHARD_LEFT_LISTED_S: Final = 60.0
"""How long a shard that left cleanly stays listed."""
SHARD_DEAD_LISTED_S: Final = 3600.0
"""How long a dead shard stays listed."""

# What one shard holds.
QUEUED_REQUESTS_MAX: Final = 4096
"""Pushes and pulls that wait in one shard (for a busy partition, a load or a version); also the requests in flight in
one shard, and those with a large body in one scheduler."""
STAGED_BYTES_MAX: Final = 4 << 30
"""Bytes of staged and buffered gradients in one shard; and no more than half of its memory limit."""
CLOCKS_AHEAD_MAX: Final = 4096
"""sync: how many clocks beyond the open one a worker may push for or report."""
CLOCKS_AT_ONCE_MAX: Final = 1 << 40
"""Outside sync: how many clocks a worker may report at once; its number of iterations since the last report is less."""
CONNECTIONS_MAX: Final = 16384
"""Connections to one node, including idle ones; further ones are closed at once."""
CLIENT_CONNECTIONS_MAX: Final = CONNECTIONS_MAX // 2
"""Those of them from one address."""
CLIENT_REQUESTS_MAX: Final = 1024
"""Those in flight in one shard, or with a large body in one scheduler, per client address."""
RECEIVING_BYTES_MAX: Final = 2 << 30
"""Bytes of request bodies in flight in one shard, of what they unpack to, of answers by name, and of values collected
from other shards; less if its memory is small, and half of that per client address."""
JOURNAL_QUEUE_BYTES_MAX: Final = 256 * MIB
"""Bytes of journal entries in one shard that are not durable yet; above it, pushes that need the journal get 503."""
JOURNAL_GROUP_BYTES: Final = 64 * MIB
"""Bytes of journal entries in one write to Redis; entries that arrive meanwhile go with the next write."""
JOURNAL_SCRIPT_BYTES: Final = 8 * MIB
"""Bytes of journal entries after which a write continues in another script, as Redis is blocked while one runs."""
MOVES_AT_ONCE: Final = 4
"""Partitions that one shard hands over or takes over at the same time."""
STORE_PACE_BYTES_PER_S: Final = MIB // 2
"""Lowest rate at which partitions are stored in Redis and loaded; it only bounds the wait for a silent Redis."""
MOVE_S: Final = 30.0
"""Timeout of a move, besides the time for the bytes: the owner keeps the partition, which stays for as long."""
BALANCE_INTERVAL_S: Final = 10.0
"""Interval between comparisons of load, once bytes are balanced."""
PATIENCE_S: Final = 15.0
"""How far a request body, or the reader of a response, may lag behind `PACE_BYTES_PER_S` before it is cut off."""
PACE_BYTES_PER_S: Final = 64 << 10
"""Lowest average rate at which a request body must arrive and a response must be read."""
SHARED_BYTES_MAX: Final = 16 << 30
"""Shared memory of one shard; also at most four fifths of what its file system has free at start."""
LEASES_MAX: Final = 4096
"""Shared-memory leases held by the clients of one shard."""
LEASED_BYTES_MAX: Final = 8 << 30
"""Bytes of partition versions that leases cover; beyond it, pulls are answered with bodies."""
SLOT_BYTES_MAX: Final = 2 << 30
"""Bytes of shared-memory slots that one shard lends for pushes."""
POOL_KEPT_BYTES_MAX: Final = 512 * MIB
"""Free memory that one shard keeps for reuse: so much for its own buffers, and as much for slots."""
JSON_ELEMENTS_MAX: Final = 1 << 18
"""Numbers in one JSON answer or push, which take about 0.1 s; msgpack and frames are for more."""

# Time.
HEARTBEAT_S: Final = 1.0
LEASE_S: Final = 5.0
"""A node or worker that has not been heard of for this long is dead."""
ALL_SILENT_S: Final = 15.0
"""The same for shards while the scheduler hears of none at all: it may be cut off itself."""
WORKER_LEASE_S_MAX: Final = 3600.0
"""Longest lease that a worker may ask for (say, a person with curl); barriers wait for it that long."""
LEADER_LEASE_S: Final = 3.0
"""A leader that has not renewed its lease in Redis for this long may be replaced."""
SHARED_LEASE_S: Final = 15.0
"""How long a client may hold a lease or an idle slot in shared memory."""
LATE_JOIN_S: Final = 30.0
"""How long after a join that was asked for more than once a request of it may still arrive: a higher epoch may be the
member's own until then."""
SERVE_WITHOUT_CONTACT_S: Final = 3.0
STOP_S: Final = 25.0
"""Default of `stop_s`: how long a shard that is told to stop may take to hand over or store everything, and to end."""
WAIT_S_MAX: Final = 60.0
"""Longest `wait_s` of a long poll."""
CLIENT_TIMEOUT_S: Final = 30.0
UPLOAD_TOKEN_S: Final = 60.0
SNAPSHOT_INTERVAL_S: Final = 5.0
SNAPSHOT_JOURNAL_BYTES: Final = 64 * MIB
"""Journal bytes after which a partition is snapshotted before the interval is over."""
JOURNAL_WAIT_S: Final = 10.0
"""Longest time a reply waits for its push to be durable; then it is a 503 and the push is in doubt."""
SNAPSHOT_BLOCK_BYTES: Final = 4 * MIB
CHECKPOINT_INTERVAL_MIN: Final = 10.0
REDIS_NEARLY_FULL: Final = 0.9
"""Share of the `maxmemory` of Redis in use from which that is a problem: once it is full, nothing is stored."""

# Authentication.
TOKENS_KNOWN_MAX: Final = 1024
"""Verified tokens that a node caches, so that it need not compute their MAC again."""

# What the scheduler keeps.
METRIC_POINTS_MAX: Final = 10_000
"""Points of one metric's time series; the oldest are dropped first."""
METRIC_POINTS_STORED: Final = 500
"""Newest points of each series that survive a restart of the scheduler."""
METRICS_STORE_INTERVAL_S: Final = 10.0
METRIC_NAMES_MAX: Final = 64
METRIC_POINTS_AT_ONCE_MAX: Final = 64
"""Clocks whose metrics one heartbeat reports."""
TASKS_PER_DATASET_MAX: Final = 100_000
TASKS_MAX: Final = 1_000_000
"""Ranges of all datasets of all models: 130 MB in the scheduler, created by requests of only 60 bytes each."""
WORKER_STATES_MAX: Final = 256 * MIB
"""Size of the states that all workers store for their next incarnations: characters of text, and 16 for each value."""
RUNS_KEPT_MAX: Final = 200
EVENT_STREAMS_MAX: Final = 256
"""Open streams of `GET /events` of one scheduler, which encodes every change for each of them."""
WAITERS_MAX: Final = 8192
"""Long polls that one scheduler holds open."""
STATUS_EVENTS_MAX: Final = 500
"""Recent events that `GET /status/events` can return."""
STATUS_SERIES_MAX: Final = 2048
"""Time series kept for the status page; 27 KiB each."""
STATUS_POINTS_MAX: Final = 2000
"""Points of one series in an answer."""
STATUS_SPAN_S_MAX: Final = 30 * 86400.0
"""How far back a series can be queried."""
STATUS_METRICS_MAX: Final = 32
"""Metrics that one query may name."""
STATUS_STREAMS_MAX: Final = 64
"""Open status streams (one per open page) of one scheduler."""
