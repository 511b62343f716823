"""ONNX Runtime's providers for GPUs, as far as a machine without one can tell: refusals, settings, binding, shapes.

`test_gpu.py` has what needs a GPU. Where a provider is wanted that loads and takes no node, Azure's serves: it comes
with every package and runs nothing here.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import onnx
import onnxruntime
import pytest

from helpers.graphs import close, run
from helpers.images import noise_arrays
from helpers.models import make_model
from helpers.rankings import random_ranking
from snapvit_export.errors import SnapvitError
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.writer import GraphWriter
from snapvit_export.model.plan import Plan
from snapvit_export.prune.pack import blueprint
from snapvit_export.runtimes import ort
from snapvit_export.runtimes.cuda import NoGPU, require_gpu
from snapvit_export.runtimes.ort import CUDA, PROVIDERS, SETTINGS, TENSORRT, BoundSession, OrtSession
from snapvit_export.runtimes.session import open_session, version_of
from snapvit_export.target import Runtime, Target

ON_GPU = [runtime for runtime in get_args(Runtime) if runtime.startswith("onnxruntime-")]
AZURE = "AzureExecutionProvider"


def written(folder: Path, **options) -> tuple[Path, np.ndarray]:
    model = make_model()
    emitter = GraphWriter(blueprint(model, random_ranking(model.anatomy)), folder)
    return emitter.write("x", Plan.dense(model.anatomy), format=GraphFormat(**options)).graph, noise_arrays(
        model.anatomy, 5
    )


def has_gpu() -> bool:
    try:
        require_gpu()
    except NoGPU:
        return False
    return True


def on_cpu(path: Path, batch: int | None = None, optimised: Path | None = None) -> onnxruntime.InferenceSession:
    """A session of ONNX Runtime itself, with the batch made known as for a GPU."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if batch is not None:
        options.add_free_dimension_override_by_name(ort.BATCH, batch)
    if optimised is not None:
        options.optimized_model_filepath = str(optimised)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def test_every_runtime_of_onnx_runtime_has_a_provider_and_settings():
    assert set(PROVIDERS) == {"onnxruntime", *ON_GPU}
    assert set(SETTINGS) == set(PROVIDERS.values())
    assert {type(value) for table in SETTINGS.values() for value in table.values()} == {str}
    assert SETTINGS[CUDA]["use_tf32"] == "0"
    assert SETTINGS[TENSORRT]["trt_fp16_enable"] == SETTINGS[TENSORRT]["trt_int8_enable"] == "0"


@pytest.mark.skipif(has_gpu(), reason="there is a GPU: test_gpu.py runs on it")
@pytest.mark.parametrize("runtime", ON_GPU)
def test_no_gpu_is_a_refusal_in_one_line_and_never_the_cpu(runtime, tmp_path, capfd):
    path, _ = written(tmp_path)
    target = Target(runtime=runtime, precision="fp32", batch=1, threads=1)
    if PROVIDERS[runtime] in onnxruntime.get_available_providers():
        says = f"{runtime} needs an NVIDIA GPU: .*. Use --runtime onnxruntime here"
    else:
        extra = ort.EXTRAS[runtime]
        says = rf"{runtime} needs {PROVIDERS[runtime]}, which the installed onnxruntime .*'snapvit-export\[{extra}\]'"
    for ask in (lambda: open_session(path, target), lambda: version_of(runtime)):
        with pytest.raises(SnapvitError, match=f"^{says}$") as error:
            ask()
        assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
@pytest.mark.parametrize("runtime", ON_GPU)
def test_the_driver_is_asked_before_the_package_for_gpus_is_trusted(runtime, monkeypatch):
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, TENSORRT])  # as that package tells
    with pytest.raises(SnapvitError, match=f"{runtime} needs an NVIDIA GPU: .*. Use --runtime onnxruntime here"):
        OrtSession(b"", 1, runtime)


@pytest.fixture
def azure(monkeypatch):
    """Let a provider that loads and takes no node stand for CUDA's, whose library is `library`."""
    if AZURE not in onnxruntime.get_available_providers():
        pytest.skip(f"this package of ONNX Runtime has no {AZURE}")

    def stand_in(library: str) -> None:
        monkeypatch.setitem(ort.PROVIDERS, "onnxruntime-cuda", AZURE)
        monkeypatch.setitem(ort.SETTINGS, AZURE, {})
        monkeypatch.setitem(ort.LIBRARIES, AZURE, library)
        monkeypatch.setitem(ort.REMEDIES, AZURE, "Try: pip install it")
        monkeypatch.setattr(ort, "require_gpu", lambda: None)

    return stand_in


def test_nodes_that_would_be_left_to_the_cpu_are_refused(azure, tmp_path, capfd):
    library = next((Path(onnxruntime.__file__).parent / "capi").glob("onnxruntime_pybind11_state*"))
    azure(library.name)
    path, _ = written(tmp_path)
    with pytest.raises(
        SnapvitError, match="x.onnx: .* would leave parts of it to the CPU. Export it with --flavour port"
    ):
        OrtSession(path, 1, "onnxruntime-cuda")
    assert capfd.readouterr() == ("", "")


def test_a_provider_that_does_not_load_is_told_with_the_reason_and_the_remedy(azure, tmp_path, capfd):
    (tmp_path / "provider.so").write_bytes(b"not a library")
    azure(str(tmp_path / "provider.so"))
    path, _ = written(tmp_path)
    says = f"x.onnx: {AZURE} does not load: .*provider.so: .*. Try: pip install it"
    with pytest.raises(SnapvitError, match=says) as error:
        OrtSession(path, 1, "onnxruntime-cuda")
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_with_its_batch_known_a_graph_computes_no_sizes(tmp_path):
    path, images = written(tmp_path)
    graph = onnx.load(path, load_external_data=False).graph
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param == ort.BATCH
    assert {"Shape", "Expand"} <= {node.op_type for node in graph.node}
    session = on_cpu(path, batch=5, optimised=tmp_path / "optimised.onnx")
    assert [value.shape for value in (*session.get_inputs(), *session.get_outputs())] == [[5, 3, 32, 32], [5, 5]]
    left = {node.op_type for node in onnx.load(tmp_path / "optimised.onnx", load_external_data=False).graph.node}
    assert not left & {"Shape", "Expand", "Gather"}  # ONNX Runtime would put them on the CPU
    assert close(session.run(None, {"images": images})[0], run(path, images))


def test_a_bound_run_is_the_same_at_the_same_place_every_time(tmp_path):
    path, images = written(tmp_path, batch=2)
    wanted = run(path, images)
    bound = BoundSession(on_cpu(path), "cpu")
    places = [value.data_ptr() for value in (bound._input, *bound._outputs)]
    found = [bound(images[start : start + 2])[0] for start in (0, 2)]
    assert close(np.concatenate(found), wanted[:4])  # the first is no view of the second
    assert close(bound(images[:2, :, ::-1].copy()[:, :, ::-1])[0], wanted[:2])
    assert [value.data_ptr() for value in (bound._input, *bound._outputs)] == places
    for wrong in (images[:1], images[:2].astype(np.float64), images[:2, :, :8]):
        with pytest.raises(ValueError, match=r"it takes \(2, 3, 32, 32\) float32, not "):
            bound(wrong)


def test_engines_are_cached_by_content_batch_and_card(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "same.onnx").write_bytes(b"one")
    found = [
        ort._settings(TENSORRT, path, batch, made_by)
        for path, batch, made_by in (
            (tmp_path / "same.onnx", 1, "Orin"),
            (b"one", 1, "Orin"),
            (b"two", 1, "Orin"),
            (b"one", 8, "Orin"),
            (b"one", 1, "Orin of 16 multiprocessors"),
        )
    ]
    folders, timings = ([each[f"trt_{kind}_cache_path"] for each in found] for kind in ("engine", "timing"))
    assert folders[0] == folders[1]
    assert len(set(folders)) == 4
    assert all(Path(folder).is_dir() for folder in [*folders, *timings])
    assert len(set(timings[:-1])) == 1  # of all models on one board
    assert timings[-1] not in [*timings[:-1], *folders]  # ONNX Runtime tells boards apart by compute capability alone
    assert ort._settings(CUDA, b"two", 1, "") == SETTINGS[CUDA]


def test_the_cpu_takes_any_batch_and_fixed_ones_run_as_often_as_they_must(tmp_path):
    path, images = written(tmp_path)
    wanted = run(path, images)
    with OrtSession(path, 1, "onnxruntime", batch=2) as session:
        assert session.run(images).tobytes() == wanted.tobytes()
        assert session.run_all(images)["logits"].tobytes() == wanted.tobytes()
    with pytest.raises(SnapvitError, match="x.onnx: ONNX Runtime cannot run it"):
        session.run(images)  # it is closed
    (tmp_path / "fixed").mkdir()
    fixed, _ = written(tmp_path / "fixed", batch=2)
    assert close(run(fixed, images), wanted)


def test_an_open_failure_is_told_once_and_not_tried_again(tmp_path, capfd):
    (tmp_path / "x.onnx").write_bytes(b"nonsense")
    with pytest.raises(SnapvitError, match="x.onnx: ONNX Runtime cannot open it: "):
        OrtSession(tmp_path / "x.onnx", 1)
    assert capfd.readouterr() == ("", "")
