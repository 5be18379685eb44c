"""Joining shards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from auto_research.audit.plan import shard
from auto_research.audit.record import AuditRecord, merge
from auto_research.runtime.errors import UserError
from auto_research.runtime.records import write_json_atomic

from .conftest import record_of, result

KEYS = [f"paper-{i}" for i in range(7)]


def shard_file(folder: Path, index: int, *, drop: str = "", **settings: object) -> Path:
    keys = shard(KEYS, 3, index)
    results = [result(key, "cpu_pass", seconds=1.0) for key in keys if key != drop]
    changes = {"shards": 3, "shard_index": index, "workers": index + 1, **settings}
    changed = record_of([]).settings.model_copy(update=changes)
    path = folder / f"shard-{index}.json"
    write_json_atomic(path, record_of(results, settings=changed, selected=KEYS, planned=keys))
    return path


def test_shards_join_to_the_whole(tmp_path: Path) -> None:
    merged = merge([shard_file(tmp_path, i) for i in (2, 0, 1)])
    assert [r.key for r in merged.results] == KEYS
    assert merged.finished
    assert merged.good
    assert merged.notes == []
    assert merged.status_counts == {"cpu_pass": 7}
    assert merged.passed_seconds == 7.0
    assert len(merged.merged_from) == 3
    assert AuditRecord.model_validate(merged.model_dump(mode="json")) == merged


def test_a_missing_shard_and_an_unfinished_one_are_named(tmp_path: Path) -> None:
    merged = merge([shard_file(tmp_path, 0, drop="paper-3"), shard_file(tmp_path, 2)])
    assert merged.missing == ["paper-1", "paper-3", "paper-4"]
    assert not merged.finished
    first, second = merged.notes
    assert "shard 1 of 3 is missing: paper-1, paper-4" in first
    assert "shard-0.json is not finished: paper-3" in second


def test_a_double_result_is_refused_by_name(tmp_path: Path) -> None:
    path = shard_file(tmp_path, 0)
    copy = tmp_path / "copy.json"
    copy.write_bytes(path.read_bytes())
    with pytest.raises(UserError, match=r"paper-0 in .*shard-0\.json and .*copy\.json"):
        merge([path, copy])


@pytest.mark.parametrize(
    ("change", "named"),
    [({"seeds": [1]}, "seeds"), ({"budget": "full"}, "budget"), ({"resolved_device": "cuda:0"}, "resolved device")],
)
def test_other_settings_are_refused_by_name(tmp_path: Path, change: dict[str, object], named: str) -> None:
    with pytest.raises(UserError, match=f"differ in .*{named}"):
        merge([shard_file(tmp_path, 0), shard_file(tmp_path, 1, **change)])


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda raw: raw["results"][0].update(key="paper-99"), "1 results of 'paper-99', which is planned 0 times"),
        (lambda raw: raw["results"].append(raw["results"][0]), "2 results of 'paper-0'"),
        (lambda raw: raw["planned"].pop(), "not shard 0 of 3 of the selected ones"),
        (lambda raw: raw["settings"].update(shard_index=5), "there is no shard 5 of 3"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(
    tmp_path: Path, damage: Callable[[dict[str, Any]], object], named: str
) -> None:
    path = shard_file(tmp_path, 0)
    raw = json.loads(path.read_text())
    damage(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(UserError, match=named):
        merge([path, shard_file(tmp_path, 1)])


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"schema_version": 1, "kind": "other"}')
    with pytest.raises(UserError, match=r"x\.json"):
        merge([tmp_path / "x.json"])
