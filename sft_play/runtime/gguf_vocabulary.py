"""A tokenizer as llama.cpp keeps it: tokens, kinds, merges, special ids, and the name of how text is split.

Only what splits text exactly as the tokenizer did in training is taken over; another one is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType

from sft_play.data.encode import closing_ids
from sft_play.data.template import TextTokenizer, load_text_tokenizer
from sft_play.errors import ModelError

CONVERTER = "llama.cpp's convert_hf_to_gguf.py may know it"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# What text is split at before merges -> llama.cpp's name of it, and whether a whole token is taken without its merges.
SPLITS = {
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST: ("llama-bpe", True),
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST: ("qwen2", False),
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": ("tekken", True),
}
_MARKED = re.compile(r"\{%(-?)\s*((?:end)?generation)\s*(-?)%\}")


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What a GGUF file says of a tokenizer."""

    pre: str
    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    ids: dict[str, int]
    adds_bos: bool
    adds_eos: bool
    template: str | None

    def write(self, writer: GGUFWriter) -> None:
        """Add all of it to a file."""
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.kinds)
        writer.add_token_merges(self.merges)
        for name, number in self.ids.items():
            getattr(writer, f"add_{name}_token_id")(number)
        writer.add_add_bos_token(self.adds_bos)
        writer.add_add_eos_token(self.adds_eos)
        if self.template is not None:
            writer.add_chat_template(self.template)


def read_vocabulary(folder: Path, size: int) -> Vocabulary:
    """The tokenizer of a model folder.

    Args:
        size: rows of the model's embedding; tokens that it has beyond the tokenizer's are named as padding.

    Raises:
        ModelError: llama.cpp would split text otherwise, or the tokenizer has more tokens than the model.
    """
    text = load_text_tokenizer(folder)
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    pre = name_of_split(described, folder)
    numbered = text.tokenizer.get_vocab(with_added_tokens=True)
    if len(numbered) and max(numbered.values()) >= size:
        what = f"the tokenizer has {max(numbered.values()) + 1} tokens and the model {size}"
        raise ModelError(what, where=str(folder), fix="resize the model's embedding to its tokenizer")
    added = text.tokenizer.get_added_tokens_decoder()
    tokens = [f"[PAD{number}]" for number in range(size)]
    kinds = [int(TokenType.UNUSED)] * size
    for token, number in numbered.items():
        tokens[number], kinds[number] = token, int(TokenType.NORMAL)
    for number, extra in added.items():
        tokens[number] = extra.content
        kinds[number] = int(TokenType.CONTROL if extra.special else TokenType.USER_DEFINED)
    start = text.tokenizer.encode("text").ids
    ids = special_ids(text)
    return Vocabulary(
        pre=pre,
        tokens=tokens,
        kinds=kinds,
        merges=[one if isinstance(one, str) else " ".join(one) for one in described["model"]["merges"]],
        ids=ids,
        # A chat template writes what a chat begins with; some servers would add a second BOS, none takes one away.
        adds_bos=text.template is None and (text.bos_id is not None or start[:1] == [ids.get("bos")]),
        adds_eos=bool(start) and start[-1] == ids.get("eos"),
        template=None if text.template is None else without_marks(text.template.source),
    )


def name_of_split(described: Mapping[str, Any], folder: Path) -> str:
    """llama.cpp's name of how a tokenizer.json splits text.

    Raises:
        ModelError: it has none that is known here.
    """
    model = described["model"]
    where = str(folder / "tokenizer.json")
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        kind = "sentencepiece" if model.get("byte_fallback") else str(model.get("type"))
        raise ModelError(f"a {kind} vocabulary is not written here, only byte-level BPE", where=where, fix=CONVERTER)
    strange = [key for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
    normalizer = (described.get("normalizer") or {}).get("type", "NFC")
    if strange or normalizer != "NFC":
        what = f"llama.cpp knows no {strange[0] if strange else f'normalizer {normalizer}'}"
        raise ModelError(what, where=where, fix=CONVERTER)
    found = _known_split(parts_of(described.get("pre_tokenizer") or {}))
    if found is None or found[1] != bool(model.get("ignore_merges")):
        what = "text is split in a way that has no name here"
        raise ModelError(what, where=f"{where}: pre_tokenizer", fix=CONVERTER)
    return found[0]


def _known_split(parts: Sequence[Mapping[str, Any]]) -> tuple[str, bool] | None:
    kinds = [part.get("type") for part in parts]
    last = parts[-1] if parts else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if last.get("use_regex", True):
        if kinds == ["ByteLevel"]:
            return "gpt-2", False
        return ("smollm", False) if kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits") else None
    if kinds != ["Split", "ByteLevel"] or parts[0].get("behavior") != "Isolated" or parts[0].get("invert"):
        return None
    return SPLITS.get(parts[0]["pattern"].get("Regex", ""))


def parts_of(splitter: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The steps of a pre-tokenizer; a single one is a sequence of itself."""
    return list(splitter["pretokenizers"]) if splitter.get("type") == "Sequence" else [splitter]


def special_ids(text: TextTokenizer) -> dict[str, int]:
    """Kind of special token -> its id; `eot` closes an answer where the tokenizer's end of sequence does not."""
    kinds = ("bos", "eos", "unk", "pad")
    named = {kind: text.specials.get(f"{kind}_token") for kind in kinds}
    found = {kind: text.tokenizer.token_to_id(token) for kind, token in named.items() if token is not None}
    closings = [number for number in closing_ids(text) if number != found.get("eos")]
    return {kind: number for kind, number in found.items() if number is not None} | (
        {"eot": closings[0]} if closings else {}
    )


def without_marks(template: str) -> str:
    """A template whose `{% generation %}` marks are comments: other renderers than transformers do not know them."""
    return _MARKED.sub(r"{#\1 \2 \3#}", template)
