"""A small HTTP service around an ElasticSession: the example to copy. Needs starlette, uvicorn and prometheus-client.

    POST /predict    an image file as the body (?deadline=8ms&top=3) -> JSON: predictions, variant, latency_ms, met
    GET  /health     200 while requests are taken
    GET  /stats      what the session did so far, JSON
    GET  /metrics    the same for Prometheus

What is bounded: bytes of a request and the time to send it, pixels of an image, images that are decoded at once,
requests that wait, connections. Answers are JSON, requests are images: nothing is unpickled. SIGTERM and SIGINT end it
when everything that was accepted is answered. It knows no users and no encryption: beyond the own machine it belongs
behind a server that does.
"""

from __future__ import annotations

import contextlib
import functools
import io
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ..calibration.decode import UnreadableImage, decode_bytes
from ..errors import SnapvitError, UsageError, needs
from ..runtimes.device import usable_cores
from .session import ElasticSession, Inputs, Refused
from .turns import Closed, Overloaded

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

MOST_TOP, MOST_DEADLINE_MS = 1000, 60_000.0
SPARE_CONNECTIONS = 32  # beside those whose requests wait: for health and metrics
BUCKETS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)  # seconds


@dataclass(frozen=True)
class ServeOptions:
    """Where to listen, and the bounds of requests."""

    host: str = "127.0.0.1"
    port: int = 8000
    most_bytes: int = 10_000_000
    most_pixels: int = 32_000_000
    most_waiting: int = 64
    seconds_to_send: float = 10.0
    seconds_to_drain: float = 30.0


class Refusal(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


STATUS: tuple[tuple[type[SnapvitError], int], ...] = (
    (UnreadableImage, 400),
    (UsageError, 400),
    (Overloaded, 503),
    (Refused, 503),
    (Closed, 503),
    (SnapvitError, 500),
)


def serve(open_session: Callable[[], ElasticSession], options: ServeOptions, ready: Callable[[str], None]) -> None:
    """Open a session and answer requests until a signal comes; `ready` is told the address."""
    with needs("serving", extra="serve"):
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn

    listening = _listen(options)
    with listening, open_session() as session:
        config = uvicorn.Config(
            make_app(session, options),
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=options.most_waiting + SPARE_CONNECTIONS,
            timeout_graceful_shutdown=int(options.seconds_to_drain) or 1,
        )
        host, port = listening.getsockname()[:2]
        ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        _server(uvicorn, config).run(sockets=[listening])


def _listen(options: ServeOptions) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        return socket.create_server((options.host, options.port), family=family, backlog=128)
    except OSError as error:
        where = f"{options.host} port {options.port}"
        raise SnapvitError(f"{where} cannot be used: {error.strerror or error}. Give another --port") from error


def _server(uvicorn: Any, config: Any) -> Any:
    class Server(uvicorn.Server):
        """A server that ends in order when it is told to, and then does not send itself the same signal again."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            numbers = (signal.SIGTERM, signal.SIGINT)
            before = {number: signal.signal(number, self.handle_exit) for number in numbers}
            woken = signal.set_wakeup_fd(-1)  # the command line's own way to end is for commands that cannot wait
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
                signal.set_wakeup_fd(woken)

    return Server(config)


def make_app(session: ElasticSession, options: ServeOptions) -> Any:
    """Return the application, for any ASGI server."""
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    service = Service(session, options)

    async def predict(request: Request) -> Response:
        return await service.predict(request)

    async def health(_: Request) -> Response:
        return _json({"status": "ok", "variants": len(session.variants)})

    async def stats(_: Request) -> Response:
        return _json(session.stats)

    async def metrics(_: Request) -> Response:
        content, kind = service.metrics.text()
        return Response(content, media_type=kind)

    routes = [
        Route("/predict", predict, methods=["POST"]),
        Route("/health", health),
        Route("/stats", stats),
        Route("/metrics", metrics),
    ]
    return Starlette(routes=routes)


class Service:
    """The way of a request: read, decoded, answered."""

    def __init__(self, session: ElasticSession, options: ServeOptions) -> None:
        from anyio import CapacityLimiter

        self.session, self.options, self.metrics = session, options, Metrics(session)
        self._inside = 0  # requests whose body is here
        self._decoders = CapacityLimiter(usable_cores())
        self._callers = CapacityLimiter(options.most_waiting)
        self._warm_up()

    def _warm_up(self) -> None:
        """Decode one image: the first takes as long as loading what it needs."""
        from PIL import Image

        file = io.BytesIO()
        Image.new("RGB", (64, 64)).save(file, "PNG")
        self._prepared(file.getvalue())

    async def predict(self, request: Request) -> Response:
        began = time.perf_counter()
        try:
            answered = await self._answered(request)
        except Refusal as refusal:
            status, found = refusal.status, {"error": str(refusal)}
        except SnapvitError as error:
            status = next(code for kind, code in STATUS if isinstance(error, kind))
            found = {"error": str(error)}
        else:
            status, found = 200, answered
        self.metrics.count(status, found, time.perf_counter() - began)
        return _json(found, status)

    async def _answered(self, request: Request) -> dict[str, Any]:
        top, deadline = _top(request.query_params.get("top")), request.query_params.get("deadline")
        if self._inside >= self.options.most_waiting:
            raise Refusal(503, f"{self.options.most_waiting} requests wait already. Try again later")
        self._inside += 1
        try:
            body = await self._body(request)
            arrived = time.perf_counter()
            inputs = await _in_thread(functools.partial(self._prepared, body), self._decoders)
            call = functools.partial(self._run, inputs, deadline, arrived, top)
            found: dict[str, Any] = await _in_thread(call, self._callers)
            return found
        finally:
            self._inside -= 1

    async def _body(self, request: Request) -> bytes:
        """Read the body, as long as it is not too large and not too slow."""
        from anyio import fail_after

        most = self.options.most_bytes
        told = request.headers.get("content-length", "")
        if told.isdecimal() and int(told) > most:
            raise Refusal(413, f"more than {most} bytes. Send a smaller image")
        try:
            with fail_after(self.options.seconds_to_send):
                parts, size = [], 0
                async for part in request.stream():
                    size += len(part)
                    if size > most:
                        raise Refusal(413, f"more than {most} bytes. Send a smaller image")
                    parts.append(part)
        except TimeoutError as error:
            raise Refusal(408, f"the image did not arrive within {self.options.seconds_to_send:g} s") from error
        if not size:
            raise Refusal(400, "the request has no body. Send an image file")
        return b"".join(parts)

    def _prepared(self, body: bytes) -> Inputs:
        return self.session.prepare(decode_bytes(body, "the body of the request", self.options.most_pixels))

    def _run(self, inputs: Inputs, deadline: str | None, arrived: float, top: int) -> dict[str, Any]:
        answer = self.session.run(inputs, None if deadline is None else _deadline(deadline), arrived)
        found: dict[str, Any] = {
            "variant": answer.variant,
            "latency_ms": answer.latency_ms,
            "deadline_ms": answer.deadline_ms,
            "met": answer.met,
            "fidelity": answer.fidelity,
        }
        if self.session.manifest.anatomy.classes:
            best = self.session.likeliest(answer, top)[0]
            return {"predictions": [each._asdict() for each in best], **found}
        return {"embedding": answer.output[0].tolist(), **found}


class Metrics:
    """What Prometheus reads."""

    def __init__(self, session: ElasticSession) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = CollectorRegistry()
        own: Any = dict(registry=self.registry)
        self._requests = Counter("snapvit_requests", "Requests by the status of their answer.", ["status"], **own)
        self._answers = Counter("snapvit_answers", "Answers by variant.", ["variant"], **own)
        self._late = Counter("snapvit_late", "Answers after their deadline.", **own)
        self._seconds = Histogram(
            "snapvit_seconds", "From the first byte of a request to its answer.", buckets=BUCKETS, **own
        )
        for name, text, read in (
            ("waiting", "Requests that wait or run.", lambda: session.stats.waiting),
            ("slowness", "Of the machine, beside the time of opening.", lambda: session.stats.slowness),
            ("variants", "Variants that can be run.", lambda: len(session.variants)),
        ):
            Gauge(f"snapvit_{name}", text, **own).set_function(read)

    def count(self, status: int, found: dict[str, Any], seconds: float) -> None:
        self._requests.labels(str(status)).inc()
        if status == 200:
            self._answers.labels(found["variant"]).inc()
            self._late.inc(not found["met"])
            self._seconds.observe(seconds)

    def text(self) -> tuple[bytes, str]:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self.registry), CONTENT_TYPE_LATEST


async def _in_thread(call: Callable[[], Any], limiter: Any) -> Any:
    from anyio import to_thread

    return await to_thread.run_sync(call, limiter=limiter)


def _top(text: str | None) -> int:
    if text is None:
        return 5
    if not text.isdecimal() or not 1 <= int(text[:9]) <= MOST_TOP:
        raise Refusal(400, f"top '{text}' is not a number from 1 to {MOST_TOP}")
    return int(text)


def _deadline(text: str) -> str:
    from ..budget import Budget

    if Budget.parse(text).to_ms(1.0, 1) > MOST_DEADLINE_MS:
        raise UsageError(f"deadline '{text}' is more than {MOST_DEADLINE_MS / 1000:g} s")
    return text


def _json(value: Any, status: int = 200) -> Response:
    from starlette.responses import Response

    headers = {"Retry-After": "1"} if status == 503 else None
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")
