#!/bin/sh
# Builds the extension module in place (src/toque/_native*.so) from the checkout, with the checkout's .venv.
# The lock keeps two builds from running at once; nice keeps the machine usable. Extra arguments go to cmake, e.g.
#   scripts/build_native.sh -DTOQUE_EMULATE_AVX512=ON
set -eu
cd "$(dirname "$0")/.."
python="$PWD/.venv/bin/python"
mkdir -p build
exec 9>build/native.lock
flock 9
PATH="$PWD/.venv/bin:$PATH"
export PATH
[ -f build/dev/build.ninja ] && [ $# -eq 0 ] ||
  nice cmake -S . -B build/dev -G Ninja -DPython_EXECUTABLE="$python" -DTOQUE_DEV_OUTPUT=ON "$@" >build/cmake.log ||
  { cat build/cmake.log; exit 1; }
exec nice cmake --build build/dev -j 2
