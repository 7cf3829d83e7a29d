"""Takes from a kernel what Python lacks on Windows: IPython runs this file once ipykernel's own
modules are loaded.

Python's own functions stay as they were imported; what ipygpumem looks up from now on is what
Windows has.
"""

import asyncio
import concurrent.futures
import mmap
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from typing import Any

import psutil
from ipykernel.zmqshell import ZMQInteractiveShell

ALREADY = (
    asyncio,
    concurrent.futures,
    multiprocessing.connection,
    subprocess,
    tempfile,
    uuid,
    psutil,
)
"""These choose for POSIX as they are imported, and go on so: they stand for their Windows versions.
"""
MODULES = ("fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty")
OS = """
O_ASYNC O_CLOEXEC O_DIRECT O_DIRECTORY O_DSYNC O_LARGEFILE O_NDELAY O_NOATIME O_NOCTTY O_NOFOLLOW O_NONBLOCK O_PATH
O_SYNC WNOHANG WNOWAIT WEXITED P_PID P_ALL
chroot confstr confstr_names ctermid fchdir fork forkpty getegid geteuid getgid getgroups getloadavg getpgid getpgrp
getpriority getsid getuid initgroups killpg lchown lockf major memfd_create minor mkfifo mknod nice openpty pathconf
pidfd_open posix_fadvise posix_fallocate posix_spawn pread preadv pwrite pwritev register_at_fork sched_getaffinity
sched_setaffinity sched_yield sendfile setpgid setpriority setsid sync sysconf sysconf_names wait waitid wait3 wait4
"""  # noqa: E501
SIGNAL = """
ITIMER_REAL SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGPROF SIGQUIT SIGRTMAX SIGRTMIN SIGSTOP SIGTSTP
SIGTRAP SIGUSR1 SIGUSR2 SIG_BLOCK SIG_SETMASK SIG_UNBLOCK alarm getitimer pause pthread_kill pthread_sigmask setitimer
siginterrupt sigpending sigwait sigwaitinfo sigtimedwait SIGURG
"""  # noqa: E501
TIME = (
    "CLOCK_BOOTTIME CLOCK_MONOTONIC CLOCK_REALTIME clock_gettime clock_getres clock_settime "
    "pthread_getcpuclockid tzset"
)


class NoModules:
    """Refuses to find the modules that Windows has not."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def no_linux_files(event: str, arguments: tuple[Any, ...]) -> None:
    """Let ipygpumem find no /proc, /sys and /dev; psutil has other ways on Windows, and needs them
    here.
    """
    if event not in ("open", "os.listdir", "os.scandir") or not str(arguments[0]).startswith(
        ("/proc/", "/sys/", "/dev/")
    ):
        return
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "pathlib",
        "os",
        "io",
    ):
        frame = frame.f_back
    if frame is not None and frame.f_globals.get("__name__", "").startswith("ipygpumem"):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])


def run_without_terminal(shell: Any, command: str) -> None:
    """Run a line that begins with ``!``; ipykernel's own way needs a pseudo-terminal."""
    print(
        subprocess.run(command, shell=True, stdout=subprocess.PIPE, text=True, check=False).stdout,
        end="",
    )


def take_away() -> None:
    """Do so for good in this process."""
    ZMQInteractiveShell.system = run_without_terminal
    for module, names in ((os, OS), (signal, SIGNAL), (time, TIME), (mmap, "MAP_PRIVATE")):
        for name in names.split():
            vars(module).pop(name, None)
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, NoModules())
    sys.addaudithook(no_linux_files)


take_away()
