"""The command line: one file per command, loaded when it is named; helpers start with ``_``.

Nothing here imports torch or Triton before a command runs, so that ``--help`` answers at once.
"""
