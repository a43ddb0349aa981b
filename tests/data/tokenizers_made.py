"""Tiny tokenizers in the styles of well-known families, made in code and saved as a model folder.

    folder = make_tokenizer("chatml", tmp_path)

All are byte-level BPE without merges beyond what a few lines of text teach them, so every text goes through and
comes back. `chatml` has pad == eos, `llama3` and `mistral` write BOS both in the template and in the processor.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

_LESSONS = (
    "The user asks a question and the assistant answers it in a few words.",
    "What does os.path.join do? It joins one or more path segments.",
    "Blank lines\n\n\nand more\n\n\n  of them",
    "Hello world, this is a test. assistant user system model question answer",
)

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_GENERATION = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages and messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + eos_token }}"
    "{% elif message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{% endfor %}"
)


@dataclass(frozen=True, kw_only=True)
class Style:
    """What distinguishes one family: its special tokens and template."""

    tokens: tuple[str, ...]
    bos: str | None
    eos: str
    pad: str
    template: str | None
    end_of_turn: str
    writes_bos: bool = False
    takes_system: bool = True
    pattern: str | None = None
    """How text is split before merging; by default GPT-2's way."""
    metaspace: bool = False
    """SentencePiece's way: blanks become part of words, one is put before a text, unknown characters become bytes."""
    lowercase: bool = False
    """Text is made lower-case and its accents are composed before anything else, so it does not come back."""


STYLES = {
    "chatml": Style(
        tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        bos=None, eos="<|im_end|>", pad="<|im_end|>", template=CHATML, end_of_turn="<|im_end|>",
    ),
    "generation": Style(
        tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        bos=None, eos="<|im_end|>", pad="<|im_end|>", template=CHATML_GENERATION, end_of_turn="<|im_end|>",
    ),
    "llama3": Style(
        tokens=("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        bos="<|begin_of_text|>", eos="<|eot_id|>", pad="<|end_of_text|>", template=LLAMA3, end_of_turn="<|eot_id|>",
        writes_bos=True,
        pattern=r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "gemma": Style(
        tokens=("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "\n\n"),
        bos="<bos>", eos="<eos>", pad="<pad>", template=GEMMA, end_of_turn="<end_of_turn>",
        writes_bos=True, takes_system=False,
    ),
    "mistral": Style(
        tokens=("<s>", "</s>", "[INST]", "[/INST]"),
        bos="<s>", eos="</s>", pad="</s>", template=MISTRAL, end_of_turn="</s>", writes_bos=True, takes_system=False,
    ),
    "metaspace": Style(
        tokens=("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
        bos="<s>", eos="</s>", pad="</s>", template=MISTRAL, end_of_turn="</s>", writes_bos=True, takes_system=False,
        metaspace=True,
    ),
    "lowercase": Style(
        tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        bos=None, eos="<|im_end|>", pad="<|im_end|>", template=CHATML, end_of_turn="<|im_end|>", lowercase=True,
    ),
    "bare": Style(
        tokens=("<|endoftext|>",), bos=None, eos="<|endoftext|>", pad="<|endoftext|>", template=None, end_of_turn="",
    ),
}  # fmt: skip


def make_tokenizer(name: str, parent: Path, *, template: str | None = None) -> Path:
    """Save a tokenizer of this style under `parent` and return its folder.

    Args:
        name: a key of `STYLES`.
        template: another chat template in place of the style's own.
    """
    style, folder = STYLES[name], parent / f"tokenizer-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    _train(style).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": style.bos,
        "eos_token": style.eos,
        "pad_token": style.pad,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    if (source := template or style.template) is not None:
        (folder / "chat_template.jinja").write_text(source)
    return folder


def _splitting(style: Style) -> pre_tokenizers.PreTokenizer:
    if style.pattern is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = pre_tokenizers.Split(Regex(style.pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _metaspace(style: Style) -> Tokenizer:
    letters = sorted(set("".join(_LESSONS)) - {" ", "\n"})
    vocabulary = [*style.tokens, *(f"<0x{number:02X}>" for number in range(256)), "▁", *letters, "▁t", "▁th", "▁the"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    numbered = {token: number for number, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(numbered, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(back)
    tokenizer.add_special_tokens(list(style.tokens))
    return tokenizer


def _taught(style: Style) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if style.lowercase:
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = _splitting(style)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(style.tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_LESSONS, trainer)
    return tokenizer


def _train(style: Style) -> Tokenizer:
    tokenizer = _metaspace(style) if style.metaspace else _taught(style)
    if style.bos is not None:
        bos = (style.bos, tokenizer.token_to_id(style.bos))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{style.bos} $A", special_tokens=[bos])
    return tokenizer
