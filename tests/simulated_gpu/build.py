"""Makes an environment in which torch's CUDA build runs on simulated cards: ``python build.py
FOLDER``.

FOLDER/python runs Python there. torch comes without the NVIDIA packages that it names: of these
only the runtime's header files are fetched. What torch takes from NVIDIA's libraries is read off
its own with objdump; what runtime.c, driver.c and nvml.c do not write becomes a function that
answers "done". README.md says what is real there.

Environment: SIM_TORCH, another version of torch; PIP_* as pip reads it.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TORCH = os.environ.get("SIM_TORCH", "2.11.0")
HEADERS = {"13": "nvidia-cuda-runtime==13.0.96"}
"""Package with the runtime's header files, by CUDA's major version."""
NEEDS = [
    "filelock",
    "typing_extensions",
    "sympy",
    "networkx",
    "jinja2",
    "fsspec",
    "numpy",
    "setuptools",
]
"""Packages that torch imports."""
SUITE = ["-r", HERE.parent / "gpu" / "wheels.txt", "scikit-learn", "matplotlib", "pandas"]
"""Packages that the GPU suite and the quickstart import."""
USED = "torch torch._dynamo IPython ipykernel.kernelapp nbclient nbconvert pytest"
"""Modules to compile now, with all that they import, so that no test does it."""
PREFIXES = {
    "libcudart": r"(__)?cuda[A-Z]",
    "libcublasLt": r"cublasLt",
    "libcublas": r"cublas(?!Lt)",
    "libcudnn": r"cudnn",
    "libcusparseLt": r"cusparseLt",
    "libcusparse": r"cusparse(?!Lt)",
    "libcufft": r"cufft",
    "libcufile": r"cuFile",
    "libnccl": r"p?nccl",
    "libcurand": r"curand",
    "libnvshmem_host": r"nvshmem",
    "libcusolver": r"cusolver",
    "libnvrtc": r"nvrtc",
    "libcupti": r"cupti",
    "libcuda": r"cu[A-Z](?!ile)",
}
"""Patterns for the first letters of each library's functions."""
HANDLE = "static long made_; *(void **)a = symbols_ + made_++ % sizeof symbols_; return 0;"
"""Each handle is another: torch takes a workspace for each of cuBLAS's, and each of its threads has
one.
"""
ANSWERS = {
    **dict.fromkeys(
        ["cublasCreate_v2", "cublasLtCreate", "cudnnCreate", "cusparseCreate", "cusolverDnCreate"],
        HANDLE,
    ),
    # A library registers its kernels when it is loaded: no use of CUDA, which a fork would end.
    **dict.fromkeys(
        [
            "__cudaRegisterFatBinaryEnd",
            "__cudaRegisterFunction",
            "__cudaRegisterVar",
            "__cudaUnregisterFatBinary",
        ],
        "return 0;",
    ),
    "cudnnGetVersion": "return 91900;",
    "cudnnGetErrorString": 'return (long)"simulated";',
    "cublasGetStatusString": 'return (long)"simulated";',
}
"""Results of functions without a body of their own where "done" is not enough: a handle must not be
null.
"""


def main(folder: Path) -> None:
    """Make or renew the environment in ``folder``."""
    missing = [name for name in ("gcc", "objdump") if shutil.which(name) is None]
    if missing:
        raise SystemExit(
            f"simulated GPU: {' and '.join(missing)} not found: apt-get install gcc libc6-dev "
            f"binutils"
        )
    python = _environment(folder)
    site = Path(
        _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    shutil.copy(HERE / "without_cudnn.py", site)
    (site / "without_cudnn.pth").write_text("import without_cudnn\n")
    libraries = folder / "lib"
    shutil.rmtree(libraries, ignore_errors=True)
    libraries.mkdir()
    with tempfile.TemporaryDirectory() as temporary:
        headers = _headers(python, site, Path(temporary))
        _build_libraries(sorted((site / "torch" / "lib").glob("*.so")), headers, libraries)
    path = f'"{libraries.absolute()}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"'
    machine = f'"${{SIM_TABLE:-{folder.absolute() / "machine"}}}"'
    launcher = folder / "python"
    # Each process that imports a module for the first time keeps its bytecode for all others.
    launcher.write_text(
        f"#!/bin/sh\nunset PYTHONDONTWRITEBYTECODE\nexport LD_LIBRARY_PATH={path} "
        f'SIM_TABLE={machine}\nexec "{python.absolute()}" "$@"\n'
    )
    launcher.chmod(0o755)
    look = (
        f"import {', '.join(USED.split())}; print(torch.__version__, "
        "torch.cuda.get_device_name(), *torch.cuda.mem_get_info())"
    )
    print(_run(launcher, "-c", look).strip())


def _environment(folder: Path) -> Path:
    """Return the Python of a virtual environment with torch's CUDA build and what the GPU tests
    need.
    """
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        _run(sys.executable, "-m", "venv", folder / "venv")
    _install(python, "--no-deps", f"torch=={TORCH}")
    _install(python, *NEEDS, *SUITE)
    return python


def _install(python: Path, *what: object) -> None:
    """Install packages without compiling them: pip would compile 12,000 modules, and few of them
    are ever imported.
    """
    options = ("--quiet", "--disable-pip-version-check", "--no-compile")
    _run(python, "-m", "pip", "install", *options, *what)


def _headers(python: Path, site: Path, folder: Path) -> Path:
    """Return the folder of the header files of the CUDA that torch is built for, fetched into
    ``folder``.
    """
    cuda = re.search(
        r"^cuda(?:: [^=]*)? = '(\d+)", (site / "torch" / "version.py").read_text(), re.MULTILINE
    )
    if cuda is None:
        raise SystemExit(
            f"simulated GPU: torch {TORCH} is built without CUDA here: the simulated card needs a "
            f"CUDA build"
        )
    if cuda[1] not in HEADERS:
        known = f"known is {', '.join(HEADERS)}: add its runtime to HEADERS in build.py"
        raise SystemExit(f"simulated GPU: torch {TORCH} is built for CUDA {cuda[1]}, {known}")
    _run(python, "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder, HEADERS[cuda[1]])
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    headers = next(folder.glob("nvidia/*/include"))
    # This one comes with the compiler nvcc; nothing in it matters to gcc.
    (headers / "crt").mkdir(exist_ok=True)
    names = (
        "CUDARTAPI CUDARTAPI_CDECL __host__ __device__ __forceinline__ __device_builtin__ "
        "__cudart_builtin__"
    )
    names += " __device_builtin_surface_type__ __device_builtin_texture_type__"
    (headers / "crt" / "host_defines.h").write_text(
        "".join(f"#define {name}\n" for name in names.split())
        + (
            "#define __align__(n) __attribute__((aligned(n)))\n#define __builtin_align__(n) "
            "__align__(n)\n"
        )
    )
    return headers


def _build_libraries(torchs: list[Path], headers: Path, to: Path) -> None:
    functions, needed = _wanted(torchs)
    for prefix, pattern in PREFIXES.items():
        soname = next((name for name in sorted(needed) if name.startswith(prefix + ".so")), None)
        ours = {name: version for name, version in functions.items() if re.match(pattern, name)}
        if soname is None and prefix == "libcuda":  # asked for by name when it is needed
            soname = "libcuda.so.1"
        if soname is not None:
            _build_library(soname, prefix, ours, headers, to)
    unknown = sorted(
        name for name in needed if re.match(r"lib(cu|nv|nccl)", name) and not (to / name).exists()
    )
    if unknown:
        raise SystemExit(
            f"simulated GPU: torch {TORCH} needs {', '.join(unknown)}, which PREFIXES in build.py "
            f"does not know"
        )
    _compile(to / "libnvidia-ml.so.1", [HERE / "nvml.c"], headers)


def _build_library(
    soname: str, prefix: str, functions: dict[str, str], headers: Path, to: Path
) -> None:
    """Build one library: what is written in C here, and an answer for every other function that
    torch takes.
    """
    sources = {"libcudart": ["runtime.c", "memory.c"], "libcuda": ["driver.c"]}.get(prefix, [])
    paths = [HERE / name for name in sources]
    written = {
        name
        for path in paths
        for name in re.findall(r"^API [^(]*?\**(\w+)\(", path.read_text(), re.MULTILINE)
    }
    # After a device-side assert nothing of the runtime is "done" any more.
    done = "return simulated_state();" if prefix == "libcudart" else "return 0;"
    stub = to / f"{prefix}.c"
    stub.write_text(
        "static char symbols_[4096];\nlong simulated_state(void);\n"
        + "".join(
            f'__attribute__((visibility("default"))) long {name}(void *a) {{ '
            f"{ANSWERS.get(name, done)} }}\n"
            for name in sorted(functions.keys() - written)
        )
    )
    options = []
    versions = sorted(set(functions.values()) - {""})
    if versions:
        script = to / f"{prefix}.map"
        script.write_text(
            "".join(
                f"{v} {{ {'global: *;' if i == 0 else ''} }};\n" for i, v in enumerate(versions)
            )
        )
        options = [f"-Wl,--version-script={script}"]
    if prefix == "libcuda":  # the cards, and what is broken, are known to the runtime
        options += [str(next(to.glob("libcudart.so.*"))), "-Wl,-rpath,$ORIGIN"]
    _compile(to / soname, [stub, *paths], headers, f"-Wl,-soname,{soname}", *options)


def _wanted(torchs: list[Path]) -> tuple[dict[str, str], set[str]]:
    """Return the functions that torch takes from elsewhere with their versions, and the libraries
    that it names.
    """
    functions, needed = {}, set()
    for library in torchs:
        for line in _run("objdump", "-T", library).splitlines():
            if "*UND*" in line:
                *_, version, name = line.split()
                functions[name] = version.strip("()") if version.startswith("(") else ""
        needed |= {
            line.split()[1]
            for line in _run("objdump", "-p", library).splitlines()
            if "NEEDED" in line
        }
    return functions, needed


def _compile(library: Path, sources: list[Path], headers: Path, *options: str) -> None:
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-O1",
        "-w",
        f"-I{HERE}",
        f"-I{headers}",
        "-o",
        library,
        *sources,
    ]
    _run(*command, *options, "-ldl", "-lpthread")


def _run(*command: object) -> str:
    """Run a command; return what it prints. One that fails ends the build with what it complains
    of.
    """
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"simulated GPU: {' '.join(map(str, command))}\n{done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
