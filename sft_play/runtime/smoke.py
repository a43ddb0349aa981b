"""What `make smoke` looks at in a process of its own: what was saved of an overfitted batch, loaded again.

Prints one JSON object, a `Look`.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from sft_play.config.schema import TuningMode
from sft_play.data.encode import MASKED
from sft_play.record.checkpoints import newest_first
from sft_play.runtime.adapter_file import WEIGHTS
from sft_play.runtime.collate import LENGTHS
from sft_play.runtime.generate import Speaker, load_speaker
from sft_play.runtime.job import Job, read_job
from sft_play.runtime.model import DTYPES, quantization
from sft_play.runtime.shard_files import base_tensors, read_tensor

# Documents whose loss is computed again, and those that are answered: the ones with the shortest answers.
LOSS_DOCUMENTS, ANSWERED = 16, 3
# Of a longer answer only the end has to be generated, after the rest of it.
ANSWER_TOKENS = 96
# What an answer may take beside its own length before it is taken for one that does not end.
MORE_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class Document:
    """Tokens and labels of one row, or of one document of a pack.

    Attributes:
        first, end: positions of the first learned token and of the learned token that ends its turn; `end` is None
            where no learned token ends anything.
    """

    ids: list[int]
    labels: list[int]
    first: int
    end: int | None

    @property
    def start(self) -> int:
        """Where generation begins: at the answer, or within a long one shortly before its end."""
        last = self.end if self.end is not None else len(self.ids) - 1
        return max(self.first, last - ANSWER_TOKENS, 1)


@dataclass(frozen=True, kw_only=True)
class Look:
    """What was found.

    Attributes:
        documents, with_end: documents of the batch, and those with a learned token that ends an answer.
        weights: trained tensors that were compared with what they began as.
        unmoved: names of those that are still that.
        loss: mean over the learned tokens of the first documents, computed with the checkpoint's weights.
        answers: greedy ones of the checkpoint; empty where no document has an answer.
        ended: how many of them end by themselves.
        chance_of_end: mean probability of the end token where the rows have it.
        same_answers: whether checkpoint and result, each loaded anew, answer alike.
    """

    documents: int
    with_end: int
    weights: int
    unmoved: list[str]
    checkpoint: str
    loss: float
    answers: list[str]
    ended: int
    chance_of_end: float
    same_answers: bool


def look(job: Job) -> Look:
    """Load the last checkpoint and the result, and compare them with each other and with the base."""
    full = job.config.tuning.mode is TuningMode.FULL
    checkpoint, result = newest_first(job.run)[0], job.run.model if full else job.run.adapter
    names, unmoved = moved_weights(checkpoint, None if not full else job.model_path)
    speaker = load(job, checkpoint, full=full)
    ends = set(load_ends(job, speaker))
    documents = read_documents(job, ends)
    answered = sorted((one for one in documents if one.end is not None), key=lambda one: len(one.ids))[:ANSWERED]
    loss, chance = losses_of(speaker.model, documents[:LOSS_DOCUMENTS])
    answers = [answer(speaker, one, ends) for one in answered]
    del speaker
    again = load(job, result, full=full)
    return Look(
        documents=len(documents),
        with_end=sum(one.end is not None for one in documents),
        weights=names,
        unmoved=unmoved,
        checkpoint=checkpoint.name,
        loss=loss,
        answers=[again.tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in answers],
        ended=sum(ids[-1] in ends for ids in answers),
        chance_of_end=chance,
        same_answers=answers == [answer(again, one, ends) for one in answered],
    )


def load(job: Job, folder: Path, *, full: bool) -> Speaker:
    """A saved folder of the run, on its base where it is an adapter."""
    trust, dtype = job.config.model.trust_remote_code, DTYPES[job.plan.dtype]
    if full:
        return load_speaker(folder, None, dtype=dtype, trust_remote_code=trust)
    quantized = quantization(job.config, job.plan)
    return load_speaker(job.model_path, folder, dtype=dtype, quantization=quantized, trust_remote_code=trust)


def load_ends(job: Job, speaker: Speaker) -> list[int]:
    """The tokens that inference stops at: those of the result, which knows its base's generation config."""
    saved = (job.run.model if job.run.model.is_dir() else job.run.adapter) / "generation_config.json"
    known = json.loads(saved.read_text(encoding="utf-8")).get("eos_token_id") if saved.is_file() else None
    ids = known if isinstance(known, list) else [known]
    return [*speaker.end_ids, *(one for one in ids if one is not None)]


def read_documents(job: Job, ends: set[int]) -> list[Document]:
    """The training rows, packs taken apart; those without a learned token are left out."""
    found = []
    for row in job.first_rows(job.dataset("train")):
        at = 0
        for length in row.get(LENGTHS) or [len(row["input_ids"])]:
            ids, labels = (row[name][at : at + length] for name in ("input_ids", "labels"))
            at += length
            learned = [n for n, label in enumerate(labels) if label != MASKED and n]
            if learned:
                end = next((n for n in learned if labels[n] in ends), None)
                found.append(Document(ids=ids, labels=labels, first=learned[0], end=end))
    return found


def losses_of(model: Any, documents: Sequence[Document]) -> tuple[float, float]:
    """Mean loss over the learned tokens, and mean probability of the end tokens; 0 where there is none."""
    total, learned, chances = 0.0, 0, []
    for one in documents:
        ids = torch.tensor([one.ids], device=model.device)
        with torch.no_grad():
            logs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        labels = torch.tensor(one.labels[1:], device=model.device)
        kept = labels != MASKED
        total -= float(logs[kept].gather(1, labels[kept].unsqueeze(1)).sum())
        learned += int(kept.sum())
        if one.end is not None:
            chances.append(float(logs[one.end - 1, one.ids[one.end]].exp()))
    return total / max(learned, 1), sum(chances) / max(len(chances), 1)


def answer(speaker: Speaker, one: Document, ends: set[int]) -> list[int]:
    """The greedy answer to the tokens before it, its end token included."""
    assert one.end is not None
    prompt = torch.tensor([one.ids[: one.start]], device=speaker.model.device)
    with torch.no_grad():
        made = speaker.model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=one.end - one.start + MORE_TOKENS,
            do_sample=False,
            eos_token_id=sorted(ends),
            pad_token_id=speaker.tokenizer.pad_token_id,
        )
    return [int(token) for token in made[0, prompt.shape[1] :]]


def moved_weights(folder: Path, base: Path | None) -> tuple[int, list[str]]:
    """How many trained tensors were compared, and the names of those that are as they began.

    Of an adapter that is each B matrix, which begins as zeros; of a whole model each tensor, beside its base.
    """
    if base is None:
        files = dict.fromkeys(_names(folder / WEIGHTS), folder / WEIGHTS)
        names = [name for name in files if "lora_B" in name or "lora_embedding_B" in name]
        return len(names), [name for name in names if not read_tensor(name, files).any()]
    files, before = base_tensors(folder), base_tensors(base)
    both = [name for name in files if name in before]
    return len(both), [name for name in both if _same(read_tensor(name, files), read_tensor(name, before))]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other.to(one.dtype))


def _names(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as opened:
        return list(opened.keys())


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(json.dumps(asdict(look(read_job(Path(sys.argv[1]))))))
