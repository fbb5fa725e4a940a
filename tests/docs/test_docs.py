"""The code blocks of README and docs are run as written.

`sh` and `python` blocks of a page run in order, in one shell, from the root of the clone, as a new
user would: without .venv on the PATH, but with a state directory of their own. Where a page starts
a fleet, the router's usual address in its commands stands for the one that this fleet got;
addresses that a page chooses itself are replaced in each run, so that runs at the same time do not
meet. `yaml` and `json` blocks must
parse, fleets must load. `console` blocks show what those commands print: each of their lines must
be among the lines that were printed, but for numbers and ids; `...` stands for what was left out. A
block that cannot run in a test says why behind its language: ```` ```sh not-run: reason ````.
"""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from xpyd_operator.document.load import load_fleet
from xpyd_operator.up.folder import find_fleets, state_root

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGE_TIMEOUT_S = 240
_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.M | re.S)
USUAL_ENDPOINT = "http://127.0.0.1:10001"
_ENDPOINT = (
    """$(.venv/bin/xpyd status --output json | sed -n 's/^  "endpoint": "\\(.*\\)",/\\1/p')"""
)
OWN_PORT = re.compile(r"(127\.0\.0\.1:|--port )20001\b")
OWN_NET = re.compile(r"\b127\.0\.3\.(?=\d)")
KNOWN = {"sh", "python", "yaml", "json", "console", "text", "hex", ""}


@dataclass(frozen=True)
class Block:
    language: str
    note: str
    code: str


def blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    for info, code in _FENCE.findall(page.read_text()):
        language, _, note = info.strip().partition(" ")
        found.append(Block(language, note, code))
    return found


def _script(blocks: list[Block]) -> str:
    # What a page left in the background ends with its shell.
    parts = [
        "set -euo pipefail",
        "trap 'kill $(jobs -p) 2>/dev/null || true; wait || true' EXIT",
        'mktemp() { TMPDIR=$PAGE_FOLDER command mktemp "$@"; }',
    ]
    preamble = len(parts)
    has_fleet = any("xpyd up" in block.code for block in blocks)
    for block in blocks:
        if block.note.startswith("not-run: "):
            continue
        if block.language == "sh":
            code = block.code
            parts.append(code.replace(USUAL_ENDPOINT, _ENDPOINT) if has_fleet else code)
        elif block.language == "python":
            parts.append(f"python - <<'END_OF_PYTHON'\n{block.code}END_OF_PYTHON")
    return "\n".join(parts) if len(parts) > preamble else ""


def _with_own_addresses(script: str) -> str:
    """`script` with a free port and loopback network in place of those that pages choose."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    net = f"127.{random.randint(64, 254)}.{random.randint(0, 255)}."
    return OWN_NET.sub(net, OWN_PORT.sub(rf"\g<1>{port}", script))


def _normal(line: str) -> str:
    """`line` without what differs from run to run: numbers, ids, the width of columns."""
    line = re.sub(r"\b[0-9a-f]{8,}\b", "#", line)
    line = re.sub(r"\d+(\.\d+)?", "#", line)
    # Ages: 14s on one machine, 1m12s on a slower one.
    line = re.sub(r"(?<![\w#])(#[smhd])+(?!\w)", "#s", line)
    return " ".join(line.split())


def not_printed(blocks: list[Block], output: str) -> list[str]:
    """The lines of the console blocks that no line of `output` has in it."""
    printed = [_normal(line) for line in output.splitlines()]
    missing: list[str] = []
    for block in blocks:
        if block.language != "console" or block.note:
            continue
        for line in block.code.splitlines():
            # Behind an answer without a line's end other output follows.
            shown = re.compile(".*".join(map(re.escape, _normal(line).split("..."))))
            if not any(map(shown.search, printed)):
                missing.append(line)
    return missing


def test_a_console_line_that_was_not_printed_is_found() -> None:
    block = Block("console", "", "fleet demo  Ready  http://127.0.0.1:10001\n> a ... d\ngone\n")
    output = "fleet demo Ready http://127.0.0.1:10002\n> a b c d\n"
    assert not_printed([block], output) == ["gone"]


def test_addresses_that_a_page_chooses_are_replaced() -> None:
    script = "a --port 20001 --host 127.0.3.2\ncurl http://127.0.0.1:20001/ 127.0.3.1:10001"
    replaced = _with_own_addresses(script)
    port = re.findall(r"--port (\d+) ", replaced)[0]
    assert f"http://127.0.0.1:{port}/" in replaced
    assert "20001" not in replaced
    assert "127.0.3." not in replaced
    assert replaced.endswith(".1:10001")


def test_a_page_that_takes_too_long_leaves_no_process(tmp_path: Path) -> None:
    script = f"(trap '' TERM; echo $BASHPID > '{tmp_path}/pid'; while :; do sleep 0.1; done) & wait"
    with pytest.raises(subprocess.TimeoutExpired):
        _run_page(script, dict(os.environ), tmp_path / "output", timeout_s=2, grace_s=0.2)
    pid = int((tmp_path / "pid").read_text())
    assert _gone_within(lambda: _raise_if_dead(pid), 5)


def _raise_if_dead(pid: int) -> None:
    os.kill(pid, 0)
    if "zombie" in Path(f"/proc/{pid}/status").read_text():  # not collected yet
        raise ProcessLookupError


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_every_block_has_a_known_language_and_a_reason_not_to_run(page: Path) -> None:
    for block in blocks_of(page):
        assert block.language in KNOWN, block
        assert not block.note or re.fullmatch(r"not-run: .{5,}", block.note), block
        if block.language == "json":
            json.loads(block.code)
        if block.language == "yaml":
            for document in yaml.safe_load_all(block.code):
                assert document is not None


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_a_module_that_is_said_to_run_a_block_reads_its_page(page: Path) -> None:
    for block in blocks_of(page):
        if said := re.search(r"(tests/\S+\.py) runs it", block.note):
            assert page.name in (ROOT / said[1]).read_text(), block.note


def _all_pages() -> list[Path]:
    """Every Markdown file of the tree."""
    listed = _git("ls-files", "--cached", "--others", "--exclude-standard", "*.md")
    return [ROOT / name for name in listed if (ROOT / name).is_file()]


def _git(*arguments: str) -> list[str]:
    """The lines that git prints."""
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.splitlines()


def _anchors(page: Path) -> set[str]:
    """The names by which a link reaches the headings of `page`."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_to_files_and_headings_that_exist() -> None:
    pages = _all_pages()
    assert len(pages) > len(PAGES)
    broken: list[str] = []
    for page in pages:
        text = _FENCE.sub("", page.read_text())
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)", text):
            if "://" in target:
                continue
            file = page.parent / target if target else page
            if not file.exists() or (anchor and anchor not in _anchors(file)):
                broken.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert broken == []


def test_the_source_files_that_pages_name_exist() -> None:
    tree = [f"/{name}" for name in _git("ls-files", "--cached", "--others", "--exclude-standard")]
    old = ROOT / "docs/adr/0034-one-word-for-one-thing.md"  # the table of renames
    gone: list[str] = []
    for page in set(_all_pages()) - {old, ROOT / "CHANGELOG.md"}:
        text = _FENCE.sub("", page.read_text())
        names = re.findall(r"`([\w./-]+\.(?:py|cpp|c|h|sh))`", text)
        missing = [one for one in names if not any(f.endswith(f"/{one}") for f in tree)]
        gone += [f"{page.relative_to(ROOT)}: {one}" for one in missing]
    assert gone == []


def test_the_tests_that_pages_name_exist() -> None:
    gone: list[str] = []
    for page in _all_pages():
        for path, name in set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text())):
            file = ROOT / path
            found = file.is_file() and re.search(rf"^(async )?def {name}\(", file.read_text(), re.M)
            if not found:
                gone.append(f"{page.relative_to(ROOT)}: {path}::{name}")
    assert gone == []


def test_the_code_names_each_decision_that_it_follows() -> None:
    listed = _git("grep", "-hoE", r"(adr/|ADR )0[0-9]{3}", "--", "*.py", "*.sh", ".ci")
    named = {line[-4:] for line in listed}
    pages = {page.name[:4] for page in (ROOT / "docs/adr").glob("0*.md")}
    of_the_repository = {"0034", "0038"}  # words, and the time of a test run
    assert sorted(pages - named - of_the_repository) == []
    assert sorted(named - pages) == []


def test_the_new_words_of_the_table_of_renames_are_in_the_code() -> None:
    sources = [name for name in _git("ls-files", "*.py") if not name.startswith("tests/")]
    texts = [(ROOT / name).read_text() for name in sources if (ROOT / name).is_file()]
    words = set(re.findall(r"\w+", " ".join([*texts, *sources])))
    table = (
        (ROOT / "docs/adr/0034-one-word-for-one-thing.md").read_text().partition("## Renames")[2]
    )
    new = [line.split("|")[2] for line in table.splitlines() if line.startswith("| ")]
    named = [word for cell in new for word in re.findall(r"`([\w./]+)(?:\(\))?`", cell)]
    assert len(named) > 100
    assert [one for one in named if not set(re.findall(r"\w+", one)) <= words] == []


def test_contributing_names_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = [path for path in re.findall(r"`([\w./-]+)`", text) if "/" in path]
    assert len(paths) > 25
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    assert [path for path in paths + links if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_the_fleets_shown_are_accepted(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(blocks_of(page)):
        if block.language == "yaml" and re.search(r"^kind: InferenceFleet$", block.code, re.M):
            file = tmp_path / f"{number}.yaml"
            file.write_text(block.code)
            assert load_fleet(file).metadata.name


LONG = ("docs/bench.md", "docs/parallel.md", "docs/router.md", "docs/engine.md")
RUNNABLE = [
    pytest.param(page, id=name, marks=[pytest.mark.long] if name in LONG else [])
    for page, name in ((page, str(page.relative_to(ROOT))) for page in PAGES)
    if _script(blocks_of(page))
]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNABLE)
def test_the_commands_shown_run_and_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    environment = _new_users_environment(tmp_path)
    blocks = blocks_of(page)
    log = tmp_path / "output"
    try:
        status = _run_page(_with_own_addresses(_script(blocks)), environment, log)
        text = log.read_text()
        assert status == 0, text[-6000:]
        assert not not_printed(blocks, text), text[-6000:]
        left = _fleets(environment)
        assert not left, f"the page leaves a fleet running: {left}"
    finally:
        for fleet in _fleets(environment):
            _down(fleet, environment)


def _new_users_environment(folder: Path) -> dict[str, str]:
    """This environment without .venv and TMPDIR, with state and temporary files in `folder`."""
    environment = {k: v for k, v in os.environ.items() if k not in ("TMPDIR", "VIRTUAL_ENV")}
    folders = environment["PATH"].split(":")
    environment["PATH"] = ":".join(f for f in folders if Path(f) != ROOT / ".venv/bin")
    return environment | {"XDG_STATE_HOME": str(folder / "state"), "PAGE_FOLDER": str(folder)}


def _run_page(
    script: str,
    environment: dict[str, str],
    log: Path,
    *,
    timeout_s: float = PAGE_TIMEOUT_S,
    grace_s: float = 10,
) -> int:
    """The script's exit status; when it is over, however that came, all its processes are."""
    with log.open("w") as output:
        shell = subprocess.Popen(
            ["bash", "-c", script],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return shell.wait(timeout_s)
    finally:
        # What was started with `xpyd up --detach` has a session of its own: `xpyd down` ends it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGTERM)
            _gone_within(lambda: (shell.poll(), os.killpg(shell.pid, 0)), grace_s)
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def _gone_within(probe: Callable[[], object], seconds: float) -> bool:
    """Whether `probe` says within this time that there is no such process."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            probe()
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def _fleets(environment: dict[str, str]) -> list[str]:
    """The fleets that run in this state directory."""
    return [state.fleet for state in find_fleets(state_root(environment))]


def _down(fleet: str, environment: dict[str, str]) -> None:
    command = [str(ROOT / ".venv/bin/xpyd"), "down", fleet, "--timeout", "5"]
    subprocess.run(command, env=environment, timeout=60, check=False)
