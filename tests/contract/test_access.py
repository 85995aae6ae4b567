"""Access control in a real cluster: every route of scheduler and shard against every role, and every way to log in."""

import asyncio
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.waiting import eventually

import paramserver as ps
from paramserver.errors import AuthError
from paramserver_node import roles, tokens
from paramserver_node.roles import ROLES, Role
from paramserver_node.settings import ShardSettings
from paramserver_scheduler.app import make_app as scheduler_app
from paramserver_shard.app import make_app as shard_app
from paramserver_shard.main import assemble

from .processes import Nodes, Patient, nodes, unique

pytestmark = pytest.mark.process

SECRET = tokens.new_key()
KEYS = tokens.keys_of(SECRET)
TOKEN: dict[Role, str] = {role: tokens.make(KEYS[0], role) for role in ROLES[1:]}
REFUSED = {401, 403}
MARKED = list[tuple[str, str, Role]]
"""(method, path with placeholders filled in, required role) of every route of an app."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Two schedulers, one of them standing by, and two shards that share a secret."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("closed")
        (folder / "secret").write_text(f"{SECRET}\n")
        patch.setenv("PARAMSERVER_SECRET_FILE", str(folder / "secret"))
        patch.setenv("PARAMSERVER_REVOKED", "stolen")
        patch.setenv("PARAMSERVER_TOKEN", TOKEN["admin"])
        with nodes(folder, shards=2, schedulers=2) as running:
            patch.delenv("PARAMSERVER_TOKEN")
            yield running


def marked(app: Any) -> MARKED:
    found: MARKED = []
    for route in roles.routes(app):
        path = re.sub(r"\{[^}]*\}", "7", route.path)  # type: ignore[attr-defined]  # all of ours have a path
        role = roles.role_of(route)
        assert role is not None
        found += [(method, path, role) for method in sorted(route.methods)]  # type: ignore[attr-defined]
    return found


async def shard_routes() -> MARKED:
    async with asyncio.TaskGroup() as group:
        shard = assemble(
            ShardSettings(redis="redis://127.0.0.1:9/0", scheduler="http://127.0.0.1:9"), group, None, asyncio.Event()
        )
        try:
            return marked(shard_app(shard.services))
        finally:
            shard.services.runtime.close()
            await shard.aclose()


def status_of(http: httpx.Client, method: str, url: str, role: Role) -> int:
    """Return the status of a request with a token of that role for something that does not exist."""
    headers = {} if role == "open" else {"authorization": f"Bearer {TOKEN[role]}"}
    headers |= {"content-type": "application/json"}
    with http.stream(method, url, headers=headers, content=b"" if method in ("GET", "HEAD") else b"{}") as answer:
        return answer.status_code  # leaves endless feeds unread


def wrong_cells(url: str, table: MARKED) -> list[str]:
    """Return every (route, role) whose status contradicts the route's role.

    POST /login is left out: it answers 401 to a wrong token from anybody.
    """
    wrong: list[str] = []
    with httpx.Client(timeout=30.0) as http:
        for method, path, need in table:
            if (method, path) == ("POST", "/login"):
                continue
            for have in ROLES:
                status = status_of(http, method, url + path, have)
                good = status not in REFUSED if roles.allows(have, need) else status == (401 if have == "open" else 403)
                if not good:
                    wrong.append(f"{method} {path} ({need}) as {have}: {status}")
    return wrong


def node_urls(cluster: Nodes) -> dict[str, str]:
    shards = {name: f"http://127.0.0.1:{port}" for name, port in cluster.shard_ports.items()}
    return {f"scheduler-{i}": url for i, url in enumerate(cluster.urls)} | shards


def test_every_route_answers_every_role_as_it_is_marked(cluster: Nodes) -> None:
    """Each route of schedulers and shards answers 401 without a token, 403 below its role, and else lets in."""
    table = marked(scheduler_app())
    assert {role for _, _, role in table} == set(ROLES)
    assert len(table) > 45
    own = [cell for cell in asyncio.run(shard_routes()) if cell[1] != "/7"]
    assert {("POST", "/push", "worker"), ("POST", "/pull", "reader"), ("POST", "/internal/set/7", "node")} <= set(own)

    wrong = [f"{name}: {w}" for name, url in list(node_urls(cluster).items())[:2] for w in wrong_cells(url, table)]
    wrong += [f"shard: {w}" for w in wrong_cells(node_urls(cluster)["shard-0"], own)]

    assert wrong == []


def test_a_shard_hands_on_no_more_than_the_caller_may(cluster: Nodes) -> None:
    """A request that a shard forwards reaches the scheduler with the caller's role, not with the shard's."""
    own = {(method, path) for method, path, _ in asyncio.run(shard_routes())}
    table = [cell for cell in marked(scheduler_app()) if cell[:2] not in own and not cell[1].startswith("/internal")]
    assert {role for _, _, role in table} >= {"reader", "worker", "admin"}

    assert wrong_cells(node_urls(cluster)["shard-1"], table) == []


def test_checkpoints_into_folders_are_an_admins(cluster: Nodes, tmp_path: Path) -> None:
    """A worker's token pulls values, but not the optimizer's state: a folder needs an admin, through any node."""
    admin = ps.connect(cluster.url, token=TOKEN["admin"])
    name = unique("m")
    admin.create_model(name, {"w": (6,)}, partitions=2).checkpoint(tmp_path / "c")
    with ps.connect(cluster.url, token=TOKEN["worker"]) as client:
        with pytest.raises(AuthError, match="'node'"):
            client.model(name).checkpoint(tmp_path / "mine")
        with pytest.raises(AuthError, match="'admin'"):
            client.restore(tmp_path / "c", as_=f"{name}-2")
        with pytest.raises(AuthError, match="'node'"):
            client.restore(tmp_path / "c", exist_ok=True)
    wanted = {f"{name}/partitions/1": 200, f"{name}/partitions/2": 422, f"{unique('m')}/partitions/0": 404}
    with httpx.Client(timeout=30) as http:
        for path, good in wanted.items():
            for url in node_urls(cluster).values():
                found = [status_of(http, "GET", f"{url}/internal/models/{path}", role) for role in ROLES]
                assert found == [401, 403, 403, good, good], (url, path)


def test_training_with_the_least_role(cluster: Nodes) -> None:
    """Through any node a worker trains and a reader pulls an admin's model, and each is refused more than that."""
    admin = ps.connect(cluster.url, token=TOKEN["admin"])
    name = unique("m")
    model = admin.create_model(name, {"w": (6,)}, optimizer=ps.SGD(lr=1.0), partitions=2)
    for i, url in enumerate(node_urls(cluster).values()):
        with ps.connect(url, token=TOKEN["worker"]) as client, client.model(name).worker() as worker:
            pushed = worker.pushpull({"w": np.ones(6, np.float32)})
            assert pushed["w"].tolist() == [-1.0 - i] * 6
            with pytest.raises(AuthError, match="'admin'"):
                client.model(name).delete()
        with ps.connect(url, token=TOKEN["reader"]) as reader:
            assert reader.model(name).pull(min_version=i + 1)["w"].tolist() == [-1.0 - i] * 6
            with pytest.raises(AuthError, match="'worker'"):
                reader.model(name).push({"w": np.ones(6, np.float32)})
        with ps.connect(url) as nobody, pytest.raises(AuthError, match="requires a token"):
            nobody.model(name).pull()
    saved = model.save()  # the scheduler fetches every partition from the shards under its own token
    assert [c["name"] for c in model.checkpoints()] == [saved["name"]]
    model.restore()
    admin.close()


def test_plain_requests_meet_the_same_doors(cluster: Nodes) -> None:
    """A worker's push and pull by name work through any node, which reaches other shards with its own token."""
    name = unique("m")
    spec = {"name": name, "params": {"a": {"shape": [2]}, "b": {"shape": [2]}}, "partitions": 2}
    cluster.post("/models", spec, status=201)
    for url in node_urls(cluster).values():
        headers = {"authorization": f"bearer {TOKEN['worker']}"}
        with httpx.Client(transport=Patient(), base_url=url, headers=headers, timeout=30) as http:
            pushed = http.post("/push", json={"model": name, "grads": {"a": [1, 1], "b": [1, 1]}})
            assert pushed.status_code == 200, pushed.text
            answer = http.post("/pull", json={"model": name, "min_version": pushed.json()["version"]})
            assert set(answer.json()["params"]) == {"a", "b"}
            assert http.get(f"/pull/{name}/a").status_code == 200


def test_a_revoked_token_is_nobodys(cluster: Nodes) -> None:
    """A token whose name is in PARAMSERVER_REVOKED gets 401 from every node."""
    stolen = tokens.make(KEYS[0], "admin", "stolen")

    for url in node_urls(cluster).values():
        answer = httpx.get(f"{url}/models", headers={"authorization": f"Bearer {stolen}"}, timeout=30)
        assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")


def test_the_socket_on_this_machine_asks_too(cluster: Nodes) -> None:
    """A shard's Unix socket requires the same roles as its port."""
    shards = cluster.http.get("/map", headers={"authorization": f"Bearer {TOKEN['reader']}"}).json()["shards"]
    sockets = [a.removeprefix("unix://") for s in shards.values() for a in s["addresses"] if a.startswith("unix://")]
    if not sockets:
        pytest.skip("no shared memory on this machine")
    for path in sockets:
        with httpx.Client(transport=Patient(uds=path), base_url="http://shard", timeout=30) as http:
            assert http.post("/pull", json={"model": "x"}).status_code == 401
            reader = {"authorization": f"Bearer {TOKEN['reader']}"}
            assert http.post("/push", json={"model": "x"}, headers=reader).status_code == 403
            assert http.post("/pull", json={"model": "x"}, headers=reader).status_code == 404


def test_a_refused_body_does_not_cost_the_connection(cluster: Nodes) -> None:
    """After a large push without a token gets 401 over HTTP/1.1, its connection serves the next request."""
    for url in node_urls(cluster).values():
        with httpx.Client(base_url=url, timeout=30) as http:
            refused = http.post("/push", content=b"x" * 3_000_000)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, 'Bearer realm="paramserver"')
            assert http.get("/livez").status_code == 200


def test_a_browser_gets_in_once_by_the_link(cluster: Nodes) -> None:
    """The link that a scheduler prints works once and sets a cookie that allows reading at every node.

    It also works once at another scheduler.
    """
    links = []
    for name in ("scheduler", "scheduler-1"):
        log = cluster.folder / f"{name}.log"
        (link,) = eventually(lambda log=log: re.findall(r"scheduler\.page .*: (http\S+)", log.read_text()))  # type: ignore[misc]
        links.append(link)
    for link in links:
        assert link.startswith(tuple(cluster.urls))
        with httpx.Client(timeout=30) as browser:
            entered = browser.get(link)
            assert (entered.status_code, entered.headers["location"]) == (303, "./")
            attributes = entered.headers["set-cookie"].split("; ")
            assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(attributes)
            for url in node_urls(cluster).values():  # the nodes share the secret
                assert browser.get(f"{url}/status").status_code == 200
            assert browser.delete(f"{cluster.url}/models/7").status_code == 401
        elsewhere = next(url for url in cluster.urls if not link.startswith(url)) + link[link.index("/login") :]
        assert httpx.get(elsewhere, timeout=30).status_code == 303
        for used in (link, elsewhere):
            again = httpx.get(used, timeout=30)
            assert again.status_code == 401
            assert "set-cookie" not in again.headers


def test_a_browser_gets_in_by_a_token(cluster: Nodes) -> None:
    """The login form of any node turns a valid token into a read-only cookie and answers 401 to any other."""
    for name, url in node_urls(cluster).items():
        form = httpx.get(f"{url}/login", timeout=30)
        assert form.status_code == 200
        assert '<input name="token" type="password"' in form.text, name
        assert "script" not in form.headers["content-security-policy"]
        with httpx.Client(timeout=30) as browser:
            entered = browser.post(f"{url}/login", data={"token": f" {TOKEN['admin']} "})
            assert (entered.status_code, entered.headers["location"]) == (303, "./")
            assert TOKEN["admin"] not in entered.headers["set-cookie"]
            assert browser.get(f"{url}/status").status_code == 200
            assert browser.post(f"{url}/runs", json={}).status_code == 401
        for wrong in ("", "nonsense", tokens.make(KEYS[0], "admin", "stolen")):
            refused = httpx.post(f"{url}/login", data={"token": wrong}, timeout=30)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, 'Bearer realm="paramserver"')
            assert "set-cookie" not in refused.headers


def test_no_log_shows_a_token(cluster: Nodes) -> None:
    """The nodes log neither the secret nor a token, be it sent in a header or a form, valid or not."""
    for url in node_urls(cluster).values():
        for token in (TOKEN["reader"], tokens.make(KEYS[0], "admin", "stolen"), TOKEN["worker"] + "x"):
            httpx.get(f"{url}/status", headers={"authorization": f"Bearer {token}"}, timeout=30)
            httpx.post(f"{url}/login", data={"token": token}, timeout=30)
    text = "".join(p.read_text(errors="replace") for p in cluster.folder.glob("*.log"))

    assert "scheduler.page" in text
    assert SECRET not in text
    assert "ps1." not in text


def test_roles_are_in_order() -> None:
    """Each role may do what the roles before it may, and not the reverse; the tests above rely on it."""
    assert all(roles.allows(high, low) and not roles.allows(low, high) for low, high in pairwise(ROLES))
