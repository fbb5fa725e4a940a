"""`make demo`: bring up 1P3D, ask it things, show who did what, take it down.

Uses xpyd from outside, as a person would: the `xpyd` command, HTTP through the router, the engines'
/metrics. Exit status 0 only if every answer came, D computed at most one prompt token per request,
KV moved from P to D for each, and the greedy tokens equal those of transformers on the checkpoint.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xpyd_core.sizes import format_bytes

HERE = Path(__file__).parent
FLEET_FILE = HERE / "fleet.yaml"
FLEET = "demo"
MODEL = HERE.parent / "demo-model"
START_TIMEOUT_S = 110
COMMAND_TIMEOUT_S = 120  # above it: `xpyd up` itself says why a fleet did not come up
MAX_TOKENS = 40


@dataclass(frozen=True)
class Ask:
    """One request: its title, where it goes, its body without the common fields."""

    title: str
    path: str
    body: dict[str, Any]


def _completion(prompt: str, *, stream: bool, max_tokens: int = MAX_TOKENS) -> Ask:
    title = "completion, streamed" if stream else "completion"
    body = {"prompt": prompt, "stream": stream, "max_tokens": max_tokens}
    return Ask(title, "completions", body)


def _chat(question: str, *, stream: bool) -> Ask:
    messages = [{"role": "user", "content": question}]
    title = "chat, streamed" if stream else "chat"
    body = {"messages": messages, "stream": stream, "max_tokens": MAX_TOKENS}
    return Ask(title, "chat/completions", body)


ASKS = (
    _chat("What does os.path.join do?", stream=True),
    _chat("Who are you?", stream=False),
    _completion("San Francisco is a", stream=False),
    _completion("Return a new string", stream=True),
    _completion("Open the file and return a file object. " * 12, stream=True),
    _completion("The following functions are defined by this module:", stream=False),
)


@dataclass
class Answer:
    """What came back for one Ask, and what the fleet's metrics say about it."""

    text: str = ""
    ids: list[int] = field(default_factory=list[int])
    ttft_s: float = 0.0
    total_s: float = 0.0
    prefill: str = "?"
    decode: str = "?"
    kv_bytes: int = 0
    computed_on_d: int = 0
    expected: list[int] = field(default_factory=list[int])


def say(line: str = "") -> None:
    """Print at once: people watch."""
    print(line, flush=True)


def xpyd(*arguments: str, capture: bool = False) -> str:
    """Run the `xpyd` command; its output when `capture`, else it goes to the terminal."""
    done = subprocess.run(
        [sys.executable, "-m", "xpyd_core", *arguments],
        stdout=subprocess.PIPE if capture else None,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=True,
    )
    return done.stdout or ""


def is_running() -> bool:
    """Whether a fleet of the demo's name is up already: the demo must not take it down."""
    status = [sys.executable, "-m", "xpyd_core", "status", FLEET, "--output", "json"]
    done = subprocess.run(status, capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False)
    return done.returncode == 0


class Fleet:
    """The running fleet, read through `xpyd status` and the engines' metrics."""

    def __init__(self) -> None:
        status = json.loads(xpyd("status", FLEET, "--output", "json", capture=True))
        self.endpoint: str = status["endpoint"]
        self.engines = {
            pod["name"]: (pod["role"], f"http://{pod['http']}")
            for pod in status["pods"]
            if pod["role"] in ("Prefill", "Decode")
        }

    def figures(self) -> dict[str, dict[str, float]]:
        """Per engine: requests ended, KV bytes received, prompt tokens computed."""
        return {name: _read_metrics(url) for name, (_, url) in self.engines.items()}

    def attribute(self, answer: Answer, before: dict[str, dict[str, float]]) -> None:
        """Fill in who served `answer` from what the metrics gained since `before`."""
        deadline = time.monotonic() + 5
        while answer.prefill == "?" or answer.decode == "?":
            after = self.figures()
            for name, (role, _) in self.engines.items():
                gained = {key: after[name][key] - before[name][key] for key in after[name]}
                if gained["requests"] and role == "Prefill":
                    answer.prefill = name
                elif gained["requests"]:
                    answer.decode = name
                    answer.kv_bytes = int(gained["kv"])
                    answer.computed_on_d = int(gained["computed"])
            if time.monotonic() > deadline:
                return


def _read_metrics(url: str) -> dict[str, float]:
    names = {
        "xpyd_engine_requests_total": "requests",
        "xpyd_kv_received_bytes_total": "kv",
        "xpyd_engine_prompt_tokens_computed_total": "computed",
    }
    found = dict.fromkeys(names.values(), 0.0)
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        for line in response.read().decode().splitlines():
            name = line.split("{")[0].split(" ")[0]
            if name in names:
                found[names[name]] += float(line.rsplit(" ", 1)[1])
    return found


def ask(endpoint: str, request: Ask) -> Answer:
    """Send one request through the router and collect text, token ids and times."""
    body = {
        "model": "demo",
        "temperature": 0,
        "return_token_ids": True,
        **request.body,
    }
    http = urllib.request.Request(
        f"{endpoint}/v1/{request.path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    answer, started = Answer(), time.monotonic()
    with urllib.request.urlopen(http, timeout=60) as response:
        if not request.body["stream"]:
            choice = json.loads(response.read())["choices"][0]
            answer.text = choice["text"] if "text" in choice else choice["message"]["content"]
            answer.ids = choice["token_ids"]
        else:
            _read_stream(response, answer, started)
    answer.total_s = time.monotonic() - started
    return answer


def _read_stream(response: Iterable[bytes], answer: Answer, started: float) -> None:
    for raw in response:
        line = raw.decode().strip()
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(f"the stream ended in an error: {event['error']['message']}")
        for choice in event["choices"]:
            answer.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            answer.ids += choice.get("token_ids") or []
            if answer.ids and not answer.ttft_s:
                answer.ttft_s = time.monotonic() - started


class Oracle:
    """transformers on the same checkpoint in fp32; loads while the fleet starts."""

    def __init__(self) -> None:
        self._thread = threading.Thread(target=self._load, daemon=True)
        self._thread.start()
        self._model: Any = None
        self._tokenizer: Any = None

    def _load(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self._model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()

    def wait(self) -> None:
        """Until it is loaded: what it computes in this process would disturb the times taken."""
        self._thread.join(COMMAND_TIMEOUT_S)

    def expected(self, request: Ask) -> list[int]:
        """The greedy token ids that transformers gives for `request`."""
        import torch

        if "prompt" in request.body:
            prompt = self._tokenizer(request.body["prompt"])["input_ids"]
        else:
            prompt = self._tokenizer.apply_chat_template(
                request.body["messages"], add_generation_prompt=True, return_dict=False
            )
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request.body["max_tokens"],
                do_sample=False,
                pad_token_id=0,
            )
        return out[0, len(prompt) :].tolist()


def show(number: int, request: Ask, answer: Answer) -> list[str]:
    """Print one answer; the problems found with it."""
    prompt = request.body.get("prompt") or request.body["messages"][0]["content"]
    shown = prompt if len(prompt) <= 60 else f"{prompt[:57]}..."
    say(f"\n{number}. {request.title}: {shown}")
    say(f"   > {' '.join(answer.text.split())}")
    tokens = len(answer.ids)
    rest_s = answer.total_s - answer.ttft_s
    if answer.ttft_s and tokens > 1:
        speed = f"TTFT {answer.ttft_s * 1000:.0f} ms, {(tokens - 1) / rest_s:.0f} tokens/s"
    else:  # not streamed: the whole answer's time
        speed = f"{answer.total_s:.2f} s, {tokens / answer.total_s:.0f} tokens/s"
    say(
        f"   {answer.prefill} -> {answer.decode}: {format_bytes(answer.kv_bytes)} of KV moved,"
        f" D computed {answer.computed_on_d} prompt tokens; {tokens} tokens, {speed}"
    )
    equal = answer.ids == answer.expected
    say(f"   tokens equal transformers: {'yes' if equal else 'NO'}")
    problems: list[str] = []
    if not equal:
        problems.append(f"request {number}: {answer.ids} instead of {answer.expected}")
    if "?" in (answer.prefill, answer.decode) or answer.kv_bytes == 0:
        problems.append(f"request {number}: no KV went from a P to a D")
    if answer.computed_on_d > 1:
        problems.append(f"request {number}: D computed {answer.computed_on_d} prompt tokens")
    if not answer.text.strip():
        problems.append(f"request {number}: the answer is empty")
    return problems


def serve(oracle: Oracle) -> list[str]:
    """Ask everything; the problems found."""
    fleet = Fleet()
    oracle.wait()
    problems: list[str] = []
    for number, request in enumerate(ASKS, 1):
        before = fleet.figures()
        answer = ask(fleet.endpoint, request)
        fleet.attribute(answer, before)
        answer.expected = oracle.expected(request)
        problems += show(number, request, answer)
    return problems


def main() -> int:
    """Run the demo; the exit status."""
    started = time.monotonic()
    if is_running():
        say(f"A fleet `{FLEET}` is running. Take it down first: xpyd down {FLEET}")
        return 2
    say("A fleet of 1 prefill and 3 decode engines, each a process with an address of its own.")
    oracle = Oracle()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        xpyd("up", "-f", str(FLEET_FILE), "--detach", "--timeout", str(START_TIMEOUT_S))
        problems = serve(oracle)
    except subprocess.CalledProcessError as error:
        return error.returncode
    except KeyboardInterrupt:
        say("\nstopped")
        return 130
    finally:
        if is_running():
            say()
            xpyd("down", FLEET)
    took_s = time.monotonic() - started
    for problem in problems:
        say(f"FAILED: {problem}")
    if not problems:
        say(f"\nAll {len(ASKS)} answers equal transformers, and no D computed a prompt again.")
    say(f"The demo took {took_s:.0f} s.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
