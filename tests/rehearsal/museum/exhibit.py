"""An exhibit: a small program that fails on a card, beside the program that works.

The line that CUDA refuses carries the comment ``# fault``. Exhibits use ``"cuda"`` as any script would and know nothing
of the rehearsal, so that they run unchanged on a real card.
"""

from __future__ import annotations

import inspect
from typing import ClassVar

#: Every exhibit, in the order of definition.
EXHIBITS: list[type[Exhibit]] = []


class Exhibit:
    """One fault and its mended twin.

    Attributes:
        rule: the rule that must name it.
        error: what a card raises (and the rehearsal in stop mode); ``None`` when the card stays silent.
        memory: the card's memory, for faults of size.
        card: the card profile, for faults of capability.
        poisons: the fault leaves a real card's process unusable (device-side assert).
        ends: the CPU cannot compute it either, so that it ends a run that keeps going.
    """

    rule: ClassVar[str]
    error: ClassVar[type[BaseException] | None] = RuntimeError
    memory: ClassVar[str | None] = None
    card: ClassVar[str] = "a30"
    poisons: ClassVar[bool] = False
    ends: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        EXHIBITS.append(cls)

    @staticmethod
    def faulty() -> object:
        """The program that fails on a card."""
        raise AssertionError("an exhibit needs a faulty program")

    @staticmethod
    def mended() -> object:
        """The program that works."""
        raise AssertionError("an exhibit needs a mended program")

    @classmethod
    def fault_line(cls) -> tuple[str, int]:
        """File and line of the statement marked ``# fault``."""
        lines, start = inspect.getsourcelines(cls)
        marked = [start + i for i, line in enumerate(lines) if line.rstrip().endswith("# fault")]
        assert len(marked) == 1, f"{cls.__name__} marks {len(marked)} lines"
        return inspect.getsourcefile(cls) or "", marked[0]
