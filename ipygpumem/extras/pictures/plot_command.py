"""``%gpumem plot``."""

from __future__ import annotations

from IPython.display import display

from ipygpumem.inventory import findings
from ipygpumem.magics.parsing import Options
from ipygpumem.report.layout import Report
from ipygpumem.shell.app import App


def plot(app: App, options: Options) -> list[Report]:
    """Show the picture that the options ask for; in a terminal, return its main figures."""
    from ipygpumem.extras.pictures import figures  # imports matplotlib

    if options.picture == "devices":
        picture = figures.devices(findings.now(app.context.meter).reconciliations, device=options.device)
    elif options.picture == "experiments":
        picture = figures.experiments(app.experiments.finished, device=options.device, last=options.n)
    else:
        picture = figures.session(app.session.history, device=options.device, last=options.n)
    if app.context.display.has_images:
        display(picture)
        return []
    headline, *lines = picture.summary.splitlines()
    file = f"a terminal shows no pictures: ipygpumem.plot.{options.picture}().savefig('FILE.png') writes this one"
    return [Report("plot", headline, (*(line.strip() for line in lines), file))]
