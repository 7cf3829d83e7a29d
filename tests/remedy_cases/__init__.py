"""Places in which code leaves data, for tests of the lines that free it."""

from tests.remedy_cases.arrays import ARRAYS
from tests.remedy_cases.case import Case
from tests.remedy_cases.containers import CONTAINERS
from tests.remedy_cases.displays import DISPLAYS
from tests.remedy_cases.models import MODELS
from tests.remedy_cases.objects import OBJECTS
from tests.remedy_cases.registries import REGISTRIES
from tests.remedy_cases.threads_and_tasks import THREADS_AND_TASKS

CASES: dict[str, Case] = {
    **CONTAINERS,
    **OBJECTS,
    **REGISTRIES,
    **THREADS_AND_TASKS,
    **ARRAYS,
    **DISPLAYS,
    **MODELS,
}
