"""`snapvit serve`: a family as a small HTTP service that keeps a deadline."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..visible import say
from . import options


def serve(
    family: Annotated[Path, typer.Argument(help="A family folder.")],
    deadline: Annotated[str, typer.Option(help="From the arrival of a request: 10ms, 60% (of dense) or 100fps.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="To listen on; 0: any that is free.")] = 8000,
    host: Annotated[
        str, typer.Option(help="Address to listen on; by default only this machine reaches it.")
    ] = "127.0.0.1",
    hit: options.Hit = 0.99,
    late: options.Late = "run",
    max_batch: Annotated[
        int, typer.Option(min=1, max=1024, help="Run so many waiting requests together; 1: none.")
    ] = 1,
    queue: Annotated[int, typer.Option(min=1, max=4096, help="Requests that may wait; more are refused.")] = 64,
    max_bytes: Annotated[str, typer.Option(help="Of a request, at most.")] = "10MB",
    max_pixels: Annotated[str, typer.Option(help="Of an image, at most.")] = "32M",
    drain: Annotated[float, typer.Option(min=1, max=3600, help="Seconds to answer what waits, when stopped.")] = 30.0,
    runtime: options.Runtime = None,
    threads: options.Threads = None,
    quiet: options.Quiet = False,
) -> None:
    """Answer images over HTTP, each before a deadline.

    POST /predict with an image; GET /health, /stats and /metrics. SIGTERM answers what waits, and ends.
    """
    from ..serving.http import ServeOptions
    from ..serving.http import serve as run
    from ..serving.session import ElasticSession
    from ..target import check_runtime
    from .parsing import late_choice, pixels, size_in_bytes

    allowed = ServeOptions(
        host=host,
        port=port,
        most_bytes=size_in_bytes(max_bytes, "--max-bytes"),
        most_pixels=pixels(max_pixels, "--max-pixels"),
        most_waiting=queue,
        seconds_to_drain=drain,
    )
    chosen, kind = None if runtime is None else check_runtime(runtime), late_choice(late)

    def opened() -> ElasticSession:
        return ElasticSession(
            family,
            deadline,
            hit=hit,
            late=kind,
            max_batch=max_batch,
            most_waiting=queue,
            runtime=chosen,
            threads=threads,
        )

    def ready(address: str) -> None:
        if not quiet:
            say(f"serving {family} at {address}", sys.stderr)

    run(opened, allowed, ready)
