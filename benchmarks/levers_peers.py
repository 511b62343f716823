"""What others make of a dense DeiT-Tiny, for the plot of `levers.py`: each function gives files to time and to judge.

A peer whose package is not installed is skipped with a line that says so; none of them is a dependency of this project.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
from quality import Half, save_split

from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.writer import GraphWriter
from snapvit_export.model.plan import Plan
from snapvit_export.model.ranking import Ranking
from snapvit_export.prune.pack import blueprint
from snapvit_export.target import Precision, Runtime

RANGING = 32  # calibration images of the quantisers, and of onnxsim
ONNXSIM_RATIOS = (0.15, 0.3, 0.5)  # of the neurons; of three heads a block it takes one or none
TORCH_PRUNING_FLOPS = "0.82,0.72,0.6,0.5"


class SkippedPeer(Exception):
    """A peer that cannot run here, and why."""


class MatchesNothing(Exception):
    """A peer that leaves the graph as it is: a result too."""


@dataclass(frozen=True)
class PeerFile:
    """A file that a peer made."""

    path: Path
    runtime: Runtime = "onnxruntime"
    precision: Precision = "fp32"  # that the session is opened for; what is in the file is the peer's


Files = dict[str, PeerFile]


def has_module(python: str, module: str) -> bool:
    """Return True if this Python can import a module."""
    try:
        return subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0
    except OSError:  # there is no such Python
        return False


def dense_graph(half: Half, folder: Path, format: GraphFormat) -> Path:
    """Write our dense graph in fp32."""
    folder.mkdir(parents=True, exist_ok=True)
    anatomy = half.model.anatomy
    drawn = blueprint(half.model, Ranking.flat(anatomy))
    return GraphWriter(drawn, folder).write("dense", Plan.dense(anatomy), format=format).graph


def _single_images(half: Half) -> list[npt.NDArray[np.float32]]:
    return list(half.calibration.first(RANGING).batches(1))


def onnx_runtime(half: Half, folder: Path) -> Files:
    """ONNX Runtime's own dynamic and static quantiser on our dense graph."""
    from precision import quantised_by_ort

    graph = dense_graph(half, folder, GraphFormat(single_file=True))
    made = quantised_by_ort(graph, folder, _single_images(half))
    return {f"ONNX Runtime {name}": PeerFile(path) for name, path in made.items()}


def nncf(half: Half, folder: Path) -> Files:
    """OpenVINO's fp32, and NNCF's int8 of the linear layers in it: settings that suit ViTs better than its own."""
    if find_spec("nncf") is None or find_spec("openvino") is None:
        raise SkippedPeer("NNCF: nncf or openvino is not installed")
    from snapvit_export.runtimes.openvino_nncf import quantise

    graph = dense_graph(half, folder, GraphFormat())
    quantised, _ = quantise(graph, folder / "int8", _single_images(half), 1)
    return {
        "OpenVINO fp32": PeerFile(graph, "openvino"),
        "OpenVINO, NNCF int8": PeerFile(quantised, "openvino", "int8-static"),
    }


def torch_pruning(half: Half, folder: Path, python: str = sys.executable, options: Sequence[str] = ()) -> Files:
    """Torch-Pruning as `peers/torch_pruning.py` uses it with these options, written by the standard export of torch."""
    if not has_module(python, "torch_pruning"):
        raise SkippedPeer("Torch-Pruning: no environment that was named has torch_pruning")
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_split(half, folder / "images.npz")
    save_file(half.model.module.state_dict(), folder / "weights.safetensors")
    rows = folder / "rows.jsonl"
    call = [python, str(Path(__file__).parent / "peers" / "torch_pruning.py"), "--images", str(folder / "images.npz")]
    call += ["--checkpoint", str(folder / "weights.safetensors"), "--seed", str(half.seed), "--out", str(rows)]
    call += ["--flops", TORCH_PRUNING_FLOPS, "--onnx", str(folder), *options]
    subprocess.run(call, check=True, stdout=subprocess.DEVNULL)
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    return {f"{row['row']}, {row['flops']:g} of the FLOPs": PeerFile(folder / row["file"]) for row in found}


def onnxsim_ours(half: Half, folder: Path) -> Files:
    """onnxsim's pruning of MLPs and heads (Wanda order, ridge refit) on our portable graph, whose layers it finds."""
    graph = dense_graph(half, folder, GraphFormat(single_file=True))
    return _onnxsim(half, graph, folder, "onnxsim on our graph")


def onnxsim_standard(half: Half, folder: Path) -> Files:
    """The same on the standard export of torch, which is what its users have."""
    from torch_export import to_onnx

    folder.mkdir(parents=True, exist_ok=True)
    graph = folder / "standard.onnx"
    graph.write_bytes(to_onnx(half.model.module, half.model.anatomy, {}))
    return _onnxsim(half, graph, folder, "onnxsim on torch.onnx.export")


def _onnxsim(half: Half, graph: Path, folder: Path, title: str) -> Files:
    if find_spec("onnxsim") is None:
        raise SkippedPeer("onnxsim: not installed")
    import onnx
    import onnxsim

    if not hasattr(onnxsim, "apply_structured_wanda_pruning"):
        raise SkippedPeer(f"onnxsim {onnxsim.__version__}: cannot prune, 0.8 or newer can")
    dense = onnx.load(graph)
    feeds = [{"images": image} for image in _single_images(half)]
    found: Files = {}
    for ratio in ONNXSIM_RATIOS:
        cut = onnxsim.apply_structured_wanda_pruning(dense, feeds, sparsity=ratio)
        cut = onnxsim.apply_attention_head_wanda_pruning(cut, feeds, sparsity=ratio)
        if _weights(cut) == _weights(dense):
            raise MatchesNothing(f"{title}: finds no MLP and no head to prune")
        cut = onnxsim.apply_pruning_finetune(dense, cut, feeds)
        path = folder / f"onnxsim-{ratio:g}.onnx"
        onnx.save(cut, path)
        found[f"{title}, ratio {ratio:g}"] = PeerFile(path)
    return found


def _weights(model: object) -> int:
    return sum(int(np.prod(tensor.dims)) for tensor in model.graph.initializer)  # type: ignore[attr-defined]


PEERS: dict[str, Callable[[Half, Path], Files]] = {
    "onnxruntime": onnx_runtime,
    "nncf": nncf,
    "torch-pruning": torch_pruning,
    "onnxsim": onnxsim_ours,
    "onnxsim-standard": onnxsim_standard,
}
