"""Mutated files, given to the real commands: each ends with an answer or with one line, and touches nothing else.

A fixed number of cases runs with every test run. For hours of new ones: `pytest -n 0 tests/fuzz --fuzz-minutes 60`.
A failure names its target and its number; `--fuzz-case manifest:17` runs it alone. What was found has a named test of
its own beside the module that was mended.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import tarfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file

from helpers.hostile import Bomb
from helpers.mutations import mutated_bytes, mutated_graph, mutated_json
from helpers.programs import Outcome
from helpers.report_factory import make_manifest, make_validation
from helpers.shared import ROOT
from snapvit_export.cli.app import main
from snapvit_export.elastic.folder import Elastic
from snapvit_export.elastic.format import Description
from snapvit_export.errors import SnapvitError
from snapvit_export.evaluate.comparison import COMPARISON, Comparison, MethodResult
from snapvit_export.family.evaluation import Evaluation
from snapvit_export.model.plan import Plan
from snapvit_export.report.markdown import comparison_markdown
from snapvit_export.runtimes import jetson_agent
from snapvit_export.storage.checksummed import load_checksummed, save_checksummed

ARCHIVE = ROOT / "tests" / "fixtures" / "before_the_move" / "files.tar.xz"
FIRST_NUMBER = 10**6  # of the cases that are new every time
Words = tuple[object, ...]


def seed_files(folder: Path) -> Path:
    """One small file or folder of every kind that the commands read."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    for name in ("family-int8", "pruned", "outputs.safetensors", "corrected.safetensors"):
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()
    profile = json.loads((folder / "profile.json").read_text())
    for each in profile["profiles"].values():
        _thin(each)
    accelerator = {"name": "GPU", "software": {}, "power_mode": "MAXN", "clocks_mhz": {"gpu": 1.0}, "memory_bytes": 1}
    profile["target"]["device"]["accelerator"] = {**accelerator, "temperatures_c": {"gpu": 40.0}}
    (folder / "orin.json").write_text(json.dumps(profile))  # such latencies decide alone: nothing is timed here
    make_validation(make_manifest(3), count=1).save(folder / "family")
    manifest = json.loads((folder / "family" / "manifest.json").read_text())
    for entry in (*manifest["variants"], *manifest["choice"]["measurements"]):
        _thin(entry["profile"])
    manifest["recipe"]["search"] = {"history": [{"evaluations": 1, "best": 0.5}, {"evaluations": 2, "best": 0.25}]}
    (folder / "family" / "manifest.json").write_text(json.dumps(manifest))
    _comparison().save(folder)
    _scores(folder / "scores.pt")
    _pictures(folder / "pictures")
    names = sorted(path.name for path in (folder / "pictures").iterdir())
    (folder / "list.txt").write_text("".join(f"pictures/{name}\t{n}\n" for n, name in enumerate(names)))
    return folder


def _thin(profile: dict) -> None:
    """Leave the first fifty runs of a profile, so that drawing them again takes no time."""
    samples = profile["samples_ms"][: -(-50 // profile["burst"]) * profile["burst"]]
    percentiles = dict(zip(("p50", "p90", "p99"), np.percentile(samples, [50, 90, 99]).tolist()))
    profile.update({f"{at}_ms": ms for at, ms in percentiles.items()}, samples_ms=samples, runs=len(samples))
    profile["intervals_ms"] = {at: [ms, ms] for at, ms in percentiles.items()}


def _comparison() -> Comparison:
    evaluation = Evaluation(source="pictures", images=20, top1=0.5, standard_errors={"top1": 0.1})
    shares = dict(asked=0.5, sparsity=0.5, flops_ratio=0.5, params=100, correction=None)
    described = dict(model="tiny", weights_sha256="ab", calibration={"images": 3}, judged_on={"test": {"images": 3}})
    results = (MethodResult(recipe="default", evaluation=evaluation, **shares),)
    return Comparison(**described, settings={"default": {}}, axis="sparsity", dense=evaluation, contestants=results)


def _scores(path: Path) -> None:
    """A score file as the released code writes them."""
    numbers = {"num_blocks": 2, "hidden_dim": 8, "num_heads": 4, "metadata": {"seed": 0, "note": "x"}}
    torch.save({"mlp_scores": torch.rand(2, 8), "head_scores": torch.rand(2, 4), **numbers}, path)


def _pictures(folder: Path) -> None:
    rng = np.random.default_rng(0)
    folder.mkdir()
    for number, (suffix, mode) in enumerate(
        [("png", "RGB"), ("jpg", "RGB"), ("tif", "L"), ("bmp", "RGB"), ("gif", "L")]
    ):
        pixels = rng.integers(0, 255, (40, 33, 3), np.uint8)
        Image.fromarray(pixels).convert(mode).save(folder / f"{number}.{suffix}")


@dataclass(frozen=True)
class Target:
    """One kind of file: how it is changed, and the commands that read it. Paths are relative to the case's folder."""

    change: Callable[[Path, random.Random], None]
    commands: tuple[Words, ...]
    needs: tuple[str, ...]  # files and folders of the seeds
    cases: int


def change_json(*names: str) -> Callable[[Path, random.Random], None]:
    def change(folder: Path, rng: random.Random) -> None:
        path = folder / rng.choice(names)
        path.write_bytes(mutated_json(path.read_text(), rng))

    return change


def change_bytes(*patterns: str) -> Callable[[Path, random.Random], None]:
    def change(folder: Path, rng: random.Random) -> None:
        path = rng.choice(sorted(path for pattern in patterns for path in folder.glob(pattern)))
        path.write_bytes(mutated_bytes(path.read_bytes(), rng))

    return change


def change_graph(folder: Path, rng: random.Random) -> None:
    """A graph is changed, and most often the hash that the manifest has of it too."""
    path, change = folder / "family" / "dense.onnx", mutated_graph if rng.random() < 0.7 else mutated_bytes
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_bytes(change(path.read_bytes(), rng))
    after = hashlib.sha256(path.read_bytes()).hexdigest()
    for known in (folder / "family" / "manifest.json", folder / "orin.json"):
        known.write_text(known.read_text().replace(before, after if rng.random() < 0.9 else before))


def change_ranking(folder: Path, rng: random.Random) -> None:
    """Its description or its scores are changed, under a hash that is right again; or its bytes."""
    path = folder / "family" / "ranking.safetensors"
    if rng.random() < 0.3:
        path.write_bytes(mutated_bytes(path.read_bytes(), rng))
        return
    arrays, text = load_checksummed(path, "snapvit-ranking")
    if rng.random() < 0.6:
        text = mutated_json(text, rng).decode(errors="replace")
    else:
        name = rng.choice(sorted(arrays))
        kind = rng.choice([np.float32, np.float64, np.float16, np.int64, np.bool_])
        with np.errstate(all="ignore"):
            strange = np.resize(np.array([0, -1, np.nan, np.inf, 1e300, 1e-300, 5]), rng.randrange(9)).astype(kind)
        arrays[rng.choice([name, "blocks.99.head_scores", name])] = strange
    save_checksummed(path, "snapvit-ranking", arrays, text)


def change_checkpoint(folder: Path, rng: random.Random) -> None:
    """The weights of a model folder: as bytes, or whole with tensors of other names, types and shapes."""
    path = folder / "model" / "model.safetensors"
    if rng.random() < 0.5:
        path.write_bytes(mutated_bytes(path.read_bytes(), rng))
        return
    tensors = load_file(path)
    name = rng.choice(sorted(tensors))
    with np.errstate(all="ignore"):
        changed = rng.choice([tensors[name][:1], tensors[name] * np.nan, tensors[name].astype(np.int8), np.zeros(0)])
    tensors |= {rng.choice([name, f"{name}\0", f"../{name}", "x" * 1000]): changed}
    if rng.random() < 0.3:
        del tensors[name]
    save_file(tensors, path)


def change_scores(folder: Path, rng: random.Random) -> None:
    """A torch file: bytes, a bomb inside, or values of other kinds."""
    path = folder / "scores.pt"
    kind = rng.randrange(4)
    if kind < 2:
        path.write_bytes(mutated_bytes(path.read_bytes(), rng))
        return
    loaded = torch.load(path, weights_only=True)
    strange = [
        Bomb(folder.parent / "canary" / "bomb"),
        "x",
        -1,
        None,
        torch.rand(3),
        torch.rand(2, 8).double(),
        [1],
        True,
    ]
    strange += [torch.full((2, 8), float("nan")), {"a": {"b": float("nan")}}, 10**400]
    loaded[rng.choice(sorted(loaded))] = rng.choice(strange)
    torch.save(loaded, path)


def change_list(folder: Path, rng: random.Random) -> None:
    lines = (folder / "list.txt").read_text().splitlines()
    strange = [
        "a\0b\t1",
        "../../canary/secret.txt\t0",
        "/dev/null\t0",
        "pictures\t1",
        "\t",
        "x\ty\tz",
        "\ud800".encode("utf-8", "surrogatepass").hex(),
    ]
    strange += ["pictures/0.png\t99999999999", "x" * 5000 + "\t1", "#", "pictures/0.png"]
    lines.insert(rng.randrange(len(lines)), rng.choice(strange))
    (folder / "list.txt").write_text("\n".join(lines))
    if rng.random() < 0.3:
        (folder / "list.txt").write_bytes(mutated_bytes((folder / "list.txt").read_bytes(), rng))


def change_elastic(folder: Path, rng: random.Random) -> None:
    """`elastic.json` is changed under a seal that is right again, where it still has its form; or a file's bytes."""
    path = folder / "elastic" / "elastic.json"
    if rng.random() < 0.2:
        change_bytes("elastic/*")(folder, rng)
        return
    path.write_bytes(mutated_json(path.read_text(), rng))
    with contextlib.suppress(Exception):
        path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes(), type=Description).with_checksum()))


def load_elastic(folder: Path) -> None:
    elastic = Elastic.load(folder / "elastic")
    plan = Plan.dense(elastic.anatomy)
    elastic.weights(plan)
    elastic.weights(elastic.planner.sparsity(0.3), corrected=elastic.corrects)
    elastic.merging.most(elastic.anatomy, plan)


def load_comparison(folder: Path) -> None:
    found = Comparison.load(folder)
    assert found is not None
    comparison_markdown(found)


def run_agent(folder: Path) -> None:
    code = jetson_agent.main([str(folder / "family"), "--out", str(folder / "out.json"), "--trtexec", "nowhere"])
    assert code in (1, 2)
    raise SystemExit(code)


IN_FAMILY = ("report", "family", "--format", "json", "--out", "out.json", "--quiet")
FLEET = ("fleet", "family", "--budget", "cpu=10ms,orin.json=10ms")
CHOOSE = ("choose", "family", "--budget", "75%", "--profile", "orin.json", "--quiet")
EVALUATE = ("evaluate", "model", "--data", "list.txt", "--by", "head", "--quiet")
TARGETS = {
    "manifest": Target(
        change_json("family/manifest.json"),
        (IN_FAMILY, FLEET, CHOOSE, ("report", "family", "--out", "out.html"), (run_agent,)),
        ("family", "orin.json"),
        24,
    ),
    "profile": Target(change_json("orin.json"), (FLEET, CHOOSE), ("family", "orin.json"), 16),
    "validation": Target(
        change_json("family/validation.json"), (("report", "family", "--out", "out.html"),), ("family",), 5
    ),
    "graph": Target(
        change_graph,
        (("inspect", "family/dense.onnx", "--runtime", "tensorrt"), IN_FAMILY, CHOOSE, (run_agent,)),
        ("family", "orin.json"),
        24,
    ),
    "ranking": Target(
        change_ranking,
        (("evaluate", "model", *EVALUATE[2:], "--ranking", "family/ranking.safetensors", "--sparsity", "0.3"),),
        ("family", "model", "pictures", "list.txt"),
        10,
    ),
    "elastic": Target(change_elastic, ((load_elastic,),), ("elastic",), 60),
    "comparison": Target(change_json(COMPARISON), ((load_comparison,),), (COMPARISON,), 60),
    "model": Target(change_json("model/model.json"), (EVALUATE,), ("model", "pictures", "list.txt"), 10),
    "checkpoint": Target(change_checkpoint, (EVALUATE,), ("model", "pictures", "list.txt"), 10),
    "scores": Target(change_scores, (("import-scores", "scores.pt", "--out", "out.safetensors"),), ("scores.pt",), 16),
    "images": Target(change_bytes("pictures/*"), (EVALUATE,), ("model", "pictures", "list.txt"), 12),
    "list": Target(change_list, (EVALUATE,), ("model", "pictures", "list.txt"), 10),
}


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seed_files(tmp_path_factory.mktemp("seeds"))


@pytest.fixture
def numbers(request: pytest.FixtureRequest) -> Callable[[str], Iterator[int]]:
    """The numbers of the cases to run: those of every run, one that was asked for, or new ones for some minutes."""

    def of(name: str) -> Iterator[int]:
        minutes, asked = request.config.getoption("--fuzz-minutes"), request.config.getoption("--fuzz-case")
        if asked is not None:
            yield from (int(asked.partition(":")[2]) for _ in range(asked.startswith(f"{name}:")))
            return
        yield from range(TARGETS[name].cases)
        end, number = time.monotonic() + 60 * minutes / len(TARGETS), FIRST_NUMBER + time.time_ns() % 10**12
        while minutes and time.monotonic() < end:
            yield (number := number + 1)

    return of


@pytest.mark.parametrize("name", TARGETS)
def test_a_changed_file_gives_an_answer_or_one_line_and_nothing_else(name, seeds, numbers, tmp_path, monkeypatch):
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv("COLUMNS", "200")
    for number in numbers(name):
        folder = tmp_path / "case"
        shutil.rmtree(folder, ignore_errors=True)
        _try(name, number, seeds, folder, monkeypatch)


def _try(name: str, number: int, seeds: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One case: in `folder`, the files of the target and nothing else; beside it a canary."""
    target, rng = TARGETS[name], random.Random(f"{name}:{number}")
    for needed in target.needs:
        copy = shutil.copytree if (seeds / needed).is_dir() else shutil.copy
        folder.mkdir(exist_ok=True)
        copy(seeds / needed, folder / needed)
    canary = folder.parent / "canary"
    canary.mkdir(exist_ok=True)
    (canary / "secret.txt").write_text("not yours")
    monkeypatch.chdir(folder)
    target.change(folder, rng)
    words = rng.choice(target.commands)
    outside, before = _seen(folder.parent, but=folder), _seen(folder)
    found = _called(words, folder)
    told = f"--fuzz-case {name}:{number}, {' '.join(map(str, words))}\n{found.err[-3000:]}"
    assert "Traceback" not in found.err, told
    assert found.code in (0, 1, 2), told
    errors = [line for line in found.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == (found.code != 0), told
    assert _seen(folder.parent, but=folder) == outside, told
    if found.code != 0:
        assert {path for path in _seen(folder) if path not in before} == set(), told  # nothing is left half written


def _called(words: Words, folder: Path) -> Outcome:
    """What a command line, or a function of the library in its place, ends with; a traceback is text, as for a user."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["snapvit", *map(str, words)])
        try:
            words[0](folder) if callable(words[0]) else main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
        except SnapvitError as error:  # of the library alone: the program has its own line
            code = error.exit_code
            print("error: " + " ".join(str(error).split()), file=err)
        except BaseException:
            code = 99
            traceback.print_exc(file=err)
    return Outcome(code, out.getvalue(), err.getvalue())


def _seen(folder: Path, but: Path | None = None) -> dict[str, tuple[int, int]]:
    """Every file below a folder with its size and time."""
    found = {}
    for place, _, files in os.walk(folder):
        if but is not None and (Path(place) == but or but in Path(place).parents):
            continue
        for name in files:
            status = os.lstat(os.path.join(place, name))
            found[os.path.join(place, name)] = (status.st_size, status.st_mtime_ns)
    return found


def test_a_case_is_the_same_every_time(seeds, tmp_path):
    """Otherwise a failure could not be looked into."""
    written = []
    for again in ("a", "b"):
        shutil.copytree(seeds / "family", tmp_path / again / "family")
        TARGETS["manifest"].change(tmp_path / again, random.Random("manifest:3"))
        written.append((tmp_path / again / "family" / "manifest.json").read_bytes())
    assert written[0] == written[1] != (seeds / "family" / "manifest.json").read_bytes()
