"""An OpenAI-compatible endpoint: transformers' own server, told of one model that is loaded already.

Prompts become tokens by the very code that prepared training, answers end at the tokens that training learned as ends,
and no other model is ever loaded.
"""

from __future__ import annotations

import socket
from typing import Any

import torch
import uvicorn
from fastapi import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from transformers import BatchEncoding
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.systemone import SystemOneHandler
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import GenerationState

from sft_play.data.bad_row import RowProblem
from sft_play.data.encode import encode_prompt
from sft_play.errors import SftPlayError
from sft_play.runtime.generate import Speaker
from sft_play.runtime.requests import problem_of_items, read_messages, request_problem

# What a request that is being answered gets when the server is asked to end.
END_SECONDS = 2
# More of them in one token than any text has in the mean.
LETTERS_A_TOKEN = 64
# Routes for other models and other media than the one that is served.
LEFT_OUT = ("/load_model", "/v1/audio/transcriptions", "/v1/systemone")
TEMPLATE_ONLY = "is not offered: prompts are rendered by the trained template as in training"


class OneModel(ModelManager):
    """The model that is served; a request for another one is refused."""

    def __init__(self, name: str, speaker: Speaker) -> None:
        super().__init__()
        self.force_model = name
        self.speaker = speaker

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id

    def load_model_and_processor(self, model_id_and_revision: str, *_: Any, **__: Any) -> tuple[Any, Any]:
        self.refuse_other(model_id_and_revision)
        return self.speaker.model, self.speaker.tokenizer

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        return [{"id": self.force_model, "object": "model", "created": 0, "owned_by": "sft-play"}]

    def refuse_other(self, name: str) -> None:
        if name != self.force_model:
            raise HTTPException(status_code=400, detail=f"only {self.force_model} is served here, not {name}")

    def shutdown(self) -> None:
        """Nothing unloads it: whoever can send a request could."""


class AsAsked:
    """Greedy unless a temperature is asked for, and ended where training learned the end."""

    model_manager: OneModel
    # The field that has to be there.
    needed: str

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)  # type: ignore[misc]
        if problem := request_problem(body, self.needed):
            raise HTTPException(status_code=400, detail=problem)

    @staticmethod
    def get_processor_inputs_from_messages(messages: Any, modality: Any) -> list[dict[str, Any]]:
        """The turns of a chat as training reads them; upstream leaves out what stands beside a tool call."""
        try:
            return read_messages(messages)
        except RowProblem as problem:
            raise HTTPException(status_code=400, detail=f"{problem.field}: {problem.reason}") from problem

    def _build_generation_config(self, body: dict[str, Any], model_generation_config: Any, **named: Any) -> Any:
        made = super()._build_generation_config(body, model_generation_config, **named)  # type: ignore[misc]
        made.do_sample = float(body.get("temperature") or 0) > 0
        speaker = self.model_manager.speaker
        made.eos_token_id, made.pad_token_id = speaker.end_ids, speaker.tokenizer.pad_token_id
        return made


class Chats(AsAsked, ChatCompletionHandler):
    """`/v1/chat/completions`."""

    needed = "messages"


class Completions(AsAsked, CompletionHandler):
    """`/v1/completions`."""

    needed = "prompt"

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        prompt = body["prompt"]
        if isinstance(prompt, list) and len(prompt) == 1:  # as clients write that send several at once
            prompt = body["prompt"] = prompt[0]
        if not isinstance(prompt, str) or not prompt:
            raise HTTPException(status_code=400, detail="prompt has to be a text that is not empty, or a list of one")
        speaker = self.model_manager.speaker
        refuse_long_text(prompt, speaker)
        refuse_long(len(speaker.tokenizer(prompt)["input_ids"]), speaker)


class Responses(AsAsked, ResponseHandler):
    """`/v1/responses`."""

    needed = "input"

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        if problem := problem_of_items(body):
            raise HTTPException(status_code=400, detail=problem)
        body.setdefault("stream", False)  # upstream takes it for asked


def serve(speaker: Speaker, name: str, listening: socket.socket, *, local: bool) -> None:
    """Answer requests until a signal ends the process.

    Args:
        name: what requests call the model.
        listening: a bound socket.
        local: whether only this machine's own names for itself are answered to.
    """
    app = build_app(speaker, name)
    if local:  # a page in a browser must not reach it under a name of its own
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
    settings = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=END_SECONDS)
    uvicorn.Server(settings).run(sockets=[listening])


def build_app(speaker: Speaker, name: str) -> Any:
    """The application: transformers' routes and handlers over this one model."""
    speaker.tokenizer.apply_chat_template = trained_template(speaker)
    manager, state = OneModel(name, speaker), GenerationState()
    app = build_server(
        manager,
        Chats(manager, state),
        completion_handler=Completions(manager, state),
        response_handler=Responses(manager, state),
        transcription_handler=TranscriptionHandler(manager, state),
        systemone_handler=SystemOneHandler(manager, state),
        generation_state=state,
    )
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") not in LEFT_OUT]
    return app


def trained_template(speaker: Speaker) -> Any:
    """What stands in for the tokenizer's `apply_chat_template`: the tokens of `make infer`."""

    def apply(messages: list[dict[str, Any]], tools: Any = None, **named: Any) -> BatchEncoding:
        known = ("add_generation_prompt", "return_tensors", "return_dict", "tokenize", "load_audio_from_video")
        if other := [key for key in named if key not in known]:
            raise HTTPException(status_code=400, detail=f"{', '.join(other)} {TEMPLATE_ONLY}")
        refuse_long_text(str(messages), speaker)
        try:
            ids = encode_prompt(speaker.text_tokenizer, messages, tools)
        except SftPlayError as error:
            raise HTTPException(status_code=400, detail=error.line()) from error
        refuse_long(len(ids), speaker)
        if tools and ids == encode_prompt(speaker.text_tokenizer, messages):
            raise HTTPException(status_code=400, detail="the trained template does not write tools")
        if not writes_calls(speaker, messages, tools, ids):
            raise HTTPException(status_code=400, detail="the trained template does not write calls of tools")
        row = torch.tensor([ids])
        return BatchEncoding({"input_ids": row, "attention_mask": torch.ones_like(row)})

    return apply


def writes_calls(speaker: Speaker, messages: list[dict[str, Any]], tools: Any, ids: list[int]) -> bool:
    """Whether the tokens of a chat are others without its calls of tools; true where it has none."""
    if not any(turn.get("tool_calls") for turn in messages):
        return True
    without = [{name: value for name, value in turn.items() if name != "tool_calls"} for turn in messages]
    try:
        return encode_prompt(speaker.text_tokenizer, without, tools) != ids
    except SftPlayError:
        return True


def refuse_long_text(text: str, speaker: Speaker) -> None:
    """Refuse a prompt that is not even worth the time to make tokens of."""
    limit = limit_of(speaker)
    if limit and len(text) > LETTERS_A_TOKEN * limit:
        raise HTTPException(status_code=400, detail=f"the prompt is longer than the {limit} tokens of the model")


def refuse_long(tokens: int, speaker: Speaker) -> None:
    """Refuse a prompt that leaves the model no room for an answer."""
    limit = limit_of(speaker)
    if limit and tokens >= limit:
        raise HTTPException(status_code=400, detail=f"{tokens} tokens, and the model reads {limit}")


def limit_of(speaker: Speaker) -> int | None:
    """The tokens that the model reads, where its config says."""
    return getattr(speaker.model.config, "max_position_embeddings", None)
