"""What the tuner is asked for, and what it plans before any child process starts."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from portkern import registry
from portkern.arguments import seconds
from portkern.dispatch import reference_device
from portkern.errors import BadArgument, PortkernError, UnknownName, UnsupportedDtype
from portkern.op import Case
from portkern.record import FrozenMap
from portkern.registry import load_file, register
from portkern.runtime import current
from portkern.tuner import tune
from portkern.tuner.findings import Finding, Findings
from portkern.tuner.questions import FIRST, Sorted, ask
from portkern.tuner.requests import _present, cases_of, dtypes_of, ops_of, places_of
from tests.tuning import OPS, TESTS, TIMER, empty_home, interpreted

__all__ = ["empty_home"]  # a fixture


@pytest.mark.parametrize(("text", "found"), [(90, 90), ("90", 90), ("90s", 90), ("5m", 300), ("1.5h", 5400)])
def test_budgets(text, found):
    assert seconds(text) == found


@pytest.mark.parametrize("budget", ["", "soon", "0s", "-5m", "5 days", 0, -1, float("inf"), float("nan"), True])
def test_a_bad_budget(budget):
    with pytest.raises(BadArgument, match="'90s', '5m' or '1h'"):
        tune("softmax", budget=budget)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"device": "cuda:7"}, UnknownName, "cuda:7.*this machine has"),
        ({"device": "sm90,voodoo2"}, UnknownName, "voodoo2.*'auto', 'all'"),
        ({"device": ""}, UnknownName, "'auto', 'all'"),
        ({"device": "interpreter"}, BadArgument, "timer="),
        ({"device": "sm90", "shapes": ["4096xwide"]}, BadArgument, "4096xwide.*'4096x8192'"),
        ({"device": "sm90", "shapes": [(4, -1)]}, BadArgument, "'4096x8192'"),
        ({"device": "sm90", "shapes": []}, BadArgument, "leave it out"),
        ({"device": "sm90", "dtypes": ["bf61"]}, BadArgument, "bf61"),
        ({"device": "sm90", "dtypes": ["int8"]}, UnsupportedDtype, "softmax takes"),
        ({"device": "sm90", "dtypes": ["bf16", "int8"]}, UnsupportedDtype, "no op here takes int8"),
        ({"device": "sm90", "dtypes": []}, UnsupportedDtype, "an empty list"),
        ({"device": None}, TypeError, "device is None.*'auto'"),
        ({"device": ["sm90"]}, TypeError, "expected a string"),
        ({"device": "sm90", "shapes": 4}, BadArgument, "shapes is 4, expected a list"),
        ({"device": "sm90", "shapes": "4x"}, BadArgument, "shape '4x' is none"),
        ({"device": "sm90", "shapes": [(1.5, 4)]}, BadArgument, "'4096x8192'"),
        ({"device": "sm90", "shapes": [(10**19, 0)]}, BadArgument, "2.48 elements"),
        ({"device": "sm90", "shapes": [(1 << 30, 1 << 30)]}, BadArgument, "2.48 elements"),
        ({"device": "sm90", "limit": 0}, BadArgument, "limit"),
        ({"device": "sm90", "ops_files": ["no_such.py"]}, UnknownName, "no_such.py"),
    ],
)
def test_bad_input_says_what_is_taken(home, changes, error, says):
    with pytest.raises(error, match=says) as raised:
        tune("softmax", **changes)
    assert isinstance(raised.value, PortkernError)


def test_one_spelling_of_a_dtype_and_a_shape_is_as_good_as_another():
    (op,) = ops_of(["softmax"])[:1]
    for dtypes in ("half", ["fp16"], [torch.float16], torch.float16, ["FP16", "half"]):
        assert dtypes_of([op], dtypes) == {"softmax": ("float16",)}
    assert cases_of([op], "4X5") == cases_of([op], [(4, 5)]) == {"softmax": (Case((4, 5)),)}
    assert cases_of([op], ["scalar"]) == {"softmax": (Case(()),)}


def test_inputs_that_cannot_be_made(home):
    def inputs(sizes, dtype, **more):
        raise ValueError("two\nlines")

    op = replace(registry.get("softmax"), inputs=inputs)
    place = places_of(current(), "sm90", None)[0]
    with pytest.raises(
        BadArgument, match="softmax cannot make inputs of shape 4x5 and dtype float32: two lines; leave"
    ):
        ask(current(), place, op, Case((4, 5)), "float32")


def test_an_unknown_op(home):
    with pytest.raises(UnknownName, match="no op 'softmox'"):
        tune("softmox", device="sm90")


def test_an_op_that_only_this_process_knows(home):
    (op, *_) = load_file(OPS)
    register(op)
    with pytest.raises(UnknownName, match="ops_files="):
        interpreted("test::shift", ops_files=[])


def test_a_call_of_an_op_never_tunes(home):
    script = (
        "import sys, torch, portkern; portkern.softmax(torch.randn(3, 40)); "
        "assert not [name for name in sys.modules if name.startswith('portkern.tuner')], 'tuner was imported'"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", script], cwd=TESTS.parent, env=environment, check=True)
    assert list(home.iterdir()) == []


def test_gpus_of_one_model_share_the_work(home):
    device = reference_device(current(), "sm90")
    other = replace(device, slug="another", index=1)
    places = _present([replace(device, index=0), other, replace(device, index=2)])
    assert [place.indices for place in places] == [(0, 2), (1,)]


def test_known_outcomes_leave_the_next_candidates_to_try(home):
    load_file(OPS)
    (place,) = places_of(current(), "interpreter", TIMER)
    question = ask(current(), place, current().ops["test::shift"], Case((100,)), "float32")
    first, second, third = question.admitted
    assert question.undecided({}, 2, {}) == [first, second]
    assert question.undecided({second: Finding("refused")}, 2, {}) == [first, third]
    assert question.undecided({second: Finding("crashed")}, 2, {}) == [first]
    many = [second, third]
    assert question.undecided(dict.fromkeys(many, Finding("refused")), 2, {}) == [first]
    assert question.fact(first, "refused", FrozenMap()).question == question.key


def of_eight(question):
    """``question`` with eight configs to try."""
    (first, *_) = question.admitted
    configs = tuple(replace(first, num_stages=stages) for stages in range(1, 9))
    found = replace(question)
    found.__dict__["candidates"] = Sorted(configs, (), {})
    return found, configs


def test_the_rest_is_tried_where_the_default_is_beaten(home):
    load_file(OPS)
    (place,) = places_of(current(), "interpreter", TIMER)
    question, configs = of_eight(ask(current(), place, current().ops["test::shift"], Case((100,)), "float32"))
    assert question.undecided({}, 8, {}) == list(configs[:FIRST])
    slower = {config: Finding("measured", 10.0) for config in configs[:FIRST]}
    assert question.undecided(slower, 8, {}) == []
    faster = {**slower, configs[2]: Finding("measured", 9.8)}
    assert question.undecided(faster, 8, {}) == list(configs[FIRST:])
    assert question.undecided(faster, 6, {}) == list(configs[FIRST:6])
    lost = {**slower, configs[0]: Finding("wrong")}
    assert question.undecided(lost, 8, {}) == list(configs[FIRST:])
    partly = {configs[0]: Finding("measured", 10.0), configs[1]: Finding("measured", 5.0)}
    assert question.undecided(partly, 8, {}) == list(configs[2:FIRST])


def test_what_was_fastest_for_a_problem_alike_is_tried_after_the_default(home):
    load_file(OPS)
    (place,) = places_of(current(), "interpreter", TIMER)
    question, configs = of_eight(ask(current(), place, current().ops["test::shift"], Case((100,)), "float32"))
    alike = {configs[0]: 9.0, configs[5]: 7.0, configs[6]: 8.0, configs[7]: 8.5}
    assert question.undecided({}, 8, alike) == [configs[0], configs[5], configs[6]]
    assert question.undecided({configs[5]: Finding("refused")}, 8, alike) == [configs[0], configs[6], configs[7]]
    elsewhere = {replace(configs[0], num_warps=16): 1.0}
    assert question.undecided({}, 8, elsewhere) == list(configs[:FIRST])


def test_problems_are_alike_that_differ_in_their_16_bit_floats(home):
    (place,) = places_of(current(), "interpreter", TIMER)
    op, shape = registry.get("softmax"), Case((4, 100))
    asked = {dtype: ask(current(), place, op, shape, dtype) for dtype in ("bfloat16", "float16", "float32")}
    half = asked["bfloat16"]
    fact = half.fact(half.admitted[0], "measured", FrozenMap(), time_us=3.0)
    slower = half.fact(half.admitted[0], "measured", FrozenMap(), time_us=4.0)
    refused = half.fact(half.admitted[1], "refused", FrozenMap())
    findings = Findings()
    findings.add([fact, slower, refused])
    assert findings.alike(asked["float16"].key) == {half.admitted[0]: 3.0}
    assert findings.alike(asked["float32"].key) == findings.alike(half.key) == {}
    assert findings.of(half.key) == {half.admitted[0]: Finding("measured", 3.0), half.admitted[1]: Finding("refused")}
