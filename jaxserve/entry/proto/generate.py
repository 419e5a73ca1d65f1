"""Generates jaxserve_pb2.py, its stub and the gRPC classes from jaxserve.proto (needs the `dev` extra).

Run as `python -m jaxserve.entry.proto.generate`; the results are committed. `--check` only says whether they are current.
"""

import pathlib
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
NAMES = ("jaxserve_pb2.py", "jaxserve_pb2.pyi", "jaxserve_pb2_grpc.py")


def generate(out: pathlib.Path) -> None:
    """Writes the generated files into `out`."""
    from grpc_tools import protoc

    status = protoc.main(
        [
            "protoc",
            f"-I{HERE}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            str(HERE / "jaxserve.proto"),
        ]
    )
    if status != 0:
        raise SystemExit(status)
    grpc_file = out / "jaxserve_pb2_grpc.py"
    text = grpc_file.read_text()
    text = text.replace("import jaxserve_pb2 as", "from jaxserve.entry.proto import jaxserve_pb2 as")
    grpc_file.write_text(text)


def stale() -> list[str]:
    """Names of the generated files that are not what jaxserve.proto gives now."""
    with tempfile.TemporaryDirectory() as folder:
        generate(pathlib.Path(folder))
        return [
            name
            for name in NAMES
            if not (HERE / name).exists()
            or (HERE / name).read_text() != (pathlib.Path(folder) / name).read_text()
        ]


if __name__ == "__main__":
    if "--check" in sys.argv:
        if names := stale():
            raise SystemExit(f"not current: {', '.join(names)}; run `make proto`")
    else:
        generate(HERE)
