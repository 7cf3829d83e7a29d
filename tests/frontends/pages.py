"""A server of pages that a test makes, and of packages from the npm registry."""

from __future__ import annotations

import mimetypes
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.frontends.conftest import REQUIRED

PACKAGES = Path(__file__).parents[2] / "build/frontends/node_modules"
"""``make frontends`` installs them."""


def needs_package(name: str) -> None:
    """Skip a test, or fail it where all is required, if a package is missing."""
    if not (PACKAGES / name).is_dir():
        text = f"not here: {name}; `make frontends` installs it from the npm registry"
        pytest.fail(text) if os.environ.get(REQUIRED) else pytest.skip(text)


class Pages:
    """Serves texts by their address, and a folder's files below ``/static/``."""

    def __init__(self, folder: Path) -> None:
        self.by_address: dict[str, tuple[str, str]] = {}
        """The type and the text of each page."""
        pages = self.by_address

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                address = self.path.partition("?")[0]
                file = folder / address.removeprefix("/static/")
                if address in pages:
                    kind, text = pages[address]
                    body = text.encode()
                elif address.startswith("/static/") and file.is_file():
                    kind = mimetypes.guess_type(address)[0] or "application/octet-stream"
                    body = file.read_bytes()
                else:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                # VS Code's page of an output loads its renderer from another name of this server
                self.send_header("Access-Control-Allow-Origin", "*")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                """Write no log."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
