"""The pool of compiling children: what is asked twice is compiled once, and what waits is counted."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from portkern.config import Config
from portkern.tuner.child import environment
from portkern.tuner.compilers import Compiled, Compilers

PATIENCE = 10.0


def test_what_waits_is_counted_until_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, go_on = [], threading.Event()

    def compile_one(self: Compilers, question: Any, config: Config) -> Compiled:
        assert go_on.wait(PATIENCE)
        compiled.append((question.key, config))
        return Compiled("fits")

    monkeypatch.setattr(Compilers, "_compile", compile_one)
    compilers = Compilers((), PATIENCE)
    questions: list[Any] = [SimpleNamespace(key="one"), SimpleNamespace(key="other")]
    asked = [(question, Config("a", num_warps=warps)) for question in questions for warps in (1, 2, 4)]
    try:
        assert compilers.waiting == 0
        futures = [compilers.submit(*each) for each in asked]
        assert [compilers.submit(*each) for each in asked] == futures
        assert compilers.waiting == len(asked)
        go_on.set()
        assert {future.result(PATIENCE).outcome for future in futures} == {"fits"}
    finally:
        go_on.set()
        compilers.close()
    assert compilers.waiting == 0
    assert sorted(compiled, key=str) == sorted(((question.key, config) for question, config in asked), key=str)
    assert all(future is compilers.submit(*each) for future, each in zip(futures, asked, strict=True))


def test_a_child_runs_what_the_machine_runs() -> None:
    inherited = {"HOME": "/home", "TRITON_INTERPRET": "1", "PORTKERN_EMULATE": "gfx942"}
    assert environment(inherited, interpreted=False) == {"HOME": "/home"}
    assert environment(inherited, interpreted=True) == {"HOME": "/home", "TRITON_INTERPRET": "1"}
