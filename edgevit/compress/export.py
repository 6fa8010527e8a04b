"""Export each stage to its own ONNX graph, and prove that it computes what PyTorch computes.

One exporter (TorchScript based, opset 17, IR version 8), because its graphs are what TensorRT's
parsers and both CPU engines fuse best: one LayerNormalization operator, GELU by Erf, attention as
MatMul and Softmax. Batch 1, static shapes; weights and tensors are named after the module they
belong to, so that a calibration table stays valid when the same recipe is exported again.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Container, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch

from edgevit.compress.exits import Stage
from edgevit.errors import ParityError

OPSET = 17
IR_VERSION = 8
# The centred pixels: the tensor between the uint8 input and the patch embedding.
PIXELS = "pixels"

_MAX_ERROR = 1e-3


def export_stage(stage: Stage, example: torch.Tensor) -> onnx.ModelProto:
    """One stage as ONNX; ``example`` is its input (uint8 ``[1, S, S, 3]`` or tokens ``[1, N, D]``)."""
    outputs = ["logits", "top1", "confidence"]
    buffer: Any = io.BytesIO()  # torch takes a stream, whatever its annotation says
    fused: list[Any] = [m for m in stage.modules() if getattr(m, "fused_attn", False)]
    for module in fused:
        module.fused_attn = False  # the exporter writes scaled_dot_product_attention less plainly
    try:
        with warnings.catch_warnings(), torch.inference_mode():
            # TracerWarnings about size checks that become constants, which static shapes want, and
            # the notice that a newer exporter exists (see above for why not that one).
            warnings.simplefilter("ignore")
            torch.onnx.export(
                stage,
                (example,),
                buffer,
                opset_version=OPSET,
                dynamo=False,
                input_names=["image" if stage.embedding is not None else "tokens_in"],
                output_names=outputs if stage.final else ["tokens", *outputs],
            )
    finally:
        for module in fused:
            module.fused_attn = True
    model = onnx.load_from_string(buffer.getvalue())
    model.ir_version = IR_VERSION
    model.producer_name, model.producer_version, model.doc_string = "edgevit", "", ""
    _merge_identities(model.graph)
    _name_weights(model.graph)
    _name_pixels(model.graph)
    onnx.checker.check_model(model, full_check=True)
    return model


def check_parity(
    stages: Sequence[Stage], models: Sequence[onnx.ModelProto], images: np.ndarray
) -> float:
    """Largest absolute difference of tokens and logits between ONNX Runtime and PyTorch.

    ``images`` is uint8 ``[n, S, S, 3]``. Each stage is compared on the same input, then the chain of
    graphs on its own tokens against the chain of modules. Raises :class:`ParityError` above 1e-3.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    sessions = [
        onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        for model in models
    ]
    worst = 0.0
    for image in images:
        truth = torch.from_numpy(image[None])
        chained = image[None]
        for number, (stage, session) in enumerate(zip(stages, sessions, strict=True), 1):
            names = [output.name for output in session.get_outputs()]
            feed = session.get_inputs()[0].name
            alone = dict(zip(names, session.run(names, {feed: truth.numpy()}), strict=True))
            chain = dict(zip(names, session.run(names, {feed: chained}), strict=True))
            with torch.inference_mode():
                tokens = stage.tokens(truth)
                wanted = {"tokens": tokens.numpy(), "logits": stage.head(tokens).numpy()}
            for name in names[:-2]:
                for found in (alone[name], chain[name]):
                    error = float(np.abs(found - wanted[name]).max())
                    if not error <= _MAX_ERROR:
                        raise ParityError(
                            f"stage {number}: '{name}' of the exported graph differs from PyTorch by "
                            f"{error:.2g} (at most {_MAX_ERROR:g}); please report this with the recipe"
                        )
                    worst = max(worst, error)
            truth, chained = tokens, chain.get("tokens")
    return worst


def _merge_identities(graph: onnx.GraphProto) -> None:
    """The exporter stores equal weights once and copies them by Identity: use the one directly."""
    source = {n.output[0]: n.input[0] for n in graph.node if n.op_type == "Identity"}
    results = {output.name for output in graph.output}
    kept = [n for n in graph.node if n.op_type != "Identity" or n.output[0] in results]
    for node in kept:
        for position, name in enumerate(node.input):
            while name in source:
                name = source[name]
            node.input[position] = name
    del graph.node[:]
    graph.node.extend(kept)


def _name_weights(graph: onnx.GraphProto) -> None:
    """``onnx::MatMul_123`` becomes ``blocks.0.attn.qkv.weight``, after the node that reads it."""
    names: dict[str, str] = {}
    for node in graph.node:
        for name in node.input:
            if name.startswith("onnx::") and name not in names:
                scope = node.name.rsplit("/", 1)[0].strip("/").replace("/", ".")
                suffix = "weight" if node.op_type in ("MatMul", "Gemm") else node.op_type.lower()
                names[name] = _unused(f"{scope}.{suffix}", names.values())
    _rename(graph, names)


def _name_pixels(graph: onnx.GraphProto) -> None:
    """The input of the patch embedding gets a name of its own: its range is known, not measured."""
    if graph.input[0].name == "image":
        embedding = next(node for node in graph.node if node.op_type == "MatMul")
        _rename(graph, {embedding.input[0]: PIXELS})


def _rename(graph: onnx.GraphProto, names: dict[str, str]) -> None:
    for initializer in graph.initializer:
        initializer.name = names.get(initializer.name, initializer.name)
    for node in graph.node:
        for field in (node.input, node.output):
            for position, name in enumerate(field):
                field[position] = names.get(name, name)
    for value in graph.value_info:
        value.name = names.get(value.name, value.name)


def _unused(name: str, taken: Container[str]) -> str:
    candidates = (name, *(f"{name}_{number}" for number in range(2, 1000)))
    return next(c for c in candidates if c not in taken)
