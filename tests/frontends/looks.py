"""Computed facts about an element's appearance: the contrast of its texts, and texts that do not
fit its width.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
from PIL import Image

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

_CONTRASTS = """root => {
    const context = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
    const rgba = colour => {  // whatever way the browser writes it
        context.clearRect(0, 0, 1, 1);
        context.fillStyle = colour;
        context.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
        return [r, g, b, a / 255];
    };
    const over = (top, alpha, below) => below.map((value, i) => top[i] * alpha + value * (1 - alpha));
    const painted = element => {  // what lies behind an element's text, from the page up to the element itself
        const path = [];
        for (let at = element; at; at = at.parentElement) path.unshift(at);
        let colour = [255, 255, 255];
        for (const at of path) {
            const [r, g, b, a] = rgba(getComputedStyle(at).backgroundColor);
            colour = over([r, g, b], a, colour);
        }
        return colour;
    };
    const opacity = element => {
        let found = 1;
        for (let at = element; at; at = at.parentElement) found *= Number(getComputedStyle(at).opacity);
        return found;
    };
    const luminance = colour => {
        const [r, g, b] = colour.map(value => value / 255)
            .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const found = [];
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        const element = node.parentElement;
        const style = getComputedStyle(element);
        const text = node.data.trim();
        if (!text || !element.checkVisibility() || parseFloat(style.fontSize) === 0) continue;
        const behind = painted(element);
        const [r, g, b, a] = rgba(style.color);
        const seen = over([r, g, b], a * opacity(element), behind);
        const [low, high] = [luminance(seen), luminance(behind)].sort((one, other) => one - other);
        found.push({text: text.slice(0, 60), contrast: (high + 0.05) / (low + 0.05), size: parseFloat(style.fontSize)});
    }
    return found;
}"""  # noqa: E501
"""Every visible text with its contrast to what is behind it, by WCAG 2's formula; opacities count.
"""

_STICK_OUT = """root => {
    const right = root.getBoundingClientRect().right + 1;
    const found = [];
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        const element = node.parentElement;
        if (!node.data.trim() || !element.checkVisibility()) continue;
        const range = document.createRange();
        range.selectNodeContents(node);
        const rects = [...range.getClientRects()];
        if (rects.some(rect => rect.right > right)) found.push(node.data.trim().slice(0, 60));
    }
    return found;
}"""
"""The texts that go on beyond an element's right edge, those of tables included: nothing scrolls.
"""

_SQUEEZED = """root => [...root.querySelectorAll('td, th')]
    .filter(cell => cell.checkVisibility() && /^[+-]?[\\d.]+ [KMGTP]?i?B$/.test(cell.innerText.replace('\\n', ' ')))
    .filter(cell => {
        const range = document.createRange();
        range.selectNodeContents(cell);
        return range.getBoundingClientRect().height > 2 * parseFloat(getComputedStyle(cell).fontSize);
    })
    .map(cell => cell.innerText)"""  # noqa: E501
"""The quantities in a table that are broken over two lines."""


_DANGLING = """root => {
    const found = [];
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    let last = null;  // the last separator that is shown
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        if (!node.parentElement.checkVisibility()) continue;
        for (const {index, 0: word} of node.data.matchAll(/\\S+/g)) {
            const range = document.createRange();
            range.setStart(node, index);
            range.setEnd(node, index + word.length);
            const rect = range.getBoundingClientRect();
            if (last && rect.top > last.bottom) found.push('· before ' + word);
            last = null;
            let frame = node.parentElement;
            while (frame !== root && getComputedStyle(frame).overflow !== 'hidden') frame = frame.parentElement;
            if (word === '·' && rect.right > frame.getBoundingClientRect().left + 1) last = rect;
        }
    }
    return found;
}"""  # noqa: E501
"""The separators that are the last of a line."""


def contrasts(element: Locator) -> list[dict[str, Any]]:
    """Return ``text``, ``contrast`` and ``size`` (in pixels) of every visible text
    in an element.
    """
    texts: list[dict[str, Any]] = element.evaluate(_CONTRASTS)
    return texts


def misfits(element: Locator) -> list[str]:
    """Return the texts that stick out to the right, broken quantities in tables, and separators at
    a line's end.
    """
    problems: list[str] = []
    for script in (_STICK_OUT, _SQUEEZED, _DANGLING):
        problems += element.evaluate(script)
    return problems


def indexed(picture: Image.Image, like: Image.Image | None = None) -> Image.Image:
    """Return a picture in 256 colours of ``like``: those of areas stay exact, those of letters'
    edges come close.
    """
    weights = 2 ** numpy.array([16, 8, 0])
    codes = numpy.array(like or picture) @ weights
    areas = codes[:, 1:][codes[:, 1:] == codes[:, :-1]]
    colours = numpy.array(
        sorted([*dict.fromkeys(_commonest(areas)[:128] + _commonest(codes))][:256])
    )
    palette = Image.new("P", (1, 1))
    palette.putpalette([code >> shift & 255 for code in colours.tolist() for shift in (16, 8, 0)])
    # which only comes close for all
    reduced = picture.quantize(palette=palette, dither=Image.Dither.NONE)
    codes = numpy.array(picture) @ weights
    places = numpy.minimum(numpy.searchsorted(colours, codes), len(colours) - 1)
    pixels = numpy.where(colours[places] == codes, places, numpy.array(reduced)).astype("uint8")
    exact = Image.fromarray(pixels, "P")
    exact.putpalette(reduced.getpalette() or [])
    return exact


def _commonest(codes: Any) -> list[int]:
    values, counts = numpy.unique(codes, return_counts=True)
    colours: list[int] = values[counts.argsort()[::-1]].tolist()
    return colours


class Pictures:
    """Writes pictures into a folder, or nothing where there is none: a run of the tests changes no
    file.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def take(self, element: Locator, name: str) -> None:
        if self.folder is None:
            return
        element.page.mouse.move(0, 0)  # what is under the mouse looks different
        picture = Image.open(io.BytesIO(element.screenshot(animations="disabled"))).convert("RGB")
        self.folder.mkdir(parents=True, exist_ok=True)
        indexed(picture).save(self.folder / f"{name}.png", optimize=True)

    def film(self, page: Page) -> Film:
        return Film(page, self.folder)


class Film:
    """Pictures of a page one after the other, as an animation."""

    def __init__(self, page: Page, folder: Path | None) -> None:
        self._page = page
        self._folder = folder
        self._frames: list[Image.Image] = []
        self._milliseconds: list[int] = []

    def take(self, seconds: float, *, longer: bool = True) -> None:
        """Show the page as it looks now for a time; a picture like the last one makes that one
        ``longer``, or not.
        """
        if self._folder is None:
            return
        frame = Image.open(
            io.BytesIO(self._page.screenshot(animations="disabled", caret="hide"))
        ).convert("RGB")
        if not self._frames or frame.tobytes() != self._frames[-1].tobytes():
            self._frames.append(frame)
            self._milliseconds.append(int(1000 * seconds))
        elif longer:
            self._milliseconds[-1] += int(1000 * seconds)

    def save(self, name: str) -> None:
        if self._folder is None:
            return
        tall = Image.new(
            "RGB", (self._frames[0].width, sum(frame.height for frame in self._frames))
        )
        for number, frame in enumerate(self._frames):
            tall.paste(frame, (0, number * frame.height))
        # in the same colours: only changes are stored
        first, *more = [indexed(frame, tall) for frame in self._frames]
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{name}.gif"
        first.save(
            path,
            save_all=True,
            append_images=more,
            duration=self._milliseconds,
            loop=0,
            optimize=True,
        )
