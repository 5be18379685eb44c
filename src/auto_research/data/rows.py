"""Published text files as checked rows.

A format is a list of `Column`s, each with a regular expression that says exactly what its values look like. All
rows of a file are matched at once; the first one that does not match is named with its file, its line and what
was expected of it. A file may lie beside its published name compressed, as `name.gz` or `name.xz`.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auto_research.runtime.errors import UserError

COMPRESSED = (".gz", ".xz")
DAMAGED: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
"""What decompressing a damaged file raises."""
with suppress(ImportError):
    from lzma import LZMAError

    DAMAGED += (LZMAError,)
WHOLE = r"[0-9]{1,18}"  # fits an int64
SECONDS = "a time in whole seconds since 1970"


class MalformedRow(UserError):
    """A row of a data file is not what its format says; the message names file, line and expectation."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(f"{path}, line {line}: {reason}; correct that row or fetch the file again.")
        self.path = path
        self.line = line


@dataclass(frozen=True)
class Column:
    """One column of a text table: its published name, the pattern of a value, and that pattern in words."""

    name: str
    pattern: str
    meaning: str


@dataclass(frozen=True)
class Table:
    """Checked rows: `column(name)` and `ints(name)` give one entry a row; row `r` stands in line `lines[r]`."""

    path: Path
    first_line: int
    columns: dict[str, Any]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def text(self, name: str) -> list[str]:
        return self.columns[name].to_list()

    def ints(self, name: str) -> NDArray[np.int64]:
        return self._as(name, "Int64")

    def floats(self, name: str) -> NDArray[np.float64]:
        return self._as(name, "Float64")

    def _as(self, name: str, dtype: str) -> NDArray[Any]:
        import polars

        return self.columns[name].cast(getattr(polars, dtype)).to_numpy(writable=True)

    def error(self, row: int, reason: str) -> MalformedRow:
        """The error to raise about row `row` (from 0)."""
        return MalformedRow(self.path, self.first_line + row, reason)

    def unique_ints(self, name: str) -> NDArray[np.int64]:
        """As `ints`; a value that an earlier row already had is an error."""
        values = self.ints(name)
        _, first = np.unique(values, return_index=True)
        if len(first) < len(values):
            repeated = np.ones(len(values), dtype=bool)
            repeated[first] = False
            row = int(np.argmax(repeated))
            raise self.error(row, f"{name} {values[row]} already stands in an earlier row")
        return values

    def index_in(self, name: str, known: NDArray[np.int64], where: str) -> NDArray[np.int64]:
        """The position in `known (K,)` of column `name`, for each row; one that is not there is an error."""
        wanted = self.ints(name)
        order = np.argsort(known, kind="stable")
        place = np.minimum(np.searchsorted(known, wanted, sorter=order), len(known) - 1)
        index = order[place]
        unknown = known[index] != wanted
        if unknown.any():
            row = int(np.argmax(unknown))
            raise self.error(row, f"{name} {wanted[row]} is not in {where}")
        return index.astype(np.int64, copy=False)


def find(folder: Path, name: str) -> Path | None:
    """The file `name` of `folder`, or its compressed form; None if neither is there."""
    for suffix in ("", *COMPRESSED):
        path = folder / (name + suffix)
        if path.is_file():
            return path
    return None


def require(folder: Path, name: str) -> Path:
    """As `find`; UserError if the file is not there."""
    path = find(folder, name)
    if path is None:
        raise UserError(f"{folder} has no file {name}: fetch the data set again with `auto-research prepare`.")
    return path


def read_bytes(path: Path) -> bytes:
    """The content of a file, decompressed by its suffix. UserError if it is empty, cut off or unreadable."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        elif path.suffix == ".xz":
            import lzma  # absent from some builds of Python, and needed by nothing that we ship

            content = lzma.decompress(content)
    except DAMAGED as error:  # before OSError, of which BadGzipFile is one
        raise UserError(f"{path} is cut off or damaged ({error}): fetch it again.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    if not content.strip():
        raise UserError(f"{path} is empty: fetch it again.")
    return content


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The decoded content of a file; bytes that are not in `encoding` are an error with their line."""
    content = read_bytes(path)
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        raise MalformedRow(path, line, f"byte 0x{byte:02x} is not {encoding.upper()} text") from error


def read_lines(path: Path, encoding: str = "utf-8") -> list[str]:
    """The lines of a file without their ends ("\\n" or "\\r\\n"); empty lines at its end are left out."""
    lines = read_text(path, encoding).replace("\r\n", "\n").split("\n")
    while lines and not lines[-1]:
        lines.pop()
    return lines


def read_json_list(path: Path) -> list[Any]:
    """The rows of a file that is one JSON list. UserError as `read_text`, MalformedRow for anything else or no rows."""
    try:
        rows = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise MalformedRow(path, getattr(error, "lineno", 1), "the file is not JSON") from error
    if not isinstance(rows, list) or not rows:
        raise MalformedRow(path, 1, "the file is not a JSON list of rows")
    return rows


def iter_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of each line of a large UTF-8 file, plain or gzip, as it is read; otherwise as `read_lines`."""
    line, raw, empty = 0, b"", 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            for line, raw in enumerate(stream, start=1):
                text = raw.decode().rstrip("\r\n")
                if not text:
                    empty += 1  # perhaps the end of the file, which is known only later
                    continue
                yield from ((number, "") for number in range(line - empty, line))
                empty = 0
                yield line, text
    except UnicodeDecodeError as error:
        raise MalformedRow(path, line, f"byte 0x{raw[error.start]:02x} is not UTF-8 text") from error
    except DAMAGED as error:
        raise UserError(f"{path} is cut off or damaged after line {line} ({error}): fetch it again.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    if line == empty:
        raise UserError(f"{path} is empty: fetch it again.")


def read_table(
    path: Path,
    columns: Sequence[Column],
    separator: str,
    *,
    header: bool = False,
    encoding: str = "utf-8",
) -> Table:
    """Read rows of `columns` divided by `separator`, each checked against its pattern.

    With `header` the first line must be the columns' names. Raises MalformedRow (file, line, what was expected).
    """
    import polars

    lines = read_lines(path, encoding)
    if header:
        names = separator.join(column.name for column in columns)
        if lines[0] != names:
            raise MalformedRow(path, 1, f"the header must be {names!r}, not {_shown(lines[0])}")
        del lines[0]
        if not lines:
            raise UserError(f"{path} has a header but no rows: fetch it again.")
    first_line = 2 if header else 1
    pattern = re.escape(separator).join(f"({column.pattern})" for column in columns)
    groups = polars.Series("row", lines).str.extract_groups(f"^{pattern}$").struct.unnest()
    failed = groups[groups.columns[0]].is_null()
    if failed.any():
        row = int(failed.arg_max())
        raise MalformedRow(path, first_line + row, _complaint(lines[row], columns, separator))
    return Table(path, first_line, {c.name: groups[g] for c, g in zip(columns, groups.columns, strict=True)})


def iter_csv(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Rows of a quoted, comma-separated UTF-8 file with the header `columns`, each with its line number."""
    import csv
    import io

    reader = csv.reader(io.StringIO(read_text(path).rstrip("\r\n"), newline=""), strict=True)
    line = 1
    try:
        header = next(reader)
        if header != list(columns):
            raise MalformedRow(path, 1, f"the header must be {','.join(columns)!r}, not {_shown(','.join(header))}")
        line = reader.line_num + 1
        for row in reader:
            if len(row) != len(columns):
                raise MalformedRow(path, line, _wrong_count(len(row), list(columns), ","))
            yield line, row
            line = reader.line_num + 1
    except csv.Error as error:
        raise MalformedRow(path, line, f"not a comma-separated row ({error})") from error


def _complaint(line: str, columns: Sequence[Column], separator: str) -> str:
    """Why `line` is not a row of `columns`."""
    values = line.split(separator)
    if len(values) != len(columns):
        return _wrong_count(len(values) if line else 0, [column.name for column in columns], separator)
    for column, value in zip(columns, values, strict=True):
        if not re.fullmatch(column.pattern, value):
            return f"{column.name} {_shown(value)} is not {column.meaning}"
    return f"{_shown(line)} is not a row of {separator.join(column.name for column in columns)}"


def _wrong_count(found: int, names: list[str], separator: str) -> str:
    return f"expected {len(names)} columns divided by {separator!r} ({', '.join(names)}) but found {found}"


def _shown(value: str) -> str:
    """A value for a message: quoted, control characters escaped, shortened."""
    return repr(value if len(value) <= 60 else value[:57] + "...")
