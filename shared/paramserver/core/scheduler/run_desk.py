"""Runs and the worker pool: which member works at which place, and when a run ends."""

import re
from collections.abc import Mapping
from math import isfinite
from typing import Any, Final

from paramserver import limits
from paramserver.core.fields import check_name
from paramserver.core.scheduler.cluster import Cluster
from paramserver.core.scheduler.io import CreateRun, JoinPool, LeavePool, PatchRun, PlaceDone, PoolHeartbeat
from paramserver.core.scheduler.membership import Member, current, expired
from paramserver.core.scheduler.models import Model
from paramserver.core.scheduler.runs import (
    DEATHS_MAX,
    RESTARTS_MAX,
    SOON_S,
    STEADY_S,
    Place,
    Run,
    StopRule,
    check_run,
    how_to_start,
    is_allowed,
)
from paramserver.core.scheduler.series import check_metrics
from paramserver.errors import problem, validating

SAVE_TIME_S: Final = 15.0
"""Interval between stores of a run's running time: the most of it that a killed scheduler loses."""
MEMBERS_MAX: Final = 4096
ERROR_CHARS: Final = 200
"""Characters of an exception that is shown in one line."""
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters, apart from tab and newline: a terminal that shows a worker's traceback would obey them."""


class RunDesk:
    """Handles run and pool events."""

    def __init__(self, cluster: Cluster) -> None:
        self.c = cluster

    # --- runs ---

    def create(self, e: CreateRun, now: float) -> None:
        with validating():
            check_run(e.entry, e.workers, e.args, e.evaluate_every, e.checkpoint_every)
            stop = StopRule.check(e.stop)
        if e.name is not None:
            check_name(e.name)
        model = self.c.model(e.model)
        if (busy := self.of_model(model)) is not None:
            what = f"run '{busy.id}' is training model '{e.model}'"
            raise problem("conflict", what, hint="stop it first", run=busy.id)
        self.c.run_count += 1
        if model.name == f"run-{self.c.run_count}":
            self.c.run_count += 1  # else the ids of its other workers would be those of the run's
        self.c.save_cluster()
        id_ = f"run-{self.c.run_count}"
        run = Run(
            id_,
            e.name or id_,
            e.model,
            e.entry,
            dict(e.args),
            stop,
            [Place() for _ in range(e.workers)],
            now + self.c.wall_offset_s,
            e.evaluate_every,
            e.checkpoint_every,
            from_clock=model.gate.first_clock,
            counted_s=now,
            saved_s=now,
        )
        self.c.runs[id_] = run
        self._forget_runs()
        self.fill(now)
        self._save(run)
        self.c.answer(e.request, run.document(), 201)

    def _forget_runs(self) -> None:
        """Forget ended runs beyond the bound, oldest first, with what their workers have stored.

        One in which a member still has a place is kept, because heartbeat replies describe it.
        """
        held = {m.place[0] for m in self.c.members.values() if m.place is not None}
        ended = [r for r in self.c.runs.values() if r.ended and r.id not in held]
        for old in ended[: max(0, len(self.c.runs) - limits.RUNS_KEPT_MAX)]:
            del self.c.runs[old.id]
            self.c.drop(f"run:{old.id}")
            self._forget_states(old)

    def _forget_states(self, run: Run) -> None:
        """Forget the states of an ended run's dead workers, which all checkpoints of the model would go on to have.

        They are for the next incarnation of a worker, and nobody joins under a name of this run any more.
        """
        model = self.c.models.get(run.model)
        if model is None:
            return
        for worker in model.roster:
            if worker.name.startswith(f"{run.id}/") and not worker.alive and worker.state is not None:
                worker.keep(None)
                self.c.save_worker(model, worker)

    def patch(self, e: PatchRun, now: float) -> None:
        run = self.c.run(e.run)
        if e.state is not None and e.state not in ("paused", "running", "stopped"):
            raise problem("invalid_field", "state: must be paused, running or stopped", where="state")
        with validating():
            if e.workers is not None:
                check_run(run.entry, e.workers, {}, 0, 0)
            stop = StopRule.check(e.stop) if e.stop is not None else run.stop
        if run.ended and (e.state != run.state or e.workers is not None or e.stop is not None):
            raise problem("conflict", f"run '{run.id}' has already ended ({run.state})", hint="create a new run")
        run.stop = stop
        if e.workers is not None:
            del run.places[e.workers :]
            run.places += [Place() for _ in range(e.workers - len(run.places))]
        if e.state == "paused" and run.active:
            run.change("paused", now, "paused by request")
        elif e.state == "running" and run.state == "paused":
            run.change("waiting", now)
        elif e.state == "stopped" and not run.ended:
            self.end(run, "stopped", "stopped by request", now)
        self._finish_if_done(run, now)
        self.fill(now)
        self._save(run)
        self.c.answer(e.request, run.document())

    def end(self, run: Run, state: str, reason: str, now: float) -> None:
        """End the run; its workers learn this from their heartbeats and then give up their places."""
        run.change(state, now, reason)
        self.c.runs_ended[state] += 1
        self._save(run)

    def _save(self, run: Run) -> None:
        self.c.save_run(run)
        model = self.c.models.get(run.model)
        if model is not None:
            self.c.mark_dirty(model)

    def of_model(self, model: Model) -> Run | None:
        """The run that is training the model; None if there is none."""
        return next((r for r in self.c.runs.values() if r.model == model.name and not r.ended), None)

    def worker_state(self, model: Model, worker: str) -> str:
        """What a worker of the model is asked to be by its run: `active`, `paused` or `stop`; `active` if in no run."""
        run_id, _, place = worker.partition("/w")
        run = self.c.runs.get(run_id)
        if run is None or run.model != model.name:
            return "active"
        gone = place.isascii() and place.isdigit() and int(place[:9]) >= len(run.places)
        if run.ended or gone:
            return "stop"
        return "paused" if run.state == "paused" else "active"

    def watch(self, model: Model, now: float) -> None:
        """End the model's run once its limit of clocks or minutes is reached; until then, store its running time."""
        run = self.of_model(model)
        if run is None:
            return
        run.count_time(now)
        if run.active and run.awaited != model.gate.missing(model.roster):
            self.fill(now)
        if run.state == "waiting" and not run.ran_s:  # workers of the last run may still be finishing their steps
            run.from_clock = model.gate.first_clock
        clocks = model.gate.first_clock - run.from_clock
        if run.stop.clocks is not None and clocks >= run.stop.clocks:
            self.end(run, "finished", f"the limit of {run.stop.clocks} clocks was reached", now)
        elif run.stop.minutes is not None and run.ran_s >= 60.0 * run.stop.minutes:
            self.end(run, "finished", f"the limit of {run.stop.minutes:g} minutes was reached", now)
        elif run.state == "running" and now - run.saved_s >= SAVE_TIME_S:
            run.saved_s = now
            self.c.save_run(run)

    def check_stop_rule(self, model: Model, worker: str, metrics: Mapping[str, float], now: float) -> None:
        """End the model's run if one of these metrics reaches its bound.

        Workers of the last run, which go on until they have heard of its end, end no other one.
        """
        run = self.of_model(model)
        if run is None or run.state not in ("running", "paused") or self.worker_state(model, worker) == "stop":
            return
        for name, value in metrics.items():
            why = run.stop.met_by(name, value)
            if why is not None:
                self.end(run, "finished", why, now)
                return

    def model_gone(self, name: str, now: float) -> None:
        """Stop the runs of a deleted model."""
        for run in self.c.runs.values():
            if run.model == name and not run.ended:
                self.end(run, "stopped", f"model '{name}' was deleted", now)

    # --- the pool ---

    def join(self, e: JoinPool, now: float) -> None:
        if e.name is not None:
            check_name(e.name)
        if len(e.allow) > 64 or not all(isinstance(p, str) and 0 < len(p) <= 256 and p.isprintable() for p in e.allow):
            raise problem("invalid_field", "allow: must be a list of module prefixes", where="allow")
        name = e.name
        while name is None:
            self.c.member_count += 1
            self.c.save_cluster()
            name = None if f"pool-{self.c.member_count}" in self.c.members else f"pool-{self.c.member_count}"
        old = self.c.members.get(name)
        if old is None and len(self.c.members) >= MEMBERS_MAX:
            raise problem("too_many_requests", f"the pool has {MEMBERS_MAX} members, which is the limit")
        if old is not None:
            self.count_death(old, now)
            self.remove_member(old, now)
        member = Member(name, 1 + (old.epoch if old else self.c.member_floor), now, allow=tuple(e.allow))
        self.c.members[name] = member
        self.c.save_member(member)
        if old is not None and old.lost is not None:
            self._give_back(member, *old.lost, now)
        self.fill(now)
        self.c.answer(e.request, {"member": name, "epoch": member.epoch, "lease_s": limits.LEASE_S}, 201)

    def heartbeat(self, e: PoolHeartbeat, now: float) -> None:
        member = current(self.c.members.get(e.member), e.epoch, f"pool member {e.member!r:.140}", "unknown_worker")
        with validating():
            metrics = check_metrics({} if e.metrics is None else e.metrics)
        member.heard_s = now
        member.metrics = {name: value for name, value in metrics.items() if isfinite(value)}
        self.c.answer(e.request, self.assignment(member))

    def assignment(self, member: Member) -> dict[str, Any]:
        """What the member is to do: the body of its heartbeat reply."""
        if member.place is None:
            return {"state": "idle", "run": None}
        run_id, place = member.place
        run = self.c.runs[run_id]
        stop = run.ended or not run.has(place, member.name)
        return {
            "state": "stop" if stop else "assigned",
            "run": {
                "id": run.id,
                "name": run.name,
                "model": run.model,
                "entry": run.entry,
                "args": dict(run.args),
                "place": place,
                "attempt": run.attempt(place),
                "worker": run.worker_name(place),
                "rank": place,
                "workers": len(run.places),
            },
        }

    def leave(self, e: LeavePool, now: float) -> None:
        member = self.c.members.get(e.member)
        if member is not None and member.alive and e.epoch in (None, member.epoch):
            self.remove_member(member, now)
            self.fill(now)
        self.c.answer(e.request, None, 204)

    def remove_member(self, member: Member, now: float) -> None:
        """Mark this incarnation of a member as dead and free its place."""
        member.lost = member.place or member.lost
        self._free(member, now)
        member.alive = False
        self.c.save_member(member)

    def count_death(self, member: Member, now: float) -> None:
        """Count the death of a process at its place, if it has one, and end a run in which they die each time."""
        if member.place is None:
            return
        run, index = self.c.runs[member.place[0]], member.place[1]
        if run.ended or not run.has(index, member.name):
            return
        place = run.places[index]
        place.deaths = place.deaths + 1 if now - place.taken_s < SOON_S else 0
        if place.deaths == DEATHS_MAX:
            reason = (
                f"the process of worker {index} died {place.deaths} times in a row within {SOON_S:g} s of "
                f"taking its place, without an exception, such as by os._exit, a crash of native code or for its "
                f"memory; see the log of pool member '{member.name}'"
            )
            self.end(run, "failed", reason, now)

    def expire(self, now: float) -> None:
        """Mark members whose lease has expired as dead; forget all dead ones but the 256 heard from last.

        `member_floor` bars reuse of the epochs of forgotten ones.
        """
        gone = expired(self.c.members.values(), now)
        for member in gone:
            self.count_death(member, now)
            self.remove_member(member, now)
        dead = sorted((m for m in self.c.members.values() if not m.alive), key=lambda m: m.heard_s)
        for member in dead[: max(0, len(dead) - 256)]:
            self.c.member_floor = max(self.c.member_floor, member.epoch)
            self.c.save_cluster()
            del self.c.members[member.name]
            self.c.drop(f"member:{member.name}")
        if gone:
            self.fill(now)

    def _free(self, member: Member, now: float) -> None:
        if member.place is None:
            return
        run_id, place = member.place
        member.place = None
        self.c.save_member(member)
        run = self.c.runs[run_id]
        if run.has(place, member.name):
            run.places[place].member = None
            if now - run.places[place].taken_s >= STEADY_S:
                run.places[place].failures = 0
        self._save(run)

    def done(self, e: PlaceDone, now: float) -> None:
        run = self.c.run(e.run)
        member = current(self.c.members.get(e.member), e.epoch, f"pool member {e.member!r:.140}", "unknown_worker")
        member.heard_s = now
        if member.place == (e.run, e.place):
            lost = not run.has(e.place, member.name)
            if lost or e.attempt in (None, run.attempt(e.place)):
                self._free(member, now)
                if not lost and not run.ended:
                    self._place_done(run, e.place, e.error, now)
                if e.error is not None:
                    self._prefer_others(member)
                self.fill(now)
                self._save(run)
        self.c.answer(e.request, run.document())

    def _place_done(self, run: Run, index: int, error: str | None, now: float) -> None:
        place = run.places[index]
        if error is None:
            place.done = True
            self._finish_if_done(run, now)
            return
        text = _CONTROL.sub("?", error[-16_384:]).encode(errors="replace").decode()
        run.error = f"worker {index}: {(text.strip().splitlines() or [''])[-1]:.{ERROR_CHARS}}"
        place.deaths = 0
        place.restarts += 1
        if not self._is_away(run.model):  # else the function need not be at fault
            place.failures += 1
        if place.failures > RESTARTS_MAX:
            reason = f"worker {index} raised an exception {place.failures} times in a row; the last one:\n{text}"
            self.end(run, "failed", reason, now)

    def _is_away(self, name: str) -> bool:
        """Whether a complete model has a partition that no live shard serves: nobody can pull or push all of it."""
        model = self.c.models.get(name)
        return model is not None and model.ready and not model.served

    def _finish_if_done(self, run: Run, now: float) -> None:
        if not run.ended and all(p.done for p in run.places):
            self.end(run, "finished", "every worker has finished", now)

    def fill(self, now: float) -> None:
        """Give free places to idle members, oldest run first, and update the state and reason of each active run."""
        idle = [m for m in self.c.members.values() if m.alive and m.place is None]
        active = [r for r in self.c.runs.values() if r.active]
        for run in active:
            for i, place in enumerate(run.places):
                if place.member is not None or place.done:
                    continue
                member = next((m for m in idle if is_allowed(run.entry, m.allow)), None)
                if member is None:
                    break
                idle.remove(member)
                self._take(run, i, member, now)
        for run in active:
            before = run.state, run.reason
            barred = [m.allow for m in idle if not is_allowed(run.entry, m.allow)]
            model = self.c.models.get(run.model)
            run.settle(now, how_to_start(run.entry, barred), model.gate.missing(model.roster) if model else 0)
            if (run.state, run.reason) != before:
                self._save(run)

    def _take(self, run: Run, index: int, member: Member, now: float) -> None:
        place = run.places[index]
        place.member, place.taken_s = member.name, now
        member.place = (run.id, index)
        self.c.save_member(member)
        self._save(run)

    def _give_back(self, member: Member, id_: str, index: int, now: float) -> None:
        """Give a member that has joined again the place it had, if that is free: its function may still be at work."""
        run = self.c.runs.get(id_)
        if run is None or run.ended or not run.has(index, None) or run.places[index].done:
            return
        if run.places[index].deaths > 1:
            self._prefer_others(member)
        elif is_allowed(run.entry, member.allow):
            self._take(run, index, member, now)

    def _prefer_others(self, member: Member) -> None:
        """Have idle members take places before this one, whose machine may be at fault."""
        self.c.members[member.name] = self.c.members.pop(member.name)
