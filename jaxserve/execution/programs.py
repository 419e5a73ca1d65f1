"""Compiled programs, kept on disk between starts: one that is found is neither traced nor compiled.

    <hash of all that decides a program>.key      the name of the file below
    <hash of what the compiler is given>.program  a checksum, then a pickle of the executable

Two names, so that code which changed, but not what it lowers to, costs a trace and no compilation.
Files are written whole or not at all; one that can't be used is told, removed and made anew.

Whoever can write these files can run code here: they hold machine code and pickles. So the folder
is its owner's alone, and what others could have written is not read.
"""

import contextlib
import dataclasses
import functools
import hashlib
import heapq
import itertools
import logging
import os
import pathlib
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import export
from jax.experimental import serialize_executable

from jaxserve.types import ProgramCounts

log = logging.getLogger(__name__)

FORMAT = b"jaxserve program 1\n"
MAX_BYTES = 4 << 30
"""Of all kept programs; the least recently used are removed first."""

NUM_THREADS = min(16, max(4, os.cpu_count() or 4))
"""That compile or read programs at the same time."""

JAX_CACHE_HIT = "/jax/compilation_cache/cache_hits"

ROOT = pathlib.Path(__file__).parents[2]
TRACED = (
    "jaxserve/execution",
    "jaxserve/layers",
    "jaxserve/memory",
    "jaxserve/models",
    "jaxserve/types.py",
    "pallas_kernels",
    "sharding",
)
"""The code that steps are traced from (tests/test_layers.py finds what is missing here)."""

PACKAGES = ("flax", "jax", "libtpu", "ml_dtypes", "numpy", "nvidia")
"""Beginnings of the names of installed packages that decide what is compiled."""

NO_MATTER = (
    "jax_compilation_cache",
    "jax_debug_log_modules",
    "jax_enable_compilation_cache",
    "jax_log",
    "jax_num_cpu_devices",
    "jax_persistent_cache",
    "jax_platforms",
    "jax_traceback",
    "jax_transfer_guard",
)
"""Beginnings of the names of JAX's settings that do not."""


class Exported(NamedTuple):
    """A program that was lowered elsewhere."""

    data: bytes
    """A serialised jax.export.Exported."""
    seconds: float
    """That this took."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What is to be compiled, and all that decides it."""

    name: str
    """Shown in profiles."""
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    """Trees of jax.ShapeDtypeStruct, with shardings."""
    traits: tuple[Any, ...]
    """What `function` was made from: values whose repr tells them apart, the same at each start."""
    donate: tuple[int, ...]
    out_shardings: Any
    precision: str | None = None
    """Of float32 products, where JAX's own is not wanted."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The compiler's."""
    elsewhere: Callable[[], Exported | None] | None = None
    """Lowers it in another process, and waits for that; None: it couldn't."""

    def lower(self, exported: Exported | None = None) -> jax.stages.Lowered:
        """`exported`: what `elsewhere` gave; little is left to do then."""
        function = (
            self.function if exported is None else export.deserialize(bytearray(exported.data)).call
        )
        jitted = jax.jit(
            self._named(function), donate_argnums=self.donate, out_shardings=self.out_shardings
        )
        with jax.default_matmul_precision(self.precision):
            return jitted.lower(*self.arguments)

    def export(self, platform: str) -> bytes:
        """Lowers it for an engine in another process. `platform`: as jax.export names it."""
        # which is stable enough between two processes of one installation
        checks = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
        # What calls it says how its results lie: said twice, a mesh gathers weights to follow it.
        jitted = jax.jit(self._named(self.function), donate_argnums=self.donate)
        exporting = export.export(jitted, platforms=[platform], disabled_checks=checks)
        with jax.default_matmul_precision(self.precision):
            return bytes(exporting(*self.arguments).serialize())

    def _named(self, function: Callable[..., Any]) -> Callable[..., Any]:
        named = functools.partial(function)
        named.__name__ = self.name  # type: ignore[attr-defined]
        return named

    def identity(self) -> tuple[Any, ...]:
        """All of it but the code, which `Programs` hashes."""
        leaves, tree = jax.tree.flatten(self.arguments)
        return (
            self.name,
            self.traits,
            str(tree),
            [(x.shape, x.dtype.name, x.sharding.spec, x.sharding.memory_kind) for x in leaves],
            self.donate,
            self.out_shardings,
            self.precision,
            sorted(self.options.items()),
        )


class Programs:
    """Compiles programs for one set of devices, or finds them compiled."""

    def __init__(
        self,
        devices: Sequence[Any] = (),
        folder: pathlib.Path | None = None,
        environment: Mapping[str, str] | None = None,
    ):
        """`folder` comes from `make_private`; None: nothing is kept. `environment`: variables that
        decide what the compiler does."""
        self.counts = ProgramCounts()
        self._devices = list(devices)
        self._folder = folder
        if folder is not None:
            variables = sorted((environment or {}).items())
            self._compiler = (_software(), _hardware(self._devices), variables)
            self._code = _code()
        self._lock = threading.Lock()
        self._slots = Slots(NUM_THREADS)
        """Of threads that work; the others wait for what is lowered elsewhere."""
        self._tracing = threading.Lock()
        """Threads that trace at once only take the interpreter from each other, and then all begin
        to compile at the end."""
        self._thread = threading.local()
        self._num_stored = 0
        self._can_store = True

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """`get` may be called within; removes what is too much afterwards."""
        jax.monitoring.register_event_listener(self._listen)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_listener(self._listen)
        if self._folder is not None and self._num_stored:
            prune(self._folder, MAX_BYTES)

    def get(self, program: Program) -> jax.stages.Compiled:
        """The compiled program. Threads may call it at the same time: so many that NUM_THREADS of
        them work while others wait for a program that is lowered elsewhere."""
        key = None
        # what is lowered elsewhere comes late, takes longest, and must not wait for all the others
        rank = 1 if program.elsewhere is None else 0
        if self._folder is not None:
            key = self._folder / f"{self._hash(self._code, program.identity())}.key"
            with self._slots.take(rank):
                if compiled := self._find(key):
                    return compiled
        exported = program.elsewhere() if program.elsewhere is not None else None
        with self._slots.take(rank):
            return self._make(program, exported, key)

    def _find(self, key: pathlib.Path) -> jax.stages.Compiled | None:
        with contextlib.suppress(OSError):
            if compiled := self._load(key.parent / key.read_text()):
                _touch(key)
                self._count(num_found=1)
                return compiled
        return None

    def _make(
        self, program: Program, exported: Exported | None, key: pathlib.Path | None
    ) -> jax.stages.Compiled:
        """`key`: where its name is to be written; None: it isn't kept."""
        lowered = self._lower(program, exported)
        if key is None:
            return self._compile(program, lowered)
        path = key.parent / f"{self._hash(*_lowered_identity(program, lowered))}.program"
        compiled = self._load(path)
        if compiled is None:
            compiled = self._compile(program, lowered)
            # serialised once more, what JAX's own cache gave lacks parts (on a CPU, JAX 0.11.2)
            if self._thread.is_hit:
                return compiled
            self._store(path, compiled)
        self._write(key, path.name.encode())
        return compiled

    def _lower(self, program: Program, exported: Exported | None) -> jax.stages.Lowered:
        with self._tracing:
            started = time.monotonic()
            lowered = program.lower(exported)
            elsewhere_s = 0.0 if exported is None else exported.seconds
            self._count(num_traced=1, trace_s=time.monotonic() - started + elsewhere_s)
        return lowered

    def _compile(self, program: Program, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        started = time.monotonic()
        self._thread.is_hit = False
        compiled = lowered.compile(compiler_options=dict(program.options) or None)
        self._count(num_compiled=1, compile_s=time.monotonic() - started)
        return compiled

    def _listen(self, event: str, **kwargs: Any) -> None:
        if event == JAX_CACHE_HIT:
            self._thread.is_hit = True

    def _load(self, path: pathlib.Path) -> jax.stages.Compiled | None:
        started = time.monotonic()
        try:
            data = path.read_bytes()
            body = memoryview(data)[len(FORMAT) + 32 :]
            if data[: len(FORMAT) + 32] != FORMAT + hashlib.sha256(body).digest():
                raise ValueError("it is damaged")
            compiled = serialize_executable.deserialize_and_load(
                *pickle.loads(body),
                backend=self._devices[0].client,
                execution_devices=self._devices,
            )
        except FileNotFoundError:
            return None
        # Whatever is wrong with a kept program, it can be made anew.
        except Exception as error:
            log.warning("%s can't be used, and is made anew: %s", path, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        _touch(path)
        self._count(read_s=time.monotonic() - started)
        return compiled

    def _store(self, path: pathlib.Path, compiled: jax.stages.Compiled) -> None:
        try:
            body = pickle.dumps(serialize_executable.serialize(compiled))
        # What a platform can't serialise it can still run.
        except Exception as error:
            self._give_up(error)
            return
        self._write(path, FORMAT + hashlib.sha256(body).digest() + body)
        self._num_stored += 1

    def _write(self, path: pathlib.Path, data: bytes) -> None:
        """Whole or not at all."""
        if not self._can_store:
            return
        try:
            with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".new", delete=False) as file:
                try:
                    file.write(data)
                    file.close()
                    os.replace(file.name, path)
                except OSError:
                    os.unlink(file.name)
                    raise
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Keeps no more programs, and says so once."""
        with self._lock:
            if self._can_store:
                log.warning("compiled steps are not kept: %s", error)
            self._can_store = False

    def _hash(self, *parts: Any) -> str:
        return hashlib.sha256(repr((self._compiler, parts)).encode()).hexdigest()[:40]

    def _count(self, **more: float) -> None:
        with self._lock:
            for name, value in more.items():
                setattr(self.counts, name, getattr(self.counts, name) + value)


class Slots:
    """Lets so many threads at a time do something; of those that wait, the lowest rank first, and
    of one rank whoever came first."""

    def __init__(self, count: int):
        self._free = count
        self._waiting: list[tuple[int, int]] = []
        self._tickets = itertools.count()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def take(self, rank: int) -> Iterator[None]:
        with self._changed:
            place = rank, next(self._tickets)
            heapq.heappush(self._waiting, place)
            self._changed.wait_for(lambda: self._free and self._waiting[0] == place)
            heapq.heappop(self._waiting)
            self._free -= 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += 1
                self._changed.notify_all()


def prune(folder: pathlib.Path, max_bytes: int) -> None:
    """Removes the least recently used programs beyond `max_bytes`, what names a program that is not
    there, and what a process that was killed left half written."""
    with contextlib.suppress(OSError):  # another process prunes too
        for path in folder.glob("*.new"):
            if path.stat().st_mtime < time.time() - 3600:
                path.unlink()
        stats = {path: path.stat() for path in folder.glob("*.program")}
        for path, stat in sorted(stats.items(), key=lambda item: -item[1].st_mtime):
            max_bytes -= stat.st_size
            if max_bytes < 0:
                path.unlink()
        for path in folder.glob("*.key"):
            if not (folder / path.read_text()).exists():
                path.unlink()


def make_private(folder: pathlib.Path) -> pathlib.Path:
    """Makes a folder for `Programs` where there is none.

    Raises: OSError where it can't be had, or where others (but root) could have written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    stat = folder.stat()
    if stat.st_uid not in (0, os.geteuid()):
        raise PermissionError("the folder is another user's")
    if stat.st_mode & 0o022:
        raise PermissionError("users other than its owner may write in the folder")
    return folder


def _lowered_identity(program: Program, lowered: jax.stages.Lowered) -> tuple[Any, ...]:
    """All that decides what becomes of a lowered program, and how that is called."""
    rest = dataclasses.replace(program, traits=()).identity()
    # arguments that nothing uses are left out of the text
    kept = sorted(lowered._lowering.compile_args["kept_var_idx"])  # pyright: ignore
    return lowered.as_text(), str(lowered.in_tree), str(lowered.out_tree), kept, rest


def _touch(path: pathlib.Path) -> None:
    """Makes it the most recently used, where that can be written down."""
    with contextlib.suppress(OSError):
        os.utime(path)


def _code() -> str:
    """Hash of the code that steps are traced from."""
    code = hashlib.sha256()
    for part in TRACED:
        path = ROOT / part
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            code.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return code.hexdigest()


def _software() -> tuple[Any, ...]:
    """Versions of what traces and compiles, and JAX's settings."""
    site = pathlib.Path(jax.__file__).parents[1]
    return (
        sys.version,
        sorted(path.name for path in site.glob("*.dist-info") if path.name.startswith(PACKAGES)),
        sorted((k, v) for k, v in jax.config.values.items() if not k.startswith(NO_MATTER)),
    )


def _hardware(devices: Sequence[Any]) -> tuple[Any, ...]:
    client = devices[0].client
    processor: list[str] = []
    if client.platform == "cpu":  # machine code for this one, which may lack another's instructions
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        processor = sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))})
    return (
        client.platform,
        client.platform_version,
        [(device.id, device.process_index, device.device_kind) for device in devices],
        processor,
    )
