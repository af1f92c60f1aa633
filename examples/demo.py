"""``make demo``: three elastic instances of the embedded model answer, and show what they did.

(a) a chat question, (b) a question about a document of thousands of tokens, whose KV no instance can hold alone,
(c) six requests at once. Everything goes through ``loong-run``, as any client would have it.
"""

import argparse
import asyncio
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from loongserve.runtime.model.source import open_model
from loongserve.runtime.proto import loongserve_pb2 as pb
from loongserve.runtime.proto.loongserve_pb2_grpc import LoongStub

NUM_INSTANCES = 3
# Licence texts of some thousand tokens: one that every Debian has, else what lies in this repository.
DOCUMENTS = (Path("/usr/share/common-licenses/GPL-3"), Path(__file__).parents[1] / "LICENSE")
DOCUMENT_TOKENS = 5500
QUESTION = "Summarize what this license allows and what it forbids."
# The two instances with the document's KV have room for so many tokens of the answer; then a third must join.
ROOM_TO_ANSWER = 12
SIX = (
    "Name three planets of the solar system.",
    "What is the boiling point of water?",
    "Write one sentence about the sea.",
    "What do bees make?",
    "Translate 'good morning' to French.",
    "Which is larger, an ant or an elephant?",
)
# The kinds of decision that the timeline shows.
TIMELINE = ("prefill", "scale_down", "scale_up", "decode", "pause", "evict", "finish")


@dataclass
class Answer:
    """What came back for one request, and when, in seconds since it was sent."""

    text: str = ""
    prompt_tokens: int = 0
    times: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        """TTFT and time per token, in words."""
        line = f"{self.prompt_tokens} prompt tokens, {len(self.times)} output tokens, TTFT {self.times[0]:.2f} s"
        if len(self.times) > 1:
            line += f", {1e3 * (self.times[-1] - self.times[0]) / (len(self.times) - 1):.0f} ms a token"
        return line


async def ask(stub: LoongStub, prompt: str, max_tokens: int, *, show: bool) -> Answer:
    """Send one chat message; print the answer as it comes if ``show``."""
    request = pb.GenerateRequest(max_tokens=max_tokens, temperature=0.0)
    request.chat.messages.add(role="user", content=prompt)
    answer = Answer()
    start = time.monotonic()
    async for response in stub.Generate(request):
        answer.times.extend([time.monotonic() - start] * len(response.token_ids))
        answer.text += response.text
        answer.prompt_tokens = max(answer.prompt_tokens, response.usage.prompt_tokens)
        if show:
            print(response.text, end="", flush=True)
    if show:
        print()
    return answer


async def questions(stub: LoongStub, document: str) -> None:
    """Ask (a), (b) and (c)."""
    print("\n(a) a chat question\n> What is the capital of France?")
    print(f"  [{await ask(stub, 'What is the capital of France?', 48, show=True)}]")

    print(f"\n(b) a question about a document of {len(document)} characters\n> {QUESTION}")
    about_document = await ask(stub, f"{document}\n\n{QUESTION}", 96, show=True)
    print(f"  [{about_document}]")

    print("\n(c) six requests at once")
    start = time.monotonic()
    answers = await asyncio.gather(*(ask(stub, prompt, 32, show=False) for prompt in SIX))
    elapsed = time.monotonic() - start
    for prompt, answer in zip(SIX, answers, strict=True):
        print(f"> {prompt}\n{' '.join(answer.text.split())}\n  [{answer}]")
    num_tokens = sum(len(answer.times) for answer in answers)
    print(f"  [all six: {num_tokens} tokens in {elapsed:.1f} s, {num_tokens / elapsed:.1f} tokens/s]")


def print_timeline(cluster: pb.Cluster) -> None:
    """Print what each instance did, and the counters that matter."""
    print("\nWhat the instances did (a column each; P prefills, K keeps KV of it, D decodes, + joins, . waits)")
    decisions = [d for d in cluster.decisions if d.kind in TIMELINE]
    start = decisions[0].time_s
    for decision in decisions:
        mark = {"prefill": "P", "scale_down": "K", "decode": "D", "scale_up": "+"}.get(decision.kind, ".")
        columns = " ".join(mark if i in decision.group else " " for i in range(NUM_INSTANCES))
        requests = ",".join(str(r) for r in decision.requests)
        print(f"{decision.time_s - start:7.2f} s | {columns} | request {requests}: {decision.kind}: {decision.text}")
    counters = ("prefills", "scale_downs", "scale_ups", "migrations", "evictions", "pauses", "drains")
    print("\ncounters: " + ", ".join(f"{name} {cluster.counters[name]}" for name in counters))
    print(
        "pools:    " + ", ".join(f"instance {i.instance}: {i.free_slots}/{i.num_slots} free" for i in cluster.instances)
    )


def missing(cluster: pb.Cluster) -> list[str]:
    """Name what the demo is to show and did not."""
    widest = max((len(d.group) for d in cluster.decisions if d.kind == "prefill"), default=0)
    return [
        what
        for what, shown in (
            ("a prefill with DoP > 1", widest > 1),
            ("a scale-down", cluster.counters["scale_downs"] > 0),
            ("a scale-up", cluster.counters["scale_ups"] > 0),
            ("no migration", cluster.counters["migrations"] == 0),
            ("pools at their baseline", all(i.free_slots == i.num_slots for i in cluster.instances)),
        )
        if not shown
    ]


def read_document(path: Path | None) -> tuple[str, int]:
    """Return about ``DOCUMENT_TOKENS`` tokens of text, and how many tokens the whole prompt (b) has."""
    text = (path or next(p for p in DOCUMENTS if p.exists())).read_text()
    tokenizer = open_model().load_tokenizer()
    ids = tokenizer(text)["input_ids"]
    while len(ids) < DOCUMENT_TOKENS:
        ids = ids + ids
    document = tokenizer.decode(ids[:DOCUMENT_TOKENS])
    message = {"role": "user", "content": f"{document}\n\n{QUESTION}"}
    prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    return document, len(tokenizer(prompt, add_special_tokens=False)["input_ids"])


async def read_address(server: asyncio.subprocess.Process) -> str:
    """Echo the server's banner and return the address in it."""
    assert server.stdout is not None
    while line := (await server.stdout.readline()).decode():
        print("  " + line, end="")
        if match := re.match(r"\s*address\s+(\S+)", line):
            return match[1]
    raise SystemExit("loong-run ended before it served; see its message above")


async def main(arguments: Sequence[str]) -> int:
    """Run the demo. Returns: the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--document", type=Path, help="a text file for (b), instead of a licence")
    document, prompt_tokens = read_document(parser.parse_args(arguments).document)
    pool = (prompt_tokens + ROOM_TO_ANSWER) // 2
    print(f"Starting {NUM_INSTANCES} instances with pools of {pool} tokens: two just hold the document of (b).")
    command = ["loong-run", "--instances", str(NUM_INSTANCES), "--grpc-port", "0", "--kv-tokens", str(pool)]
    server = await asyncio.create_subprocess_exec(
        Path(sys.executable).parent / command[0], *command[1:], stdout=asyncio.subprocess.PIPE
    )
    try:
        address = await read_address(server)
        async with grpc.aio.insecure_channel(address) as channel:
            stub = LoongStub(channel)
            await questions(stub, document)
            cluster = await stub.GetCluster(pb.GetClusterRequest())
        print_timeline(cluster)
    finally:
        if server.returncode is None:
            server.send_signal(signal.SIGTERM)
            await server.wait()
    print(f"Stopped: loong-run ended with status {server.returncode}, and its processes with it.")
    if lacking := missing(cluster):
        print(f"The demo did not show: {', '.join(lacking)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
