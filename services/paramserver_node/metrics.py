"""Prometheus metrics that every node has.

Labels are route templates, methods and statuses, never paths or names that clients choose, so their number is bounded.
"""

from typing import Final

from prometheus_client import Gauge, disable_created_metrics

from paramserver_node.tally import Count, Counter, Histogram

REQUESTS: Final = Counter("paramserver_http_requests_total", "Requests answered", ["route", "method", "status"])
disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per metric that nobody reads

IN_FLIGHT: Final = Count()
"""Requests being answered."""
Gauge("paramserver_http_requests_in_flight", "Requests that are being answered").set_function(lambda: IN_FLIGHT.total)
REQUEST_S: Final = Histogram(
    "paramserver_http_request_seconds",
    "Time from the first byte of a request to the end of its response",
    ["route"],
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
