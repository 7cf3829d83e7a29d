#!/usr/bin/env bash
# Downloads the wheels of wheels.txt into a folder, from the package index that pip is set up for:
#
#     tests/gpu/fetch_wheels.sh [WHEELS]        (default: .wheels in the repository's root)
#
# for Python 3.12 on Linux x86-64, whatever this machine runs. PYTHON picks the interpreter whose pip downloads.
# pip matches a manylinux platform exactly, hence the list. The folder tells git to ignore it.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
wheels=${1:-$here/../../.wheels}
platforms=()
for glibc in 2_39 2_36 2_35 2_34 2_31 2_28 2_27 2_26 2_24 2_17 2_12 2_5; do
    platforms+=(--platform "manylinux_${glibc}_x86_64")
done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64)

mkdir -p "$wheels"
echo '*' >"$wheels/.gitignore"
rm -f "$wheels"/*.whl # two versions of one package would stop the installation
"${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --python-version 3.12 --implementation cp "${platforms[@]}" --dest "$wheels" --requirement "$here/wheels.txt"
echo "$(find "$wheels" -name '*.whl' | wc -l) wheels, $(du -sm "$wheels" | cut -f1) MiB, in $wheels"
