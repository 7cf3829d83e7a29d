"""Small views of large storages are told from tensors, with the call that copies them."""

import torch

from ipygpumem.heap.knowledge.views import small_view


def test_a_small_view_of_a_tensor_is_named_with_its_storage() -> None:
    big = torch.ones(1_000_000, 4)
    notes = {
        "10 × 4 of a storage of 15.3 MiB: .clone()": big[:10],
        "4 values of a storage of 15.3 MiB: .clone()": big[7],
        "1 value of a storage of 15.3 MiB: .clone()": big[0, 0],
        "2 × 3 of a storage of 15.3 MiB: .clone()": torch.nn.Parameter(big)[:2, :3],
    }
    assert {note: small_view(view) for note, view in notes.items()} == {
        note: note for note in notes
    }


def test_tensors_and_large_views_need_no_note() -> None:
    big = torch.ones(1_000_000, 4)
    whole = [
        big,
        big[:500_000],
        big.T,
        big[:10].clone(),
        torch.ones(1000)[:1],
        big.expand(3, *big.shape),
    ]
    whole += [
        big.to_sparse(),
        torch.ones(1_000_000, 4, device="meta")[:10],
        torch.nn.Linear(2, 2).weight,
    ]
    assert {small_view(tensor) for tensor in whole} == {""}


def test_an_array_on_a_tensors_memory_is_a_view_of_it() -> None:
    array = torch.ones(1_000_000, 4).numpy()[:10]
    assert small_view(array) == "10 × 4 of an array of 15.3 MiB: .copy()"
