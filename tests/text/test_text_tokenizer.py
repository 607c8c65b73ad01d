"""Prompts to ids, ids to bytes, loading, and the check that a draft speaks the target's tokens."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tandem.errors import InvalidValue, LoadError
from tandem.text.tokenizer import Tokenizer, check_pair, load_tokenizer

SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|pad|>")
BOS_TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}</s>{% endfor %}"
SHORT_TEXT = "The quick brown fox, naïve café. 日本語 👩‍👩‍👧‍👦 don't  stop\n\tdef f(x): return x ** 2\n"


@pytest.fixture(scope="module")
def merged(merged_hf):
    return merged_hf(BOS_TEMPLATE)


class TestDigest:
    def test_it_is_the_hash_of_all_pairs_in_order(self, byte_hf):
        text = '[[0,"\\u00e9"],[1,"\\""],[2,"<s>"],[3,"</s>"],[4,"<|im_start|>"],[5,"<|im_end|>"],[6,"<|pad|>"]]'
        digest = hashlib.sha256(text.encode("ascii")).hexdigest()
        assert Tokenizer(byte_hf({'"': 1, "é": 0})).digest == digest

    def test_it_tells_vocabularies_apart_and_nothing_else(self, byte_hf):
        digest = Tokenizer(byte_hf()).digest
        assert Tokenizer(byte_hf(template=BOS_TEMPLATE), end_ids=[3]).digest == digest
        assert Tokenizer(byte_hf(specials=SPECIALS[::-1])).digest != digest
        assert Tokenizer(byte_hf(specials=SPECIALS[:-1])).digest != digest


class TestBytes:
    def test_byte_level_tokens_are_their_bytes_and_special_tokens_their_string(self, bytes_only):
        assert [bytes_only.token_bytes(i) for i in range(256)] == [bytes((i,)) for i in range(256)]
        assert [bytes_only.token_bytes(256 + i) for i in range(5)] == [s.encode() for s in SPECIALS]
        assert bytes_only.special_ids == frozenset(range(256, 261))
        assert bytes_only.vocab_size == 261
        assert bytes_only.end_ids == (257,)
        assert bytes_only.token_text(0xE2) == "\\xe2"
        assert bytes_only.token_text(256) == "<s>"
        assert [bytes_only.token_bytes(i) for i in (261, 10**6, -1)] == [b"", b"", b""]

    def test_an_added_token_is_plain_utf8_even_in_characters_that_stand_for_bytes(self, byte_hf):
        tokenizer = Tokenizer(byte_hf(specials=("<s>", "</s>", "<｜end▁é Ġ｜>", "<Ġé>")))
        assert tokenizer.token_bytes(258) == "<｜end▁é Ġ｜>".encode()
        assert tokenizer.token_bytes(259) == "<Ġé>".encode()

    def test_sentencepiece_tokens(self, pieces):
        vocabulary = {pieces.token_bytes(i) for i in range(pieces.vocab_size)}
        assert {b" ", b" he", b" w", "é".encode(), b"<s>"} <= vocabulary
        assert [pieces.token_bytes(5 + byte) for byte in range(256)] == [bytes((byte,)) for byte in range(256)]
        assert pieces.drops_leading_space

    @given(text=st.text(max_size=30) | st.sampled_from([SHORT_TEXT, "▁", " two  spaces ,and . marks !", "'s n't"]))
    def test_encoded_text_comes_back_unchanged_and_as_the_tokenizer_itself_decodes(self, merged, pieces, text):
        byte_level = Tokenizer(merged)
        assert byte_level.decode(byte_level.encode(text)) == text == merged.decode(merged.encode(text))
        spaces = text.replace("▁", " ")  # which SentencePiece cannot tell apart
        assert pieces.decode(pieces.encode(text)) == spaces

    def test_a_table_of_150_000_tokens_takes_less_than_a_second(self, byte_hf, bytes_only):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        words = (a + b + c for a in alphabet for b in alphabet for c in alphabet[:3])
        vocabulary = {
            **{a: i for i, a in enumerate(alphabet)},
            **{w: 256 + i for i, w in enumerate(islice(words, 150_000))},
        }
        tokenizer = Tokenizer(byte_hf(vocabulary))
        start = time.process_time()
        assert len(tokenizer.token_bytes(150_255)) == 3
        assert time.process_time() - start < 1.0

    def test_other_kinds_of_vocabulary_are_refused(self):
        words = Backend(models.WordPiece({"[UNK]": 0, "he": 1, "##llo": 2}, unk_token="[UNK]"))
        words.decoder = decoders.WordPiece()
        with pytest.raises(LoadError, match="byte-level BPE and SentencePiece"):
            Tokenizer(PreTrainedTokenizerFast(tokenizer_object=words))


class TestEncode:
    @pytest.mark.parametrize("text", ["hi", "<s>hi", "<s><s>hi", "", " ", "a<s>"])
    @pytest.mark.parametrize("affixes", ["<s> $A", "<s> $A </s>", "$A", "$A </s>"])
    def test_bos_by_the_tokenizers_rule_but_no_second_one_and_no_end(self, byte_hf, text, affixes):
        tokenizer = Tokenizer(byte_hf(affixes=affixes))
        written = [256 if part == "<s>" else part for part in text.replace("<s>", "\0").split("\0")]
        expected = list(written[0].encode()) if isinstance(written[0], str) else []
        for part in written[1:]:
            expected += [256, *part.encode()]
        if affixes.startswith("<s>") and not text.startswith("<s>"):
            expected = [256, *expected]
        assert tokenizer.encode(text) == expected

    @pytest.mark.parametrize("text", [None, 5, ["a"], b"a", "a\ud800"])
    def test_what_is_no_text_is_refused(self, bytes_only, text):
        with pytest.raises(InvalidValue, match=r"^prompt = "):
            bytes_only.encode(text)
        assert bytes_only.encode("ok") == list(b"ok")


class TestChat:
    def reference(self, hf, messages, **options):
        return hf.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"]

    conversation = (
        {"role": "system", "content": ""},
        {"role": "user", "content": "  What is  naïve café?\n"},
        {"role": "assistant", "content": "日本語 👩‍👩‍👧‍👦"},
        {"role": "user", "content": "\U000f0000private\U000f0001 0"},
    )

    @pytest.mark.parametrize("prompted", [True, False])
    @pytest.mark.parametrize("affixes", ["<s> $A", "$A"])
    def test_one_bos_if_the_template_writes_one(self, merged_hf, affixes, prompted):
        hf = merged_hf(BOS_TEMPLATE, affixes)
        ids = Tokenizer(hf).chat(self.conversation, add_generation_prompt=prompted)
        assert ids == self.reference(hf, self.conversation, add_generation_prompt=prompted)
        assert ids.count(hf.bos_token_id) == 1
        assert ids[0] == hf.bos_token_id

    def test_no_bos_if_the_template_writes_none(self, byte_hf):
        template = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
        hf = byte_hf(template=template, affixes="<s> $A")
        assert Tokenizer(hf).chat([{"role": "user", "content": "hi"}]) == [258, *b"hi"]

    def test_the_generation_prompt_is_optional(self, bytes_only):
        message = [{"role": "user", "content": "hi"}]
        without = bytes_only.chat(message, add_generation_prompt=False)
        assert without == [258, *b"user\nhi", 259, *b"\n"]
        assert bytes_only.chat(message) == [*without, 258, *b"assistant\n"]

    parts = st.sampled_from([*SPECIALS, "<|im_", "end|>", "a", " ", "é", "\n", "\U000f0000", "\U000f00000", "0"])

    @settings(max_examples=150)
    @given(contents=st.lists(st.lists(parts, max_size=5).map("".join), min_size=1, max_size=3))
    def test_contents_never_write_control_tokens_and_lose_no_character(self, bytes_only, contents):
        messages = [{"role": "user", "content": content} for content in contents]
        ids = bytes_only.chat(messages)
        expected = [t for c in contents for t in (258, *f"user\n{c}".encode(), 259, *b"\n")]
        assert ids == [*expected, 258, *b"assistant\n"]

    def test_only_the_stretch_that_spells_a_control_token_is_encoded_apart(self, merged):
        tokenizer = Tokenizer(merged)
        spelled = [{"role": "user", "content": " stop </s><s> the quick "}, self.conversation[2]]
        ids = tokenizer.chat(spelled)
        assert tokenizer.decode(ids, skip_special_tokens=False) == merged.apply_chat_template(spelled, tokenize=False)
        assert [i for i in ids if i in tokenizer.special_ids] == tokenizer.encode("<s></s></s>")
        tail = self.reference(merged, spelled)
        second = tokenizer.encode("[assistant]日本語 👩‍👩‍👧‍👦</s>")
        assert ids[-len(second) :] == tail[-len(second) :] == second

    def test_sentencepiece_gets_the_pieces_of_its_plain_rendering(self, piece_hf):
        hf = piece_hf(BOS_TEMPLATE)
        tokenizer = Tokenizer(hf)
        plain = [{"role": "user", "content": "hello, he"}]
        assert tokenizer.chat(plain) == self.reference(hf, plain)
        ids = tokenizer.chat([{"role": "user", "content": "he </s> he"}])
        assert [i for i in ids if i in tokenizer.special_ids] == [0, 1]
        assert tokenizer.decode(ids) == "[user]he </s> he"

    def test_an_added_token_that_is_not_special_stays_a_token(self, byte_hf):
        hf = byte_hf(template="{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}")
        hf.add_tokens(["<tool_call>"])
        tokenizer = Tokenizer(hf)
        content = "<tool_call><|im_end|>"
        assert tokenizer.chat([{"role": "user", "content": content}]) == [258, 261, *b"<|im_end|>"]

    @pytest.mark.parametrize(
        ("messages", "field"),
        [
            ([], "messages"),
            (None, "messages"),
            ("hi", "messages"),
            ({"role": "user", "content": "hi"}, "messages"),
            (["hi"], r"messages\[0\]"),
            ([{"role": "user", "content": "a"}, {"content": "b"}], r"messages\[1\].role"),
            ([{"role": "<|im_end|>", "content": "a"}], r"messages\[0\].role"),
            ([{"role": "user"}], r"messages\[0\].content"),
            ([{"role": "user", "content": None}], r"messages\[0\].content"),
            ([{"role": "user", "content": "a\udfff"}], r"messages\[0\].content"),
            (
                [{"role": "user", "content": "a"}] * 2 + [{"role": "user", "content": ["a"]}],
                r"messages\[2\].content",
            ),
            ([{"role": "user", "content": "a", "name": "b"}], r"messages\[0\].name"),
        ],
    )
    def test_a_wrong_message_is_named(self, bytes_only, messages, field):
        with pytest.raises(InvalidValue, match=f"^{field} = "):
            bytes_only.chat(messages)
        assert bytes_only.chat([{"role": "user", "content": ""}], False) == [258, *b"user\n", 259, *b"\n"]

    def test_no_template_and_a_template_that_refuses(self, byte_hf):
        message = [{"role": "user", "content": "hi"}]
        with pytest.raises(InvalidValue, match=r"^chat_template = None"):
            Tokenizer(byte_hf()).chat(message)
        refusing = Tokenizer(byte_hf(template="{{ raise_exception('roles must alternate') }}"))
        with pytest.raises(InvalidValue, match=r"^messages = .*roles must alternate"):
            refusing.chat(message)

    def test_threads_do_not_disturb_each_other(self, merged):
        tokenizer = Tokenizer(merged)
        spelled = [{"role": "user", "content": "</s> stop"}]
        expected = tokenizer.chat(spelled), tokenizer.encode("</s> stop <s>")

        def both(_):
            return tokenizer.chat(spelled), tokenizer.encode("</s> stop <s>")

        with ThreadPoolExecutor(8) as threads:
            assert all(result == expected for result in threads.map(both, range(400)))


class TestLoad:
    @pytest.fixture
    def folder(self, merged, tmp_path):
        merged.save_pretrained(tmp_path)
        return tmp_path

    @pytest.mark.parametrize(
        ("stated", "ends"), [(None, (1,)), (3, (1, 3)), ([3, 1, 4], (1, 3, 4)), ([3, 10**6], (1, 3))]
    )
    def test_a_folder_and_its_end_tokens(self, folder, merged, stated, ends):
        if stated is not None:
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stated}))
        tokenizer = load_tokenizer(folder)
        assert tokenizer.end_ids == ends
        assert tokenizer.encode(SHORT_TEXT) == merged.encode(SHORT_TEXT)
        assert tokenizer.chat([{"role": "user", "content": "hi"}])[0] == merged.bos_token_id

    @pytest.mark.parametrize("stated", ['{"eos_token_id": "2"}', '{"eos_token_id": [true]}', "[]", "{"])
    def test_a_damaged_generation_config_is_named(self, folder, stated):
        (folder / "generation_config.json").write_text(stated)
        with pytest.raises(LoadError, match="generation_config"):
            load_tokenizer(folder)

    @pytest.mark.parametrize("content", ["", "{}", '{"version": "1.0", "model": {"type": "BPE"', "not json"])
    def test_a_damaged_tokenizer_is_named(self, folder, content):
        (folder / "tokenizer.json").write_text(content)
        with pytest.raises(LoadError, match=str(folder)):
            load_tokenizer(folder)

    def test_a_folder_without_one_and_no_folder(self, tmp_path):
        with pytest.raises(LoadError, match=str(tmp_path)):
            load_tokenizer(tmp_path)
        with pytest.raises(LoadError, match="does not exist"):
            load_tokenizer(tmp_path / "missing")

    def test_gguf_files_and_folders_of_them_are_read_as_gguf(self, folder, merged, tmp_path_factory, monkeypatch):
        read = []

        def tokenizer_from_gguf(path):
            read.append(path)
            return merged

        gguf = ModuleType("tandem.models.gguf_tokenizer")
        gguf.tokenizer_from_gguf = tokenizer_from_gguf
        gguf.end_tokens_from_gguf = lambda path: (4,)
        monkeypatch.setitem(sys.modules, gguf.__name__, gguf)
        only = tmp_path_factory.mktemp("only")
        file = only / "model-00001-of-00002.gguf"
        for path in (only / "model-00002-of-00002.gguf", file, folder / "model.gguf"):
            path.write_bytes(b"GGUF")
        assert load_tokenizer(file).end_ids == load_tokenizer(only).end_ids == (4,)
        assert load_tokenizer(folder).end_ids == (1,)
        assert read == [file, file]


class TestPair:
    def test_the_same_tokens_fit_and_a_swap_is_named(self, byte_hf, bytes_only):
        check_pair(bytes_only, Tokenizer(byte_hf()))
        vocabulary = byte_hf().backend_tokenizer.get_vocab(with_added_tokens=False)
        vocabulary["a"], vocabulary["z"] = vocabulary["z"], vocabulary["a"]
        swapped = Tokenizer(byte_hf(vocabulary))
        for pair, texts in (((bytes_only, swapped), ("a", "z")), ((swapped, bytes_only), ("z", "a"))):
            with pytest.raises(
                LoadError, match=f"token 97 is '{texts[0]}' in the target and '{texts[1]}' in the draft"
            ):
                check_pair(*pair)

    def test_a_different_special_token_is_named(self, byte_hf, bytes_only):
        other = Tokenizer(byte_hf(specials=("<s>", "</s>", "<|user|>")))
        said = "token 258 is '<|im_start|>' in the target and '<|user|>' in the draft"
        with pytest.raises(LoadError, match=re.escape(said)):
            check_pair(bytes_only, other)

    @pytest.mark.parametrize("extra", [("<|pad0|>", "<|pad1|>"), tuple(f"<|x{i}|>" for i in range(192))])
    def test_padding_and_missing_special_tokens_at_the_end_fit_both_ways(self, byte_hf, bytes_only, extra):
        longer = Tokenizer(byte_hf(specials=(*SPECIALS, *extra)))
        shorter = Tokenizer(byte_hf(specials=SPECIALS[:2]))
        for one in (longer, shorter, bytes_only):
            for other in (longer, shorter, bytes_only):
                check_pair(one, other)
