"""Places in objects, classes and functions: attributes, defaults, closures, caches."""

from tests.remedy_cases.case import Case

OBJECTS: dict[str, Case] = {
    "an attribute": Case(
        "outer.data = x",
        setup="""
        class Outer: pass
        outer = Outer()
        """,
    ),
    "a nested attribute": Case(
        "outer.inner.data = x",
        setup="""
        class Outer: pass
        outer = Outer(); outer.inner = Outer()
        """,
    ),
    "a slot": Case(
        "outer.data = x",
        setup="""
        class Outer:
            __slots__ = ('data',)
        outer = Outer()
        """,
    ),
    "a class": Case("Outer.data = x", setup="class Outer: pass"),
    "a list of a class": Case(
        "Outer.data.append(x)",
        setup="""
        class Outer:
            data = []
        """,
    ),
    "a default argument": Case(
        """
        def outer(data=x):
            return 1
        registry["f"] = outer
        """,
        setup="registry = {}",
    ),
    "a keyword default": Case(
        """
        def outer(*, data=x):
            return 1
        registry["f"] = outer
        """,
        setup="registry = {}",
    ),
    "a mutable default": Case(
        "outer(x)",
        setup="""
        def outer(item, seen=[]):
            seen.append(item)
        """,
        after="outer(1)",
    ),
    "a closure": Case(
        "outer(x)",
        setup="""
        def make():
            data = []
            return data.append
        outer = make()
        """,
    ),
    "a closure in a list": Case(
        """
        def make(data):
            return lambda: data
        outer.append(make(x))
        """,
        setup="outer = []",
        after="for f in outer: f()",
    ),
    "a closure's list": Case(
        "outer(x)",
        setup="""
        def make():
            data = []
            def add(item):
                data.append(item)
            return add
        outer = make()
        """,
        after="outer(1)",
    ),
    "a function's attribute": Case("outer.data = x", setup="def outer(): pass"),
    "a cached function": Case(
        "outer.data = x; load(1); del outer.data",
        setup="""
        import functools
        class Outer: pass
        outer = Outer()
        @functools.lru_cache(maxsize=None)
        def load(number):
            return outer.data
        """,
    ),
    "a cached function's argument": Case(
        "load(x)",
        setup="""
        import functools
        @functools.lru_cache
        def load(item):
            return 1
        """,
        kinds=("object",),
    ),
    "a cached method": Case(
        "model.data = x; model.load(1); del model.data",
        setup="""
        import functools
        class Model:
            @functools.lru_cache(maxsize=None)
            def load(self, number):
                return self.data
        model = Model()
        """,
    ),
    "a cached method of a dropped object": Case(
        "model = Model(); model.data = x; model.load(1); del model",
        setup="""
        import functools
        class Model:
            @functools.cache
            def load(self, number):
                return 1
        """,
    ),
    "a cached property": Case(
        "model.x = x; model.data; del model.x",
        setup="""
        import functools
        class Model:
            @functools.cached_property
            def data(self):
                return self.x
        model = Model()
        """,
    ),
    "a cached static method": Case(
        "Model.load(lambda: x)",
        setup="""
        import functools
        class Model:
            @staticmethod
            @functools.cache
            def load(make):
                return make()
        """,
    ),
    "a partial": Case(
        "outer.append(functools.partial(print, x))", setup="import functools; outer = []"
    ),
    "a partial in a dict": Case(
        'outer["f"] = functools.partial(print, data=x)', setup="import functools; outer = {}"
    ),
    "a bound method": Case("outer.append(x.ravel)", setup="outer = []", kinds=("array",)),
    "a bound method of an object": Case(
        """
        class Worker:
            def work(self): pass
        worker = Worker()
        worker.data = x
        outer.append(worker.work)
        """,
        setup="outer = []",
        after="for f in outer: f()",
    ),
    "a generator": Case(
        """
        def numbers(data):
            yield 1
            yield len(data)
        outer.append(numbers(x))
        next(outer[0])
        """,
        setup="outer = []",
    ),
    "a weak dict's value": Case(
        "key = Key(); keys.append(key); outer[key] = x",
        setup="""
        import weakref
        outer = weakref.WeakKeyDictionary()
        keys = []
        class Key: pass
        """,
    ),
    "a data class": Case(
        "outer.append(Row(x))",
        setup="""
        import dataclasses
        @dataclasses.dataclass
        class Row:
            data: object
        outer = []
        """,
    ),
    "a namespace": Case("outer.data = x", setup="import types; outer = types.SimpleNamespace()"),
    "an error": Case(
        """
        def fail(data):
            raise ValueError
        try:
            fail(x)
        except ValueError as error:
            outer.append(error)
        """,
        setup="outer = []",
    ),
    "a singledispatch registry": Case(
        "show.register(str, lambda item, data=x: 1)",
        setup="""
        import functools
        @functools.singledispatch
        def show(item): return 0
        """,
        is_out_of_reach=True,
    ),
    "an enum": Case(
        "Kind.A.data = x",
        setup="""
        import enum
        class Kind(enum.Enum):
            A = 1
        """,
    ),
    "a property": Case(
        """
        def get(self, data=x):
            return 1
        Outer.value = property(get)
        """,
        setup="class Outer: pass",
    ),
    "a private attribute of an older object of a library": Case(
        "outer[0]._data = x",
        setup="import argparse; outer = [argparse.Namespace(rate=1)]",
        after="assert outer[0].rate == 1",
    ),
    "two attributes": Case(
        "outer.a = x; outer.b = x",
        setup="""
        class Outer: pass
        outer = Outer(); outer.c = 1
        """,
    ),
    "two attributes with one list": Case(
        "outer.a = outer.b = [x]",
        setup="""
        class Outer: pass
        outer = Outer()
        """,
    ),
    "two slots": Case(
        "outer.a = x; outer.b = x",
        setup="""
        class Outer:
            __slots__ = ('a', 'b')
        outer = Outer()
        """,
    ),
    "two attributes of a class": Case("Outer.a = x; Outer.b = x", setup="class Outer: pass"),
    "two attributes of a function": Case("outer.a = x; outer.b = x", setup="def outer(): pass"),
    "two fields of a frozen data class": Case(
        "object.__setattr__(outer, 'data', x); object.__setattr__(outer, 'more', x)",
        setup="""
        import dataclasses
        @dataclasses.dataclass(frozen=True)
        class Outer:
            data: object = None
            more: object = None
        outer = Outer()
        """,
    ),
    "two variables of a closure": Case(
        "put(x)",
        setup="""
        def make():
            data = other = None
            def put(value):
                nonlocal data, other
                data = other = value
            return put
        put = make()
        """,
        after="put(1)",
    ),
    "instances with one object": Case(
        "outer[1] = Result(x); outer[2] = Result(x)",
        setup="""
        class Result:
            def __init__(self, data):
                self.data = data
        outer = {0: 0}
        """,
        after="assert outer[0] == 0",
        kinds=("object",),
    ),
    "a part of an object that another line removes": Case(
        """
        y = np.ones(2**18); outer["parts"].append(Frozen(x, [y])); outer["other"] = Frozen(y, 1)
        """,
        setup="""
        class Frozen:
            def __init__(self, data, more):
                vars(self).update(data=data, more=more)
            def __setattr__(self, name, value):
                raise TypeError
        outer = {"parts": [Frozen(1, 2)]}
        """,
        after="assert len(outer['parts']) == 1",
        kinds=("array",),
    ),
    "partials of two dicts": Case(
        "outer['a'] = functools.partial(print, x); other['b'] = functools.partial(len, x)",
        setup="import functools; outer, other = {'kept': 1}, {}",
        after="assert outer == {'kept': 1} and not other",
        kinds=("array",),
    ),
    "a closure that assigns": Case(
        "put(x)",
        setup="""
        def make():
            data = None
            def put(value):
                nonlocal data
                data = value
            return put
        put = make()
        """,
        after="put(1)",
    ),
    "a frozen data class": Case(
        "object.__setattr__(outer, 'data', x)",
        setup="""
        import dataclasses
        @dataclasses.dataclass(frozen=True)
        class Outer:
            data: object = None
        outer = Outer()
        """,
        after="assert outer.data is None",
    ),
    "a partial method": Case(
        "Outer.show = functools.partialmethod(print, x)",
        setup="""
        import functools
        class Outer: pass
        """,
    ),
    "a descriptor": Case(
        "outer.data = x",
        setup="""
        import weakref
        class Stored:
            def __init__(self):
                self.values = weakref.WeakKeyDictionary()
            def __get__(self, owner, kind):
                return self.values[owner]
            def __set__(self, owner, value):
                self.values[owner] = value
        class Outer:
            data = Stored()
        outer = Outer()
        """,
        after="outer.data = 1; assert outer.data == 1",
    ),
    "a private attribute": Case(
        "outer._data = x",
        setup="""
        class Outer: pass
        outer = Outer()
        """,
    ),
    "a private attribute with a container": Case(
        "outer._cache = {'a': x}",
        setup="""
        class Outer: pass
        outer = Outer()
        """,
    ),
    "a registry of a class": Case(
        "Outer(x)",
        setup="""
        class Outer:
            made = []
            def __init__(self, data):
                self.data = data
                Outer.made.append(self)
        """,
        after="for outer in Outer.made: outer.data",
    ),
    "a memo of a decorator": Case(
        "load(1, x)",
        setup="""
        import functools
        def remember(function):
            known = {}
            @functools.wraps(function)
            def wrapper(key, value):
                if key not in known:
                    known[key] = function(value)
                return known[key]
            return wrapper
        @remember
        def load(value):
            return value
        """,
        after="assert load(1, 5) == 5",
    ),
    "three attributes, one of them a list": Case(
        "outer.empty = [x]; outer.items.append(x); outer.data = (x,)",
        setup="""
        class Outer:
            def __init__(self):
                self.empty = self.data = None
                self.items = [1]
        outer = Outer(); assert vars(outer)
        """,
        after="assert outer.items == [1]",
    ),
    "an argument of a partial": Case(
        "outer['f'].keywords['data'] = x",
        setup="import functools; outer = {'f': functools.partial(print, data=1), 'kept': 1}",
        after="assert outer == {'kept': 1}",
    ),
    "a list in a partial": Case(
        "outer.keywords['data'].append(x)",
        setup="import functools; outer = functools.partial(len, data=[1])",
        after="assert outer.keywords == {'data': [1]}",
    ),
    "a generator that has begun": Case(
        "outer['g'] = numbers(x); next(outer['g']);",
        setup="""
        def numbers(data):
            yield 1
            yield data
        outer = {}
        """,
    ),
    "a context manager": Case(
        "manager = opened(x); manager.__enter__(); outer.append(manager)",
        setup="""
        import contextlib
        @contextlib.contextmanager
        def opened(data):
            yield data
        outer = []
        """,
    ),
    "an object that its session has by key and in a list": Case(
        """
        made = Mapped(session, 2)
        made.data = x
        watched.append(weakref.ref(made))
        """,
        setup="""
        class Session:
            def __init__(self):
                self.identity = {}
                self.new = []
        class Mapped:
            def __init__(self, session, key):
                session.identity["Mapped", key] = self
                session.new.append(self)
                self.session = session
        session = Session()
        older = Mapped(session, 1)
        """,
        after="assert session.new == list(session.identity.values()) == [older]",
        kinds=("object",),  # the line of the array leaves the object around it
    ),
}
