"""``%gpumem plot``."""

from __future__ import annotations

from typing import Any

from IPython.display import display

from ipygpumem.extras.pictures import plot as plots
from ipygpumem.report.layout import Report
from ipygpumem.shell.app import App
from ipygpumem.shell.commands.declarations import Options, argument, at_least_one, command, option


@command(
    "%gpumem plot",
    "draw a picture",
    argument("picture", "", choices=("session", "devices", "experiments"), default="session"),
    option("--device", "D", "only this device: RAM, cuda or cuda:0", offers=("RAM", "cuda")),
    option("-n", "N", "only the last cells or experiments", to=at_least_one),
)
def plot(app: App, options: Options) -> list[Report]:
    """Show the picture that the options ask for; in a terminal, return its main figures."""
    picture = _picture(options)
    if app.context.display.has_images:
        display(picture)
        return []
    headline, *lines = picture.summary.splitlines()
    file = (
        f"a terminal shows no pictures: ipygpumem.plot.{options.picture}().savefig('FILE.png') "
        f"writes this one"
    )
    texts = [*map(str.strip, lines), file]
    return [Report("plot", headline, texts)]


def _picture(options: Options) -> Any:
    """Return the picture that the options ask for."""
    match options.picture:
        case "devices":
            return plots.devices(device=options.device)
        case "experiments":
            return plots.experiments(device=options.device, last=options.n)
        case _:
            return plots.session(device=options.device, last=options.n)
