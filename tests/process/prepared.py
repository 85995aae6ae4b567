"""psctl in processes that are forked off one that has imported it: the imports take longer than most commands."""

import atexit
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

ANSWER_S = 60.0
"""Time for the imports before the first command begins."""


class Prepared:
    """The process that forks, once for each command; one at a time."""

    def __init__(self) -> None:
        one_thread = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # a process of several is not to be forked
        argv = [sys.executable, "-P", __file__]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, bufsize=0, stdin=pipe, stdout=pipe, env=os.environ | one_thread)
        self._one = threading.Lock()
        atexit.register(self._close)

    def run(self, args: Sequence[str], env: Mapping[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run psctl as `subprocess.run` would; raises TimeoutExpired once it is killed."""
        with self._one, tempfile.TemporaryDirectory() as folder:
            out, err = (Path(folder, name) for name in ("out", "err"))
            job = {"args": args, "env": dict(env), "cwd": os.getcwd(), "out": str(out), "err": str(err)}
            assert self._process.stdin is not None
            pid = code = None
            try:
                self._process.stdin.write(json.dumps(job).encode() + b"\n")
                pid = self._answer(ANSWER_S)
                code = None if pid is None else self._answer(timeout_s)
            finally:
                if code is None:  # nor is a late answer to be taken for the next one's, after a test's time limit
                    prepared.cache_clear()
                    with suppress(BrokenPipeError):
                        self._process.stdin.close()
                    if pid is not None:
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
            if code is None:
                raise subprocess.TimeoutExpired(["psctl", *args], timeout_s)
            return subprocess.CompletedProcess(["psctl", *args], code, out.read_text(), err.read_text())

    def _answer(self, timeout_s: float) -> int | None:
        """Return the next number that the process says; None if it comes too late."""
        answers = self._process.stdout
        assert answers is not None
        return int(answers.readline()) if select.select([answers], [], [], timeout_s)[0] else None

    def _close(self) -> None:
        with self._process:
            self._process.kill()


@cache
def prepared() -> Prepared:
    """Return the process, which is started when it is first needed."""
    return Prepared()


def _become(job: dict[str, Any]) -> None:
    """Have the folder, environment and streams that psctl is to be run with."""
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    null = os.open(os.devnull, os.O_RDONLY)
    streams = [null, *(os.open(job[name], os.O_WRONLY | os.O_CREAT) for name in ("out", "err"))]
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)


def _serve() -> None:
    """Fork for each line of stdin; print the number of the process, and how it has ended.  Returns in the child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C the tests still stop their clusters by it
    for line in sys.stdin:
        if not (pid := os.fork()):
            signal.signal(signal.SIGINT, signal.default_int_handler)
            job = json.loads(line)
            sys.argv = ["psctl", *job["args"]]
            return _become(job)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    sys.exit()


if __name__ == "__main__":
    from paramserver_cli.__main__ import psctl

    for module in ("paramserver.client.client", "paramserver_cli.main"):  # imported by psctl when it needs them
        importlib.import_module(module)

    _serve()
    psctl()
