"""``with rehearse(...) as report``: the rehearsal inside a process that has imported torch already."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from auto_research.runtime.errors import UserError

from . import autocast, distributed, functions, masquerade, shims
from .kernels import classify
from .locate import traceback_site
from .memory import card_profile
from .modes import mode_for
from .patching import Patches
from .report import Report
from .rules import Recorder, suppress_pattern
from .session import Session, activate, active
from .tensor import install_storage_slots


@contextmanager
def rehearse(
    card: str = "a30",
    *,
    memory: str | int | None = None,
    keep_going: bool = False,
    ignore: Iterable[str] = (),
    device_count: int = 1,
    check_memory: bool = True,
) -> Iterator[Report]:
    """Run the body as if a CUDA card were present, and report what the card would refuse.

    Args:
        card: profile whose memory and compute capability count (``a30``, ``t4``, ``h100`` ...).
        memory: the card's memory in bytes or as text (``"24GiB"``), instead of the profile's.
        keep_going: record every distinct fault and continue; otherwise the first fault raises what CUDA raises.
        ignore: faults to leave out, each ``RULE`` or ``RULE:path`` (a file name, ending or pattern).
        device_count: how many cards the script sees.
        check_memory: report MEM-1 when the live tensors outgrow the card.

    Yields:
        The report; its ``findings`` grow while the body runs, its summary is final when the body ends.

    Raises:
        UserError: unknown card, unreadable size, or a rehearsal is running already.
    """
    if active() is not None:
        raise UserError("A rehearsal is running already; use one at a time.")
    recorder = Recorder(stop=not keep_going, ignore=tuple(suppress_pattern(entry) for entry in ignore))
    session = Session(
        card_profile(card, memory), device_count=device_count, recorder=recorder, check_memory=check_memory
    )
    report = Report(session)
    stop = install(session)
    try:
        yield report
    except BaseException as error:
        record_uncaught(session, error)
        raise
    finally:
        report.finish()
        stop()


def install(session: Session) -> Any:
    """Start the virtual card for this process; returns the function that ends it."""
    install_storage_slots()
    activate(session)
    patches = Patches()
    mode = session.mode = mode_for(session)
    try:
        masquerade.install(patches)
        shims.install(patches, session, lambda: mode_for(session))
        autocast.install(patches, session)
        functions.install(patches, session)
        distributed.install(patches, session)
    except BaseException:
        patches.undo()
        activate(None)
        raise
    mode.__enter__()

    def stop() -> None:
        mode.__exit__(None, None, None)
        patches.undo()
        activate(None)

    return stop


def record_uncaught(session: Session, error: BaseException) -> None:
    """Turn an exception that the CPU raises too (dtype boundary, index range, half overflow) into a finding."""
    if getattr(error, "finding", None) is not None or getattr(error, "on_host", False):
        return
    rule = classify(error)
    site = traceback_site(error)
    if rule is None or site is None:
        return
    stop, session.recorder.stop = session.recorder.stop, False
    try:
        finding = session.recorder.fault(rule, str(error).split("\n")[0], site=site)
        if finding is not None:
            error.add_note(finding.text())
    finally:
        session.recorder.stop = stop
