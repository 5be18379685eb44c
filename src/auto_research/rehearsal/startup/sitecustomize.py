"""Found by Python at start-up when a rehearsal follows its children: installs the card once torch is imported."""

import importlib.abc
import importlib.util
import os
import sys
from typing import Any


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Lets ``import torch`` finish, then starts the rehearsal of this process."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            from auto_research.rehearsal import children

            children.start()

        loader.exec_module = exec_module
        return spec


if "AUTO_RESEARCH_REHEARSAL" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())


def _run_hidden_sitecustomize() -> None:
    """This file hides any ``sitecustomize`` further down the path: run that one too."""
    here = os.path.dirname(os.path.abspath(__file__))
    for entry in sys.path:
        candidate = os.path.join(entry, "sitecustomize.py")
        if entry and os.path.abspath(entry) != here and os.path.isfile(candidate):
            spec = importlib.util.spec_from_file_location("hidden_sitecustomize", candidate)
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module(importlib.util.module_from_spec(spec))
            return


_run_hidden_sitecustomize()
