"""The status page's files: every node serves the same ones over HTTP, and they load nothing from elsewhere."""

import re
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest

from paramserver_scheduler import page

from .processes import Nodes, unique

pytestmark = pytest.mark.process

STATIC = Path(page.__file__).parent / "static"
FILES = {path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*") if path.suffix}
KINDS = {
    ".html": "text/html", ".css": "text/css", ".svg": "image/svg+xml",
    ".js": ("text/javascript", "application/javascript"),  # the latter before Python 3.12
}  # fmt: skip


def test_every_node_serves_the_page_and_its_files(rest_cluster: Nodes) -> None:
    """Scheduler and shards serve `/` and every file of the page with media type, ETag and a strict security policy."""
    urls = [rest_cluster.url, *(f"http://127.0.0.1:{port}" for port in rest_cluster.shard_ports.values())]
    paths = {"/": "index.html", **{f"/static/{name}": name for name in FILES}}
    assert len(paths) > 4
    for url in urls:
        for path, name in paths.items():
            answer = rest_cluster.http.get(url + path)

            assert answer.status_code == 200, (url, path)
            assert answer.content == FILES[name].read_bytes()
            assert answer.headers["content-type"].partition(";")[0] in KINDS[FILES[name].suffix]
            assert answer.headers["x-content-type-options"] == "nosniff"
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            known = f'"x", W/{answer.headers["etag"]}'  # as a proxy that compresses makes it
            again = rest_cluster.http.get(url + path, headers={"if-none-match": known})
            assert (again.status_code, again.content) == (304, b"")


def test_the_page_of_every_node_may_change_things(rest_cluster: Nodes) -> None:
    """A change is accepted from the page of the node that it is sent to, also where it is forwarded to the leader."""
    model = unique("page")
    rest_cluster.post("/models", {"name": model, "params": {"w": {"shape": [8]}}}, status=201)
    urls = [rest_cluster.url, *(f"http://127.0.0.1:{port}" for port in rest_cluster.shard_ports.values())]
    for url in urls:
        for origin, status in ((url, 200), ("http://evil.example", 403)):
            change = {"optimizer": {"lr": 0.5}}
            answer = rest_cluster.http.patch(f"{url}/models/{model}", json=change, headers={"origin": origin})

            assert answer.status_code == status, (url, origin, answer.text)


def test_files_outside_the_page_are_not_served(rest_cluster: Nodes) -> None:
    """A path that leaves the page's folder or names no file is answered with 404."""
    for port in (rest_cluster.port, *rest_cluster.shard_ports.values()):
        for name in ("nothing.js", "..%2Fpage.py", "%2e%2e/page.py", "../page.py", "uplot/../../page.py", "", "uplot"):
            connection = HTTPConnection("127.0.0.1", port, timeout=30)  # unlike httpx, it sends `..` as it is
            with closing(connection):
                connection.request("GET", f"/static/{name}")
                assert connection.getresponse().status == 404, name


def test_the_page_asks_nothing_of_elsewhere() -> None:
    """No file has a URL of another origin, except in the chart library's header, and no script or style is inline."""
    for name, path in FILES.items():
        text = path.read_text()
        known = text.replace("http://www.w3.org/2000/svg", "").replace("https://github.com/leeoniya/uPlot", "")
        assert re.search(r"https?://", known) is None, name
        if not name.startswith("uplot/"):
            assert "innerHTML" not in text, name
            assert "insertAdjacentHTML" not in text, name
    index = FILES["index.html"].read_text()
    assert re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=", index) is None
    for source in re.findall(r'(?:src|href)="static/([^"]+)"', index):
        assert source in FILES, source
