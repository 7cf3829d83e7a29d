"""Short notebooks of the kind that people write, as data: which of their memory do reports name?"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Notebook:
    """The cells of a notebook."""

    imports: str
    """The first cell: what it allocates does not count."""
    cells: tuple[str, ...]
    packages: tuple[str, ...] = ()
    """Packages that it needs."""
    is_quick: bool = False
    """True if `make test` runs it."""


NOTEBOOKS: dict[str, Notebook] = {
    "TF-IDF": Notebook(
        "import numpy as np; from sklearn.feature_extraction.text import TfidfVectorizer",
        (
            """
            words = [f"word{n}" for n in range(40_000)]
            rng = np.random.default_rng(0)
            texts = [" ".join(words[i] for i in rng.integers(0, 40_000, 60)) for _ in range(15_000)]
            """,
            """
            vectorizer = TfidfVectorizer(ngram_range=(1, 2))
            matrix = vectorizer.fit_transform(texts)
            """,
        ),
        ("sklearn",),
    ),
    "a training history": Notebook(
        """
        import torch
        net = torch.nn.Linear(4, 4)
        first = torch.optim.Adam(net.parameters())
        net(torch.ones(1, 4)).sum().backward(); first.step()
        """,
        (
            """
            model = torch.nn.Sequential(
                torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1)
            )
            optimizer = torch.optim.Adam(model.parameters())
            history = {"loss": [], "outputs": []}
            """,
            """
            for epoch in range(20):
                data = torch.randn(4000, 64)
                output = model(data)
                loss = output.pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                history["loss"].append(loss)
                history["outputs"].append(torch.cat([output] * 20, 1))
            """,
        ),
        ("torch",),
    ),
    "async requests": Notebook(
        "import asyncio, json",
        (
            """
            async def fetch(number):
                await asyncio.sleep(0)
                return json.loads(json.dumps({"id": number, "rows": list(range(1000, 1400))}))
            results = await asyncio.gather(*[fetch(number) for number in range(3000)])
            tasks = [asyncio.create_task(fetch(number)) for number in range(1000)]
            """,
            "await asyncio.sleep(0.1); done = [task.result() for task in tasks]",
        ),
        is_quick=True,
    ),
    "lists of tokens": Notebook(
        "import re, collections",
        (
            """
            numbers = [[(n * 7919 + i) % 5000 for i in range(80)] for n in range(8000)]
            documents = [" ".join(f"t{number}" for number in row) for row in numbers]
            tokens = [re.findall(r"[a-z0-9]+", document) for document in documents]
            counts = collections.Counter(token for document in tokens for token in document)
            pairs = [list(zip(document, document[1:])) for document in tokens[:3000]]
            """,
        ),
    ),
    "an ETL of texts in objects": Notebook(
        "import pandas as pd, numpy as np; pd.DataFrame({'a': ['x']}).groupby('a').size();",
        (
            """
            raw = pd.DataFrame({
                "id": np.arange(200_000),
                "name": pd.Series([f"customer {n}" for n in range(200_000)], dtype=object),
                "city": pd.Series([f"city {n % 500}" for n in range(200_000)], dtype=object),
            })
            """,
            """
            clean = raw.assign(name=pd.Series(list(raw["name"].str.upper()), dtype=object))
            joined = clean.merge(raw[["id", "city"]], on="id")
            """,
        ),
        ("pandas",),
    ),
    "an ETL with sqlite": Notebook(
        "import sqlite3; sqlite3.connect(':memory:').execute('select 1');",
        (
            """
            db = sqlite3.connect(":memory:")
            db.execute("create table rows (id integer primary key, text text)")
            texts = (("x" * 400,) for _ in range(90_000))
            db.executemany("insert into rows (text) values (?)", texts)
            db.commit()
            """,
            "rows = db.execute('select * from rows where id < 20000').fetchall()",
        ),
    ),
    "figures in a loop": Notebook(
        """
        import numpy as np, matplotlib
        matplotlib.use("agg")
        import matplotlib.pyplot as plt
        plt.plot([1]); plt.gcf().canvas.draw(); plt.close("all")
        """,
        (
            """
            for number in range(12):
                fig, ax = plt.subplots()
                ax.plot(np.random.rand(200_000))
                ax.set_title(str(number))
            """,
        ),
        ("matplotlib",),
    ),
    "a summed loss": Notebook(
        "import torch; torch.nn.Linear(4, 4)(torch.ones(1, 4)).sum().backward()",
        (
            """
            model = torch.nn.Sequential(
                torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1)
            )
            total = 0
            for step in range(12):
                total += model(torch.randn(4000, 64)).pow(2).mean()
            """,
        ),
        ("torch",),
    ),
    "images": Notebook(
        """
        import io; from PIL import Image; import numpy as np
        Image.new('RGB', (1, 1)).resize((2, 2)).save(io.BytesIO(), "PNG")
        """,
        (
            """
            images = [Image.effect_noise((800, 600), 50).convert("RGB") for _ in range(12)]
            thumbnails = [image.resize((200, 150)) for image in images]
            arrays = np.stack([np.asarray(image) for image in images])
            """,
            """
            files = []
            for image in images:
                buffer = io.BytesIO(); image.save(buffer, "PNG"); files.append(buffer)
            """,
        ),
        ("PIL",),
    ),
    "time series": Notebook(
        "import pandas as pd, numpy as np; pd.Series([1.0]).rolling(1).mean();",
        (
            """
            times = pd.date_range("2020", periods=1_800_000, freq="min")
            series = pd.Series(np.random.rand(1_800_000), index=times)
            """,
            """
            means = {window: series.rolling(window).mean() for window in (5, 60, 1440)}
            hourly = series.resample("h").agg(["mean", "min", "max"])
            """,
        ),
        ("pandas",),
    ),
    "joins of data frames": Notebook(
        "import pandas as pd, numpy as np; f = pd.DataFrame({'k': [1]}); f.merge(f, on='k'); del f",
        (
            """
            left = pd.DataFrame({"k": np.arange(500_000), "x": np.random.rand(500_000)})
            right = pd.DataFrame({"k": np.arange(0, 1_000_000, 2), "y": np.random.rand(500_000)})
            joined = left.merge(right, on="k", how="left")
            joined["z"] = joined["x"] * joined["y"].fillna(0)
            """,
            "by_bin = joined.groupby(joined['k'] % 1000); means = by_bin.mean()",
        ),
        ("pandas",),
    ),
    "pickles": Notebook(
        "import pickle",
        (
            """
            records = [{"id": n, "tags": [f"tag {n % 97}", f"tag {n}"]} for n in range(60_000)]
            dumped = pickle.dumps(records)
            copies = [pickle.loads(dumped) for _ in range(2)]
            """,
        ),
    ),
    "caches": Notebook(
        "import functools, numpy as np",
        (
            """
            @functools.lru_cache(maxsize=None)
            def load(number):
                return np.random.rand(100_000)
            class Model:
                @functools.cached_property
                def weights(self):
                    return np.random.rand(1_000_000)
                @functools.cache
                def predict(self, number):
                    return [str(i) for i in range(number)]
            model = Model()
            """,
            """
            for number in range(40):
                load(number)
            model.weights.sum(); model.predict(200_000);
            """,
        ),
        is_quick=True,
    ),
    "generators": Notebook(
        "import itertools, numpy as np",
        (
            """
            def batches(size):
                data = np.random.rand(4_000_000)
                for start in range(0, len(data), size):
                    yield data[start:start + size]
            stream = batches(1000); first = next(stream)
            lines = (line.upper() for line in [f"{n:050d}" for n in range(150_000)])
            head = list(itertools.islice(lines, 10))
            left, right = itertools.tee(iter([bytes(1000) for _ in range(20_000)]))
            """,
            "for item in left: pass",
        ),
    ),
    "parsed XML and JSON": Notebook(
        "import json, xml.etree.ElementTree as ElementTree",
        (
            """
            rows = "".join(f"<row id='{n}'><v>{n}</v></row>" for n in range(60_000))
            tree = ElementTree.fromstring(f"<all>{rows}</all>")
            parsed = json.loads(json.dumps([{"id": n, "v": [n, n + 1]} for n in range(80_000)]))
            """,
        ),
    ),
    "classes of one's own": Notebook(
        "import dataclasses",
        (
            """
            @dataclasses.dataclass
            class Point:
                x: float
                y: float
                name: str
            class Node:
                def __init__(self, parent):
                    self.parent, self.children = parent, []
                    if parent is not None:
                        parent.children.append(self)
            points = [Point(n / 7, n / 3, f"p{n}") for n in range(120_000)]
            root = Node(None)
            for n in range(60_000):
                Node(root if n % 10 else root.children[-1] if root.children else root)
            """,
        ),
    ),
    "embeddings in arrow": Notebook(
        "import pyarrow as pa, numpy as np; pa.table({'a': [1]}).to_pandas();",
        (
            """
            table = pa.table({
                "id": np.arange(100_000), "text": [f"text number {n}" * 6 for n in range(100_000)],
                "vector": list(np.random.rand(100_000, 16).astype("f4")),
            })
            """,
            "frame = table.to_pandas(); kept = table.filter(pa.compute.less(table['id'], 50_000))",
        ),
        ("pyarrow", "pandas"),
    ),
    "lazy queries of polars": Notebook(
        "import polars as pl; pl.DataFrame({'a': [1]}).lazy().filter(pl.col('a') > 0).collect();",
        (
            """
            texts = [f"row {n % 999}" for n in range(1_000_000)]
            frame = pl.DataFrame({"id": range(1_000_000), "text": texts})
            del texts
            query = frame.lazy().with_columns(pl.col("id") * 2)
            doubled = query.collect()
            groups = doubled.group_by("text").agg(pl.col("id"))
            """,
        ),
        ("polars",),
    ),
    "clustering": Notebook(
        """
        import numpy as np
        from sklearn.ensemble import RandomForestRegressor
        from sklearn.neighbors import NearestNeighbors
        RandomForestRegressor(2).fit(np.ones((4, 2)), np.ones(4))
        NearestNeighbors().fit(np.ones((9, 2)));
        """,
        (
            """
            data = np.random.rand(20_000, 10)
            forest = RandomForestRegressor(15).fit(data, data.sum(1))
            neighbours = NearestNeighbors().fit(data)
            distances = neighbours.kneighbors(data[:2000], 100)
            """,
        ),
        ("sklearn",),
    ),
    "printed results": Notebook(
        "import sys",
        (
            "for number in range(3): print('result of a long calculation ' * 300_000)",
            "results = ['x' * 1000 for _ in range(20_000)]\nresults",
        ),
        is_quick=True,
    ),
    "graphs of networkx": Notebook(
        "import networkx; networkx.path_graph(3);",
        (
            """
            graph = networkx.gnm_random_graph(15_000, 90_000, seed=1)
            networkx.set_edge_attributes(graph, 1.0, "weight")
            degrees = dict(graph.degree())
            """,
        ),
        ("networkx",),
    ),
}
