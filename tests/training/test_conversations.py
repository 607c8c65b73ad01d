"""Conversations as a head learns them: which tokens are supervised, which templates are refused, which files read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.bench.prompts import load_prompts
from tandem.errors import LoadError
from tandem.training.conversations import Conversation, Unusable, digest_of, given, load_conversations, opening
from tests.toys import EOS, TEMPLATE
from tests.training.toys_recording import CHAT, chats, said

USER, ASSISTANT = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}


def shown(ids: list[int]) -> str:
    """The text of ids, control tokens included."""
    return "".join("<end>" if i == EOS else chr(i) for i in ids)


def learnt(conversation: Conversation, template: str = CHAT) -> tuple[str, list[str]]:
    """The text of a conversation, and its supervised stretches."""
    ids, supervised = given(chats(template), conversation)
    assert len(ids) == len(supervised)
    parts, before = [], False
    for token, counts in zip(ids, supervised, strict=True):
        if counts:
            parts = parts if before else [*parts, ""]
            parts[-1] += shown([token])
        before = counts
    return shown(ids), parts


def refused(conversation: Conversation, template: str, reason: str) -> None:
    with pytest.raises(Unusable) as caught:
        given(chats(template), conversation)
    assert str(caught.value) == reason


def written(folder: Path, text: str, name: str = "set.jsonl") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def test_an_answer_is_supervised_from_its_first_token_to_the_one_that_ends_the_turn():
    """Neither the prompt, nor the words of the template, nor what stands behind the end token; that is cut off."""
    assert learnt(said("hello", "hi you")) == ("<user>hello<end>\n<assistant>hi you<end>", ["hi you<end>"])


def test_every_assistant_turn_is_supervised():
    text = "<user>a<end>\n<assistant>one<end>\n<user>b<end>\n<assistant>two<end>\n<user>c<end>\n<assistant>three<end>"
    assert learnt(said("a", "one", "b", "two", "c", "three")) == (text, ["one<end>", "two<end>", "three<end>"])


def test_a_system_message_is_no_answer():
    messages = ({"role": "system", "content": "be brief"}, USER, ASSISTANT)
    text = "<system>be brief<end>\n<user>hello<end>\n<assistant>hi<end>"
    assert learnt(Conversation("c", "k", messages)) == (text, ["hi<end>"])


def test_an_empty_answer_is_its_end_token():
    assert learnt(said("hello", "")) == ("<user>hello<end>\n<assistant><end>", ["<end>"])


def test_a_turn_ends_with_its_first_end_token():
    """There the model stops: what a template writes behind it is never said."""
    doubled = CHAT.replace("<end>\n", "<end>.<end>\n")
    assert learnt(said("hello", "hi"), doubled)[1] == ["hi<end>"]
    assert learnt(said("hello", "hi", "so", "bye"), doubled)[1] == ["hi<end>", "bye<end>"]


def test_an_end_token_that_an_answer_spells_is_text():
    """Else what stands behind it would be lost, and the model be taught to stop there."""
    text, parts = learnt(said("hello", "it is <end> here"))
    assert parts == ["it is <end> here<end>"]
    ids, supervised = given(chats(), said("hello", "it is <end> here"))
    assert [i for i, (token, counts) in enumerate(zip(ids, supervised, strict=True)) if counts and token == EOS] == [
        len(ids) - 1
    ]
    assert text == "<user>hello<end>\n<assistant>it is <end> here<end>"


def test_a_template_that_ends_no_turn_is_supervised_to_the_end_of_the_turn():
    assert learnt(said("hello", "hi"), TEMPLATE) == ("user: hello\nassistant: hi\n", ["assistant: hi\n"])
    between = CHAT.replace("<end>\n", "{% if not loop.last or m.role == 'user' %}<end>\n{% endif %}")
    assert learnt(said("hello", "hi"), between)[1] == ["hi"]


DROPS = (
    "{% for m in messages %}{% if m.role == 'user' or loop.last %}<{{ m.role }}>{{ m.content }}<end>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
REWRITES = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
OPENS = CHAT.replace("%}<assistant>{%", "%}<assistant><think>{%")


def test_a_template_that_drops_earlier_turns_does_not_match():
    refused(said("a", "one", "b", "two"), DROPS, "the chat template does not match")
    assert learnt(said("a", "one"), DROPS)[1] == ["one<end>"]  # of one turn, it drops nothing


def test_a_template_that_rewrites_earlier_turns_does_not_match():
    refused(said("a", "<think>x</think>one", "b", "two"), REWRITES, "the chat template does not match")
    assert learnt(said("a", "one", "b", "two"), REWRITES)[1] == ["one<end>", "two<end>"]


def test_a_template_that_prompts_with_other_words_than_it_writes_does_not_match():
    refused(said("a", "one"), OPENS, "the chat template does not match")


def test_a_conversation_that_an_assistant_begins_does_not_match():
    """Nobody asked, so no prompt of the template comes before it."""
    refused(Conversation("c", "k", (ASSISTANT,)), CHAT, "the chat template does not match")
    refused(Conversation("c", "k", (ASSISTANT, USER, ASSISTANT)), CHAT, "the chat template does not match")


@pytest.mark.parametrize("message", [{"role": "two words", "content": "x"}, {"role": "user", "content": "\ud800"}])
def test_what_the_tokenizer_does_not_take_is_unusable(message):
    with pytest.raises(Unusable, match="the chat template refuses it"):
        opening(chats(), Conversation("c", "k", (message,)))
    refused(Conversation("c", "k", (message, ASSISTANT)), CHAT, "the chat template refuses it")


def test_what_the_template_itself_refuses_is_unusable():
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT
    messages = ({"role": "system", "content": "be brief"}, USER)
    with pytest.raises(Unusable, match="the chat template refuses it"):
        opening(chats(strict), Conversation("c", "k", messages))
    refused(Conversation("c", "k", (*messages, ASSISTANT)), strict, "the chat template refuses it")


def test_a_prompt_ends_where_the_model_answers():
    assert shown(opening(chats(), said("hello"))) == "<user>hello<end>\n<assistant>"
    assert shown(opening(chats(), said("a", "one", "b"))) == (
        "<user>a<end>\n<assistant>one<end>\n<user>b<end>\n<assistant>"
    )


def test_a_file_of_messages_keeps_answers_names_and_kinds(tmp_path):
    path = written(
        tmp_path,
        lines(
            {"id": 7, "kind": "math", "messages": [USER, ASSISTANT]},
            {"messages": [{"role": "system", "content": "s"}, USER]},
        ),
    )
    first, second = load_conversations(path)
    assert first == Conversation("7", "math", (USER, ASSISTANT)) and first.answered
    assert second == Conversation("set-2", "set", ({"role": "system", "content": "s"}, USER)) and not second.answered


def test_other_fields_of_a_message_are_dropped(tmp_path):
    """The tokenizer takes none."""
    path = written(tmp_path, lines({"messages": [{**USER, "name": "x"}]}))
    assert load_conversations(path)[0].messages == (USER,)


def test_a_mark_at_the_beginning_and_empty_lines_are_no_obstacle(tmp_path):
    line = lines({"messages": [USER, ASSISTANT]})
    for text in ("\ufeff" + line, "\n  \n" + line + "\n\n" + line, "  " + line):
        assert all(c.messages == (USER, ASSISTANT) for c in load_conversations(written(tmp_path, text)))


def test_conversations_may_stand_in_one_json_list_or_alone_over_several_lines(tmp_path):
    """As prompts may: the answers in them must not be lost without a word."""
    record = {"id": "a", "kind": "k", "messages": [USER, ASSISTANT]}
    wanted = Conversation("a", "k", (USER, ASSISTANT))
    for content, count in (([record, record], 2), (record, 1)):
        for indent in (None, 2):
            assert load_conversations(written(tmp_path, json.dumps(content, indent=indent))) == [wanted] * count


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("spec.jsonl", lines({"question_id": 1, "category": "writing", "turns": ["one", "two"]})),
        ("gpt.jsonl", lines({"id": "x", "conversations": [{"from": "human", "value": "hello"}]})),
        ("own.jsonl", lines({"id": "a-1", "kind": "a", "user": 'say "messages": now'}, {"prompt": "p"})),
        ("svamp.json", json.dumps([{"ID": "1", "Body": "b", "Question": "q"}, {"instruction": "i"}])),
        ("bbh.json", json.dumps({"examples": [{"input": "x", "target": "y"}]}, indent=1)),
        ("inner.jsonl", lines({"prompt": "p", "meta": {"messages": [USER]}})),
        ("plain.txt", 'a prompt\nabout "messages" in a line\n'),
    ],
)
def test_every_other_shape_is_a_prompt(tmp_path, name, text):
    path = written(tmp_path, text, name)
    items = load_prompts(path)
    assert items
    wanted = [Conversation(i.name, i.kind, ({"role": "user", "content": i.text},)) for i in items]
    assert load_conversations(path) == wanted
    assert load_conversations(path, regenerate=True) == wanted


def test_regenerate_drops_answers_and_keeps_what_was_said_before(tmp_path):
    asked = {"role": "user", "content": "and"}
    path = written(
        tmp_path,
        lines(
            {"messages": [USER, ASSISTANT]},
            {"messages": [USER, ASSISTANT, asked, ASSISTANT, ASSISTANT]},
            {"messages": [USER, ASSISTANT, asked]},
        ),
    )
    found = [c.messages for c in load_conversations(path, regenerate=True)]
    assert found == [(USER,), (USER, ASSISTANT, asked), (USER, ASSISTANT, asked)]
    assert [c.answered for c in load_conversations(path)] == [True, True, False]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": []},
        {"messages": None},
        {"messages": "hello"},
        {"messages": {"role": "user", "content": "x"}},
        {"messages": [{"role": "user"}]},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        {"messages": [{"role": 1, "content": "x"}]},
        {"messages": ["hello"]},
        {"prompt": "no conversation"},
        [USER],
        7,
    ],
)
def test_a_bad_line_is_named_with_its_file(tmp_path, record):
    """Wherever it stands, empty lines counted: whoever is to mend it looks for that line."""
    good = lines({"messages": [USER, ASSISTANT]})
    path = written(tmp_path, good + "\n" + lines(record) + good)
    with pytest.raises(LoadError) as caught:
        load_conversations(path)
    assert str(caught.value).startswith(f"{path}: line 3"), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", ['{"messages": [', "nonsense"])
def test_a_line_that_is_no_json_is_named_with_its_file(tmp_path, bad):
    path = written(tmp_path, lines({"messages": [USER]}) + "\n\n" + bad + "\n")
    with pytest.raises(LoadError) as caught:
        load_conversations(path)
    assert f"{path}: line 4" in str(caught.value)


def test_a_bad_record_of_a_list_is_named_with_its_file(tmp_path):
    path = written(tmp_path, json.dumps([{"messages": [USER]}, {"messages": []}]))
    with pytest.raises(LoadError) as caught:
        load_conversations(path)
    assert f"{path}: record 1" in str(caught.value)


@pytest.mark.parametrize("content", [None, b"", b"\n\n", b"\xff\xfe{", b'[{"messages": []'])
def test_a_file_that_cannot_be_read_is_named(tmp_path, content):
    path = tmp_path / "set.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LoadError, match=r"set\.jsonl"):
        load_conversations(path)


def test_the_digest_tells_any_two_lists_apart():
    one, two = said("a", "b"), said("c")
    lists = [
        *([one, two], [two, one], [one], [one, one], [said("a", "bc")], [said("ab", "c")], [said("a", "b", "")]),
        *([said("a", "b", kind="x")], [said("a", "b", name="x")]),
    ]
    digests = [digest_of(each) for each in lists]
    assert len(set(digests)) == len(lists)
    assert digests == [digest_of([*each]) for each in lists]
