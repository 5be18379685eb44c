"""Models of torch-rechub and cornac, unchanged: no finding and the CPU's numbers, or the faults they really have."""

from __future__ import annotations

import pytest
import torch

from auto_research.rehearsal import rehearse

pytestmark = pytest.mark.slow

MLP = {"dims": [8], "dropout": 0.0}


def rechub(name: str) -> torch.nn.Module:
    """A tiny model of torch-rechub, by class name."""
    from torch_rechub.basic.features import DenseFeature, SequenceFeature, SparseFeature
    from torch_rechub.models import matching, multi_task, ranking

    user, item = SparseFeature("user", 20, 8), SparseFeature("item", 30, 8)
    fields = [user, item, SparseFeature("place", 7, 8)]
    dense = [DenseFeature("age")]
    history = [SequenceFeature("history", 30, 8, pooling="concat", shared_with="item")]
    pooled = [SequenceFeature("history", 30, 8, pooling="mean", shared_with="item")]
    negatives = [SequenceFeature("negatives", 30, 8, pooling="concat", shared_with="item")]
    attention = {"dims": [8], "activation": "dice", "use_softmax": False}
    towers = [{"dims": [8]}, {"dims": [8]}]
    both = ["classification", "classification"]
    makers = {
        "AFM": lambda: ranking.AFM(fields, 8),
        "AutoInt": lambda: ranking.AutoInt(fields, dense, 1, 2, mlp_params=MLP),
        "BST": lambda: ranking.BST([user], history, [item], {"dims": [8]}, nhead=2, dropout=0.0, max_seq_len=7),
        "DCN": lambda: ranking.DCN(fields, 2, {"dims": [8]}),
        "DCNv2": lambda: ranking.DCNv2(fields, 2, MLP),
        "DeepFM": lambda: ranking.DeepFM(fields + dense, fields, MLP),
        "DIN": lambda: ranking.DIN([user], history, [item], MLP, attention),
        "EDCN": lambda: ranking.EDCN(fields, 2, MLP),
        "FiBiNet": lambda: ranking.FiBiNet(fields, MLP),
        "WideDeep": lambda: ranking.WideDeep(fields, fields + dense, MLP),
        "AITM": lambda: multi_task.AITM(fields, 2, {"dims": [8]}, towers),
        "ESMM": lambda: multi_task.ESMM([user], [item], {"dims": [8]}, {"dims": [8]}),
        "MMOE": lambda: multi_task.MMOE(fields, both, 2, {"dims": [8]}, towers),
        "PLE": lambda: multi_task.PLE(fields, both, 1, 2, 1, {"dims": [8]}, towers),
        "SharedBottom": lambda: multi_task.SharedBottom(fields, both, {"dims": [8], "output_layer": False}, towers),
        "DSSM": lambda: matching.DSSM([user, *pooled], [item], MLP, MLP),
        "GRU4Rec": lambda: matching.GRU4Rec([user], history, [item], negatives, {"dims": [8]}),
        "MIND": lambda: matching.MIND([user], history, [item], negatives, 6, interest_num=2),
        "NARM": lambda: matching.NARM(history[0], 8, 0.0, 0.0),
        "STAMP": lambda: matching.STAMP(history[0], 0.05, 0.05),
        "YoutubeDNN": lambda: matching.YoutubeDNN([user, *pooled], [item], negatives, {"dims": [8]}),
        "ComirecSA": lambda: matching.ComirecSA([user], history, [item], negatives, interest_num=2),
    }
    return makers[name]()


RECHUB = (
    *("AFM", "AutoInt", "BST", "DCN", "DCNv2", "DeepFM", "DIN", "EDCN", "FiBiNet", "WideDeep"),
    *("AITM", "ESMM", "MMOE", "PLE", "SharedBottom"),
    *("DSSM", "GRU4Rec", "MIND", "NARM", "STAMP", "YoutubeDNN", "ComirecSA"),
)


def rechub_losses(name: str, device: str) -> list[float]:
    """Losses of three steps, as a training script of torch-rechub would take them."""
    torch.manual_seed(0)
    model = rechub(name).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batch = {
        "user": torch.randint(1, 20, (6,)),
        "item": torch.randint(1, 30, (6,)),
        "place": torch.randint(1, 7, (6,)),
        "age": torch.rand(6),
        "history": torch.randint(1, 30, (6, 6)),
        "negatives": torch.randint(1, 30, (6, 3)),
    }
    batch = {key: value.to(device) for key, value in batch.items()}
    losses = []
    for _ in range(3):
        out = model(batch)
        loss = sum((part.float() ** 2).mean() for part in (out if isinstance(out, tuple | list) else [out]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", RECHUB)
def test_models_of_torch_rechub(name):
    pytest.importorskip("torch_rechub", reason="torch-rechub is not installed")
    expected = rechub_losses(name, "cpu")
    with rehearse(keep_going=True) as report:
        found = rechub_losses(name, "cuda")
    assert [f.text() for f in report.findings] == []
    assert found == expected


def cornac_scores(name: str, gpu: bool) -> list[float]:
    """Scores of two users after a short `fit`, as a user of cornac would ask for them."""
    import numpy as np
    from cornac.data import Dataset, SequentialDataset
    from cornac.models import FPMC, GMF, MF, MLP, VAECF, BiVAECF, GRU4Rec, NeuMF, SASRec

    device = "cuda" if gpu else "cpu"
    random = np.random.RandomState(0)
    ratings = [(f"u{u}", f"i{i}", 1.0) for u in range(8) for i in random.choice(12, 5, replace=False)]
    quiet = {"verbose": False, "seed": 1}
    if name in ("SASRec", "FPMC", "GRU4Rec"):
        sessions = [(f"u{u}", f"s{u}", f"i{i}", t) for u in range(8) for t, i in enumerate(random.choice(12, 5))]
        data = SequentialDataset.from_usit(sessions)
        make = {"SASRec": SASRec, "FPMC": FPMC, "GRU4Rec": GRU4Rec}[name]
        model = make(n_epochs=2, batch_size=4, device=device, **quiet)
        model.fit(data)
        return np.asarray(model.score(0, [1, 2, 3])).tolist()
    data = Dataset.from_uir(ratings, seed=1)
    makers = {
        "MF": lambda: MF(k=4, backend="pytorch", max_iter=2, **quiet),
        "GMF": lambda: GMF(num_factors=4, num_epochs=2, backend="pytorch", **quiet),
        "MLP": lambda: MLP(layers=(8, 4), num_epochs=2, backend="pytorch", **quiet),
        "NeuMF": lambda: NeuMF(num_factors=4, layers=(8, 4), num_epochs=2, backend="pytorch", **quiet),
        "VAECF": lambda: VAECF(k=4, autoencoder_structure=[8], n_epochs=2, batch_size=4, use_gpu=gpu, **quiet),
        "BiVAECF": lambda: BiVAECF(k=4, encoder_structure=[8], n_epochs=2, batch_size=4, use_gpu=gpu, **quiet),
    }
    model = makers[name]()
    model.fit(data)
    return [float(x) for user in (0, 1) for x in np.asarray(model.score(user)).ravel()]


@pytest.mark.parametrize("name", ["MF", "GMF", "MLP", "NeuMF", "VAECF", "BiVAECF", "SASRec", "FPMC", "GRU4Rec"])
def test_models_of_cornac(name):
    pytest.importorskip("cornac", reason="cornac is not installed")
    expected = cornac_scores(name, gpu=False)
    with rehearse(keep_going=True) as report:
        found = cornac_scores(name, gpu=True)
    assert [f.text() for f in report.findings] == []
    assert report.summary["share"]["device_operations"] > 0
    assert found == expected
