"""Retries: which failures are temporary, how long to back off, and what to raise at the deadline.

Backoff is exponential with full jitter (M. Brooker, "Exponential Backoff And Jitter", AWS 2015): a random time up to
50 ms, doubling with each retry up to 2 s, on top of the `retry_after_s` that an answer asks for; up to 0.5 s while
nobody can be connected to, which costs no node anything.  A request is always sent again unchanged, push id included,
so that its second delivery is a duplicate.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from paramserver.errors import InDoubt, PsError, StaleMapError, Unavailable, Unreachable, is_foreign, problem
from paramserver.net.calls import (
    Call,
    Deadline,
    Outcome,
    Pause,
    Request,
    Response,
    TakenTooSlowly,
    error_of,
    json_of,
    json_or_none,
)

T = TypeVar("T")

FIRST_S: Final = 0.05
LONGEST_S: Final = 2.0
UNREACHABLE_S: Final = 0.5
"""Longest pause after a failure to connect: a restarted node is back after a second or two."""
_ABOUT_S: Final = 0.01
"""A timer may end an attempt that much before the deadline."""
REASONS_MAX: Final = 4
"""Of the shards' different reasons, how many an error tells."""
LOOK_FIRST: Final = "an earlier attempt may have been done: look before you repeat it"
"""Hint of a call in doubt whose last attempt had no effect: that attempt's own hint may say to repeat it."""
NOT_AGAIN: Final = "do not push this gradient again; pull and continue from the current values"
"""Hint of a push of which a part was accepted."""
_random = random.SystemRandom()  # forked children would share the state of another, and so all pauses


class Backoff:
    """The retry state of one call."""

    def __init__(self, deadline: Deadline, *, reads: bool = False) -> None:
        self.deadline = deadline
        self.reads = reads
        """Whether the call changes nothing, so that it cannot end in doubt."""
        self.in_doubt = False
        """Whether an attempt may have taken effect, in whole or in part."""
        self._began_at = self._attempt_at = deadline.clock()
        self._tries = 0
        """Failed attempts that were followed by a pause."""
        self._unreachable = 0
        """Of these, the ones that reached nobody."""
        self._answer: PsError | None = None
        """The last failure that the cluster answered, as opposed to attempts without an answer."""

    def pause(self, *errors: PsError) -> Pause:
        """Return the pause before the next attempt.  Raises the call's final error if the deadline comes first.

        Of several errors, what a node has answered comes before silence, and a stale map last.
        """
        error = together(sorted(errors, key=lambda e: (isinstance(e, StaleMapError), _is_silence(e))))
        self.in_doubt = self.in_doubt or any(map(may_be_done, errors))
        if isinstance(error, Unavailable) and not _is_silence(error):
            self._answer = error
        unreachable = all(isinstance(e, Unreachable) for e in errors)
        longest_s = UNREACHABLE_S if unreachable else LONGEST_S
        before = self._unreachable if unreachable else self._tries - self._unreachable
        ceiling = min(longest_s, FIRST_S * 2.0 ** min(before, 60))
        wait_s = _random.uniform(0.0, ceiling)
        if error.retry_after_s is not None and not _is_silence(error):
            wait_s += error.retry_after_s
        left_s = self.deadline.left_s()
        if wait_s >= left_s:
            if isinstance(error, StaleMapError):  # the map is the client's own: its caller can only try again
                error = problem(
                    "unavailable", error.detail, hint="no scheduler has told in time who owns it; try again"
                )
            raise self.final(error)
        self._tries += 1
        self._unreachable += unreachable
        self._attempt_at = self.deadline.clock() + wait_s
        return Pause(wait_s)

    def final(self, error: PsError) -> PsError:
        """Return the error for the deadline: InDoubt if an attempt may have taken effect, else the last failure.

        A call that changes nothing is never in doubt: the code is then that of the last answer, or `unavailable`.  If
        the last attempt got no answer, the detail begins with that of the last failure that was answered.
        """
        error = self._with_reason(self._with_time_spent(error))
        if self.reads and isinstance(error, InDoubt):
            said = self._answer
            code, hint = (said.code, said.hint) if said else ("unavailable", "try again, with a longer timeout")
            return problem(code, error.detail, hint=hint)
        if not self.reads and self.in_doubt and not isinstance(error, InDoubt):
            return problem("in_doubt", f"no answer in time: {error.detail}", hint=LOOK_FIRST)
        return error

    def refusal(self, error: PsError) -> PsError:
        """Return the error for a refusal: InDoubt if a stranger refuses what an earlier attempt may have done."""
        if is_foreign(error) and self.in_doubt and not self.reads:
            return problem("in_doubt", f"no answer from a node: {error.detail}", hint=LOOK_FIRST)
        return error

    def _with_time_spent(self, error: PsError) -> PsError:
        """Return the error of silence with the time that was spent before, if that was most of the call's timeout.

        Otherwise the short time that its only attempt had would say nothing about the node.
        """
        attempt_at = self.deadline.attempt_at  # later than the call began: a push is encoded before it is sent
        began_at = self._began_at if self._tries or attempt_at is None else attempt_at
        whole_s, had_s = self.deadline.whole_s, self.deadline.at - began_at
        if whole_s is None or not _is_silence(error) or had_s >= whole_s / 2:
            return error
        spent = f"{whole_s - had_s:.3g} s of the call's timeout of {whole_s:.3g} s had passed before"
        doubtful, again = "look before you repeat it, and give it a longer timeout=", "again, with a longer timeout="
        hint = error.hint or (doubtful if isinstance(error, InDoubt) else again)
        return error.with_detail(f"{error.detail}; {spent}", hint)

    def _with_reason(self, error: PsError) -> PsError:
        if not self._tries or not _is_silence(error) or not (self._answer or isinstance(error, InDoubt)):
            return error
        now = self.deadline.clock()
        said, tried_s, last_s = self._answer, now - self._began_at, now - self._attempt_at
        tried = f"tried for {tried_s:.3g} s"
        if said is None:
            detail = f"{error.detail}; {tried}"
        elif not isinstance(error, Unreachable) and self.deadline.left_s() < _ABOUT_S and last_s < tried_s / 2:
            # The deadline has cut off the last attempt: its silence says nothing about the node.
            detail = f"{said.detail}; {tried}, the last time for only {last_s:.3g} s"
        else:
            detail = f"{said.detail}; {tried}, at last {error.detail}"
        doubtful = not self.reads and (self.in_doubt or isinstance(error, InDoubt))
        hint = error.hint
        if said and not doubtful and (isinstance(error, Unreachable) or not hint):
            hint = said.hint or hint  # a node that has answered is lacking nothing that its address could tell
        return error.with_detail(detail, hint)


def together(errors: Sequence[PsError]) -> PsError:
    """Return the first of several errors with the texts of the others, at most `REASONS_MAX` in all."""
    said = list(dict.fromkeys(e.detail for e in errors))
    if len(said) == 1:
        return errors[0]
    more = f"; and {len(said) - REASONS_MAX} more reasons" if len(said) > REASONS_MAX else ""
    return errors[0].with_detail("; ".join(said[:REASONS_MAX]) + more)


def is_temporary(error: PsError) -> bool:
    """Whether the failure is temporary: the same request may succeed a little later."""
    return isinstance(error, Unavailable)


def _is_silence(error: PsError) -> bool:
    return isinstance(error, Unreachable | InDoubt | TakenTooSlowly)


def may_be_done(error: PsError) -> bool:
    """Whether the request may have taken effect: the answer was lost, or says that the push in it was accepted."""
    return isinstance(error, InDoubt) or "push" in error.members


def doubted(error: PsError) -> PsError:
    """Return the error of a request that changes something: in doubt if a stranger answered who may have passed it on.

    That is a proxy that failed itself, or replaced what the node had answered; a redirection or refusal (3xx, 4xx) came
    in place of the request.
    """
    passed_on = is_foreign(error) and not 300 <= error.members["foreign"] < 500
    return problem("in_doubt", error.detail, hint=error.hint) if passed_on else error


def result_of(outcome: Outcome, read: Callable[[Response], T], *, reads: bool) -> T | PsError:
    """Return what `read` makes of a 2xx response, and the error of anything else; `reads`: it changes nothing."""
    try:
        if isinstance(outcome, PsError):
            return outcome
        if outcome.status >= 300:
            raise error_of(outcome)
        return read(outcome)
    except PsError as error:
        return error if reads else doubted(error)


def deliver(request: Request, deadline: Deadline, backoff: Backoff | None, read: Callable[[Response], T]) -> Call[T]:
    """Send a request, retrying temporary failures, and return what `read` makes of its 2xx response.

    Raises the PsError of a refusal (see `Backoff.refusal`); that of `Backoff.final` at the deadline.
    """
    backoff = backoff or Backoff(deadline, reads=request.method == "GET")
    while True:
        attempt = replace(request, timeout_s=min(request.timeout_s, deadline.attempt_s()))
        (outcome,) = yield [attempt]
        result = result_of(outcome, read, reads=request.method == "GET")
        if not isinstance(result, PsError):
            return result
        if not is_temporary(result):
            raise backoff.refusal(result)
        yield backoff.pause(result)


def deliver_json(request: Request, deadline: Deadline, backoff: Backoff | None = None) -> Call[Any]:
    """Like `deliver`, and return the JSON value of the answer; None if that is the 204 of a DELETE."""
    return (yield from deliver(request, deadline, backoff, json_or_none if request.method == "DELETE" else json_of))
