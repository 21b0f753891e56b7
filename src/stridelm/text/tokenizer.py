"""The tokenizer of a checkpoint, behind the few operations that the engine, `LLM` and the server need.

Loading and encoding are done by transformers, so that prompts become the ids that the model was trained on. Decoding
keeps every space (no clean-up): a stream could not take one back, and clean-up would alter code.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from stridelm.text.pointers import refuse_pointer
from stridelm.values import check_plain, check_text

VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
)
"""A directory without any of these holds no tokenizer."""
REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are not a character."""
READ_BY = {
    "tokenizer.model": "sentencepiece (or tiktoken)",
    "spiece.model": "sentencepiece",
    "sentencepiece.bpe.model": "sentencepiece",
    "tekken.json": "mistral-common",
    "tiktoken.model": "tiktoken",
}
"""Files that transformers reads by a package that Stride does not need, and that package."""


class Tokenizer:
    """A transformers tokenizer. `extra_eos`: further ids that end a text, in addition to the tokenizer's own."""

    def __init__(self, hf: Any, extra_eos: Sequence[int] = ()) -> None:
        self.hf = hf
        self.eos_id: int | None = None if hf.eos_token_id is None else int(hf.eos_token_id)
        """The tokenizer's own end-of-text id."""
        own = () if self.eos_id is None else (self.eos_id,)
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys((*own, *extra_eos)))
        """Ids that end a text; the tokenizer's own comes first."""
        self.special_ids: frozenset[int] = frozenset(hf.all_special_ids) | _added_special_ids(hf)
        """Ids that `decode` leaves out when asked to skip special tokens."""
        # The Rust decoder called directly: the same text, without the dispatch around it on every token.
        self._rust = hf.backend_tokenizer if getattr(hf, "is_fast", False) else None
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}

    @classmethod
    def load(cls, path: str | Path, ends: str | Path | None = None) -> Tokenizer:
        """The tokenizer of a checkpoint directory. Nothing is downloaded, no code of the checkpoint is run. ends: the
        directory whose configs name further ids that end a text; by default the same one.

        Raises ValueError if the directory has no tokenizer, or one that cannot be read.
        """
        path = Path(path)
        check_files(path)
        from transformers import AutoTokenizer

        try:
            hf = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        # A broken file may make transformers raise any kind of error; the user needs the file's name.
        except Exception as error:
            raise ValueError(f"the tokenizer in {path} cannot be read ({error}): {_remedy(path)}") from error
        return cls(hf, checkpoint_eos_ids(path if ends is None else ends))

    @property
    def vocab_size(self) -> int:
        """Number of ids that the tokenizer knows, added tokens included. A model may have more rows."""
        return len(self.hf)

    @property
    def bos_id(self) -> int | None:
        """Id that opens a text, if the tokenizer has one."""
        return None if self.hf.bos_token_id is None else int(self.hf.bos_token_id)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the special tokens that this tokenizer puts around a text by default.

        A chat prompt has its special tokens already: encode it with `add_special_tokens=False`.
        Raises ValueError for text that holds half a surrogate pair.
        """
        check_text("the text", text)
        ids = self.hf.encode(text, add_special_tokens=add_special_tokens)
        return [int(token) for token in ids]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, with U+FFFD for invalid bytes. Unknown ids have no text."""
        if self._rust is not None:
            return str(self._rust.decode(ids, skip_special_tokens=skip_special_tokens))
        known = [token for token in ids if self.knows(token)]
        text = self.hf.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        return str(text)

    def skipped_ids(self, skip_special_tokens: bool, kept: frozenset[int] = frozenset()) -> frozenset[int]:
        """Ids that a text leaves out. kept: special tokens that it has in any case."""
        return self.special_ids - kept if skip_special_tokens else frozenset()

    def knows(self, token: int) -> bool:
        """Whether the id is a token of this vocabulary. A model may have logits for ids that are not."""
        if self._rust is not None:
            return self._rust.id_to_token(token) is not None
        try:
            return self.hf.convert_ids_to_tokens(token) is not None
        except (IndexError, KeyError):
            return False

    def token_text(self, token: int) -> str:
        """The name of one token: its own text, special tokens included. Part of a character is written as in OpenAI's
        completions, `bytes:\\xe6\\x97`."""
        if token not in self._texts:
            self._texts[token] = shown(self.token_bytes(token))
        return self._texts[token]

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to the bytes of a text that has begun, special tokens included."""
        if token not in self._bytes:
            self._bytes[token] = self._find_bytes(token)
        return self._bytes[token]

    def opening_bytes(self, token: int) -> bytes:
        """The same for the first token of a text, where some decoders strip a space."""
        text = self.decode([token], False)
        return self.token_bytes(token) if REPLACEMENT in text else text.encode()

    def _find_bytes(self, token: int) -> bytes:
        # At the start of a text, the decoder may strip the token's leading space; so decode it twice in a row and take
        # the second.
        alone, twice = self.decode([token], False), self.decode([token, token], False)
        if REPLACEMENT not in alone:
            return twice[len(alone) :].encode()
        if token in self.byte_values:
            return bytes([self.byte_values[token]])
        name = self.hf.convert_ids_to_tokens(token)
        if all(character in BYTE_OF for character in name):  # what a byte-level decoder does
            own = bytes(BYTE_OF[character] for character in name)
            if own.decode(errors="replace") == alone:
                return own
        return alone.encode()

    @cached_property
    def byte_values(self) -> Mapping[int, int]:
        """Id -> byte for the tokens `<0x00>` to `<0xFF>`, if the decoder treats them as bytes; else empty."""
        values: dict[int, int] = {}
        for byte in range(256):
            text = f"<0x{byte:02X}>"
            token = self.hf.convert_tokens_to_ids(text)
            # A text that is not in the vocabulary maps to None or to the unknown token.
            if token is not None and self.hf.convert_ids_to_tokens(token) == text:
                values[token] = byte
        if any(self.decode([token], False) != chr(byte) for token, byte in values.items() if 0x20 < byte < 0x7F):
            return {}
        return values

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        *,
        template: str | None = None,
    ) -> str:
        """The chat as one text, special tokens included. `variables` go to the template (by default the tokenizer's).
        Null content reaches it too, which transformers leaves out.

        Raises ValueError if the tokenizer has no chat template, the template refuses the messages, a variable has the
        name of an option of the rendering itself, or something is nested too deep or is not Unicode. A template passed
        that way is a program, and may never terminate.
        """
        if not (template or self.hf.chat_template):
            raise ValueError(
                "this model has no chat template: put a chat_template.jinja beside its tokenizer, or send a "
                "plain prompt instead of messages"
            )
        from jinja2 import TemplateError

        variables = variables or {}
        for name, value in (("messages", messages), ("tools", tools), ("chat_template_kwargs", variables)):
            check_plain(name, value)
        options = inspect.signature(self.hf.apply_chat_template).parameters.keys() - {"documents"}
        if reserved := sorted(variables.keys() & options):
            raise ValueError(f"{reserved[0]} is not a variable of a chat template; leave it out")
        if any("content" in one and one["content"] is None for one in messages):
            template = WITH_NULL_CONTENT + (template or self.hf.get_chat_template(None, tools))
        try:
            text = self.hf.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=template,
                tokenize=False,
                **variables,
            )
        except (TemplateError, TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"the model's chat template refuses these messages ({error}): give each a role and a content "
                "that the template knows"
            ) from error
        return str(text)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a chat: `render_chat`, encoded without adding special tokens a second time."""
        text = self.render_chat(messages, tools, add_generation_prompt)
        return self.encode(text, add_special_tokens=False)


WITH_NULL_CONTENT = (
    "{%- set given = namespace(all=[]) -%}{%- for one in messages -%}{%- if one.content is defined -%}"
    "{%- set given.all = given.all + [one] -%}{%- else -%}{%- set given.all = given.all + [dict(one, content=none)] -%}"
    "{%- endif -%}{%- endfor -%}{%- set messages = given.all -%}"
)
"""Precedes a chat template, for messages whose null content transformers has left out."""


def shown(data: bytes) -> str:
    """Bytes as text, or as OpenAI's completions write those that are not UTF-8 by themselves."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _byte_alphabet() -> dict[str, int]:
    """Byte-level vocabularies spell every byte as one printable character: those of Latin-1 that are printable stand
    for themselves, the others follow from U+0100 on (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


def check_files(path: Path) -> None:
    """Raise ValueError for a directory without a tokenizer, or with Git LFS pointers in place of its files."""
    if not path.is_dir():
        raise ValueError(f"no model at {path}: give a directory with a checkpoint and its tokenizer")
    found = [path / name for name in VOCABULARY_FILES if (path / name).is_file()]
    if not found:
        raise ValueError(
            f"no tokenizer in {path}: copy tokenizer.json and tokenizer_config.json of the model there, "
            "or pass skip_tokenizer_init=True and give prompts as token ids"
        )
    for file in (*found, path / "tokenizer_config.json"):
        refuse_pointer(file)


def _remedy(path: Path) -> str:
    """What helps where a tokenizer cannot be read."""
    if (path / "tokenizer.json").is_file():
        return "copy the model's tokenizer files again"
    if (path / "vocab.json").is_file() and not (path / "merges.txt").is_file():
        return "vocab.json says nothing without merges.txt; copy that, or the model's tokenizer.json, there"
    for name, package in READ_BY.items():
        if (path / name).is_file():
            return (
                f"copy the model's tokenizer.json there, or make one where the Python package {package}, which reads "
                f"{name}, is installed, with transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
    return "copy the model's tokenizer files again"


def checkpoint_eos_ids(path: str | Path) -> tuple[int, ...]:
    """The ids that end a text according to the checkpoint, without a tokenizer: generation_config.json's if there is
    such a file, else config.json's, as transformers and vLLM read them."""
    name = "generation_config.json" if (Path(path) / "generation_config.json").is_file() else "config.json"
    config = read_json(Path(path) / name)
    ids: dict[int, None] = {}
    for holder in (config, config.get("text_config") or {}):
        value = holder.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is not None and not isinstance(token, int):
                raise ValueError(
                    f"eos_token_id in {Path(path) / name} is not a token id ({token!r}): copy it from the model again"
                )
            if token is not None:
                ids[token] = None
    return tuple(ids)


def read_json(path: Path) -> dict[str, Any]:
    """The content of a checkpoint's JSON file; empty if there is no such file. Raises ValueError for a broken one."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): copy it from the model again") from error
    return content if isinstance(content, dict) else {}


def _added_special_ids(hf: Any) -> frozenset[int]:
    """Tokens marked as special in the vocabulary without having a role (`<|im_start|>`)."""
    added: Mapping[int, Any] = getattr(hf, "added_tokens_decoder", {})
    return frozenset(int(token) for token, content in added.items() if getattr(content, "special", False))
