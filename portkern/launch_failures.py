"""What kind of failure a first launch met: one that makes room for the next config, or one that the caller must see."""

from __future__ import annotations

from portkern.errors import CompileFailed, Infeasible


def does_not_build(error: Exception) -> bool:
    """Whether the compiler itself failed: a stored config may come from another version of it."""
    from triton.compiler.errors import CompilationError

    return isinstance(error, CompilationError) or "PassManager" in str(error)


def out_of_resources(error: Exception) -> bool:
    """Whether a launch failed since the device cannot hold it, rather than by a fault of ours."""
    from triton.runtime.errors import OutOfResources, PTXASError

    if isinstance(error, (OutOfResources, PTXASError, Infeasible, CompileFailed)):
        return True
    return isinstance(error, RuntimeError) and "cooperative launch" in str(error).lower()
