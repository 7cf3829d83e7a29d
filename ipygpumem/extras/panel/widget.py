"""The panel's widget; importing it needs anywidget, which loads ipywidgets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
from traitlets import Any as AnyTrait

_HERE = Path(__file__).parent


class PanelWidget(anywidget.AnyWidget):
    """The model of all views of a panel: ``state`` returns the whole state, ``receive`` gets what
    the views send.

    A view that opens late, or after the page was reloaded, reads the whole state. Everything else
    is custom messages, because traits are not made for other threads.
    """

    _esm = (_HERE / "panel.js").read_text("utf-8")
    _css = (_HERE / "panel.css").read_text("utf-8")
    history = AnyTrait(None).tag(sync=True, to_json=lambda _, widget: widget.state())

    def __init__(self, state: Callable[[], Any], receive: Callable[[Any], None]) -> None:
        self.state = state
        super().__init__()
        self.on_msg(lambda widget, content, buffers: receive(content))

    def close(self) -> None:
        """Close the widget and its layout, which ipywidgets would keep."""
        layout = self.layout if self.comm is not None else None
        self.state = dict
        super().close()
        if layout is not None:
            layout.close()
