"""Answers of a model to the prompts of prepared rows, in batches that do not depend on the number of ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from peft import PeftModel
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from sft_play.errors import GenerationMemoryError
from sft_play.runtime.collate import IGNORED
from sft_play.runtime.dist import Ranks, highest, to_main
from sft_play.runtime.model import DTYPES

# Batches whose rows are sorted by length together; larger saves padding, smaller keeps a sample fair sooner.
WINDOW = 32


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How answers are made.

    Attributes:
        end_ids: tokens that end an answer.
        autocast: `bf16`, `fp16` or `fp32` (none).
        synced: ranks go through every forward pass together, as sharded weights need it.
        keep_steps: batches whose ids stay on the device before they go to the host; None for all.
        concat: put those together before they are decoded.
        rouge_tokenizer: whose words are counted when they are scored, `rouge_score` or `unicode`.
    """

    end_ids: tuple[int, ...]
    pad_id: int
    max_new_tokens: int = 128
    num_beams: int = 1
    do_sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 42
    autocast: str = "fp32"
    synced: bool = False
    keep_steps: int | None = None
    concat: bool = True
    rouge_tokenizer: str = "rouge_score"

    def config(self) -> GenerationConfig:
        """transformers' settings, nothing left to what a model ships."""
        chosen = {"temperature": self.temperature, "top_p": self.top_p, "top_k": 0} if self.do_sample else {}
        return GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            num_beams=self.num_beams,
            do_sample=self.do_sample,
            eos_token_id=list(self.end_ids),
            pad_token_id=self.pad_id,
            use_cache=True,
            **chosen,
        )


@dataclass(frozen=True)
class Prompt:
    """A row up to where its last learned turn begins, and that turn as the reference."""

    row: int
    source: int
    ids: tuple[int, ...]
    reference: str
    reference_tokens: int


@dataclass(frozen=True)
class Answered:
    """A prompt and the model's answer to it."""

    prompt: Prompt
    prompt_text: str
    text: str
    tokens: int
    ended: bool


class GenerationOutOfMemory(Exception):
    """Memory ran out on some rank; raised on all of them."""


def last_turn(labels: Sequence[int]) -> tuple[int, int] | None:
    """Where the last learned turn begins and ends; None where nothing stands before it (a text), or there is none."""
    end = len(labels)
    while end and labels[end - 1] == IGNORED:
        end -= 1
    start = end
    while start and labels[start - 1] != IGNORED:
        start -= 1
    return (start, end) if end and start > 1 else None


def prompts_of(rows: Any, tokenizer: Any, generation: Generation, batch: int) -> list[list[Prompt]]:
    """Batches of the rows' prompts in an order that only the rows, the batch size and the seed decide.

    Rows are shuffled, sorted by length within windows of them and cut into batches, which are shuffled again: as many
    first batches as there is time for are a fair sample.
    """
    found = [prompt for number, row in enumerate(rows) if (prompt := _prompt(number, row, tokenizer, generation))]
    order = random.Random(generation.seed)
    order.shuffle(found)
    batches: list[list[Prompt]] = []
    for start in range(0, len(found), WINDOW * batch):
        window = sorted(found[start : start + WINDOW * batch], key=lambda one: (len(one.ids), one.row))
        cut = [window[at : at + batch] for at in range(0, len(window), batch)]
        order.shuffle(cut)
        batches += cut
    return batches


def _prompt(number: int, row: Any, tokenizer: Any, generation: Generation) -> Prompt | None:
    turn = last_turn(row["labels"])
    if turn is None:
        return None
    wanted = row["input_ids"][turn[0] : turn[1]]
    answer, _ = until_end(wanted, generation.end_ids)
    return Prompt(
        number, row.get("source", 0) or 0, tuple(row["input_ids"][: turn[0]]), text_of(tokenizer, answer), len(answer)
    )


def until_end(ids: Sequence[int], end_ids: Sequence[int]) -> tuple[list[int], bool]:
    """The tokens before the first that ends an answer, and whether there is one."""
    at = next((place for place, one in enumerate(ids) if one in end_ids), None)
    return list(ids[:at]), at is not None


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    """Tokens as text without special ones and outer blanks."""
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text.strip()


@dataclass(frozen=True)
class Engine:
    """Generates for batches of prompts on all ranks and brings the answers to rank 0.

    Args:
        model: what trains, unwrapped; its `generate` is called.
        same_for_all: every rank goes through every batch (tensor parallel), instead of its share of them.
        alone: a rank may fail by itself without leaving others inside a collective.
    """

    model: Any
    tokenizer: Any
    generation: Generation
    ranks: Ranks
    same_for_all: bool = False
    alone: bool = True

    def answer(
        self, batches: Sequence[list[Prompt]], go_on: Callable[[int], bool] = lambda rounds: True
    ) -> tuple[list[Answered], int]:
        """Answers to whole batches, in their order, and how many batches were gone through. Answers only on rank 0.

        Args:
            go_on: asked on rank 0 before each round with the number of rounds gone through.

        Raises:
            GenerationOutOfMemory: on all ranks; answers made before are lost.
            GenerationMemoryError: on one rank of several that hold parts of the model.
        """
        rank, together = (0, 1) if self.same_for_all else (self.ranks.rank, self.ranks.world_size)
        kept = Kept(self.tokenizer, self.generation)
        done = 0
        with quiet_generation(self.model, self.generation):
            for start in range(0, len(batches), together):
                if highest(self.ranks, int(self.ranks.main and not go_on(start // together))):
                    break
                mine = start + rank
                self._round(batches[mine] if mine < len(batches) else [], batches[start], kept)
                done = min(start + together, len(batches))
        kept.flush()
        return self._in_order(kept.answers, batches[:done]), done

    def _round(self, batch: list[Prompt], another: list[Prompt], kept: Kept) -> None:
        """One batch; where a rank has none left and must go along, it repeats a row of another's."""
        failed = False
        try:
            if batch:
                kept.add(batch, generate_ids(self.model, batch, self.generation))
            elif self.generation.synced:
                generate_ids(self.model, another[:1], self.generation)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if not self.alone:  # the others wait inside a collective; the run starts again without answers
                raise GenerationMemoryError(str(error)[:200], where=f"rank {self.ranks.rank}: generation") from error
            failed = True
        if highest(self.ranks, int(failed)):
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            raise GenerationOutOfMemory("generation ran out of memory")

    def _in_order(self, mine: list[Answered], batches: Sequence[list[Prompt]]) -> list[Answered]:
        if self.same_for_all:
            found = mine if self.ranks.main else []
        else:
            found = list(chain.from_iterable(to_main(self.ranks, mine)))
        by_row = {one.prompt.row: one for one in found}
        return [by_row[prompt.row] for prompt in chain.from_iterable(batches)] if self.ranks.main else []


class Kept:
    """Generated ids on their way from the device to texts."""

    def __init__(self, tokenizer: Any, generation: Generation) -> None:
        self.tokenizer = tokenizer
        self.generation = generation
        self.waiting: list[tuple[list[Prompt], torch.Tensor]] = []
        self.answers: list[Answered] = []

    def add(self, batch: list[Prompt], ids: torch.Tensor) -> None:
        """Keep a batch's new ids on the device until as many batches as allowed are there."""
        self.waiting.append((batch, ids))
        if self.generation.keep_steps and len(self.waiting) >= self.generation.keep_steps:
            self.flush()

    def flush(self) -> None:
        """Bring what waits to the host, put together or batch by batch, and decode it."""
        if not self.waiting:
            return
        if self.generation.concat:
            rows = [row for _, ids in self.waiting for row in ids]
            together = pad_sequence(rows, batch_first=True, padding_value=self.generation.pad_id).tolist()
        else:
            together = [row for _, ids in self.waiting for row in ids.tolist()]
        prompts = [prompt for batch, _ in self.waiting for prompt in batch]
        self.answers += [self._answered(prompt, ids) for prompt, ids in zip(prompts, together, strict=True)]
        self.waiting = []

    def _answered(self, prompt: Prompt, ids: list[int]) -> Answered:
        answer, ended = until_end(ids, self.generation.end_ids)
        shown = self.tokenizer.decode(prompt.ids, skip_special_tokens=False)
        return Answered(prompt, shown, text_of(self.tokenizer, answer), len(answer), ended)


def generate_ids(model: Any, batch: Sequence[Prompt], generation: Generation) -> torch.Tensor:
    """The new ids of each prompt, [rows, tokens], filled on the right."""
    ids = [torch.tensor(one.ids) for one in batch]
    filled, mask = (
        pad_sequence(rows, batch_first=True, padding_value=filling, padding_side="left").to(model.device)
        for rows, filling in ((ids, generation.pad_id), ([torch.ones_like(one) for one in ids], 0))
    )
    gpus = [torch.cuda.current_device()] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), torch.no_grad(), autocast(model, generation.autocast):
        torch.manual_seed(generation.seed + batch[0].row)  # the same draws whichever rank has this batch
        made = model.generate(
            input_ids=filled,
            attention_mask=mask,
            generation_config=generation.config(),
            synced_gpus=generation.synced,
        )
    return made[:, filled.shape[1] :]


def autocast(model: Any, precision: str) -> Any:
    """What products are computed in."""
    return nullcontext() if precision == "fp32" else torch.autocast(model.device.type, dtype=DTYPES[precision])


@contextmanager
def quiet_generation(model: Any, generation: Generation) -> Iterator[None]:
    """The model in evaluation mode, without the generation settings that it ships; all as before afterwards."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    shipped, training, cached = base.generation_config, model.training, base.config.use_cache
    base.generation_config, base.config.use_cache = generation.config(), True
    model.eval()
    try:
        yield
    finally:
        base.generation_config, base.config.use_cache = shipped, cached
        model.train(training)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device's or the host's memory is full."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error).lower() for words in ("out of memory", "can't allocate memory")
    )
