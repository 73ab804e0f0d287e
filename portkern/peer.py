"""``Peer``: another implementation that ``bench`` compares with, how one is found, and how its results are judged.

Each is one file in ``portkern.peers``, which knows op names; nothing here does. A peer is imported when it is asked
for, never before.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from portkern.errors import BadArgument, NotOffered, PluginError
from portkern.op import Op, unpack

PEERS = "portkern.peers"
Call = Callable[[], Any]
Offer = Callable[..., Call]

CHUNK = 1 << 24  # elements that are compared at a time: differences are taken in a wider type
ROUNDINGS = 4  # of the output's dtype, by which a correct peer may differ, relative to the largest value
LEAST = 1e-3  # the same at least: products by tf32, sums in another order


@dataclass(frozen=True)
class Peer:
    """One implementation to compare with.

    name          what ``--against`` calls it
    module        what is imported; its presence says whether the peer is installed
    distribution  what pip installs
    prepare       ``(op, args) -> call``: does once whatever is not to be timed, and gives the call to time, which takes
                  nothing and gives the op's outputs in order: fewer where it has fewer, None for one that it lacks. The
                  call leaves the arguments as they were, unless that is what the op alters. Raises NotOffered.
    offered       names of the ops that it has something for; empty for one that takes any
    """

    name: str
    module: str
    distribution: str
    prepare: Callable[[Op, Sequence[Any]], Call]
    offered: frozenset[str] = frozenset()

    @property
    def installed(self) -> bool:
        """Whether its module can be found; it is not imported."""
        return importlib.util.find_spec(self.module) is not None

    @property
    def version(self) -> str:
        """Of the installed distribution; empty where its metadata is missing."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return ""


def library(name: str, module: str, distribution: str, offers: Mapping[str, Offer]) -> Peer:
    """A peer that offers some ops by name: each of ``offers`` takes the op's canonical arguments and gives the call.

    Preparing another op raises NotOffered."""

    def prepare(op: Op, args: Sequence[Any]) -> Call:
        offer = offers.get(op.name)
        if offer is None:
            raise NotOffered(f"offers no {op.name}")
        return offer(*args)

    return Peer(name, module, distribution, prepare, frozenset(offers))


def known_peers() -> dict[str, Peer]:
    """Every peer by name, installed or not. Raises PluginError for a file that defines none."""
    package = importlib.import_module(PEERS)
    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith("_"):
            continue
        peer = getattr(importlib.import_module(f"{PEERS}.{module.name}"), "PEER", None)
        if not isinstance(peer, Peer) or peer.name != module.name:
            raise PluginError(f"{PEERS}.{module.name} defines no PEER of that name")
        found[peer.name] = peer
    return found


def chosen(names: Iterable[str]) -> tuple[list[Peer], list[str]]:
    """Those of ``names`` that are installed, and a note for each that is not.

    Raises BadArgument for a name that nobody has, or where none of them is installed.
    """
    known, found, notes = known_peers(), [], []
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            advice = f"did you mean {close[0]}? " if close else ""
            raise BadArgument(f"no peer {name!r} to compare with; {advice}there are {', '.join(sorted(known))}")
        if known[name].installed:
            found.append(known[name])
        else:
            notes.append(f"{name} is not installed: pip install {known[name].distribution}")
    if notes and not found:
        raise BadArgument(f"nothing to compare with: {'; '.join(notes)}")
    return found, notes


def difference(found: Any, expected: Any, drawn: bool = False) -> str:
    """How the outputs of a peer differ from those of an op's reference, in words; empty where they do not.

    Floating values may differ by four roundings of their dtype, or a thousandth, of the largest value: this
    tells another function from this one, and no good implementation from a better one. Of what is ``drawn`` at random
    only shapes are compared.
    """
    given, wanted = _outputs(found), _outputs(expected)
    if len(given) > len(wanted):
        return f"gives {len(given)} outputs, expected {len(wanted)}"
    for place, (got, reference) in enumerate(zip(given, wanted, strict=False)):
        words = "" if got is None or reference is None else _difference(got, reference, drawn)
        if words:
            return words if len(wanted) == 1 else f"{words} in output {place}"
    return ""


def _outputs(value: Any) -> tuple[torch.Tensor | None, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else unpack(value)


def _difference(got: torch.Tensor, expected: torch.Tensor, drawn: bool) -> str:
    if got.shape != expected.shape:
        return f"differs by its shape {list(got.shape)}, expected {list(expected.shape)}"
    if drawn:
        return ""
    pairs = list(zip(_chunks(got), _chunks(expected), strict=True))
    if not expected.is_floating_point():
        wrong = sum(int((a != b).sum()) for a, b in pairs)
        return f"differs in {wrong} of {expected.numel()} values" if wrong else ""
    worst = largest = 0.0
    for a, b in pairs:
        a, b = a.double(), b.double()
        if not bool(((a.isfinite() & b.isfinite()) | (a == b) | (a.isnan() & b.isnan())).all()):
            return "differs by values that are not finite"
        finite = b.isfinite()
        if bool(finite.any()):
            worst = max(worst, float((a - b)[finite].abs().max()))
            largest = max(largest, float(b[finite].abs().max()))
    dtypes = [each.dtype for each in (got, expected) if each.is_floating_point()]
    allowed = max(LEAST, *(ROUNDINGS * torch.finfo(dtype).eps for dtype in dtypes)) * largest
    return "" if worst <= allowed else f"differs by {worst:.2g}, where the largest value is {largest:.2g}"


def _chunks(tensor: torch.Tensor) -> list[torch.Tensor]:
    return list(tensor.detach().reshape(-1).split(CHUNK))
