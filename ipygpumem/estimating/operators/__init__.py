"""The memory that each operation allocates on a card.

For ``y = torch.sort(x).values`` on ``cuda:0``, the fake tensors tell the results, and the rules
here add the blocks that the card's kernels take while they sort.

- ``card.py``, ``card_operations.py``: a card and an operation on it; all that it allocates;
- ``kernels/``, ``transients.py``, ``cublas.py``, ``convolutions.py``: the blocks inside kernels and
  their order; the blocks that are freed before an operator returns; workspaces;
- ``column_sums.py``: partial sums of reductions;
- ``card_functions.py``, ``torch_functions.py``: functions that run as a card would run them;
  functions that need more of a tensor than a fake one has;
- ``autocast.py``, ``fused.py``, ``layouts.py``, ``in_place.py``: differences between a card and the
  CPU: the types of autocast, fused functions, strides, and sums of gradients in place;
- ``guesses.py``, ``largest.py``, ``assumptions.py``: values that fake tensors do not have: a guess,
  the largest possible result, or the share that the user assumes;
- ``missing_operators.py``, ``sparse.py``, ``packed.py``, ``cumulative_products.py``: results that
  torch cannot infer for fake tensors;
- ``result_cache.py``: results of repeated operations.
"""
