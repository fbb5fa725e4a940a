"""`xpyd chat` against a stand-in endpoint."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.tls_kit import write_ca, write_pair
from xpyd_core.errors import UserError
from xpyd_operator.up.chat import Conversation, run_chat


class Endpoint(BaseHTTPRequestHandler):
    def log_message(self, *_) -> None:
        pass

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            self.answer(401, json.dumps({"error": {"message": "no API key"}}).encode())
            return
        self.answer(200, json.dumps({"data": [{"id": "m"}]}).encode())

    def do_POST(self) -> None:
        assert not self.server.key or self.headers["Authorization"] == f"Bearer {self.server.key}"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        last = body["messages"][-1]["content"]
        if last == "refuse":
            error = {"error": {"message": "too long"}}
            self.answer(400, json.dumps(error).encode())
            return
        if last == "slow":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'data: {"choices": [{"delta": {"content": "well..."}}]}\n\n')
            self.rfile.read(1)  # until the client goes away
            return
        events = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        if last == "think":
            events += [{"choices": [{"delta": {"reasoning_content": "hm", "reasoning": "hm"}}]}]
        events += [{"choices": [{"delta": {"content": word}}]} for word in ("you ", "said ", last)]
        if last == "break":
            events[-1] = {"error": {"message": "the engine died"}}
        chunks = [f"data: {json.dumps(event)}\n\n" for event in events]
        self.answer(200, "".join([": ping\n\n", *chunks, "data: [DONE]\n\n"]).encode())


@pytest.fixture
def endpoint():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    server.bodies, server.key = [], ""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def https(endpoint, tmp_path):
    """The endpoint over TLS, and the file of its authority."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    files = write_pair(tmp_path)
    context.load_cert_chain(files.certificate, files.key)
    endpoint.socket = context.wrap_socket(endpoint.socket, server_side=True)
    return write_ca(tmp_path / "ca.crt")


def test_an_endpoint_over_tls_is_verified_by_the_named_authority(endpoint, https, monkeypatch):
    url = f"https://127.0.0.1:{endpoint.server_port}"
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    assert "".join(Conversation(url, ca_file=https).ask("hi")) == "you said hi"
    with pytest.raises(UserError, match=r"certificate is refused: .*--ca-file or SSL_CERT_FILE"):
        list(Conversation(url).ask("hi"))
    monkeypatch.setenv("SSL_CERT_FILE", str(https))
    assert "".join(Conversation(url).ask("hi")) == "you said hi"
    with pytest.raises(UserError, match="--ca-file: cannot use /no/such"):
        list(Conversation(url, ca_file=Path("/no/such")).ask("hi"))


def talk(endpoint, message=None, stdin="", path="", **fields):
    conversation = Conversation(f"http://127.0.0.1:{endpoint.server_port}{path}", **fields)
    out = io.StringIO()
    status = run_chat(conversation, message, stdin=io.StringIO(stdin), out=out)
    return status, out.getvalue(), conversation


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_one_message_gets_its_answer_from_the_first_model(endpoint, path):
    status, said, _ = talk(endpoint, "hello", path=path)
    assert (status, said) == (0, "you said hello\n")
    (body,) = endpoint.bodies
    assert (body["model"], body["stream"]) == ("m", True)
    assert "max_tokens" not in body


def test_a_message_may_be_piped_in(endpoint):
    assert talk(endpoint, stdin="piped", model="x", max_tokens=5)[1] == "you said piped\n"
    assert (endpoint.bodies[0]["model"], endpoint.bodies[0]["max_tokens"]) == ("x", 5)


def test_a_conversation_remembers_both_sides(endpoint):
    _, _, conversation = talk(endpoint, "one")
    assert list(conversation.ask("two"))[-1] == "two"
    assert [m["content"] for m in endpoint.bodies[-1]["messages"]] == ["one", "you said one", "two"]


def test_a_key_is_sent_with_each_call_and_asked_for_where_it_is_missing(endpoint):
    endpoint.key = "secret"
    assert talk(endpoint, "hello", api_key="secret")[1] == "you said hello\n"
    with pytest.raises(UserError, match=r"answered 401: no API key \(give --api-key"):
        talk(endpoint, "hello")
    assert "secret" not in repr(Conversation("http://x", api_key="secret"))


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_what_the_model_thinks_and_the_next_question_is_without_it(endpoint):
    conversation = Conversation(f"http://127.0.0.1:{endpoint.server_port}")
    out = Screen()
    assert run_chat(conversation, "think", stdin=io.StringIO(), out=out) == 0
    assert out.getvalue() == "\033[2mhm\033[0myou said think\n"
    assert conversation.messages[-1] == {"role": "assistant", "content": "you said think"}
    assert talk(endpoint, "think")[1] == "you said think\n"


def test_a_refusal_is_shown_and_forgotten(endpoint):
    conversation = Conversation(f"http://127.0.0.1:{endpoint.server_port}")
    with pytest.raises(UserError, match="answered 400: too long"):
        list(conversation.ask("refuse"))
    assert conversation.messages == []


def test_an_answer_that_breaks_off_says_why_and_keeps_what_came(endpoint):
    conversation = Conversation(f"http://127.0.0.1:{endpoint.server_port}")
    with pytest.raises(UserError, match="broke off: the engine died"):
        list(conversation.ask("break"))
    assert conversation.messages[-1] == {"role": "assistant", "content": "you said "}


def test_nothing_to_say_and_nobody_there_are_user_errors(endpoint):
    with pytest.raises(UserError, match="nothing to say"):
        talk(endpoint, stdin="  \n")
    with pytest.raises(UserError, match="does not answer: Connection refused"):
        list(Conversation("http://127.0.0.1:1").ask("hi"))
    with pytest.raises(UserError, match="expected http://HOST:PORT"):
        list(Conversation("ftp://x").ask("hi"))


class Terminal:
    """`xpyd chat` as the session leader of a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        argv = [sys.executable, "-m", "xpyd_core", "chat", *arguments]
        # In the background of a script pytest ignores SIGINT, and so would the child.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            self.child = subprocess.Popen(
                argv, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
            )
        finally:
            signal.signal(signal.SIGINT, before)
        os.close(slave)
        self.seen = ""

    def expect(self, text: str) -> None:
        while text not in self.seen:
            assert select.select([self.master], [], [], 60)[0], (text, self.seen)
            self.seen += os.read(self.master, 4096).decode()
        self.seen = self.seen.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())


def test_a_conversation_in_a_terminal_ctrl_c_stops_an_answer_ctrl_d_leaves(endpoint):
    terminal = Terminal("--url", f"http://127.0.0.1:{endpoint.server_port}")
    try:
        terminal.expect("> ")
        terminal.type("hello\n")
        terminal.expect("you said hello")
        terminal.expect("> ")
        terminal.type("slow\n")
        terminal.expect("well...")
        terminal.child.send_signal(signal.SIGINT)
        terminal.expect("> ")
        terminal.type("refuse\n")
        terminal.expect("too long")
        terminal.expect("> ")
        terminal.type("\x04")
        assert terminal.child.wait(timeout=20) == 0
    finally:
        terminal.child.kill()
        terminal.child.wait()
        os.close(terminal.master)
    said = [m["content"] for m in endpoint.bodies[-1]["messages"]]
    assert said == ["hello", "you said hello", "slow", "well...", "refuse"]
