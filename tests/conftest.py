import os
import sys
from pathlib import Path

# The matrices in tests are small: threads would wait for each other longer than
# they work, most of all where the machine has other things to do.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Helpers beside the tests are imported by name.
sys.path.insert(0, str(Path(__file__).parent))
