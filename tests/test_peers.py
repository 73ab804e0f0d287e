"""The adapters of ``bench``: present or absent, and what each asks its peer for, by stand-ins in ``tests/peers``."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from portkern import peer as peers
from portkern.errors import BadArgument, NotOffered, PluginError
from portkern.memory import Kept
from portkern.op import Case, Op, unpack
from portkern.peer import Peer, chosen, difference, known_peers, library
from portkern.registry import get

STAND_INS = Path(__file__).parent / "peers"
LIBRARIES = ("liger", "flag_gems", "quack")
# What each has no function for, of the options that bench measures by default.
LACKED = {("liger", "geglu", "packed"), ("liger", "geglu_backward", "packed"), ("liger", "rope", "interleaved")}


@pytest.fixture
def modules() -> Iterator[None]:
    """Forgets, afterwards, what was imported meanwhile."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("liger_kernel", "flag_gems", "quack"):
            del sys.modules[name]


@pytest.fixture
def stand_ins(modules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(STAND_INS)
    monkeypatch.setattr(peers, "LEAST", 1e-5)  # both compute by torch in float32: one gelu is told from the other


def usable(case: Case) -> bool:
    """Leaves out what is empty, rows of one element, whose gradient is nothing but rounding, and targets that are no
    class, which the others refuse."""
    return math.prod(case.sizes) > 1 and case.sizes[-1] != 1 and not case.options.get("stray")


def tried(peer: Peer, op: Op, case: Case) -> str:
    """Runs a case by the stand-in, twice, and compares it. Gives why not, where the peer does not offer it."""
    args = op.inputs(case.sizes, torch.float32, generator=torch.Generator().manual_seed(1), **case.options)
    kept = Kept(args)
    try:
        call = peer.prepare(op, args)
    except NotOffered as error:
        return str(error)
    found, expected = call(), unpack(op.reference(*args))
    words = difference(found, expected)
    assert words == "", f"{op.name} {case}: {peer.name} {words}"
    given = unpack(found)
    for place, output in enumerate(expected[: len(expected) - op.saved]):
        assert not output.numel() or given[place] is not None, f"{op.name} {case}: {peer.name} lacks output {place}"
    call()
    assert not kept.altered(), f"{op.name} {case}: {peer.name} writes over the arguments"
    return ""


OFFERED = [(name, op) for name in LIBRARIES for op in sorted(known_peers()[name].offered)]


@pytest.mark.parametrize(("name", "op"), OFFERED, ids=[f"{name}-{op}" for name, op in OFFERED])
def test_arguments_are_those_of_the_peer(stand_ins: None, name: str, op: str) -> None:
    peer, known = known_peers()[name], get(op)
    assert "" in [tried(peer, known, case) for case in known.cases if usable(case)], (
        "an adapter that offers nothing tests nothing"
    )


@pytest.mark.parametrize(("name", "op"), OFFERED, ids=[f"{name}-{op}" for name, op in OFFERED])
def test_what_bench_measures_is_offered(stand_ins: None, name: str, op: str) -> None:
    known = get(op)
    for case in known.tune_cases:
        small = Case(tuple(min(size, 32) for size in case.sizes), case.options)
        why = tried(known_peers()[name], known, small)
        lacked = {(name, op, option) for option, value in case.options.items() if value} & LACKED
        assert bool(why) == bool(lacked), (case, why)


@pytest.mark.gpu
# What a peer still uses of Triton is its own affair; Triton warns of `and` between tensors as a UserWarning.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Logical operators:UserWarning")
@pytest.mark.parametrize(("name", "op"), OFFERED, ids=[f"{name}-{op}" for name, op in OFFERED])
def test_the_real_peer_computes_the_same(name: str, op: str) -> None:
    peer, known = known_peers()[name], get(op)
    if not peer.installed:
        pytest.skip(f"{name} is not installed: pip install {peer.distribution}")
    dtype = torch.bfloat16 if "bfloat16" in known.dtypes else torch.float32
    for case in known.tune_cases:
        sizes = tuple(min(size, 512) for size in case.sizes)
        args = known.inputs(sizes, dtype, device="cuda", **case.options)
        kept = Kept(args)
        try:
            call = peer.prepare(known, args)
        except NotOffered:
            continue
        assert difference(call(), known.reference(*args)) == ""
        assert not kept.altered(), "it writes over the arguments"
        return
    pytest.fail("it is offered for no case that bench measures")


# ---- present or absent --------------------------------------------------------------------------------------------


def install(folder: Path, module: str, distribution: str, version: str) -> None:
    """What pip leaves of a package, as far as finding it goes. Importing the module fails."""
    (folder / module).mkdir(parents=True)
    (folder / module / "__init__.py").write_text("raise AssertionError('imported before it was asked to compute')\n")
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")


def test_every_file_is_a_peer() -> None:
    assert set(known_peers()) == {"torch", "compile", "liger", "flag_gems", "quack"}
    assert {name: peer.distribution for name, peer in known_peers().items() if name in LIBRARIES} == {
        "liger": "liger-kernel", "flag_gems": "flag_gems", "quack": "quack-kernels",
    }  # fmt: skip


@pytest.mark.parametrize("name", LIBRARIES)
def test_presence_needs_no_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    peer = known_peers()[name]
    if peer.installed:
        pytest.skip(f"{name} is installed here, and this test is about its absence")
    assert peer.version == ""
    install(tmp_path, peer.module, peer.distribution, "9.8.7")
    monkeypatch.syspath_prepend(tmp_path)
    assert peer.installed and peer.version == "9.8.7"
    assert chosen([name]) == ([peer], [])
    assert peer.module not in sys.modules


def test_an_absent_peer_is_a_note_and_alone_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peer, "installed", property(lambda each: each.module == "torch"))
    found, notes = chosen(["liger", "torch"])
    assert [peer.name for peer in found] == ["torch"]
    assert notes == ["liger is not installed: pip install liger-kernel"]
    with pytest.raises(BadArgument, match="nothing to compare with: liger is not .*; quack is not .*quack-kernels"):
        chosen(["liger", "quack"])
    assert chosen([]) == ([], [])


def test_an_unknown_peer_names_those_that_are_known() -> None:
    with pytest.raises(BadArgument, match="no peer 'ligre' .*did you mean liger.*compile, flag_gems, liger, quack, t"):
        chosen(["torch", "ligre"])


def test_a_file_without_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nobodys_peers").mkdir()
    (tmp_path / "nobodys_peers" / "__init__.py").write_text("")
    (tmp_path / "nobodys_peers" / "nobody.py").write_text("PEERS = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(peers, "PEERS", "nobodys_peers")
    with pytest.raises(PluginError, match="nobody defines no PEER"):
        known_peers()


def test_what_is_not_offered_has_a_name(stand_ins: None) -> None:
    with pytest.raises(NotOffered, match="offers no dropout"):
        known_peers()["liger"].prepare(get("dropout"), ())
    op = get("softmax")
    with pytest.raises(NotOffered, match="offers no reduction along a dim that is not the last"):
        known_peers()["quack"].prepare(op, op.inputs((3, 4), torch.float32, dim=0))


# ---- another function ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "expected", "words"),
    [
        (torch.ones(3), torch.ones(3), ""),
        (torch.ones(3) * 1.0009, torch.ones(3), ""),
        (torch.ones(3) * 1.0011, torch.ones(3), "differs by 0.0011, where the largest value is 1"),
        (torch.ones(3) * 1.02, torch.ones(3, dtype=torch.bfloat16), ""),
        (torch.ones(3, dtype=torch.bfloat16) * 1.02, torch.ones(3), ""),
        (torch.ones(3) * 1.04, torch.ones(3, dtype=torch.bfloat16), "differs by 0.04"),
        (torch.ones(3), torch.ones(3, 1), r"differs by its shape \[3\], expected \[3, 1\]"),
        (torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4]), "differs in 1 of 3 values"),
        (torch.tensor([1.0, math.nan]), torch.ones(2), "differs by values that are not finite"),
        (torch.tensor([math.inf, math.nan, 1.0]), torch.tensor([math.inf, math.nan, 1.0]), ""),
        (torch.tensor([math.inf]), torch.tensor([-math.inf]), "differs by values that are not finite"),
        ((None, torch.ones(2)), (torch.zeros(2), torch.zeros(2), None), "differs by 1, .* 0 in output 1"),
        ((torch.zeros(2), None), (torch.zeros(2), torch.ones(2)), ""),
        ((torch.zeros(2),) * 2, torch.zeros(2), "gives 2 outputs, expected 1"),
        (torch.zeros(0), torch.zeros(0), ""),
    ],
)
def test_difference(found: Any, expected: Any, words: str) -> None:
    assert re.match(words, difference(found, expected)) and bool(words) == bool(difference(found, expected))


def test_difference_looks_at_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "CHUNK", 4)
    found = torch.ones(3, 5)
    found[2, 4] = 2.0
    assert difference(found, torch.ones(3, 5)).startswith("differs by 1")
    assert difference(found.T, found.T.clone()) == ""


def test_a_library_takes_arguments_by_name() -> None:
    seen: list[Any] = []
    peer = library("other", "os", "other", {"softmax": lambda *args: seen.append(args) or (lambda: 7)})
    assert peer.offered == {"softmax"} and peer.prepare(get("softmax"), (1, 2, 3))() == 7 and seen == [(1, 2, 3)]


@pytest.mark.parametrize(("channels", "offered"), [(64, True), (320, False)])
def test_a_peer_is_not_asked_for_what_it_gets_wrong(channels: int, offered: bool) -> None:
    """FlagGems 5.0 reads groups of 10 channels as groups of 16."""
    from portkern.peers.flag_gems import _whole_groups

    with nullcontext() if offered else pytest.raises(NotOffered, match="no power of two"):
        _whole_groups(torch.empty(2, channels, 4), 32)
