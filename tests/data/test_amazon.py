"""The Amazon readers, on small files in the official formats."""

import csv
import gzip
import io
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_research.data.amazon import (
    MINIONEREC_COLUMNS,
    plain_text,
    read_5core_json,
    read_beauty_sequences,
    read_minionerec,
)
from auto_research.data.rows import MalformedRow
from auto_research.data.sequences import leave_one_out
from auto_research.runtime.errors import UserError

# --- id sequences ---


def test_beauty_sequences(write, tmp_path):
    write("sequential_data.txt", "1 1 2 3\r\n2 4 2 5 2\r\n10 3 1\r\n")
    write("datamaps.json", json.dumps({"id2item": {str(n): f"B00{n}" for n in range(1, 6)}}))
    x = read_beauty_sequences(tmp_path)
    assert x.user.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert [x.items.raw_id[i] for i in x.item] == ["B00" + n for n in "123425231"]
    assert x.time.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1]
    assert x.rating.tolist() == [1.0] * 9
    assert not x.items.has_text
    split = leave_one_out(x)
    assert [x.items.raw_id[i] for i in split.items] == ["B001", "B004", "B002", "B003", "B001"]

    fingerprint = x.fingerprint
    write("sequential_data.txt", "1 1 2 3\n2 4 2 5 2\n10 3 1")
    assert read_beauty_sequences(tmp_path).fingerprint == fingerprint
    (tmp_path / "datamaps.json").unlink()
    assert read_beauty_sequences(tmp_path).items.raw_id == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("7", "expected a user id and item ids"),
        ("", "expected a user id and item ids"),
        ("7 1 x", "expected a user id and item ids"),
        ("7 1 -2", "expected a user id and item ids"),
        ("7\t1\t2", "expected a user id and item ids"),
        ("2 1 3", "user 2 already has an earlier line"),
        ("7 1 9", "item 9 is not in datamaps.json"),
    ],
)
def test_beauty_refuses_a_malformed_line(write, tmp_path, row, why):
    path = write("sequential_data.txt", f"1 1 2 3\n2 3 2\n{row}\n8 1 9\n")
    write("datamaps.json", json.dumps({"id2item": {"1": "A", "2": "B", "3": "C"}}))
    with pytest.raises(MalformedRow) as caught:
        read_beauty_sequences(tmp_path)
    assert str(caught.value).startswith(f"{path}, line 3: {why}")


# --- raw reviews ---


def review(reviewer: str, asin: str, rating: object = 5.0, time: object = 1400000000) -> dict[str, object]:
    return {
        "reviewerID": reviewer,
        "asin": asin,
        "reviewerName": 'A "B"',
        "helpful": [0, 0],
        "reviewText": "Fine\nreally — é",
        "overall": rating,
        "summary": "ok",
        "unixReviewTime": time,
        "reviewTime": "05 13, 2014",
    }


REVIEWS = [review("U2", "B1", 4.0, 30), review("U1", "B2", 5.0, 20), review("U2", "B2", 1, 10)]


def test_5core_reviews_of_2014(write, tmp_path):
    text = "\n".join(map(json.dumps, REVIEWS)) + "\n"
    path = write("reviews_Beauty_5.json.gz", gzip.compress(text.encode()))
    meta = "\n".join(
        repr(product)
        for product in (
            {"asin": "B2", "title": "It's <b>soap</b> &amp; more", "brand": "Dove", "categories": [["Beauty", "Bath"]]},
            {"asin": "B9", "title": "Not reviewed"},
            {"asin": "B1", "description": "Nice.", "price": 3.5, "related": {"also_bought": ["B2"]}},
        )
    )
    write("meta_Beauty.json.gz", gzip.compress(meta.encode()))
    x = read_5core_json(tmp_path)  # the folder of both
    assert x.name == "amazon-beauty-5core"
    assert x.items.raw_id == ["B1", "B2"]
    assert x.items.title == ["", "It's soap & more"]
    assert (x.items.brand, x.items.category) == (["", "Dove"], ["", "Bath"])
    assert x.items.description == ["Nice.", ""]
    assert (x.user.tolist(), x.item.tolist()) == ([0, 1, 1], [1, 1, 0])
    assert (x.rating.tolist(), x.time.tolist()) == ([5, 1, 4], [20, 10, 30])
    plain = write("plain.json", text)
    assert read_5core_json(plain).fingerprint == read_5core_json(path).fingerprint
    assert not read_5core_json(plain).items.has_text


def test_5core_metadata_of_2018(write, tmp_path):
    path = write("Office_Products_5.json", "\n".join(map(json.dumps, REVIEWS)))
    meta = write(
        "meta_Office_Products.json",
        json.dumps(
            {"category": ["Office Products", "Pens"], "description": ["Blue.", "Ink."], "title": "Pen", "asin": "B1"}
        ),
    )
    x = read_5core_json(path, meta)
    assert x.items.category == ["Pens", ""]
    assert x.items.description == ["Blue. Ink.", ""]
    assert x.items.text("title", "category")[0] == "Pen; category: Pens"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("{", "is not one object"),
        ("", "is not one object"),
        ("[1, 2]", "is not an object with named fields"),
        ("__import__('os').system('true')", "is not one object"),
        (json.dumps({**REVIEWS[0], "reviewerID": None}), "reviewerID None"),
        (json.dumps({**REVIEWS[0], "asin": ""}), "asin ''"),
        (json.dumps({**REVIEWS[0], "overall": "5.0"}), "overall '5.0' is not a rating from 1 to 5"),
        (json.dumps({**REVIEWS[0], "overall": 6.0}), "overall 6.0"),
        (json.dumps({**REVIEWS[0], "overall": True}), "overall True"),
        (json.dumps({**REVIEWS[0], "overall": float("nan")}), "overall nan"),
        (json.dumps({**REVIEWS[0], "unixReviewTime": -1}), "unixReviewTime -1"),
        (json.dumps({**REVIEWS[0], "unixReviewTime": 1.5}), "unixReviewTime 1.5"),
    ],
)
def test_5core_refuses_a_malformed_line(write, row, why):
    path = write("r_5.json", f"{json.dumps(REVIEWS[0])}\n{row}\n{json.dumps(REVIEWS[1])}\n")
    with pytest.raises(MalformedRow) as caught:
        read_5core_json(path)
    assert f"{path}, line 2: " in str(caught.value)
    assert why in str(caught.value)


def test_5core_takes_empty_lines_at_its_end_only(write):
    row = json.dumps(REVIEWS[0])
    assert len(read_5core_json(write("end.json", f"{row}\r\n{row}\n\n\r\n"))) == 2
    with pytest.raises(MalformedRow, match="line 2: ''"):
        read_5core_json(write("middle.json", f"{row}\n\n\n{row}\n"))
    with pytest.raises(UserError, match="is empty"):
        read_5core_json(write("none.json", "\n\n"))


def test_5core_refuses_bad_files(write, tmp_path):
    path = write("reviews_Beauty_5.json.gz", gzip.compress(json.dumps(REVIEWS[0]).encode())[:40])
    with pytest.raises(UserError, match="cut off or damaged"):
        read_5core_json(path)
    path.write_bytes(b"not gzip at all")
    with pytest.raises(UserError, match="cut off or damaged"):
        read_5core_json(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match=r"gz is empty"):
        read_5core_json(path)
    with pytest.raises(MalformedRow, match="line 2: byte 0xff is not UTF-8"):
        read_5core_json(write("bytes.json", json.dumps(REVIEWS[0]).encode() + b'\n{"asin": "\xff"}\n'))
    with pytest.raises(UserError, match="does not exist"):
        read_5core_json(tmp_path / "none.json")
    reviews = write("r_5.json", json.dumps(REVIEWS[0]))
    meta = write("meta.json", "{'asin': 'B1', 'title': open('/etc/passwd').read()}")
    with pytest.raises(MalformedRow, match=r"meta\.json, line 1: "):
        read_5core_json(reviews, meta)


def test_plain_text():
    assert plain_text("<!-- .x {a:b} --> One<br/>two &amp; <style>p {}</style>3 < 4\n <p class='x'>five</p>") == (
        "One two & 3 < 4 five"
    )
    assert plain_text("cut <!-- off") == "cut"


# --- MiniOneRec ---

CODES = [f"<a_{n}><b_{n % 2}><c_0>" for n in range(12)]
Row = tuple[str, list[int], int]


def minionerec(write, rows: dict[str, list[Row]], folder: str = "Toys") -> None:
    write(f"{folder}/info.txt", "".join(f"{code}\tItem, {n}\t{n}\n" for n, code in enumerate(CODES)))
    levels = {str(n): [f"<a_{n}>", f"<b_{n % 2}>", "<c_0>"] for n in range(12)}
    write(f"{folder}/index.json", json.dumps(levels))
    products = {
        str(n): {"title": f"Item, {n}", "description": f"['Good <b>{n}</b>', 'It\\'s']", "brand": "X", "categories": ""}
        for n in range(12)
    }
    write(f"{folder}/item.json", json.dumps(products))
    for split, content in rows.items():
        write(f"{folder}/{split}.csv", rows_csv(content))


def rows_csv(content: list[Row]) -> str:
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(MINIONEREC_COLUMNS)
    for user, history, target in content:
        titles, codes = [f"Item, {i}" for i in history], [CODES[i % 12] for i in history]
        writer.writerow([user, titles, f"Item, {target}", history, target, codes, CODES[target % 12]])
    return out.getvalue()


TRAIN = [("A", [1], 2), ("C", [7], 8)]
VALID = [("A", [1, 2], 3), ("A", [1, 2, 3], 4), ("B", [5], 6)]
TEST = [("A", [1, 2, 3, 4], 2), ("D", [9, 9], 10), ("D", [9, 9, 10], 11)]


def sequences(split) -> list[list[int]]:
    return [split.items[a:b].tolist() for a, b in zip(split.offsets[:-1], split.offsets[1:], strict=True)]


def test_minionerec_without_train(write, tmp_path):
    minionerec(write, {"valid": VALID, "test": TEST})
    split = read_minionerec(tmp_path / "Toys")
    assert sequences(split) == [[1, 2], [5], [9, 9]]  # A, B, D: what lies before the first target of each
    assert split.valid.user.tolist() == [0, 0, 1]
    assert split.valid_target.tolist() == [3, 4, 6]
    assert split.test.user.tolist() == [0, 2, 2]
    history, target = split.padded("test", 3)
    assert history.tolist() == [[3, 4, 5], [0, 10, 10], [10, 10, 11]]
    assert target.tolist() == [3, 11, 12]
    items = split.items_table
    assert items.title[3] == "Item, 3"
    assert items.brand is not None
    assert items.description is not None
    assert (items.brand[3], items.category, items.description[3]) == ("X", None, "Good 3 It's")
    assert items.semantic_ids is not None
    assert items.semantic_ids.tolist() == [[n, n % 2, 0] for n in range(12)]
    assert split.num_items == 12


def test_minionerec_with_train(write, tmp_path):
    minionerec(write, {"train": TRAIN, "valid": VALID, "test": TEST})
    split = read_minionerec(tmp_path / "Toys")
    assert sequences(split) == [[1, 2], [7, 8], [5], [9, 9]]  # A, C, B, D


histories = st.lists(
    st.tuples(st.lists(st.integers(0, 11), min_size=2, max_size=16), st.integers(0, 16), st.integers(0, 16)),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, max_examples=40)
@given(histories, st.booleans())
def test_minionerec_never_trains_on_a_target_at_or_after_its_time(tmp_path_factory, users, with_train):
    """Every event after a user's first is a row of train, valid or test by two moments in time, as published."""
    rows: dict[str, list[Row]] = {"train": [], "valid": [("v", [0], 1)], "test": [("t", [0], 1)]}
    for u, (events, first, second) in enumerate(users):
        for place in range(1, len(events)):
            part = "train" if place < min(first, second) else "valid" if place < max(first, second) else "test"
            rows[part].append((f"u{u}", events[max(0, place - 10) : place], events[place]))
    if not with_train:
        del rows["train"]
    folder = tmp_path_factory.mktemp("mini")

    def write(name: str, content: str) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)

    minionerec(write, rows)
    split = read_minionerec(folder / "Toys")
    trained = sequences(split)
    order = list(dict.fromkeys(user for part in rows.values() for user, _, _ in part))
    for u, (events, first, second) in enumerate(users):
        cut = max(1, min(first, second))  # place of the first event that is predicted in validation or test
        if f"u{u}" not in order:
            continue
        own = trained[order.index(f"u{u}")]
        expected = events[:cut] if with_train else events[max(0, cut - 10) : cut]
        assert own == expected
    assert len(split.valid) == len(rows["valid"])
    assert len(split.test) == len(rows["test"])


@pytest.mark.parametrize(
    ("name", "row", "why"),
    [
        ("test.csv", ("A", [1, 2], 9), "does not continue"),  # earlier in time than the user's previous row
        ("test.csv", ("A", [2], 9), "does not continue"),
        ("test.csv", ("D", [9, 9, 10, 11], 12), "item 12 is not in info.txt"),
        ("test.csv", ("", [9], 1), "user_id is empty"),
        ("valid.csv", ("E", [], 1), "history_item_id '[]' is not a list of item ids"),
    ],
)
def test_minionerec_refuses_a_malformed_row(write, tmp_path, name, row, why):
    content = {"valid": VALID, "test": TEST}
    split = name.removesuffix(".csv")
    content[split] = [*content[split], row]
    minionerec(write, content)
    with pytest.raises(MalformedRow) as caught:
        read_minionerec(tmp_path / "Toys")
    assert f"{tmp_path / 'Toys' / name}, line 5: " in str(caught.value)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("name", "old", "new", "why"),
    [
        ("valid.csv", "user_id,", "user,", "line 1: the header must be"),
        ("valid.csv", "[5]", "[x]", "line 4: history_item_id '[x]'"),
        ("valid.csv", ",6,", ",6.0,", "line 4: item_id '6.0'"),
        ("valid.csv", "<a_6><b_0><c_0>", "<a_7><b_0><c_0>", "line 4: item_sid"),
        ("info.txt", "\t3\n", "\t4\n", "line 4: expected a semantic id, a title and item id 3"),
        ("info.txt", "<a_3>", "a_3", "line 4: 'a_3<b_1><c_0>' is not a semantic id"),
        ("index.json", '"<a_3>"', '"<a_4>"', "line 4: item 3 has another semantic id in index.json"),
        ("index.json", "{", "", "is not sound JSON"),
        ("item.json", '"3": {', '"33": {', "line 4: item 3 is not in item.json"),
    ],
)
def test_minionerec_refuses_damaged_files(write, tmp_path, name, old, new, why):
    minionerec(write, {"valid": VALID, "test": TEST})
    path = tmp_path / "Toys" / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UserError) as caught:
        read_minionerec(tmp_path / "Toys")
    assert why in str(caught.value)


def test_minionerec_needs_rows_to_evaluate(write, tmp_path):
    minionerec(write, {"valid": VALID, "test": []})
    with pytest.raises(UserError, match="no rows to evaluate"):
        read_minionerec(tmp_path / "Toys")
    (tmp_path / "Toys" / "test.csv").unlink()
    with pytest.raises(UserError, match=r"has no file test\.csv"):
        read_minionerec(tmp_path / "Toys")


def test_minionerec_arrays_are_int64(write, tmp_path):
    minionerec(write, {"valid": VALID, "test": TEST})
    split = read_minionerec(tmp_path / "Toys")
    arrays = [split.items, split.offsets, split.valid.user, split.valid.items, split.valid.target, split.test.offsets]
    assert all(array.dtype == np.int64 for array in arrays)
    assert len(split.fingerprint) == 64
