"""The cuts of a model: clocks at which all partitions are stored, so that a synchronous model can go back to them."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Cuts:
    """The newest cut of one model, the one that its partitions are storing, and whether another one is wanted."""

    newest: int | None = None
    """Newest clock that every partition has stored."""
    pending: int | None = None
    """Clock that the partitions are storing now."""
    urgent: bool = False
    """The pending one is to be stored outside the budget of snapshots: a shard that is about to stop waits for it."""
    stored_by: set[int] = field(default_factory=set)
    """Partitions that have stored the pending cut."""
    wanted: bool = False
    """The next commit is to be a cut."""
    wanted_now: bool = False
    """Make the current clock a cut without waiting for a commit, because a shard is about to stop."""
    lacks_first: bool = False
    """The sync phase began with values other than the initial ones, and there is no cut to go back to yet."""
    skipped: int = 0
    """Clocks that restores have skipped since the newest cut; who goes back to it has not skipped them."""
    moved: bool = False
    """A partition has moved since the newest cut, so its owner no longer holds that cut for a checkpoint."""
    began_s: float = float("-inf")
    """When the last one began that was not of the first values."""
    ended_s: float = float("-inf")
    """When the last one was complete."""

    @property
    def reached(self) -> int:
        """Newest clock that every partition has stored; -1 if there is none."""
        return -1 if self.newest is None else self.newest

    def begin(self, clock: int, now: float, *, urgent: bool = False) -> None:
        """Have every partition store this clock, which is the current one."""
        self.pending, self.urgent, self.wanted = clock, urgent, False
        if clock:  # a cut of the first values holds none of training up
            self.began_s = now

    def stored(self, index: int, partitions: int, now: float) -> bool:
        """Note that a partition has stored the pending cut; returns whether all `partitions` have it now."""
        self.stored_by.add(index)
        if len(self.stored_by) < partitions:
            return False
        self.newest = self.pending
        if self.newest:  # as in `begin`
            self.ended_s = now
        self.lacks_first = self.moved = False
        self.skipped = 0
        self._end()
        return True

    def give_up(self) -> None:
        """Abandon a pending cut, which may never become complete, and request another one."""
        if self.pending is not None:
            self.wanted = True
            self._end()

    def none_left(self) -> None:
        """Note that there is no cut to go back to: a first one is wanted."""
        self.newest = None
        self.lacks_first = self.wanted = True

    def want_first(self) -> None:
        """Note that a sync phase begins, and wants a first cut; until it is whole, one from before is kept."""
        self.lacks_first, self.wanted = self.newest is None, True

    def leave_sync(self) -> None:
        """Forget all cuts, and want none."""
        self._end()
        self.newest = None
        self.lacks_first = self.wanted = self.wanted_now = False

    def restart_at(self, clock: int) -> None:
        """Keep only cuts up to `clock`, at which a new timeline begins."""
        self._end()
        self.moved, self.began_s, self.ended_s = True, float("-inf"), float("-inf")
        if self.newest is not None and self.newest > clock:
            self.newest = None

    def _end(self) -> None:
        self.pending, self.urgent = None, False
        self.stored_by.clear()
