"""Every adapter runs at the smoke budget on embedded data and micro checkpoints, in a process of its own."""

import pytest

from auto_research.papers import _reproduce
from auto_research.papers._registry import adapters

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("key", list(adapters()))
def test_smoke_run_trains_every_stage_and_concludes_nothing(key, tmp_path):
    request = _reproduce.Request(checkpoints="micro", device="cpu", timeout_s=300)
    (result,) = _reproduce.reproduce([adapters()[key]], request, tmp_path)
    assert result.record is not None, f"{result.outcome.reason}\n{result.outcome.log_tail}"
    record = result.record
    assert record.comparison.verdict == "smoke: no conclusion"
    assert record.fidelity == record.declared_fidelity, record.notes
    assert all(stage.optimiser_steps > 0 for stage in record.stages if stage.trains)
    assert set(record.data) <= set(adapters()[key].card.datasets)
    for variant in record.comparison.variants:
        assert variant.mean[record.comparison.primary] is not None, variant.name


def test_one_seed_gives_one_result(tmp_path):
    """Two whole runs in separate processes agree in every metric."""
    request = _reproduce.Request(checkpoints="micro", device="cpu", seeds=(11,), timeout_s=300)
    found = []
    for name in ("one", "two"):
        (result,) = _reproduce.reproduce([adapters()["rankmixer"]], request, tmp_path / name)
        assert result.record is not None, result.outcome.log_tail
        found.append([(v.name, v.mean, [t.losses for t in v.trials]) for v in result.record.comparison.variants])
    assert found[0] == found[1]
