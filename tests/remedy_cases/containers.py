"""Places in containers: lists, dicts, sets, and collections of Python."""

from tests.remedy_cases.case import Case

CONTAINERS: dict[str, Case] = {
    "a list": Case(
        "outer.append(x)", setup="outer = [1, 2]", after="assert [n + 1 for n in outer] == [2, 3]"
    ),
    "a tuple in a dict": Case('outer["t"] = (1, x)', setup="outer = {}"),
    "a tuple in a list": Case(
        "outer.append((1, x))", setup="outer = []", after="for first, second in outer: second + 1"
    ),
    "a dict": Case('outer["a"] = x', setup="outer = {}"),
    "a dict of numbers": Case("outer[3] = x", setup="outer = {}"),
    "a dict as a key": Case("outer[x] = 1", setup="outer = {}", kinds=("object",)),
    "a defaultdict": Case(
        'outer["a"].append(x)',
        setup="import collections; outer = collections.defaultdict(list)",
        after="outer['a'].append(1)",
    ),
    "an OrderedDict": Case(
        'outer["a"] = x', setup="import collections; outer = collections.OrderedDict()"
    ),
    "a Counter": Case('outer["a"] = x', setup="import collections; outer = collections.Counter()"),
    "a ChainMap": Case(
        'outer["a"] = x', setup="import collections; outer = collections.ChainMap()"
    ),
    "a UserDict": Case(
        'outer["a"] = x', setup="import collections; outer = collections.UserDict()"
    ),
    "a UserList": Case(
        "outer.append(x)", setup="import collections; outer = collections.UserList()"
    ),
    "a set": Case("outer.add(x)", setup="outer = {1, 2}", kinds=("object",)),
    "a set in a dict": Case('outer["s"].add(x)', setup='outer = {"s": set()}', kinds=("object",)),
    "a frozenset": Case("outer.append(frozenset([x, 3]))", setup="outer = []", kinds=("object",)),
    "a deque": Case(
        "outer.append(x)", setup="import collections; outer = collections.deque([1, 2])"
    ),
    "a deque alone": Case(
        "outer.append(x)", setup="import collections; outer = collections.deque()"
    ),
    "a key with a semicolon": Case("outer['a; b'] = x", setup="outer = {}"),
    "a named tuple": Case(
        "outer.append(Point(x, 1))",
        setup="import collections; Point = collections.namedtuple('Point', 'a b'); outer = []",
    ),
    "an exit stack": Case(
        "outer.callback(print, x)", setup="import contextlib; outer = contextlib.ExitStack()"
    ),
    "a map": Case("outer.append(map(len, [x]))", setup="outer = []"),
    "a list iterator": Case("outer.append(iter([x]))", setup="outer = []"),
    "a mapping proxy": Case(
        "outer['p'] = types.MappingProxyType({'a': x})", setup="import types; outer = {}"
    ),
    "an older object of a library in a list": Case(
        "outer[1].rate = x",
        setup="import argparse; outer = [argparse.Namespace(rate=each) for each in range(3)]",
        after="assert [each.rate for each in outer[::2]] == [0, 2]; assert len(outer) == 3",
    ),
    "older objects of libraries in a dict": Case(
        'outer["args"].data = x; outer["parser"].data = x',
        setup="""
        import argparse
        outer = {"args": argparse.Namespace(rate=1), "parser": argparse.ArgumentParser()}
        """,
        after="assert outer['args'].rate == 1; outer['parser'].format_usage()",
    ),
    "many times a list": Case(
        "outer.extend([x, 1, x, 2, x])", setup="outer = [0]", after="assert 1 in outer"
    ),
    "twice a dict": Case(
        "outer.update(a=x, b=x)", setup="outer = {'c': 1}", after="assert 'c' in outer"
    ),
    "twice a list in a dict": Case("outer['a'] += [x, x]", setup="outer = {'a': []}"),
    "neighbours of two dicts": Case(
        "outer.update(dict.fromkeys('abcdef', x)); other.update(dict.fromkeys('abcdef', x))",
        setup="outer = {'kept': 1}; other = {'kept': 1}",
        after="assert list(outer) == list(other) == ['kept']",
    ),
    "places of two lists": Case(
        "outer.extend([x, 1] * 6); other.extend([x, 1] * 6)",
        setup="outer = []; other = []",
        after="assert outer == other == [1] * 6",
    ),
    "many times a list next to others": Case("outer.extend([x, 1] * 60)", setup="outer = [0]"),
    "many times a dict next to others": Case(
        "outer.update({number: x if number % 2 else 1 for number in range(100)})",
        setup="outer = {}",
    ),
    "pairs with one object": Case(
        "for number in range(3): outer.append((number, x))",
        setup="outer = [0]",
        after="assert outer == [0]",
    ),
    "dicts with one object": Case(
        "outer.append({'a': x}); outer.append(3); outer.append({'b': x})", setup="outer = []"
    ),
    "an object and a pair with it": Case(
        "outer.append(x); outer.append((1, x))", setup="outer = []"
    ),
    "pairs in two containers": Case(
        "outer.append((1, x)); other['a'] = (2, x)", setup="outer = []; other = {}"
    ),
    "a value and a key": Case("outer[x] = x", setup="outer = {}", kinds=("object",)),
    "an OrderedDict with odd keys": Case(
        "outer[Key()] = x; outer.move_to_end(1)",
        setup="""
        import collections
        class Key: pass
        outer = collections.OrderedDict({1: 2})
        """,
        after="assert list(outer) == [1]",
    ),
    "several odd keys of an OrderedDict": Case(
        "outer.update({Key(): x for _ in range(8)}); outer.move_to_end(1)",
        setup="""
        import collections
        class Key: pass
        class Outer(collections.OrderedDict): pass
        outer = Outer({1: 2})
        """,
        after="assert list(outer) == [1]",
    ),
    "a dict that lists its keys backwards": Case(
        "outer[Key()] = x",
        setup="""
        class Key: pass
        class Outer(dict):
            def __iter__(self):
                return iter(list(self.keys())[::-1])
        outer = Outer({1: 2})
        """,
        after="assert list(outer) == [1]",
    ),
    "tuples in a list": Case(
        "outer += [(1, x), 7, (2, x), 8, (3, x)]",
        setup="outer = [0]",
        after="assert outer == [0, 7, 8]",
        kinds=("array",),
    ),
    "many tuples in a dict": Case(
        "outer.update({number: (number, x) for number in range(30)})",
        setup="outer = {'kept': 0}",
        after="assert outer == {'kept': 0}",
        kinds=("array",),
    ),
    "a library's object with many paths": Case(
        "outer.my_data = x",
        setup="import configparser; outer = configparser.ConfigParser()",
        after="outer.read_string('[a]\\nb = 1'); assert outer.getint('a', 'b') == 1",
    ),
    "a heap": Case(
        "heapq.heappush(outer, (1, x)); heapq.heappush(outer, (3.5, x))",
        setup="""
        import heapq
        outer = [(0, 0)]
        for number in (3, 7, 8, 4):
            heapq.heappush(outer, (number, number))
        """,
        after="assert [heapq.heappop(outer)[0] for _ in range(5)] == [0, 3, 4, 7, 8]",
    ),
    "a sorted list": Case(
        "bisect.insort(outer, (1, x), key=lambda pair: pair[0])",
        setup="import bisect; outer = [(0, 0), (2, 2), (3, 3)]",
        after="assert outer == [(0, 0), (2, 2), (3, 3)]",
    ),
    "an exit stack next to others": Case(
        "outer.callback(print, x)",
        setup="import contextlib; outer = contextlib.ExitStack(); outer.callback(print, 1)",
        sentences=("close() it when",),
    ),
    "several odd keys": Case(
        """
        outer[Key()] = x
        outer[Key()] = Big(1 << 21)
        watched.append(weakref.ref(list(outer.values())[2]))
        outer[Key()] = 5
        """,
        setup="""
        class Key: pass
        outer = {Key(): 1}
        """,
        after="assert list(outer.values()) == [1, 5]",
    ),
    "a named value next to other values": Case(
        """
        outer["a"] = x
        for key in "bc":
            outer[key] = np.ones(1 << 17)
            watched.append(weakref.ref(outer[key]))
        outer["d"] = 5
        """,
        setup="outer = {'z': 1}",
        after="assert outer == {'z': 1, 'd': 5}",
    ),
    "a dict that refuses del": Case(
        "outer['f'] = Frozen(a=x)",
        setup="""
        class Frozen(dict):
            def __delitem__(self, key):
                raise TypeError("frozen")
            clear = pop = popitem = __delitem__
        outer = {1: 1}
        """,
        after="assert outer == {1: 1}",
    ),
    "a list that refuses del": Case(
        "list.append(outer, x)",
        setup="""
        class Frozen(list):
            def __delitem__(self, position):
                raise TypeError("frozen")
        outer = Frozen([1])
        """,
        after="assert 'outer' not in globals()",
    ),
    "a dict that deletes by its base": Case(
        "outer['a'] = x",
        setup="""
        class Noted(dict):
            def __delitem__(self, key):
                deleted.append(key)
                super().__delitem__(key)
        outer, deleted = Noted(b=1), []
        """,
        after="assert outer == {'b': 1} and deleted == ['a']",
    ),
    "a dict behind a mapping proxy": Case(
        "put('a', x);",
        setup="""
        import types
        hidden = {1: 1}
        proxy = types.MappingProxyType(hidden); put = hidden.setdefault
        del hidden
        """,
        after="assert dict(proxy) == {1: 1}; put(2, 2); assert proxy[2] == 2",
    ),
    "a mapping proxy in two places": Case(
        "outer['p'] = outer['q'] = types.MappingProxyType({'a': x})",
        setup="import types; outer = {}",
        after="assert not outer",
    ),
    "a list behind its method": Case(
        "put(x)",
        setup="""
        def make():
            return [1].append
        put = make()
        """,
        after="assert put.__self__ == [1]; put(2)",
    ),
    "entries of a dict next to a variable called key": Case(
        "outer['b'] = x; outer['c'] = x[:]",
        setup="outer = {'a': 1}; key = _key = position = item = 'mine'",
        after="assert (outer, key, position, item) == ({'a': 1}, 'mine', 'mine', 'mine')",
        kinds=("array",),
    ),
}
