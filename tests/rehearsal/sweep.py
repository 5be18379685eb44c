"""The operator sweep and the displacement sweep over torch's own operator test database.

``python tests/rehearsal/sweep.py`` prints what is unexplained; the slow tests assert that nothing is.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from auto_research.rehearsal import rehearse
from auto_research.rehearsal.tables import load_tables
from auto_research.rehearsal.tables.generate import operator_database

EXPLAINED = Path(__file__).with_name("explained.json")
EMULATED = load_tables().emulated_dtypes
DTYPES = (torch.float32, torch.int64, torch.bfloat16, torch.float16, torch.complex64, torch.bool)


def tree_map(function: Any, value: Any) -> Any:
    """Apply ``function`` to every tensor of a nested sample."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(tree_map(function, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(tree_map(function, item) for item in value)
    if isinstance(value, dict):
        return {key: tree_map(function, item) for key, item in value.items()}
    return value


def tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor of a nested value."""
    found: list[torch.Tensor] = []
    tree_map(lambda t: found.append(t) or t, value)
    return found


def fresh(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf copy with the same layout."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def to_card(tensor: torch.Tensor) -> torch.Tensor:
    """The sample's tensor on the card, as a leaf that keeps its strides where a copy can."""
    return tensor.detach().to("cuda").requires_grad_(tensor.requires_grad)


@dataclass
class Outcome:
    """What one sweep saw: counts, and per ``operator/dtype`` what went wrong."""

    passed: int = 0
    by_rule: Counter = field(default_factory=Counter)
    problems: dict[str, str] = field(default_factory=dict)


def _unwatched() -> None:
    """Stands for torch's search of the call stack for its own test method: most of a sweep's time, and never found."""


def _samples(op: Any, dtype: torch.dtype, limit: int, grad: bool) -> list[Any]:
    from torch.testing._internal import common_utils
    from torch.testing._internal.opinfo import core

    common_utils.extract_test_fn = core.extract_test_fn = _unwatched
    torch.manual_seed(0)
    found = []
    for sample in op.sample_inputs("cpu", dtype, requires_grad=grad):
        found.append(sample)
        if len(found) >= limit:
            break
    return found


def _run(op: Any, sample_input: Any, args: Any, kwargs: Any) -> Any:
    torch.manual_seed(1)
    return op(sample_input, *args, **kwargs)


def sweep_operator(op: Any, dtype: torch.dtype, limit: int, outcome: Outcome) -> None:
    """Every sample of one operator and dtype: values, devices and gradients on the card against the plain CPU."""
    key = f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}/{str(dtype).removeprefix('torch.')}"
    grad = dtype in (torch.float32, torch.complex64) and op.supports_autograd
    random = _is_random(op)
    try:
        samples = _samples(op, dtype, limit, grad)
    except Exception as error:
        outcome.problems[key] = f"sample: {type(error).__name__}: {error}"
        return
    for sample in samples:
        inputs = [tree_map(fresh, part) for part in (sample.input, sample.args, sample.kwargs)]
        try:
            expected = _run(op, *inputs)
        except Exception:
            if dtype in EMULATED.get(op.name, ()):
                _only_on_card(op, sample, key, outcome)
            continue  # the CPU cannot either
        want = tensors(expected)
        want_grads = _gradients(want, tensors(inputs)) if grad else None
        with rehearse(keep_going=True, check_memory=False) as report:
            try:
                moved = [tree_map(to_card, part) for part in (sample.input, sample.args, sample.kwargs)]
                if str(moved[2].get("device", "")) == "cpu":
                    moved[2]["device"] = "cuda"
                got = tensors(_run(op, *moved))
                got_grads = _gradients(got, tensors(moved)) if want_grads is not None else None
                problem = _compare(want, got, random) or _compare_gradients(want_grads, got_grads, random)
            except Exception as error:
                problem = f"{type(error).__name__}: {str(error)[:160]}"
            rules = sorted({f.rule for f in report.findings})
            first = report.findings[0].message[:120] if report.findings else ""
        if rules:
            outcome.by_rule.update(rules)
            outcome.problems[key] = f"{'+'.join(rules)}: {first}"
        elif problem:
            outcome.problems[key] = problem
        else:
            outcome.passed += 1


def _only_on_card(op: Any, sample: Any, key: str, outcome: Outcome) -> None:
    """A dtype that CUDA has and the CPU lacks must run, without a finding."""
    with rehearse(keep_going=True, check_memory=False) as report:
        try:
            _run(op, *(tree_map(to_card, part) for part in (sample.input, sample.args, sample.kwargs)))
            problem = ""
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error)[:160]}"
    if report.findings or problem:
        outcome.problems[key] = problem or report.findings[0].rule
    else:
        outcome.passed += 1


def _is_random(op: Any) -> bool:
    return any(
        word in op.name
        for word in (
            "rand",
            "normal",
            "bernoulli",
            "multinomial",
            "dropout",
            "empty",
            "uniform",
            "cauchy",
            "exponential",
            "geometric",
            "rrelu",
            "_new",
            "new_",
            "svd_lowrank",
            "pca_lowrank",
            "fractional_max_pool",
            "scaled_dot_product",
        )
    )


def _gradients(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor | None] | None:
    leaves = [t for t in inputs if t.requires_grad]
    roots = [t for t in outputs if t.requires_grad]
    if not leaves or not roots:
        return None
    total = sum((t.abs().sum() if t.is_complex() else t.sum()) for t in roots if t.layout is torch.strided)
    if not isinstance(total, torch.Tensor):
        return None
    total.backward()
    return [leaf.grad for leaf in leaves]


def _compare(want: list[torch.Tensor], got: list[torch.Tensor], random: bool) -> str:
    if len(want) != len(got):
        return f"{len(got)} results instead of {len(want)}"
    for expected, actual in zip(want, got, strict=True):
        if actual.device.type != "cuda":
            return f"result on {actual.device}"
        if expected.dtype != actual.dtype or expected.shape != actual.shape:
            return f"{actual.dtype} {tuple(actual.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
        if not random and not _equal(expected, actual):
            return "another value"
    return ""


def _compare_gradients(want: Any, got: Any, random: bool) -> str:
    if want is None or got is None:
        return ""
    for expected, actual in zip(want, got, strict=True):
        if (expected is None) != (actual is None):
            return "gradient missing on one side"
        if actual is not None and actual.device.type != "cuda":
            return f"gradient on {actual.device}"
        if actual is not None and not random and not _equal(expected, actual):
            return "another gradient"
    return ""


def _equal(expected: torch.Tensor, actual: torch.Tensor) -> bool:
    actual = actual.detach().cpu()
    expected = expected.detach()
    if expected.layout is not torch.strided:
        expected, actual = expected.to_dense(), actual.to_dense()
    return torch.allclose(expected, actual, equal_nan=True, rtol=1e-4, atol=1e-5) if expected.numel() else True


def sweep(limit: int, dtypes: Any = DTYPES, names: Any = None) -> Outcome:
    """The operator sweep."""
    outcome = Outcome()
    for op in operator_database():
        if names and op.name not in names:
            continue
        for dtype in dtypes:
            if dtype in op.dtypes or dtype in EMULATED.get(op.name, ()):
                sweep_operator(op, dtype, limit, outcome)
    return outcome


def displace(limit: int, names: Any = None) -> tuple[Counter, dict[str, str]]:
    """Leave one tensor of each float32 sample on the host: how many are flagged, and which are not."""
    counts: Counter = Counter()
    silent: dict[str, str] = {}
    for op in operator_database():
        if (names and op.name not in names) or torch.float32 not in op.dtypes:
            continue
        key = f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}"
        try:
            samples = _samples(op, torch.float32, limit, False)
        except Exception:
            continue
        for sample in samples:
            parts = (sample.input, sample.args, sample.kwargs)
            count = len(tensors(parts))
            if count < 2:
                continue
            for displaced in range(count):
                position = iter(range(count))
                shape: list[tuple[int, ...]] = []

                def place(
                    t: torch.Tensor, position: Any = position, displaced: int = displaced, shape: Any = shape
                ) -> torch.Tensor:
                    if next(position) == displaced:
                        shape.append(tuple(t.shape))
                        return t.detach().clone()
                    return t.detach().to("cuda")

                with rehearse(keep_going=True, check_memory=False) as report:
                    placed = [tree_map(place, part) for part in parts]
                    try:
                        _run(op, *placed)
                    except Exception as error:
                        counts["raised"] += 1
                        if not report.findings:
                            silent.setdefault(f"{key}#{displaced}", f"raised {type(error).__name__}: {str(error)[:90]}")
                        continue
                kind = "0-dim" if shape[0] == () else "n-dim"
                rules = {f.rule for f in report.findings} & {"DEV-1", "DEV-2", "RNN-3"}
                counts[f"{kind} {'flagged' if rules else 'legal'}"] += 1
                if kind == "n-dim" and not rules:
                    silent.setdefault(f"{key}#{displaced}", f"silent {shape[0]}")
    return counts, silent


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    limit = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    if sys.argv[1] == "operators":
        result = sweep(limit, names=sys.argv[3:])
        print(result.passed, "samples pass;", dict(result.by_rule))
        print(json.dumps(result.problems, indent=0))
    else:
        found, missing = displace(limit, names=sys.argv[3:])
        print(dict(found))
        print(json.dumps(missing, indent=0))
