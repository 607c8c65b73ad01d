import itertools
import logging
import random
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import TokenType
from tokenizers import pre_tokenizers

from tandem.errors import LoadError
from tandem.models.gguf import GGUFCheckpoint
from tandem.models.gguf_tokenizer import end_tokens_from_gguf, tokenizer_from_gguf

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
SPACE = "\u2581"
TEXTS = [
    "Hello world, it's 2024 and 12345 more.",
    "def f(x):\n    return x ** 2  # ²\n\n\n\tif x:",
    "naïve café 日本語 😀 \u200b ½",
    "  two before, three after   ",
    "a\r\nb\r\n \n",
    "",
]


class Vocabulary:
    """Tokenizer metadata; a test changes what it is about."""

    def __init__(self, model: str, pre: str | None = None) -> None:
        self.values: dict[str, object] = {"model": model}
        if pre is not None:
            self.values["pre"] = pre
        self.tokens: list[str] = []
        self.types: list[int] = []
        self.template: str | None = None

    def add(self, kind: TokenType, *tokens: str) -> int:
        """Append tokens; returns the id of the first."""
        self.tokens += tokens
        self.types += [int(kind)] * len(tokens)
        return len(self.tokens) - len(tokens)

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in {"tokens": self.tokens, "token_type": self.types, **self.values}.items():
            add = {
                int: writer.add_uint32, str: writer.add_string, bool: writer.add_bool, list: writer.add_array,
                float: writer.add_float32,
            }[type(value)]  # fmt: skip
            add(f"tokenizer.ggml.{key}", value)
        if self.template is not None:
            writer.add_chat_template(self.template)
        for key in ("block_count", "context_length", "embedding_length", "feed_forward_length"):
            writer.add_uint32(f"llama.{key}", 1 if key == "block_count" else 8)
        writer.add_head_count(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tensor("token_embd.weight", np.zeros((len(self.tokens) or 1, 8), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def byte_level(pre: str | None, *merges: str) -> Vocabulary:
    """All bytes, what the merges make, and two control tokens, which are BOS and EOS."""
    vocabulary = Vocabulary("gpt2", pre)
    vocabulary.add(TokenType.NORMAL, *BYTES, *dict.fromkeys(merge.replace(" ", "") for merge in merges))
    vocabulary.values["merges"] = list(merges) or ["a b"]
    if not merges:
        vocabulary.add(TokenType.NORMAL, "ab")
    vocabulary.values["bos_token_id"] = vocabulary.add(TokenType.CONTROL, "<|begin|>")
    vocabulary.values["eos_token_id"] = vocabulary.add(TokenType.CONTROL, "<|im_end|>")
    return vocabulary


def sentencepiece(*pieces: str) -> Vocabulary:
    """Pieces with falling scores after the three special tokens and the bytes."""
    vocabulary = Vocabulary("llama", "default")
    vocabulary.add(TokenType.UNKNOWN, "<unk>")
    vocabulary.add(TokenType.CONTROL, "<s>", "</s>")
    vocabulary.add(TokenType.BYTE, *(f"<0x{byte:02X}>" for byte in range(256)))
    vocabulary.add(TokenType.NORMAL, *pieces)
    vocabulary.values["scores"] = [0.0] * 259 + [-float(i) for i in range(len(pieces))]
    return vocabulary


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "vocabulary.gguf"


def refused(path: Path, *parts: str) -> None:
    with pytest.raises(LoadError) as error:
        tokenizer_from_gguf(path)
    for part in (path.name, *parts):
        assert part in str(error.value)


# Byte-level BPE

WORDS = {
    "gpt-2": ["x", "=", "12345", "\n\n", " IT", "'", "S", " it", "'s", "...", "\n ", " ok"],
    "smollm": ["x", "=", "1", "2", "3", "4", "5", "\n\n", " IT", "'", "S", " it", "'s", "...", "\n ", " ok"],
    "qwen2": ["x", "=", "1", "2", "3", "4", "5", "\n\n", " IT", "'S", " it", "'s", "...\n", " ", " ok"],
    "llama-bpe": ["x", "=", "123", "45", "\n\n", " IT", "'S", " it", "'s", "...\n", " ", " ok"],
}


@pytest.mark.parametrize("pre", WORDS)
def test_words_are_cut_as_the_file_says(path, pre):
    tokenizer = tokenizer_from_gguf(byte_level(pre).write(path))
    text = "x=12345\n\n IT'S it's...\n  ok"
    cut = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == WORDS[pre]


@pytest.mark.parametrize(("name", "same"), [("default", "gpt-2"), ("llama3", "llama-bpe"), ("llama-v3", "llama-bpe")])
def test_other_names_of_the_same_cut(tmp_path, name, same):
    ids = []
    for pre in (name, same):
        tokenizer = tokenizer_from_gguf(byte_level(pre, "1 2", "12 3").write(tmp_path / f"{pre}.gguf"))
        ids.append([tokenizer(text).input_ids for text in ["1234123", *TEXTS]])
    assert ids[0] == ids[1]


def test_merges_stay_within_words_and_follow_their_order(path):
    vocabulary = byte_level("qwen2", "1 2", "b c", "a b", "ab c")
    tokenizer = tokenizer_from_gguf(vocabulary.write(path))
    pieces = [vocabulary.tokens[i] for i in tokenizer("abc ab12").input_ids]
    assert pieces == ["a", "bc", "Ġ", "ab", "1", "2"]


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("qwen2", False)])
def test_a_word_that_is_a_token_needs_merges_except_for_llama_3(path, pre, whole):
    vocabulary = byte_level(pre)
    token = vocabulary.add(TokenType.NORMAL, "xyz")
    vocabulary.values["add_bos_token"] = False
    ids = tokenizer_from_gguf(vocabulary.write(path))("xyz").input_ids
    assert (ids == [token]) == whole


@pytest.mark.parametrize(("pre", "composed"), [("qwen2", True), ("smollm", False), ("llama-bpe", False)])
def test_only_qwen_composes_characters(path, pre, composed):
    tokenizer = tokenizer_from_gguf(byte_level(pre).write(path))
    assert (tokenizer("e\u0301").input_ids == tokenizer("\u00e9").input_ids) == composed


@pytest.mark.parametrize("pre", WORDS)
def test_text_comes_back(path, pre):
    tokenizer = tokenizer_from_gguf(byte_level(pre, "Ġ Ġ", "e r", "Ġ a").write(path))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_without_a_name_words_are_cut_as_by_gpt_2_with_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        found = tokenizer_from_gguf(byte_level(None, "1 2").write(tmp_path / "none.gguf"))
    assert "none.gguf: tokenizer.ggml.pre is missing" in caplog.text
    expected = tokenizer_from_gguf(byte_level("gpt-2", "1 2").write(tmp_path / "gpt-2.gguf"))
    assert [found(text).input_ids for text in TEXTS] == [expected(text).input_ids for text in TEXTS]


# SentencePiece


def joined(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule: of all neighbours that make a piece, join those of the best score, the first of equals."""
    symbols = list(text)
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores]
        if not pairs:
            return symbols
        i = min(pairs)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


def test_pieces_are_joined_by_score(path):
    letters = ["a", "b", "c", SPACE]
    rng = random.Random(3)
    pieces = list(letters)
    while len(pieces) < 24:
        piece = rng.choice(pieces) + rng.choice(pieces)
        if piece not in pieces and len(piece) < 6:
            pieces.append(piece)
    ranked = rng.sample(pieces, len(pieces))
    vocabulary = sentencepiece(*ranked)
    tokenizer = tokenizer_from_gguf(vocabulary.write(path))
    scores = {piece: -float(i) for i, piece in enumerate(ranked)}
    for _ in range(200):
        text = "".join(rng.choices("abc ", k=rng.randrange(1, 12)))
        expected = joined(SPACE + text.replace(" ", SPACE), scores)
        assert [vocabulary.tokens[i] for i in tokenizer(text).input_ids[1:]] == expected, text


def test_unknown_characters_become_bytes_and_come_back(path):
    vocabulary = sentencepiece("a", "b", SPACE, f"{SPACE}a")
    tokenizer = tokenizer_from_gguf(vocabulary.write(path))
    assert [vocabulary.tokens[i] for i in tokenizer("a é").input_ids] == ["<s>", f"{SPACE}a", SPACE, "<0xC3>", "<0xA9>"]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_a_space_is_put_before_text_unless_the_file_says_no(path):
    vocabulary = sentencepiece("a", SPACE, f"{SPACE}a")
    tokenizer = tokenizer_from_gguf(vocabulary.write(path))
    assert [vocabulary.tokens[i] for i in tokenizer("a</s>a").input_ids] == ["<s>", f"{SPACE}a", "</s>", f"{SPACE}a"]
    vocabulary.values["add_space_prefix"] = False
    tokenizer = tokenizer_from_gguf(vocabulary.write(path))
    assert [vocabulary.tokens[i] for i in tokenizer("a a").input_ids] == ["<s>", "a", f"{SPACE}a"]
    assert tokenizer.decode(tokenizer(" a").input_ids, skip_special_tokens=True) == " a"


# Special tokens


def test_control_and_user_defined_tokens_are_found_in_text_and_only_control_ones_hidden(path):
    vocabulary = byte_level("qwen2")
    call = vocabulary.add(TokenType.USER_DEFINED, "<tool_call>")
    tokenizer = tokenizer_from_gguf(vocabulary.write(path))
    ids = tokenizer("<|im_end|><tool_call>a").input_ids
    assert ids[:2] == [vocabulary.values["eos_token_id"], call]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>a"
    assert tokenizer.decode(ids) == "<|im_end|><tool_call>a"


def test_fillers_of_the_embedding_are_no_tokens(path):
    vocabulary = byte_level("qwen2")
    size = len(vocabulary.tokens)
    vocabulary.add(TokenType.UNUSED, *(f"[PAD{i}]" for i in range(size, size + 8)))
    tokenizer = tokenizer_from_gguf(vocabulary.write(path))
    assert len(tokenizer) == size
    assert max(tokenizer(f"[PAD{size + 1}]").input_ids) < size


@pytest.mark.parametrize(
    ("vocabulary", "default"),
    [
        (sentencepiece("a", SPACE), True),
        (byte_level("llama-bpe"), True),
        (byte_level("qwen2"), False),
        (byte_level("smollm"), False),
        (byte_level("gpt-2"), False),
    ],
    ids=["llama", "llama-bpe", "qwen2", "smollm", "gpt-2"],
)
@pytest.mark.parametrize("flag", [True, False, None])
def test_a_bos_is_added_as_the_file_says_or_by_the_default_of_its_kind(path, vocabulary, default, flag):
    vocabulary.values.pop("add_bos_token", None)
    if flag is not None:
        vocabulary.values["add_bos_token"] = flag
    vocabulary.values["add_eos_token"] = True
    tokenizer = tokenizer_from_gguf(vocabulary.write(path))
    adds = default if flag is None else flag
    bare = tokenizer("a", add_special_tokens=False).input_ids
    assert tokenizer("a").input_ids == [tokenizer.bos_token_id] * adds + bare
    assert tokenizer("").input_ids == [tokenizer.bos_token_id] * adds
    assert tokenizer.add_bos_token == adds


def test_special_tokens_have_their_roles(path):
    vocabulary = byte_level("qwen2")
    vocabulary.values["padding_token_id"] = vocabulary.add(TokenType.CONTROL, "<|pad|>")
    vocabulary.values["unknown_token_id"] = 0xFFFFFFFF
    tokenizer = tokenizer_from_gguf(vocabulary.write(path))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin|>", "<|im_end|>")
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|pad|>", None)
    sp = tokenizer_from_gguf(sentencepiece("a", SPACE).write(path))
    assert (sp.unk_token_id, sp.bos_token_id, sp.eos_token_id) == (0, 1, 2)


def test_the_chat_template_renders_with_the_special_tokens(path):
    vocabulary = byte_level("qwen2")
    vocabulary.template = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    tokenizer = tokenizer_from_gguf(vocabulary.write(path))
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|begin|>user:hi<|im_end|>"
    vocabulary.template = None
    assert tokenizer_from_gguf(vocabulary.write(path)).chat_template is None


def test_end_tokens_are_eos_and_the_marked_and_usual_ends(path):
    vocabulary = byte_level("qwen2")
    turn = vocabulary.add(TokenType.CONTROL, "<turn>")
    text = vocabulary.add(TokenType.CONTROL, "<|endoftext|>")
    vocabulary.add(TokenType.NORMAL, "<|eot_id|>")  # spelled like an end, but no control token
    assert end_tokens_from_gguf(vocabulary.write(path)) == (vocabulary.values["eos_token_id"], text)
    vocabulary.values["eot_token_id"] = turn
    assert end_tokens_from_gguf(vocabulary.write(path)) == (vocabulary.values["eos_token_id"], turn, text)


def test_an_open_checkpoint_gives_the_same_and_keeps_its_metadata(path):
    vocabulary = byte_level("qwen2", "a b")
    vocabulary.add(TokenType.UNUSED, f"[PAD{len(vocabulary.tokens)}]")
    checkpoint = GGUFCheckpoint(vocabulary.write(path))
    checkpoint.close()
    expected = tokenizer_from_gguf(path)
    for _ in range(2):
        found = tokenizer_from_gguf(checkpoint)
        assert found.get_vocab() == expected.get_vocab()
        assert [found(text).input_ids for text in TEXTS] == [expected(text).input_ids for text in TEXTS]
        assert end_tokens_from_gguf(checkpoint) == (vocabulary.values["eos_token_id"],)


# What is refused


def test_an_unknown_cut_is_named(path):
    refused(byte_level("klingon").write(path), "'klingon'", "smollm, qwen2")


def test_an_unknown_kind_is_named(path):
    refused(Vocabulary("t5").write(path), "'t5'", "gpt2 and llama")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bos_token_id", 5000),
        ("eos_token_id", "2"),
        ("add_bos_token", 1),
        ("token_type", [1, 1, 1]),
        ("merges", ["a b", "a zz"]),
        ("merges", [1, 2]),
        ("tokens", "abc"),
    ],
)
def test_metadata_that_does_not_fit_is_named(path, key, value):
    vocabulary = byte_level("qwen2")
    vocabulary.values[key] = value
    refused(vocabulary.write(path), f"tokenizer.ggml.{key}")


def test_a_bos_to_be_added_must_exist(path):
    vocabulary = byte_level("llama-bpe")
    del vocabulary.values["bos_token_id"]
    refused(vocabulary.write(path), "bos_token_id is missing")


def test_scores_must_fit(path):
    vocabulary = sentencepiece("a", SPACE)
    vocabulary.values["scores"] = [0.0]
    refused(vocabulary.write(path), "scores has 1 entries for 261")
