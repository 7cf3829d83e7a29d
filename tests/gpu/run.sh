#!/usr/bin/env bash
# Runs the GPU suite and the quickstart notebook in a bare environment, and writes docs/measured/gpu-verification.md:
#
#     tests/gpu/run.sh [WHEELS]                 (default: .wheels in the repository's root)
#
# The machine needs Python 3.12 with torch (CUDA) and NumPy, for the quickstart scikit-learn, too; neither IPython nor
# a network. (`make gpu-sim` calls it on simulated cards.) All else comes from the folder WHEELS, which is filled
# beforehand on a machine with a network by
#
#     tests/gpu/fetch_wheels.sh [WHEELS]
#
# and installed into a temporary folder. Nothing is written outside the repository but that folder. It is stopped
# before 10 minutes are over: what is not done by then has no result, and the page says so.
#
# Environment: PYTHON (default python3); OUT_DIR, where to write the page and the logs instead of docs/measured/ (the results so
# far are there even if this script is killed); GIT_COMMIT, what the page should name where there is no git;
# SUITE_SECONDS and QUICKSTART_SECONDS, when to stop each; GPU_TESTS, what to run instead of all of tests/gpu;
# GPU_CASES=sample, to run a sample of the random cases.
# Exit code: 0 if all that could run has passed, 1 if something failed, 2 if it could not start.
set -euo pipefail

stop() {
    echo "run.sh: $*" >&2
    exit 2
}

started=$SECONDS
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
wheels=${1:-$root/.wheels}
out=${OUT_DIR:-}
[[ -z $out ]] || { mkdir -p "$out" && out=$(cd "$out" && pwd); }
[[ ! -d $wheels ]] || wheels=$(cd "$wheels" && pwd)
[[ $python != */* ]] || python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
work=$(mktemp -d)
logs=${out:-$work}
trap 'rm -rf "$work"' EXIT
cd "$root"

if compgen -G "$wheels/*.whl" >/dev/null; then
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
        --target "$work/site" "$wheels"/*.whl
else
    echo "run.sh: no wheels in $wheels (tests/gpu/fetch_wheels.sh fills it): using what is installed"
fi
export PYTHONPATH="$work/site:$root${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONDONTWRITEBYTECODE=1 JUPYTER_PLATFORM_DIRS=1 JUPYTER_PATH="$work/site/share/jupyter"
export IPYTHONDIR="$work/ipython" JUPYTER_CONFIG_DIR="$work/config" JUPYTER_DATA_DIR="$work/data"
export JUPYTER_RUNTIME_DIR="$work/runtime" MPLCONFIGDIR="$work/matplotlib" CUDA_CACHE_PATH="$work/cuda"
# Simulated cards of this run alone: tests compare all the memory that is in use on a card.
export SIM_TABLE="$work/machine"
export CUPY_CACHE_DIR="$work/cupy" TRITON_CACHE_DIR="$work/triton" TORCHINDUCTOR_CACHE_DIR="$work/inductor"
mkdir -p "$JUPYTER_RUNTIME_DIR"

missing=$("$python" - <<'PY'
from importlib.util import find_spec
names = "pytest psutil pynvml IPython ipykernel jupyter_client nbclient nbconvert"
print(*(name for name in names.split() if find_spec(name) is None))
PY
)
[[ -z $missing ]] || stop "missing here: $missing. Fill a folder with tests/gpu/fetch_wheels.sh and name it."

# The first import of torch is the slow one: it is over before any test has a time limit.
timeout 120 "$python" - <<'PY' || true
import importlib.util, time
if importlib.util.find_spec("torch") is not None:
    started = time.perf_counter()
    import torch
    print(f"run.sh: torch {torch.__version__} in {time.perf_counter() - started:.1f} s", flush=True)
    started = time.perf_counter()
    if torch.cuda.is_available():
        torch.ones(1, device="cuda").cpu()
        print(f"run.sh: {torch.cuda.get_device_name()}, a context in {time.perf_counter() - started:.1f} s")
PY

# Options and plugins of this configuration, or of the machine's, may not fit what is here: they are left out.
export GPU_RESULTS="$logs/results.jsonl" PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
rm -f "$GPU_RESULTS"
suite=0
# shellcheck disable=SC2086  # several paths
timeout -s INT -k 30 "${SUITE_SECONDS:-390}" "$python" -m pytest ${GPU_TESTS:-tests/gpu} -o addopts= \
    -W ignore::pytest.PytestConfigWarning -ra --durations=15 -p no:cacheprovider --basetemp "$work/pytest" \
    >"$logs/suite.log" 2>&1 || suite=$?
tail -n 60 "$logs/suite.log"

quickstart=0
if [[ ! -f examples/run_demo.py ]]; then
    quickstart="examples/run_demo.py is not there"
elif ! "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then
    quickstart="torch is not installed"
fi
if [[ $quickstart == 0 ]]; then
    echo "run.sh: the quickstart"
    # With one thread on the host, because other tests may run next to it.
    OMP_NUM_THREADS=1 timeout -k 5 "${QUICKSTART_SECONDS:-80}" "$python" examples/run_demo.py build/demo \
        >"$logs/quickstart.log" 2>&1 || quickstart=$?
    tail -n 40 "$logs/quickstart.log"
else
    echo "run.sh: the quickstart is left out: $quickstart"
fi

report=0
"$python" benchmarks/gpu_report.py "${out:-docs/measured}/gpu-verification.md" --outcomes "${out:-tests/gpu/outcomes}" --results "$GPU_RESULTS" --suite-exit "$suite" \
    --quickstart-exit "$quickstart" --quickstart-log "$logs/quickstart.log" --seconds $((SECONDS - started)) || report=$?
[[ -z $out || $quickstart != 0 ]] || cp build/demo/*.html "$out/"
echo "run.sh: $((SECONDS - started)) s in total"
exit "$report"
