#!/usr/bin/env bash
# On a machine with a CUDA device: exactness and speed of attention in packed documents and of the loss, then the tests
# of the kernel. Under five minutes. Without a CUDA device it says so and ends well.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
"$python" benchmarks/gpu_attention.py "$@"
"$python" -m pytest -q -m gpu tests/test_attention.py
