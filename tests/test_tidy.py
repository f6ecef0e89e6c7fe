"""The house style, enforced: import arrows, pure cores, size walls, one README line a file."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("cluster", "engines", "kvstore", "balancers", "kernels")
ARROWS = {
    "kernels": {"kernels"},
    "engines": {"engines", "kernels"},
    "kvstore": {"kvstore"},
    "balancers": {"balancers"},
    "cluster": {"cluster", "engines", "kvstore", "balancers", "kernels"},
}
RAY_ROOMS = ("cluster/live/",)
TORCH_ROOMS = ("kernels/", "engines/model/", "engines/run/", "engines/toy/", "cluster/live/")
IMPURE = {
    "asyncio", "concurrent", "ctypes", "datetime", "logging", "multiprocessing", "os", "random", "ray", "secrets",
    "socket", "subprocess", "tempfile", "threading", "time", "torch", "uuid",
}  # fmt: skip
CORE_LIBRARIES = {"numpy", "shoal"}
# A core room also holds its golden replayer: a command line over the core, not the core.
CORE_EXEMPT = ("engines/core/golden",)
MODULE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
BANNED_NAMES = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}


def sources() -> list[Path]:
    files = [p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py"))]
    assert files
    return files


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, dotted module) of every import, also inside functions."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import at line {node.lineno}: write shoal.<folder>"
            found.append((node.lineno, node.module or ""))
    return found


def is_core(name: str) -> bool:
    pure = "/core/" in name or name.startswith("balancers/")
    return pure and not name.startswith(CORE_EXEMPT)


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_imports_follow_the_arrows(path: Path) -> None:
    name, tree = relative(path), ast.parse(path.read_text())
    for line, module in imports(tree):
        top, _, rest = module.partition(".")
        assert top not in FOLDERS, f"{name}:{line} import shoal.{module}, not {module}: two names make two modules"
        if top == "shoal" and rest:
            folder = rest.partition(".")[0]
            assert folder in ARROWS[name.partition("/")[0]], f"{name}:{line} may not import {module}"
        if top == "ray":
            assert name.startswith(RAY_ROOMS), f"{name}:{line} ray stays in {RAY_ROOMS}"
        if top == "torch":
            assert name.startswith(TORCH_ROOMS), f"{name}:{line} torch stays in {TORCH_ROOMS}"


@pytest.mark.parametrize("path", [p for p in sources() if is_core(relative(p))], ids=relative)
def test_cores_are_pure(path: Path) -> None:
    """No clock, randomness, environment, thread, I/O or heavy library below a core/ folder or in balancers/."""
    import sys

    name = relative(path)
    for line, module in imports(ast.parse(path.read_text())):
        top = module.partition(".")[0]
        assert top not in IMPURE, f"{name}:{line} a core may not import {module}"
        assert top in sys.stdlib_module_names or top in CORE_LIBRARIES, f"{name}:{line} {module} in a core"


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_sizes(path: Path) -> None:
    text, name = path.read_text(), relative(path)
    assert path.name not in BANNED_NAMES, f"{name}: name the question this module answers"
    assert text.count("\n") <= MODULE_LINES_MAX, f"{name} has more than {MODULE_LINES_MAX} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= FUNCTION_LINES_MAX, f"{name}:{node.lineno} {node.name} has {lines} lines"


@pytest.mark.parametrize("path", [p for p in sources() if "golden" not in relative(p)], ids=relative)
def test_no_print_in_libraries_and_no_bare_except(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{relative(path)}:{node.lineno} except must name a class"


def test_readme_lists_every_file() -> None:
    readme = (ROOT / "README.md").read_text()
    missing = [relative(p) for p in sources() if f"{relative(p)} " not in readme]
    assert not missing, f"README.md's tree lacks {missing}"


def test_wheel_lists_every_package() -> None:
    import tomllib

    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {"shoal." + relative(p.parent).replace("/", ".") for p in sources()}
    assert found <= listed, f"pyproject packages lacks {sorted(found - listed)}"


def test_kernels_is_a_namespace_package() -> None:
    """A top-level `kernels/__init__.py` would shadow the package of that name that transformers looks for."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
