"""Inventories of torch's tensors: what each takes, what it is for, and what is left alone."""

import sys
import warnings
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from ipygpumem.heap.bulk import CHUNK
from ipygpumem.heap.holders.search import explain
from ipygpumem.heap.kinds.arrays import storage_key
from ipygpumem.heap.kinds.tensors import Reader, Storages
from ipygpumem.heap.kinds.watching import watch
from ipygpumem.heap.live.heap import Heap
from ipygpumem.heap.live.total import total
from ipygpumem.heap.paths.roots import Roots
from ipygpumem.heap.sizes import levels
from ipygpumem.heap.sizes.region import Region
from ipygpumem.heap.sizes.sizes import Sizes
from ipygpumem.inventory.arrays import survey
from ipygpumem.inventory.arrays.records import TensorRecord
from ipygpumem.inventory.devices.findings import storages_of
from ipygpumem.inventory.names import top
from tests import hostile

pytestmark = pytest.mark.usefixtures("others_out_of_sight")


def take(**names: object) -> dict[str, TensorRecord]:
    """The inventory's records by name, for what stands under ``names``."""
    return {
        row.name: row
        for row in survey.take_inventory(names.items()).tensors
        if row.name is not None
    }


def size_by_name(**names: object) -> dict[str, int]:
    return {name: row.size_bytes for name, row in take(**names).items()}


def test_views_and_aliases_count_once_with_the_storages_bytes() -> None:
    big = torch.zeros(1000)
    rows = take(first=big[:10], detached=big.detach(), big=big, transposed=big.view(10, 100).T)
    assert list(rows) == ["detached"]
    assert (rows["detached"].size_bytes, rows["detached"].aliases) == (4000, 3)
    view = torch.zeros(1000)[:10]
    assert size_by_name(view=view) == {"view": 4000}


def bytes_of(*parts: Any) -> int:
    """Bytes of the storages of plain tensors, each storage once."""
    return sum(
        {part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in parts}.values()
    )


def test_sparse_tensors_count_their_indices_and_values() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eye = torch.eye(100)
        coo = eye.to_sparse()
        csr = eye.to_sparse_csr()
        csc = eye.to_sparse_csc()
        bsr = eye.to_sparse_bsr((10, 10))
        bytes_by_name = size_by_name(values=coo._values(), coo=coo, csr=csr, csc=csc, bsr=bsr)
    assert bytes_by_name == {
        "coo": 2 * 100 * 8 + 100 * 4,
        "csr": bytes_of(csr.crow_indices(), csr.col_indices(), csr.values()),
        "csc": bytes_of(csc.ccol_indices(), csc.row_indices(), csc.values()),
        "bsr": bytes_of(bsr.crow_indices(), bsr.col_indices(), bsr.values()),
    }
    assert bytes_by_name["csr"] >= 101 * 8 + 100 * 8 + 100 * 4


def test_nested_tensors_count_the_tensors_inside_them() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = [torch.ones(300), torch.ones(500)]
        strided = torch.nested.nested_tensor(parts)
        jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
        rows = take(strided=strided, jagged=jagged)
    assert rows["strided"].size_bytes == 3200
    assert rows["jagged"].size_bytes >= 3200 + 3 * 8
    # torch may remember the longest and the shortest too
    assert rows["jagged"].size_bytes <= 3200 + 3 * 8 + 64
    assert rows["strided"].shape is None
    assert set(rows) == {"strided", "jagged"}


def test_tensors_without_memory_have_no_bytes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    freed = torch.ones(100)
    freed.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.empty(1 << 30)
    rows = take(
        meta=torch.empty(1 << 30, device="meta"),
        fake=fake,
        freed=freed,
        lazy=nn.LazyLinear(3).weight,
    )
    assert {name: row.size_bytes for name, row in rows.items()} == {
        "meta": 0,
        "fake": 0,
        "freed": 0,
        "lazy": 0,
    }
    assert rows["meta"].device == "meta"
    assert rows["lazy"].kind == "parameter"
    nowhere = [torch.ones(3, device="meta"), fake, torch.eye(3).to_sparse(), torch.empty(0)]
    assert list(storages_of((item, "other") for item in nowhere)) == []


@pytest.mark.skipif(
    not hasattr(torch._C, "_is_cow_tensor"),
    reason="this torch has no lazy clones that one could tell",
)
def test_a_lazy_clone_stays_lazy() -> None:
    tensor = torch.ones(1000)
    both = [tensor, torch._lazy_clone(tensor)]
    assert len(list(storages_of((item, "other") for item in both))) == 1
    assert all(torch._C._is_cow_tensor(item) for item in both)


def test_shared_memory_is_marked() -> None:
    rows = take(shared=torch.ones(10).share_memory_(), own=torch.ones(10))
    assert {name: row.shared for name, row in rows.items()} == {"shared": True, "own": False}


def test_memory_shared_with_numpy_counts_once() -> None:
    array = numpy.ones(1000)
    tensor = torch.ones(1000)
    # What tensor.numpy() gives shows a second tensor, which torch made for it: two more share that
    # storage.
    rows = take(
        array=array,
        from_array=torch.from_numpy(array[10:]),
        tensor=tensor,
        from_tensor=tensor.numpy(),
    )
    assert {name: row.aliases for name, row in rows.items()} == {"from_array": 1, "tensor": 2}
    assert rows["from_array"].size_bytes == 990 * 8  # what torch was given


def test_a_frozen_tensor_may_have_a_gradient() -> None:
    tensor = torch.ones(1000, requires_grad=True)
    tensor.sum().backward()
    tensor.requires_grad_(False)
    rows = take(tensor=tensor)
    assert rows["tensor.grad"].kind == "gradient"


def rows_in_training() -> dict[str, TensorRecord]:
    """Return the tensors of a model after a step of its optimizer, and of a cache, by path."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    hidden = model(torch.ones(5, 3))
    return take(model=model, optimizer=optimizer, hidden=hidden, cache={"run3": [torch.ones(2)]})


def test_kinds_and_paths_of_a_model_in_training() -> None:
    rows = rows_in_training()
    for path, kind in (
        ("model[0].weight", "parameter"),
        ("model[0].weight.grad", "gradient"),
        ("model[1].running_mean", "buffer"),
        ('optimizer.state[model[0].weight]["exp_avg"]', "optimizer state"),
        ('cache["run3"][0]', "other"),
    ):
        assert rows[path].kind == kind


def test_a_tensors_type_shape_and_device_are_recorded() -> None:
    weight = rows_in_training()["model[0].weight"]
    assert weight.type_name == "Parameter"
    assert weight.shape == (4, 3)
    assert weight.dtype == "float32"
    assert weight.device == "cpu"


def test_a_tensors_place_in_a_graph_is_recorded() -> None:
    rows = rows_in_training()
    weight, hidden = rows["model[0].weight"], rows["hidden"]
    assert (weight.requires_grad, weight.in_graph) == (True, False)
    assert (hidden.requires_grad, hidden.in_graph) == (True, True)
    assert rows["model[1].running_mean"].requires_grad is False


def test_thousands_of_tensors_keep_their_names_and_kinds() -> None:
    """They are looked at some thousands at a time."""

    # A list of several thousands, with a few tensors of other kinds in it.
    several = [torch.zeros(3) for _ in range(2 * CHUNK + 500)]
    several[1999].extra = torch.ones(5)  # type: ignore[attr-defined]  # an attribute of the user's
    several[1000] = several[2 * CHUNK + 400] = torch.zeros(
        2, 3, dtype=torch.int8, requires_grad=False
    )
    several[CHUNK + 450] = torch.nn.Parameter(torch.ones(4))
    keyed = {number: torch.zeros(1) for number in range(1500)}

    # All of them have their names.
    rows = take(several=several, keyed=keyed, again={"last": several[-1]})
    assert rows[f"several[{2 * CHUNK + 499}]"].shape == (3,)
    assert (rows["several[1000]"].shape, rows["several[1000]"].dtype) == ((2, 3), "int8")
    assert f"several[{2 * CHUNK + 400}]" not in rows  # the same tensor
    parameter = rows[f"several[{CHUNK + 450}]"]
    assert (parameter.kind, parameter.requires_grad) == ("parameter", True)
    assert rows["several[1999].extra"].shape == (5,)
    assert rows["keyed[1499]"].size_bytes == 4
    # The list without the tensor that it has twice, the attribute, and the dict.
    assert len(rows) == 2 * CHUNK + 499 + 1 + 1500


def test_a_tensor_subclass_is_listed_without_running_its_code() -> None:
    x = hostile.tensors()["function"]
    with hostile.untouched():
        row = take(x=x)["x"]
    assert row.type_name == "Function"
    assert row.shape == (1 << 20,)
    assert row.size_bytes == 4 << 20


@pytest.mark.parametrize("policy", ["None", "strides", "sizes"])
def test_a_wrapper_counts_its_content_without_running_its_code(policy: str) -> None:
    x = hostile.tensors()[policy]
    x.scales = [torch.ones(10)]
    with hostile.untouched():
        rows = take(x=x)
        vars(x).clear()
        alone = take(x=x)["x"]
    assert list(rows) == ["x"]
    assert rows["x"].type_name == "Dispatch"
    assert rows["x"].size_bytes == (4 << 20) + 40
    assert rows["x"].device == "cpu"
    assert (alone.type_name, alone.size_bytes) == ("Dispatch", 0)


def test_a_broken_device_is_reported_and_the_rest_is_readable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = torch.ones(100)
    well = torch.ones(200)
    real = torch.Tensor.untyped_storage
    address = broken.data_ptr()

    def storage(tensor: Any) -> Any:
        if tensor.data_ptr() == address:
            raise RuntimeError(
                "CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA"
            )
        return real(tensor)

    monkeypatch.setattr(torch.Tensor, "untyped_storage", storage)
    inventory = survey.take_inventory({"broken": broken, "well": well}.items())
    rows = {row.name: row for row in inventory.tensors}

    # The tensor that works, and the one that does not.
    assert rows["well"].size_bytes == 800
    assert (rows["broken"].size_bytes, rows["broken"].shape) == (0, (100,))
    assert rows["broken"].note == "could not be read: CUDA error: device-side assert triggered"
    assert any(
        "could not be read: CUDA error: device-side assert triggered" in note
        for note in inventory.notes
    )


class FunctionMode(torch.overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]  # torch may be missing
    """Counts what the user's own mode sees of torch's functions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self, function: Any, _: Any, words: Any = (), options: Any = None
    ) -> Any:
        self.seen.append(str(function))
        return function(*words, **(options or {}))


class DispatchMode(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc, name-defined]  # as above
    """Counts what the user's own mode sees of torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, operation: Any, _: Any, words: Any = (), options: Any = None
    ) -> Any:
        self.seen.append(str(operation))
        return operation(*words, **(options or {}))


@pytest.mark.parametrize("kind", [FunctionMode, DispatchMode])
@pytest.mark.filterwarnings("ignore")  # torch's, of layouts in beta
def test_a_mode_of_the_users_sees_nothing_of_an_inventory(kind: Any) -> None:
    model = nn.Linear(10, 10)
    loss = model(torch.ones(1, 10)).sum()
    loss.backward(retain_graph=True)
    kept = [torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr(), model.weight.view(-1)[5:], loss]
    keys = [key for item in (model.weight.grad, *kept) if (key := storage_key(item)) is not None]

    # None of these steps reaches the user's mode.
    with kind() as mode:
        torch.ones(1)
        own = len(mode.seen)
        inventory = survey.take_inventory([("kept", kept), ("model", model)])
        watched = [watch(item) for item in kept]
        heap = Heap()
        explain(keys, heap, Roots())
        places = list(storages_of([(item, "other") for item in kept]))
        assert len(mode.seen) == own > 0, mode.seen[own:]

    # It sees the same as without the mode.
    again = survey.take_inventory([("kept", kept), ("model", model)])
    assert [row for row in inventory.tensors if row.name] == [
        row for row in again.tensors if row.name
    ]
    assert len(places) == 2  # a sparse tensor has no storage
    assert all(is_alive() for is_alive in watched)
    del heap


def test_parameters_are_the_models_and_not_the_optimizers() -> None:
    mib = 1 << 20
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    names = {"a_optimizer": optimizer, "model": model, "cache": [model.weight, torch.ones(1 << 20)]}
    rows = {row.name: row for row in top.measure_names(names, {}).names}
    assert 2 * mib <= rows["model"].size_bytes < 2.2 * mib  # with its gradients
    assert mib <= rows["a_optimizer"].size_bytes < 1.1 * mib
    assert set(rows["model"].held_by) == {"cache", "a_optimizer"}


def test_a_tensor_of_another_class_is_measured_without_its_code() -> None:
    thing = hostile.tensors(device=False)
    with hostile.untouched():
        rows = {row.name: row for row in top.measure_names(thing, {}).names}
    assert {name: row.size_bytes >> 22 for name, row in rows.items()} == dict.fromkeys(thing, 1)


def test_all_objects_include_objects_of_torchs_own_code() -> None:
    before = total().objects_bytes
    count = 5000
    kept = [torch.zeros(1) for _ in range(count)]
    assert total().objects_bytes - before > 400 * len(kept)  # Python's have 80 bytes


def test_a_sparse_tensor_left_out_takes_its_components_with_it() -> None:
    sparse = torch.ones(1000, 200).to_sparse()
    sizes = Sizes()
    sizes.exclude_data([sparse])
    assert sizes.measure([sparse]).size_bytes < 1 << 20


def test_weak_references_end_without_python_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops the exception of a signal, such as Ctrl-C, that arrives in a finalizer."""
    tensors = [torch.ones(2), torch.ones(3)]
    freed = list[int]()
    monkeypatch.setattr(torch.UntypedStorage, "_free_weak_ref", freed.append)
    storages = Storages()
    storages.add_of(Reader(torch), tensors)
    calls = list[str]()
    sys.setprofile(lambda frame, event, _: calls.append(f"{event} {frame.f_code.co_name}"))
    del storages
    sys.setprofile(None)
    assert not [call for call in calls if call.startswith("call")]
    assert set(freed) == {tensor.untyped_storage()._cdata for tensor in tensors}


def test_closed_weak_references_are_freed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    freed = list[int]()
    monkeypatch.setattr(torch.UntypedStorage, "_free_weak_ref", freed.append)
    storages = Storages()
    storages.add_of(Reader(torch), [torch.ones(2)])
    storages.close()
    del storages
    assert len(freed) == 1


def facts_of_graph(tensors: list[torch.Tensor]) -> dict[str, object]:
    """Return the bytes and edges of a graph into which tensors are read; nodes of autograd have
    another identity in each.
    """
    region = Region(tensors, keeps_arrays=True)
    graph = region.graph
    edges = dict[object, object]()
    for key in set(map(id, tensors)) & graph.edges.keys():
        ends = graph.edges[key]
        edges[key] = {end for end in ends if type(end) is int or end[0] != "graph"}, len(ends)
    return {
        "bytes": graph.cpu_bytes,
        "devices": graph.device_bytes,
        "edges": edges,
        "storages": graph.pieces.keys(),
        "of NumPy": graph.of_other_libraries,
        "arrays": {key: list(map(id, arrays)) for key, arrays in graph.arrays.items()},
        "inside": graph.inside,
        "inside torch": graph.inside_torch,
        "notes": graph.notes,
    }


def test_tensors_read_together_have_the_facts_of_each_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = torch.ones(5, requires_grad=True)
    (trained * 2).sum().backward()
    frozen = torch.ones(6, requires_grad=True)
    frozen.sum().backward()
    frozen.requires_grad_(False)
    whole = torch.ones(8)
    tensors = [
        *(torch.ones(number) for number in range(4)),
        *(whole, whole[2:], whole.detach(), whole.view(2, 4)[0]),
        *(trained, trained * 3, frozen),
        *(nn.Parameter(torch.ones(9)), nn.Parameter(torch.ones(9), requires_grad=False)),
        *(torch.from_numpy(numpy.ones(10)), torch.ones(11, device="meta")),
        *(torch.ones(3, 3).to_sparse(), torch.ones(12).bfloat16()),
    ]
    facts_of_graph(tensors)  # makes torch's Python objects of nodes
    together = facts_of_graph(tensors)
    monkeypatch.setattr(levels, "plain_tensors", lambda tensors: set())  # all one by one
    assert together == facts_of_graph(tensors)
