"""Generates jaxserve_pb2.py, its stub and the gRPC classes from jaxserve.proto (needs the `dev`
extra).

Run as `python -m jaxserve.entry.proto.generate`; the results are committed.
"""

import pathlib

from grpc_tools import protoc

HERE = pathlib.Path(__file__).parent


def run(*arguments: str) -> None:
    """Runs protoc over jaxserve.proto. Raises: SystemExit if it fails."""
    status = protoc.main(["protoc", f"-I{HERE}", *arguments, str(HERE / "jaxserve.proto")])
    if status != 0:
        raise SystemExit(status)


def main() -> None:
    run(f"--python_out={HERE}", f"--pyi_out={HERE}", f"--grpc_python_out={HERE}")
    path = HERE / "jaxserve_pb2_grpc.py"
    text = path.read_text()
    # protoc writes a top-level import; the files live in a package.
    text = text.replace("import jaxserve_pb2 as", "from jaxserve.entry.proto import jaxserve_pb2 as")
    path.write_text(text)


if __name__ == "__main__":
    main()
