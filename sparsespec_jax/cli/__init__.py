"""What `python -m sparsespec_jax.generate` is made of.

Importing this package sets what JAX reads from the environment when it is imported. Only the
command does so, never the library, and what the user has set wins.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's warnings are for its developers
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")  # weights and KV pool
