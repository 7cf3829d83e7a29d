"""The pictures of docs/: parts of a page as small PNG files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

if TYPE_CHECKING:
    from playwright.sync_api import Locator

COLOURS = 96


class Pictures:
    """Writes pictures into a folder, or nothing where there is none: a run of the tests changes no file."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def take(self, element: Locator, name: str) -> None:
        """Write an element of a page as ``name.png``."""
        if self.folder is None:
            return
        element.page.mouse.move(0, 0)  # what is under the mouse looks different
        picture = Image.open(io.BytesIO(element.screenshot(animations="disabled"))).convert("RGB")
        self.folder.mkdir(parents=True, exist_ok=True)
        picture.quantize(COLOURS, dither=Image.Dither.NONE).save(self.folder / f"{name}.png", optimize=True)
