"""Small tokenizers, as difficult as real ones: byte-level BPE, byte fallback, a decoder that adds spaces."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from stridelm.text.tokenizer import Tokenizer

CORPUS = [
    "def main(argv=None):\n    return sum(len(x) for x in argv)\n",
    "The quick brown fox jumps over the lazy dog. Hello world, hello again!\n",
    "naïve café, 日本語の文章, привет мир, 😀 😃 👩‍👩‍👧\n",
] * 4


def byte_level_rust() -> RustTokenizer:
    """Byte-level BPE with 40 merges: most characters beyond ASCII are split over tokens."""
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rust.train_from_iterator(CORPUS, trainer)
    rust.add_tokens([AddedToken("<tool>", normalized=False)])
    rust.add_special_tokens([AddedToken("<|im_start|>", normalized=False)])
    return rust


def fallback_rust() -> RustTokenizer:
    """Llama-2's form: spaces as U+2581, unknown characters as `<0x..>` tokens, a leading space stripped."""
    specials = ["<unk>", "<s>", "</s>"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz.,()=:\n"]
    words = ["he", "ll", "hell", "hello", "▁h", "▁hello", "▁w", "▁▁", "▁a", "or", "▁wor"]
    vocabulary = {text: i for i, text in enumerate(specials + [f"<0x{b:02X}>" for b in range(256)])}
    vocabulary |= {text: len(vocabulary) + i for i, text in enumerate(letters + words)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "h"), ("▁", "hello"), ("▁", "w")]
    merges += [("▁", "▁"), ("▁", "a"), ("o", "r"), ("▁w", "or")]
    rust = RustTokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    rust.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    rust.add_special_tokens(specials)
    return rust


def wordpiece_rust() -> RustTokenizer:
    """BERT's form: a decoder that puts the spaces between words itself."""
    words = ["[UNK]", "[CLS]", "[SEP]", "hello", "world", "##s", "##ing", "sing", "the", ",", "."]
    rust = RustTokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    rust.decoder = decoders.WordPiece(cleanup=False)
    rust.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return rust


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_level_rust(), eos_token="<eos>"))


@pytest.fixture(scope="session")
def fallback() -> Tokenizer:
    hf = PreTrainedTokenizerFast(tokenizer_object=fallback_rust(), bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return Tokenizer(hf)


@pytest.fixture(scope="session")
def wordpiece() -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=wordpiece_rust(), unk_token="[UNK]"))


@pytest.fixture(scope="session")
def unstripped() -> Tokenizer:
    """Gemma's form: byte fallback, and the space at the start of a text stays."""
    rust = fallback_rust()
    rust.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="</s>", unk_token="<unk>"))


@pytest.fixture(scope="session", params=["byte_level", "fallback", "unstripped", "wordpiece"])
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session", params=["byte_level", "fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)
