"""The generated parts of the documentation site cover the code, and each page is in a table of contents."""

import dataclasses
import re
import typing

import pytest

from docs._ext import configuration, results
from docs._ext.generated import MARK
from tests.pages_helpers import PAGES, ROOT, fenced
from zaya_jax.config import Config, flatten_keys, load_config, to_dict
from zaya_jax.config.reference import sections

KEYS = [key for section in sections() for key in section.keys]
GENERATED = {page: MARK.findall(text) for page, text in PAGES.items()}


def fields(cls: type) -> typing.Iterator[tuple[str, str]]:
    """Yield the class and name of each field that is not a section, of a dataclass and those inside it."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        inner = [
            part for part in (hints[field.name], *typing.get_args(hints[field.name])) if dataclasses.is_dataclass(part)
        ]
        if inner != [hints[field.name]]:
            yield cls.__name__, field.name
        for part in inner:
            yield from fields(part)


def test_every_key_is_documented_once():
    names = [key.name for key in KEYS]
    assert len(names) == len(set(names)) == len(set(fields(Config)))
    leaves = dict(flatten_keys(to_dict(load_config(ROOT / "configs" / "tiny.yaml"))))
    optional = {name.rpartition(".")[0] for name in names}
    for leaf in leaves:
        role = re.sub(r"^optimizer\.roles\.\w+", "optimizer.roles.attention", leaf)
        assert role in names or role in optional, leaf


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_a_key_has_a_meaning_a_default_and_an_accepted_example(key):
    assert len(key.meaning) > 10
    assert key.kind
    assert key.default
    example = configuration.example(key)
    assert re.search(rf"\b{key.name.rpartition('.')[2]}\b", example)


def test_every_result_is_on_a_page():
    shown = [
        path
        for page in GENERATED.values()
        for kind, group in page
        if kind == "results"
        for path in results.files(group)
    ]
    assert sorted(shown) == sorted((ROOT / "benchmarks").rglob("*.json"))
    for group in results.GROUPS:
        text = results.results(group)
        assert all(f"## `{path.relative_to(results.BENCHMARKS)}`" in text for path in results.files(group))


def test_figures_of_results_are_shown():
    text = "".join(results.results(group) for group in results.GROUPS)
    figures = [path for path in (ROOT / "benchmarks").rglob("*.png") if path.with_suffix(".json").exists()]
    assert figures
    assert all(f"(../{path.relative_to(ROOT)})" in text for path in figures)


def test_every_package_with_a_public_api_is_in_the_reference():
    documented = {package for page in GENERATED.values() for kind, package in page if kind == "api"}
    commands = {"aegis", "lab", "machine", "report"}  # used from the command line
    rooms = {path.parent.name for path in (ROOT / "zaya_jax").glob("*/__init__.py")} - commands
    packages = {f"zaya_jax.{room}" for room in rooms} | {"zaya_jax.aegis.report", "zaya_jax.errors", "pallas_kernels"}
    assert documented == packages, f"Add a page to docs/api/ for each of these: {packages - documented}."


def test_every_page_is_in_a_table_of_contents():
    listed = set()
    for page, text in PAGES.items():
        for language, block in fenced(text):
            if language == "{toctree}":
                for line in block.splitlines():
                    name = re.sub(r".*<(.*)>", r"\1", line)
                    listed.add(((ROOT / page).parent / f"{name}.md").resolve())
    missing = {page for page in PAGES if (ROOT / page).resolve() not in listed}
    assert missing == {"docs/index.md"}, "Add these pages to a table of contents in docs/index.md."
