"""Access control of a small app: every route role against every token role, cookies, and roles stated by nodes."""

import shutil
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import StreamingResponse
from starlette.routing import Match

from paramserver import limits
from paramserver.errors import AuthError, RequestError
from paramserver.net.credentials import Credentials
from paramserver_node import problems, roles, tokens
from paramserver_node.access import COOKIE, Access, Guard, LocalOnly, credentials, guard
from paramserver_node.middleware import NodeMiddleware
from paramserver_node.roles import ROLES, Role
from paramserver_node.server import Tls
from paramserver_node.settings import ShardSettings
from paramserver_scheduler.app import make_app
from paramserver_scheduler.login import COOKIE_S, LINK_S, Login

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
        """A route without a role mark."""

    return NodeMiddleware(app, guard(app, access))


async def ask(path: str, token: str = "", method: str = "GET", **headers: str) -> httpx.Response:
    if token:
        headers["authorization"] = f"Bearer {token}"
    transport = httpx.ASGITransport(served(Access([KEY], ["lost"])))
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        return await client.request(method, path, headers=headers)


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_each_role_may_do_what_those_below_it_may(method: str) -> None:
    """A route admits its own role and higher ones, answers 403 to lower ones, and 401 without a token.

    The app is told the caller's role; on an open route this is `open`, and no token is needed.
    """
    for need in ROLES:
        for have in ROLES:
            answer = await ask(f"/{need}", "" if have == "open" else tokens.make(KEY, have), method)
            in_it_is = ROLES.index(have) >= ROLES.index(need)
            expected = 200 if in_it_is else 401 if have == "open" else 403
            assert answer.status_code == expected, (need, have, answer.text)
            if in_it_is:
                assert answer.json()["role"] == ("open" if need == "open" else have)


async def test_a_route_that_nobody_classified_is_not_open() -> None:
    """A route without a role mark refuses even a node; unknown paths, OpenAPI and wrong methods require any token."""
    assert [(await ask("/forgotten", t)).status_code for t in ("", tokens.make(KEY, "node"))] == [401, 403]
    for path, method, status in (("/nothing", "GET", 404), ("/openapi.json", "GET", 200), ("/reader", "PUT", 405)):
        assert (await ask(path, method=method)).status_code == 401
        assert (await ask(path, tokens.make(KEY, "reader"), method)).status_code == status


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
    """A forged, malformed, revoked or expired token gets 401 and a challenge with `invalid_token`, unlike no token."""
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
    """The guard requires the role of the route that the router will call, and any valid token if none matches.

    A HEAD is served by the route for GET if none is its own.
    """
    scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
    scopes = [scope, {**scope, "method": "GET"}] if method == "HEAD" else [scope]
    fitting = [r for r in roles.routes(APP) if any(r.matches(s)[0] is Match.FULL for s in scopes)]
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
    """A cached token is refused once it has expired, and the cache of valid tokens stays within its limit."""
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
    kept = dict(access._known)
    assert role(" " * 60_000 + tokens.make(KEY, "reader")) == "reader"
    assert access._known == kept, "a thousand spellings of one token would take 64 MiB"


@pytest.mark.parametrize("other", ['prefs={"a": 1}', "seen", "a b=c", "path=/", "a@b=1", 'q="x'])
async def test_cookies_of_others_do_not_hide_the_nodes_own(other: str) -> None:
    """The node's cookie is found before and after those of other programs under its host name, whatever they hold."""
    own = Access([KEY]).cookie(tokens.Holder("reader", "anna", 0), 60).partition(";")[0]

    for cookies in (f"{other}; {own}", f"{own}; {other}"):
        assert (await ask("/reader", cookie=cookies)).status_code == 200


@pytest.mark.parametrize("value", ["\\" * 60_000, '\\"' * 30_000, ";" * 60_000, f"{COOKIE}=x;" * 4000])
async def test_a_hostile_cookie_takes_no_time(value: str) -> None:
    """A cookie as long as a head may be is read in linear time; the standard library took 20 s for some."""
    began_s = time.process_time()
    assert (await ask("/reader", cookie=f'{COOKIE}="{value}"')).status_code == 401
    assert time.process_time() - began_s < 1.0


async def test_a_cookie_reads_and_does_nothing_else() -> None:
    """A cookie grants only GET on a reader's routes, even with an admin's token; an invalid one grants nothing."""
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
    """Return the token in the cookie that /login sets for `token`, or None; `revoked` are revoked names."""
    cookie = Login(Access([KEY], revoked)).enter(token)
    return None if cookie is None else cookie.partition(";")[0].partition("=")[2]


@pytest.mark.parametrize(("days", "lasts_s"), [(0, COOKIE_S), (1, 24 * 3600), (30, COOKIE_S)])
def test_a_cookie_outlives_neither_its_days_nor_its_token(days: int, lasts_s: int) -> None:
    """A cookie of /login expires no later than its token, is revoked with it, and cannot be used to extend itself."""
    now_s = int(time.time())
    page = entered(tokens.make(KEY, "worker", "bob", now_s + days * 24 * 3600 if days else 0))
    assert page is not None
    holder = tokens.read(page, [KEY], now_s)
    assert holder is not None
    assert (holder.role, holder.name) == ("reader", "bob")
    assert 0 <= holder.expires_at_s - now_s - lasts_s < 60
    assert entered(page) == page
    assert entered(page, "bob") is None


def test_a_link_admits_once_at_each_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link that one scheduler logs works once at each scheduler that has its key, until it expires.

    Its code is no token, and no token is a code.
    """
    now_s = 1_000_000.5
    monkeypatch.setattr(time, "time", lambda: now_s)
    other = b"o" * 43
    mine, standby, newer = Login(Access([KEY])), Login(Access([KEY])), Login(Access([other, KEY]))
    path, _, code = mine.link().partition("=")

    assert path == "/login?once"
    for login in (standby, mine, newer):
        assert login.redeem(code) is not None
        assert login.redeem(code) is None
    assert Login(Access([other])).redeem(code) is None
    assert mine.enter(code) is None
    expires_at_s = int(now_s + LINK_S)
    for wrong in ("", "x", code[:-1], f"{code}é", code.upper(), tokens.make(KEY, "reader", "page", expires_at_s)):
        assert Login(Access([KEY])).redeem(wrong) is None
    assert mine.redeem(mine.link().partition("=")[2]) is not None
    now_s += LINK_S
    assert Login(Access([KEY])).redeem(code) is None
    assert mine.redeem(mine.link().partition("=")[2]) is not None
    now_s -= LINK_S
    assert mine.redeem(code) is None, "a clock that was set back has made a used link valid again"


def test_used_links_that_have_expired_are_forgotten_once_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler remembers the links that were used, within a bound."""
    now_s = 1_000_000.5
    monkeypatch.setattr(time, "time", lambda: now_s)
    monkeypatch.setattr("paramserver_scheduler.login.USED_MAX", 2)
    login = Login(Access([KEY]))
    for kept in (1, 2, 1):
        assert login.redeem(login.link().partition("=")[2]) is not None
        assert len(login._used) == kept
        now_s += LINK_S


@pytest.mark.parametrize("by", ["authorization", "cookie"])
async def test_a_stream_of_events_ends_with_its_token(
    by: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stream of events that a token or cookie has opened ends when that expires, without an error in the log."""
    now_s = 1_000_000.0
    monkeypatch.setattr(time, "time", lambda: now_s)
    app = FastAPI()
    problems.install(app)

    @app.get("/stream")
    @roles.role("reader")
    async def stream() -> StreamingResponse:
        async def events() -> AsyncIterator[bytes]:
            nonlocal now_s
            for _ in range(9):
                yield b": ping\n\n"
                now_s += 20

        return StreamingResponse(events(), media_type="text/event-stream")

    token = tokens.make(KEY, "reader", "bob", int(now_s) + 60)
    headers = {by: f"Bearer {token}" if by == "authorization" else f"{COOKIE}={token}"}
    transport = httpx.ASGITransport(NodeMiddleware(app, guard(app, Access([KEY]))))
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        answer = await client.get("/stream", headers=headers)
    assert answer.text == ": ping\n\n" * 3
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


async def test_only_a_node_speaks_for_others() -> None:
    """A node's request has the role that it states for its client; a role stated by anyone else is ignored."""
    node, reader = tokens.make(KEY, "node"), tokens.make(KEY, "reader")
    said = {"x-paramserver-role": "admin"}

    assert (await ask("/admin", node, **said)).json() == {"role": "admin"}
    assert (await ask("/node", node, **{"x-paramserver-role": "worker"})).status_code == 403
    for nobody in ("open", "boss", ""):
        assert (await ask("/reader", node, **{"x-paramserver-role": nobody})).status_code == 401
    assert (await ask("/admin", reader, **said)).status_code == 403
    assert (await ask("/admin", **said)).status_code == 401


def test_only_loopback_is_open(caplog: pytest.LogCaptureFixture) -> None:
    """Other addresses than loopback require a secret, or `insecure` with a warning; the error lists the remedies."""
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
    """Without a secret, a request is refused if others may own its Host's name, or if its Origin is not its Host."""
    headers = {"host": host} | ({} if origin is None else {"origin": origin})
    transport = httpx.ASGITransport(served(LocalOnly()))
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        answer = await client.post("/admin", headers=headers)

    assert answer.status_code == status
    assert status == 200 or answer.json()["code"] == "forbidden"


def test_a_secret_closes_loopback_too() -> None:
    """With a secret, a node on loopback requires tokens, even with `insecure`, and calls other nodes with one.

    The setting `revoked` is a list of names, separated by commas.
    """
    access = Access.of(ShardSettings(secret=SECRET, insecure=True, revoked="ci, laptop,"))

    assert isinstance(access, Access)
    assert access.revoked == {"ci", "laptop"}
    assert credentials(ShardSettings(secret=SECRET)).headers == {"authorization": f"Bearer {tokens.make(KEY, 'node')}"}
    assert credentials(ShardSettings()) == Credentials()


def test_tls_takes_two_files_that_fit(tmp_path: Path) -> None:
    """TLS settings are refused with only one file, a missing file, or a key that does not fit the certificate."""
    pairs = [self_signed(tmp_path / name) for name in ("a", "b")]
    (certificate, key), (_, other) = pairs
    missing = tmp_path / "none.pem"

    assert Tls.of(ShardSettings()) is None
    assert Tls.of(ShardSettings(tls_certificate=str(certificate), tls_key=str(key))) == Tls(certificate, key)
    for one, two in ((certificate, ""), ("", key), (certificate, other), (missing, key), (key, certificate)):
        with pytest.raises(RequestError, match=r"TLS requires two files|not a certificate and its key"):
            Tls.of(ShardSettings(tls_certificate=str(one), tls_key=str(two)))


def test_clients_find_their_credentials(tmp_path: Path) -> None:
    """An argument wins over the environment, and a token there over a token file.

    All certificates of a CA bundle are trusted, `repr` hides the token, and invalid tokens and CA files are refused, as
    is an empty token file.
    """
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
    file.write_text("\n")
    with pytest.raises(RequestError, match=r"^PARAMSERVER_TOKEN_FILE: .*token is empty"):
        Credentials.found(None, None, env)
    with pytest.raises(RequestError, match=r"^PARAMSERVER_CA: cannot read"):
        Credentials.found(None, None, {"PARAMSERVER_CA": str(tmp_path / "none")})


def self_signed(stem: Path) -> tuple[Path, Path]:
    """Create a self-signed certificate for 127.0.0.1; return its path and its key's."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate: apt install openssl")
    certificate, key = stem.with_suffix(".crt"), stem.with_suffix(".key")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "1", "-subj", "/CN=ps", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    assert ssl.PEM_cert_to_DER_cert(certificate.read_text())
    return certificate, key
