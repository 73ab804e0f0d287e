"""From a plan's symbolic arguments to what a kernel is called with: shared by all executors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from portkern.plan import Argument, Desc, In, Launch, Out, Scratch, Value

# Makes (pointer of a buffer, offset in elements) into what this executor passes for it.
PointerMaker = Callable[[Any, int], Any]


def bind(
    launch: Launch,
    args: Sequence[Any],
    outputs: Sequence[Any],
    scratch: Sequence[Any],
    pointer: PointerMaker,
) -> list[Any]:
    """The positional arguments of ``launch``, with pointers made by ``pointer(buffer, offset)``."""
    call = _Call(args, outputs, scratch, pointer)
    return [call.resolve(argument) for argument in launch.args]


class _Call(NamedTuple):
    """What the arguments of a launch stand for. A function within ``bind`` that called itself would keep all tensors of
    the call until the next collection of cycles."""

    args: Sequence[Any]
    outputs: Sequence[Any]
    scratch: Sequence[Any]
    pointer: PointerMaker

    def find(self, argument: In | Out | Scratch) -> Any:
        if isinstance(argument, In):
            return self.pointer(self.args[argument.position], argument.offset)
        buffers = self.outputs if isinstance(argument, Out) else self.scratch
        return self.pointer(buffers[argument.position], argument.offset)

    def resolve(self, argument: Argument) -> Any:
        if isinstance(argument, tuple):
            return tuple(map(self.resolve, argument))
        if isinstance(argument, (In, Out, Scratch)):
            return self.find(argument)
        if isinstance(argument, Value):
            return self.args[argument.position]
        if isinstance(argument, Desc):
            return descriptor(argument, self.find(argument.buffer))
        return argument


def descriptor(argument: Desc, base: Any) -> Any:
    """Triton's host-made descriptor for ``argument`` over what starts at ``base``."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(base, list(argument.shape), list(argument.strides), list(argument.block))


def keywords(launch: Launch, options: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of ``launch`` for Triton: constexprs, warps, stages, target options."""
    result = {
        **launch.constexprs,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        **options,
        **launch.options,
    }
    if launch.coresident:
        result["launch_cooperative_grid"] = True
    return result


def named(launch: Launch, given: Sequence[Any]) -> dict[str, Any]:
    """The parameters of the kernel by name: ``given`` by position and, of those that are no constexprs, what the launch
    gives by keyword or leaves to its default."""
    rest = [each for each in launch.kernel.params[len(given) :] if not each.is_constexpr]
    return {
        **dict(zip(launch.kernel.arg_names, given, strict=False)),
        **{each.name: launch.constexprs.get(each.name, each.default) for each in rest},
    }
