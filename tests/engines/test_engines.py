from __future__ import annotations

import importlib.util
import platform
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edgevit import engines
from edgevit.bundle import Bundle
from edgevit.engines import available_engines, choose_engine, open_stages
from edgevit.errors import BundleError, EngineUnavailableError
from edgevit.runtime.classifier import Classifier
from tests.engines.graphs import LINEAR_LAYERS, SIZE, bundle_of, transformer
from tests.tiny_bundle import GAINS, expected, picture, stage_graph

ENGINES = [
    pytest.param(name, marks=pytest.mark.skipif(reason is not None, reason=str(reason)))
    for name, reason in available_engines().items()
]
each_engine = pytest.mark.parametrize("engine", ENGINES)


# Stages.


@each_engine
def test_every_stage_gives_what_arithmetic_says(tiny_bundle: Path, engine: str) -> None:
    bundle = Bundle.load(tiny_bundle)
    stages = open_stages(bundle, engine, threads=1)
    assert stages.engine == engine
    assert len(stages) == len(GAINS)
    # Back and forth, so that an answer left over from the picture before would show.
    for label in (0, 1, 2, 0, 2, 1):
        frame = picture(label, 0.7)
        value: Any = bundle.preprocess(frame)[np.newaxis]
        for number in range(len(stages)):
            output = stages[number].run(value)
            index, confidence = expected(frame, number)
            assert output.top1 == index == label
            assert output.confidence == pytest.approx(confidence, abs=1e-5)
            logits = GAINS[number] * frame[0, 0, ::-1] / 255
            np.testing.assert_allclose(output.logits, logits, rtol=1e-5)
            assert output.logits.dtype == np.float32
            assert (output.tokens is None) == (number == len(stages) - 1)
            value = output.tokens


@each_engine
def test_a_chain_left_early_starts_afresh(tiny_bundle: Path, engine: str) -> None:
    """The second stage gets the tokens of the frame it runs on, though it missed one."""
    bundle = Bundle.load(tiny_bundle)
    first, second, _ = open_stages(bundle, engine, threads=1)
    for label in (0, 1):
        output = first.run(bundle.preprocess(picture(label))[np.newaxis])
    assert second.run(output.tokens).top1 == 1


@each_engine
def test_int8_computes_what_the_graph_says(tmp_path: Path, engine: str) -> None:
    """Against ONNX Runtime without any rewriting, which computes Q and DQ literally in float.

    The tolerance is for processors without VNNI, whose INT8 products saturate in 16 bits.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    graph = transformer()
    literal = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    (stage,) = open_stages(bundle_of(tmp_path, graph), engine, 2, "f32")
    for seed in range(4):
        image = np.random.default_rng(seed).integers(0, 256, (1, SIZE, SIZE, 3), np.uint8)
        (wanted,) = literal.run(["logits"], {"image": image})
        assert np.abs(stage.run(image).logits - wanted[0]).max() < 0.15 * np.ptp(wanted)


# What really ran.


@each_engine
def test_every_linear_layer_of_an_int8_graph_runs_in_int8(tmp_path: Path, engine: str) -> None:
    (stage,) = open_stages(bundle_of(tmp_path, transformer()), engine, 2)
    layers = stage.linear_layers()
    assert len(layers) == len(LINEAR_LAYERS)
    assert all(int8 for _, int8 in layers), layers


@each_engine
@pytest.mark.parametrize("name", LINEAR_LAYERS)
def test_a_layer_that_falls_back_to_float_is_seen(tmp_path: Path, engine: str, name: str) -> None:
    (stage,) = open_stages(bundle_of(tmp_path, transformer([name])), engine, 2, "f32")
    layers = stage.linear_layers()
    assert len(layers) == len(LINEAR_LAYERS)
    # ONNX Runtime has INT8 convolutions only where the output is quantized too, by the layer after.
    fallen = 2 if (engine, name) == ("onnxruntime", "up") else 1
    assert [int8 for _, int8 in layers].count(False) == fallen, layers


@each_engine
def test_a_float_graph_has_no_int8(tmp_path: Path, engine: str) -> None:
    (stage,) = open_stages(bundle_of(tmp_path, transformer(LINEAR_LAYERS)), engine, 2, "f32")
    layers = stage.linear_layers()
    assert len(layers) == len(LINEAR_LAYERS)
    assert not any(int8 for _, int8 in layers), layers


# Settings.


def test_openvino_is_told_threads_streams_and_precision(tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    for precision, wanted in (
        ("f32", "f32"),
        ("bf16", "bf16"),
        ("auto", "bf16" if "BF16" in capabilities else "f32"),
    ):
        (stage,) = open_stages(bundle_of(tmp_path, transformer()), "openvino", 1, precision)
        compiled = stage._compiled
        assert compiled.get_property("INFERENCE_NUM_THREADS") == 1
        assert compiled.get_property("NUM_STREAMS") == 1
        hint = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        # A processor without bfloat16 computes in float32 whatever the hint.
        assert hint == wanted or (hint, "BF16" in capabilities) == ("f32", False)


def test_onnxruntime_is_told_threads(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    (stage,) = open_stages(bundle_of(tmp_path, transformer()), "onnxruntime", 3)
    assert stage._session.get_session_options().intra_op_num_threads == 3
    assert stage._session.get_providers() == ["CPUExecutionProvider"]


def test_tokens_pass_uncopied_in_openvino(tiny_bundle: Path) -> None:
    pytest.importorskip("openvino")
    bundle = Bundle.load(tiny_bundle)
    first, second, _ = open_stages(bundle, "openvino", 1)
    tokens = first.run(bundle.preprocess(picture(0))[np.newaxis]).tokens
    second.run(tokens)
    taken = second._request.get_input_tensor()
    assert taken.data.__array_interface__["data"] == tokens.data.__array_interface__["data"]


# What is left on disk.


def test_no_compiled_model_is_kept(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle's hashes are checked; a compiled model's would not be, and a damaged one answers wrongly."""
    pytest.importorskip("openvino")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    clf = Classifier.load(tiny_bundle, engine="openvino", threads=1)
    assert clf(picture(2)).label == "blue"
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".blob", ".cl_cache")]


# Graphs that are no stages.


def edited(graph: bytes, old: str, new: str) -> bytes:
    """The graph with an input or output called otherwise."""
    model = onnx.load_from_string(graph)
    for node in model.graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        node.output[:] = [new if name == old else name for name in node.output]
    for port in [*model.graph.input, *model.graph.output]:
        if port.name == old:
            port.name = new
    return model.SerializeToString()


def reshaped(graph: bytes, name: str, shape: list[Any], kind: int = TensorProto.UINT8) -> bytes:
    """The graph with an input or output declared otherwise."""
    model = onnx.load_from_string(graph)
    for ports in (model.graph.input, model.graph.output):
        for number, port in enumerate(ports):
            if port.name == name:
                ports[number].CopyFrom(helper.make_tensor_value_info(name, kind, shape))
    return model.SerializeToString()


def without_output(graph: bytes, name: str) -> bytes:
    model = onnx.load_from_string(graph)
    kept = [port for port in model.graph.output if port.name != name]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    return model.SerializeToString()


FIRST, LAST = stage_graph(0, 2.0, False), stage_graph(2, 20.0, True)
BAD_FIRST = {
    "nothing": b"",
    "text": b"not a graph at all\n" * 10,
    "cut": FIRST[: len(FIRST) // 2],
    "an unknown operator": FIRST.replace(b"ReduceMean", b"ReduceMoan"),
    "another input": edited(FIRST, "image", "picture"),
    "no logits": without_output(FIRST, "logits"),
    "no tokens": without_output(FIRST, "tokens"),
    "confidence by another name": edited(FIRST, "confidence", "score"),
}


@each_engine
@pytest.mark.parametrize("what", BAD_FIRST)
def test_what_is_no_stage_is_refused(tmp_path: Path, engine: str, what: str) -> None:
    bundle = bundle_of(tmp_path, BAD_FIRST[what], LAST, classes=3)
    with pytest.raises(BundleError) as caught:
        open_stages(bundle, engine, 1)
    message = str(caught.value)
    assert message.startswith(f"{bundle.path}: 'stages/1.onnx'")
    assert "make the bundle again" in message
    assert "\n" not in message


@each_engine
def test_a_later_stage_is_named(tmp_path: Path, engine: str) -> None:
    with pytest.raises(BundleError, match=r"'stages/2\.onnx'"):
        open_stages(bundle_of(tmp_path, FIRST, FIRST, classes=3), engine, 1)


@each_engine
@pytest.mark.parametrize(
    ("graphs", "classes"),
    [
        ([reshaped(FIRST, "image", [1, 16, 16, 3]), LAST], 3),  # of another size than its pictures
        ([FIRST, reshaped(LAST, "tokens_in", [1, 2, 3], TensorProto.FLOAT)], 3),
        ([FIRST, LAST], 4),  # labels without a logit
    ],
    ids=["size", "tokens", "labels"],
)
def test_stages_that_do_not_fit_together_are_refused(
    tmp_path: Path, engine: str, graphs: list[bytes], classes: int
) -> None:
    bundle = bundle_of(tmp_path, *graphs, classes=classes)
    with pytest.raises(BundleError, match="make the bundle again"):
        Classifier(bundle, engine, 1)


@each_engine
def test_shapes_that_are_not_static_are_refused_or_right(tmp_path: Path, engine: str) -> None:
    graph = reshaped(FIRST, "image", ["batch", SIZE, SIZE, 3])
    for name, shape in (("tokens", ["batch", 1, 3]), ("logits", ["batch", 3])):
        graph = reshaped(graph, name, shape, TensorProto.FLOAT)
    graph = reshaped(graph, "confidence", ["batch"], TensorProto.FLOAT)
    graph = reshaped(graph, "top1", ["batch"], TensorProto.INT32)
    try:
        classifier = Classifier(bundle_of(tmp_path, graph, LAST, classes=3), engine, 1)
    except BundleError:
        return
    assert [classifier(picture(label)).index for label in (0, 1, 2)] == [0, 1, 2]


# Which engine.


def installed(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    find = importlib.util.find_spec

    def found(name: str, *more: Any) -> Any:
        return (
            (object() if name in names else None) if name in engines.ENGINES else find(name, *more)
        )

    monkeypatch.setattr(importlib.util, "find_spec", found)


BOTH = ("openvino", "onnxruntime")


@pytest.mark.parametrize(
    ("names", "machine", "flags", "precision", "chosen"),
    [
        (BOTH, "x86_64", ["avx2", "avx512_vnni"], "int8", "openvino"),
        (BOTH, "x86_64", ["avx2", "avx_vnni"], "int8", "openvino"),
        (BOTH, "x86_64", ["avx2", "amx_int8"], "int8", "openvino"),
        (BOTH, "x86_64", ["avx2", "avx512f"], "int8", "onnxruntime"),
        (BOTH, "x86_64", ["avx2"], "float32", "openvino"),
        (BOTH, "aarch64", ["asimddp", "i8mm"], "int8", "onnxruntime"),
        (BOTH, "aarch64", ["asimddp"], "float32", "onnxruntime"),
        (["openvino"], "x86_64", ["avx2"], "int8", "openvino"),
        (["openvino"], "aarch64", [], "int8", "openvino"),
        (["onnxruntime"], "x86_64", ["avx512_vnni"], "int8", "onnxruntime"),
        (["onnxruntime"], "x86_64", ["avx2"], "float32", "onnxruntime"),
    ],
)
def test_auto(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    machine: str,
    flags: list[str],
    precision: str,
    chosen: str,
) -> None:
    bundle = bundle_of(tmp_path, transformer(), precision=precision)
    installed(monkeypatch, *names)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(engines, "cpu_flags", lambda: flags)
    assert choose_engine("auto", bundle) == chosen


def test_an_engine_that_is_not_there_says_what_to_install(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Bundle.load(tiny_bundle)
    installed(monkeypatch)
    reasons = available_engines()
    assert set(reasons) == {"openvino", "onnxruntime"}
    for name, reason in reasons.items():
        assert f"pip install {name}" in str(reason)
        with pytest.raises(EngineUnavailableError, match=f"pip install {name}"):
            open_stages(bundle, name)
    with pytest.raises(EngineUnavailableError, match=r"pip install onnxruntime.*openvino"):
        open_stages(bundle)


def test_an_unknown_engine_is_refused(tiny_bundle: Path) -> None:
    with pytest.raises(EngineUnavailableError, match=r"'tensorflow'.*openvino, onnxruntime"):
        open_stages(Bundle.load(tiny_bundle), "tensorflow")
