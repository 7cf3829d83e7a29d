"""An estimate of code without tensors is refused before torch is imported."""

import textwrap
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.errors import EstimateError
from ipygpumem.estimating.effects import refuse_without_tensors
from tests.steps import needs, run_failing, run_quietly


def is_refused(source: str, **names: Any) -> bool:
    """Return True if code is refused in a namespace with NumPy, a small array, and ``names``."""
    import numpy

    namespace = {"np": numpy, "data": numpy.ones(3), **names}
    try:
        refuse_without_tensors(compile(source, "<cell>", "exec"), (namespace,))
    except EstimateError:
        return True
    return False


@pytest.mark.parametrize(
    "source",
    [
        "x = np.ones(3)",
        "import numpy\nx = numpy.ones(3)",
        "x = data.sum()",
        "import math\nx = math.sqrt(data[0])",
        "for n in range(3): x = data * n",
    ],
)
def test_code_with_arrays_alone_is_refused(source: str) -> None:
    assert is_refused(source)


@pytest.mark.parametrize(
    "source",
    [
        "x = 3",
        "import a_library_that_is_not_loaded\nx = a_library_that_is_not_loaded.run(np.ones(3))",
        "from a_library.parts import run\nrun(np.ones(3))",
        "x = model.encode(np.ones(3))",
        "x = model(np.ones(3))",
        textwrap.dedent(
            """\
            def run():
                import a_library
                return a_library.run(data)
            run()"""
        ),
    ],
)
def test_code_that_may_make_tensors_is_not_refused(source: str) -> None:
    assert not is_refused(source, model=SimpleNamespace(encode=None))


def test_estimate_refuses_code_without_tensors_before_torch() -> None:
    needs("torch")
    with Kernel() as kernel:
        run_quietly(kernel, "%load_ext ipygpumem")
        run_quietly(kernel, "import numpy, sys")
        reply = run_failing(
            kernel,
            """
            %%estimate
            numpy.ones(2**20)
            """,
            None,
        )
        assert "%%peak measures them" in reply.stderr
        assert kernel.value("'torch' in sys.modules") is False
