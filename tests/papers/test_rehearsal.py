"""Every trainable model of every paper trains on the virtual accelerator without a finding."""

import pytest
import torch

from auto_research.papers._registry import adapters
from auto_research.rehearsal import rehearse
from auto_research.runtime.device import seed_everything

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("key", list(adapters()))
def test_training_and_scoring_on_the_virtual_accelerator_has_no_finding(key):
    module = adapters()[key].load_module()
    for specimen in module.specimens() if hasattr(module, "specimens") else []:
        with rehearse(keep_going=True) as report:
            seed_everything(0)
            model = specimen.build().to("cuda")
            batch = {name: value.to("cuda") for name, value in specimen.batch.items()}
            optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
            model.train()
            for step in range(3):
                optimiser.zero_grad()
                model.loss(batch).backward()
                optimiser.step()
                if hasattr(model, "on_step_end"):
                    model.on_step_end(step)
            model.eval()
            with torch.no_grad():
                assert torch.isfinite(specimen.scores(model, batch)).all()
        assert not report.findings, f"{specimen.name}: {[str(f) for f in report.findings]}"
