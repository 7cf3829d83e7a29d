"""What can be computed of how an element looks: the contrast of its texts, and which texts do not fit its width."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

if TYPE_CHECKING:
    from playwright.sync_api import Locator

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
}"""
"""Every visible text with its contrast to what is behind it, by WCAG 2's formula; opacities count."""

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
"""The texts that go on beyond an element's right edge, those of tables included: nothing scrolls."""

_SQUEEZED = """root => [...root.querySelectorAll('td, th')]
    .filter(cell => cell.checkVisibility() && /^[+-]?[\\d.]+ [KMGTP]?i?B$/.test(cell.innerText.replace('\\n', ' ')))
    .filter(cell => {
        const range = document.createRange();
        range.selectNodeContents(cell);
        return range.getBoundingClientRect().height > 2 * parseFloat(getComputedStyle(cell).fontSize);
    })
    .map(cell => cell.innerText)"""
"""The quantities in a table that are broken over two lines."""


def contrasts(element: Locator) -> list[dict[str, Any]]:
    """Return ``text``, ``contrast`` and ``size`` (in pixels) of every visible text in an element."""
    found: list[dict[str, Any]] = element.evaluate(_CONTRASTS)
    return found


def misfits(element: Locator) -> list[str]:
    """Return the texts that stick out to the right, and the quantities in tables that are broken."""
    found: list[str] = element.evaluate(_STICK_OUT) + element.evaluate(_SQUEEZED)
    return found


COLOURS = 96


class Pictures:
    """Writes pictures into a folder, or nothing where there is none: a run of the tests changes no file."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def take(self, element: Locator, name: str) -> None:
        if self.folder is None:
            return
        element.page.mouse.move(0, 0)  # what is under the mouse looks different
        picture = Image.open(io.BytesIO(element.screenshot(animations="disabled"))).convert("RGB")
        self.folder.mkdir(parents=True, exist_ok=True)
        picture.quantize(COLOURS, dither=Image.Dither.NONE).save(self.folder / f"{name}.png", optimize=True)
