"""The separation of estimated code from the user's objects and devices.

Code that runs in an estimate gets copies of the objects that it uses, and all that it changes is
undone: after ``%%estimate`` of ``model.train(); losses.append(loss)``, the mode and the list are as
before.

- ``fake_copies.py``, ``copied_names.py``: copies of objects, with a fake tensor for each tensor;
  namespaces that copy a value when it is looked up;
- ``patches.py``, ``accelerator_modules.py``: functions that would reach out of the estimate;
  ``torch.cuda`` and its like;
- ``rollback.py``, ``object_states.py``, ``settings.py``: saves what code can change without a copy,
  and restores it: objects, and settings of torch and the process;
- ``surviving_fakes.py``: fake tensors that are alive after the estimate.
"""
