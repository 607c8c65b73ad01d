"""One model's tokenizer: prompts and conversations to ids, ids to bytes, and whether two models agree.

Raw text is encoded with the tokenizer's own rule for a beginning-of-sequence token (BOS), but gets no
second one where it spells one itself, and never an end token. A conversation is rendered by the model's
chat template and gets no token that the template did not write. Text inside a message cannot write control
tokens: a special token spelled there is encoded as ordinary text (added tokens not marked special, such as
`<tool_call>`, stay tokens).

Two kinds of vocabulary are known. Byte-level BPE writes each byte as one printable character; SentencePiece
writes a space as U+2581 and single bytes as `<0xNN>`. In both, an added token's bytes are its string in
UTF-8.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from threading import Lock

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tandem.errors import InvalidValue, LoadError
from tandem.text.stream import Detokenizer

_ROLE = re.compile(r"[A-Za-z][\w-]*")
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """Encodes and decodes for one model. Safe to use from several threads.

    `end_ids` are the tokens that end a generation (default: the tokenizer's EOS). `vocab_size` is the
    largest id plus one, added tokens included; a model may have more output rows. `special_ids` have no
    text by default. Raises LoadError for a tokenizer that is neither byte-level BPE nor SentencePiece.
    """

    def __init__(self, hf: PreTrainedTokenizerBase, end_ids: Iterable[int] | None = None) -> None:
        self._hf = hf
        self._lock = Lock()  # a fast tokenizer keeps its options as mutable state, also while it encodes
        self._vocabulary: dict[str, int] = hf.get_vocab()
        self.vocab_size: int = max(self._vocabulary.values()) + 1
        ends = (hf.eos_token_id,) if end_ids is None else end_ids
        self.end_ids: tuple[int, ...] = tuple(sorted({i for i in ends if i is not None and 0 <= i < self.vocab_size}))
        added = hf.added_tokens_decoder
        special = {i: token.content for i, token in added.items() if token.special and token.content}
        self.special_ids: frozenset[int] = frozenset(special)
        longest_first = sorted(map(re.escape, special.values()), key=len, reverse=True)
        self._control = re.compile(f"({'|'.join(longest_first) or '(?!)'})")
        self._bos = [i for i in hf.encode("")[:1] if i == hf.bos_token_id]
        self._read_kind()

    def _read_kind(self) -> None:
        """Which kind of vocabulary this is, as the tokenizer's own decoder reads it."""
        decoder = getattr(getattr(self._hf, "backend_tokenizer", None), "decoder", None)
        self._byte_level: bool = decoder is not None and decoder.decode(["Ġa"]) == " a"
        sentencepiece = decoder is not None and decoder.decode(["a", "▁a"]) == "a a"
        if not self._byte_level and not sentencepiece:
            name = self._hf.name_or_path or type(self._hf).__name__
            raise LoadError(f"tokenizer {name}: allowed are byte-level BPE and SentencePiece vocabularies")
        self.drops_leading_space: bool = decoder is not None and decoder.decode(["▁a"]) == "a"

    @cached_property
    def digest(self) -> str:
        """Names the vocabulary: SHA-256, in hex, of the JSON list of all pairs [id, token] in order, in ASCII and
        without spaces. Tokens are written as the vocabulary has them, added ones included."""
        pairs = sorted((token, piece) for piece, token in self._vocabulary.items())
        return sha256(json.dumps(pairs, separators=(",", ":")).encode()).hexdigest()

    @property
    def digests(self) -> dict[str, str]:
        """Of the vocabulary as "tokenizer", and as "template" the SHA-256, in hex, of the chat template."""
        return {"tokenizer": self.digest, "template": sha256(str(self._hf.chat_template or "").encode()).hexdigest()}

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt. Empty text has no ids, unless the tokenizer begins every text with BOS."""
        _check_text("prompt", text)
        ids = self._ids(text)
        return ids if ids[:1] == self._bos else self._bos + ids

    def chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation, messages of a `role` and a `content`, as the chat template renders it.

        They are the ids of the rendered text, except that special tokens spelled in a content become ordinary
        text. Only a stretch between two of the template's own control tokens that holds such a one is encoded
        apart from the rest.
        """
        _check_messages(messages)
        contents = [message["content"] for message in messages]
        marker = next(c for c in map(chr, range(0xF0000, 0xFFFFE)) if not any(c in text for text in contents))
        spelled: list[str] = []

        def hide(control: re.Match[str]) -> str:
            spelled.append(control[0])
            return f"{marker}{len(spelled) - 1}{marker}"

        def restore(text: str) -> str:
            return re.sub(f"{marker}(\\d+){marker}", lambda number: spelled[int(number[1])], text)

        shown = [{"role": m["role"], "content": self._control.sub(hide, m["content"])} for m in messages]
        ids: list[int] = []
        plain = ""
        for piece in self._control.split(self._render(shown, add_generation_prompt)):
            if marker in piece:
                ids += self._ids(plain) + self._ids(restore(piece), split_special_tokens=True)
                plain = ""
            else:
                plain += piece
        return ids + self._ids(plain)

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        template = self._hf.chat_template
        if not template:
            raise InvalidValue("chat_template", template, "a tokenizer with one; give this model raw text")
        try:
            text = self._hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        except (TemplateError, ValueError) as error:
            raise InvalidValue("messages", messages, f"what the chat template takes ({error})") from error
        assert isinstance(text, str)
        return text

    def _ids(self, text: str, split_special_tokens: bool = False) -> list[int]:
        with self._lock:
            ids: list[int] = self._hf.encode(
                text, add_special_tokens=False, split_special_tokens=split_special_tokens, verbose=False
            )
            return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of an output, exactly as streaming it would give."""
        detokenizer = Detokenizer(self, skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.finish()

    def token_text(self, token: int) -> str:
        """One token on its own, for people: bytes that are no UTF-8 are shown as `\\xNN`."""
        return self.token_bytes(token).decode("utf-8", "backslashreplace")

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the output; empty for an id the tokenizer does not have."""
        return self._bytes[token] if 0 <= token < self.vocab_size else b""

    @cached_property
    def _bytes(self) -> list[bytes]:
        read = _byte_level_bytes if self._byte_level else _sentencepiece_bytes
        table = [b""] * self.vocab_size
        for piece, token in self._vocabulary.items():
            table[token] = read(piece)
        for token, added in self._hf.added_tokens_decoder.items():
            table[token] = added.content.encode()
        return table


def _byte_level_characters() -> dict[int, str]:
    """GPT-2's table reversed: printable Latin-1 is its own byte, the others follow in order from U+0100."""
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = [byte for byte in range(256) if byte not in own]
    # A moved byte that stands for itself means that the string is no byte-level text: it must not encode.
    return dict.fromkeys(moved, "\uffff") | {0x100 + i: chr(byte) for i, byte in enumerate(moved)}


_CHARACTERS = _byte_level_characters()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return piece.translate(_CHARACTERS).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    byte = _BYTE_PIECE.fullmatch(piece)
    return bytes((int(byte[1], 16),)) if byte else piece.replace("▁", " ").encode()


def _check_text(field: str, text: object) -> None:
    if not isinstance(text, str):
        raise InvalidValue(field, text, "a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidValue(field, text, "a string without lone surrogates (U+D800 to U+DFFF)") from error


def _check_messages(messages: object) -> None:
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise InvalidValue("messages", messages, "a non-empty list of messages")
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InvalidValue(field, message, "a mapping with a role and a content")
        for key in message:
            if key not in ("role", "content"):
                raise InvalidValue(f"{field}.{key}", message[key], "no such field, only role and content")
        role = message.get("role")
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise InvalidValue(f"{field}.role", role, "a word such as system, user or assistant")
        _check_text(f"{field}.content", message.get("content"))


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder, of a GGUF file, or of a folder that holds only GGUF files.

    Nothing is fetched and no code from the folder runs. End tokens are the EOS and those of
    generation_config.json. Raises LoadError.
    """
    if not path.exists():
        raise LoadError(f"tokenizer: {path} does not exist")
    files = [path] if path.is_file() else sorted(path.glob("*.gguf"))
    if files and not any(path.glob("tokenizer*")):
        from tandem.models.gguf_tokenizer import end_tokens_from_gguf, tokenizer_from_gguf

        return Tokenizer(tokenizer_from_gguf(files[0]), end_tokens_from_gguf(files[0]))
    try:
        hf = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged tokenizer.json raises a bare Exception
        raise LoadError(f"tokenizer: {path} cannot be read: {error}") from error
    return Tokenizer(hf, [hf.eos_token_id, *_stated_end_ids(path / "generation_config.json")])


def _stated_end_ids(file: Path) -> list[int]:
    if not file.is_file():
        return []
    try:
        stated = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise LoadError(f"tokenizer: {file} is no JSON object: {error}") from error
    ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if not all(type(i) is int for i in ids):
        raise LoadError(f"tokenizer: {file} has eos_token_id {stated!r}: allowed are an id or a list of ids")
    return ids


def check_pair(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise LoadError unless an id means the same text to both models.

    Ids that only one of them has are no obstacle, whether padding, missing special tokens or additions:
    those the draft lacks are never drafted, and those the target lacks are never accepted.
    """
    for token, (ours, theirs) in enumerate(zip(target._bytes, draft._bytes, strict=False)):
        if ours != theirs and ours and theirs:
            raise LoadError(
                f"the draft's tokenizer does not fit the target's: token {token} is"
                f" {target.token_text(token)!r} in the target and {draft.token_text(token)!r} in the draft"
            )
