"""psctl on a real cluster: models, runs, checkpoints, `doctor`, and exit codes and messages of errors."""

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import redis
from tests.servers import running_redis
from tests.waiting import eventually
from typer.testing import CliRunner

import paramserver as ps
from paramserver_cli import config, doctor
from paramserver_cli.main import app

from .cluster import MARK, PSCTL, Cluster, cluster, get, marked
from .prepared import prepared

pytestmark = pytest.mark.process

SPEC = """
params:
  w: {shape: [4, 2], init: {kind: constant, value: 1.5}}
  layers.0.bias: {shape: []}
optimizer: {name: adam, lr: 1e-3}
consistency: {mode: ssp, staleness: 2}
"""


def test_a_model_is_created_changed_and_pulled(shared_cluster: Cluster, tmp_path: Path) -> None:
    """`create` reads YAML and refuses an existing model without --exist-ok, `set` changes settings, `pull` writes .npy.

    The YAML number 1e-3 is read as a number, not as text.  A `pull` of a version that does not come in time is refused.
    """
    (tmp_path / "spec.yaml").write_text(SPEC)
    create = ["create", "psctl-model", "-f", str(tmp_path / "spec.yaml")]

    made = shared_cluster.psctl(*create, "--json")
    again = shared_cluster.psctl(*create)
    exists = shared_cluster.psctl(*create, "--exist-ok")
    changed = shared_cluster.psctl("set", "psctl-model", "lr=0.5", "mode=async", "--json")
    env = os.environ | {"PARAMSERVER_URL": shared_cluster.url}
    pulled = subprocess.run([*PSCTL, "pull", "psctl-model", "w"], capture_output=True, env=env, timeout=60)
    early = shared_cluster.psctl("pull", "psctl-model", "w", "--min-version", "7", "--wait-s", "0.1")

    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["spec"]["optimizer"]["lr"] == 1e-3
    assert again.returncode == 4
    assert exists.returncode == 0
    spec = json.loads(changed.stdout)["spec"]
    assert (spec["optimizer"]["lr"], spec["consistency"]["mode"]) == (0.5, "async")
    np.testing.assert_array_equal(np.load(io.BytesIO(pulled.stdout)), np.full((4, 2), 1.5, np.float32))
    assert (early.returncode, early.stdout, "not yet at 7" in early.stderr) == (4, "", True), early.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_file_that_cannot_take_all_values_is_an_error(
    shared_cluster: Cluster, tmp_path: Path, unbuffered: str
) -> None:
    """If standard output takes only some of what `pull` writes, that is said and the exit code is 1.

    With PYTHONUNBUFFERED, as in containers, Python does not say so by itself.
    """
    with ps.connect(shared_cluster.url) as client:
        client.create_model("psctl-large", {"w": np.zeros(1 << 20, np.float32)}, exist_ok=True)
    env = os.environ | {"PARAMSERVER_URL": shared_cluster.url, "PYTHONUNBUFFERED": unbuffered}
    limited = ["sh", "-c", 'ulimit -f 4000; exec "$@"', "sh", *PSCTL, "pull", "psctl-large", "w"]
    with (tmp_path / "w.npy").open("wb") as out:
        pulled = subprocess.run(limited, stdout=out, stderr=subprocess.PIPE, text=True, env=env, timeout=60)

    assert (pulled.returncode, pulled.stderr) == (1, "psctl: File too large\n")


def test_a_model_is_deleted_once_that_is_confirmed(shared_cluster: Cluster, tmp_path: Path) -> None:
    """`delete` asks before it deletes anything, and `--yes` is the answer; a model that is not there is an error."""
    (tmp_path / "spec.yaml").write_text(SPEC)
    shared_cluster.psctl("create", "psctl-gone", "-f", str(tmp_path / "spec.yaml"))

    unanswered = shared_cluster.psctl("delete", "psctl-gone")
    listed = shared_cluster.psctl("models")
    deleted = shared_cluster.psctl("delete", "psctl-gone", "--yes")
    again = shared_cluster.psctl("delete", "psctl-gone", "--yes")

    assert unanswered.returncode == 1
    assert "delete model psctl-gone, at version 0?" in unanswered.stderr
    assert "psctl-gone" in listed.stdout
    assert (deleted.returncode, deleted.stdout) == (0, "model psctl-gone is deleted\n")
    assert again.returncode == 4


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["pull", "no-such-model", "w"], 4, "no-such-model"),
        (["run", "show", "run-999"], 4, "run-999"),
        (["logs", "shard-9"], 1, "no log"),
        (["pull", "wrong", "*"], 2, "stands for 2 parameters, name one of: w, v"),
        (["pull", "absent", "w"], 4, "psctl create makes one"),
        (["set", "wrong?x", "lr=0.1"], 4, "no model 'wrong?x'"),
        (["run", "stop", "run-1?x"], 4, "no run 'run-1?x'"),
        (["checkpoint", "save", "wrong", "/dev/null/x"], 1, "/dev/null"),
        (["checkpoint", "restore", "./nope", "--as", "wrong"], 2, "there is no folder './nope'"),
        (["checkpoint", "restore", "latest", "--as", "wrong"], 2, "restore MODEL latest"),
        (["checkpoint", "restore", "wrong", "nope"], 4, "psctl checkpoint list wrong"),
    ],
)
def test_what_is_wrong_shows_in_the_exit_code(
    shared_cluster: Cluster, arguments: list[str], code: int, text: str
) -> None:
    """Usage errors exit with 2, refusals by the cluster with 4, local failures with 1; each names what is wrong."""
    ps.connect(shared_cluster.url).create_model("wrong", {"w": (2,), "v": (2,)}, exist_ok=True)

    done = shared_cluster.psctl(*arguments)

    assert done.returncode == code, done.stderr
    assert text in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no file that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["config"], ["--help"]], ids=" ".join)
def test_a_few_lines_that_a_full_disk_cannot_take_are_an_error(arguments: list[str], unbuffered: str) -> None:
    """If standard output takes nothing, psctl exits with 1 and one line on stderr, and Python adds none at exit."""
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*PSCTL, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, env=env, timeout=60)

    assert (done.returncode, done.stderr) == (1, "psctl: No space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no file that is always full")
def test_a_cluster_that_is_detached_outlives_what_cannot_be_said_of_it(tmp_path: Path) -> None:
    """If `up --detach` cannot write its output, it exits with 1 and one line on stderr; the cluster keeps running."""
    argv = [*PSCTL, "up", "--detach", "--shards", "1", "--state-dir", str(tmp_path / "state")]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100)
    down = subprocess.run([*PSCTL, "down", "--state-dir", str(tmp_path / "state")], capture_output=True, text=True)

    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
    assert "the cluster is up" in done.stderr
    assert "is down" in down.stdout


def measured(running: Cluster) -> list[dict[str, str]]:
    """Return what `doctor` finds in both shards, once these serve: after a standstill of 3 s a shard waits for it."""

    def found() -> list[dict[str, str]]:
        done = running.psctl("doctor", "--json")
        assert done.returncode == 0, done.stderr
        shards = [i for i in json.loads(done.stdout)["items"] if i["check"].startswith("shard-")]
        assert all("MiB/s" in i["detail"] for i in shards), shards
        return shards

    return eventually(found, what="the bandwidth of the shards")


def test_a_cluster_goes_on_with_what_it_had_wherever_its_folder_is(tmp_path: Path) -> None:
    """After `scale shards 3`, `down` and a move of the folder `up` starts three shards, and says so.

    The list of checkpoints names their files where they are now.
    """
    state, moved = tmp_path / "c", tmp_path / "moved"
    with cluster(state, shards=1) as first:
        with ps.connect(first.url) as client:
            client.create_model("kept", {"w": (4,)})
        assert first.psctl("checkpoint", "save", "kept").returncode == 0
        scaled = first.psctl("scale", "shards", "3", "--state-dir", str(state), timeout_s=150)
        assert scaled.returncode == 0, scaled.stdout + scaled.stderr
    state.rename(moved)
    try:
        again = prepared().run(["up", "--detach", "--json", "--state-dir", str(moved)], os.environ, 220.0)
        assert again.returncode == 0, again.stdout + again.stderr
        assert len(json.loads(again.stdout)["shards"]) == 3
        assert "as before: --shards 3 " in again.stderr
        with ps.connect(json.loads(again.stdout)["scheduler"]) as client:
            (kept,) = client.model("kept").checkpoints()
        assert (Path(kept["path"]) / "manifest.json").exists()
    finally:
        prepared().run(["down", "--state-dir", str(moved)], os.environ, 60.0)


def test_everything_that_lists_lists_json(shared_cluster: Cluster) -> None:
    """With `--json`, every listing command prints one object with `items`, and `status` prints the status."""
    ps.connect(shared_cluster.url).create_model("listed", {"w": (2,)}, exist_ok=True)
    for arguments in ("models", "list", "run list", "config", "checkpoint list listed"):
        done = shared_cluster.psctl(*arguments.split(), "--json")
        assert done.returncode == 0, done.stderr
        assert isinstance(json.loads(done.stdout)["items"], list), arguments
    status = json.loads(shared_cluster.psctl("status", "--json").stdout)
    assert {"cluster", "nodes", "models"} <= set(status)
    assert len(measured(shared_cluster)) == 2


@pytest.mark.parametrize("form", [["--json"], []])
def test_a_status_that_is_watched_goes_into_a_pipe_each_second(shared_cluster: Cluster, form: list[str]) -> None:
    """Where there is no terminal, `status --watch` prints one status after another, until it is interrupted."""
    argv = [*PSCTL, "status", "--watch", "--url", shared_cluster.url, *form]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        heads = (line for line in watch.stdout if line.startswith(("cluster ", "{")))
        assert [next(heads), next(heads)]
        watch.send_signal(signal.SIGINT)
        watch.communicate(timeout=20)
    assert watch.returncode == 130


def test_a_status_that_is_watched_shows_at_a_dumb_terminal(shared_cluster: Cluster) -> None:
    """At a terminal that cannot redraw lines, `status --watch` prints one status after another, too."""
    argv = [*PSCTL, "status", "--watch", "--url", shared_cluster.url]
    screen, terminal = os.openpty()
    with (
        open(terminal, "wb") as out,
        open(screen, "rb", buffering=0) as lines,
        subprocess.Popen(argv, stdout=out, env=os.environ | {"TERM": "dumb"}) as watch,
    ):
        shown = b""
        while shown.count(b"cluster ") < 2:
            shown += lines.read(4096)
        watch.send_signal(signal.SIGINT)


@pytest.mark.parametrize(("full", "result"), [(0.5, "ok"), (0.95, "warning"), (1.5, "failed")])
def test_doctor_compares_what_redis_holds_with_its_bound(tmp_path: Path, full: float, result: str) -> None:
    """`doctor` warns if Redis is nearly full and fails if it is full, because a full Redis refuses every write."""
    with running_redis(tmp_path) as url, redis.Redis.from_url(url) as client:
        client.setrange("something", (32 << 20) - 1, b"x")  # no large request, whose buffers would be freed later
        client.config_set("maxmemory", int(client.info("memory")["used_memory"] / full))
        (found,) = [f for f in doctor.machine(url) if f.check == "Redis"]
    assert (found.result, "CONFIG SET maxmemory" in found.remedy) == (result, result != "ok")
    assert ("full" in found.detail) is (result != "ok")


@pytest.mark.parametrize(("more", "result"), [((), "warning"), (("--maxmemory", "1gb"), "ok")])
def test_doctor_asks_for_a_bound_of_redis(tmp_path: Path, more: tuple[str, ...], result: str) -> None:
    """`doctor` warns about a Redis without `maxmemory`: out of memory, it is killed instead of refusing writes."""
    with running_redis(tmp_path, more=more) as url:
        (found,) = [f for f in doctor.machine(url) if f.check == "Redis"]
    assert (found.result, "CONFIG SET maxmemory" in found.remedy) == (result, result == "warning")


@pytest.mark.parametrize(
    ("more", "result"),
    [
        (("--appendonly", "no", "--maxmemory", "1gb"), "warning"),
        (("--maxmemory-policy", "allkeys-lru", "--maxmemory", "1gb"), "failed"),
        ((), "warning"),
        (("--maxmemory", "1mb"), "failed"),
    ],
)
def test_what_doctor_advises_for_redis_outlives_its_restart(tmp_path: Path, more: tuple[str, ...], result: str) -> None:
    """Each remedy for Redis names its redis.conf, as a restart forgets CONFIG SET.

    A Redis that restarts without `appendonly` would ignore its append-only file and start empty.
    """
    with running_redis(tmp_path, more=more) as url:
        (found,) = [f for f in doctor.machine(url) if f.check == "Redis"]
    assert found.result == result
    assert "CONFIG SET" in found.remedy
    assert "redis.conf" in found.remedy
    assert ("starts empty" in found.remedy) is ("no append-only file" in found.detail)


def test_doctor_finds_a_redis_in_order_that_lets_nobody_configure_it(tmp_path: Path) -> None:
    """`doctor` needs no CONFIG, which managed servers refuse; of a Unix socket it names the path."""
    more = ("--maxmemory", "1gb", "--rename-command", "CONFIG", "", "--unixsocket", str(tmp_path / "socket"))
    with running_redis(tmp_path, more=more):
        (found,) = [f for f in doctor.machine(f"unix://{tmp_path}/socket") if f.check == "Redis"]
    assert (found.result, found.detail.partition(" ")[0]) == ("ok", f"{tmp_path}/socket")
    assert found.detail.endswith(", noeviction")


def test_doctor_looks_at_the_redis_that_up_would_use(tmp_path: Path) -> None:
    """`doctor` checks the Redis that PARAMSERVER_REDIS names, if it is set."""
    with running_redis(tmp_path, more=("--maxmemory", "1gb")) as url:
        env = os.environ | {"PARAMSERVER_REDIS": url, "PARAMSERVER_URL": "http://127.0.0.1:1"}
        done = prepared().run(["doctor", "--json"], env, 60.0)
    (found,) = [f for f in json.loads(done.stdout)["items"] if f["check"] == "Redis"]
    assert found["detail"].startswith(url.removeprefix("redis://").split("/")[0])


def test_doctor_lists_misspelled_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """`doctor` warns of a PARAMSERVER_ variable that no program reads, and says nothing of them where there is none."""
    for name, result in (("PARAMSERVER_HOST", []), ("PARAMSERVER_HOTS", ["warning"])):
        monkeypatch.setenv(name, "::1")
        found = [f for f in doctor.machine(None) if f.check == "variables"]
        assert [f.result for f in found] == result
    assert "PARAMSERVER_HOTS (did you mean PARAMSERVER_HOST?)" in found[0].detail


def test_doctor_asks_shards_past_the_proxies_of_the_environment(
    shared_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`doctor` reaches each shard as clients do: at its own address, by no proxy that HTTP_PROXY or ALL_PROXY names."""
    for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    assert len(measured(shared_cluster)) == 2


def test_doctor_finds_a_redis_that_does_not_answer() -> None:
    """A Redis that says nothing for three seconds is a finding of `doctor`, with its address."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        (found,) = [f for f in doctor.machine(f"redis://{address}/0") if f.check == "Redis"]
    assert (found.result, found.detail.partition(": ")[0]) == ("failed", address)
    assert "imeout" in found.detail


def test_doctor_shows_all_findings_where_redis_is_in_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a full Redis, the failed bandwidth check is one finding, and the other checks still run.

    It is the Redis of the cluster that runs here, also if nothing names it.
    """
    monkeypatch.setattr(doctor, "connect", lambda url, timeout_s: config.connect(url, timeout_s=timeout_s / 2))
    monkeypatch.setattr(doctor, "DELETE_TIMEOUT_S", 0.5)
    with cluster(tmp_path, shards=1) as running, redis.Redis.from_url(running.info["redis"]) as client:
        client.config_set("maxmemory", "1mb")
        done = CliRunner().invoke(app, ["doctor", "--json", "--url", running.url])
        client.config_set("maxmemory", 0)

    assert done.exit_code == 1, done.stderr
    found = {i["check"]: i for i in json.loads(done.stdout)["items"]}
    assert found["Redis"]["result"] == found["bandwidth"]["result"] == "failed"
    assert "full: " in found["Redis"]["detail"]
    assert "Redis" in found["bandwidth"]["detail"]
    assert {"cluster", "versions"} <= set(found)


def test_checkpoints_are_saved_restored_and_deleted(shared_cluster: Cluster, tmp_path: Path) -> None:
    """A checkpoint is restored from a folder under another name, and from the cluster under any, also the model's own.

    --overwrite replaces the folder of an earlier one, and --partitions sets how many the restored model has.
    """
    model = ps.connect(shared_cluster.url).create_model("saved", {"w": np.zeros(6)}, optimizer=ps.Sum())

    save = ["checkpoint", "save", "saved", str(tmp_path / "ck")]
    assert shared_cluster.psctl(*save).returncode == 0
    model.push({"w": np.arange(6.0)})
    kept = shared_cluster.psctl(*save)
    assert (kept.returncode, "--overwrite replaces it" in kept.stderr) == (4, True), kept.stderr
    assert shared_cluster.psctl(*save, "--overwrite").returncode == 0
    own = shared_cluster.psctl("checkpoint", "save", "saved")
    assert (own.returncode, "newest 3" in own.stderr) == (0, True), own.stderr
    model.push({"w": np.ones(6)})
    restored = shared_cluster.psctl(
        "checkpoint", "restore", str(tmp_path / "ck"), "--as", "saved2", "--partitions", "5"
    )
    back = shared_cluster.psctl("checkpoint", "restore", "saved", "latest")
    copied = shared_cluster.psctl("checkpoint", "restore", "saved", "latest", "--as", "saved3", "--partitions", "2")
    twice = shared_cluster.psctl("checkpoint", "restore", "saved", "latest", "--as", "saved3")
    named = shared_cluster.psctl("checkpoint", "save", "saved", "--name", "mine")
    assert (named.returncode, named.stdout, named.stderr) == (0, "saved as mine\n", "")
    assert shared_cluster.psctl("checkpoint", "delete", "saved", "mine").returncode == 0
    deleted = shared_cluster.psctl("checkpoint", "delete", "saved", own.stdout.split()[-1])
    assert (deleted.returncode, model.checkpoints()) == (0, []), deleted.stderr

    again = shared_cluster.psctl("checkpoint", "restore", str(tmp_path / "ck"))
    wrong = shared_cluster.psctl("checkpoint", "restore", str(tmp_path / "ck"), "--as", "a b")

    assert restored.returncode == 0, restored.stderr
    assert (again.returncode, "'saved' exists already" in again.stderr, "--exist-ok" in again.stderr) == (4, True, True)
    assert (wrong.returncode, "model name 'a b'" in wrong.stderr) == (4, True)
    assert back.returncode == 0, back.stderr
    assert (copied.returncode, copied.stdout) == (0, "restored model saved3\n"), copied.stderr
    assert (twice.returncode, "'saved3' exists" in twice.stderr, "--exist-ok" in twice.stderr) == (4, True, True)
    other = ps.connect(shared_cluster.url).model("saved2")
    np.testing.assert_array_equal(other.pull()["w"], np.arange(6.0))
    assert model.info()["spec"]["partitions"] != other.info()["spec"]["partitions"] == 5
    third = ps.connect(shared_cluster.url).model("saved3")
    assert (third.info()["spec"]["partitions"], third.pull()["w"].tolist()) == (2, list(range(6)))
    np.testing.assert_array_equal(model.pull()["w"], np.arange(6.0))


def test_a_disk_that_refuses_a_checkpoint_is_told_in_one_line(shared_cluster: Cluster, tmp_path: Path) -> None:
    """If a local checkpoint cannot be written, psctl prints the file and the system's error in one line."""
    ps.connect(shared_cluster.url).create_model("large", {"w": (1 << 16,)}, exist_ok=True)
    save = [*PSCTL, "checkpoint", "save", "large", str(tmp_path / "ck")]
    env = os.environ | {"PARAMSERVER_URL": shared_cluster.url}
    limited = ["bash", "-c", 'ulimit -f 64; exec "$@"', "bash", *save]
    done = subprocess.run(limited, capture_output=True, text=True, env=env, timeout=60)

    assert done.returncode == 1
    assert done.stderr.splitlines() == [f"psctl: {tmp_path}/ck/model.safetensors: File too large"]


def test_a_disk_of_the_cluster_that_refuses_a_checkpoint_is_asked_once(shared_cluster: Cluster) -> None:
    """If the scheduler cannot write a checkpoint, psctl shows the error and does not retry; the next has number 2.

    Until that one is written, the status says what is wrong, as nobody may have asked for the first.
    """
    ps.connect(shared_cluster.url).create_model("blocked", {"w": (2,)}, exist_ok=True)
    in_the_way = shared_cluster.state_dir / "checkpoints" / "blocked"
    in_the_way.parent.mkdir(exist_ok=True)
    in_the_way.touch()
    refused = shared_cluster.psctl("checkpoint", "save", "blocked")
    status = shared_cluster.psctl("status")
    in_the_way.unlink()
    saved = shared_cluster.psctl("checkpoint", "save", "blocked", "--json")

    assert refused.returncode == 4
    assert refused.stderr.startswith("psctl: the scheduler cannot write or read its disk: ")
    assert str(in_the_way) in refused.stderr
    assert json.loads(saved.stdout)["name"].startswith("000002-")
    assert "Model blocked: its last checkpoint was not written" in status.stdout
    assert "its last checkpoint" not in shared_cluster.psctl("status").stdout


def test_a_new_project_trains_at_once(shared_cluster: Cluster, tmp_path: Path) -> None:
    """`psctl train` on the files of `psctl new` ends with a finished run whose model has learned, and was saved."""
    folder = tmp_path / "my-model"
    assert shared_cluster.psctl("new", str(folder)).returncode == 0
    assert sorted(p.name for p in folder.iterdir()) == ["model.yaml", "train.py"]

    train = ["train", str(folder / "train.py"), "--model", "my-model", "--workers", "2", "--checkpoint-every", "50"]
    done = shared_cluster.psctl(*train, timeout_s=100)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished" in done.stdout
    model = ps.connect(shared_cluster.url).model("my-model")
    assert abs(float(model.pull()["b"][0]) - 0.5) < 0.2
    assert model.checkpoints()
    assert shared_cluster.psctl("new", str(folder)).returncode == 1


def test_a_script_is_run_by_its_own_workers(shared_cluster: Cluster, tmp_path: Path) -> None:
    """A pool worker that may run another project's `train.py` takes no place in the run of this one."""
    argv = [sys.executable, "-P", "-m", "paramserver_worker", "--name", "other", "--allow", "train"]
    with subprocess.Popen([*argv, "--url", shared_cluster.url], cwd=tmp_path) as other:
        try:
            pool = f"{shared_cluster.url}/pool"
            eventually(
                lambda: any(m["allow"] == ["train"] for m in get(pool).json()["items"]),
                within_s=60.0,
                what="its joining",
            )
            assert shared_cluster.psctl("new", str(tmp_path / "mine")).returncode == 0
            script = str(tmp_path / "mine" / "train.py")
            done = shared_cluster.psctl("train", script, "--model", "mine", "--workers", "1", timeout_s=100)
        finally:
            other.terminate()
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_training_of_a_model_that_trains_already_changes_nothing(shared_cluster: Cluster, tmp_path: Path) -> None:
    """`psctl train` on a model that another run trains is refused before it has changed the model's mode."""
    (tmp_path / "train.py").write_text("def train(worker):\n    pass\n")
    client = ps.connect(shared_cluster.url)
    model = client.create_model("busy", {"w": (2,)})
    run = client.create_run("busy", "elsewhere:train")
    before = model.info()["spec"]

    refused = shared_cluster.psctl("train", str(tmp_path / "train.py"), "--model", "busy", "--mode", "sync")

    assert refused.returncode == 4
    assert f"run '{run['id']}' is training model 'busy' (psctl run stop ends it" in refused.stderr
    assert model.info()["spec"] == before


def test_a_failing_script_shows_its_traceback(shared_cluster: Cluster, tmp_path: Path) -> None:
    """A training function that always raises fails the run; psctl prints the traceback and exits with 1.

    What its workers printed is still where psctl says.
    """
    (tmp_path / "broken.py").write_text("def train(worker, size):\n    raise RuntimeError(f'no data of size {size}')\n")
    (tmp_path / "model.yaml").write_text("params: {w: {shape: [2]}}\n")

    done = shared_cluster.psctl(
        "train", str(tmp_path / "broken.py"), "--model", "broken", "--workers", "1", "--arg", "size=7", timeout_s=100
    )

    assert done.returncode == 1
    assert "RuntimeError: no data of size 7" in done.stderr
    assert "broken.py" in done.stderr
    run = json.loads(shared_cluster.psctl("run", "list", "--json").stdout)["items"][0]
    assert run["state"] == "failed"
    assert "no data of size 7" in printed(done.stderr)


def printed(errors: str) -> str:
    """Remove the logs that a `psctl train` has left, and return what its workers have printed."""
    logs = Path(errors.split("what the workers have printed is in ")[1].splitlines()[0])
    text = "".join(log.read_text() for log in logs.glob("worker-*"))
    shutil.rmtree(logs.parent)
    return text


def test_what_follows_the_loop_is_done_before_a_training_ends(shared_cluster: Cluster, tmp_path: Path) -> None:
    """When a limit of clocks ends a run, `psctl train` lets its functions return: what they do at the end is done."""
    (tmp_path / "model.yaml").write_text("params: {w: {shape: [2]}}\n")
    (tmp_path / "counted.py").write_text(
        "import time\n"
        "def train(worker, path):\n"
        "    while not worker.draining:\n"
        "        worker.step({'w': [1.0, 1.0]})\n"
        "    time.sleep(1.5)\n"  # as long as a last evaluation takes
        "    open(path, 'w').write('measured')\n"
    )
    script, path = str(tmp_path / "counted.py"), tmp_path / "result"
    options = ("--model", "counted", "--workers", "1", "--clocks", "5", "--arg", f"path={path}")

    done = shared_cluster.psctl("train", script, *options, timeout_s=100)

    assert done.returncode == 0, done.stdout + done.stderr
    assert path.read_text() == "measured"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=["int", "term", "hup"]
)
def test_an_interrupted_training_stops_its_run(
    shared_cluster: Cluster, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """Ctrl-C, SIGTERM and a terminal that is closed end `psctl train`, stop its run and leave no worker process.

    What the workers have printed is left.
    """
    model = f"endless-{code}"
    (tmp_path / "endless.py").write_text(
        "def train(worker):\n    while not worker.draining:\n        worker.step({'w': [1.0, 1.0]})\n"
    )
    (tmp_path / "model.yaml").write_text("params: {w: {shape: [2]}}\n")
    argv = [*PSCTL, "train", str(tmp_path / "endless.py"), "--model", model, "--url", shared_cluster.url]
    env = os.environ | {MARK: str(tmp_path)}
    client = ps.connect(shared_cluster.url)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as train:
        eventually(lambda: client.model(model).pull().version > 5, what="some updates")

        train.send_signal(number)
        _, errors = train.communicate(timeout=30)

    assert train.returncode == code
    assert "Traceback" not in errors
    assert "place.begins" in printed(errors)
    (run,) = [r for r in client.runs() if r["model"] == model]
    assert run["state"] == "stopped"
    eventually(lambda: not marked(str(tmp_path)), what="the end of every worker")


def test_a_run_is_paused_resumed_and_stopped(shared_cluster: Cluster) -> None:
    """`pause`, `resume` and `stop` change a run's state; a run without workers shows how to start some.

    `run eval` of a stopped run is refused.
    """
    client = ps.connect(shared_cluster.url)
    client.create_model("patient", {"w": (2,)})
    run = client.create_run("patient", "paramserver.examples.digits:train")["id"]

    shown = shared_cluster.psctl("run", "show", run)
    states = [
        json.loads(shared_cluster.psctl("run", verb, run, "--json").stdout)["state"]
        for verb in ("pause", "resume", "stop")
    ]

    evaluated = shared_cluster.psctl("run", "eval", run)

    assert "paramserver-worker" in shown.stdout
    assert states == ["paused", "waiting", "stopped"]
    assert (evaluated.returncode, "has already ended (stopped)" in evaluated.stderr) == (4, True)
