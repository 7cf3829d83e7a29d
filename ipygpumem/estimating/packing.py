"""Turns an error into plain data and back, with its class, text, causes and lines, to cross processes."""

from __future__ import annotations

import sys
import types
from typing import Any

from ipygpumem.introspect import (
    instance_dict,
    is_atom,
    is_instance,
    is_ours,
    is_users,
    module_dict,
    name_of,
    solid_base,
)
from ipygpumem.objects.holders.frames import stack, steps

_DEEPEST, _MOST_FRAMES = 8, 100

Frame = tuple[str, str, int, int, str]
"""File, function, its first line, the line that runs, module."""


def is_plain(value: object) -> bool:
    """Whether a value is made of numbers, texts, tuples, lists and dicts alone."""
    if is_atom(value):
        return True
    if type(value) is tuple or type(value) is list:
        return all(map(is_plain, value))
    return type(value) is dict and all(is_plain(key) and is_plain(item) for key, item in value.items())


def packed(error: BaseException | None, depth: int = 0) -> dict[str, Any] | None:
    """Return an error, with what led to it, as plain data."""
    if error is None or depth > _DEEPEST:
        return None
    try:
        text = str(str(error))
    except Exception:  # the user's own class
        text = ""
    attributes = instance_dict(error) or {}
    return {
        "classes": [(_text(kind, "__module__"), _text(kind, "__qualname__")) for kind in type.mro(type(error))[:-1]],
        "name": name_of(type(error)),
        "text": text,
        "args": error.args if is_plain(error.args) else (text,),
        "members": {name: value for name, slot in _members(type(error)) if is_plain(value := slot.__get__(error))},
        "attributes": {name: value for name, value in attributes.items() if is_plain(name) and is_plain(value)},
        "frames": _shortened([_frame(step.tb_frame, step.tb_lineno) for step in _users_steps(error.__traceback__)]),
        "cause": packed(error.__cause__, depth + 1),
        "context": packed(error.__context__, depth + 1),
        "suppressed": bool(error.__suppress_context__),
    }


def users_part(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback with the lines alone that the user's code wrote or called."""
    kept = None
    for step in reversed(_users_steps(traceback)):
        kept = types.TracebackType(kept, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return kept


def _users_steps(traceback: types.TracebackType | None) -> list[types.TracebackType]:
    """Return the steps of a traceback without ours, and without what ours called to follow an operation."""
    every = list(steps(traceback))
    files = [step.tb_frame.f_code.co_filename for step in every]
    users = max((number for number, name in enumerate(files) if is_users(name)), default=len(files))
    end = next((number for number, name in enumerate(files) if number > users and is_ours(name)), len(files))
    return [step for step, name in zip(every[:end], files[:end], strict=True) if not is_ours(name)]


def frames_to(frame: types.FrameType | None) -> list[Frame]:
    """Return the lines that led to a frame, the outermost first, from the last of ours on."""
    frames: list[Frame] = []
    for caller in stack(frame):
        if not is_ours(caller.f_code.co_filename):
            frames.append(_frame(caller, caller.f_lineno))
        elif frames:
            break
    return _shortened(frames[::-1])


def _frame(frame: types.FrameType, line: int) -> Frame:
    module = frame.f_globals.get("__name__")
    code = frame.f_code
    return code.co_filename, code.co_name, code.co_firstlineno, line, module if type(module) is str else ""


def _shortened(frames: list[Frame]) -> list[Frame]:
    half = _MOST_FRAMES // 2
    return frames if len(frames) <= _MOST_FRAMES else frames[:half] + frames[-half:]


def unpacked(data: dict[str, Any]) -> BaseException:
    """Return the error that ``packed`` was given; no code of the user's runs for it.

    Its class is the one of that name here; where there is none, one of the same name that derives from the first base
    that is here.
    """
    error = next(made for made in (_made(data, *names) for names in data["classes"]) if made is not None)
    error.__traceback__ = traceback_of(data["frames"])
    for name in ("cause", "context"):
        if data[name] is not None:
            setattr(error, f"__{name}__", unpacked(data[name]))
    error.__suppress_context__ = data["suppressed"]
    return error


def _made(data: dict[str, Any], module: str, path: str) -> BaseException | None:
    kind = _class_at(module, path)
    if kind is None:
        return None
    text = data["text"]
    solid = solid_base(kind)
    for args in (data["args"], (text,)):
        try:
            error: BaseException = solid.__new__(kind, *args)
            solid.__init__(error, *args)
        except Exception:  # noqa: S112  # a class that wants other arguments: the next form, or the next class
            continue
        for name, slot in _members(kind):
            if data["members"].get(name) is not None:
                slot.__set__(error, data["members"][name])
        own = instance_dict(error)
        if own is not None:
            own.update(data["attributes"])
        if path == data["classes"][0][1] and _says(error, text):
            return error
        if solid is not kind:
            return None  # a subclass might run the user's code
        body = {"__module__": data["classes"][0][0], "__str__": lambda _: text}
        stranger: BaseException = type(data["name"], (kind,), body)(*args)
        return stranger
    return None


def _members(kind: type) -> list[tuple[str, Any]]:
    """Return what Python's own exceptions have beside their arguments, such as a file's name."""
    solid = [base for base in type.mro(kind) if solid_base(base) is base]
    slots = [item for base in solid for item in type.__dict__["__dict__"].__get__(base).items()]
    return [(name, slot) for name, slot in slots if type(slot) is types.MemberDescriptorType]


def _says(error: BaseException, text: str) -> bool:
    try:
        return str(error) == text
    except Exception:  # the user's own class, without what its __init__ would give it
        return False


def _class_at(module: str, path: str) -> Any:
    value: Any = sys.modules.get(module)
    for name in path.split("."):
        if type(value) is types.ModuleType or is_instance(value, types.ModuleType):
            value = module_dict(value).get(name)
        elif is_instance(value, type):
            value = (instance_dict(value) or {}).get(name)
    return value if is_instance(value, type) and type.__subclasscheck__(BaseException, value) else None


def _text(kind: type, name: str) -> str:
    text = type.__dict__[name].__get__(kind)
    return text if type(text) is str else ""


class _HereError(Exception):
    """Is raised to make a frame."""


def traceback_of(frames: list[Frame]) -> types.TracebackType | None:
    """Return a traceback that shows these lines; its frames hold nothing."""
    made = None
    for name, function, first, line, module in reversed(frames):
        code = compile("\n" * max(0, line - first) + "raise here", name, "exec", dont_inherit=True)
        names = {"co_name": function} if sys.version_info < (3, 11) else {"co_name": function, "co_qualname": function}
        code = code.replace(co_firstlineno=max(1, first), **names)  # type: ignore[arg-type]  # both are texts
        try:
            exec(code, {"__name__": module, "here": _HereError()})  # noqa: S102  # our own two words
        except _HereError as error:
            here = error.__traceback__.tb_next if error.__traceback__ is not None else None
            if here is not None:
                made = types.TracebackType(made, here.tb_frame, here.tb_lasti, line)
            error.__traceback__ = None
    return made
