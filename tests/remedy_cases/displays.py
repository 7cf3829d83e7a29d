"""Places in widgets and figures."""

from tests.remedy_cases.case import Case

_WIDGETS = "from tests.stand_ins import install; install('ipywidgets'); import ipywidgets"
_FIGURES = f"{_WIDGETS}; install('matplotlib'); import matplotlib.pyplot as plt"
_AXES = (
    "import matplotlib; matplotlib.use('agg'); import matplotlib.pyplot as plt; "
    "fig, ax = plt.subplots()"
)
_BOKEH = "from tests.stand_ins import install; install('bokeh'); import bokeh"

DISPLAYS: dict[str, Case] = {
    "a widget": Case(
        'outer["w"] = ipywidgets.Image(value=x)',
        setup=f"{_WIDGETS}; outer = {{}}",
        after="assert not outer",
    ),
    "a widget without a name": Case("ipywidgets.Image(value=x);", setup=_WIDGETS),
    "a widget next to another": Case(
        "ipywidgets.Image(value=x);",
        setup=f"{_WIDGETS}; other = ipywidgets.Image()",
        after="assert ipywidgets.widgets.widget._instances[other.model_id] is other",
    ),
    "a widget in a list": Case(
        "outer.append(ipywidgets.Image(value=x))",
        setup=f"{_WIDGETS}; outer = [ipywidgets.Image()]",
        after="assert len(outer) == 1",
    ),
    "a widget in an attribute": Case(
        "outer.w = ipywidgets.Image(value=x)",
        setup=f"{_WIDGETS}\nclass Outer: pass\nouter = Outer()",
    ),
    "a box of widgets": Case(
        "ipywidgets.VBox(children=(ipywidgets.Image(value=x), ipywidgets.Image()));",
        setup=f"{_WIDGETS}; other = ipywidgets.Image()",
        after="assert ipywidgets.widgets.widget._instances[other.model_id] is other",
    ),
    "an inner widget's observer": Case(
        """
        slider = ipywidgets.Image()
        box = ipywidgets.VBox(children=(slider,))
        slider.observe(lambda change, data=x: None)
        del box, slider
        """,
        setup=_WIDGETS,
    ),
    "an interactive widget": Case(
        "ipywidgets.interactive(lambda: x, ipywidgets.Image(), ipywidgets.Image());", setup=_WIDGETS
    ),
    "a figure of widgets": Case(
        "plt.figure().data = x", setup=_FIGURES, after="assert plt.get_fignums() == []"
    ),
    "two figures of widgets": Case(
        "plt.figure().data = x; plt.figure().data = x", setup=_FIGURES, kinds=("array",)
    ),
    "two figures next to a widget": Case(
        "plt.figure().data = x; plt.figure().data = x",
        setup=f"{_FIGURES}; other = ipywidgets.Image()",
        after="assert ipywidgets.widgets.widget._instances[other.model_id] is other",
        kinds=("array",),
    ),
    "a closed figure's toolbar": Case("plt.figure().data = x; plt.close(1)", setup=_FIGURES),
    "a source of bokeh": Case(
        'outer["s"] = bokeh.ColumnDataSource({"a": x})', setup=f"{_BOKEH}; outer = {{}}"
    ),
    "a source of bokeh in a list": Case(
        'outer.append(bokeh.ColumnDataSource({"a": x}))',
        setup=f"{_BOKEH}; outer = []",
        after="assert not outer",
    ),
    "bokeh's document": Case("bokeh.io.curdoc().add_root(x)", setup=_BOKEH),
    "two images in axes": Case(
        """
        ax.imshow(x.reshape(1024, -1));
        ax.imshow(np.ones((512, 512))); watched.append(weakref.ref(ax.images[1]))
        """,
        setup=f"{_AXES}; line, = ax.plot([1, 2])",
        after="assert list(ax.lines) == [line] and not len(ax.images); fig.canvas.draw()",
        kinds=("array",),
    ),
    "an image in axes": Case(
        "ax.imshow(x.reshape(1024, -1));",
        setup=f"{_AXES}; line, = ax.plot([1, 2])",
        after="assert list(ax.lines) == [line] and not len(ax.images); fig.canvas.draw()",
        kinds=("array",),
    ),
    "axes in a list": Case(
        "fig, ax = plt.subplots(); ax.imshow(x.reshape(1024, -1)); kept.append(ax)",
        setup=f"{_AXES}; ax.plot([1, 2]); kept = [ax]",
        after="assert plt.get_fignums() == [1] and kept == [ax]; fig.canvas.draw()",
        kinds=("array",),
    ),
    "axes of closed figures in a dict": Case(
        """
        for part in x.reshape(2, -1):
            fig, ax = plt.subplots()
            ax.imshow(part.reshape(1024, -1)); kept[len(kept)] = ax; plt.close(fig)
        """,
        setup=f"{_AXES}; ax.plot([1, 2]); kept = {{}}",
        after="assert plt.get_fignums() == [1]; fig.canvas.draw()",
        kinds=("array",),
    ),
    "an image of older axes in a list": Case(
        "kept.append(ax.imshow(x.reshape(1024, -1)))",
        setup=f"{_AXES}; kept = []",
        after="assert plt.get_fignums() == [1] and not len(ax.images); fig.canvas.draw()",
        kinds=("array",),
    ),
    "an image in a list": Case(
        "figure, axes = plt.subplots(); kept.append(axes.imshow(x.reshape(1024, -1)))",
        setup=f"{_AXES}; ax.plot([1, 2]); kept = []",
        after="assert plt.get_fignums() == [1]; fig.canvas.draw()",
        kinds=("array",),
    ),
    "an attribute of an artist": Case(
        "line.data = x", setup=f"{_AXES}; line, = ax.plot([1, 2])", after="fig.canvas.draw()"
    ),
    "an attribute of a figure": Case("fig.data = x", setup=_AXES, after="fig.canvas.draw()"),
}
