from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgevit.errors import RecipeError
from edgevit.recipe import SECTIONS, load_recipe

SMALLEST = """\
[model]
name = "vit_small_patch16_224"

[data]
train = "images/train"
val = "images/val"
"""


def write(folder: Path, text: str, name: str = "recipe.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str, *overrides: str) -> str:
    """The message for a recipe that can't be meant."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(folder, text), overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def line_of(text: str, start: str) -> int:
    return 1 + next(i for i, line in enumerate(text.splitlines()) if line.startswith(start))


def test_the_smallest_recipe_has_the_defaults(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, SMALLEST))
    assert recipe.model.name == "vit_small_patch16_224"
    assert (recipe.model.image_size, recipe.model.patch_size) == (192, 16)
    assert recipe.model.checkpoint == ""
    assert recipe.exits.blocks == (6, 9)
    assert recipe.quantize.mode == "static"
    assert recipe.data.skip_corrupt is False


def test_every_key_can_be_given(tmp_path: Path) -> None:
    text = SMALLEST + (
        "crop = 'squash'\nskip_corrupt = true\n[train]\nmode='heads'\nfolds = 3\nseed = 7\n"
        "[prune]\nmode = 'none'\n[quantize]\nmode = 'none'\ncalibration_images = 9\ncalibrator = 'entropy'\n"
        "[exits]\nblocks = [2, 5, 8]\nmax_lost = 0.01\n"
        "[target]\nengine = 'openvino'\nthreads = 2\ncheck_images = 0\n[budget]\nmax_drop_points = 2\n"
    )
    recipe = load_recipe(write(tmp_path, text))
    assert recipe.data.crop == "squash"
    assert recipe.data.skip_corrupt is True
    assert dataclasses.astuple(recipe.train) == ("heads", 3, 7)
    assert dataclasses.astuple(recipe.quantize) == ("none", 9, "entropy")
    assert recipe.exits.blocks == (2, 5, 8)
    assert dataclasses.astuple(recipe.target) == ("openvino", 2, 0)
    assert recipe.budget.max_drop_points == 2.0
    assert isinstance(recipe.budget.max_drop_points, float)


def test_defaults_pass_their_own_checks() -> None:
    for name, section in SECTIONS.items():
        for field in dataclasses.fields(section):
            required = (name, field.name) in {("model", "name"), ("data", "train"), ("data", "val")}
            check = field.metadata["check"]
            assert required or check is None or check(field.default), f"{name}.{field.name}"
            assert field.metadata["doc"], f"{name}.{field.name}"
            assert check is None or field.metadata["allowed"], f"{name}.{field.name}"


def test_the_shipped_recipes_can_be_read() -> None:
    models = Path(__file__).resolve().parents[1] / "models"
    paths = sorted(models.glob("*.toml"))
    assert paths
    for path in paths:
        recipe = load_recipe(path)
        for given_path in (recipe.model.checkpoint, recipe.data.train, recipe.data.val):
            assert Path(given_path).exists(), f"{path}: {given_path}"


def test_paths_are_relative_to_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    text = SMALLEST.replace("[data]", 'checkpoint = "../w.safetensors"\n[data]').replace(
        '"images/val"', '"/abs/val"'
    )
    write(tmp_path / "recipes", text)
    recipe = load_recipe(Path("../recipes/recipe.toml"))
    assert recipe.data.train == str(tmp_path / "recipes/images/train")
    assert recipe.data.val == "/abs/val"
    assert recipe.model.checkpoint == str(tmp_path / "w.safetensors")


def test_paths_in_overrides_are_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    recipe = load_recipe(write(tmp_path, SMALLEST), ["data.train=my/train", 'data.val="my val"'])
    assert recipe.data.train == str(tmp_path / "here/my/train")
    assert recipe.data.val == str(tmp_path / "here/my val")


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    recipe = load_recipe(write(tmp_path, SMALLEST.replace("images/train", "~/train")))
    assert recipe.data.train == "/home/somebody/train"


def test_overrides(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(tmp_path, SMALLEST + "[exits]\nblocks = [3]\n"),
        [
            "exits.blocks=[4, 8]",
            "quantize.mode=none",
            "train.seed = 5",
            "train.seed=6",
            "data.skip_corrupt=true",
            "budget.max_drop_points=3",
            "model.name='vit_tiny_patch16_224'",
        ],
    )
    assert recipe.exits.blocks == (4, 8)
    assert recipe.quantize.mode == "none"
    assert recipe.train.seed == 6
    assert recipe.data.skip_corrupt is True
    assert recipe.budget.max_drop_points == 3.0
    assert recipe.model.name == "vit_tiny_patch16_224"


def test_an_override_can_give_what_the_file_lacks(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(tmp_path, "[data]\ntrain='a'\nval='b'\n"), ["model.name=vit_tiny_patch16_224"]
    )
    assert recipe.model.name == "vit_tiny_patch16_224"


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("seed=3", "section.key=value"),
        ("train.seed", "section.key=value"),
        ("", "section.key=value"),
        ("train.sead=3", "did you mean 'seed'"),
        ("trian.seed=3", "did you mean 'train'"),
        ("train.seed=many", "must be a whole number"),
        ("train.seed=1.0", "must be a whole number"),
        ("train.seed=true", "must be a whole number"),
        ("train.seed=", "must be a whole number"),
        ("train.seed=-1", "0 or more"),
        ("train.seed=1\ntrain.folds=2", "must be a whole number"),
        ("data.skip_corrupt=yes", "must be true or false"),
        ("exits.blocks=6", "must be a list of whole numbers"),
        ("data.train=", "is not allowed"),
    ],
)
def test_bad_overrides_are_quoted(tmp_path: Path, override: str, part: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, SMALLEST), [override])
    assert part in str(caught.value)
    assert f"--set {override}" in str(caught.value)


MISSPELT = [
    ("image_sise = 192", "model", "did you mean 'image_size'"),
    ("seeds = 3", "train", "did you mean 'seed'"),
    ('engin = "auto"', "target", "did you mean 'engine'"),
    ("zzz = 3", "exits", "Allowed: blocks, max_lost"),
]


@pytest.mark.parametrize(("line", "section", "part"), MISSPELT)
def test_a_misspelt_key_is_named_with_its_line(
    tmp_path: Path, line: str, section: str, part: str
) -> None:
    text = SMALLEST + "".join(f"\n[{name}]\n" for name in SECTIONS if f"[{name}]" not in SMALLEST)
    text = text.replace(f"[{section}]\n", f"[{section}]\n# a comment\n{line}\n")
    message = refusal(tmp_path, text)
    assert f"recipe.toml, line {line_of(text, line)}: unknown key '{line.split()[0]}'" in message
    assert part in message


def test_a_misspelt_section_is_named_with_its_line(tmp_path: Path) -> None:
    message = refusal(tmp_path, SMALLEST + "\n[quantise]\nmode = 'none'\n")
    assert "line 8: unknown section 'quantise'; did you mean 'quantize'" in message


def test_a_key_in_the_wrong_section_is_found_on_its_own_line(tmp_path: Path) -> None:
    """``train`` is a key of [data] and a section too."""
    text = SMALLEST + "\n[train]\nfolds = 1\n"
    assert "line 9: train.folds = 1 is not allowed; use 2 to 20" in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('model.name = "m"\nmodel.patch = 3\n', 2),
        ('model = {name = "m", patch = 3}\n', 1),
        ('[ "model" ]\nname = "m"\n"patch" = 3\n', 3),
        ('[model]\nname = "m"\n[model.patch]\nx = 1\n', 3),
        ("model = 3\n", 1),
    ],
)
def test_other_ways_to_write_a_key_have_lines_too(tmp_path: Path, text: str, line: int) -> None:
    assert f"recipe.toml, line {line}: " in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("model.image_size", '"192"', "a whole number"),
        ("model.image_size", "192.0", "a whole number"),
        ("model.image_size", "true", "a whole number"),
        ("model.image_size", "[192]", "a whole number"),
        ("model.image_size", "16", "32 to 1024"),
        ("model.patch_size", "0", "4 to 64"),
        ("model.name", "3", "a string"),
        ("model.name", '""', "name of a timm"),
        ("data.crop", '"middle"', '"center" or "squash"'),
        ("data.skip_corrupt", "1", "true or false"),
        ("data.skip_corrupt", '"true"', "true or false"),
        ("exits.blocks", '"6"', "a list of whole numbers"),
        ("exits.blocks", "[6, 9.0]", "a list of whole numbers"),
        ("exits.blocks", "[true]", "a list of whole numbers"),
        ("exits.blocks", "[9, 6]", "rising"),
        ("exits.blocks", "[6, 6]", "rising"),
        ("exits.blocks", "[0]", "at least 1"),
        ("exits.max_lost", "nan", "0 to 1"),
        ("exits.max_lost", "-inf", "0 to 1"),
        ("exits.max_lost", "true", "a number"),
        ("exits.max_lost", "2", "0 to 1"),
        ("target.engine", '"tensorflow"', "auto"),
        ("target.threads", "-1", "0 to 256"),
        ("budget.max_drop_points", "1000", "0 to 100"),
        ("budget.max_drop_points", "2024-01-01", "a number"),
    ],
)
def test_wrong_types_and_values_are_named(tmp_path: Path, key: str, value: str, part: str) -> None:
    section, name = key.split(".")
    lines = [
        line
        for line in SMALLEST.splitlines()
        if not (section == "model" and line.startswith(f"{name} ="))
    ]
    if f"[{section}]" not in lines:
        lines.append(f"[{section}]")
    lines.insert(lines.index(f"[{section}]") + 1, f"{name} = {value}")
    text = "\n".join(lines)
    message = refusal(tmp_path, text)
    assert f"line {line_of(text, f'{name} = {value}')}: {key}" in message
    assert part in message


@pytest.mark.parametrize(
    ("removed", "named"),
    [
        ('name = "vit_small_patch16_224"\n', "model.name is missing; add it below [model]"),
        ('[model]\nname = "vit_small_patch16_224"\n', "model.name is missing"),
        ('train = "images/train"\n', "data.train is missing; add it below [data]"),
        ('val = "images/val"\n', "data.val is missing"),
        (SMALLEST, "model.name is missing"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, removed: str, named: str) -> None:
    assert named in refusal(tmp_path, SMALLEST.replace(removed, ""))


def test_patches_must_fill_the_image(tmp_path: Path) -> None:
    text = SMALLEST.replace("[data]", "image_size = 200\n[data]")
    message = refusal(tmp_path, text)
    assert f"line {line_of(text, 'image_size')}" in message
    assert "multiple of model.patch_size 16" in message


@pytest.mark.parametrize(
    "text",
    ["[model", "name = ", "[model]\nname = 'a'\nname = 'b'\n", "x = " + "[" * 5000, "\0"],
)
def test_what_is_no_toml_is_refused(tmp_path: Path, text: str) -> None:
    assert "recipe.toml is not valid TOML" in refusal(tmp_path, text)


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    for name, part in (("gone.toml", "No such file"), ("", "directory"), ("latin.toml", "UTF-8")):
        with pytest.raises(RecipeError, match=part):
            load_recipe(tmp_path / name)


def test_an_unknown_user_is_refused(tmp_path: Path) -> None:
    text = SMALLEST.replace("images/train", "~no-such-user-here/train")
    assert "data.train" in refusal(tmp_path, text)


@given(st.text(max_size=60))
def test_no_text_gives_anything_but_a_recipe_error(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.mktemp("any") / "recipe.toml"
    path.write_text(text, encoding="utf-8", errors="replace")
    with pytest.raises(RecipeError):
        load_recipe(path)


def test_json_holds_every_section_and_no_path_of_the_recipe(tmp_path: Path) -> None:
    value = load_recipe(write(tmp_path, SMALLEST)).to_json()
    assert set(value) == set(SECTIONS)
    for name, section in SECTIONS.items():
        assert set(value[name]) == set(typing.get_type_hints(section))


def test_the_mark_that_windows_editors_write_first_is_read_over(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('[model]\nname = "x"\n[data]\ntrain = "a"\nval = "b"\n', encoding="utf-8-sig")
    assert load_recipe(path).model.name == "x"
