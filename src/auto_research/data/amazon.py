"""Amazon product data: id sequences, raw 5-core reviews, and the MiniOneRec split.

Sources: J. McAuley et al., 2014 (http://jmcauley.ucsd.edu/data/amazon/); J. Ni et al., 2018; the sequences of
S3-Rec (https://github.com/RUCAIBox/CIKM2020-S3Rec) and P5; https://github.com/AkaliKong/MiniOneRec.
"""

from __future__ import annotations

import ast
import html
import json
import re
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from auto_research.data.rows import MalformedRow, find, iter_csv, iter_lines, read_lines, read_text, require
from auto_research.data.sequences import Cases, Ids, Interactions, ItemTable, SequenceSplit, offsets_of
from auto_research.runtime.errors import UserError


def read_beauty_sequences(folder: Path | str) -> Interactions:
    """Amazon Beauty 5-core (2014) as id sequences: `sequential_data.txt`, one user a line.

    A line is a user id and then item ids in time order, divided by spaces. No times or ratings are published:
    `time` is the position in the sequence and `rating` is 1. `datamaps.json`, where present, gives the ASINs as
    raw ids; there are no titles. 22,363 users, 12,101 items, 198,502 events.
    Raises UserError for a missing, empty or damaged file, MalformedRow (file, line) for a row outside the format.
    """
    import polars

    folder = Path(folder)
    path = require(folder, "sequential_data.txt")
    lines = read_lines(path)
    rows = polars.Series("row", lines)
    sound = rows.str.contains(r"^[0-9]{1,18}(?: [0-9]{1,18})+ ?$")
    if not sound.all():
        row = int((~sound).arg_max())
        raise MalformedRow(path, row + 1, f"expected a user id and item ids divided by spaces, not {lines[row][:60]!r}")
    values = rows.str.strip_chars_end(" ").str.split(" ")
    length = values.list.len().to_numpy().astype(np.int64)
    numbers = values.explode().cast(polars.Int64).to_numpy()
    first = offsets_of(length)[:-1]
    user = numbers[first]
    known, seen_first = np.unique(user, return_index=True)
    if len(known) < len(user):
        repeated = np.setdiff1d(np.arange(len(user)), seen_first)[0]
        raise MalformedRow(path, int(repeated) + 1, f"user {user[repeated]} already has an earlier line")

    is_item = np.ones(len(numbers), dtype=bool)
    is_item[first] = False
    raw_item, item = np.unique(numbers[is_item], return_inverse=True)
    row_of_event = np.repeat(np.arange(len(user)), length - 1)
    names = [str(number) for number in raw_item.tolist()]
    asin = _beauty_names(folder)
    if asin is not None:
        unknown = np.array([name not in asin for name in names])
        if unknown.any():
            event = int(np.argmax(unknown[item]))
            raise MalformedRow(path, int(row_of_event[event]) + 1, f"item {names[item[event]]} is not in datamaps.json")
        names = [asin[name] for name in names]
    return Interactions.from_events(
        "amazon-beauty",
        user[row_of_event],
        item,
        np.ones(len(item), dtype=np.float32),
        np.arange(len(item)) - np.repeat(offsets_of(length - 1)[:-1], length - 1),
        ItemTable.of_ids(names),
    )


def read_5core_json(path: Path | str, metadata: Path | str | None = None) -> Interactions:
    """Raw Amazon reviews, one JSON object a line (2014 or 2018 edition, `.gz` or plain).

    Of a review, `reviewerID`, `asin`, `overall` (1 to 5) and `unixReviewTime` are used. `metadata` is the product
    file of the same edition: JSON lines (2018) or Python literals (2014), read without evaluating anything; it
    gives titles, brands, categories and descriptions of the reviewed items. `path` may also be a folder
    that holds one `reviews_*_5.json[.gz]` and perhaps one `meta_*.json[.gz]`.
    Users and items are ordered by their identifiers. Raises UserError and MalformedRow (file, line).
    """
    path = Path(path)
    if path.is_dir():
        path, metadata = _reviews_and_metadata(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist: give the path of a 5-core review file.")
    reviewers, asins, ratings, times = [], [], [], []
    for line, review in _objects(path, json.loads):
        reviewer, asin = review.get("reviewerID"), review.get("asin")
        rating, time = review.get("overall"), review.get("unixReviewTime")
        if not (isinstance(reviewer, str) and reviewer):
            raise MalformedRow(path, line, f"reviewerID {reviewer!r} is not a reviewer's identifier")
        if not (isinstance(asin, str) and asin):
            raise MalformedRow(path, line, f"asin {asin!r} is not a product's identifier")
        if isinstance(rating, bool) or not isinstance(rating, int | float) or not 1 <= rating <= 5:
            raise MalformedRow(path, line, f"overall {rating!r} is not a rating from 1 to 5")
        if isinstance(time, bool) or not isinstance(time, int) or not 0 <= time < 2**62:
            raise MalformedRow(path, line, f"unixReviewTime {time!r} is not a time in whole seconds since 1970")
        reviewers.append(reviewer)
        asins.append(asin)
        ratings.append(rating)
        times.append(time)
    _, user = _codes(reviewers)
    raw_id, item = _codes(asins)
    items = ItemTable.of_ids(raw_id) if metadata is None else _product_table(Path(metadata), raw_id)
    return Interactions.from_events(
        _review_name(path),
        user,
        item,
        np.array(ratings, dtype=np.float32),
        np.array(times, dtype=np.int64),
        items,
    )


MINIONEREC_COLUMNS = (
    "user_id",
    "history_item_title",
    "item_title",
    "history_item_id",
    "item_id",
    "history_item_sid",
    "item_sid",
)


def read_minionerec(folder: Path | str) -> SequenceSplit:
    """A MiniOneRec category: `valid.csv`, `test.csv`, perhaps `train.csv`, and `info.txt`, `item.json`, `index.json`.

    The split is by time over all users: a user may have several rows, also in both validation and test, and the
    history of a later row then holds the targets of earlier ones (at most the last 10 items are published). Rows
    of one user follow each other in time through train, valid and test; a row that does not continue the
    user's previous one is refused, because its place in time would be unknown.

    The training sequence of a user is the history of the user's first row followed by the targets of the user's
    rows of `train.csv`. Where that file is absent, it is that history alone: everything before the
    first target of validation or test, and nothing else.

    `valid` and `test` have one case a row, with the published history. Items carry title, brand, category,
    description (plain text) and `semantic_ids (I, 3)`, the numbers in the codes of `index.json`.
    Raises UserError for a missing or damaged file, MalformedRow (file, line) for a row outside the format.
    """
    folder = Path(folder)
    items, codes = _minionerec_items(folder)
    user_of: dict[str, int] = {}
    latest: list[list[int]] = []  # of each user: the items that the next history must end with
    training: list[list[int]] = []
    evaluated: dict[str, list[tuple[int, list[int], int]]] = {"valid": [], "test": []}
    for split in ("train", "valid", "test"):
        path = find(folder, "train.csv") if split == "train" else require(folder, f"{split}.csv")
        if path is None:
            continue
        for line, row in iter_csv(path, MINIONEREC_COLUMNS):
            history, target = _minionerec_row(path, line, row, codes)
            name = row[0]
            user = user_of.setdefault(name, len(user_of))
            if user == len(training):
                training.append(list(history))
                latest.append([])
            elif history != latest[user][-len(history) :] or len(history) < min(len(latest[user]), 10):
                raise MalformedRow(path, line, f"the history of user {name} does not continue the user's previous row")
            latest[user] = [*history, target]
            if split == "train":
                training[user].append(target)
            else:
                evaluated[split].append((user, history, target))
    if not evaluated["valid"] or not evaluated["test"]:
        raise UserError(f"{folder} has no rows to evaluate in valid.csv or test.csv: fetch it again.")
    train, offsets = _ragged(training)
    return SequenceSplit(
        name=folder.name,
        items=train,
        offsets=offsets,
        valid=_minionerec_cases(evaluated["valid"]),
        test=_minionerec_cases(evaluated["test"]),
        items_table=items,
    )


def plain_text(text: str) -> str:
    """Text of a product page without HTML tags, comments, scripts, styles and entities, spaces collapsed."""
    text = re.sub(r"(?is)<!--.*?-->|<(script|style)\b.*?</\1\s*>", " ", text)
    text = re.sub(r"(?s)</?[a-zA-Z][^<>]*>|<!--.*", " ", text)
    return " ".join(html.unescape(text).split())


def _beauty_names(folder: Path) -> dict[str, str] | None:
    path = find(folder, "datamaps.json")
    if path is None:
        return None
    names = _json_file(path).get("id2item")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UserError(f"{path} has no object 'id2item' from item ids to ASINs: fetch it again.")
    return names


def _reviews_and_metadata(folder: Path) -> tuple[Path, Path | None]:
    reviews = sorted(p for p in folder.iterdir() if re.fullmatch(r"(reviews_)?\w+_5\.json(\.gz)?", p.name))
    products = sorted(p for p in folder.iterdir() if re.fullmatch(r"meta_\w+\.json(\.gz)?", p.name))
    if len(reviews) != 1 or len(products) > 1:
        raise UserError(
            f"{folder} must hold one file such as reviews_Beauty_5.json.gz and at most one such as "
            f"meta_Beauty.json.gz, not {len(reviews)} and {len(products)}."
        )
    return reviews[0], products[0] if products else None


def _review_name(path: Path) -> str:
    category = re.sub(r"^reviews_|_5\.json(\.gz)?$|\.jsonl?(\.gz)?$", "", path.name)
    return f"amazon-{category.lower().replace('_', '-')}-5core"


_ASIN_FIRST = re.compile(r"""\{\s*['"]asin['"]\s*:\s*['"](\w+)['"].*\}\s*""", re.DOTALL)


def _objects(
    path: Path, parse: Callable[[str], Any], wanted: Container[str] | None = None
) -> Iterable[tuple[int, dict[str, Any]]]:
    """The objects of a file with one a line, each with its line number.

    With `wanted`, objects that begin with the `asin` of another product are passed over unparsed: the metadata
    of a category covers ten times the products of its 5-core, and Python literals parse slowly.
    """
    for line, text in iter_lines(path):
        if wanted is not None and (product := _ASIN_FIRST.fullmatch(text)) and product[1] not in wanted:
            continue
        try:
            value = parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
            raise MalformedRow(path, line, f"{text[:60]!r} is not one object ({type(error).__name__})") from error
        if not isinstance(value, dict):
            raise MalformedRow(path, line, f"{text[:60]!r} is not an object with named fields")
        yield line, value


def _json_or_literal(text: str) -> Any:
    """JSON, or the Python literals of the 2014 metadata; `ast.literal_eval` runs no code."""
    try:
        return json.loads(text)
    except ValueError:
        return ast.literal_eval(text)


def _product_table(path: Path, raw_id: list[str]) -> ItemTable:
    """Titles, brands, categories and descriptions of the items `raw_id`; "" where a product has none."""
    if not path.is_file():
        raise UserError(f"{path} does not exist: give the path of the product metadata, or none.")
    row_of = {name: row for row, name in enumerate(raw_id)}
    title, brand, category, description = ([""] * len(raw_id) for _ in range(4))
    for line, product in _objects(path, _json_or_literal, wanted=row_of):
        asin = product.get("asin")
        if not (isinstance(asin, str) and asin):
            raise MalformedRow(path, line, f"asin {asin!r} is not a product's identifier")
        row = row_of.get(asin)
        if row is None:
            continue
        title[row] = _first_text(product.get("title"))
        brand[row] = _first_text(product.get("brand"))
        category[row] = _category(product)
        description[row] = _first_text(product.get("description"), joined=True)
    table = ItemTable.of_ids(raw_id, title)
    return ItemTable(
        raw_id=table.raw_id,
        title=table.title,
        genres=table.genres,
        genre_names=table.genre_names,
        year=table.year,
        brand=brand,
        category=category,
        description=description,
    )


def _category(product: dict[str, Any]) -> str:
    """The most special category: the end of the path `category` (2018) or of the first of `categories` (2014)."""
    path = product.get("category") or product.get("categories") or []
    if isinstance(path, list) and path and isinstance(path[0], list):
        path = path[0]
    return plain_text(str(path[-1])) if isinstance(path, list) and path else _first_text(path)


def _first_text(value: Any, joined: bool = False) -> str:
    """A text field as plain text; of a list, the first entry or, `joined`, all of them."""
    if isinstance(value, list):
        parts = [part for part in value if isinstance(part, str)]
        value = " ".join(parts if joined else parts[:1])
    return plain_text(value) if isinstance(value, str) else ""


def _codes(values: list[str]) -> tuple[list[str], Ids]:
    """The sorted distinct values, and each value's place among them."""
    names = sorted(set(values))
    place = {name: code for code, name in enumerate(names)}
    return names, np.fromiter((place[value] for value in values), dtype=np.int64, count=len(values))


def _json_file(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_text(path))
    except ValueError as error:
        raise UserError(f"{path} is not sound JSON ({error}): fetch it again.") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object: fetch it again.")
    return value


def _minionerec_items(folder: Path) -> tuple[ItemTable, list[str]]:
    """The item table, and each item's semantic id as it stands in the rows ("<a_1><b_2><c_3>")."""
    path = require(folder, "info.txt")
    codes, titles = [], []
    for line, text in enumerate(read_lines(path), start=1):
        parts = text.split("\t")
        if len(parts) != 3 or parts[2] != str(line - 1):
            raise MalformedRow(path, line, f"expected a semantic id, a title and item id {line - 1} divided by tabs")
        if not re.fullmatch(r"(?:<[a-z]_[0-9]{1,9}>)+", parts[0]):
            raise MalformedRow(path, line, f"{parts[0]!r} is not a semantic id such as <a_1><b_2><c_3>")
        codes.append(parts[0])
        titles.append(parts[1])
    index, described = _json_file(require(folder, "index.json")), _json_file(require(folder, "item.json"))
    levels = [re.findall(r"_([0-9]+)>", code) for code in codes]
    for item, code in enumerate(codes):
        listed = index.get(str(item))
        if not isinstance(listed, list) or "".join(map(str, listed)) != code or len(levels[item]) != len(levels[0]):
            raise MalformedRow(path, item + 1, f"item {item} has another semantic id in index.json, or none there")
        if not isinstance(described.get(str(item)), dict):
            raise MalformedRow(path, item + 1, f"item {item} is not in item.json")
    products = [described[str(item)] for item in range(len(codes))]
    category = [_first_text(_literal(product.get("categories"))) for product in products]
    table = ItemTable.of_ids([str(item) for item in range(len(codes))], titles)
    return ItemTable(
        raw_id=table.raw_id,
        title=titles,
        genres=table.genres,
        genre_names=table.genre_names,
        year=table.year,
        brand=[_first_text(product.get("brand")) for product in products],
        category=category if any(category) else None,
        description=[_first_text(_literal(product.get("description")), joined=True) for product in products],
        semantic_ids=np.array(levels, dtype=np.int64),
    ), codes


def _literal(value: Any) -> Any:
    """The list that a field such as "['a', 'b']" writes down; any other value as it is."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return value
    return value


def _minionerec_row(path: Path, line: int, row: list[str], codes: list[str]) -> tuple[list[int], int]:
    """The history and the target of a row, as item indices."""
    name, _, _, history_text, target_text, _, code = row
    if not name:
        raise MalformedRow(path, line, "the user_id is empty")
    if not re.fullmatch(r"\[[0-9]{1,18}(?:, ?[0-9]{1,18})*\]", history_text):
        raise MalformedRow(path, line, f"history_item_id {history_text[:60]!r} is not a list of item ids")
    if not re.fullmatch(r"[0-9]{1,18}", target_text):
        raise MalformedRow(path, line, f"item_id {target_text!r} is not an item id")
    history, target = [int(item) for item in history_text[1:-1].split(",")], int(target_text)
    for item in (*history, target):
        if item >= len(codes):
            raise MalformedRow(path, line, f"item {item} is not in info.txt")
    if code != codes[target]:
        raise MalformedRow(path, line, f"item_sid {code!r} is not that of item {target} in info.txt")
    return history, target


def _minionerec_cases(rows: list[tuple[int, list[int], int]]) -> Cases:
    items, offsets = _ragged([history for _, history, _ in rows])
    user, target = np.array([(user, target) for user, _, target in rows], dtype=np.int64).T
    return Cases(np.ascontiguousarray(user), items, offsets, np.ascontiguousarray(target))


def _ragged(rows: list[list[int]]) -> tuple[Ids, Ids]:
    """CSR of ragged rows."""
    flat = np.array([item for row in rows for item in row], dtype=np.int64)
    return flat, offsets_of(np.array([len(row) for row in rows], dtype=np.int64))
