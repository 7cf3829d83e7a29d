"""%reset in a scope; loading, reloading and unloading the extension at an odd moment."""

from __future__ import annotations

from tests.bad_input.steps import goes_on, names, works
from tests.kernel import Kernel


def test_outputs_after_a_reset_in_a_scope_are_gone_at_its_end(notebook: Kernel) -> None:
    for number in range(6):
        works(notebook, f"{number}")
    works(notebook, "import weakref\nclass Thing: pass\nrefs = []")
    works(notebook, "%experiment start a")
    works(notebook, "%reset -f")
    works(
        notebook,
        "import weakref, builtins\nclass Thing: pass\nthing = Thing()\nbuiltins.test_ref = weakref.ref(thing)\nthing",
    )
    works(notebook, "7 * 7")
    works(notebook, "%experiment end")
    assert notebook.value("__import__('builtins').test_ref() is None") is True
    assert notebook.value("Out") == {}
    goes_on(notebook)


def test_unloading_inside_a_cell_scope_leaves_the_names_and_loading_again_works(notebook: Kernel) -> None:
    reply = works(notebook, "%%experiment a\nx = 1\n%unload_ext ipygpumem\ny = 2")
    assert "'a'" in reply.stderr
    assert names(notebook) == ["x", "y"]
    assert notebook.run("1").reports() == []
    assert notebook.run("%experiment status").status == "error"
    works(notebook, "%load_ext ipygpumem")
    goes_on(notebook)


def test_unloading_works_after_the_user_cleared_ipythons_callbacks_and_lists() -> None:
    with Kernel() as kernel:
        works(kernel, "%load_ext ipygpumem")
        works(
            kernel,
            "ip = get_ipython()\nip.events.callbacks['post_run_cell'].clear()\n"
            "ip.events.callbacks['pre_run_cell'].clear()\n"
            "ip.ast_transformers.clear(); ip.input_transformers_cleanup.clear()\n"
            "ip.magics_manager.magics['line'].pop('experiment')",
        )
        reply = works(kernel, "%unload_ext ipygpumem")
        lines = reply.stderr.splitlines()
        assert [line for line in lines if not line.startswith("ipygpumem: unloading: ")] == []
        works(kernel, "%load_ext ipygpumem")
        works(kernel, "2")
        works(kernel, "%experiment start a\n%experiment end")
