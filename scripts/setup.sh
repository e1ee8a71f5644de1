#!/usr/bin/env bash
# Installs what muGPT builds and tests with, on Debian and Ubuntu. Running it again changes nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

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

# dev/bench/sass_check reads machine code by nvdisasm, which a toolkit may lack. It goes to build/, by pip.
nvcc=$(command -v nvcc || true)
need_nvdisasm=0
if [ -n "$nvcc" ] && ! command -v nvdisasm >/dev/null && [ ! -x "$(dirname "$nvcc")/nvdisasm" ] &&
    ! compgen -G "build/nvdisasm/nvidia/*/bin/nvdisasm" >/dev/null; then
    need_nvdisasm=1
    packages+=(python3-pip)
fi
install_nvdisasm() {
    [ $need_nvdisasm -eq 1 ] || return 0
    echo "setup: fetching nvdisasm"
    python3 -m pip install --quiet --no-deps --target build/nvdisasm nvidia-cuda-nvdisasm 2>/dev/null ||
        echo "setup: no nvdisasm: dev/bench/sass_check will be skipped" >&2
}

missing=()
for package in "${packages[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
    install_nvdisasm
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
install_nvdisasm
echo "setup: done"
