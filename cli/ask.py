"""``loong-ask``: put a question to a running server and print the answer as it comes."""

import asyncio
import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

import click

import loongserve
from loongserve.cli.run import DEFAULT_HOST, DEFAULT_PORT

if TYPE_CHECKING:
    import grpc.aio

    from loongserve.runtime.proto import loongserve_pb2 as pb


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("prompt", required=False)
@click.option(
    "--file", "document", type=click.File("r", encoding="utf-8"), help="A text to put before the question; - is stdin."
)
@click.option("--question", help="The question about --file; the same as PROMPT.")
@click.option("--address", default=f"{DEFAULT_HOST}:{DEFAULT_PORT}", show_default=True, help="The server's host:port.")
@click.option(
    "--max-tokens", type=click.IntRange(1, 2**31 - 1), help="The most tokens to generate. The server's if not given."
)
@click.option("--temperature", default=0.0, show_default=True, help="0 takes the likeliest token each time.")
@click.option("--top-p", type=float, help="Draw from the likeliest tokens that have this probability together.")
@click.option("--top-k", type=click.IntRange(0, 2**31 - 1), help="Draw from this many of the likeliest tokens.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="The same seed gives the same answer.")
@click.option("--stop", multiple=True, help="End the answer before this string; may be given several times.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the model's chat template.")
@click.option("--quiet", is_flag=True, help="Print no line with counts and times.")
@click.version_option(loongserve.__version__)
def main(
    prompt: str | None,
    document: TextIO | None,
    question: str | None,
    address: str,
    raw: bool,
    quiet: bool,
    **settings: Any,
) -> None:
    """Ask PROMPT (- reads it from stdin) of a server that loong-run has started."""
    text = _read_text(prompt, document, question)
    for given in (text, *settings["stop"]):
        _check_text(given)
    from loongserve.runtime.proto import loongserve_pb2 as pb

    request = pb.GenerateRequest(**{name: value for name, value in settings.items() if value is not None})
    if raw:
        request.text = text
    else:
        request.chat.messages.add(role="user", content=text)
    try:
        timing = asyncio.run(_ask(address, request))
    except KeyboardInterrupt:
        # The call was cancelled, which aborts the request.
        click.echo("\nAborted.", err=True)
        sys.exit(130)
    if not quiet:
        click.echo(str(timing), err=True)


@dataclass(slots=True)
class Timing:
    """Counts and times of one answer; printed as one line."""

    reason: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0

    def __str__(self) -> str:
        """The line that ``loong-ask`` prints."""
        line = f"[{self.prompt_tokens} prompt tokens, {self.output_tokens} output tokens ({self.reason})"
        if self.output_tokens > 0:
            line += f"; first token after {self.first_s:.2f} s"
        if self.output_tokens > 1:
            line += f", then {1e3 * (self.last_s - self.first_s) / (self.output_tokens - 1):.1f} ms a token"
        return line + "]"


async def _ask(address: str, request: "pb.GenerateRequest") -> Timing:
    """Print the answer's pieces as they come. Raises: click.ClickException."""
    # gRPC's core writes of its own threads' end to stderr now and then; what concerns the user comes as an error.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import grpc
    import grpc.aio

    from loongserve.runtime.proto.loongserve_pb2_grpc import LoongStub

    unlimited = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(address, options=unlimited) as channel:
        call = LoongStub(channel).Generate(request)
        try:
            timing = await _print_answer(call)
        except grpc.aio.AioRpcError as error:
            raise click.ClickException(_explain(address, error)) from error
        finally:
            call.cancel()
    return timing


async def _print_answer(call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]") -> Timing:
    from loongserve.runtime.proto import loongserve_pb2 as pb

    timing, begin = Timing(), time.monotonic()
    async for response in call:
        now = time.monotonic() - begin
        if response.token_ids:
            timing.first_s = timing.first_s or now
            timing.last_s = now
        click.echo(response.text, nl=False)
        if response.HasField("usage"):
            timing.prompt_tokens = response.usage.prompt_tokens
            timing.output_tokens = response.usage.output_tokens
            timing.reason = pb.FinishReason.Name(response.finish_reason).removeprefix("FINISH_REASON_").lower()
            click.echo()
    return timing


def _explain(address: str, error: "grpc.aio.AioRpcError") -> str:
    import grpc

    details = error.details() or "no details"
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return f"{address} does not answer: {details}. Start a server with loong-run, or give its --address."
    return f"{address} refuses ({error.code().name}): {details}"


def _read_text(prompt: str | None, document: TextIO | None, question: str | None) -> str:
    """Put document and question together. Raises: click.UsageError, click.ClickException."""
    if prompt is not None and question is not None:
        raise click.UsageError("give the question once: as PROMPT or with --question")
    if question is not None and document is None:
        raise click.UsageError("--question is about a --file: give one, or give the question as PROMPT")
    asked = prompt if prompt is not None else question
    try:
        if asked == "-":
            if document is not None and document.name == "<stdin>":
                raise click.UsageError("only one of PROMPT and --file can be read from stdin")
            asked = sys.stdin.read()
        parts = [document.read() if document is not None else None, asked]
    except UnicodeDecodeError as error:
        raise click.ClickException(f"the input is not UTF-8 text: {error}") from error
    text = "\n\n".join(part for part in parts if part is not None)
    if not text.strip():
        raise click.UsageError("nothing to ask: give PROMPT, - for stdin, or --file")
    return text


def _check_text(text: str) -> None:
    """Refuse bytes that were no UTF-8 on the command line or stdin, which Python then carries as half characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise click.ClickException(f"the input is not UTF-8 text: {error}") from error


if __name__ == "__main__":
    main()
