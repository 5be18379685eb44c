"""Pages drawn from a record: complete, self-contained, and safe whatever the logs say."""

from __future__ import annotations

import html.parser
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from auto_research.audit.diagnose import Diagnosis
from auto_research.audit.record import DISCLAIMER, STATUSES, AuditRecord
from auto_research.audit.report import (
    cell,
    duration_plot,
    fenced,
    groups,
    headline,
    junit,
    markdown,
    write_reports,
)
from auto_research.audit.report import (
    html as html_page,
)

from .conftest import EVIL, record_of, result


def diagnosis(kind: str = "out_of_memory", text: str = "It ran out of memory.") -> Diagnosis:
    return Diagnosis(kind=kind, summary=text, next_step="Lower the batch size.", evidence=text)


@pytest.fixture
def every_status() -> AuditRecord:
    results = [result(f"paper-{i}", status) for i, status in enumerate(STATUSES)]
    failed = [r.key for r in results if r.status in ("failed", "timeout", "blocked")]
    results = [
        r.model_copy(update={"diagnosis": diagnosis(), "log_tail": "last line"}) if r.key in failed else r
        for r in results
    ]
    return record_of(results)


def test_every_status_is_on_every_page(every_status: AuditRecord) -> None:
    for page in (html_page(every_status), markdown(every_status), junit(every_status)):
        for status in STATUSES:
            assert status in page
        assert "engineering check" in page
        assert "never a paper benchmark" in page
    for page in (html_page(every_status), markdown(every_status)):
        assert "not a throughput benchmark" in page
        assert "papers/ranking/x.py:12" in page
        assert "Lower the batch size." in page
        assert "last line" in page


class Tags(html.parser.HTMLParser):
    """Collects elements, and checks that they nest."""

    VOID = frozenset(("meta", "wbr"))

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_html_page_is_well_formed_and_asks_for_nothing(every_status: AuditRecord) -> None:
    parser = Tags()
    page = html_page(every_status)
    parser.feed(page)
    assert parser.open == []
    names = {tag for tag, _ in parser.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "form"}
    for _, attributes in parser.tags:
        assert not {"src", "href", "onload", "onclick"} & set(attributes)
    assert "url(" not in page
    assert "@import" not in page
    assert sum(tag == "circle" for tag, _ in parser.tags) == len(STATUSES)


def test_untrusted_text_stays_text() -> None:
    bad = result(
        "evil",
        "failed",
        title=EVIL,
        reason=EVIL,
        log_tail=EVIL + "\n````\n# not a heading",
        notes=[EVIL],
        diagnosis=diagnosis("unknown", EVIL),
        overrides={},
    )
    record = record_of([bad], notes=[EVIL], environment={"cpu": EVIL})
    page = html_page(record)
    parser = Tags()
    parser.feed(page)
    assert parser.open == []
    assert "script" not in {tag for tag, _ in parser.tags}
    assert "&lt;script&gt;" in page
    root = ElementTree.fromstring(junit(record))  # control characters would not parse
    failure = root.find("testsuite/testcase/failure")
    assert failure is not None
    assert "<script>" in (failure.text or "")
    text = markdown(record)
    outside = re.sub(r"(?s)^(`{3,})text$.*?^\1$", "", text, flags=re.MULTILINE)
    assert "# not a heading" not in outside
    assert "<script" not in outside.replace("\\<", "")
    assert not re.search("[\x00\x1b]", page + text)


def test_a_markdown_cell_keeps_its_table() -> None:
    assert cell("a|b\nc <b> `x`") == r"a\|b c \<b\> \`x\`"


@pytest.mark.parametrize("text", ["plain", "```", "a ```` b", "`" * 9])
def test_a_fence_is_longer_than_any_inside(text: str) -> None:
    lines = fenced(text).split("\n")
    assert lines[-1] == lines[0].removesuffix("text")
    assert lines[-1] not in text
    assert set(lines[-1]) == {"`"}


def test_junit_counts() -> None:
    plain = result("plain", "completed_without_device_call", explicit=False)
    claims = result("claims", "completed_without_device_call")
    blocked = result("blocked", "blocked", diagnosis=diagnosis("missing_data"))
    record = record_of([result("good", "cpu_pass"), plain, claims, blocked])
    suite = ElementTree.fromstring(junit(record)).find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("4", "1", "1")
    assert suite.get("name") == "auto-research audit on cpu"
    by_name = {case.get("name"): case for case in suite.iter("testcase")}
    assert by_name["plain"].find("failure") is None
    assert by_name["claims"].find("failure") is not None
    assert by_name["blocked"].find("error") is not None
    assert float(by_name["good"].get("time", "")) == 12.5


def test_what_has_no_result_is_named_everywhere() -> None:
    record = record_of([result("done", "cpu_pass")], planned=["done", "open"], selected=["done", "open"])
    assert not record.finished
    assert not record.good
    assert "1 have no result yet" in headline(record)
    assert "open" in html_page(record)
    assert "open" in markdown(record)
    suite = ElementTree.fromstring(junit(record)).find("testsuite")
    assert suite is not None
    assert suite.get("errors") == "1"


def test_failures_are_grouped_by_diagnosis_largest_first() -> None:
    results = [
        result("a", "failed", diagnosis=diagnosis("lapack")),
        result("b", "failed", diagnosis=diagnosis("out_of_memory")),
        result("c", "failed", diagnosis=diagnosis("out_of_memory")),
    ]
    assert [(g.kind, [r.key for r in g.results]) for g in groups(record_of(results))] == [
        ("out_of_memory", ["b", "c"]),
        ("lapack", ["a"]),
    ]


def test_the_plot_keeps_order_and_stays_inside() -> None:
    seconds = [0.02, 0.5, 3.0, 3.0, 3.01, 90.0, 599.0, 4000.0]
    plot = duration_plot(record_of([result(f"p{i}", "cpu_pass", seconds=s) for i, s in enumerate(seconds)]))
    (row,) = plot.rows
    assert [dot.result.seconds for dot in row.dots] == sorted(seconds)
    xs = [dot.x for dot in row.dots]
    assert xs == sorted(xs)
    assert all(0 < x < 100 for x in xs)
    three = [(dot.x, dot.y) for dot in row.dots[2:5]]
    assert len({y for _, y in three}) == 3  # equal durations do not hide each other
    assert row.dots[-2].x < plot.deadline < row.dots[-1].x  # 599 s < 600 s < 4000 s


def test_an_empty_shard_has_pages(tmp_path: Path) -> None:
    paths = write_reports(record_of([]), tmp_path / "empty.json")
    assert [path.name for path in paths] == ["empty.html", "empty.md", "empty.xml"]
    assert all(DISCLAIMER in path.read_text() for path in paths)
