"""Diagnoses read off the messages that torch, numpy and Transformers really write."""

from __future__ import annotations

import json
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from auto_research.audit.diagnose import Diagnosis, Failure, diagnose
from auto_research.runtime.errors import DeviceAbsent, MissingCheckpoint, MissingData, UserError
from auto_research.tasks.base import NonFiniteLoss

BF16 = torch.bfloat16


def failure_of(error: BaseException, **known: Any) -> Failure:
    """What an isolated process reports about an exception."""
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__]
    text = "".join(traceback.format_exception(error))
    return Failure(key="paper", exception=names[0], ancestors=names, message=str(error), log_tail=text, **known)


def provoked(action: Callable[[], object], **known: Any) -> Diagnosis:
    try:
        action()
    except Exception as error:
        found = diagnose(failure_of(error, **known))
    else:
        raise AssertionError("nothing was raised")
    assert found.next_step.endswith(".")
    return found


def meta(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="meta")


DEVICE = {
    "add": lambda: torch.ones(2) + meta(2),
    "cat": lambda: torch.cat([torch.ones(2), meta(2)]),
    "layer_norm": lambda: nn.functional.layer_norm(torch.ones(2, 2), (2,), meta(2), meta(2)),
    "numpy": lambda: meta(2).numpy(),
    "attention": lambda: nn.functional.scaled_dot_product_attention(meta(1, 2, 2), *[torch.ones(1, 2, 2)] * 2),
    "lengths": lambda: nn.utils.rnn.pack_padded_sequence(torch.ones(2, 1, 1), meta(1).long()),
}
DTYPE = {
    "linear": lambda: nn.Linear(2, 2)(torch.ones(2, 2, dtype=BF16)),
    "matmul": lambda: torch.ones(2, 2) @ torch.ones(2, 2, dtype=BF16),
    "convolution": lambda: nn.Conv1d(2, 2, 1)(torch.ones(1, 2, 2, dtype=BF16)),
    "layer_norm": lambda: nn.LayerNorm(2, dtype=BF16)(torch.ones(2, 2)),
    "result type": lambda: torch.zeros(2, dtype=torch.long).add_(0.5),
    "attention": lambda: nn.functional.scaled_dot_product_attention(
        torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2, dtype=BF16), torch.ones(1, 1, 2, 2)
    ),
    "numpy": lambda: torch.ones(2, dtype=BF16).numpy(),
    "index_put": lambda: torch.ones(3).index_put_((torch.tensor([0]),), torch.ones(1, dtype=BF16)),
    "scatter": lambda: torch.ones(3).scatter_(0, torch.tensor([0]), torch.ones(1, dtype=BF16)),
    "recurrent": lambda: nn.GRU(2, 2)(torch.ones(1, 1, 2), torch.ones(1, 1, 2, dtype=BF16)),
    "recurrent input": lambda: nn.LSTM(2, 2)(torch.ones(1, 1, 2, dtype=BF16)),
    "index_add": lambda: torch.ones(3).index_add_(0, torch.tensor([0]), torch.ones(1, dtype=BF16)),
    "masked_scatter": lambda: torch.ones(1).masked_scatter_(torch.tensor([True]), torch.ones(1, dtype=BF16)),
    "lerp": lambda: torch.ones(2).lerp(torch.ones(2, dtype=BF16), 0.5),
    "dot": lambda: torch.dot(torch.ones(2), torch.ones(2, dtype=BF16)),
    "baddbmm": lambda: torch.baddbmm(torch.ones(1, 1, 1), *[torch.ones(1, 1, 1, dtype=BF16)] * 2),
    "attention mask": lambda: nn.functional.scaled_dot_product_attention(
        *[torch.ones(1, 1, 2, 2)] * 3, attn_mask=torch.ones(2, 2, dtype=torch.float64)
    ),
    "target": lambda: nn.functional.cross_entropy(torch.ones(2, 3), torch.tensor([0, 1], dtype=torch.int32)),
    "ids": lambda: nn.Embedding(3, 2)(torch.tensor([0.5])),
    "mean of integers": lambda: torch.tensor([1, 2]).mean(),
    "low precision": lambda: torch.linalg.inv(torch.eye(2, dtype=torch.half)),
    "least squares": lambda: torch.linalg.lstsq(*[torch.eye(2, dtype=BF16)] * 2),
    "condition": lambda: torch.where(torch.tensor([1, 0]), torch.ones(2), torch.zeros(2)),
    "float kernel": lambda: torch.ones(1) & torch.ones(1, dtype=torch.long),
    "integer kernel": lambda: torch.ones(2, 2, dtype=torch.long).softmax(0),
}
INDEX = {
    "embedding": lambda: nn.functional.embedding(torch.tensor([5]), torch.ones(3, 2)),
    "target": lambda: nn.CrossEntropyLoss()(torch.ones(2, 3), torch.tensor([5, 0])),
    "gather": lambda: torch.ones(3).gather(0, torch.tensor([7])),
    "index": lambda: torch.ones(3)[torch.tensor([7])],
    "one_hot": lambda: nn.functional.one_hot(torch.tensor([7]), 3),
}
MATRIX = {
    "cholesky": lambda: torch.linalg.cholesky(-torch.eye(2)),
    "inverse": lambda: torch.linalg.inv(torch.zeros(2, 2)),
}


def _not_finite_gradient() -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.full((1,), float("nan"))
    nn.utils.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)


def _raise(error: BaseException) -> None:
    raise error


NOT_FINITE = {
    "clipping": _not_finite_gradient,
    "shared loop": lambda: _raise(NonFiniteLoss("the loss is not finite at step 3 of 20; lower the learning rate")),
    "anomaly mode": lambda: _raise(RuntimeError("Function 'SqrtBackward0' returned nan values in its 0th output.")),
}


def _cases(kind: str, actions: dict[str, Callable[[], object]]) -> list[Any]:
    return [pytest.param(kind, action, id=f"{kind}-{name}") for name, action in actions.items()]


@pytest.mark.parametrize(
    ("kind", "action"),
    [
        *_cases("device_mix", DEVICE),
        *_cases("dtype_boundary", DTYPE),
        *_cases("index_out_of_range", INDEX),
        *_cases("linear_algebra", MATRIX),
        *_cases("non_finite_loss", NOT_FINITE),
        *_cases("out_of_memory", {"torch": lambda: torch.empty(10**15), "numpy": lambda: _huge_array()}),
        *_cases("device_absent", {"cuda": lambda: _raise(AssertionError("Torch not compiled with CUDA enabled"))}),
        *_cases("missing_package", {"import": lambda: __import__("no_such_package_here")}),
        *_cases("missing_data", {"file": lambda: Path("/no/such/u.data").read_text(), "polars": lambda: _read_csv()}),
        *_cases("missing_checkpoint", {"safetensors": lambda: _read_weights()}),
    ],
)
def test_errors_that_a_cpu_can_provoke(kind: str, action: Callable[[], object]) -> None:
    assert provoked(action).kind == kind


def _huge_array() -> None:
    import numpy as np

    np.ones((10**7, 10**7))


def _read_csv() -> None:
    import polars

    polars.read_csv("/no/such/ratings.csv")


def _read_weights() -> None:
    from safetensors.torch import load_file

    load_file("/no/such/model.safetensors")


# Texts of CUDA, MPS and other builds, as their sources and users' reports have them.
KNOWN_TEXTS = [
    (
        "device_mix",
        "Expected all tensors to be on the same device, but got mat2 is on cpu, different from other tensors on cuda:0 "
        "(when checking argument in method wrapper_CUDA_mm)",
    ),
    ("device_mix", "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"),
    ("device_mix", "indices should be either on cpu or on the same device as the indexed tensor (cpu)"),
    (
        "device_mix",
        "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first.",
    ),
    ("device_mix", "Expected a 'cuda' device type for generator but found 'cpu'"),
    (
        "device_mix",
        "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same",
    ),
    ("device_mix", "Input type (CUDABFloat16Type) and weight type (CPUBFloat16Type) should be the same"),
    ("device_mix", "Input type (MPSFloatType) and weight type (torch.FloatTensor) should be the same"),
    ("device_mix", "expected self and mask to be on the same device, but got mask on cpu and self on cuda:0"),
    ("device_mix", "Input and hidden tensors are not at the same device, found input tensor at cuda:0 and hidden"),
    ("device_mix", "Placeholder storage has not been allocated on MPS device!"),
    ("device_absent", "CUDA error: invalid device ordinal"),
    ("device_absent", "Could not run 'aten::empty.memory_format' with arguments from the 'MPS' backend."),
    ("dtype_boundary", "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."),
    ("device_absent", "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"),
    ("dtype_boundary", "expected mat1 and mat2 to have the same dtype, but got: float != c10::BFloat16"),
    ("dtype_boundary", "expected scalar type BFloat16 but found Float"),
    ("dtype_boundary", "\"addmm_cuda\" not implemented for 'Long'"),
    ("dtype_boundary", "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'"),
    (
        "dtype_boundary",
        "Input type (torch.cuda.FloatTensor) and weight type (torch.cuda.BFloat16Tensor) should be the same",
    ),
    ("dtype_boundary", "invalid dtype for bias - should match query's dtype"),
    ("non_contiguous_state", "rnn: hx is not contiguous"),
    (
        "non_contiguous_state",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    ),
    (
        "out_of_memory",
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB of which 1.2 GiB is",
    ),
    ("out_of_memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ("out_of_memory", "MPS backend out of memory (MPS allocated: 17.9 GB, other allocations: 1 GB, max: 18.1 GB)."),
    (
        "lapack",
        "Calling torch.linalg.cholesky on a CPU tensor requires compiling PyTorch with LAPACK. Please use PyTorch "
        "built with LAPACK support.",
    ),
    ("lapack", "cholesky: LAPACK library not found in compilation"),
    ("index_out_of_range", "CUDA error: device-side assert triggered"),
    ("disk_full", "[Errno 28] No space left on device: '/cache/x'"),
]


@pytest.mark.parametrize(("kind", "text"), KNOWN_TEXTS)
def test_texts_of_other_machines(kind: str, text: str) -> None:
    found = diagnose(Failure(key="paper", exception="builtins.RuntimeError", message=text))
    assert found.kind == kind
    assert found.evidence in " ".join(text.split())


def test_transformers_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants
    import transformers
    from transformers import AutoModel, BertConfig, BertModel, TrainingArguments

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    found = provoked(lambda: AutoModel.from_pretrained(tmp_path))
    assert found.kind == "config_without_model_type"
    assert "BertModel" in found.next_step
    missing = provoked(lambda: AutoModel.from_pretrained("nobody/nothing-here"), checkpoints=["minilm", "micro"])
    assert missing.kind == "missing_checkpoint"
    assert "auto-research prepare minilm" in missing.next_step
    for absent in ("/no/such/folder", "no/such/folder", "./no-such-folder"):
        assert provoked(lambda name=absent: AutoModel.from_pretrained(name)).kind == "missing_checkpoint"
    tiny = BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9, model_type="bert"
    )
    tiny.save_pretrained(tmp_path)
    assert provoked(lambda: AutoModel.from_pretrained(tmp_path)).kind == "missing_checkpoint"  # no weights
    model = BertModel(tiny)
    ids = torch.tensor([[1]])
    for action in (
        lambda: TrainingArguments(no_cuda=True),
        lambda: transformers.NoSuchClass,
        lambda: model(ids, return_dict=False).last_hidden_state,
        lambda: model.config.no_such_field,
        lambda: __import__("transformers", fromlist=["AdamW"]).AdamW,
        lambda: exec("from transformers import AdamW"),
        lambda: exec("import transformers.models.bert.no_such_module"),
        lambda: model(ids, attention_mask="wrong"),
    ):
        assert provoked(action).kind == "transformers_api"


def test_an_adapters_own_attribute_error_is_not_blamed_on_a_library() -> None:
    class RankModel(nn.Module):
        pass

    assert provoked(lambda: RankModel().no_such_field).kind == "unknown"


def test_missing_things_name_the_command_of_their_message() -> None:
    error = MissingData("ml-1m", "Data set ml-1m is not here; fetch it with `auto-research prepare ml-1m`.")
    found = diagnose(failure_of(error, datasets=["ml-latest-small"]))
    assert (found.kind, found.summary) == ("missing_data", str(error))
    assert "`auto-research prepare ml-1m`" in found.next_step
    error2 = MissingCheckpoint("minilm", "minilm is not here; run `auto-research prepare minilm`.")
    assert diagnose(failure_of(error2)).kind == "missing_checkpoint"
    absent = DeviceAbsent("Device cuda is absent: no driver.")
    assert diagnose(failure_of(absent)).kind == "device_absent"
    bad = diagnose(failure_of(UserError("the catalogue has 3 items and needs 10; use a larger data set.")))
    assert (bad.kind, bad.summary) == ("bad_input", "the catalogue has 3 items and needs 10; use a larger data set.")


def test_the_exception_counts_more_than_what_was_printed_before() -> None:
    log = "retrying after: CUDA out of memory. Tried to allocate 2 GiB\nRuntimeError: rnn: hx is not contiguous\n"
    failure = Failure(key="p", exception="builtins.RuntimeError", message="rnn: hx is not contiguous", log_tail=log)
    assert diagnose(failure).kind == "non_contiguous_state"


def test_a_message_that_hides_its_cause_is_looked_up_in_the_traceback() -> None:
    def hiding() -> None:
        try:
            torch.ones(2, 2) @ torch.ones(2, 2, dtype=BF16)
        except RuntimeError as cause:
            raise RuntimeError("training failed") from cause

    assert provoked(hiding).kind == "dtype_boundary"


def test_a_busy_smoke_run_is_told_from_a_hang() -> None:
    known: dict[str, Any] = {
        "key": "recap",
        "timed_out_after": 60.0,
        "stage": "pretrain",
        "overrides": ["AUTO_RESEARCH_RECAP_PRETRAIN_STEPS"],
    }
    busy = diagnose(Failure(**known, silent_seconds=2.0))
    assert busy.kind == "smoke_budget_exceeded"
    assert "'pretrain'" in busy.summary
    assert "AUTO_RESEARCH_RECAP_PRETRAIN_STEPS" in busy.next_step
    hang = diagnose(Failure(**known, silent_seconds=55.0))
    assert hang.kind == "timeout"
    assert "'pretrain'" in hang.summary
    assert diagnose(Failure(**known, budget="standard", silent_seconds=2.0)).kind == "timeout"
    early = diagnose(Failure(key="x", timed_out_after=5.0, silent_seconds=4.0))
    assert "before its first stage" in early.summary


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM])
def test_signals_are_named(number: signal.Signals) -> None:
    found = diagnose(Failure(key="x", signal=int(number), stage="train"))
    assert found.kind == "killed_by_signal"
    assert number.name in found.summary
    assert "'train'" in found.summary


def test_what_fits_nothing_is_unknown_and_says_where_to_look() -> None:
    found = provoked(lambda: _raise(ValueError("planted")))
    assert found.kind == "unknown"
    assert "ValueError: planted" in found.summary
    assert "auto-research reproduce paper" in found.next_step
    assert "exit code 3" in diagnose(Failure(key="x", exit_code=3)).summary
