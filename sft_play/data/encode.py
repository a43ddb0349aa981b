"""From rendered rows to token ids and labels, a chunk of rows at a time, and to the prompt of inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Encoding

from sft_play.data.mask import Rendered, RowRefused, token_characters, token_range
from sft_play.data.template import TemplateRefused, TextTokenizer
from sft_play.errors import DataError

MASKED = -100
"""Label of a token that carries no loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """One row: `labels[i]` is `input_ids[i]` or `MASKED`; `closings` are the positions of the closing tokens."""

    input_ids: list[int]
    labels: list[int]
    closings: tuple[int, ...]

    def cut(self, limit: int) -> Encoded:
        """The first `limit` tokens; a closing token beyond them stays listed, so that its loss is seen."""
        return Encoded(input_ids=self.input_ids[:limit], labels=self.labels[:limit], closings=self.closings)

    @property
    def loss_tokens(self) -> int:
        """Tokens that are predicted and learned; the first token is never predicted."""
        return len(self.labels) - 1 - self.labels[1:].count(MASKED) if self.labels else 0

    @property
    def closes(self) -> bool:
        """Whether every closing token carries loss."""
        return all(at < len(self.labels) and self.labels[at] != MASKED for at in self.closings)


def encode_rows(tokenizer: TextTokenizer, rows: Sequence[Rendered]) -> list[Encoded | RowRefused]:
    """Token ids and labels of many rows at once, in their order.

    Raises:
        DataError: plain rows, and the tokenizer names no end-of-sequence token.
    """
    encodings: dict[int, Encoding] = {}
    for plain in (False, True):
        numbers = [number for number, row in enumerate(rows) if row.plain is plain]
        if numbers:
            # A template writes BOS itself; plain text gets it from the tokenizer's own processor.
            batch = tokenizer.tokenizer.encode_batch([rows[n].text for n in numbers], add_special_tokens=plain)
            encodings |= zip(numbers, batch, strict=True)
    encoded = [_encode_row(tokenizer, row, encodings[number]) for number, row in enumerate(rows)]
    return _proved(tokenizer, rows, [encodings[number] for number in range(len(rows))], encoded)


def encode_prompt(tokenizer: TextTokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The tokens that inference feeds: the messages with the generation prompt, as training saw them.

    Without a template the last message's content is the prompt as it stands.

    Raises:
        DataError: the template refuses the messages, or there are several and no template.
    """
    if tokenizer.template is None:
        if len(messages) != 1:
            tokenizer.need_template()
        encoding = tokenizer.tokenizer.encode(messages[0]["content"], add_special_tokens=True)
        return _without_end(tokenizer, _with_start(tokenizer, encoding.ids))
    try:
        text = tokenizer.template.render(messages, generation_prompt=True)
    except TemplateRefused as error:
        raise DataError(f"the chat template refuses the messages: {error}", where=tokenizer.template.where) from None
    return list(tokenizer.tokenizer.encode(text, add_special_tokens=False).ids)


def prompts_agree(tokenizer: TextTokenizer) -> bool:
    """Whether a prompt has the same tokens alone, as at inference, and with the answer behind it, as in training.

    They differ where the generation prompt ends in blanks that the tokenizer joins with, or splits by, what follows.
    """
    if tokenizer.template is None:
        return True
    prompt = encode_prompt(tokenizer, [{"role": "user", "content": "question"}])
    text = tokenizer.template.render([{"role": "user", "content": "question"}], generation_prompt=True)
    whole = tokenizer.tokenizer.encode(text + "Answer", add_special_tokens=False).ids
    return bool(whole[: len(prompt)] == prompt)


def plain_layout(tokenizer: TextTokenizer) -> str:
    """How rows of alpaca and prompt_completion are laid out with this tokenizer, in words."""
    if tokenizer.template is not None:
        return "question and answer become a user and an assistant turn of the chat template"
    return "no chat template: prompt and completion as they stand, alpaca under ### headings, each closed with EOS"


def _encode_row(tokenizer: TextTokenizer, row: Rendered, encoding: Encoding) -> Encoded | RowRefused:
    ids = list(encoding.ids)
    try:
        ranges = [token_range(encoding, row.text, *turn) for turn in row.turns or ()]
    except RowRefused as refused:
        return refused
    labels = list(ids) if row.turns is None else [MASKED] * len(ids)
    for first, after in ranges:
        labels[first:after] = ids[first:after]
    if row.plain:
        return _close_plain(tokenizer, ids, labels)
    closings = tuple(after - 1 for _, after in ranges) if row.turns is not None else (len(ids) - 1,)
    return Encoded(input_ids=ids, labels=labels, closings=closings)


def _close_plain(tokenizer: TextTokenizer, ids: list[int], labels: list[int]) -> Encoded:
    """EOS at the end exactly once and learned, and BOS at the start where the tokenizer asks for it."""
    eos = need_eos(tokenizer)
    started = _with_start(tokenizer, ids)
    labels = [MASKED] * (len(started) - len(ids)) + labels
    if started[-1:] != [eos]:
        started, labels = [*started, eos], [*labels, eos]
    labels[-1] = eos
    return Encoded(input_ids=started, labels=labels, closings=(len(started) - 1,))


def _with_start(tokenizer: TextTokenizer, ids: list[int]) -> list[int]:
    bos = tokenizer.bos_id
    return list(ids) if bos is None or ids[:1] == [bos] else [bos, *ids]


def _without_end(tokenizer: TextTokenizer, ids: list[int]) -> list[int]:
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_id else ids


def need_eos(tokenizer: TextTokenizer) -> int:
    """The id of the end-of-sequence token.

    Raises:
        DataError: the tokenizer names none, so text would never end.
    """
    if tokenizer.eos_id is None:
        fix = "name eos_token in its tokenizer_config.json"
        raise DataError("the tokenizer has no end-of-sequence token", where=str(tokenizer.folder), fix=fix)
    return tokenizer.eos_id


def _proved(
    tokenizer: TextTokenizer,
    rows: Sequence[Rendered],
    encodings: Sequence[Encoding],
    encoded: list[Encoded | RowRefused],
) -> list[Encoded | RowRefused]:
    """The rows whose learned tokens decode to the text that was to be learned; the others as refusals."""
    wanted, tokens, owners = [], [], []
    for number, (row, encoding, result) in enumerate(zip(rows, encodings, encoded, strict=True)):
        if isinstance(result, RowRefused) or row.turns is None:
            continue
        for start, end in row.turns:
            first, after = token_range(encoding, row.text, start, end)
            wanted.append(row.text[min(start, token_characters(encoding, first)[0]) : end])
            tokens.append(encoding.ids[first:after])
            owners.append(number)
    decoded = tokenizer.tokenizer.decode_batch(tokens, skip_special_tokens=False)
    for number, text, words in zip(owners, decoded, wanted, strict=True):
        if text.strip() != words.strip() and not _decodes_alike(tokenizer, text, words):
            encoded[number] = RowRefused("", f"the learned tokens read {text[:60]!r} and not the assistant's words")
    return encoded


def _decodes_alike(tokenizer: TextTokenizer, decoded: str, words: str) -> bool:
    """Whether the words come out the same when they go through the tokenizer alone (normalisers change text)."""
    ids = tokenizer.tokenizer.encode(words, add_special_tokens=False).ids
    through = tokenizer.tokenizer.decode(ids, skip_special_tokens=False)
    return "".join(through.split()) == "".join(decoded.split())
