"""Python programs that tests start: separate processes that need not import torch again.

A program is forked from a template process that has imported torch, but none of the tested package. It gets its own
environment, folder, arguments and module search path, runs as `__main__`, and ends as a Python program does, exit
handlers included. Tests of the start of Python itself, or of a launcher, use subprocess.

A second template has also imported the package and translated its kernels, for programs that test results and not the
import. Ranks that `run_ranks` starts in such a program are forked from it. With compiled kernels, on GPUs, the first
template serves all programs: an import may touch GPUs.
"""

import atexit
import fcntl
import functools
import gc
import importlib
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from tests.patience import LIMIT_S

ROOT = Path(__file__).resolve().parents[1]


def environment_of_programs() -> dict[str, str]:
    """Environment in which a program finds this checkout first, then the usual paths, and uses one thread."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


class Program:
    """A running program; its output is available after it has ended."""

    def __init__(
        self,
        argv: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        *,
        imported: bool = False,
    ) -> None:
        """Start the program.

        argv: `[path, ...]`, `["-c", code, ...]` or `["-m", module, ...]`, as after `python`.
        env: the whole environment; None: the environment of this process.
        imported: use the template that has imported the package of this checkout.
        """
        from triton_ep.runtime.launch import INTERPRETING  # not at the top: a template imports this file

        self._outputs = [_shared_file(name) for name in ("stdout", "stderr")]
        with _STARTING:
            self._template = _get_template(os.getpid(), imported and INTERPRETING)
        words = [str(word) for word in argv]
        environment = dict(os.environ if env is None else env)
        self.pid, self._pidfd = self._template.fork((words, environment, str(cwd)), self._outputs)
        self.args = words

    def lines(self, count: int) -> list[str]:
        """The first lines of standard output, when there are so many; the program must flush them."""
        deadline = time.monotonic() + LIMIT_S
        while len(found := _text(self._outputs[0]).splitlines()) < count:
            assert not select.select([self._pidfd], [], [], 0)[0], _text(self._outputs[1])
            assert time.monotonic() < deadline, found
            time.sleep(0.02)
        return found[:count]

    def wait(self, timeout_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        """Wait for the end; returns exit code and output. Call it once.

        Raises:
            subprocess.TimeoutExpired: the program was still running, and has been killed.
        """
        ended = bool(select.select([self._pidfd], [], [], timeout_s)[0])
        if not ended:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        code = self._template.reap(self.pid)
        texts = []
        for fd in self._outputs:
            texts.append(_text(fd))
            os.close(fd)
        os.close(self._pidfd)
        if not ended:
            raise subprocess.TimeoutExpired(self.args, timeout_s, *texts)
        return subprocess.CompletedProcess(self.args, code, *texts)


def run_program(
    argv: Sequence[str | Path],
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    timeout_s: float = LIMIT_S,
    *,
    imported: bool = False,
) -> subprocess.CompletedProcess[str]:
    """`Program(argv, env, cwd, imported=imported).wait(timeout_s)`."""
    return Program(argv, env, cwd, imported=imported).wait(timeout_s)


def run_ranks_of(argv: Sequence[str | Path], num_ranks: int) -> str:
    """Output of all ranks of a program that must succeed, in rank order; ranks start as under torchrun."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        **environment_of_programs(),
        "TORCHELASTIC_RUN_ID": "a job of the tests",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }
    ranks = [
        Program(argv, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, imported=True)
        for rank in range(num_ranks)
    ]
    done = [rank.wait() for rank in ranks]
    assert all(each.returncode == 0 for each in done), done
    return "".join(each.stdout for each in done)


def _shared_file(name: str) -> int:
    """A memory file for the output of a program and its children. Every write appends, even with concurrent writers:

    without O_APPEND, Linux does not lock the position of such a file, and two ranks may overwrite each other's output.
    """
    fd = os.memfd_create(name)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    return fd


def _text(fd: int) -> str:
    return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")


# --- the template -------------------------------------------------------------------------------------------

_STARTING = threading.Lock()
"""Two threads that ask for the first template get the same one."""


class _Template:
    def __init__(self, imported: bool) -> None:
        self._asking = threading.Lock()  # an answer names no question: threads ask in turn
        self.owner_pid = os.getpid()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            call = f"programs._serve({theirs.fileno()}, {imported})"
            code = f"sys.path[:] = {sys.path!r}; from tests import programs; {call}"
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            environment.pop("PYTHONUNBUFFERED", None)  # read at the start of Python, for standard output
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"import sys; {code}"],
                cwd=ROOT,
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def fork(self, program: tuple[list[str], dict[str, str], str], fds: list[int]) -> tuple[int, int]:
        with self._asking:
            socket.send_fds(self.control, [pickle.dumps(program)], fds)
            message, pidfds, _, _ = socket.recv_fds(self.control, 1 << 16, 1)
        return pickle.loads(message), pidfds[0]

    def reap(self, pid: int) -> int:
        """The exit code of a program that has ended, or is about to."""
        with self._asking:
            self.control.send(pickle.dumps(pid))
            return pickle.loads(self.control.recv(1 << 16))

    def stop(self) -> None:
        if self.owner_pid == os.getpid():
            self.control.close()
            self.process.wait()


@functools.cache
def _get_template(_owner_pid: int, imported: bool) -> _Template:
    """The template of this process; `imported`: the template that has imported the package."""
    template = _Template(imported)
    atexit.register(template.stop)
    return template


def _import_package() -> None:
    """Import the modules that most programs import, and those imported at their first call."""
    # triton_ep.layer first: it decides whether kernels are interpreted.
    for name in ("triton_ep.layer", "torch._dynamo", "triton_ep.nn", "triton_ep.integrations.te"):
        importlib.import_module(name)
    from triton_ep.runtime.interpreter import translate_kernels

    translate_kernels()


def _serve(control_fd: int, imported: bool) -> None:
    """Fork a program per request until the tests are over. Returns only in the programs, when they end."""
    import sympy  # noqa: F401  imports of dynamo and torch.testing, except those that import Triton
    import torch
    import torch.distributed.fsdp

    torch.set_num_threads(1)
    if imported:
        _import_package()
    gc.collect()
    gc.freeze()  # else an ending program's collector would touch, and so copy, all imported objects
    path = [entry for entry in sys.path if entry not in ("", str(ROOT))]
    control = socket.socket(fileno=control_fd)
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1 << 20, 2)
        if not message:
            os._exit(0)
        request = pickle.loads(message)
        if isinstance(request, int):
            control.send(pickle.dumps(os.waitstatus_to_exitcode(os.waitpid(request, 0)[1])))
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            return _run(*request, path, fds)
        pidfd = os.pidfd_open(pid)
        socket.send_fds(control, [pickle.dumps(pid)], [pidfd])
        for fd in (*fds, pidfd):
            os.close(fd)


def _run(argv: list[str], environment: dict[str, str], folder: str, path: list[str], fds: list[int]) -> None:
    """Turn this process into the program."""
    for number, fd in enumerate(fds, 1):
        os.dup2(fd, number)
        os.close(fd)
    interpret = {name: value for name, value in os.environ.items() if name == "TRITON_INTERPRET"}
    os.environ.clear()
    os.environ.update(environment)
    if "triton_ep" in sys.modules:  # the package has made this choice already
        os.environ.update(interpret)
        util.spawnv_passfds = functools.partial(_start_server, util.spawnv_passfds)
    os.chdir(folder)
    del sys.modules["tests.programs"], sys.modules["tests"]
    how = argv[0]
    added = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    here = {"-c": "", "-m": folder}.get(how, str(Path(how).resolve().parent))
    sys.path[:] = [here, *added, *path]
    if how == "-c":
        sys.argv[:] = ["-c", *argv[2:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(argv[1], "<string>", "exec"), main.__dict__)
    elif how == "-m":
        sys.argv[:] = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = argv
        runpy.run_path(how, run_name="__main__")


def _start_server(spawn: Any, path: str, args: Sequence[str], fds: Sequence[int]) -> int:
    """Stands for `multiprocessing.util.spawnv_passfds`: forks servers of ranks, and starts other programs by `spawn`.

    A new Python would import for seconds what this process, and so its fork, has imported.
    """
    if "multiprocessing.forkserver" not in args[-1]:
        return spawn(path, args, fds)
    sys.stdout.flush()
    pid = os.fork()
    return pid if pid else _be_server(args[-1], fds)


def _be_server(code: str, fds: Sequence[int]) -> NoReturn:
    """Run the code of a server in a process that has, like a new Python, no other files and an empty main module."""
    exit_code = 1
    try:
        last = 2
        for fd in (*sorted(fds), os.sysconf("SC_OPEN_MAX")):
            os.closerange(last + 1, fd)
            last = fd
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(code, {})
    except SystemExit:  # nobody needs the server any more
        exit_code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(exit_code)
