"""What is proved on the user's own rows before anything is trained on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sft_play.data.encode import MASKED, Encoded, encode_prompt, encode_rows
from sft_play.data.formats import Chat, Pair, Row, Text
from sft_play.data.mask import Rendered, Renderer, RowRefused, as_chat, as_turns, learned_turns
from sft_play.data.sandbox import ChatTemplate, TemplateRefused
from sft_play.data.template import TextTokenizer
from sft_play.errors import DataError
from sft_play.facts.data import Proof

PROVED_ROWS = 200
"""Rows that are looked at, evenly spread over those given."""
PREFIX_STABLE = "the template is prefix-stable"
PROMPTS_AGREE = "prompts are those of inference"
ONE_BOS = "no BOS is doubled"
END_LEARNED = "the end of the turn is learned"
_LONG = 1_000_000
"""Characters of rows that are not proved on: each is tokenised several times."""


@dataclass
class _Count:
    """Cases of one claim."""

    name: str
    otherwise: str
    holds: int = 0
    of: int = 0

    def add(self, holds: bool) -> None:
        self.of += 1
        self.holds += holds

    def proof(self) -> Proof:
        return Proof(
            name=self.name, holds=self.holds, of=self.of, words="" if self.holds == self.of else self.otherwise
        )


@dataclass
class _Counts:
    stable: _Count = field(
        default_factory=lambda: _Count(
            PREFIX_STABLE, "the template writes earlier turns otherwise once another turn follows"
        )
    )
    prompts: _Count = field(
        default_factory=lambda: _Count(
            PROMPTS_AGREE, "before these turns the row has other tokens than inference would feed"
        )
    )
    bos: _Count = field(
        default_factory=lambda: _Count(ONE_BOS, "these rows begin with two beginning-of-sequence tokens")
    )
    ends: _Count = field(
        default_factory=lambda: _Count(
            END_LEARNED, "these turns do not end in a learned token that inference can stop at"
        )
    )


def prove(tokenizer: TextTokenizer, rows: Sequence[Row], loss_on: str) -> tuple[Proof, ...]:
    """Four claims, each with the number of cases for which it holds, on at most `PROVED_ROWS` rows.

    - prefix-stable: of a conversation, n messages are the beginning of n + 1, for each n (conversations);
    - prompts: the tokens before a learned turn are those that inference feeds (learned turns);
    - BOS: a row does not begin with two (rows);
    - end: the token that closes a turn carries loss and is one that inference can stop at (learned turns, texts).

    A row that is refused counts nowhere, nor does one of over a million characters where there are shorter ones. Nor
    does a prompt that there is not at inference: that of a greeting with nothing before it, or one that the template
    refuses.
    """
    rows = [row for row in rows if row.characters <= _LONG] or rows[:1]
    every = -(-len(rows) // PROVED_ROWS) or 1
    renderer = Renderer(tokenizer, loss_on)
    counts, seen = _Counts(), []
    for row in rows[::every]:
        try:
            seen.append((row, renderer.render(row)))
        except RowRefused:
            continue
    encoded = encode_rows(tokenizer, [rendered for _, rendered in seen])
    bos = tokenizer.tokenizer.token_to_id(tokenizer.specials.get("bos_token", ""))
    for (row, rendered), result in zip(seen, encoded, strict=True):
        if isinstance(result, Encoded):
            _look_at(counts, tokenizer, row, rendered, result, loss_on)
            counts.bos.add(bos is None or result.input_ids[:2] != [bos, bos])
    return tuple(count.proof() for count in (counts.stable, counts.prompts, counts.bos, counts.ends))


_FIXES = {
    ONE_BOS: "take bos_token out of the template, or set model.chat_template to a built-in one",
    PROMPTS_AGREE: "set model.chat_template to a template whose generation prompt is how it writes that turn",
    END_LEARNED: "set model.chat_template to a template that closes turns with a token, such as plain",
}


def refuse_unproved(proofs: Sequence[Proof], where: str) -> None:
    """Refuse what trains a model that inference cannot use: a claim that does not hold for more than half of the cases.

    A template that is not prefix-stable is only said: some leave out thoughts once another question follows.

    Args:
        where: the template's file or name, for errors.

    Raises:
        DataError: naming the claim and the way out.
    """
    for proof in proofs:
        if proof.name in _FIXES and 2 * proof.holds < proof.of:
            what = f"{proof.of - proof.holds:,} of {proof.of:,} cases fail the proof that {proof.name}: {proof.words}"
            raise DataError(what, where=where, fix=_FIXES[proof.name])


def _look_at(
    counts: _Counts, tokenizer: TextTokenizer, row: Row, rendered: Rendered, encoded: Encoded, loss_on: str
) -> None:
    stops = tokenizer.marker_ids | {tokenizer.eos_id}
    if not (loss_on == "all" and not rendered.plain):
        for at in encoded.closings:
            counts.ends.add(encoded.labels[at] != MASKED and encoded.input_ids[at] in stops)
    if isinstance(row.body, Text):
        return
    template = tokenizer.template
    if template is None:
        if rendered.turns and isinstance(row.body, Pair):
            prompt = encode_prompt(tokenizer, [{"role": "user", "content": row.body.plain_prompt}])
            counts.prompts.add(_fed(encoded, 0, prompt))
        return
    chat = as_chat(row.body)
    counts.stable.add(_stable(template, chat))
    if loss_on != "all":
        for nth, number in enumerate(learned_turns(chat.messages, loss_on)):
            fed = _prompt(tokenizer, chat, number)
            if fed is not None:
                counts.prompts.add(_fed(encoded, nth, fed))


def _prompt(tokenizer: TextTokenizer, chat: Chat, number: int) -> list[int] | None:
    try:
        return encode_prompt(tokenizer, as_turns(chat.messages[:number]), chat.tools) if number else None
    except DataError:
        return None


def _fed(encoded: Encoded, nth: int, prompt: list[int]) -> bool:
    """Whether the tokens before the nth learned turn are the prompt's."""
    after = encoded.closings[nth - 1] + 1 if nth else 0
    start = next((at for at in range(after, len(encoded.labels)) if encoded.labels[at] != MASKED), None)
    return start is not None and encoded.input_ids[:start] == prompt


def _stable(template: ChatTemplate, chat: Chat) -> bool:
    """Whether each beginning of a conversation is the beginning of its text; beginnings that are refused are let by."""
    turns: list[dict[str, Any]] = template.turns(as_turns(chat.messages))
    before = ""
    for count in range(1, len(turns) + 1):
        try:
            text = template.render(turns[:count], tools=chat.tools)
        except (TemplateRefused, DataError):
            continue
        if not text.startswith(before):
            return False
        before = text
    return True
