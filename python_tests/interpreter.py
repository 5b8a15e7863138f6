"""Whether this process runs Triton's interpreter, which computes the kernels on the CPU.

The interpreter is selected before triton is imported. ``test_interpreter.py`` therefore runs the ``TestInterpreter``
classes of other files in a process of their own; ordinary runs don't collect these classes.
"""

from __future__ import annotations

import os

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
