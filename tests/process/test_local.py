"""`ps.local`: a private cluster that ends with its client."""

import gc
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.waiting import eventually

import paramserver as ps
from paramserver_cli.state_directory import StateDir

pytestmark = pytest.mark.process


def gone(url: str) -> bool:
    """Whether nobody answers there."""
    try:
        ps.connect(url).close()
    except ps.Unreachable:
        return True
    return False


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_local_cluster_comes_and_goes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`ps.local` returns a client of a working cluster, which is stopped when the block ends; closing it twice is fine.

    Neither a forked child that leaves the block stops it, nor the attempt to start another one in its folder.  A Redis
    that is configured here is that of another cluster, and is left alone.
    """

    class LeftByChild(BaseException): ...

    caplog.set_level(logging.INFO)
    monkeypatch.setenv("PARAMSERVER_REDIS", "redis://127.0.0.1:1/0")
    try:
        with ps.local(shards=1, state_dir=tmp_path) as client:
            with pytest.raises(ps.Unavailable, match="already running"):
                ps.local(shards=1, state_dir=tmp_path)
            model = client.create_model("m", {"w": np.ones(5)}, optimizer="sum")
            child = os.fork()
            if not child:
                raise LeftByChild
            assert os.waitpid(child, 0)[1] == 0
            model.push({"w": np.ones(5)}, timeout=20)
            assert model.pull()["w"].tolist() == [2.0] * 5
            url = client.url
    except LeftByChild:
        os._exit(0)

    client.close()  # once more does no harm
    with pytest.raises(ps.Unreachable):
        ps.connect(url)


def test_a_local_cluster_lives_as_long_as_something_uses_it() -> None:
    """Without a block, as in the cells of a notebook, the cluster stays while the client, or a model of it, does."""
    model = ps.local(shards=1).create_model("m", {"w": np.ones(5)})
    gc.collect()
    assert model.pull()["w"].tolist() == [1.0] * 5

    url = model._client.url
    del model
    gc.collect()
    assert gone(url)


def test_a_local_cluster_that_nobody_closes_ends_with_its_process() -> None:
    """A program that ends without closing the client leaves no cluster behind."""
    program = "import paramserver as ps; c = ps.local(shards=1); print(c.url)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert gone(done.stdout.strip())
    assert done.stderr == ""


def test_a_local_cluster_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    """A process that a signal ends, as a notebook's kernel may be, leaves no cluster behind."""
    program = "import os, signal, sys, paramserver as ps; c = ps.local(shards=1, state_dir=sys.argv[1]);"
    program += "print(c.url, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    argv = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)

    assert done.returncode == -signal.SIGKILL
    eventually(lambda: not StateDir(tmp_path).is_running(), what="the end of the cluster")
    assert gone(done.stdout.strip())


def test_a_local_cluster_starts_in_a_process_without_standard_streams(tmp_path: Path) -> None:
    """A script whose standard streams are closed, as by `<&-`, gets its cluster, which ends with it."""
    program = "import os, sys; os.closerange(0, 3); import paramserver as ps; c = ps.local(1, state_dir=sys.argv[1]);"
    program += "c.create_model('m', {'w': (2,)}).pull()"
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == 0

    assert (tmp_path / "plan.json").exists()
    eventually(lambda: not StateDir(tmp_path).is_running(), what="the end of the cluster")
