"""Settings: precedence of flags, environment and file, the origin of each value, and the refusal of bad ones."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paramserver.errors import RequestError
from paramserver_node import tokens
from paramserver_node.setting_checks import shown
from paramserver_node.settings import (
    ClientSettings,
    SchedulerSettings,
    Settings,
    ShardSettings,
    WorkerSettings,
    unknown_variables,
    url_of,
)

FILE_TEXT = """
redis = "redis://file"
log_level = "DEBUG"
[shard]
port = 9001
advertise = ["http://a:1", "http://b:2"]
[scheduler]
port = 9000
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "paramserver.toml"
    path.write_text(FILE_TEXT)
    return path


def test_each_value_comes_from_the_first_source_that_has_it(file: Path) -> None:
    """A value comes from the first of: flag, environment, the service's table, the file's top level, default."""
    env = {"PARAMSERVER_REDIS": "redis://env", "PARAMSERVER_NAME": "from-env", "PARAMSERVER_HOST": ""}

    found = ShardSettings.sources({"name": "s0", "host": None}, env, file)

    assert found["name"] == ("s0", "--name")
    assert found["redis"] == ("redis://env", "PARAMSERVER_REDIS")
    assert found["port"] == (9001, f"{file} [shard]")
    assert found["advertise"] == ("http://a:1,http://b:2", f"{file} [shard]")
    assert found["log_level"] == ("DEBUG", str(file))
    assert found["host"] == ("127.0.0.1", "default")


def test_a_list_is_the_text_that_the_setting_takes(tmp_path: Path) -> None:
    """A list of TOML becomes URLs or names separated by commas, but the keys of a secret on lines of their own."""
    keys = ["a" * 32, "b" * 32]
    path = tmp_path / "paramserver.toml"
    path.write_text(f"secret = {keys}\nrevoked = ['ci', 'laptop']")

    found = ShardSettings.sources({}, {}, path)

    assert tokens.keys_of(found["secret"][0]) == tuple(key.encode() for key in keys)
    assert found["revoked"][0] == "ci,laptop"


def test_an_empty_variable_turns_shared_memory_off(tmp_path: Path) -> None:
    """An empty variable turns shared memory off; for other settings it counts as unset, as compose files set it so."""
    env = {"PARAMSERVER_SHARED_MEMORY": "", "PARAMSERVER_NAME": ""}

    found = ShardSettings.sources({}, env, tmp_path / "none.toml")

    assert found["shared_memory"] == ("", "PARAMSERVER_SHARED_MEMORY")
    assert found["name"][1] == "default"


def test_text_becomes_the_type_of_the_setting(tmp_path: Path) -> None:
    """Text from the environment is converted to the type of the setting."""
    env = {"PARAMSERVER_PORT": "9100", "PARAMSERVER_SNAPSHOT_MIB_PER_S": "1.5"}

    found = ShardSettings.sources({}, env, tmp_path / "none.toml")

    assert (found["port"][0], found["snapshot_mib_per_s"][0]) == (9100, 1.5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("port = 'many'", "port"),
        ("port = 1.5", "port"),
        ("port = true", "port"),
        ("prot = 1", "did you mean 'port'"),
        ("[shard]\nhots = 'x'", "did you mean 'host'"),
        ("[sahrd]\nport = 1", "did you mean 'shard'"),
        ("shard = 3", "must be a table"),
        ("port = ", "paramserver.toml"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    """A value of the wrong type, an unknown key and invalid TOML are refused, and the error says what to fix."""
    path = tmp_path / "paramserver.toml"
    path.write_text(text)

    with pytest.raises(RequestError, match=says):
        ShardSettings.sources({}, {}, path)


@pytest.mark.skipif(sys.platform == "win32", reason="no node runs there")
@pytest.mark.parametrize("where", ["file", "folder"])
def test_a_settings_file_of_another_user_is_named(short_path: Path, where: str) -> None:
    """A file that this user may not read is refused by name, with what to do, and not passed over."""
    path, root = short_path / "paramserver.toml", os.geteuid() == 0
    path.write_text("port = 9100")
    path.chmod(0o600 if root else 0)
    short_path.chmod(0o755 if where == "file" else 0)
    if root:
        os.seteuid(65534)
    try:
        with pytest.raises(RequestError, match=r"paramserver.toml: cannot be read: Permission denied.*allow this user"):
            ShardSettings.sources({}, {}, path)
    finally:
        if root:
            os.seteuid(0)
        short_path.chmod(0o700)


def test_files_may_begin_with_the_mark_of_windows_editors(tmp_path: Path) -> None:
    """A byte order mark, with which editors on Windows begin UTF-8, is no part of the first setting or of a value."""
    (tmp_path / "paramserver.toml").write_text("port = 9100", encoding="utf-8-sig")
    (tmp_path / "secret").write_text("a-secret-of-some-length-0123456789", encoding="utf-8-sig")
    env = {"PARAMSERVER_SECRET_FILE": str(tmp_path / "secret")}

    found = ShardSettings.sources({}, env, tmp_path / "paramserver.toml")

    assert (found["port"][0], found["secret"][0]) == (9100, "a-secret-of-some-length-0123456789")


def test_passwords_are_not_shown() -> None:
    """A password in a URL is replaced by *** where settings are printed."""
    assert shown("redis://user:secret@host:6379/0") == "redis://user:***@host:6379/0"
    assert shown("redis://:secret@host") == "redis://:***@host"
    assert shown("redis://u:se:cr@et@host:1,http://v:x@h") == "redis://u:***@host:1,http://v:***@h"
    assert shown("http://a:1,http://b:2") == "http://a:1,http://b:2"


def test_a_value_may_be_in_a_file_that_a_variable_names(tmp_path: Path) -> None:
    """`PARAMSERVER_…_FILE` names a file whose text, without its line end, is the value unless the variable is set."""
    secret = tmp_path / "redis-url"
    secret.write_text("redis://:pw@redis:6379/0\n")
    env = {"PARAMSERVER_REDIS_FILE": str(secret)}

    found = ShardSettings.sources({}, env, tmp_path / "none.toml")
    both = ShardSettings.sources({}, env | {"PARAMSERVER_REDIS": "redis://env"}, tmp_path / "none.toml")

    assert found["redis"] == ("redis://:pw@redis:6379/0", "PARAMSERVER_REDIS_FILE")
    assert both["redis"] == ("redis://env", "PARAMSERVER_REDIS")


def test_a_missing_file_of_a_value_is_named(tmp_path: Path) -> None:
    """A `PARAMSERVER_…_FILE` that cannot be read is refused by name; the default is not used instead."""
    with pytest.raises(RequestError, match=r"PARAMSERVER_REDIS_FILE.*absent"):
        ShardSettings.sources({}, {"PARAMSERVER_REDIS_FILE": str(tmp_path / "absent")}, tmp_path / "none.toml")


@pytest.mark.parametrize("text", ["", " \n\n", "\ufeff"])
def test_an_empty_file_is_no_secret(tmp_path: Path, text: str) -> None:
    """An empty file of a secret is refused by name: without a secret a node asks nobody on its machine for a token."""
    (tmp_path / "empty").write_text(text, encoding="utf-8")
    revoked = {"PARAMSERVER_REVOKED_FILE": str(tmp_path / "empty")}

    for service in (SchedulerSettings, ShardSettings, ClientSettings):
        with pytest.raises(RequestError, match=r"PARAMSERVER_SECRET_FILE: .*is empty.*psctl secret"):
            service.sources({}, {"PARAMSERVER_SECRET_FILE": str(tmp_path / "empty")}, tmp_path / "none.toml")
    assert ShardSettings.sources({}, revoked, tmp_path / "none.toml")["revoked"][0] == ""


def test_a_node_on_every_address_is_reached_by_its_host_name() -> None:
    """The URL of a node on 0.0.0.0 or :: has its host name; any other address is kept, IPv6 in brackets."""
    name = socket.gethostname()

    assert url_of("0.0.0.0", 8701) == url_of("::", 8701) == f"http://{name}:8701"
    assert url_of("10.0.0.5", 8701) == "http://10.0.0.5:8701"
    assert url_of("fd00::5", 8701) == "http://[fd00::5]:8701"


def of_environment(service: type[Settings], name: str, value: str) -> Any:
    """Return the value that the service reads from the environment variable of a setting."""
    return service.sources({}, {f"PARAMSERVER_{name.upper()}": value}, Path("none"))[name][0]


@pytest.mark.parametrize(
    ("service", "name", "value", "says"),
    [
        (ShardSettings, "redis", "foo", "not 'foo'"),
        (ShardSettings, "redis", "http://h:1", "redis://HOST:6379/0"),
        (ShardSettings, "redis", "redis://h:port/0", "redis://HOST:6379/0"),
        (ShardSettings, "redis", "redis://:se@cret@h:port/0", r"not 'redis://:\*\*\*@h:port/0'"),
        (ShardSettings, "redis", "user:secret@h", "not 'h'"),
        (ShardSettings, "redis", "redis://h:6379/abc", "redis://HOST:6379/0"),
        (ShardSettings, "redis", "redis://h:6379/1/2", "redis://HOST:6379/0"),
        (ShardSettings, "redis", "redis://h:0", "redis://HOST:6379/0"),
        (ShardSettings, "redis", "redis://a..b:1", "redis://HOST:6379/0"),
        (ShardSettings, "redis", "redis://h/0#1", "redis://HOST:6379/0"),
        (ShardSettings, "redis", "unix://", "redis://HOST:6379/0"),
        (ShardSettings, "redis", "unix://run/redis.sock", "redis://HOST:6379/0"),
        (SchedulerSettings, "redis", "redis://:secret@h/0?db=x", "'db'"),
        (SchedulerSettings, "redis", "redis://h/0?foo=bar", "'foo'"),
        (SchedulerSettings, "redis", "redis://h/0?health_check_interval=x", "options"),
        (SchedulerSettings, "redis", "rediss://h/0?ssl_cert_reqs=maybe", "maybe"),
        *[
            (ShardSettings, "redis", f"redis://h/0?{option}=1", f"does not allow: '{option}'")
            for option in ("decode_responses", "encoding", "protocol", "max_connections", "socket_timeout",
                           "socket_read_size", "redis_connect_func", "socket_keepalive_options")
        ],
        (ShardSettings, "log_level", "foo", "DEBUG.*not 'foo'"),
        *[(ShardSettings, "revoked", v, "names of tokens") for v in ("ci;laptop", "ci laptop", "ps1.node.secret.0.x")],
        *[(service, "revoked", "ci, node", "the nodes' own token") for service in (SchedulerSettings, ShardSettings)],
        *[(SchedulerSettings, "name", v, "printable") for v in ("a\nb", "a\udcff", 129 * "a")],
        *[(ShardSettings, "snapshot_mib_per_s", v, "a number from 0.001") for v in ("0", "-1", "nan", "inf", "1e-300")],
        *[(ShardSettings, "stop_s", v, "from 10 to 86,400") for v in ("0", "9.9", "86401", "nan", "inf")],
        *[(ClientSettings, "timeout_s", v, "more than 0") for v in ("0", "-1", "nan", "inf", "1e300")],
        *[(s, "port", v, "65535") for s in (ShardSettings, SchedulerSettings) for v in ("0", "-1", "65536", "99999")],
        (ShardSettings, "memory_limit", "x", "'x' is not a size"),
        (ShardSettings, "memory_limit", "1", "from 64MiB"),
        (ShardSettings, "memory_limit", "0.0001", "from 64MiB"),
        (ShardSettings, "memory_limit", "9" * 400, "not a size"),
        (ShardSettings, "memory_limit", "1" + "0" * 18, "to 8PiB"),
        *[(ShardSettings, "host", v, "host name") for v in ("a..b", "[::1]", "two words", "1.2.3")],
        *[
            (ShardSettings, name, value, "like http://HOST:PORT")
            for name in ("scheduler", "advertise")
            for value in (",", "foo", "h:1", "http://h:abc", "http://h:0", "http://h:99999", "http://", "http://h:1,foo",
                          "ftp://h", "unix:///run/x", "http://h:1/?a", "http://u:secret@h:1", "http://" + 60 * "a.b.c.")
        ],
        (ShardSettings, "advertise", ",".join(f"http://h:{i}" for i in range(1, 17)), "at most 15 URLs"),
        *[
            (SchedulerSettings, name, value, "must be")
            for name in ("advertise", "page_url")
            for value in (",", "foo", "http://h:abc", "http://a:1,http://b:2")
        ],
        *[
            (service, "url", value, "like http://HOST:PORT")
            for service in (WorkerSettings, ClientSettings)
            for value in (",", "http://h:abc", "h:0", "ftp://h", "http://u:secret@h:1", "http://u:secret@h h:1")
        ],
        (ShardSettings, "ca", "/nope", "cannot read /nope"),
        (WorkerSettings, "ca", __file__, "holds no certificate"),
    ],
)  # fmt: skip
def test_a_value_that_its_user_would_stumble_over_is_refused_by_name(
    service: type[Settings], name: str, value: str, says: str
) -> None:
    """An invalid value is refused with its setting and origin, before it is used, and without showing a password."""
    with pytest.raises(RequestError, match=rf"^{name} \(from PARAMSERVER_{name.upper()}\): .*{says}") as refused:
        of_environment(service, name, value)
    assert refused.value.code == "invalid_field"
    assert "cret" not in str(refused.value)


@pytest.mark.parametrize("service", [SchedulerSettings, ShardSettings])
def test_a_secret_that_can_be_guessed_is_refused_by_name(service: type[Settings]) -> None:
    """A secret that is too short is refused with its setting and origin, and is not shown."""
    with pytest.raises(RequestError, match=r"^secret \(from PARAMSERVER_SECRET\): ") as refused:
        of_environment(service, "secret", "guessed")
    assert refused.value.code == "invalid_field"
    assert "guessed" not in str(refused.value)


@pytest.mark.parametrize(
    ("service", "name", "value"),
    [
        *[
            (ShardSettings, "redis", value)
            for value in ("rediss://:x@[::1]:1/2", "unix:///run/redis.sock", "unix://:x@/run/redis.sock?db=2",
                          "redis://:p%2F@h", "redis://h/", "redis:///1", "rediss://h/0?ssl_cert_reqs=none",
                          "redis://h/0?client_name=a&health_check_interval=30&socket_keepalive=1&protocol=")
        ],
        (ShardSettings, "revoked", "ci, laptop,"),
        (SchedulerSettings, "name", "scheduler 1, é"),
        (ShardSettings, "log_level", "warning"),
        (ShardSettings, "memory_limit", "64MiB"),
        *[(ShardSettings, "host", value) for value in ("::1", "0.0.0.0", "my_node.local")],
        (ShardSettings, "advertise", "http://a:1/, https://b.svc.,http://[fd00::5]:8701/below"),
        (ShardSettings, "scheduler", "http://a:1, http://b:2,"),
        (SchedulerSettings, "advertise", "http://scheduler_1:8700/"),
        (SchedulerSettings, "page_url", "https://example.org/paramserver"),
        *[(ClientSettings, "url", value) for value in ("h:8700", "http://a:1,b:2, c")],
    ],
)  # fmt: skip
def test_a_value_in_another_form_is_taken(service: type[Settings], name: str, value: str) -> None:
    """Unusual but valid forms of a value are accepted unchanged."""
    assert of_environment(service, name, value) == value


@pytest.mark.parametrize("program", ["scheduler", "shard", "worker"])
def test_the_flag_of_the_log_level_is_read(program: str) -> None:
    """Each program takes --log-level, and refuses a level that there is not."""
    command = [sys.executable, "-P", "-m", f"paramserver_{program}", "--log-level", "LOUD"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode != 0
    assert "not 'LOUD'" in done.stderr


def test_a_number_too_large_for_any_is_refused(tmp_path: Path) -> None:
    """A TOML integer that is too large for a float is refused, naming the setting."""
    path = tmp_path / "paramserver.toml"
    path.write_text(f"snapshot_mib_per_s = 1{'0' * 400}")
    with pytest.raises(RequestError, match="snapshot_mib_per_s"):
        ShardSettings.sources({}, {}, path)


def test_nobody_is_sent_to_a_url_that_cannot_be_reached() -> None:
    """A node on a port chosen by the system is refused unless `advertise` says under which URL it is reached."""
    with pytest.raises(RequestError, match="advertise"):
        url_of("127.0.0.1", 0)


def test_misspelled_variables_are_told() -> None:
    """A PARAMSERVER_ variable that no program reads is named, with the one that was meant; values are not shown."""
    env = {
        "PARAMSERVER_MEMROY_LIMIT": "8GiB",
        "PARAMSERVER_SECERT_FILE": "/run/key",
        "PARAMSERVER_ZZZ": "cret",
        "PARAMSERVER_REDIS_FILE": "/run/url",
        "PARAMSERVER_ALLOW": "jobs",  # of another program: one environment may serve several
        "PARAMSERVER_CRASH_AT": "",
        "HOME": "/",
    }

    assert unknown_variables(env) == (
        "PARAMSERVER_MEMROY_LIMIT (did you mean PARAMSERVER_MEMORY_LIMIT?), "
        "PARAMSERVER_SECERT_FILE (did you mean PARAMSERVER_SECRET_FILE?), PARAMSERVER_ZZZ"
    )
    assert unknown_variables({"PARAMSERVER_PORT": "1", "PARAMSERVER": "1"}) == ""
