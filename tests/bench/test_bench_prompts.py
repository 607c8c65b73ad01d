"""Every public shape is known by its content; what is malformed is named with its file and line."""

from __future__ import annotations

import json

import pytest

from tandem.bench.prompts import Item, load_prompts, spread
from tandem.errors import InvalidValue, LoadError

SPEC_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["Write a poem.", "Now another."]},
    {"question_id": 201, "category": "translation", "turns": ["Translate: Haus"], "reference": ["house"]},
]
SHARE_GPT = [
    {"id": "a", "conversations": [{"from": "gpt", "value": "Hello!"}, {"from": "human", "value": "Tell a joke."}]},
    {"id": "b", "conversations": []},
    {"id": "c", "conversations": [{"from": "human", "value": "Bye."}, {"from": "human", "value": "no"}]},
]


def lines(records) -> str:
    return "\n".join(json.dumps(record) for record in records) + "\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (lines(SPEC_BENCH), [("81", "writing", "Write a poem."), ("201", "translation", "Translate: Haus")]),
        (json.dumps(SPEC_BENCH[1:], indent=1), [("201", "translation", "Translate: Haus")]),
        (
            lines([{"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": "assert f()"}]),
            [("HumanEval/0", "set", "def f():\n")],
        ),
        (lines([{"question": "1 + 1?", "answer": "#### 2"}, {"question": "2 + 2?", "answer": "#### 4"}]),
         [("set-0", "set", "1 + 1?"), ("set-1", "set", "2 + 2?")]),
        (json.dumps(SHARE_GPT), [("a", "set", "Tell a joke."), ("c", "set", "Bye.")]),
        (
            lines([{"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Hi"}]}]),
            [("set-0", "set", "Hi")],
        ),
        (
            json.dumps({"canary": "x", "examples": [{"input": "not True is", "target": "F"}, {"input": "Q2"}]}),
            [("set-0", "set", "not True is"), ("set-1", "set", "Q2")],
        ),
        (json.dumps([{"name": "code1", "kind": "coding", "user": "Write f."}]), [("code1", "coding", "Write f.")]),
        (json.dumps([{"ID": "chal-1", "Body": "Ann has 3.", "Question": "How many?"}], indent=4),
         [("chal-1", "set", "Ann has 3. How many?")]),
        (lines([{"id": "t0", "instruction": "Sort the list."}]), [("t0", "set", "Sort the list.")]),
        ("first one\n\n  second {one}\n", [("set-0", "set", "first one"), ("set-1", "set", "  second {one}")]),
        ("\ufeff" + lines([{"prompt": "after a byte order mark"}]), [("set-0", "set", "after a byte order mark")]),
    ],
)  # fmt: skip
def test_shapes(tmp_path, text, expected):
    file = tmp_path / "set.data"  # no name helps
    file.write_text(text, encoding="utf-8")
    assert load_prompts(file) == [Item(*entry) for entry in expected]


def test_line_separators_inside_json_strings_do_not_split_a_record(tmp_path):
    file = tmp_path / "set.jsonl"
    file.write_text('{"prompt": "a\u2028b\x85c"}\n{"prompt": "d"}\n', encoding="utf-8")
    assert [item.text for item in load_prompts(file)] == ["a\u2028b\x85c", "d"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": "b"\n', "line 2 is no JSON"),
        ('{"prompt": "a"}\n\n["b"]\n', "line 3 is no JSON object but list"),
        pytest.param("[" * 100_000, "no JSON", id="nested"),
        pytest.param('{"prompt": "a"}\n' + "[" * 100_000, "line 2 is no JSON", id="nested line"),
        ('{"prompt": "a"}\n{"prompt": 5}\n', "line 2: prompt = 5: allowed is text that is not empty"),
        ('{"prompt": "a"}\n{"prompt": "  "}\n', "line 2: prompt = '  '"),
        ('{"turns": []}\n{"turns": ["a"]}\n', r"line 1: turns = \[\]"),
        ('{"a": 1}\n{"b": 2}\n', "line 1 has none of the fields turns, .*; it has a"),
        ('[\n {"prompt": "a"},\n {"prompt": "b"\n', "line 4"),
        ('[{"prompt": "a"}, {"question": null}]', "record 1: question = None"),
        ('{"examples": [{"input": "a"}, {"target": "c"}]}', "record 1: input = None"),
        ("", "no prompts in it"),
        (" \n \n", "no prompts in it"),
        ('[{"conversations": []}]', "no prompts in it"),
    ],
)
def test_malformed_files_are_named_with_the_place(tmp_path, text, message):
    file = tmp_path / "set.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(LoadError, match=message) as caught:
        load_prompts(file)
    assert str(file) in str(caught.value)


def test_unreadable_files(tmp_path):
    with pytest.raises(LoadError, match="cannot be read"):
        load_prompts(tmp_path / "absent.jsonl")
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    with pytest.raises(LoadError, match=r"latin.*cannot be read"):
        load_prompts(tmp_path / "latin")


def test_a_limit_is_spread_over_the_file(tmp_path):
    items = [Item(str(i), "k", str(i)) for i in range(10)]
    assert [item.name for item in spread(items, 3)] == ["0", "3", "6"]
    assert spread(items, None) == spread(items, 10) == spread(items, 99) == items
    for limit in (0, -1):
        with pytest.raises(InvalidValue, match="limit"):
            spread(items, limit)
    file = tmp_path / "set.txt"
    file.write_text("a\nb\nc\nd\n")
    assert [item.text for item in load_prompts(file, 2)] == ["a", "c"]
