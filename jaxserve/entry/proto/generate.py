"""Generates the messages, stubs and gRPC classes of each .proto file here (needs the `dev` extra).

Run as `python -m jaxserve.entry.proto.generate`; the results are committed.
"""

import pathlib

from grpc_tools import protoc

HERE = pathlib.Path(__file__).parent
NAMES = ("jaxserve", "vllm_engine")


def run(*arguments: str) -> None:
    """Runs protoc over the .proto files. Raises: SystemExit if it fails."""
    files = [str(HERE / f"{name}.proto") for name in NAMES]
    status = protoc.main(["protoc", f"-I{HERE}", *arguments, *files])
    if status != 0:
        raise SystemExit(status)


def main() -> None:
    run(f"--python_out={HERE}", f"--pyi_out={HERE}", f"--grpc_python_out={HERE}")
    for name in NAMES:
        path = HERE / f"{name}_pb2_grpc.py"
        module = f"import {name}_pb2 as"
        # protoc writes a top-level import; the files live in a package.
        path.write_text(path.read_text().replace(module, f"from jaxserve.entry.proto {module}"))


if __name__ == "__main__":
    main()
