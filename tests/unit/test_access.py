"""Who may come in, around a small app: every mark against every role, cookies, what a node says of its callers."""

import shutil
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import Match

from paramserver import limits
from paramserver.client.credentials import Credentials
from paramserver.errors import AuthError, RequestError
from paramserver_node import problems, roles, tokens
from paramserver_node.access import COOKIE, Access, Guard, LocalOnly, credentials, guard
from paramserver_node.middleware import NodeMiddleware
from paramserver_node.roles import ROLES, Role
from paramserver_node.server import Tls
from paramserver_node.settings import ShardSettings
from paramserver_scheduler.app import make_app
from paramserver_scheduler.login import COOKIE_S, Login

KEY = b"k" * 43
SECRET = KEY.decode()


def served(access: Access | LocalOnly) -> NodeMiddleware:
    app = FastAPI(redirect_slashes=False)
    problems.install(app)
    for name in ROLES:

        @app.post(f"/{name}", include_in_schema=False)
        @app.get(f"/{name}")
        @roles.role(name)
        async def endpoint(request: Request) -> dict[str, Any]:
            return {"role": request.scope["state"]["role"]}

    @app.get("/forgotten")
    async def forgotten() -> None:
        """Nobody gave it a role."""

    return NodeMiddleware(app, guard(app, access))


async def ask(path: str, token: str = "", method: str = "GET", **headers: str) -> httpx.Response:
    if token:
        headers["authorization"] = f"Bearer {token}"
    transport = httpx.ASGITransport(served(Access([KEY], ["lost"])))
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        return await client.request(method, path, headers=headers)


@pytest.mark.asyncio
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_each_role_may_do_what_those_below_it_may(method: str) -> None:
    """Without a token 401, with too low a one 403, else in, told who asks; an open route asks nobody."""
    for need in ROLES:
        for have in ROLES:
            answer = await ask(f"/{need}", "" if have == "open" else tokens.make(KEY, have), method)
            in_it_is = ROLES.index(have) >= ROLES.index(need)
            expected = 200 if in_it_is else 401 if have == "open" else 403
            assert answer.status_code == expected, (need, have, answer.text)
            if in_it_is:
                assert answer.json()["role"] == ("open" if need == "open" else have)


@pytest.mark.asyncio
async def test_a_route_that_nobody_classified_is_not_open() -> None:
    """It takes an admin; a path without a route, OpenAPI's pages and a wrong method take any token."""
    assert [(await ask("/forgotten", t)).status_code for t in ("", tokens.make(KEY, "node"))] == [401, 403]
    for path, method, status in (("/nothing", "GET", 404), ("/openapi.json", "GET", 200), ("/reader", "PUT", 405)):
        assert (await ask(path, method=method)).status_code == 401
        assert (await ask(path, tokens.make(KEY, "reader"), method)).status_code == status


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "authorization",
    [
        "Bearer nonsense",
        "Bearer",
        "",
        f"Basic {tokens.make(KEY, 'admin')}",
        f"Bearer {tokens.make(b'o' * 43, 'admin')}",
        f"Bearer {tokens.make(KEY, 'admin', 'lost')}",
        f"Bearer {tokens.make(KEY, 'admin', 'late', 1)}",
    ],
)
async def test_a_token_that_does_not_count_is_told_so(authorization: str) -> None:
    """Forged, revoked, expired or in another scheme: 401 with a challenge that says the token was the reason."""
    answer = await ask("/reader", authorization=authorization)
    without = await ask("/reader")

    assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
    assert answer.headers["www-authenticate"] == 'Bearer realm="paramserver", error="invalid_token"'
    assert without.headers["www-authenticate"] == 'Bearer realm="paramserver"'


PATHS = st.lists(
    st.sampled_from(
        ["models", "runs", "pool", "push", "pull", "status", "internal", "shards", "workers", "done", "a/b"]
    )
    | st.text(max_size=3),
    max_size=6,
).map(lambda parts: "/" + "/".join(parts))
METHODS = st.sampled_from(["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
APP = make_app()
GUARD = Guard(APP, Access([KEY]))


@given(METHODS, PATHS)
def test_marks_are_found_as_the_router_finds_routes(method: str, path: str) -> None:
    """The guard asks for the mark of the very route that will answer; where none will, for any token."""
    scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
    fitting = [r for r in roles.routes(APP) if r.matches(scope)[0] is Match.FULL]
    need = roles.role_of(fitting[0]) if fitting else "reader"
    assert need is not None

    for have in ROLES:
        token = tokens.make(KEY, have) if have != "open" else ""
        scope["headers"] = [(b"authorization", f"Bearer {token}".encode())] if token else []
        try:
            GUARD.check(scope)
        except AuthError:
            assert not roles.allows(have, need)
        else:
            assert roles.allows(have, need)


def test_tokens_that_were_seen_are_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token is computed once and then known, until it expires or too many others have come; only valid ones are."""
    access = Access([KEY])

    def role(token: str) -> Role:
        return access.role({"method": "GET", "headers": [(b"authorization", f"Bearer {token}".encode())]})

    now_s = int(time.time())
    soon = tokens.make(KEY, "reader", "x", now_s + 60)
    assert role(soon) == role(soon) == "reader"
    monkeypatch.setattr(time, "time", lambda: now_s + 60.0)
    with pytest.raises(AuthError):
        role(soon)
    for i in range(2 * limits.TOKENS_KNOWN_MAX):
        assert role(tokens.make(KEY, "worker", f"w{i}")) == "worker"
        with pytest.raises(AuthError):
            role(f"nonsense-{i}")
    assert 0 < len(access._known) <= limits.TOKENS_KNOWN_MAX


@pytest.mark.asyncio
async def test_a_cookie_reads_and_does_nothing_else() -> None:
    """The page's cookie is taken for GET up to a reader's routes; a forged or mangled one is none."""
    access = Access([KEY], secure=True)
    reader = tokens.Holder("reader", "page", 0)
    cookie = access.cookie(reader, 60)
    value = cookie.partition(";")[0]

    assert {"HttpOnly", "SameSite=Strict", "Secure", "Path=/", "Max-Age=60"} <= set(cookie.split("; "))
    assert "Secure" not in Access([KEY]).cookie(reader, 60)
    assert (await ask("/reader", cookie=f"other=1; {value}")).status_code == 200
    assert (await ask("/worker", cookie=value)).status_code == 403
    assert (await ask("/reader", method="POST", cookie=value)).status_code == 401
    admin = f"{COOKIE}={tokens.make(KEY, 'admin')}"
    assert (await ask("/admin", cookie=admin)).status_code == 403
    for bad in (f"{COOKIE}=x", f"{COOKIE}=", "\x7f=;;", value + "x"):
        assert (await ask("/reader", cookie=bad)).status_code == 401
    expired = tokens.make(KEY, "reader", "page", int(time.time()) - 1)
    assert (await ask("/reader", cookie=f"{COOKIE}={expired}")).status_code == 401


def entered(token: str, *revoked: str) -> str | None:
    """The token in the cookie that /login leaves for a token, where these names are revoked."""
    cookie = Login(Access([KEY], revoked)).enter(token)
    return None if cookie is None else cookie.partition(";")[0].partition("=")[2]


@pytest.mark.parametrize(("days", "lasts_s"), [(0, COOKIE_S), (1, 24 * 3600), (30, COOKIE_S)])
def test_a_cookie_outlives_neither_its_days_nor_its_token(days: int, lasts_s: int) -> None:
    """It is of the token's name, ends with it or when that is revoked, and is never good for a longer one."""
    now_s = int(time.time())
    page = entered(tokens.make(KEY, "worker", "bob", now_s + days * 24 * 3600 if days else 0))
    assert page is not None
    holder = tokens.read(page, [KEY], now_s)
    assert holder is not None
    assert (holder.role, holder.name) == ("reader", "bob")
    assert 0 <= holder.expires_at_s - now_s - lasts_s < 60
    assert entered(page) == page
    assert entered(page, "bob") is None


@pytest.mark.asyncio
async def test_only_a_node_speaks_for_others() -> None:
    """A node's request for a client has the client's role, whichever way that differs; a client's own word is void."""
    node, reader = tokens.make(KEY, "node"), tokens.make(KEY, "reader")
    said = {"x-paramserver-role": "admin"}

    assert (await ask("/admin", node, **said)).json() == {"role": "admin"}
    assert (await ask("/node", node, **{"x-paramserver-role": "worker"})).status_code == 403
    for nobody in ("open", "boss", ""):
        assert (await ask("/reader", node, **{"x-paramserver-role": nobody})).status_code == 401
    assert (await ask("/admin", reader, **said)).status_code == 403
    assert (await ask("/admin", **said)).status_code == 401


def test_only_loopback_is_open(caplog: pytest.LogCaptureFixture) -> None:
    """Any other address takes a secret or an explicit word, and says which lines help."""
    for host in ("127.0.0.1", "127.8.9.1", "::1", "localhost"):
        assert isinstance(Access.of(ShardSettings(host=host)), LocalOnly)
    for host in ("0.0.0.0", "::", "10.0.0.1", "fd00::5", "ps.example.org", ""):
        with pytest.raises(RequestError) as refused:
            Access.of(ShardSettings(host=host))
        for line in ("psctl secret", "PARAMSERVER_SECRET_FILE", "--host 127.0.0.1", "--insecure"):
            assert line in str(refused.value)
        assert isinstance(Access.of(ShardSettings(host=host, secret=SECRET)), Access)
    assert "whoever reaches" not in caplog.text
    assert Access.of(ShardSettings(host="0.0.0.0", insecure=True)) is None
    assert "whoever reaches this node may read, change and delete" in caplog.text


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:8700", None, 200),
        ("LOCALHOST:9", None, 200),
        ("localhost", "http://localhost", 200),
        ("[::1]:8700", "http://[::1]:8700", 200),
        ("[::ffff:127.0.0.1]", None, 200),
        ("scheduler:8700", None, 200),
        ("ps.localhost:8700", None, 200),
        ("10.0.0.7:8700", None, 200),
        ("evil.example:8700", None, 403),
        ("127.0.0.1.evil.example", None, 403),
        ("evil.example.", None, 403),
        ("127.0.0.1:8700", "http://evil.example", 403),
        ("127.0.0.1:8700", "http://127.0.0.1:3000", 403),
        ("127.0.0.1:8700", "null", 403),
    ],
)
async def test_a_node_for_its_machine_is_closed_to_web_pages_of_elsewhere(
    host: str, origin: str | None, status: int
) -> None:
    """A page's name for this machine, or where it comes from, gives it away; programs here may do everything."""
    headers = {"host": host} | ({} if origin is None else {"origin": origin})
    transport = httpx.ASGITransport(served(LocalOnly()))
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        answer = await client.post("/admin", headers=headers)

    assert answer.status_code == status
    assert status == 200 or answer.json()["code"] == "forbidden"


def test_a_secret_closes_loopback_too() -> None:
    """Where a secret is set it is used, wherever the node listens; names that are revoked come as one text."""
    access = Access.of(ShardSettings(secret=SECRET, insecure=True, revoked="ci, laptop,"))

    assert isinstance(access, Access)
    assert access.revoked == {"ci", "laptop"}
    assert credentials(ShardSettings(secret=SECRET)).headers == {"authorization": f"Bearer {tokens.make(KEY, 'node')}"}
    assert credentials(ShardSettings()) == Credentials()


def test_tls_takes_two_files_that_fit(tmp_path: Path) -> None:
    """One file alone, a missing one, or a key of another certificate is refused before anything listens."""
    pairs = [self_signed(tmp_path / name) for name in ("a", "b")]
    (certificate, key), (_, other) = pairs
    missing = tmp_path / "none.pem"

    assert Tls.of(ShardSettings()) is None
    assert Tls.of(ShardSettings(tls_certificate=str(certificate), tls_key=str(key))) == Tls(certificate, key)
    for one, two in ((certificate, ""), ("", key), (certificate, other), (missing, key), (key, certificate)):
        with pytest.raises(RequestError, match=r"TLS requires two files|not a certificate and its key"):
            Tls.of(ShardSettings(tls_certificate=str(one), tls_key=str(two)))


def test_clients_find_their_credentials(tmp_path: Path) -> None:
    """An argument wins over the environment, that over a file; a bundle's certificates are all trusted."""
    certificates = [self_signed(tmp_path / name)[0] for name in ("a", "b")]
    bundle, file = tmp_path / "bundle.pem", tmp_path / "token"
    bundle.write_text("# ours\n" + "".join(c.read_text() for c in certificates))
    file.write_text("from-file\n")
    env = {"PARAMSERVER_TOKEN_FILE": str(file), "PARAMSERVER_CA": str(bundle)}

    found = Credentials.found(None, None, env)
    assert (found.token, len(found.authorities)) == ("from-file", 2)
    assert found.context().cert_store_stats()["x509"] >= 2
    assert Credentials.found(None, None, env | {"PARAMSERVER_TOKEN": "from-env"}).token == "from-env"
    assert Credentials.found("given", certificates[0], env).headers == {"authorization": "Bearer given"}
    assert Credentials.found(None, None, {}) == Credentials()
    assert "given" not in repr(Credentials.found("given", None, {}))
    for token, ca in (("two words", None), ("new\nline", None), ("é", None), (None, file), (None, tmp_path / "none")):
        with pytest.raises(RequestError):
            Credentials.found(token, ca, {})
    with pytest.raises(RequestError, match=r"^PARAMSERVER_CA: cannot read"):
        Credentials.found(None, None, {"PARAMSERVER_CA": str(tmp_path / "none")})


def self_signed(stem: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate: apt install openssl")
    certificate, key = stem.with_suffix(".crt"), stem.with_suffix(".key")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "1", "-subj", "/CN=ps", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    assert ssl.PEM_cert_to_DER_cert(certificate.read_text())
    return certificate, key
