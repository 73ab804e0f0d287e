"""Every exception that portkern raises on purpose.

    PortkernError
    ├── BadArgument (ValueError)          an argument has a value that the op does not take
    │   ├── BadDim (IndexError)           a dim out of range
    │   ├── BadType (TypeError)           an argument of the wrong Python type
    │   └── Mismatch (RuntimeError)       operands whose shapes or dtypes do not go together
    ├── UnsupportedDtype (NotImplementedError, TypeError)
    ├── DeviceMismatch (RuntimeError)     operands on more than one device
    ├── BadSharding (RuntimeError)        distributed operands that no rank can compute its part of alone
    ├── NotDifferentiable (RuntimeError)  no derivative is defined for this op
    ├── UnknownName (LookupError)         an op, architecture, device or variant nobody registered
    ├── InvalidRecord (ValueError)        a stored or imported row that does not validate
    ├── DatabaseError (RuntimeError)      the tuning database cannot be used as asked
    │   └── NewerSchema                   written by a newer portkern
    ├── BadLock (RuntimeError)            a lock file that cannot be read or written, or a process without one
    ├── PluginError (RuntimeError)        a plugin that does not keep the hook contract
    ├── Infeasible (RuntimeError)         the device cannot hold a config or variant
    ├── CompileFailed (RuntimeError)      the compiler gave no binary
    ├── NotOffered (LookupError)          a peer of bench has nothing that computes this call
    ├── WorkerFailed (RuntimeError)       a tuner's child process cannot do its work
    ├── EmulationError (RuntimeError)     machine code that an emulator cannot carry on with
    │   ├── UnmodelledInstruction         an instruction that the emulator does not know
    │   ├── MemoryFault                   an access outside the launch's buffers, or a read of what nobody wrote
    │   ├── RaceDetected                  two warps touch the same shared memory without a barrier between them
    │   └── NoProgress                    programs that wait for ever, or run past the instruction budget
    └── MissingTriton (ImportError)       Triton is absent or of an untested version

Each is also a subclass of what torch or Python would raise, so callers who catch those keep
working. A message names the value, the limit and the remedy.
"""

from __future__ import annotations


class PortkernError(Exception):
    """Base of every error that portkern raises on purpose."""


class BadArgument(PortkernError, ValueError):
    """An argument has a value that the op does not take."""


class BadDim(BadArgument, IndexError):
    """A dim is out of range for the rank of its tensor."""


class BadType(BadArgument, TypeError):
    """An argument has the wrong Python type."""


class Mismatch(BadArgument, RuntimeError):
    """Operands whose shapes or dtypes do not go together."""


class UnsupportedDtype(PortkernError, NotImplementedError, TypeError):
    """The op does not take this dtype."""


class DeviceMismatch(PortkernError, RuntimeError):
    """Operands lie on more than one device."""


class BadSharding(PortkernError, RuntimeError):
    """Distributed operands of which no rank can compute its part alone."""


class NotDifferentiable(PortkernError, RuntimeError):
    """No derivative is defined for this op."""


class UnknownName(PortkernError, LookupError):
    """No op, architecture, device or variant is registered under this name."""


class InvalidRecord(PortkernError, ValueError):
    """A row that was stored or imported does not validate."""


class DatabaseError(PortkernError, RuntimeError):
    """The tuning database cannot be used as asked."""


class NewerSchema(DatabaseError):
    """The file was written by a newer portkern."""


class BadLock(PortkernError, RuntimeError):
    """A lock file cannot be read or written, or this process is not frozen by one."""


class PluginError(PortkernError, RuntimeError):
    """A plugin does not keep the hook contract."""


class Infeasible(PortkernError, RuntimeError):
    """The device cannot hold this config or variant."""


class CompileFailed(PortkernError, RuntimeError):
    """The compiler gave no binary for this kernel, config and target."""


class NotOffered(PortkernError, LookupError):
    """What ``bench`` compares with has nothing that computes this call."""


class WorkerFailed(PortkernError, RuntimeError):
    """A child process of the tuner cannot do its work, whatever the candidate."""


class EmulationError(PortkernError, RuntimeError):
    """Machine code that an emulator cannot carry on with. Names kernel, instruction and line."""


class UnmodelledInstruction(EmulationError):
    """The emulator does not know this instruction, or this form of it."""


class MemoryFault(EmulationError):
    """An access outside the buffers of the launch, or a read of memory that nobody wrote."""


class RaceDetected(EmulationError):
    """Two warps touch the same shared memory, one of them writing, with no barrier between them."""


class NoProgress(EmulationError):
    """Programs wait for one another for ever, or run past the instruction budget."""


class MissingTriton(PortkernError, ImportError):
    """Triton is not installed, or lacks what portkern needs."""
