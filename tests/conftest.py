import os

# The matrices in tests are small: threads would wait for each other longer than
# they work, most of all where the machine has other things to do.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
