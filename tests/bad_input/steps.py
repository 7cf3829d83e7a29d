"""What the tests of bad input do with a kernel."""

from __future__ import annotations

from typing import Any

from tests.kernel import Kernel, Reply


def run(kernel: Kernel, code: str, **options: Any) -> Reply:
    """Run a cell in which nothing of ours may fail, whatever the user's code does."""
    reply = kernel.run(code, **options)
    for noise in ("is not affected", "Error in callback", "/ipygpumem/"):
        assert noise not in reply.stderr + reply.stdout + reply.traceback, (code, reply.stderr, reply.traceback)
    return reply


def works(kernel: Kernel, code: str, **options: Any) -> Reply:
    """Run a cell that must succeed."""
    reply = run(kernel, code, **options)
    assert reply.status == "ok", (code, reply.message, reply.stderr, reply.traceback)
    return reply


def goes_on(kernel: Kernel) -> None:
    """The kernel's next cell runs, shows its result and its one line."""
    reply = works(kernel, "6 * 7")
    assert reply.result == "42"
    assert len(reply.reports("cell")) == 1


def refused(kernel: Kernel, code: str) -> str:
    """Run a cell that must end with one line of ``UsageError``; return that line."""
    reply = run(kernel, code)
    assert reply.status == "error"
    (line,) = reply.stderr.strip().splitlines()
    assert line.startswith("UsageError: ")
    goes_on(kernel)
    return line


def names(kernel: Kernel) -> list[str]:
    """The user's names, as %who_ls gives them."""
    found: list[str] = kernel.value("get_ipython().run_line_magic('who_ls', '')")
    return found


def open_now(kernel: Kernel) -> str:
    """What ``%experiment status`` says."""
    (text,) = works(kernel, "%experiment status").reports("note")
    return text
