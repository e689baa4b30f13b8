"""`launch/gpu-check`, and the process of each of its parts. See docs/gpu.md."""

import sys

from benchmarks.gpu_check.check import main

sys.exit(main(sys.argv[1:]))
