"""Says what a serialised model is, and what its tensors take."""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="directory of a serialised model, or NAME.asgraph in it")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--verify", action="store_true", help="compare all checksums")


def run(options: argparse.Namespace) -> int:
    from allspark.model_loader import DashInferModel
    from allspark.model_loader.native import required_of
    from allspark.model_loader.quantization import weight_formats
    from allspark.model_loader.serialised import engine_accepts, read_graph

    graph, param = DashInferModel(options.model).load_model().files
    file = read_graph(graph)
    build = file.build
    print(f"model: {graph.stem}")
    print(f"format version: {file.format_version}")
    print(f"made by: allspark {build.version} from {build.source!r}")
    print(f"parameters: {file.param_bytes} bytes in {len(file.tensors)} tensors")
    for line in weight_formats(file.spec):
        print(line)
    spec = type(file.spec)()
    spec.CopyFrom(file.spec)
    spec.ClearField("weight_quant")  # One entry per weight; --tensors shows the types.
    print("spec:\n  " + str(spec).strip().replace("\n", "\n  "))
    if options.tensors:
        types = {tensor.name: tensor.dtype for tensor in required_of(file.spec)}
        print("tensors: name, type, shape, bytes, checksum")
        for record in file.tensors:
            shape = "x".join(map(str, record.shape))
            print(
                f"  {record.name} {types.get(record.name, '?')} {shape} {record.bytes} "
                f"{record.checksum:016x}"
            )
    if options.verify:
        if not engine_accepts(graph, param):
            print(f"allspark inspect: {graph.stem} is damaged", file=sys.stderr)
            return 1
        print("checksums: right")
    return 0
