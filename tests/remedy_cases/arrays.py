"""Places in arrays of objects, data frames and data sets."""

from tests.remedy_cases.case import Case

_ZARR = "from tests.stand_ins import install; install('zarr'); import zarr"

ARRAYS: dict[str, Case] = {
    "an object array": Case("outer[1] = x", setup="outer = np.empty(3, object)", kinds=("array",)),
    "an object array of an object": Case(
        "outer[1] = x", setup="outer = np.empty(3, object)", kinds=("object",)
    ),
    "a column of a data frame": Case(
        "outer['x'] = x",
        setup="import pandas as pd; outer = pd.DataFrame({'a': np.ones(5 << 20)})",
        after="assert list(outer) == ['a'] and outer['a'].sum() == 5 << 20",
        kinds=("array",),
    ),
    "columns of a data frame": Case(
        "outer['x; y'] = x[::2]; outer[3] = x[::2]",
        setup="import pandas as pd; outer = pd.DataFrame({'a': np.ones(5 << 19)})",
        after="assert list(outer) == ['a']",
        kinds=("array",),
    ),
    "a column of a data frame in a dict": Case(
        "outer['frame']['x'] = x",
        setup="import pandas as pd; outer = {'frame': pd.DataFrame({'a': np.ones(5 << 20)})}",
        after="assert list(outer['frame']) == ['a']",
        kinds=("array",),
    ),
    "a column of a data frame with two names": Case(
        "outer['x'] = x",
        setup="""
        import pandas as pd
        outer = pd.DataFrame({'a': np.ones(5 << 20)}); other = [outer]
        """,
        after="assert list(outer) == ['a']",
        kinds=("array",),
    ),
    "a column of objects": Case(
        "outer['x'] = [x] + 9 * [None]",
        setup="import pandas as pd; outer = pd.DataFrame({'a': range(10)})",
        after="assert list(outer) == ['a']",
    ),
    "a cell of a data frame": Case(
        "outer.iat[3, 1] = x",
        setup="import pandas as pd; outer = pd.DataFrame({'a': range(10), 'o': 10 * [None]})",
        after="assert list(outer) == ['a', 'o']",
        kinds=("object",),
    ),
    "a cell of a series": Case(
        "outer.iat[3] = x",
        setup="import pandas as pd; outer = pd.Series(10 * [None], dtype=object)",
        kinds=("object",),
    ),
    "a variable of a data set": Case(
        "outer['a'] = ('x', x)",
        setup="import xarray; outer = xarray.Dataset({'o': ('p', np.ones(5 << 20))})",
        after="assert len(repr(outer)) and outer['o'].sum() > 0",
        kinds=("array",),
    ),
    "a coordinate with an index": Case(
        "outer.coords['x'] = x",
        setup="import xarray; outer = xarray.Dataset({'o': ('p', np.ones(5 << 20))})",
        after="assert len(repr(outer)) and 'x' not in outer.coords",
        kinds=("array",),
    ),
    "a coordinate of a labelled array": Case(
        "outer.coords['c'] = ('p', x[:2])",
        setup="import xarray; outer = xarray.DataArray(np.arange(2), dims='p')",
        after="assert len(repr(outer)) and outer.sum() == 1",
        kinds=("array",),
    ),
    "a note of a data set": Case(
        "outer.attrs['note'] = x",
        setup="import xarray; outer = xarray.Dataset({'o': ('p', np.ones(5 << 20))})",
        after="assert len(repr(outer)) and outer['o'].sum() > 0",
    ),
    "a series in a dict": Case(
        "outer['s'] = pd.Series(x)", setup="import pandas as pd; outer = {}", kinds=("array",)
    ),
    "the index of a data frame": Case(
        "outer.index = x.cumsum()",
        setup="import pandas as pd; outer = pd.DataFrame({'a': np.ones(5 << 20)})",
        after="assert list(outer) == ['a'] and len(outer) == 5 << 20",
        kinds=("array",),
    ),
    "a group of zarr": Case(
        'outer["g"] = zarr.Group(); outer["g"]["a"] = x', setup=f"{_ZARR}; outer = {{}}"
    ),
    "a group of zarr in a list": Case(
        'outer.append(zarr.Group()); outer[0]["a"] = x', setup=f"{_ZARR}; outer = []"
    ),
    "the attributes of an older frame in a list": Case(
        'outer[1].attrs["data"] = x',
        setup="import pandas; outer = [pandas.DataFrame({'a': [1]}) for _ in range(3)]",
        after="assert [len(each) for each in outer] == [1, 1, 1]",
    ),
    "a list in a cell of an older frame": Case(
        'outer.at[1, "a"].append(x)',
        setup="import pandas; outer = pandas.DataFrame({'a': [[1], [2]], 'b': [[3], [4]]})",
        after="assert outer.to_dict('list') == {'a': [[1], [2]], 'b': [[3], [4]]}",
    ),
    "a list in a cell of an older frame in a list": Case(
        'outer[0].at[1, "a"].append(x)',
        setup="import pandas; outer = [pandas.DataFrame({'a': [[1], [2]]})]",
        after="assert outer[0].to_dict('list') == {'a': [[1], [2]]}",
    ),
    "a list in an older series": Case(
        "outer[1].append(x)",
        setup="import pandas; outer = pandas.Series([[1], [2]])",
        after="assert outer.tolist() == [[1], [2]]",
        kinds=("array",),
    ),
    "a dict in an older series": Case(
        'outer[1]["data"] = x',
        setup="import pandas; outer = pandas.Series([{}, {}])",
        after="assert outer.tolist() == [{}, {}]",
        kinds=("array",),
    ),
    "an element of an older series": Case(
        "outer.iat[1] = x",
        setup="import pandas; outer = pandas.Series([[1], None])",
        after="assert outer.tolist() == [[1], None]",
    ),
    "two elements of an object array": Case(
        "outer[1, 0] = outer[0, 1] = x", setup="outer = np.empty((2, 2), object)", kinds=("object",)
    ),
    "many elements of an object array": Case(
        "outer[1:5, :3] = x",
        setup="outer = np.empty((10, 10), object); outer[0, 0] = 1",
        after="assert outer[0, 0] == 1",
        kinds=("object",),
    ),
    "two fields of a structured array": Case(
        "outer['f'][0] = x; outer['g'][1] = x",
        setup="outer = np.empty(100, dtype=[('g', object), ('f', object)])",
        kinds=("object",),
    ),
    "all of two fields of a structured array": Case(
        "outer['f'] = x; outer['g'] = x",
        setup="outer = np.empty(100, dtype=[('g', object), ('f', object)])",
        kinds=("object",),
    ),
    "two cells of a data frame": Case(
        "outer.iat[3, 1] = x; outer.iat[4, 1] = x",
        setup="import pandas as pd; outer = pd.DataFrame({'a': range(10), 'o': 10 * [None]})",
        after="assert list(outer) == ['a', 'o']",
        kinds=("object",),
    ),
    "a table of objects": Case(
        "outer[1, 0] = x", setup="outer = np.empty((2, 2), object)", kinds=("object",)
    ),
    "the attrs of a data frame": Case(
        "outer.attrs['a'] = x",
        setup="import pandas as pd; outer = pd.DataFrame({'a': [1]})",
        after="assert list(outer) == ['a']",
    ),
    "an attribute of a data frame": Case(
        "object.__setattr__(outer, 'my_data', x)",
        setup="import pandas as pd; outer = pd.DataFrame({'a': [1]})",
        after="assert list(outer) == ['a']",
    ),
    "a read-only array of objects": Case(
        "outer[1] = x; outer.flags.writeable = False",
        setup="outer = np.empty(3, object)",
        after="assert 'outer' not in globals()",
    ),
}
