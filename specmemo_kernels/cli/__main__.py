"""``python -m specmemo_kernels.cli``, where the ``specmemo`` script isn't on the path."""

from specmemo_kernels.cli import main

main()
