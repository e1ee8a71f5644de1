#!/usr/bin/env bash
# Installs what muGPT builds and tests with, on Debian and Ubuntu. Running it again changes nothing.
set -euo pipefail

packages=(
    g++ make git               # the compiler
    libcli11-dev               # command line
    nlohmann-json3-dev         # logs, checkpoints, tokenizer.json
    libxxhash-dev              # checkpoint checksums
    libgtest-dev               # tests
    libboost-context-dev       # tests: fibers of the CUDA simulator
    openmpi-bin                # tests: ranks started by mpirun; nothing is linked with MPI
    locales                    # a test in a locale with a decimal comma
    libopenblas-openmp-dev     # the yardstick of `make bench`
)

missing=()
for package in "${packages[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
    echo "setup: everything is installed"
    exit 0
fi

if ! command -v apt-get >/dev/null; then
    echo "setup: no apt-get here; install by hand: a C++20 compiler with OpenMP, make, CLI11, nlohmann-json," \
        "xxhash, GoogleTest, Boost.Context, OpenBLAS (conda-forge: cxx-compiler make cli11 nlohmann_json xxhash gtest" \
        "boost-cpp openblas)" >&2
    exit 1
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || { echo "setup: not root and no sudo; install by hand: ${missing[*]}" >&2; exit 1; }
    as_root=(sudo)
fi
echo "setup: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
echo "setup: done"
