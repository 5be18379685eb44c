"""Whatever happens to a file, its reader either reads it or says in a UserError what is wrong."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_research.data.amazon import read_5core_json, read_beauty_sequences, read_minionerec
from auto_research.data.movielens import read_1m, read_100k, read_latest_small
from auto_research.data.preferences import read_dpo_demo, read_ultrafeedback
from auto_research.data.reasoning import read_gsm8k
from auto_research.data.text import read_alpaca, read_wikitext2
from auto_research.runtime.errors import UserError

_HISTORY = "user_id,history_item_title,item_title,history_item_id,item_id,history_item_sid,item_sid\n"
_PAIR = (
    b'{"prompt": "a", "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], '
    b'"rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}], "score_chosen": 2.0, '
    b'"score_rejected": 1.0}'
)
_REVIEW = {"reviewerID": "U", "asin": "B1", "overall": 4.0, "unixReviewTime": 9}

SOUND: dict[str, tuple[Callable[[Path], object], dict[str, bytes]]] = {
    "latest": (
        read_latest_small,
        {
            "movies.csv": b'movieId,title,genres\r\n1,"A, the (1990)",Drama|War\r\n2,B,Drama\r\n',
            "ratings.csv": b"userId,movieId,rating,timestamp\r\n1,1,4.0,9\r\n2,2,0.5,8\r\n",
        },
    ),
    "100k": (
        read_100k,
        {
            "u.genre": b"unknown|0\nAction|1\n\n",
            "u.item": b"1|A (1990)|01-Jan-1990||u|0|1\n2|B\xe9||||1|0\n",
            "u.user": b"1|24|M|artist|85711\n2|53|F|other|T8H1N\n",
            "u.data": b"1\t1\t3\t9\n2\t2\t5\t8\n",
            "u.info": b"2 users\n2 items\n2 ratings\n",
        },
    ),
    "1m": (
        read_1m,
        {
            "movies.dat": b"1::A (1990)::Drama|War\n2::B::Drama\n",
            "users.dat": b"1::F::1::10::48067\n2::M::56::16::02460\n",
            "ratings.dat": b"1::1::3::9\n2::2::5::8\n",
        },
    ),
    "beauty": (
        read_beauty_sequences,
        {"sequential_data.txt": b"1 1 2 3\n2 3 2\n", "datamaps.json": b'{"id2item": {"1": "A", "2": "B", "3": "C"}}'},
    ),
    "5core": (
        read_5core_json,
        {
            "reviews_Toys_5.json.gz": gzip.compress((json.dumps(_REVIEW) + "\n").encode() * 2),
            "meta_Toys.json": b"{'asin': 'B1', 'title': 'T', 'categories': [['Toys', 'Cars']]}\n",
        },
    ),
    "minionerec": (
        read_minionerec,
        {
            "info.txt": b"<a_1><b_2>\tA\t0\n<a_3><b_4>\tB\t1\n",
            "index.json": b'{"0": ["<a_1>", "<b_2>"], "1": ["<a_3>", "<b_4>"]}',
            "item.json": b'{"0": {"title": "A", "description": "[\'x\']", "brand": ""}, "1": {"title": "B"}}',
            "valid.csv": _HISTORY.encode() + b"U,['A'],B,[0],1,['<a_1><b_2>'],<a_3><b_4>\n",
            "test.csv": _HISTORY.encode() + b"U,\"['A', 'B']\",A,\"[0, 1]\",0,\"['', '']\",<a_1><b_2>\n",
        },
    ),
    "gsm8k": (
        read_gsm8k,
        {
            "train.jsonl": b'{"question": "q", "answer": "a\\n#### 1"}\n',
            "test.jsonl": b'{"question": "q", "answer": "a\\n#### -1,000"}\n',
        },
    ),
    "alpaca": (
        read_alpaca,
        {"alpaca_en_demo.json": b'[{"instruction": "a", "input": "", "output": "b"}]'},
    ),
    "demo pairs": (
        read_dpo_demo,
        {
            "dpo_en_demo.json": b'[{"conversations": [{"from": "human", "value": "a"}], '
            b'"chosen": {"from": "gpt", "value": "b"}, "rejected": {"from": "gpt", "value": "c"}}]'
        },
    ),
    "ultrafeedback": (read_ultrafeedback, {f"{split}_prefs.jsonl": _PAIR + b"\n" for split in ("train", "test")}),
    "wikitext": (read_wikitext2, {"valid.txt": b"a b\n", "test.txt": b"c\n"}),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_damaged_file_is_read_or_refused_in_words(name, tmp_path_factory):
    read, files = SOUND[name]
    folder = tmp_path_factory.mktemp(name)

    def lay(content: dict[str, bytes]) -> None:
        for file, data in content.items():
            (folder / file).write_bytes(data)

    lay(files)
    read(folder)  # sound as it is

    @settings(deadline=None, max_examples=60)
    @given(st.data())
    def damaged(data):
        file = data.draw(st.sampled_from(sorted(files)))
        content = files[file]
        begin = data.draw(st.integers(0, len(content)))
        end = data.draw(st.one_of(st.integers(begin, min(begin + 4, len(content))), st.just(len(content))))
        filler = data.draw(st.one_of(st.binary(max_size=3), st.sampled_from([b"\n", b"\r", b"\0", b'"', b"-1", b"[["])))
        lay({**files, file: content[:begin] + filler + content[end:]})
        refusal = str(folder)
        try:
            read(folder)
        except UserError as error:
            refusal = str(error)
        assert str(folder) in refusal

    damaged()
