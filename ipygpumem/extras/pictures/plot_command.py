"""``%gpumem plot``."""

from __future__ import annotations

from ipygpumem.errors import PlotError, ellipsize
from ipygpumem.inventory import findings
from ipygpumem.magics.parsing import Options
from ipygpumem.report.export import place_of, write
from ipygpumem.report.layout import Report, clean
from ipygpumem.shell.app import App
from ipygpumem.units import format_bytes

SUFFIXES = (".png", ".svg")


def plot(app: App, options: Options) -> list[Report]:
    """Show or write the picture that the options ask for; return the reports."""
    target = None if options.save is None else place_of(options.save)
    if target is not None and target.suffix.lower() not in SUFFIXES:
        raise PlotError(f"{clean(ellipsize(options.save))}: write a file name that ends in {' or '.join(SUFFIXES)}")
    from ipygpumem.extras.pictures import figures  # imports matplotlib

    if options.picture == "devices":
        picture = figures.devices(findings.now(app.context.meter).reconciliations, device=options.device)
    elif options.picture == "experiments":
        picture = figures.experiments(app.experiments.finished, device=options.device, last=options.n)
    else:
        picture = figures.session(app.session.history, device=options.device, last=options.n)
    reports = []
    if app.context.display.has_images:
        data, metadata = picture.bundle()
        metadata["ipygpumem"] = {"reports": ["plot"]}
        app.context.shell.display_pub.publish(data=data, metadata=metadata)
    elif target is None:
        headline, *lines = picture.summary.splitlines()
        hint = "a terminal shows no pictures: --save FILE.png writes this one to a file"
        reports.append(Report("plot", headline, (*(line.strip() for line in lines), hint)))
    if target is not None:
        content = picture.render(target.suffix[1:].lower())
        size = write(target, content, is_ours=lambda head: "ipygpumem" in head, force=options.force)
        reports.append(Report("plot", f"saved: {clean(str(target))} ({format_bytes(size)})"))
    return reports
