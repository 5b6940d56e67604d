"""Programs for tests, forked from a process that has torch loaded already: 0.2 s instead of 4.

    python -m tests.warm FD        the server: one per test process, started by the first program

`Warm` is a `subprocess.Popen` of `python -m MODULE ...`: its own process with its own arguments,
environment, folder, streams and, if asked, session; signals and exit codes are real. Two things
are not as in a cold start: /proc/PID/environ is the server's, and libraries have read their
environment already, so a program that sets one of `READ_AT_START` is started cold (`start`).

The fork server that ranks come from is a second process that would load torch. Its place is taken
by a twin that is forked before the program's first line, and waits to be made the fork server.
"""

import array
import atexit
import gc
import io
import json
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
READ_AT_START = ("PYTHON", "OMP_", "MKL_", "LD_", "TORCH_", "LC_", "LANG", "NO_COLOR", "COLUMNS")
MAX_REQUEST = 1 << 18
FIRST_FREE_FD = 300
DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1,
           signal.SIGUSR2)  # fmt: skip


# The test's side


def start(argv: Sequence[str], env: dict[str, str], **more: Any) -> subprocess.Popen[str]:
    """Start a program, warm where it is a Python module that can be."""
    is_module = list(argv[:2]) == [sys.executable, "-m"]
    is_alike = {name: value for name, value in env.items() if name.startswith(READ_AT_START)} == {
        name: value for name, value in server_environment().items()
        if name.startswith(READ_AT_START)
    }  # fmt: skip
    warm = is_module and is_alike and "PACELINE_COLD" not in os.environ
    return (Warm if warm else subprocess.Popen)(argv, env=env, **more)


def server_environment() -> dict[str, str]:
    from tests.cli.program import environment

    return environment()


@cache
def server() -> socket.socket:
    """The connection to this process's server, whose life ends with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.warm", str(theirs.fileno())], cwd=ROOT,
        env=server_environment(), pass_fds=[theirs.fileno()],
    )  # fmt: skip
    theirs.close()
    atexit.register(_end_server, ours, process)
    return ours


def _end_server(ours: socket.socket, process: subprocess.Popen[bytes]) -> None:
    ours.close()
    process.wait(10)


class Warm(subprocess.Popen[str]):
    """A program whose parent is the server, which says how it ended."""

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:  # type: ignore[override]
        cwd, env, new_session = rest[4], rest[5], rest[20]
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[9:15]
        streams = [p2cread, c2pwrite, errwrite]
        inherited = [own if given < 0 else given for own, given in enumerate(streams)]
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {"argv": list(args[2:]), "env": env, "cwd": str(cwd), "session": new_session}
        send(server(), request, [theirs.fileno(), *inherited])
        theirs.close()
        self.pid = self._receive()
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _receive(self) -> int:
        word = self._end.recv(64)
        assert word, "the server of warm programs has died"
        return int(word)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags & os.WNOHANG and not select.select([self._end], [], [], 0)[0]:
            return 0, 0
        return self.pid, self._receive()

    def _internal_poll(self, _deadstate: int | None = None, *others: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)
        return self.returncode


def send(end: socket.socket, request: dict[str, Any], fds: Sequence[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    end.sendmsg([json.dumps(request).encode()], rights)


def receive(end: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """None for an end that is closed."""
    data, ancillary, _, _ = end.recvmsg(MAX_REQUEST, socket.CMSG_SPACE(4 * 16))
    fds = array.array("i")
    for _, _, part in ancillary:
        fds.frombytes(part[: len(part) - len(part) % fds.itemsize])
    return (json.loads(data) if data else None), list(fds)


# The server's side


def main() -> None:
    """Serve until the tests are over. Programs come out of it too, with nothing on their stack:
    they end as the interpreter ends any program."""
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C for pytest
    import tests.preloaded  # noqa: F401

    gc.collect()
    gc.freeze()  # pages that no collection touches stay shared
    program = serve(control)
    if program is not None:
        run_to_end(program)


def run_to_end(program: Callable[[], None]) -> None:
    """Exit as the interpreter would, but leave its memory to the kernel: to free what is shared
    with the server, object by object, takes 0.3 s. An odd end is the interpreter's own."""
    try:
        program()
        code = 0
    except SystemExit as leaving:
        if not isinstance(leaving.code, int | None):
            raise
        code = leaving.code or 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def serve(control: socket.socket) -> Callable[[], None] | None:
    """Fork a child for each request and tell of its end. In a child: what it shall do."""
    children: dict[int, tuple[int, socket.socket]] = {}
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready != control.fileno():
                pid, end = children.pop(ready)
                poll.unregister(ready)
                os.close(ready)
                _, status = os.waitpid(pid, 0)
                _tell(end, status)
                end.close()
                continue
            request, fds = receive(control)
            if request is None:
                return None
            pid = os.fork()
            if pid == 0:
                control.close()
                for pidfd, (_, other) in children.items():
                    os.close(pidfd)
                    other.close()
                return lambda: become(request, fds)  # noqa: B023
            end = socket.socket(fileno=fds[0])
            for fd in fds[1:]:
                os.close(fd)
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid, end
            poll.register(pidfd, select.POLLIN)
            _tell(end, pid)


def _tell(end: socket.socket, number: int) -> None:
    try:
        end.send(str(number).encode())
    except BrokenPipeError:  # a test that has not waited for its program
        pass


def become(request: dict[str, Any], fds: list[int]) -> None:
    """Be the program: no return but by its own exit."""
    if request["session"]:
        os.setsid()
    for own, fd in enumerate(fds[1:]):
        os.dup2(fd, own)
    for fd in fds:
        os.close(fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None
    _reopen_streams()
    twin = fork_twin()
    if twin is None:
        return
    multiprocessing.util.spawnv_passfds = twin  # type: ignore[attr-defined]
    module, *words = request["argv"]
    sys.path[0] = request["cwd"]
    sys.argv = [module, *words]  # run_module puts the file's name in front
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _reopen_streams() -> None:
    """As at the start of a process: nothing of the server's is left in a buffer."""
    sys.stdin = io.TextIOWrapper(open(0, "rb", closefd=False))
    sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), write_through=False)
    sys.stderr = io.TextIOWrapper(
        open(2, "wb", closefd=False), errors="backslashreplace", line_buffering=True
    )
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr


def fork_twin() -> Callable[[str, Sequence[str], Sequence[int]], int] | None:
    """A stand-in for `spawnv_passfds` that makes the twin the program's first fork server; None in
    the twin itself, once it has been one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        _be_twin(theirs)
        return None
    theirs.close()
    cold = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]
    unused = [pid]

    def spawn(path: str, argv: Sequence[str], fds: Sequence[int]) -> int:
        if "multiprocessing.forkserver" not in argv[-1] or not unused:
            return int(cold(path, argv, fds))
        request = {"code": argv[-1], "fds": list(fds), "env": dict(os.environ), "cwd": os.getcwd()}
        send(ours, request, fds)
        ours.close()
        return unused.pop()

    return spawn


def _be_twin(end: socket.socket) -> None:
    """Wait to be made the fork server. The program's end without that is the twin's, too."""
    for number in DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    request, received = receive(end)
    end.close()
    if request is None:
        os._exit(0)
    moved = [os.dup(fd) for fd in received]
    high = range(FIRST_FREE_FD, FIRST_FREE_FD + len(moved))
    for fd, to in zip(moved, high, strict=True):
        os.dup2(fd, to)
    for fd in {*moved, *received}:
        os.close(fd)
    for fd, to in zip(high, request["fds"], strict=True):
        os.dup2(fd, to)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = ["-c"]
    exec(request["code"], {"__name__": "__main__"})


if __name__ == "__main__":
    main()
