"""What all workflows have in common before any of them runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys

from auto_research.evolve.workflows import WORKFLOWS, workflow

WITHOUT_TORCH = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Absent())
from auto_research.evolve.workflows import WORKFLOWS, workflow
print(json.dumps([workflow(key).key for key in WORKFLOWS]))
"""


def test_all_workflows_can_be_listed_where_torch_is_absent():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == list(WORKFLOWS)


def test_models_and_data_have_names_that_an_option_takes():
    for key in WORKFLOWS:
        found = workflow(key)
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", found.model), found.model
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", found.dataset), found.dataset
