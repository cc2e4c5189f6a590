"""The arrows between the parts: read from the imports of every file, those inside functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the bottom to the top: a part imports parts of lower lines alone. A new part needs a place here.
LINES = (
    ("errors", "stage", "byte_vocabulary", "cache_element", "config_choices", "data_flow"),
    ("layer_numbers", "layout", "tensor_slice", "npuw_profile", "byte_tokenizer", "whole_number"),
    ("mask_use", "model_rules", "onnx_attention", "config_values", "token_mixing"),
    ("finite_rows", "config_options", "look_ups", "onnx_refusals", "reference", "trace"),
    ("config", "kv_manager", "model_digest", "model_file", "model_spec", "probe_model", "trace_reader"),
    ("cache_plan", "npuw_config"),
    ("memory", "npuw_keys", "static_graph"),
    ("graphs", "sanitizer", "step_inputs"),
    ("step_recorder",),
    ("infer_request",),
    ("request", "npuw"),
    ("compiled_llm", "npuw_probe"),
    ("export",),
    ("speculative",),
    ("check", "native", "onnxruntime_backend", "replay"),
    ("compare", "parity"),
    ("",),  # the package itself: what users import
    ("bench",),
    ("cli",),
    ("__main__",),
)
LINE_OF = {part: line for line, parts in enumerate(LINES) for part in parts}


def modules(*packages: str) -> dict[str, Path]:
    """Every module of the packages by its dotted name; that of a package is its directory's."""
    found = {}
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


ALL = modules("npusim", "transforms")


def imports(path: Path) -> set[str]:
    """Modules that a file imports at run time, relative imports apart (there are none, see below)."""
    return {name for node in _imports_in(ast.parse(path.read_text())) for name in _names(node)}


def _imports_in(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        yield from _imports_in(child)


def _names(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.level == 0, "relative import"
    members = [f"{node.module}.{alias.name}" for alias in node.names]
    submodules = [member for member in members if member in ALL]
    return submodules if len(submodules) == len(members) else [str(node.module), *submodules]


def top(module: str) -> str:
    return module.split(".")[0]


def part_of(module: str) -> str:
    """The part of npusim that a module is in: "layout" of npusim.layout.frames, "" of npusim."""
    return [*module.split("."), ""][1]


def test_the_walk_sees_what_there_is() -> None:
    assert {"npusim", "npusim.request", "npusim.layout.frames", "npusim.cli.main", "transforms.masks"} <= set(
        ALL
    )
    assert {"npusim.kv_manager", "npusim.static_graph", "numpy"} <= imports(ALL["npusim.request"])
    assert "npusim.compiled_llm" not in imports(ALL["npusim.request"])  # for type checkers alone
    assert "npusim.cli.run" in imports(ALL["npusim.cli.main"])  # from npusim.cli import run


@pytest.mark.parametrize("module", modules("transforms"))
def test_transforms_know_nothing_of_npusim(module: str) -> None:
    assert "npusim" not in {top(name) for name in imports(ALL[module])}


@pytest.mark.parametrize("module", modules("npusim/layout"))
def test_layouts_are_integers(module: str) -> None:
    """Neither arrays nor graphs: of third parties nothing at all."""
    inside = {name for name in imports(ALL[module]) if top(name) in ("npusim", "transforms")}
    outside = {top(name) for name in imports(ALL[module]) - inside}
    assert {part_of(name) for name in inside} <= {"layout", "errors"}
    assert outside <= {"__future__", "abc", "collections", "dataclasses", "enum", "typing"}


@pytest.mark.parametrize("module", modules("npusim/reference"))
def test_the_reference_shares_nothing_with_what_it_judges(module: str) -> None:
    names = imports(ALL[module])
    assert {part_of(name) for name in names if top(name) == "npusim"} <= {"reference", "errors"}
    assert not {top(name) for name in names} & {"transforms", "openvino"}


@pytest.mark.parametrize("helper", ["oracles.py", "slot_log.py", "tiny_model.py"])
def test_oracles_share_nothing_with_what_they_judge(helper: str) -> None:
    """Neither with the packages nor with another helper of the tests."""
    helpers = {path.stem for path in (ROOT / "tests").glob("*.py")}
    names = {top(name) for name in imports(ROOT / "tests" / helper)}
    assert not names & {"npusim", "transforms", "openvino", "onnxruntime", *helpers}


@pytest.mark.parametrize("module", modules("npusim/speculative"))
def test_the_harness_works_on_any_request(module: str) -> None:
    """It knows the interface and the records of calls, and not the simulator behind them."""
    inside = {part_of(name) for name in imports(ALL[module]) if top(name) in ("npusim", "transforms")}
    assert inside <= {"speculative", "errors", "trace", "whole_number"}


@pytest.mark.parametrize("module", modules("npusim"))
def test_no_arrow_runs_back(module: str) -> None:
    assert part_of(module) in LINE_OF, f"{module}: give its part a line in LINES"
    own = LINE_OF[part_of(module)]
    back = {
        name
        for name in imports(ALL[module])
        if top(name) == "npusim" and part_of(name) != part_of(module) and LINE_OF[part_of(name)] >= own
    }
    assert not back, f"{module} imports {sorted(back)}, which lie on its line or above"


def test_modules_import_in_no_circle() -> None:
    """Inside a part as well, packages apart: a package imports its modules by definition."""
    known = {name: imports(path) & set(ALL) for name, path in ALL.items() if path.stem != "__init__"}
    while leaves := [name for name, needed in known.items() if not needed & set(known)]:
        for name in leaves:
            del known[name]
    assert not known, f"imports in a circle: {sorted(known)}"


def test_lines_name_no_part_that_is_gone() -> None:
    assert set(LINE_OF) == {part_of(module) for module in modules("npusim")}
