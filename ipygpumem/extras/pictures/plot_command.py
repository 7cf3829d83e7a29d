"""``%gpumem plot``."""

from __future__ import annotations

from IPython.display import display

from ipygpumem.extras.pictures import plot as pictures
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
    last = {} if options.picture == "devices" else {"last": options.n}
    picture = getattr(pictures, options.picture)(device=options.device, **last)
    if app.context.display.has_images:
        display(picture)
        return []
    headline, *lines = picture.summary.splitlines()
    file = (
        f"a terminal shows no pictures: ipygpumem.plot.{options.picture}().savefig('FILE.png') "
        f"writes this one"
    )
    return [Report("plot", headline, (*(line.strip() for line in lines), file))]
