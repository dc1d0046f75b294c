"""Processes that act as the ranks of a job, kept alive over many test cases.

`RankPool` in pool.py sends functions to ranks and gathers their results. This module has the rank's side (`_rank_main`
joins the job and runs the cases), the fork server, and the handles on both.

    host      A fork server forks the ranks. It has imported torch and triton_ep and translated the kernels for the
              interpreter once: a pool of four starts in about 0.2 s. The server is single-threaded when it forks.
    nvshmem   Ranks are fresh processes, because a process that has touched CUDA cannot be forked.

Every process holds a pidfd of the caller and exits when the caller ends in any way.
"""

import atexit
import faulthandler
import gc
import importlib
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from triton_ep.distributed import die_with
from triton_ep.errors import EPError

START_TIMEOUT_S = {"host": 300.0, "nvshmem": 240.0, "torch": 240.0}
CASE_TIMEOUT_S = {"host": 60.0, "nvshmem": 240.0, "torch": 240.0}  # the first case of a pool on GPUs compiles kernels
# torch.testing.assert_close imports torch.distributed.tensor, which takes a second: import it once, not in each rank.
PRELOAD = ("torch", "torch.distributed.tensor", "triton_ep.runtime.launch", "triton_ep.distributed", "triton_ep.layer")
# Under pytest, which each test module imports. The first autograd.Function of a rank would spend a second on importing
# dynamo.
PRELOAD_OF_TESTS = ("pytest", "torch._dynamo", "triton_ep.autograd", "triton_ep.testing")


class RankError(EPError, RuntimeError):
    """A rank failed in a way that the caller cannot raise again: a crash, or an exception that does not pickle."""


class RankHang(RankError, TimeoutError):
    """Ranks did not finish a case in time; the message has the stack of each."""


# --- the rank's side ----------------------------------------------------------------------------------------


def _join(backend: str, rank: int, world_size: int, port: int) -> None:
    """Make this process rank `rank` of the job whose store listens on `port` of this host."""
    import torch

    torch.set_num_threads(1)
    limit_s = START_TIMEOUT_S[backend]
    store = torch.distributed.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=limit_s))
    from triton_ep.distributed import initialize_distributed

    if backend != "host":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    initialize_distributed(backend=backend, store=store, rank=rank, world_size=world_size, timeout_s=limit_s)


def _set_chaos(seed: int | None) -> None:
    from triton_ep.runtime.interpreter import set_chaos

    set_chaos(seed)


def _portable(error: BaseException, text: str) -> BaseException:
    """The exception itself if it survives pickling, else a `RankError` that describes it."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error):
            return error
    except Exception as why:
        return RankError(f"{type(error).__name__}: {error} (does not pickle: {why})\n{text}")
    return RankError(f"{type(error).__name__}: {error} (changed by pickling)\n{text}")


def _abort_peers(error: BaseException) -> str:
    """Make peers that wait for this rank raise PeerFailed; return text to add to the report."""
    from triton_ep.distributed import current_heap

    try:
        current_heap().abort(f"{type(error).__name__}: {error}")
    except Exception:
        return f"\nThe failure could not be reported to the peers:\n{traceback.format_exc()}"
    return ""


def _run_case(case: bytes, rank: int, world_size: int) -> tuple[str, bytes, str]:
    """Run one case; returns ("ok", result, "") or ("error", exception, traceback), values pickled."""
    try:
        function, args, kwargs, chaos_seed = _load_case(case)
        if chaos_seed is not None:
            _set_chaos(chaos_seed * world_size + rank)
        try:
            result = function(rank, *args, **kwargs)
        finally:
            if chaos_seed is not None:
                _set_chaos(None)
        return "ok", pickle.dumps(result), ""
    except BaseException as error:  # the caller gets all of them: pytest's outcomes are not Exceptions
        text = traceback.format_exc() + _abort_peers(error)
        return "error", pickle.dumps(_portable(error, text)), text


def _load_case(case: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], int | None]:
    path, payload, chaos_seed = pickle.loads(case)
    sys.path[:] = path  # first: the next line imports the function's module
    function, args, kwargs = pickle.loads(payload)
    return function, args, kwargs, chaos_seed


def _rank_main(case_fd: int, stack_fd: int, owner_fd: int, job: dict[str, Any]) -> NoReturn:
    """Main function of a rank: join, run cases until it receives "close" or the channel ends."""
    code = 1
    try:
        faulthandler.enable(file=stack_fd, all_threads=True)
        faulthandler.register(signal.SIGUSR1, file=stack_fd, all_threads=True)
        die_with(owner_fd)
        channel = Connection(case_fd)
        try:
            _join(**job)
        except Exception as error:
            text = traceback.format_exc()
            channel.send(("error", pickle.dumps(_portable(error, text)), text))
        else:
            channel.send(("ok", pickle.dumps(None), ""))
            while (case := channel.recv_bytes()) != b"close":
                channel.send(_run_case(case, job["rank"], job["world_size"]))
            from triton_ep.distributed import finalize_distributed

            finalize_distributed()
            code = 0
    except (EOFError, BrokenPipeError):
        code = 1  # the caller has closed the channel
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # no exit handlers: they belong to the process this one was forked from


# --- the fork server ----------------------------------------------------------------------------------------


def _serve(control_fd: int, owner_fd: int, preload: Sequence[str]) -> NoReturn:
    """Import `preload` and translate the kernels once, then fork a rank per request until the caller is gone."""
    control = socket.socket(fileno=control_fd)
    try:
        for name in preload:
            importlib.import_module(name)
        import torch

        from triton_ep.runtime.interpreter import translate_kernels

        torch.set_num_threads(1)  # a forked child cannot use the threads of its parent's pools
        translate_kernels()
        gc.freeze()  # children would look through all these objects again and again, and copy their pages
    except BaseException:
        control.send(pickle.dumps(("failed", traceback.format_exc())))
        os._exit(1)
    control.send(pickle.dumps(("ready", None)))
    wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, _ignore_signal)
    signal.set_wakeup_fd(wake_w)
    children: set[int] = set()
    while True:
        ready, _, _ = select.select([control_fd, owner_fd, wake_r], [], [])
        if wake_r in ready:
            os.read(wake_r, 4096)
            for pid in list(children):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    children.remove(pid)
                    control.send(pickle.dumps(("exit", (pid, os.waitstatus_to_exitcode(status)))))
        message = b""
        fds: list[int] = []
        if control_fd in ready:
            message, fds, _, _ = socket.recv_fds(control, 1 << 16, 2)
        if owner_fd in ready or (control_fd in ready and not message):
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        if not message:
            continue
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            os.close(wake_r)
            os.close(wake_w)
            _rank_main(fds[0], fds[1], owner_fd, pickle.loads(message))
        children.add(pid)
        pidfd = os.pidfd_open(pid)  # valid: only this loop reaps the child
        socket.send_fds(control, [pickle.dumps(("forked", pid))], [pidfd])
        for fd in (*fds, pidfd):
            os.close(fd)


def _ignore_signal(_number: int, _frame: FrameType | None) -> None:
    """Python writes the wake-up file only if SIGCHLD has a handler."""


# --- the caller's side --------------------------------------------------------------------------------------


def _python(call: str, *, interpret: bool) -> list[str]:
    """Command that runs `call` of this module in a Python process with the same sys.path."""
    env = shutil.which("env")
    if env is None:
        raise EPError("rank processes are started through the program `env`, which is not on PATH: add it")
    settings = ("OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo", f"TRITON_INTERPRET={int(interpret)}")
    code = f"import sys; sys.path[:] = {sys.path!r}; from triton_ep.testing import process; process.{call}"
    return [env, *settings, sys.executable, "-c", code]


def _start(command: list[str], fds: Sequence[int]) -> subprocess.Popen:
    # A session of its own, so that Ctrl-C reaches the caller only; the caller ends the ranks.
    return subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True)


class _ForkServer:
    """The caller's handle on the fork server; one per process, started by the first host pool."""

    def __init__(self) -> None:
        preload = PRELOAD + (PRELOAD_OF_TESTS if "pytest" in sys.modules else ())
        self.owner_pid = os.getpid()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        owner_fd = os.pidfd_open(os.getpid())
        with theirs:
            fds = (theirs.fileno(), owner_fd)
            self.process = _start(_python(f"_serve({fds[0]}, {fds[1]}, {preload!r})", interpret=True), fds)
        os.close(owner_fd)
        self.exits: dict[int, int] = {}
        kind, detail, _ = self._receive(START_TIMEOUT_S["host"])
        if kind == "failed":
            self.stop()
            raise RankError(f"the fork server of the ranks could not be started:\n{detail}")

    def _receive(self, timeout_s: float) -> tuple[str, Any, list[int]]:
        self.control.settimeout(timeout_s)
        message, fds, _, _ = socket.recv_fds(self.control, 1 << 20, 1)
        if not message:
            raise RankError(f"the fork server of the ranks has ended, exit code {self.process.wait()}")
        kind, detail = pickle.loads(message)
        if kind == "exit":
            self.exits[detail[0]] = detail[1]
        return kind, detail, fds

    def fork(self, job: dict[str, Any], case_fd: int, stack_fd: int) -> tuple[int, int]:
        """Fork a new rank; return its pid and a pidfd."""
        socket.send_fds(self.control, [pickle.dumps(job)], [case_fd, stack_fd])
        while True:
            kind, pid, fds = self._receive(START_TIMEOUT_S["host"])
            if kind == "forked":
                return pid, fds[0]

    def exit_code(self, pid: int) -> int:
        """Exit code of a rank that has ended or is about to; negative: minus the signal that ended it."""
        while pid not in self.exits:
            self._receive(10)
        return self.exits.pop(pid)

    def stop(self) -> None:
        """End the server and its remaining ranks."""
        if self.owner_pid != os.getpid():
            return  # this is a fork of the caller, which does not own the server
        self.control.close()
        self.process.wait()


_fork_server: _ForkServer | None = None


def _get_fork_server() -> _ForkServer:
    global _fork_server
    server = _fork_server
    if server is None or server.owner_pid != os.getpid() or server.process.poll() is not None:
        server = _fork_server = _ForkServer()
        atexit.register(server.stop)
    return server


class RankProcess:
    """The caller's handle on one rank process."""

    def __init__(self, job: dict[str, Any], *, fresh: bool) -> None:
        self.rank = job["rank"]
        self.code: int | None = None
        ours, theirs = socket.socketpair()
        # Holds faulthandler's output, readable even after the rank has crashed. Has no name, leaves no file.
        self.stack_fd = os.memfd_create(f"rank{self.rank}-stack")
        self.server: _ForkServer | None = None
        with theirs:
            if not fresh:
                self.server = _get_fork_server()
                self.pid, self.pidfd = self.server.fork(job, theirs.fileno(), self.stack_fd)
            else:
                owner_fd = os.pidfd_open(os.getpid())
                fds = (theirs.fileno(), self.stack_fd, owner_fd)
                call = f"_rank_main({fds[0]}, {fds[1]}, {fds[2]}, {job!r})"
                self.process = _start(_python(call, interpret=job["backend"] == "host"), fds)
                os.close(owner_fd)
                self.pid = self.process.pid
                self.pidfd = os.pidfd_open(self.pid)
        self.channel = Connection(ours.detach())

    def send(self, message: bytes) -> None:
        """Send a case. If the rank has ended, nothing is sent; reading its channel then reports the end."""
        try:
            self.channel.send_bytes(message)
        except (BrokenPipeError, ConnectionResetError):
            return

    def signal(self, number: int) -> None:
        """Send a signal; no error if the rank has already ended."""
        if self.code is not None:
            return
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return

    def ended(self, timeout_s: float) -> bool:
        """Whether the process ends within `timeout_s`."""
        return self.code is not None or bool(select.select([self.pidfd], [], [], timeout_s)[0])

    def reap(self) -> int:
        """Kill the process if it still runs; return its exit code."""
        if self.code is None:
            self.signal(signal.SIGKILL)
            self.code = self.server.exit_code(self.pid) if self.server else self.process.wait(10)
            os.close(self.pidfd)
        return self.code

    def release(self) -> None:
        """`reap`, and close the caller's file descriptors for this rank."""
        self.reap()
        self.channel.close()
        os.close(self.stack_fd)

    def stack(self) -> str:
        """Output of faulthandler, most recent call first."""
        text = os.pread(self.stack_fd, 1 << 20, 0).decode(errors="replace").strip()
        return text or f"(no Python stack was written; its main thread is {self._state()})"

    def _state(self) -> str:
        """State of the main thread in words of Linux, and where in the kernel it waits: what is known of a thread that
        has run no signal handler."""
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
            state = next((line.partition(":")[2].strip() for line in lines if line.startswith("State:")), "unknown")
            place = Path(f"/proc/{self.pid}/wchan").read_text().strip()
            return f"{state}, in {'no call of the kernel' if place in ('', '0') else place}"
        except OSError:
            return "gone"

    def how_it_ended(self) -> str:
        """E.g. "was ended by SIGSEGV; its last stack: ..."."""
        self.ended(5)  # its channel has ended, so it is exiting
        code = self.reap()
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}; its last stack:\n{self.stack()}"
        return f"ended with exit code {code} in the middle of a case; its last stack:\n{self.stack()}"
