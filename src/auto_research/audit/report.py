"""Pages drawn from an `AuditRecord`: HTML (self-contained), Markdown and JUnit XML. Every text is escaped."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from auto_research.audit.diagnose import TITLES, Kind
from auto_research.audit.record import MEANING, STATUSES, AdapterResult, AuditRecord, Status
from auto_research.runtime.records import write_text_atomic

if TYPE_CHECKING:
    from jinja2 import Environment

# What XML 1.0 can hold; everything else is dropped.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Group:
    """Failures of one kind."""

    kind: Kind
    title: str
    results: list[AdapterResult]


@dataclass(frozen=True)
class Dot:
    """One adapter in the plot of durations: x in percent, y in pixels."""

    x: float
    y: float
    result: AdapterResult


@dataclass(frozen=True)
class Row:
    """One status in the plot of durations."""

    status: Status
    y: int
    dots: list[Dot]


@dataclass(frozen=True)
class Plot:
    """Durations by status on a logarithmic axis; ticks are (percent, label)."""

    rows: list[Row]
    ticks: list[tuple[float, str]]
    deadline: float
    height: int


def write_reports(record: AuditRecord, output: Path) -> list[Path]:
    """Writes HTML, Markdown and JUnit XML beside `output` (the record's JSON file) and returns their paths."""
    pages = {".html": html(record), ".md": markdown(record), ".xml": junit(record)}
    paths = []
    for suffix, text in pages.items():
        path = output.with_suffix(suffix)
        write_text_atomic(path, text)
        paths.append(path)
    return paths


def headline(record: AuditRecord) -> str:
    """The outcome in one sentence."""
    passed = sum(result.passed for result in record.results)
    without = sum(result.acceptable and not result.passed for result in record.results)
    sentence = f"{passed} of {len(record.planned)} adapters passed on {record.settings.resolved_device}"
    if without:
        sentence += f"; {without} finished and never claimed an accelerator path"
    bad = len(record.results) - passed - without
    if bad:
        sentence += f"; {bad} did not pass"
    if record.missing:
        sentence += f"; {len(record.missing)} have no result yet"
    return sentence + "."


def groups(record: AuditRecord) -> list[Group]:
    """Results with a diagnosis, grouped by kind, the largest group first."""
    by_kind: dict[Kind, list[AdapterResult]] = {}
    for result in record.results:
        if result.diagnosis is not None:
            by_kind.setdefault(result.diagnosis.kind, []).append(result)
    found = [Group(kind, TITLES[kind], results) for kind, results in by_kind.items()]
    return sorted(found, key=lambda group: (-len(group.results), group.title))


def duration_plot(record: AuditRecord) -> Plot:
    """Where the dots of the duration plot go."""
    seconds = [max(result.seconds, 0.01) for result in record.results]
    low = math.log10(min([*seconds, 1.0])) - 0.1
    high = max(math.log10(max([*seconds, 1.0])) + 0.15, low + 1)

    def position(value: float) -> float:
        return round(2 + 96 * (math.log10(max(value, 0.01)) - low) / (high - low), 2)

    rows = []
    y = 34
    for status in STATUSES:
        results = sorted((r for r in record.results if r.status == status), key=lambda r: r.seconds)
        if not results:
            continue
        dots: list[Dot] = []
        for result in results:
            # Dots that would overlap step downwards in three lanes.
            x = position(result.seconds)
            lane = next((i for i in range(3) if not any(d.y == y + 7 * i and x - d.x < 1.4 for d in dots[-6:])), 2)
            dots.append(Dot(x, y + 7 * lane, result))
        rows.append(Row(status, y, dots))
        y += 52
    ticks = [
        (position(base * 10**power), f"{base * 10**power:g} s")
        for power in range(-2, 6)
        for base in (1, 3)
        if low <= math.log10(base * 10**power) <= high - 0.05
    ]
    return Plot(rows, ticks, position(record.settings.timeout_seconds), y)


def html(record: AuditRecord) -> str:
    """One HTML page that needs nothing else."""
    return _page(
        "audit.html.j2",
        escape=True,
        record=record,
        headline=headline(record),
        groups=groups(record),
        plot=duration_plot(record),
        meaning=MEANING,
    )


def markdown(record: AuditRecord) -> str:
    """The same as Markdown."""
    return _page(
        "audit.md.j2",
        escape=False,
        record=record,
        headline=headline(record),
        groups=groups(record),
        meaning=MEANING,
    )


def junit(record: AuditRecord) -> str:
    """JUnit XML: one test case an adapter.

    A run that did not pass is a failure, a blocked one or one without a result an error; an adapter that never
    claimed an accelerator path and finished is a success.
    """
    settings = record.settings
    suite = ElementTree.Element("testsuite", name=f"auto-research audit on {settings.resolved_device}")
    suite.set("timestamp", record.started)
    properties = ElementTree.SubElement(suite, "properties")
    facts = {"disclaimer": record.disclaimer, "device": settings.resolved_device, "budget": settings.budget}
    for name, value in {**facts, **record.environment}.items():
        ElementTree.SubElement(properties, "property", name=_xml(name), value=_xml(value))
    counts = {"failure": 0, "error": 0}

    def problem(case: ElementTree.Element, kind: str, message: str, type_: str, text: str) -> None:
        counts[kind] += 1
        ElementTree.SubElement(case, kind, message=_xml(message), type=type_).text = _xml(text)

    for result in record.results:
        case = ElementTree.SubElement(
            suite, "testcase", classname=_xml(f"audit.{result.family}"), name=result.key, time=f"{result.seconds:.3f}"
        )
        if not result.acceptable:
            text = result.log_tail
            if result.diagnosis is not None:
                found = result.diagnosis
                text = f"{found.title}: {found.summary}\nNext: {found.next_step}\n\n{text}"
            problem(case, "error" if result.status == "blocked" else "failure", result.reason, result.status, text)
        ElementTree.SubElement(case, "system-out").text = _xml(
            "\n".join([result.status, *(f"{c.file}:{c.line} {c.function}: {c.resolved}" for c in result.calls)])
        )
    for key in record.missing:
        case = ElementTree.SubElement(suite, "testcase", classname="audit", name=key, time="0")
        problem(case, "error", "no result: the audit did not reach it", "missing", "")
    suite.set("tests", str(len(record.results) + len(record.missing)))
    suite.set("failures", str(counts["failure"]))
    suite.set("errors", str(counts["error"]))
    suite.set("time", f"{sum(result.seconds for result in record.results):.3f}")
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _page(template: str, *, escape: bool, **names: object) -> str:
    return _xml(_environment(escape=escape).get_template(template).render(names))


def _xml(text: str) -> str:
    """Text without the control characters that no page can hold."""
    return _NOT_XML.sub("", text)


def cell(text: object) -> str:
    """Text for a Markdown table cell or line: no line breaks, columns or markup."""
    flat = " ".join(str(text).split())
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", flat)


def fenced(text: str) -> str:
    """A Markdown code block that its text cannot close."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def size(number: float) -> str:
    """A count with a decimal prefix: 1234567 -> `1.2 M`."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(number) < 1000:
            return f"{number:.0f} {unit}".strip() if number >= 10 or not unit else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} P"


def duration(seconds: float) -> str:
    """Seconds as a person reads them."""
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def _environment(*, escape: bool) -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    folder = files("auto_research.audit") / "templates"

    def load(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    environment = Environment(
        loader=FunctionLoader(load), autoescape=escape, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.filters.update(cell=cell, fenced=fenced, size=size, duration=duration, percent=_percent)
    return environment


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
