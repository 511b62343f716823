"""`snapvit serve` as a program of its own: answers, bounds, metrics, and SIGTERM, which finishes what was accepted."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from PIL import Image

from snapvit_export.family.loaded import load_family

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")


@contextmanager
def serving(family, *options):
    """The program, and the port that it listens on."""
    command = [sys.executable, "-m", "snapvit_export.cli", "serve", family, "--deadline", "60000ms"]
    command += ["--port", "0", *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True, env=env) as program:
        try:
            line = program.stderr.readline()
            found = re.search(r"at http://127\.0\.0\.1:(\d+)", line)
            assert found, line + program.stderr.read()
            program.port = int(found[1])
            yield program
        finally:
            if program.poll() is None:
                program.kill()


@pytest.fixture(scope="module")
def server(plain_family):
    with serving(plain_family, "--max-bytes", "200KB", "--max-pixels", "1M") as program:
        yield program


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("picture") / "picture.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)).save(path)
    return path


def ask(program, method="GET", path="/health", body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", program.port, timeout=60)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        data = response.read()
        as_json = response.headers.get_content_type() == "application/json"
        return response.status, json.loads(data) if as_json else data.decode(), response.headers
    finally:
        connection.close()


def test_an_image_is_answered_as_the_family_answers_it(server, plain_family, picture):
    status, found, _ = ask(server, "POST", "/predict?top=2", picture.read_bytes())
    assert status == 200
    expected = load_family(plain_family).dense.predict(picture, top=2)
    assert [each["label"] for each in found["predictions"]] == [each.label for each in expected]
    assert found["predictions"][0]["probability"] == pytest.approx(expected[0].probability, rel=1e-3)
    assert (found["variant"], found["met"], found["deadline_ms"]) == ("dense", True, 60000.0)


def test_a_request_may_have_a_deadline_of_its_own(server, picture):
    status, found, _ = ask(server, "POST", "/predict?deadline=0.001ms", picture.read_bytes())
    assert (status, found["met"], found["deadline_ms"]) == (200, False, 0.001)


def bomb() -> bytes:
    """A small file of two million pixels."""
    import io

    file = io.BytesIO()
    Image.new("L", (2000, 1000)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("body", "query", "status", "says"),
    [
        (b"", "", 400, "no body"),
        (b"\x80\x04\x95", "", 400, "of no known format"),
        (bytes(300_000), "", 413, "more than 200000 bytes"),
        (bomb(), "", 400, "at most 1 million"),
        (b"x", "?top=0", 400, "top '0'"),
        (b"x", "?top=99999999999999999999", 400, "top"),
        ("picture", "?deadline=never", 400, "is not a latency"),
        ("picture", "?deadline=61000ms", 400, "more than 60 s"),
    ],
    ids=["empty", "a pickle", "large", "many pixels", "top", "huge top", "no deadline", "long deadline"],
)
def test_what_is_no_request_is_refused_in_one_line(server, picture, body, query, status, says):
    found = ask(server, "POST", f"/predict{query}", picture.read_bytes() if body == "picture" else body)
    assert found[0] == status
    assert says in found[1]["error"]
    assert "\n" not in found[1]["error"]
    assert ask(server)[0] == 200


def test_a_body_without_a_length_is_bounded_too(server):
    def parts():
        for _ in range(40):
            yield bytes(10_000)

    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("POST", "/predict", parts(), encode_chunked=True, headers={"Transfer-Encoding": "chunked"})
        assert connection.getresponse().status == 413
    except (BrokenPipeError, ConnectionResetError):
        pass  # it was refused before all was sent
    finally:
        connection.close()
    assert ask(server)[0] == 200


def test_only_what_is_offered_is_there(server):
    assert ask(server, "GET", "/predict")[0] == 405
    assert ask(server, "GET", "/../manifest.json")[0] == 404


def test_prometheus_reads_what_was_done(server, picture):
    ask(server, "POST", "/predict", picture.read_bytes())
    status, text, headers = ask(server, path="/metrics")
    assert status == 200
    assert headers.get_content_type() == "text/plain"
    counted = dict(re.findall(r"^(snapvit_\w+(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE))
    assert float(counted['snapvit_requests_total{status="200"}']) >= 1
    assert float(counted['snapvit_answers_total{variant="dense"}']) >= 1
    assert float(counted["snapvit_variants"]) == 2
    stats = ask(server, path="/stats")[1]
    assert stats["by_variant"]["dense"] >= 1


def begun(program, body: bytes) -> socket.socket:
    """A request whose last byte is missing."""
    sock = socket.create_connection(("127.0.0.1", program.port), timeout=60)
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    sock.sendall(head.encode() + body[:-1])
    return sock


def finished(sock: socket.socket, body: bytes) -> bytes:
    with sock:
        sock.sendall(body[-1:])
        parts = []
        while part := sock.recv(65536):
            parts.append(part)
        return b"".join(parts)


def until_inside(program, count):
    """Wait until so many requests are inside: the next one is refused."""
    for _ in range(600):
        status, _, headers = ask(program, "POST", "/predict", b"x")
        if status == 503:
            return headers
        time.sleep(0.05)
    raise AssertionError(f"{count} requests did not fill the queue")


def test_what_waits_is_bounded_and_what_is_refused_is_told_to_come_back(plain_family, picture):
    body = picture.read_bytes()
    with serving(plain_family, "--queue", "1") as program:
        held = begun(program, body)
        assert until_inside(program, 1)["Retry-After"] == "1"
        assert ask(program)[0] == 200  # health is answered all the same
        assert b" 200 " in finished(held, body)
        assert ask(program, "POST", "/predict", body)[0] == 200


def test_sigterm_answers_what_was_accepted_and_then_ends(plain_family, picture):
    body = picture.read_bytes()
    with serving(plain_family, "--queue", "2") as program:
        held = [begun(program, body) for _ in range(2)]
        until_inside(program, 2)
        program.send_signal(signal.SIGTERM)
        for _ in range(600):  # until it takes no more
            try:
                socket.create_connection(("127.0.0.1", program.port), timeout=1).close()
                time.sleep(0.05)
            except OSError:
                break
        assert program.poll() is None
        assert [b" 200 " in finished(sock, body) for sock in held] == [True, True]
        assert program.wait(30) == 0
        assert "Traceback" not in program.stderr.read()


def test_many_requests_at_once_are_all_answered(server, picture):
    body, statuses = picture.read_bytes(), []

    def caller():
        for _ in range(20):
            statuses.append(ask(server, "POST", "/predict", body)[0])

    threads = [threading.Thread(target=caller) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert statuses == [200] * 160


def test_a_port_that_is_taken_is_named(plain_family, server):
    command = [sys.executable, "-m", "snapvit_export.cli", "serve", plain_family, "--deadline", "1ms"]
    done = subprocess.run([*map(str, command), "--port", str(server.port)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: 127.0.0.1 port {server.port} cannot be used")
