"""Takes the cluster's status once a second, for the history, the Prometheus metrics and all open status pages."""

import asyncio
import logging
from time import monotonic, thread_time, time
from typing import Final

from paramserver.core.scheduler import io
from paramserver_node import negotiate
from paramserver_node.usage import Usage
from paramserver_scheduler.overview import describe
from paramserver_scheduler.service import Service
from paramserver_scheduler.telemetry import METRICS

log = logging.getLogger("paramserver.scheduler")

INTERVAL_S: Final = 1.0
SHARE: Final = 20
"""Taking the status uses at most one twentieth of a processor; if it is slow, it is done less often.

What counts is processor time: where other processes take the processor, the page would stand still for the longest.
"""
STEP_S: Final = 1.0
"""A change of the clock by more than this is followed."""
READING_S: Final = 0.1
"""If reading the clocks takes longer, the process was interrupted, and they do not belong together."""


async def watch(service: Service) -> None:
    """Take and distribute the status every second until cancelled."""
    usage, history = Usage(monotonic), service.history
    try:
        while True:
            began_s, used_s = monotonic(), thread_time()
            follow_clock(service)
            history.usage = usage.look()
            history.sample(service.read, began_s)
            status = await describe(service)
            history.record(status, began_s)
            METRICS.status = status
            service.broadcast.publish(negotiate.json_text(status.model_dump()))
            took_s, used_s = monotonic() - began_s, thread_time() - used_s
            await asyncio.sleep(max(INTERVAL_S - took_s, (SHARE - 1) * used_s))
    finally:
        METRICS.status = None
        service.broadcast.close()


def follow_clock(service: Service) -> None:
    """Have everything use the present Unix time if the machine's clock was set, or stood still while it slept."""
    now_s, unix_s = monotonic(), time()
    step_s = unix_s - now_s - service.history.wall_offset_s
    if abs(step_s) > STEP_S and monotonic() - now_s < READING_S:
        log.warning("clock.stepped s=%+.0f", step_s)
        service.history.follow_clock(unix_s - now_s)
        service.runtime.send(io.ClockStepped(unix_s - now_s))
