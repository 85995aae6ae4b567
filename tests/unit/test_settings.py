"""Settings: flag over environment over file, each with its origin; mistakes are named."""

import socket
from pathlib import Path

import pytest

from paramserver.errors import RequestError
from paramserver_node.settings import ShardSettings, shown, url_of

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
    """Flag, environment, the service's table, the top level, default: the first that has a value gives it."""
    env = {"PARAMSERVER_REDIS": "redis://env", "PARAMSERVER_NAME": "from-env", "PARAMSERVER_HOST": ""}

    found = ShardSettings.sources({"name": "s0", "host": None}, env, file)

    assert found["name"] == ("s0", "--name")
    assert found["redis"] == ("redis://env", "PARAMSERVER_REDIS")
    assert found["port"] == (9001, f"{file} [shard]")
    assert found["advertise"] == ("http://a:1,http://b:2", f"{file} [shard]")
    assert found["log_level"] == ("DEBUG", str(file))
    assert found["host"] == ("127.0.0.1", "default")


def test_an_empty_variable_turns_shared_memory_off(tmp_path: Path) -> None:
    """Of other settings it says nothing, as compose files set what nobody has given."""
    env = {"PARAMSERVER_SHARED_MEMORY": "", "PARAMSERVER_NAME": ""}

    found = ShardSettings.sources({}, env, tmp_path / "none.toml")

    assert found["shared_memory"] == ("", "PARAMSERVER_SHARED_MEMORY")
    assert found["name"][1] == "default"


def test_text_becomes_the_type_of_the_setting(tmp_path: Path) -> None:
    """The environment's text is turned into numbers."""
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
    """A value of the wrong type, an unknown key and a file that is not TOML are refused with what to mend."""
    path = tmp_path / "paramserver.toml"
    path.write_text(text)

    with pytest.raises(RequestError, match=says):
        ShardSettings.sources({}, {}, path)


def test_passwords_are_not_shown() -> None:
    """A password in a URL is left out where settings are printed."""
    assert shown("redis://user:secret@host:6379/0") == "redis://user:***@host:6379/0"
    assert shown("redis://:secret@host") == "redis://:***@host"
    assert shown("redis://u:se:cr@et@host:1,http://v:x@h") == "redis://u:***@host:1,http://v:***@h"
    assert shown("http://a:1,http://b:2") == "http://a:1,http://b:2"


def test_a_value_may_be_in_a_file_that_a_variable_names(tmp_path: Path) -> None:
    """`PARAMSERVER_…_FILE` gives the text of a file, without its line end; the variable itself wins over it."""
    secret = tmp_path / "redis-url"
    secret.write_text("redis://:pw@redis:6379/0\n")
    env = {"PARAMSERVER_REDIS_FILE": str(secret)}

    found = ShardSettings.sources({}, env, tmp_path / "none.toml")
    both = ShardSettings.sources({}, env | {"PARAMSERVER_REDIS": "redis://env"}, tmp_path / "none.toml")

    assert found["redis"] == ("redis://:pw@redis:6379/0", "PARAMSERVER_REDIS_FILE")
    assert both["redis"] == ("redis://env", "PARAMSERVER_REDIS")


def test_a_missing_file_of_a_value_is_named(tmp_path: Path) -> None:
    """A file that cannot be read is refused; the default is not used in its stead."""
    with pytest.raises(RequestError, match=r"PARAMSERVER_REDIS_FILE.*absent"):
        ShardSettings.sources({}, {"PARAMSERVER_REDIS_FILE": str(tmp_path / "absent")}, tmp_path / "none.toml")


def test_a_node_on_every_address_is_reached_by_its_host_name() -> None:
    """0.0.0.0 and :: are no addresses to connect to; any other is kept, IPv6 in brackets."""
    name = socket.gethostname()

    assert url_of("0.0.0.0", 8701) == url_of("::", 8701) == f"http://{name}:8701"
    assert url_of("10.0.0.5", 8701) == "http://10.0.0.5:8701"
    assert url_of("fd00::5", 8701) == "http://[fd00::5]:8701"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("redis", "foo", r"redis \(from PARAMSERVER_REDIS\).*not 'foo'"),
        ("redis", "http://h:1", "redis://HOST:6379/0"),
        ("redis", "redis://h:port/0", "redis://HOST:6379/0"),
        ("redis", "redis://:se@cret@h:port/0", r"not 'redis://:\*\*\*@h:port/0'"),
        ("redis", "user:secret@h", "not 'h'"),
        ("log_level", "foo", r"log_level \(from PARAMSERVER_LOG_LEVEL\).*DEBUG.*not 'foo'"),
    ],
)
def test_a_value_that_its_user_would_stumble_over_is_refused_by_name(
    tmp_path: Path, name: str, value: str, says: str
) -> None:
    """It is said where the value comes from, in place of a traceback of whoever takes it up; no password is shown."""
    with pytest.raises(RequestError, match=says) as refused:
        ShardSettings.sources({}, {f"PARAMSERVER_{name.upper()}": value}, tmp_path / "none")
    assert "cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("redis", "rediss://:x@[::1]:1/2"), ("redis", "unix:///run/redis.sock"), ("log_level", "warning")],
)
def test_a_value_in_another_form_is_taken(tmp_path: Path, name: str, value: str) -> None:
    """Whatever the client of Redis and the log understand."""
    found = ShardSettings.sources({}, {f"PARAMSERVER_{name.upper()}": value}, tmp_path / "none")
    assert found[name][0] == value
