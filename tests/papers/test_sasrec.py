"""SASRec as a paper: the control really sees one event, the smoke run trains on the device it resolved."""

from pathlib import Path

import torch

from auto_research.papers._registry import adapter
from auto_research.papers.baselines.sasrec import SASRec
from auto_research.runtime.evidence import EvidenceLog, use_log
from auto_research.study.context import Study


def test_window_of_one_sees_the_latest_event_only() -> None:
    torch.manual_seed(0)
    sequence = torch.randint(1, 21, (3, 6))
    changed = sequence.clone()
    changed[:, :-1] = torch.randint(1, 21, (3, 5))
    alone = SASRec(20, dim=16, max_length=8, window=1).eval()
    torch.testing.assert_close(alone.scores({"sequence": changed}), alone.scores({"sequence": sequence}))
    whole = SASRec(20, dim=16, max_length=8).eval()
    assert not torch.allclose(whole.scores({"sequence": changed}), whole.scores({"sequence": sequence}))
    three = SASRec(20, dim=16, layers=1, max_length=8, window=3).eval()
    changed = sequence.clone()
    changed[:, :3] = torch.randint(1, 21, (3, 3))  # only older than the window of a single layer
    torch.testing.assert_close(three.scores({"sequence": changed}), three.scores({"sequence": sequence}))
    assert sum(p.numel() for p in alone.parameters()) == sum(p.numel() for p in whole.parameters())


def test_one_table_reads_and_scores() -> None:
    model = SASRec(20, dim=16).eval()
    batch = {"sequence": torch.tensor([[0, 4, 7]])}
    before = model.scores(batch)
    with torch.no_grad():
        model.items.weight[9] += torch.randn(16)  # an item that was not read: only its own score may move
    moved = (model.scores(batch) - before).abs()[0] > 1e-6
    assert moved.nonzero().flatten().tolist() == [9]


def test_smoke_run_trains_two_arms_and_records_the_device(tmp_path: Path) -> None:
    found = adapter("sasrec")
    with use_log(tmp_path / "evidence.jsonl"):
        study = Study(card=found.card, device="cpu", quiet=True)
        comparison = found.load()(study)
    updates = {stage.name: stage.optimiser_steps for stage in study.stages}
    assert updates["SASRec"] == updates["last event only"] == 20
    assert updates["most popular"] == 0
    (resolved,) = [r for r in EvidenceLog(tmp_path / "evidence.jsonl").records() if r["event"] == "device_for"]
    assert resolved["file"].endswith("sasrec.py")
    trial = comparison.trials["SASRec"][0]
    assert trial.losses[-1] < trial.losses[0]
    assert any("processor time" in note for note in study.notes)
