"""What a card says of its standard run is what the record says."""

from pathlib import Path

import pytest

from auto_research.papers._registry import adapters
from auto_research.runtime.records import read_record
from auto_research.study.execute import StudyRecord
from auto_research.study.report import results_section

RESULTS = Path(__file__).parents[2] / "docs" / "results"
RECORDED = sorted(path.stem for path in RESULTS.glob("*.json"))


@pytest.mark.parametrize("key", RECORDED)
def test_a_card_shows_its_recorded_run(key):
    record = read_record(RESULTS / f"{key}.json", StudyRecord)
    assert record.key == key
    assert record.budget == "standard"
    assert results_section(record) in adapters()[key].page, "run scripts/write_results.py"


def test_no_card_shows_results_without_a_record():
    for key, found in adapters().items():
        if key not in RECORDED:
            assert "\n## Results\n" not in found.page
