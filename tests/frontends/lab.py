"""A real JupyterLab or Notebook for tests: a server of its own, a page in chromium, cells run by
keyboard.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tests.notebooks import Node, write

if TYPE_CHECKING:
    from playwright.sync_api import (
        BrowserContext,
        ConsoleMessage,
        Error,
        Locator,
        Playwright,
        Request,
        ViewportSize,
    )

LIGHT = "JupyterLab Light"
DARK = "JupyterLab Dark"
CHROMIUM = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--no-proxy-server",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE *.localhost",
)
"""No request leaves this machine. Routes of Playwright's would do, too, and each page would load
without a cache.
"""
_SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "docmanager-extension/plugin": {"autosave": False},
}
_TOKEN = "tests"
_OF_LAB = ("Canceled future", "Cannot read properties of null (reading 'changed')")
"""Console errors of JupyterLab 4.6 itself: a request of a notebook that we left, an output's own
view after that.
"""
_IDLE = (
    "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === "
    "'idle'"
)
"""Asked of the model, since the signs for it differ between front-ends."""
_LEAVE = """() => {
    const shell = window.jupyterapp.shell;
    for (const widget of [...shell.widgets('main')]) widget.dispose();  // nobody is asked whether to save
    shell.expandLeft();
}"""  # noqa: E501


def chromium(playwright: Playwright, program: str) -> BrowserContext:
    """Start the chromium of the system, without a window, with one cache for all pages."""
    browser = playwright.chromium.launch(executable_path=program, args=list(CHROMIUM))
    return browser.new_context(device_scale_factor=2)


class Server:
    """A Jupyter server on this machine: no setting, profile or start-up file of the user's changes
    what it shows.
    """

    def __init__(self, folder: Path, application: str = "jupyterlab") -> None:
        """Start it with notebooks in ``folder``; ``application`` is the module that starts it."""
        self.folder = folder / "notebooks"
        self.folder.mkdir()
        self._page = "lab/tree" if application == "jupyterlab" else "notebooks"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = (folder / "server.log").open("w+")
        options = [
            f"--ServerApp.port={port}",
            "--ServerApp.port_retries=0",
            f"--ServerApp.root_dir={self.folder}",
        ]
        options += [
            "--no-browser",
            "--allow-root",
            "--expose-app-in-browser",
            f"--IdentityProvider.token={_TOKEN}",
        ]
        command = [sys.executable, "-m", application, *options]
        self._process = subprocess.Popen(
            command, env=_environment(folder), stdout=self._log, stderr=self._log
        )
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + 90
        while not self._answers():
            if time.monotonic() > deadline or self._process.poll() is not None:
                self._log.seek(0)
                raise RuntimeError(f"the Jupyter server does not answer:\n{self._log.read()}")
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            self._ask("status")
        except (urllib.error.URLError, TimeoutError):
            return False
        return True

    def address(self, name: str) -> str:
        return f"{self.url}/{self._page}/{name}?token={_TOKEN}" + (
            "&reset" if self._page == "lab/tree" else ""
        )

    def end_kernels(self) -> None:
        """End all kernels, as tests that are over leave theirs behind."""
        for session in self._ask("sessions"):
            self._ask(f"sessions/{session['id']}", "DELETE")

    def _ask(self, path: str, method: str = "GET") -> Any:
        headers = {"Authorization": f"token {_TOKEN}"}
        request = urllib.request.Request(f"{self.url}/api/{path}", method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.loads(reply.read() or "null")

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def _environment(folder: Path) -> dict[str, str]:
    """Return the server's environment: its settings, data and profiles lie in ``folder``."""
    own = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
    }
    own |= {
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    for name in own.values():
        (folder / name).mkdir()
    for name, settings in _SETTINGS.items():
        path = folder / f"settings/@jupyterlab/{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))
    folders = {variable: str(folder / name) for variable, name in own.items()}
    # A kernel in ``data`` comes before that of a virtual environment.
    return {**os.environ, **folders, "JUPYTER_PREFER_ENV_PATH": "0"}


class Notebook:
    def __init__(
        self, server: Server, browser: BrowserContext, *, width: int = 900, height: int = 900
    ) -> None:
        self.page = browser.new_page()
        self._size: ViewportSize = {"width": width, "height": height}
        self.page.set_viewport_size(self._size)
        self.complaints: list[str] = []
        """Errors of the page's console, exceptions of its scripts, and requests that would leave
        this machine.
        """
        self._server = server
        self._is_used = False
        self.page.on("console", self._console)
        self.page.on("pageerror", self._exception)
        self.page.on("request", self._local_only)

    def open(self, content: Node, name: str = "notebook.ipynb") -> None:
        """Write ``content`` to the server's folder, open it in the light theme, and wait until its
        kernel is ready.
        """
        write(content, self._server.folder / name)
        if self._is_used:
            self.page.evaluate(_LEAVE)
            self.command("docmanager:open", path=name)
        else:
            self.page.goto(self._server.address(name))
        self._is_used = True
        self.ready()
        self.theme(LIGHT)  # the server remembers what a test before chose

    def ready(self) -> None:
        """Wait until the notebook is there and its kernel waits for work."""
        self.page.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=90_000)
        self.page.wait_for_function(_IDLE, timeout=90_000)

    def cell(self, index: int) -> Locator:
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index)

    def outputs(self, index: int) -> Locator:
        return self.cell(index).locator(".jp-OutputArea-child")

    def reports(self, index: int) -> Locator:
        """Return the HTML that ipygpumem shows in a cell's outputs."""
        return self.cell(index).locator(".jp-OutputArea-output.jp-RenderedHTML")

    def enter(self, index: int) -> None:
        self.cell(index).locator(".cm-content").click()

    def press(self, keys: str = "Shift+Enter") -> None:
        """Press keys, by default those that run a cell and go to the next."""
        self.page.keyboard.press(keys)

    def write(self, index: int, source: str) -> None:
        """Change a cell's text."""
        script = """([index, source]) => {
            const notebook = window.jupyterapp.shell.currentWidget.content;
            notebook.widgets[index].model.sharedModel.setSource(source);
        }"""
        self.page.evaluate(script, [index, source])

    def is_idle(self) -> bool:
        return bool(self.page.evaluate(_IDLE))

    def wait(self, index: int, *, seconds: float = 60) -> None:
        self.page.wait_for_function(
            """index => {
                const cell = document.querySelectorAll('.jp-Notebook .jp-Cell')[index];
                return /\\[\\d+\\]/.test(cell.querySelector('.jp-InputPrompt').innerText);
            }""",
            arg=index,
            timeout=seconds * 1000,
        )
        self.page.wait_for_function(_IDLE, timeout=seconds * 1000)

    def run(self, *indices: int, seconds: float = 60) -> None:
        for index in indices:
            self.enter(index)
            self.press()
            self.wait(index, seconds=seconds)

    def command(self, name: str, **arguments: Any) -> None:
        """Begin one of the front-end's commands; it may wait for a dialog."""
        run = "([name, args]) => { window.jupyterapp.commands.execute(name, args); }"
        self.page.evaluate(run, [name, arguments])

    def theme(self, name: str) -> None:
        """Switch to a theme and wait until it is there."""
        self.command("apputils:change-theme", theme=name)
        self.page.locator(f"body[data-jp-theme-name='{name}']").wait_for(state="attached")
        self.page.wait_for_load_state("networkidle")

    def resize(self, width: int, height: int) -> None:
        """Give the page another size, and wait until its notebook has followed."""
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.wait_for_function(
            """() => {
                const right = document.querySelector('.jp-Notebook').getBoundingClientRect().right;
                return innerWidth - 80 < right && right <= innerWidth;
            }"""
        )

    def reload(self) -> None:
        """Load the page again, with its notebook; the next one gets a page of its own."""
        self.page.reload()
        self._is_used = False
        self.ready()

    def leave(self) -> None:
        """Close the notebook and end its kernel; the page is as it was, to open another: it takes
        seconds to load.
        """
        self.page.evaluate(_LEAVE)
        self._server.end_kernels()
        self.page.set_viewport_size(self._size)

    def close(self) -> None:
        self.page.close()
        self._server.end_kernels()

    def _console(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not any(text in message.text for text in _OF_LAB):
            self.complaints.append(f"console: {message.text} ({message.location.get('url', '')})")

    def _exception(self, error: Error) -> None:
        if not any(text in error.message for text in _OF_LAB):
            self.complaints.append(f"exception: {error}")

    def _local_only(self, request: Request) -> None:
        if urlsplit(request.url).hostname not in (None, "127.0.0.1"):
            self.complaints.append(f"network: {request.url}")
