"""`make serve` and `make chat`: a real server, real requests, and answers that are those of `make infer`."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sft_play.cli import serve
from sft_play.data.encode import encode_prompt
from sft_play.data.template import load_text_tokenizer
from sft_play.errors import EnvironmentProblem
from tests.tiny import ROOT, Workplace, make_workplace

installed = pytest.mark.skipif(
    not all(map(find_spec, serve.PACKAGES)), reason="the packages of serve are not installed"
)
PROMPTS = [f"What comes after {number}?" for number in range(8)] + ["", "Ünïcode? 你好 <|im_end|>"]
PROMPTS[8] = "Think. " * 20
SYSTEM = "Answer in one line."
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "5", "tool_call_id": "c1"},
]


@dataclass
class Server:
    """A running `make serve`, and the workplace with the run that it serves."""

    workplace: Workplace
    process: subprocess.Popen[str]
    port: int

    def ask(self, path: str = "/v1/models", body: Any = None, **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        data = json.dumps(body) if body is not None else None
        connection.request("POST" if data else "GET", path, data, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, text

    def chat(self, content: str, **body: Any) -> dict[str, Any]:
        asked = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 48, **body}
        status, text = self.ask("/v1/chat/completions", asked)
        assert status == 200, text
        return json.loads(text)


def start(workplace: Workplace, **variables: str) -> tuple[subprocess.Popen[str], int]:
    process = workplace.start("serve", **variables)
    assert process.stdout is not None
    line = process.stdout.readline()
    if "on http://127.0.0.1:" not in line:
        raise AssertionError(line + process.communicate()[1])
    return process, int(line.split("on http://127.0.0.1:")[1].split("/")[0])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    workplace = make_workplace(tmp_path_factory.mktemp("serve"), tiny_model)
    workplace.write(train={"max_steps": 60}, data={"validation": None})
    done = workplace.train()
    assert done.code == 0, done.err
    process, port = start(workplace, RUN="tiny", PORT="0")
    yield Server(workplace, process, port)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out.strip(), errors) == (0, "ended", "")
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def inferred(workplace: Workplace, *words: str) -> list[str]:
    (workplace.path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": one}) + "\n" for one in PROMPTS))
    words = ("--file", "prompts.jsonl", "--json", "--max-new-tokens", "48", *words)
    done = workplace.run("infer", *words, RUN="runs/tiny")
    assert done.code == 0, done.err
    return [json.loads(line)["answer"] for line in done.out.splitlines()]


@installed
def test_served_answers_are_those_of_infer(server: Server) -> None:
    answers = [server.chat(prompt) for prompt in PROMPTS]
    texts = [one["choices"][0]["message"]["content"].strip() for one in answers]
    assert texts == inferred(server.workplace)
    assert len(set(texts)) >= 3
    tokenizer = load_text_tokenizer(server.workplace.path / "runs/tiny/adapter")
    fed = [len(encode_prompt(tokenizer, [{"role": "user", "content": prompt}])) for prompt in PROMPTS]
    assert [one["usage"]["prompt_tokens"] for one in answers] == fed
    # Some answers end by themselves, at the token that training learned; others at the limit.
    stopped = {one["choices"][0]["finish_reason"] for one in answers}
    assert stopped <= {"stop", "length"}
    assert "stop" in stopped
    assert server.chat(PROMPTS[0], max_tokens=3)["choices"][0]["finish_reason"] == "length"


@installed
def test_streamed_answers_under_a_system_message(server: Server) -> None:
    """Through OpenAI's own client."""
    from openai import OpenAI

    client = OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["tiny"]
    texts = []
    for prompt in PROMPTS:
        messages: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
        stream = client.chat.completions.create(
            model="tiny", messages=messages, temperature=0, max_tokens=48, stream=True
        )
        texts.append("".join(chunk.choices[0].delta.content or "" for chunk in stream).strip())
    wanted = inferred(server.workplace, "--system", SYSTEM)
    # A character that the limit cuts in two is left out of a stream.
    assert [text.rstrip("\ufffd ") for text in texts] == [text.rstrip("\ufffd ") for text in wanted]


@installed
def test_nothing_but_this_model_and_its_template(server: Server) -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
    status, said = server.ask("/v1/chat/completions", {**asked, "model": "other/model"})
    assert (status, "pinned to 'tiny'" in said) == (400, True)
    for route in ("/load_model", "/v1/systemone", "/v1/audio/transcriptions"):
        assert server.ask(route, {"model": "tiny"})[0] == 404
    status, said = server.ask("/v1/chat/completions", {**asked, "chat_template_kwargs": {"x": 1}})
    assert (status, "rendered by the trained template" in said) == (400, True)
    assert server.ask(Host="pages.example")[0] == 400
    assert server.ask("/reset", {})[0] == 200
    assert server.chat("What comes after 3?")["model"] == "tiny"


@installed
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"messages": None}, "messages is missing"),
        ({"messages": "Hi"}, "a list with at least one message"),
        ({"messages": []}, "a list with at least one message"),
        ({"messages": ["Hi"]}, "messages[0]: an object with role and content expected, found text"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role: missing"),
        ({"messages": [{"role": "wizard", "content": "Hi"}]}, "unknown role 'wizard'"),
        ({"messages": [{"role": "user", "content": "Hi"}, {"role": "system", "content": "x"}]}, "after the first turn"),
        ({"messages": [{"role": "user", "content": "Hi", "mood": "bad"}]}, "message.mood would be left out"),
        ({"messages": [{"role": "user", "content": 5}]}, "content: text expected, found a number"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "not UTF-8 text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}]},
            "image content cannot be learned, only text",
        ),
        ({"messages": [{"role": "user", "content": "a 1" * 400}]}, "the model reads 512"),
        ({"messages": [{"role": "user", "content": "a 1" * 10**6}]}, "longer than the 512 tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "x"}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 1, "top_p": 9}, "top_p"),
        ({"seed": "x"}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ""}, "stop has to be a string or a list of them, none empty"),
        ({"stream": "yes"}, "stream has to be true or false"),
        ({"generation_config": '{"num_beams": 99999}'}, "generation_config is not offered"),
        ({"n": 2}, "n is not offered; leave it out, or n=1"),
        ({"n": True}, "n is not offered"),
        ({"logprobs": True, "top_logprobs": 5}, "logprobs is not offered"),
        ({"response_format": {"type": "json_object"}}, "response_format is not offered"),
        ({"frequency_penalty": 0.5}, "frequency_penalty is not offered"),
        ({"tool_choice": "required"}, "tool_choice is not offered"),
        ({"temperature": 1e-300}, "temperature has to be 0, or from 1e-09 to 1e+09"),
        ({"temperature": 10**400}, "temperature has to be 0"),
        ({"temperature": 1, "seed": 2**70}, "seed has to be a whole number from"),
        ({"stop": ["\ud800"]}, "stop: holds text that is not UTF-8"),
        ({"messages": [*CALLED[:1], {**CALLED[1], "content": "5"}]}, "does not write calls of tools"),
        ({"messages": CALLED}, "the trained template does not write calls of tools"),
        ({"tools": "search"}, "tools: a list of tools expected"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]: the tool has no name"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "the trained template does not write tools"),
    ],
)
def test_requests_that_cannot_be_answered(server: Server, wrong: dict[str, Any], words: str) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], **wrong}
    status, said = server.ask("/v1/chat/completions", asked)
    assert (status, words in said) == (400, True), said


@installed
@pytest.mark.parametrize(
    ("path", "wrong", "words"),
    [
        ("completions", {"prompt": ""}, "prompt has to be a text that is not empty"),
        ("completions", {"prompt": ["a", "b"]}, "prompt has to be a text"),
        ("completions", {"prompt": "\ud800"}, "prompt: holds text that is not UTF-8"),
        ("completions", {"prompt": "a " * 2000}, "tokens, and the model reads 512"),
        ("completions", {"prompt": "a " * 10**6}, "longer than the 512 tokens"),
        ("responses", {"input": [{"role": "user", "content": "Hi"}, "x"]}, "input[1]: an object expected, found text"),
        ("responses", {"input": [{"role": "user", "content": "Hi"}, {"type": "function_call"}]}, "call_id: missing"),
        ("responses", {"input": [{"role": "user", "content": "Hi", "mood": "bad"}]}, "mood would be left out"),
        ("responses", {"input": [{"role": "system", "content": "a"}], "instructions": "b"}, "one would be left out"),
        ("responses", {"input": [{"role": "user", "content": "Hi"}, {"type": "reasoning", "content": [{}]}]}, "a text"),
    ],
)
def test_prompts_and_items_that_cannot_be_answered(
    server: Server, path: str, wrong: dict[str, Any], words: str
) -> None:
    status, said = server.ask(f"/v1/{path}", wrong)
    assert (status, words in said) == (400, True), said


@installed
def test_the_other_ways_to_ask_through_the_client_of_openai(server: Server) -> None:
    """A response that is not asked as a stream, its output sent back as it came, and a list of one prompt."""
    from openai import OpenAI

    client = OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")
    first = client.responses.create(
        model="tiny", input=PROMPTS[3], max_output_tokens=48, reasoning={"effort": None}, text={"verbosity": "medium"}
    )
    said = server.chat(PROMPTS[3])["choices"][0]["message"]["content"]
    assert first.output_text == said
    turns: Any = [{"role": "user", "content": PROMPTS[3]}, *first.output, {"role": "user", "content": PROMPTS[4]}]
    second = client.responses.create(model="tiny", input=turns, max_output_tokens=48)
    chat = [turns[0], {"role": "assistant", "content": said}, turns[-1]]
    assert second.output_text == server.chat("", messages=chat)["choices"][0]["message"]["content"]
    streamed = client.responses.create(model="tiny", input=PROMPTS[3], max_output_tokens=48, stream=True)
    assert "".join(one.delta for one in streamed if one.type == "response.output_text.delta") == said
    alone, listed = (
        client.completions.create(model="tiny", prompt=prompt, max_tokens=8, n=1, best_of=1).choices[0].text
        for prompt in ("What", ["What"])
    )
    assert alone == listed


@installed
def test_fields_that_ask_for_nothing(server: Server) -> None:
    """What clients send by themselves: an answer of before as they hold it, and defaults."""
    before = {"role": "assistant", "content": "4", "refusal": None, "annotations": [], "tool_calls": None}
    turns = [{"role": "user", "content": PROMPTS[3]}, before, {"role": "user", "content": PROMPTS[4]}]
    plain = server.chat("", messages=[turns[0], {"role": "assistant", "content": "4"}, turns[2]])
    neutral = {
        "n": 1,
        "presence_penalty": 0,
        "logprobs": False,
        "response_format": {"type": "text"},
        "tools": [],
        "function_call": "none",
    }
    asked = server.chat("", messages=turns, **neutral, user="me", stop=[], logit_bias={}, tool_choice="none")
    assert asked["choices"] == plain["choices"]
    assert asked["usage"] == plain["usage"]


@installed
def test_parts_of_a_text_are_read_as_in_training(server: Server) -> None:
    parts = [{"type": "text", "text": "What comes"}, {"type": "text", "text": " after 3?"}]
    assert (
        server.chat("", messages=[{"role": "user", "content": parts}])["choices"] == server.chat(PROMPTS[3])["choices"]
    )


@installed
def test_requests_beside_each_other(server: Server) -> None:
    """Every one gets the answer that it gets alone, and one that goes away keeps no other waiting."""
    alone = [server.chat(prompt)["choices"][0]["message"]["content"] for prompt in PROMPTS]
    gone = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    asked = {"messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 400, "stream": True, "stop": ["~~"]}
    gone.request("POST", "/v1/chat/completions", json.dumps(asked), {"Content-Type": "application/json"})
    assert gone.getresponse().read(20)
    gone.close()
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(server.chat, PROMPTS))
    assert [one["choices"][0]["message"]["content"] for one in together] == alone


@installed
def test_a_signal_inside_a_stream_ends_the_server(server: Server) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        process, port = start(server.workplace, RUN="tiny", PORT="0")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        asked = {"messages": [{"role": "user", "content": "What comes after 3?"}], "max_tokens": 480, "stream": True}
        asked |= {"temperature": 2}
        connection.request("POST", "/v1/chat/completions", json.dumps(asked), {"Content-Type": "application/json"})
        assert connection.getresponse().read(20)
        process.send_signal(number)
        out, errors = process.communicate(timeout=30)
        assert (process.returncode, out.strip(), errors) == (0, "ended", "")


@installed
def test_a_taken_port(server: Server) -> None:
    done = server.workplace.run("serve", RUN="tiny", PORT=str(server.port))
    assert done.code == 4
    (line,) = done.error_lines
    assert line == (
        f"error: PORT: port {server.port} of 127.0.0.1 cannot be had (address already in use) "
        f"-> PORT={server.port + 1} takes another"
    )


@installed
def test_chat_through_a_pipe(server: Server) -> None:
    first, second = (server.chat(PROMPTS[n], max_tokens=256)["choices"][0]["message"]["content"] for n in (1, 2))
    lines = f"{PROMPTS[1]}\n/new\n{PROMPTS[2]}\n/quit\nnever read\n"
    done = server.workplace.run("chat", stdin=lines, PORT=str(server.port))
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{first}\n{second}\n"
    # Without /new the second question has the first before it.
    turns = [
        {"role": "user", "content": PROMPTS[1]},
        {"role": "assistant", "content": first.strip()},
        {"role": "user", "content": PROMPTS[2]},
    ]
    third = server.chat("", messages=turns, max_tokens=256)["choices"][0]["message"]["content"]
    done = server.workplace.run("chat", stdin=lines.replace("/new\n", ""), URL=f"http://127.0.0.1:{server.port}/v1/")
    assert done.out == f"{first}\n{third}\n"


@installed
@pytest.mark.slow
def test_chat_with_a_server_of_its_own(server: Server) -> None:
    first = server.chat(PROMPTS[1], max_tokens=256)["choices"][0]["message"]["content"]
    done = server.workplace.run("chat", stdin=f"{PROMPTS[1]}\n", RUN="tiny")
    assert (done.code, done.out, done.err) == (0, f"{first}\n", "")
    done = server.workplace.run("chat", stdin=f"{PROMPTS[1]}\n", RUN="none")
    assert done.code == 4
    assert done.error_lines[0] == "error: RUN: there is no run none -> make runs lists them"


def test_a_chat_with_nobody(workplace: Workplace) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = workplace.run("chat", stdin="hello\n", PORT=str(port))
    assert done.code == 4
    assert f"http://127.0.0.1:{port}/v1: nothing answers (ConnectionRefusedError) -> make serve" in done.error_lines[0]


def test_what_the_server_needs_is_named(monkeypatch: pytest.MonkeyPatch, workplace: Workplace) -> None:
    monkeypatch.setattr(serve, "PACKAGES", ("fastapi_of_nobody", "json"))
    with pytest.raises(EnvironmentProblem) as caught:
        serve.check_engine("transformers")
    assert "fastapi_of_nobody is not installed -> .venv/bin/pip install -c constraints.txt" in caught.value.line()
    if find_spec("vllm") is None:
        done = workplace.run("serve", "--engine", "vllm", MODEL=str(workplace.model))
        assert (done.code, "vllm is not installed" in done.error_lines[0]) == (4, True)


def test_the_words_for_vllm(tmp_path: Path) -> None:
    """Adapter and base, the trained template, and the run's name for both."""
    run = tmp_path / "runs/mine"
    (run / "adapter").mkdir(parents=True)
    (run / "adapter/adapter_config.json").write_text('{"r": 32}')
    (run / "adapter/chat_template.jinja").write_text("x")
    (run / "run.json").write_text('{"model_path": "base"}')
    words = " ".join(serve.vllm_words({"RUN": str(run)}, "mine", "127.0.0.1", 8001)[3:])
    tuned = run / "adapter"
    assert words == (
        f"serve base --host 127.0.0.1 --port 8001 --tokenizer {tuned} --chat-template {tuned}/chat_template.jinja "
        f"--enable-lora --lora-modules mine={tuned} --max-lora-rank 32 --generation-config {tuned}"
    )


@pytest.mark.parametrize(
    ("settings", "room"),
    [({"r": 4}, 8), ({"r": 24}, 32), ({"r": 8, "rank_pattern": {"q_proj": 48}}, 64), ({"r": 600}, 600)],
)
def test_vllm_makes_room_for_certain_ranks(settings: dict[str, Any], room: int, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    assert serve.room_for_rank(tmp_path) == room


@installed
@pytest.mark.slow
def test_the_demo_model_answers_as_infer_does(tmp_path: Path) -> None:
    model = ROOT / "models/SmolLM2-135M-Instruct"
    if not model.is_dir():
        pytest.skip("make demo fetches it")
    workplace = Workplace(tmp_path, model)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    prompts = [f"Name {number + 2} colours." for number in range(10)]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    words = ("--file", "prompts.txt", "--json", "--max-new-tokens", "24")
    done = workplace.run("infer", *words, MODEL=str(model))
    wanted = [json.loads(line)["answer"] for line in done.out.splitlines()]
    process, port = start(workplace, MODEL=str(model), PORT="0")
    served = Server(workplace, process, port)
    try:
        answers = [served.chat(one, max_tokens=24)["choices"][0]["message"]["content"].strip() for one in prompts]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert answers == wanted
