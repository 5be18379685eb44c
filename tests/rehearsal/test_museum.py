"""Every faulty program is named with its rule, its own line, operands and fix; no mended twin is."""

from __future__ import annotations

import os

import pytest
import torch
from museum import EXHIBITS

from auto_research.rehearsal import RULES, rehearse

#: Rules that no small program can show in one process.
NOT_SHOWN = {"MP-1"}
#: Rules about where, not on what: their findings carry no operands.
WITHOUT_OPERANDS = {"DEV-8", "MEM-1", "DST-2", "ASY-1"}


def session_of(exhibit, *, keep_going):
    return rehearse(exhibit.card, memory=exhibit.memory, keep_going=keep_going)


def test_the_museum_covers_every_rule():
    assert len(EXHIBITS) >= 90
    assert RULES.keys() - {exhibit.rule for exhibit in EXHIBITS} == NOT_SHOWN


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda e: e.__name__)
def test_the_fault_is_found(exhibit):
    torch.manual_seed(0)
    file, line = exhibit.fault_line()
    with (
        pytest.raises(exhibit.error or RuntimeError) as raised,
        session_of(exhibit, keep_going=False) as report,
    ):
        exhibit.faulty()
    text = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    if exhibit.rule == "DEV-8":  # found in the child, whose exception the parent re-raises
        assert "[rehearsal DEV-8]" in text
        assert f"{os.path.basename(file)}:{line}" in text
        return
    (finding,) = report.findings
    assert finding.rule == exhibit.rule
    assert (finding.file, finding.line) == (file, line)
    assert finding.fix
    assert f"[rehearsal {exhibit.rule}]" in text
    if exhibit.rule not in WITHOUT_OPERANDS and not exhibit.ends:
        assert finding.arguments


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda e: e.__name__)
def test_keep_going_lists_the_fault_once(exhibit):
    torch.manual_seed(0)
    file, line = exhibit.fault_line()
    try:
        with session_of(exhibit, keep_going=True) as report:
            exhibit.faulty()
    except (RuntimeError, IndexError, ValueError, TypeError):
        # What the CPU cannot compute either ends the run even when it keeps going.
        assert exhibit.ends or exhibit.rule in {"OOB-1", "DTY-3", "KRN-3", "DTY-1", "DEV-8"}
    if exhibit.rule != "DEV-8":
        assert [(f.rule, f.file, f.line) for f in report.findings] == [(exhibit.rule, file, line)]


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda e: e.__name__)
def test_the_twin_is_clean(exhibit):
    torch.manual_seed(0)
    with session_of(exhibit, keep_going=True) as report:
        exhibit.mended()
    assert report.findings == []
