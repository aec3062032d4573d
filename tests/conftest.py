"""Settings for all tests."""

import os

# Test models are so small that a second thread only waits for the first; on a busy machine it makes tests ten times
# slower. Set before torch is imported, which the torch-free tests never do.
os.environ.setdefault("OMP_NUM_THREADS", "1")
