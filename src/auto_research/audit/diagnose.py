"""From what a failed run left behind to what to do next.

A diagnosis is read off the exception's class and message first, and only then off the end of the log, so that an
error that the adapter handled and printed does not hide the one that ended it.
"""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict

Kind = Literal[
    "missing_data",
    "missing_checkpoint",
    "missing_package",
    "device_absent",
    "device_mix",
    "dtype_boundary",
    "out_of_memory",
    "lapack",
    "linear_algebra",
    "config_without_model_type",
    "transformers_api",
    "non_contiguous_state",
    "non_finite_loss",
    "index_out_of_range",
    "disk_full",
    "smoke_budget_exceeded",
    "timeout",
    "killed_by_signal",
    "bad_input",
    "unknown",
]

TITLES: dict[Kind, str] = {
    "missing_data": "Missing data",
    "missing_checkpoint": "Missing checkpoint",
    "missing_package": "Missing package",
    "device_absent": "Device absent",
    "device_mix": "Tensors on different devices",
    "dtype_boundary": "Data types meet without a conversion",
    "out_of_memory": "Out of memory",
    "lapack": "PyTorch without LAPACK",
    "linear_algebra": "Singular or indefinite matrix",
    "config_without_model_type": "Checkpoint config without model_type",
    "transformers_api": "Transformers API",
    "non_contiguous_state": "Non-contiguous cuDNN state",
    "non_finite_loss": "Loss is not finite",
    "index_out_of_range": "Index out of range",
    "disk_full": "Disk full",
    "smoke_budget_exceeded": "Smoke budget exceeded",
    "timeout": "Timeout",
    "killed_by_signal": "Killed by a signal",
    "bad_input": "Bad input",
    "unknown": "Unknown",
}


class Diagnosis(BaseModel):
    """What went wrong, and the next step.

    Attributes:
        summary: one sentence.
        evidence: the text that it was read from.
    """

    model_config = ConfigDict(extra="forbid")

    kind: Kind
    summary: str
    next_step: str
    evidence: str = ""

    @property
    def title(self) -> str:
        """The kind in words."""
        return TITLES[self.kind]


@dataclass(frozen=True)
class Failure:
    """What is known about a run that did not succeed.

    Attributes:
        exception: class of the exception, with its module when known; empty when none was reported.
        log_tail: the end of standard output and error, with the traceback.
        ancestors: classes that the exception derives from.
        timed_out_after: the deadline in seconds, if it ended the run.
        silent_seconds: how long nothing was written before the deadline.
        out_of_memory: whether the system reported the lack of memory, whatever the text says.
        signal: number of the signal that ended the process, if one did and it was not the deadline's.
        stage: the stage that was under way.
        overrides: documented variables that shorten the adapter.
        datasets, checkpoints: what the card names, first choice first.
    """

    key: str
    exception: str = ""
    message: str = ""
    log_tail: str = ""
    ancestors: Sequence[str] = ()
    timed_out_after: float | None = None
    silent_seconds: float = 0.0
    out_of_memory: bool = False
    signal: int | None = None
    exit_code: int | None = None
    stage: str | None = None
    budget: str = "smoke"
    overrides: Sequence[str] = ()
    datasets: Sequence[str] = ()
    checkpoints: Sequence[str] = field(default_factory=tuple)

    @property
    def name(self) -> str:
        """Class of the exception without its module."""
        return self.exception.rpartition(".")[2]


@dataclass(frozen=True)
class Rule:
    """One recognisable fault: the classes or the texts that show it."""

    kind: Kind
    summary: str
    next_step: str
    classes: frozenset[str] = frozenset()
    pattern: re.Pattern[str] | None = None


def _rule(kind: Kind, summary: str, next_step: str, *patterns: str, classes: Sequence[str] = ()) -> Rule:
    joined = re.compile("|".join(f"(?:{p})" for p in patterns), re.IGNORECASE) if patterns else None
    return Rule(kind, summary, next_step, frozenset(classes), joined)


# Classes of Transformers, TRL and PEFT, told from an adapter's own by their families of names.
_LIBRARY_CLASS = (
    r"(?:BatchEncoding|DynamicCache|GenerationConfig|TrainingArguments|PreTrained\w+|PretrainedConfig|Auto[A-Z]\w+|"
    r"BaseModelOutput\w*|CausalLMOutput\w*|(?:SFT|DPO|ORPO|CPO|KTO|GRPO|RLOO|Reward)(?:Trainer|Config)|Peft\w+|Lora\w+|"
    r"(?:Bert|Roberta|Llama|Gemma|Qwen|Mistral|Phi|GPT|T5|Idefics|SmolVLM|SmolLM)\w*)"
)

_DATA_FILE = r"\.(?:csv|tsv|jsonl?|txt|gz|xz|zip|tar|parquet|arrow|feather|npy|npz|h5|hdf5|dat|item|data|base)"
_WEIGHTS_FILE = r"\.(?:safetensors|gguf|pt|pth|bin|ckpt)"
# How a convolution's message names the type of a tensor: on an accelerator, and on the host.
_ON_ACCELERATOR = r"(?:torch\.(?:cuda|mps)\.\w+|(?:CUDA|MPS)\w+)"
_ON_HOST = r"(?:torch\.(?!cuda|mps)\w+|CPU\w+)"

# The first rule that fits wins: special texts before the general ones that contain them.
RULES: tuple[Rule, ...] = (
    _rule(
        "missing_checkpoint",
        "A checkpoint that it needs is not on this machine.",
        "Run `auto-research prepare {checkpoint}` while online, then run this adapter again.",
        r"couldn't find them in the cached files",
        r"is not a local folder and is not a valid model identifier",
        r"outgoing traffic has been disabled",
        r"Repo id must (?:be in the form|use alphanumeric chars)",  # said of a folder that is not there
        rf"No such file or directory: '?[^']*{_WEIGHTS_FILE}\b",
        r"Cannot find an appropriate cached snapshot folder",
        r"Error no file named .* found in directory",
        r"does not appear to have a file named (?:config\.json|pytorch_model|model\.safetensors)",
        classes=("MissingCheckpoint", "LocalEntryNotFoundError", "OfflineModeIsEnabled", "RepositoryNotFoundError"),
    ),
    _rule(
        "missing_data",
        "A data set that it needs is not on this machine.",
        "Run `auto-research prepare {dataset}` or point --dataset-dir at the folder that holds it.",
        rf"No such file or directory: '[^']*{_DATA_FILE}'",
        rf"No such file or directory \(os error 2\): \S+{_DATA_FILE}\b",  # polars
        r"Couldn't find (?:a dataset script|any data file|file at)",
        r"Couldn't reach '[^']*' on the Hub",
        rf"Unable to find '[^']*{_DATA_FILE}'",
        classes=("MissingData", "DatasetNotFoundError", "DataFilesNotFoundError"),
    ),
    _rule(
        "disk_full",
        "The disk is full.",
        "Free space on the disk that holds the caches and runs/, then continue with --resume.",
        r"No space left on device",
        r"disk quota exceeded",
    ),
    _rule(
        "device_absent",
        "The requested device is not on this machine.",
        "Choose another --device, or run `auto-research doctor` to see what this torch build offers.",
        r"Torch not compiled with CUDA enabled",
        r"module 'torch\._C' has no attribute '_cuda_",
        r"without ATen_cuda library",
        r"Could not run 'aten::empty[\w.]*' with arguments from the '(?:CUDA|MPS)' backend",
        r"Found no NVIDIA driver on your system",
        r"No CUDA GPUs are available",
        r"invalid device ordinal",
        classes=("DeviceAbsent",),
    ),
    _rule(
        "out_of_memory",
        "It ran out of memory.",
        "Lower the batch size or the sizes that the card documents as overrides, or use a larger device, and run "
        "nothing else on it.",
        r"CUDA out of memory",
        r"CUDA error: out of memory",
        r"MPS backend out of memory",
        r"DefaultCPUAllocator: (?:can't allocate|not enough) memory",
        r"CUBLAS_STATUS_ALLOC_FAILED",
        r"std::bad_alloc",
        r"Unable to allocate [\d.]+ [KMGTP]?i?B for an array",
        r"Cannot allocate memory",
        classes=("OutOfMemoryError", "MemoryError", "_ArrayMemoryError"),
    ),
    _rule(
        "lapack",
        "This PyTorch build has no LAPACK on the CPU.",
        "Install a PyTorch build with LAPACK, or let this step fall back for exactly this error.",
        r"requires compiling PyTorch with LAPACK",
        r"LAPACK (?:library )?not found in compilation",
        r"PyTorch built with LAPACK support",
    ),
    _rule(
        "linear_algebra",
        "A matrix is singular, not positive-definite, or its decomposition did not converge.",
        "Add a small ridge to the diagonal or compute the decomposition in float64.",
        r"is not positive-definite",
        r"singular (?:input )?matrix|matrix is singular|input matrix is singular",
        r"algorithm failed to converge",
        classes=("LinAlgError", "_LinAlgError"),
    ),
    _rule(
        "non_contiguous_state",
        "A recurrent layer received a state or input that is not contiguous, which cuDNN refuses.",
        "Call .contiguous() on the hidden state (and the input) before the recurrent layer.",
        r"rnn: [hc]x is not contiguous",
        r"CUDNN_STATUS_NOT_SUPPORTED.*non-contiguous",
    ),
    _rule(
        "config_without_model_type",
        "The checkpoint's config.json has no `model_type`, so that the Auto classes cannot choose a class.",
        "Load it with the explicit model and tokenizer classes that its paper names (for example BertModel and "
        "BertTokenizer).",
        r"Should have a [`'\"]?model_type[`'\"]? key in its config\.json",
    ),
    _rule(
        "device_mix",
        "One operation received tensors of different devices.",
        "Create the tensor named in the message with device=, register it as a buffer, or move it with .to(device).",
        r"Expected all tensors to be on the same device",
        r"can't convert \S+ device type tensor to numpy",
        r"indices should be either on \w+ or on the same device",
        r"Expected a '\w+' device type for generator but found '\w+'",
        r"Input and (?:hidden|parameter) tensors are not at the same device",
        r"'lengths' argument should be a 1D CPU int64 tensor",
        rf"Input type \({_ON_ACCELERATOR}\) and \w+ type \({_ON_HOST}\)",
        rf"Input type \({_ON_HOST}\) and \w+ type \({_ON_ACCELERATOR}\)",
        r"(?:expected|must) .*to be on the same device|must be on the same device",
        r"to have the same device type, but got",
        r"Attempting to deserialize object on a? ?CUDA device",
        r"Placeholder storage has not been allocated on MPS device",
        r"cannot pin 'torch\.cuda",
        r"Tensor on device \S+ is not on the expected device",
        r"Tensor for argument #?\d* ?'?\w*'? is on (?:cpu|CPU),? but expected (?:it|them) to be on (?:GPU|cuda)",
    ),
    _rule(
        "dtype_boundary",
        "Two parts of the model meet in different data types, or the device has no kernel for this type.",
        "Convert explicitly at the checkpoint/head boundary (auto_research.checkpoints.boundary), or cast before the "
        "operation.",
        r"(?:must|should|to) have (?:the )?same (?:dtypes?|scalar type)",
        r"[Ii]nput dtypes must be the same",
        r"RNN input dtype \(\S+\) does not match weight dtype",
        r"expected scalar type \w+ but found \w+",
        r"expected (?:\w+ )?dtype (?:to be )?[\w: `]+,? but got",
        r"Expected attn_mask dtype to be",
        r"Expected tensor for argument .* (?:scalar types: |to have the same type as)",
        r"Input dtype must be (?:either )?a? ?floating point",
        r"only supports floating-point dtypes",
        r"Low precision dtypes not supported",
        r"doesn't handle types other than float and double",
        r"expected condition to be a boolean tensor",
        r"tensors used as indices must be long, int, byte or bool",
        r"MPS framework doesn't support float64",
        r"Input type \([\w:.]+\) and (?:bias|weight) type \([\w:.]+\) should be the same",
        r"dtypes? (?:of source|match for the source)|source and destination dtypes match",
        r"can't be cast to the desired output type",
        r"mixed dtype \((?:CPU|CUDA)\)",
        r"Expected self\.dtype to be equal to src\.dtype",
        r"not implemented for '(?:Half|BFloat16|Float\w*|Double|Long|Int|Short|Char|Byte|Bool)'",
        r"unsupported ScalarType BFloat16",
        r"invalid dtype for bias",
        r"Found dtype \w+ but expected \w+",
    ),
    _rule(
        "non_finite_loss",
        "The loss became infinite or not a number.",
        "Lower the learning rate, or look for a division by zero, a log of zero or an overflow in half precision.",
        r"loss is not finite|non-finite loss|loss (?:is|became|was) nan",
        r"returned nan values in its \d+th output",
        r"gradients? .* non-finite",
        r"The total norm of order .* is non-finite",
        classes=("NonFiniteLoss",),
    ),
    _rule(
        "index_out_of_range",
        "An id lies outside of its table.",
        "Compare the largest id with the size of the embedding or target table; on a GPU, run once with --device cpu "
        "for the exact place.",
        r"index out of range in self",
        r"device-side assert triggered",
        r"index \d+ is out of bounds for dimension",
        r"Target \d+ is out of bounds",
        r"Class values must be smaller than num_classes",
    ),
    _rule(
        "transformers_api",
        "The installed Transformers (or TRL, PEFT) has another interface than this code expects.",
        "Compare the call with the installed version (`auto-research doctor` prints it) and read outputs in a way "
        "that holds for both.",
        r"cannot import name '\w+' from '(?:transformers|trl|peft|tokenizers|accelerate)",
        r"No module named '(?:transformers|trl|peft)\.",
        r"module '?(?:transformers|trl|peft)[\w.]*'? has no attribute",
        r"has model type [`'\"]?\w+[`'\"]? but Transformers does not recognize",
        r"'(?:tuple|list|Tensor)' object has no attribute "
        r"'(?:last_hidden_state|logits|hidden_states|pooler_output|loss|sequences|input_ids)'",
        rf"'{_LIBRARY_CLASS}' object has no attribute",
        rf"{_LIBRARY_CLASS}\.\w+\(\) got an unexpected keyword argument",
        r"The following `model_kwargs` are not used by the model",
        r"Could not import module '\w+'\. Are this object's requirements defined correctly",
    ),
    _rule(
        "missing_package",
        "A Python package that it imports is not installed.",
        "Install the package named in the message, or the extra of auto-research that brings it.",
        r"No module named",
        r"ModuleNotFoundError",
        r"requires the \S+ library but it was not found",
        r"the package for \S+ doesn't seem to be installed",
        r"requires \S+: `pip install",
    ),
)

_TRANSFORMERS_FRAME = re.compile(r'File "[^"]*/(?:transformers|trl|peft)/[^"]*"')
_API_ERRORS = frozenset(("TypeError", "AttributeError", "ImportError", "KeyError"))


def diagnose(failure: Failure) -> Diagnosis:
    """The diagnosis of a failed run; `unknown` when nothing fits."""
    if failure.timed_out_after is not None:
        return _timeout(failure)
    if failure.out_of_memory:
        memory = next(rule for rule in RULES if rule.kind == "out_of_memory")
        return _apply(memory, failure, f"{failure.name}: {failure.message}" if failure.name else failure.message)
    named = {failure.name, *(a.rpartition(".")[2] for a in failure.ancestors)} - {""}
    for rule in RULES:
        if named & rule.classes:
            return _apply(rule, failure, f"{failure.name}: {failure.message}")
    found = _by_text(failure, failure.message)
    if found is not None:
        return found
    if failure.name in _API_ERRORS and _last_library_frame(failure.log_tail):
        api = next(rule for rule in RULES if rule.kind == "transformers_api")
        return _apply(api, failure, f"{failure.name}: {failure.message}")
    if "UserError" in named:
        return Diagnosis(
            kind="bad_input",
            summary=failure.message,
            next_step="Do what the message says, then run this adapter again.",
            evidence=failure.name,
        )
    # A message that says nothing itself may hide its cause: look at the traceback, latest line first.
    for line in reversed(failure.log_tail.splitlines()):
        found = _by_text(failure, line)
        if found is not None:
            return found
    if failure.signal is not None:
        return _signal(failure)
    what = f"{failure.name}: {failure.message}" if failure.name else f"exit code {failure.exit_code}"
    return Diagnosis(
        kind="unknown",
        summary=f"It ended with {_short(what)}",
        next_step=f"Read the end of its log, then run `auto-research reproduce {failure.key} --budget "
        f"{failure.budget}` to see the error alone.",
        evidence=_short(what),
    )


def _by_text(failure: Failure, text: str) -> Diagnosis | None:
    for rule in RULES:
        if rule.pattern is not None and (match := rule.pattern.search(text)):
            line = next((line for line in text.splitlines() if match[0].splitlines()[0] in line), match[0])
            return _apply(rule, failure, line)
    return None


def _apply(rule: Rule, failure: Failure, evidence: str) -> Diagnosis:
    next_step = rule.next_step.format(
        dataset=failure.datasets[0] if failure.datasets else "NAME",
        checkpoint=failure.checkpoints[0] if failure.checkpoints else "NAME",
    )
    summary = rule.summary
    if failure.name in ("MissingData", "MissingCheckpoint", "DeviceAbsent"):
        summary = failure.message  # already one sentence that names what is missing and the command
        command = re.search(r"`(auto-research prepare [^`]+)`", failure.message)
        if command:
            next_step = f"Run `{command[1]}`, then run this adapter again."
    return Diagnosis(kind=rule.kind, summary=summary, next_step=next_step, evidence=_short(evidence))


def _timeout(failure: Failure) -> Diagnosis:
    assert failure.timed_out_after is not None
    where = f"in stage '{failure.stage}'" if failure.stage else "before its first stage"
    seconds = f"{failure.timed_out_after:g} s"
    shorten = f"shorten it with {', '.join(failure.overrides)}" if failure.overrides else "document an override for it"
    # A run that still wrote shortly before the deadline was busy; a silent one looks like a hang.
    busy = failure.silent_seconds < max(5.0, 0.2 * failure.timed_out_after)
    if failure.budget == "smoke" and failure.stage and busy:
        return Diagnosis(
            kind="smoke_budget_exceeded",
            summary=f"It was still at work {where} when {seconds} were over: more steps or data than a smoke run "
            "can take.",
            next_step=f"Lower the smoke steps of that stage, or {shorten}; formal budgets stay as they are.",
            evidence=f"last sign of life {failure.silent_seconds:.0f} s before the deadline",
        )
    return Diagnosis(
        kind="timeout",
        summary=f"It was ended after {seconds} {where}, silent for the last {failure.silent_seconds:.0f} s.",
        next_step=f"Look for a wait that never ends there; if it is only slow, raise --timeout-seconds or {shorten}.",
        evidence=f"silent for {failure.silent_seconds:.0f} s",
    )


def _signal(failure: Failure) -> Diagnosis:
    assert failure.signal is not None
    name = signals.Signals(failure.signal).name if failure.signal in set(signals.Signals) else str(failure.signal)
    where = f" in stage '{failure.stage}'" if failure.stage else ""
    steps = {
        "SIGKILL": "Look in the kernel log (dmesg) for its out-of-memory killer, and lower the sizes if it was that.",
        "SIGSEGV": "Native code crashed: read the stack in the log, and compare the library versions with those of "
        "`auto-research doctor`.",
        "SIGBUS": "Native code crashed, often because /dev/shm is full: enlarge it or use no data-loader workers.",
        "SIGABRT": "Native code gave up: the lines before the end of the log say why.",
        "SIGILL": "A library uses instructions that this CPU lacks: install a build for this machine.",
    }
    return Diagnosis(
        kind="killed_by_signal",
        summary=f"The process was killed by {name}{where}.",
        next_step=steps.get(name, "Find out who sent the signal, then run this adapter again."),
        evidence=name,
    )


def _last_library_frame(log_tail: str) -> bool:
    """Whether the innermost frames of the last traceback lie in Transformers, TRL or PEFT."""
    frames = re.findall(r'^\s*File "[^"]+", line \d+', log_tail, re.MULTILINE)
    return any(_TRANSFORMERS_FRAME.search(frame) for frame in frames[-3:])


def _short(text: str, most: int = 400) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"
