"""Reads the registry in which ipywidgets keeps every widget until it is closed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ipygpumem.heap.kinds.arrays import library_type
from ipygpumem.heap.paths.cuts import Cut, Kind, split
from ipygpumem.heap.paths.roots import Rank, Root, module_code
from ipygpumem.introspect import (
    attribute_of,
    class_dict,
    instance_dict,
    is_instance,
    loaded_object,
    type_name,
)

_PARTS = {"Layout"}
"""Names of types of widgets that only style another one; further names end in ``Style``."""


class WidgetRegistry:
    """The open widgets.

    Widgets that show each other are a family, which is closed as a whole: a box does not close its
    children, and these may refer to the box.

    Args:
        by_model: the widgets by the identifiers of their models: the registry itself.
        code: the user's expression for the registry.
        widgets_code: the user's expression for ipywidgets.

    Attributes:
        by_model: as above.
    """

    def __init__(self, by_model: dict[object, object], code: str, widgets_code: str) -> None:
        self.by_model = by_model
        self._code = code
        self._widgets_code = widgets_code
        self._models = {id(widget): model for model, widget in list(by_model.items())}

    @classmethod
    def of_process(cls, names: Mapping[str, object]) -> WidgetRegistry | None:
        """Return the registry, with code for a user who has ``names``; None without ipywidgets."""
        kind: Any = library_type("ipywidgets", "Widget")
        if kind is None:
            return None
        code = module_code("ipywidgets", names)
        by_model: Any = loaded_object("ipywidgets.widgets.widget", "_instances")
        if is_instance(by_model, dict):
            return cls(by_model, f"{code}.widgets.widget._instances", code)
        by_model = class_dict(kind).get("widgets")  # ipywidgets 7
        if is_instance(by_model, dict):
            return cls(by_model, f"{code}.Widget.widgets", code)
        return None

    @property
    def closing_all(self) -> str:
        """The statement that closes all widgets."""
        return f"{self._widgets_code}.Widget.close_all()"

    def has(self, item: object) -> bool:
        """Return True for an open widget."""
        return id(item) in self._models

    def has_only(self, widgets: Collection[int]) -> bool:
        """Return True if there are no open widgets but ``widgets``, given by identity, and styles
        of widgets: then ``Widget.close_all()`` closes no further one.
        """
        for widget in list(self.by_model.values()):
            if id(widget) not in widgets and not _is_style(widget):
                return False
        return True

    def roots(self) -> dict[int, Root]:
        """Return the root of each open widget, by its identity."""
        roots = dict[int, Root]()
        for root, family in self.families_with_roots():
            for widget in family:
                roots[id(widget)] = root
        return roots

    def families_with_roots(self) -> Iterator[tuple[Root, list[object]]]:
        """Yield the widgets of each family, and their root."""
        families = self._families()
        for position, family in enumerate(families):
            yield self._root(family, position, len(families)), family

    def _families(self) -> list[list[object]]:
        """Return the families of open widgets, the outermost widget of each family first."""
        # At first, each widget is a family of its own. If it shows another one, their families
        # become one: the list of the widget around, so that the outermost widget stays the first.
        family_of = dict[int, list[object]]()
        for widget in list(self.by_model.values()):
            family = family_of.setdefault(id(widget), [widget])
            if _is_style(widget):
                continue
            for part in _shown_by(widget):
                if not self.has(part) or _is_style(part):
                    continue
                family_of_part = family_of.setdefault(id(part), [part])
                if family_of_part is not family:
                    family += family_of_part
                    for member in family_of_part:
                        family_of[id(member)] = family
        unique = {id(family): family for family in family_of.values()}
        return [family for family in unique.values() if not _is_style(family[0])]

    def _root(self, family: list[object], position: int, number_of_families: int) -> Root:
        """Return the root of the widgets of a family, with the line that closes all of them.

        Args:
            family: the widgets, the outermost one first.
            position: the number of the family among all families.
            number_of_families: the number of all families.
        """
        outermost = family[0]
        model = str(self._models[id(outermost)])
        text = f"the registry of widgets, {type_name(outermost)} {model[:8]}"
        code = f'{self._code}["{model}"]'
        root = Root(text, Rank.PLACE, is_removed_as_whole=True)
        registration = Cut(
            Kind.CALL,
            id(self.by_model),
            "",
            self.closing_all,
            position,
            number_of_families,
            removal_of_all=self.closing_all,
        )
        if len(family) == 1:  # widgets.IntSlider()
            cut = replace(registration, kind=Kind.CLOSED, target=code, ending="close()")
            return replace(root, code=code, cut=cut)
        if number_of_families == 1:  # the line closes all widgets, and has no other form for all
            return replace(root, cut=replace(registration, size=0, removal_of_all=""))
        if not _is_box_of_all(family):  # such as a box in a box
            return replace(root, advice="close() each of its widgets")
        imports, target = split(code)  # widgets.HBox([slider, label])
        call = f"{imports}[widget.close() for widget in [*{target}.children, {target}]];"
        return replace(root, cut=replace(registration, target=call))


def _is_style(widget: object) -> bool:
    """Return True for a widget that only styles another one; ipywidgets never closes it."""
    name = type_name(widget)
    return name in _PARTS or name.endswith("Style")


def _is_box_of_all(family: list[object]) -> bool:
    """Return True if the first widget of a family is a box with all of the remaining ones."""
    child_ids = set(map(id, _children_of(family[0])))
    return all(id(widget) in child_ids for widget in family[1:])


def _children_of(widget: object) -> tuple[object, ...]:
    """Return the children of a box."""
    children = _traits(widget).get("children")
    return children if type(children) is tuple else ()


def _shown_by(widget: object) -> Iterator[object]:
    """Yield the objects to which a widget's traits refer, directly or in a tuple or list: the
    children of a box, or the layout of a button.
    """
    for value in list(_traits(widget).values()):
        if type(value) is tuple or type(value) is list:
            yield from value
        else:
            yield value


def _traits(widget: object) -> dict[str, Any]:
    """Return the values of a widget's traits by name."""
    values = attribute_of(widget, "_trait_values")
    return values if type(values) is dict else {}


def connections() -> object:
    """Return the registry of the kernel's connections with the front-end, which refer to widgets
    until these are closed; None without one.
    """
    manager = loaded_object("ipykernel.ipkernel", "_comm_manager")
    attributes = instance_dict(manager) or {}
    traits = attributes.get("_trait_values")
    return (traits if type(traits) is dict else attributes).get("comms")
