"""A checkpoint with a tokenizer, for tests that start from text."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from support.checkpoints.models import EOS, write

LINES = [
    "def main(argv=None):\n    return sum(len(x) for x in argv)\n",
    "for name in names:\n    print(name)\n",
]


def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level BPE whose <eos> has the id of the tiny checkpoints' end token."""
    rust = Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<pad>", "<mask>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rust.train_from_iterator(LINES * 4, trainer)
    assert rust.token_to_id("<eos>") == EOS
    return PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<eos>")


def write_speaking(path: Path) -> Path:
    """A tiny random qwen3 with a tokenizer, a context of 256 and 300 logits; it names no mask token."""
    write(path, "qwen3", vocab_size=300, tie_word_embeddings=True)
    byte_level().save_pretrained(path)
    return path
