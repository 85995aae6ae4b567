"""Which failures pass and when to try again: deadline, backoff, and what an answer asks for.

Backoff is exponential with full jitter (M. Brooker, "Exponential Backoff And Jitter", AWS 2015): a random time up to
50 ms, doubling with each try up to 2 s, never less than the `retry_after_s` an answer quotes (plus jitter).
A request is always sent again as it was, push id included, so that its second delivery is a duplicate.
"""

import random
from typing import Final

from msgspec.structs import replace

from paramserver.client.calls import Call, Deadline, Outcome, Pause, Request, Response, error_of
from paramserver.errors import InDoubt, PsError, Unavailable, Unreachable, problem

FIRST_S: Final = 0.05
LONGEST_S: Final = 2.0
_random = random.Random()


class Backoff:
    """The pauses of one call, and whether it may pause again."""

    def __init__(self, deadline: Deadline, rng: random.Random = _random, *, reads: bool = False) -> None:
        self.deadline = deadline
        self.reads = reads
        """Whether the call changes nothing, so that there is nothing to be in doubt about."""
        self.in_doubt = False
        """Whether an attempt may have been done without our knowing."""
        self._rng = rng
        self._began_at = deadline.clock()
        self._tries = 0
        """How many have failed and were followed by a pause."""
        self._answer: PsError | None = None
        """What the cluster last said, as opposed to its silence."""

    def pause(self, error: PsError) -> Pause:
        """The pause before the next try; raises the call's final error if the deadline would pass first."""
        self.in_doubt = self.in_doubt or may_be_done(error)
        if isinstance(error, Unavailable) and not _is_silence(error):
            self._answer = error
        ceiling = min(LONGEST_S, FIRST_S * 2.0**self._tries)
        wait_s = self._rng.uniform(0.0, ceiling)
        if error.retry_after_s is not None and not _is_silence(error):
            wait_s += error.retry_after_s
        left_s = self.deadline.left_s()
        if wait_s >= left_s:
            raise self.final(error)
        self._tries += 1
        return Pause(wait_s)

    def final(self, error: PsError) -> PsError:
        """What to raise when time is up: InDoubt if any attempt may have been done, else the last failure.

        Its reason is the last that the cluster said, if the last try was met by silence.
        """
        error = self._with_reason(error)
        if self.reads and isinstance(error, InDoubt):
            said = self._answer
            code, hint = (said.code, said.hint) if said else ("unavailable", "try again, with a longer timeout")
            return problem(code, error.detail, hint=hint)
        if not self.reads and self.in_doubt and not isinstance(error, InDoubt):
            return problem("in_doubt", f"no answer in time: {error.detail}", hint=error.hint)
        return error

    def _with_reason(self, error: PsError) -> PsError:
        if not self._tries or not _is_silence(error) or not (self._answer or isinstance(error, InDoubt)):
            return error
        said, tried = self._answer, f"tried for {self.deadline.clock() - self._began_at:.3g} s"
        detail = f"{said.detail}; {tried}, at last {error.detail}" if said else f"{error.detail}; {tried}"
        hint = error.hint or (said.hint if said else "")
        return problem(error.code, detail, hint=hint, retry_after_s=error.retry_after_s, **error.members)


def passes(error: PsError) -> bool:
    """Whether the same request may succeed a little later."""
    return isinstance(error, Unavailable)


def _is_silence(error: PsError) -> bool:
    return isinstance(error, Unreachable | InDoubt)


def may_be_done(error: PsError) -> bool:
    """Whether what was asked for may have been done: the answer is lost, or says that a push was accepted before."""
    return isinstance(error, InDoubt) or "push" in error.members


def judged(outcome: Outcome) -> Response | PsError:
    """A response of 2xx as it is, everything else as its error."""
    if isinstance(outcome, Response) and outcome.status >= 300:
        return error_of(outcome)
    return outcome


def deliver(request: Request, deadline: Deadline, backoff: Backoff | None = None) -> Call[Response]:
    """Send one request until a node has answered for good.

    Raises the PsError of a refusal, or of the last failure once the deadline is near.
    """
    backoff = backoff or Backoff(deadline, reads=request.method == "GET")
    while True:
        attempt = replace(request, timeout_s=min(request.timeout_s, max(deadline.left_s(), 0.001)))
        (outcome,) = yield [attempt]
        result = judged(outcome)
        if isinstance(result, Response):
            return result
        if not passes(result):
            raise result
        yield backoff.pause(result)
