"""What somebody between client and node answers in the node's place."""

import pytest

from paramserver.net.calls import Response
from paramserver.wire.frame import MEDIA_TYPE

HTML = {"content-type": "text/html"}
PAGE = b"<html>Sorry</html>"
REPLACED = [
    pytest.param(Response(200, {"content-type": MEDIA_TYPE}), id="no body"),
    pytest.param(Response(204, {}), id="no content"),
    pytest.param(Response(200, HTML, PAGE), id="a page"),
    pytest.param(Response(500, HTML, PAGE), id="a failure of its own"),
]
"""Answers to a request that may have been passed on."""
