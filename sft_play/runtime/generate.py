"""Load a trained model for inference and let it answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, TextIteratorStreamer

from sft_play.data.encode import closing_ids, encode_prompt
from sft_play.data.template import TextTokenizer, load_text_tokenizer
from sft_play.errors import ModelError
from sft_play.runtime.model import keep_layout, load_tokenizer

Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen; greedy at temperature 0."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0


@dataclass(frozen=True)
class Speaker:
    """A model that answers chats."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    end_ids: list[int]
    text_tokenizer: TextTokenizer

    def answer(self, messages: Sequence[Message], sampling: Sampling, *, base: bool = False) -> str:
        """The whole answer; with `base`, that of the model without its adapter."""
        return "".join(self.stream(messages, sampling, base=base)).strip()

    def stream(self, messages: Sequence[Message], sampling: Sampling, *, base: bool = False) -> Iterator[str]:
        """The answer in pieces, as they are generated."""
        prompt = self.prompt_ids(messages).to(self.model.device)
        streamer = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        choice: dict[str, Any] = {"do_sample": sampling.temperature > 0}
        if sampling.temperature > 0:
            choice |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        failures: list[BaseException] = []

        def generate() -> None:
            without = self.model.disable_adapter() if base and self.has_adapter else nullcontext()
            try:
                with torch.no_grad(), without:
                    self.model.generate(
                        input_ids=prompt,
                        attention_mask=torch.ones_like(prompt),
                        max_new_tokens=sampling.max_new_tokens,
                        eos_token_id=self.end_ids,
                        pad_token_id=self.tokenizer.pad_token_id,
                        streamer=streamer,
                        **choice,
                    )
            except BaseException as error:  # handed to the caller below; the stream must end first
                failures.append(error)
                streamer.end()

        thread = Thread(target=generate, daemon=True)
        thread.start()
        yield from streamer
        thread.join()
        if failures:
            raise failures[0]

    def prompt_ids(self, messages: Sequence[Message]) -> torch.Tensor:
        """Token ids, shape (1, n): the chat up to where the answer begins, by the very code that prepared training.

        Raises:
            DataError: the template refuses these messages, or there are several and no template.
        """
        return torch.tensor([encode_prompt(self.text_tokenizer, messages)])

    @property
    def has_adapter(self) -> bool:
        return isinstance(self.model, PeftModel)


def load_speaker(
    model: Path,
    adapter: Path | None,
    *,
    quantization: Any = None,
    dtype: torch.dtype | str = "auto",
    trust_remote_code: bool = False,
) -> Speaker:
    """A model folder, or a base with an adapter; tokenizer and template come from the adapter's folder.

    Args:
        dtype: of the weights; `auto` takes that of the files.

    Raises:
        ModelError: the adapter's folder is no adapter.
    """
    if adapter is not None and not (adapter / "adapter_config.json").is_file():
        raise ModelError("adapter_config.json is missing", where=str(adapter), fix="give ADAPTER=runs/NAME/adapter")
    loaded = AutoModelForCausalLM.from_pretrained(
        model,
        dtype=dtype,
        quantization_config=quantization,
        device_map={"": 0} if torch.cuda.is_available() else None,
        trust_remote_code=trust_remote_code,
        local_files_only=True,
    )
    keep_layout(loaded)
    if adapter is not None:
        loaded = PeftModel.from_pretrained(loaded, str(adapter))
    tokenizer = load_tokenizer(adapter or model, None, trust_remote_code=trust_remote_code)
    text_tokenizer = load_text_tokenizer(adapter or model)
    ends = end_token_ids(text_tokenizer, loaded.generation_config)
    return Speaker(loaded.eval(), tokenizer, ends, text_tokenizer)


def end_token_ids(tokenizer: TextTokenizer, generation_config: Any) -> list[int]:
    """Tokens that end an answer: those of the generation config, the tokenizer's, and those that training learns."""
    known = generation_config.eos_token_id if generation_config is not None else None
    ids = list(known) if isinstance(known, list) else [known]
    return sorted({one for one in [*ids, tokenizer.eos_id, *closing_ids(tokenizer)] if one is not None})
