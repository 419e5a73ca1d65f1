"""A server of a tiny model, for clients in an environment of their own (make test-clients).

The server's process is Python of the main environment, which SERVER_PYTHON names.
"""

import importlib.util
import os
import pathlib
import subprocess
import threading

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import asks the internet
ROOT = pathlib.Path(__file__).parents[2]
if importlib.util.find_spec("litellm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def url(tmp_path_factory):
    """Address of a server whose texts have at most a thousand tokens (bytes), prompt included."""
    python = os.environ.get("SERVER_PYTHON", str(ROOT / ".venv/bin/python"))
    folder = tmp_path_factory.mktemp("server")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "tests-compiled"),
    }
    write = [python, str(ROOT / "tests/fixtures/tiny_folder.py"), str(folder / "tiny")]
    subprocess.run(write, check=True, env=environment, cwd=ROOT)
    limits = ["--max-num-seqs=4", "--max-batched-tokens=32", "--num-pages=256", "--embeddings"]
    limits.append("--max-model-len=1024")
    command = [python, "-m", "jaxserve", "serve", str(folder / "tiny"), "--port=0", *limits]
    command += [f"--files-dir={folder / 'files'}", "--log-level=warning", "--grace-s=0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as process:
        kill = threading.Timer(300, process.kill)
        kill.start()
        try:
            address, said = None, []
            for line in process.stdout:
                said.append(line)
                if line.startswith("HTTP "):
                    address = line.split()[1]
                if line.strip() == "ready":
                    break
            kill.cancel()
            assert address is not None, "".join(said)
            rest = threading.Thread(target=process.stdout.read)
            rest.start()
            yield address
        finally:
            kill.cancel()
            process.terminate()
            process.wait(60)
        rest.join()
    assert process.returncode == 0
