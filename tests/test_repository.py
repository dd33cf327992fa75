"""What holds for the repository as a whole: layers, imports, sizes, configs, and that documented commands exist."""

from __future__ import annotations

import ast
import functools
import itertools
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import pytest

from mesh_transformer.config import load_config

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mesh_transformer"
SCRIPTS = sorted([*ROOT.glob("*.py"), *(ROOT / "scripts").glob("*.py")])
MODULES = sorted(PACKAGE.rglob("*.py"))
OURS = [*MODULES, *SCRIPTS, *sorted((ROOT / "scripts").glob("*/*.py"))]
OURS += [*sorted((ROOT / "benchmarks").rglob("*.py")), *sorted((ROOT / "tests").rglob("*.py"))]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CONFIGS = sorted((ROOT / "configs").glob("*.json"))

MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 80

# The rooms of the package from the ground up: a room imports only from its own row and those above it in this list.
LAYERS: list[set[str]] = [
    {"errors"},
    {"command_line", "progress"},
    {"config_fields", "config_rules", "config_groups", "config", "storage", "storage_errors", "gcs"},
    {"mesh", "parameters", "collectives", "state", "memory", "weight_products", "panels"},
    {"attention", "attention_tiles", "fused_attention"}
    | {"cross_entropy", "collected_vocabulary", "layers", "optimizer", "steps"},
    {"transformer_shard"},
    {"transformer_zero"},
    {"sampler", "sampling"},
    {"decoder_weights", "decoder_shard", "decoding", "batching", "scoring", "checkpoint", "data"},
    {"generation"},
    {"answer", "completion", "conversation", "inference", "prompt_files"},
    {"config_records", "config_report", "planning", "training", "serving", "evaluation"},
    {"cluster"},
]
# Imports upwards that are meant, each inside a function.
ALLOWED_UPWARDS: set[tuple[str, str]] = {
    ("transformer_shard", "checkpoint"),  # the network of the public face has load_ckpt, write_ckpt
    ("transformer_shard", "generation"),  # and generate
    ("transformer_shard", "decoder_weights"),
    ("config", "config_report"),  # `python -m mesh_transformer.config` is the report's command
}
PRIVATE = re.compile(
    r"^(jax|jaxlib|haiku|optax|numpy|tokenizers|transformers|smart_open|google|wandb|ray|orbax|tensorstore)\b.*\._"
)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path, skip: Collection[int] = ()) -> Iterator[tuple[str, bool]]:
    """(dotted name, inside a function) of every import of a file; `from a import b` gives a.b. `skip`: ids of nodes."""
    tree = tree_of(path)
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    inside = {id(child) for function in functions for child in ast.walk(function)}
    for node in ast.walk(tree):
        if id(node) in skip:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import, line {node.lineno}"
            yield from ((f"{node.module}.{alias.name}", id(node) in inside) for alias in node.names)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def own_imports(path: Path) -> set[tuple[str, bool]]:
    """Modules of the package that a file imports, by their full names, and whether inside a function."""
    known = {module_name(module) for module in MODULES}
    found = set()
    for name, inside in imports(path):
        if name.split(".")[0] == "mesh_transformer":
            while name not in known:
                name = name.rpartition(".")[0]
            found.add((name, inside))
    return found


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def rank(name: str) -> int:
    place = next((number for number, rooms in enumerate(LAYERS) if room(name) in rooms), None)
    assert place is not None, f"{name} has no place in LAYERS of tests/test_repository.py: give it one"
    return place


def test_imports_point_downwards():
    wrong = []
    for path in MODULES:
        name = module_name(path)
        for target, inside in own_imports(path):
            if "mesh_transformer" in (name, target):
                continue
            allowed = inside and (room(name), room(target)) in ALLOWED_UPWARDS
            if not allowed and rank(target) > rank(name):
                wrong.append(f"{name} imports {target}, which stands above it")
    assert not wrong, "\n".join(wrong)


def test_no_import_cycle():
    """Imports inside functions do not count: they run when both modules exist."""
    graph = {
        module_name(path): {target for target, inside in own_imports(path) if not inside} - {module_name(path)}
        for path in MODULES
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import cycle: {' > '.join([*trail, name])}"
        if name not in done:
            for target in graph[name]:
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_library_does_not_import_scripts():
    scripts = {script.stem for script in SCRIPTS} | {"scripts", "benchmarks", "tests"}
    found = {
        (module_name(path), name) for path in MODULES for name, _ in imports(path) if name.split(".")[0] in scripts
    }
    assert not found


def test_no_private_imports():
    private = {(path.name, name) for path in OURS for name, _ in imports(path) if PRIVATE.match(name)}
    assert not private, "private names of other projects are imported"


# What a package is called where it is imported, where that is not its own name.
DISTRIBUTIONS = {"haiku": "dm-haiku", "orbax": "orbax-checkpoint", "google": "google-cloud-storage"}
OWN = {"mesh_transformer", "benchmarks", "scripts", "tests"}


def requirements(lines: Iterable[str]) -> set[str]:
    """The names of requirement lines, as pip compares them."""
    names = (re.match(r"[\w.-]+", line.strip()) for line in lines)
    return {found[0].lower().replace("_", "-") for found in names if found}


def test_every_package_that_is_imported_is_declared():
    """Outside functions only what requirements.txt has; inside, an extra may provide it. Nothing by way of another.

    Of `serving` nothing is imported before device_serve.py has seen that its extra is there, and of evaluation's
    harness.py before `tasks.check_harness` has.
    """
    core = requirements((ROOT / "requirements.txt").read_text().splitlines())
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wrong = set()
    for path in [*MODULES, *SCRIPTS, *sorted((ROOT / "benchmarks").glob("*.py"))]:
        typing = {id(child) for node in ast.walk(tree_of(path)) if is_type_checking(node) for child in ast.walk(node)}
        local = OWN | {script.stem for script in SCRIPTS} | {other.stem for other in path.parent.glob("*.py")}
        for name, inside in imports(path, skip=typing):
            top = name.split(".")[0]
            if top in sys.stdlib_module_names or top in local:
                continue
            package = DISTRIBUTIONS.get(top, top).lower().replace("_", "-")
            optional = inside or path.parent.name in ("benchmarks", "serving") or path.name == "harness.py"
            if package not in (core | requirements(itertools.chain(*extras.values())) if optional else core):
                wrong.add(f"{path.relative_to(ROOT)} imports {name}, which {package} would have to provide")
    assert not wrong, "\n".join(sorted(wrong))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


# Of jax.experimental, what has no other home and has stayed for years.
UNSTABLE = re.compile(
    r"\bjax\.(interpreters|lib|extend|core|linear_util|experimental(?!( import |\.)(mesh_utils|topologies)\b))\b"
)


def test_only_the_stable_face_of_jax_is_used():
    """Names that a patch release may move; `jax.shard_map` and `jax.jit` are what maps over devices."""
    found = [path.name for path in OURS if path.name != Path(__file__).name and UNSTABLE.search(path.read_text())]
    assert not found


def test_everything_imports_without_deprecation_warnings():
    """Modules and scripts in one fresh process; a name that a newer release is about to remove shows here first."""
    names = [module_name(path) for path in MODULES if path.name != "__main__.py"]
    program = (
        "import importlib, runpy, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"for path in {[str(path) for path in SCRIPTS]!r}:\n"
        "    assert callable(runpy.run_path(path, run_name='imported')['main']), path\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", program],
        cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def test_sizes():
    long = []
    for path in OURS:
        text = path.read_text(encoding="utf-8")
        if (lines := text.count("\n")) > MAX_FILE_LINES:
            long.append(f"{path.relative_to(ROOT)} has {lines} lines, more than {MAX_FILE_LINES}")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long.append(
                        f"{path.relative_to(ROOT)}: {node.name} has {lines} lines, more than {MAX_FUNCTION_LINES}"
                    )
    assert not long, "\n".join(long)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_config_loads(path):
    config = load_config(path)
    assert len(config.run.comment) > 60, "a shipped config says what it is for"


def test_original_configs_have_the_original_values():
    pretraining = load_config(ROOT / "configs/6B_roto_256.json").to_dict()
    fine_tuning = load_config(ROOT / "configs/example_config.json").to_dict()
    shape = dict(
        layers=28, d_model=4096, n_heads=16, n_vocab=50400, norm="layernorm", pe="rotary", pe_rotary_dims=64, seq=2048,
        cores_per_replica=8, per_replica_batch=1, gradient_accumulation_steps=16, weight_decay=0.1,
    )  # fmt: skip
    long = dict(
        warmup_steps=3000, anneal_steps=300000, lr=1.2e-4, end_lr=1.2e-5, total_steps=350000, tpu_size=256,
        val_batches=100, val_every=500, ckpt_every=500, keep_every=10000,
    )  # fmt: skip
    short = dict(
        warmup_steps=7, anneal_steps=65, lr=5e-5, end_lr=1e-5, total_steps=72, tpu_size=8, val_set={}, val_batches=0,
        val_every=80, ckpt_every=72, keep_every=72,
    )  # fmt: skip
    assert {key: pretraining[key] for key in shape | long} == shape | long
    assert {key: fine_tuning[key] for key in shape | short} == shape | short


@functools.cache
def help_of(*target: str) -> str:
    """What `python TARGET --help` prints; it must not have imported anything heavy to print it."""
    how = f"run_module({target[1]!r}" if target[0] == "-m" else f"run_path({target[0]!r}"
    program = (
        "import runpy, sys\n"
        f"sys.argv = [{target[-1]!r}, '--help']\n"
        f"try: runpy.{how}, run_name='__main__')\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "heavy = {'jax', 'haiku', 'tensorflow', 'torch', 'transformers', 'wandb', 'ray'} & set(sys.modules)\n"
        "assert not heavy, f'--help imports {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1000:]
    assert "usage:" in done.stdout
    return done.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_help_needs_nothing_heavy(path):
    assert help_of(str(path.relative_to(ROOT)))


def commands(page: Path) -> list[list[str]]:
    """Command lines of a page's sh blocks, split into words; continued lines joined, comments dropped."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def is_known(words: list[str]) -> str:
    """'' where the command exists with all its flags, else what is wrong with it."""
    while "=" in words[0] and not words[0].startswith("-"):  # VARIABLE=value in front
        words = words[1:]
    program, *arguments = words
    if program == "make":
        targets = [word for word in arguments if "=" not in word]
        done = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stderr if done.returncode else ""
    if "python" not in Path(program).name or not arguments:
        return ""
    if arguments[0] == "-m":
        if not arguments[1].startswith("mesh_transformer"):
            return ""
        target, rest = ["-m", arguments[1]], arguments[2:]
    else:
        target, rest = [arguments[0]], arguments[1:]
        if not (ROOT / target[0]).exists():
            return f"no script {target[0]}"
    said = help_of(*target)
    flags = [word.split("=")[0] for word in rest if word.startswith("--")]
    return "".join(f"no flag {flag} in {target}" for flag in flags if not re.search(rf"{flag}(?![\w-])", said))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_documented_commands_exist(page):
    for words in commands(page):
        assert not (wrong := is_known(words)), f"{page.name}: {shlex.join(words)}: {wrong}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page}: {link} does not exist"


def test_readme_lists_every_script_and_docs_every_page():
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("## Scripts")[1].split("## ")[0]
    assert set(re.findall(r"`([\w/]+\.py)`", table)) == {str(path.relative_to(ROOT)) for path in SCRIPTS}
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - set(re.findall(r"\]\((\S+)\)", index)) == {
        "README.md"
    }


def test_faithfulness_names_tests_that_exist():
    page = (ROOT / "docs/faithfulness.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/\w+\.py)(?:::(\w+))?`", page)
    assert named
    for file, test in named:
        assert (ROOT / file).exists(), file
        assert not test or f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{test}"


def test_ci_runs_the_documented_test_command():
    ci = ROOT / ".ci/run"
    assert os.access(ci, os.X_OK)
    lines = ci.read_text(encoding="utf-8").splitlines()
    assert "make lint" in lines and "make test" in lines
    assert ["make", "test"] in commands(ROOT / "README.md") and ["make", "quickstart"] in commands(ROOT / "README.md")


def test_requirement_ends_agree():
    """requirements-lowest.txt holds exactly the lower end of every range in requirements.txt."""
    lower = dict(re.findall(r"^([\w.-]+)>=([\d.]+)", (ROOT / "requirements.txt").read_text(), flags=re.MULTILINE))
    exact = dict(
        re.findall(r"^([\w.-]+)==([\d.]+)", (ROOT / "requirements-lowest.txt").read_text(), flags=re.MULTILINE)
    )
    for name, version in lower.items():
        assert (exact[name] + ".").startswith(version + "."), f"{name}: {version} against {exact[name]}"
