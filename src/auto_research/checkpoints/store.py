"""Checkpoint folders on disk: built once, checked before they are loaded, identified by their content.

A checkpoint here is a folder as Transformers saves it, ``config.json`` with ``*.safetensors``. Anything that
would have to be unpickled is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from auto_research.runtime.cache import CACHE_VARIABLE
from auto_research.runtime.errors import UserError

__all__ = [
    "build_once",
    "check_folder",
    "content_digest",
    "is_complete",
    "is_readable",
    "quiet",
    "read_config",
    "weight_files",
]

LOCK_SECONDS = 900.0
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt")
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model")


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Make the folder ``target`` with ``build(temporary_folder)`` unless it exists; return it.

    The folder appears under its name only when it is whole (written beside it, then renamed), and a lock
    lets one process build while the others wait. The lock of a process that died is free at once.

    Raises:
        UserError: the cache cannot be written, or another process has been building for 15 minutes.
    """
    if target.is_dir():
        return target
    from filelock import FileLock, Timeout

    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(f".{target.name}.lock"), timeout=LOCK_SECONDS):
            if not target.is_dir():
                for leftover in target.parent.glob(f".{target.name}.*.part"):
                    shutil.rmtree(leftover)  # of a builder that was killed: we hold the lock
                temporary.mkdir()
                try:
                    build(temporary)
                    _share(temporary)
                    temporary.rename(target)
                finally:
                    shutil.rmtree(temporary, ignore_errors=True)
    except Timeout as error:
        raise UserError(
            f"another process has been building {target} for {LOCK_SECONDS / 60:.0f} minutes; "
            f"end it or set {CACHE_VARIABLE} to another folder"
        ) from error
    except OSError as error:
        raise UserError(
            f"cannot write the checkpoint cache {target.parent} ({error.strerror or error}); "
            f"free some space there or set {CACHE_VARIABLE} to a folder that can be written"
        ) from error
    return target


def _share(folder: Path) -> None:
    """Give the files the permissions of the user's umask (weights are saved readable by the owner only)."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files a checkpoint consists of: the single file, or every shard of its index.

    Returns an empty list when there is none, or when a shard that the index names is absent.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = {str(name) for name in _read_json(index).get("weight_map", {}).values()}
        files = [folder / name for name in sorted(shards)]
        return files if all(file.is_file() for file in files) else []
    return sorted(folder.glob("*.safetensors"))


def is_complete(folder: Path) -> bool:
    """Whether the folder holds a configuration and all of its safetensors weights (cheap; nothing is read)."""
    return (folder / "config.json").is_file() and bool(weight_files(folder))


def check_folder(folder: Path) -> None:
    """Refuse, in one sentence, a folder that cannot be loaded safely or completely.

    Looks at names and safetensors headers only: a truncated file is found by comparing the length its
    header promises with the length it has.

    Raises:
        UserError: no folder, no configuration, pickled weights, a bare adapter, a truncated or damaged
            safetensors file, or no tokenizer.
    """
    if not folder.is_dir():
        raise UserError(f"there is no checkpoint folder {folder}; pass a folder with config.json in it")
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise UserError(f"{folder} is a PEFT adapter, not a checkpoint; merge it into its base model first")
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json; it is not a Transformers checkpoint")
    read_config(folder)
    weights = weight_files(folder)
    if not weights:
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        if pickles:
            raise UserError(
                f"{folder} holds its weights only as a pickle ({pickles[0]}), which is never opened because "
                "it can run code; convert it to model.safetensors where you trust it"
            )
        raise UserError(f"{folder} has no complete safetensors weights; fetch the checkpoint again")
    for file in weights:
        _check_safetensors(file)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            f"{folder} has no tokenizer ({', '.join(TOKENIZER_FILES[:2])} ...); "
            "copy the tokenizer files of the same checkpoint into it"
        )


def _check_safetensors(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as tensors:
            if not list(tensors.keys()):
                raise UserError(f"{file} holds no weights; fetch the checkpoint again")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is truncated or damaged ({error}); fetch the checkpoint again") from error


def is_readable(file: Path) -> bool:
    """Whether a safetensors file is as long as its header promises and holds weights."""
    try:
        _check_safetensors(file)
    except UserError:
        return False
    return True


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """A configuration file of the checkpoint as a dictionary; a broken one is a :class:`UserError`."""
    return _read_json(folder / name)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not readable JSON ({error}); fetch the checkpoint again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} does not hold a JSON object; fetch the checkpoint again")
    return content


_digests: dict[tuple[str, int, int], str] = {}


def content_digest(folder: Path) -> str:
    """SHA-256 over the names and bytes of configuration, tokenizer and weights (hexadecimal).

    Two folders with equal digests load to equal models. Files are hashed once per process, as long as
    their size and time stay the same.
    """
    whole = hashlib.sha256()
    names = {"config.json", "tokenizer_config.json", "merges.txt", *TOKENIZER_FILES}
    files = [folder / name for name in names if (folder / name).is_file()] + weight_files(folder)
    for file in sorted(files):
        whole.update(f"{file.name} {_file_digest(file)}\n".encode())
    return whole.hexdigest()


def _file_digest(file: Path) -> str:
    status = file.stat()
    key = (str(file.resolve()), status.st_size, status.st_mtime_ns)
    if key not in _digests:
        with file.open("rb") as stream:
            _digests[key] = hashlib.file_digest(stream, "sha256").hexdigest()
    return _digests[key]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Transformers' progress bars and load report off the terminal; problems are raised instead."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
