"""Where a fault belongs: the user's own file and line, and the library line that led there."""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import dataclass
from types import FrameType
from typing import Final

import torch

_OURS: Final = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH: Final = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB: Final = os.path.abspath(sysconfig.get_paths()["stdlib"]) + os.sep

_INTERNAL, _LIBRARY, _USER = 0, 1, 2
_kinds: dict[str, int] = {}


@dataclass(frozen=True)
class Site:
    """A source position. ``via`` is the innermost third-party line below it, or an empty string."""

    file: str
    line: int
    function: str
    via: str = ""

    def __str__(self) -> str:
        text = f"{self.file}:{self.line} ({self.function})"
        return f"{text} via {self.via}" if self.via else text


def kind_of(filename: str) -> int:
    """Classify a file: 0 torch, this package or the standard library; 1 installed library; 2 the user's."""
    kind = _kinds.get(filename)
    if kind is None:
        kind = _kinds[filename] = _classify(filename)
    return kind


def _classify(filename: str) -> int:
    if filename.startswith("<frozen"):
        return _INTERNAL
    path = os.path.abspath(filename)
    if path.startswith((_OURS, _TORCH)):
        return _INTERNAL
    if f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path:
        return _LIBRARY
    if path.startswith(_STDLIB):
        return _INTERNAL
    return _USER


def current_site() -> Site:
    """The innermost user frame of the running call stack (the ``.backward()`` line during backward)."""
    return _site_of(sys._getframe(1), innermost_first=True)


def _site_of(frame: FrameType | None, *, innermost_first: bool) -> Site:
    library: FrameType | None = None
    outermost = frame
    while frame is not None:
        kind = kind_of(frame.f_code.co_filename)
        if kind == _USER:
            return _site(frame, library)
        if kind == _LIBRARY and library is None:
            library = frame
        outermost = frame
        frame = frame.f_back
    chosen = library or outermost
    assert chosen is not None
    return _site(chosen, None)


def _site(frame: FrameType, library: FrameType | None) -> Site:
    code = frame.f_code
    via = f"{library.f_code.co_filename}:{library.f_lineno}" if library is not None else ""
    return Site(code.co_filename, frame.f_lineno, code.co_qualname, via)


def traceback_site(error: BaseException) -> Site | None:
    """The innermost user line of an exception's traceback, or its innermost library line."""
    trace = error.__traceback__
    best: Site | None = None
    library = ""
    fallback: Site | None = None
    while trace is not None:
        code = trace.tb_frame.f_code
        kind = kind_of(code.co_filename)
        if kind == _USER:
            best, library = Site(code.co_filename, trace.tb_lineno, code.co_qualname), ""
        elif kind == _LIBRARY:
            library = f"{code.co_filename}:{trace.tb_lineno}"
            fallback = Site(code.co_filename, trace.tb_lineno, code.co_qualname)
        trace = trace.tb_next
    if best is None:
        return fallback
    return Site(best.file, best.line, best.function, library)
