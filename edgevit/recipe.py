"""The recipe: a TOML file that says what to make, read into frozen dataclasses.

Every key has a type and a check; an unknown key, a wrong type or an impossible value raises
:class:`~edgevit.errors.RecipeError` with the key, its line and what is allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import sys
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple, Union

from edgevit.errors import RecipeError

Check = Callable[[Any], bool]


def _key(
    default: Any,
    doc: str,
    allowed: str = "",
    check: Optional[Check] = None,
    path: bool = False,
) -> Any:
    """A recipe key: its default, what it means, and which values it takes, in words and as a test."""
    metadata = {"doc": doc, "allowed": allowed, "check": check, "path": path}
    return field(default=default, metadata=metadata)


def _one_of(default: str, doc: str, *choices: str) -> Any:
    return _key(default, doc, " or ".join(f'"{c}"' for c in choices), lambda v: v in choices)


@dataclass(frozen=True)
class Model:
    """Which backbone, from which weights, at which size."""

    name: str = _key("", "timm model name", "the name of a timm VisionTransformer", bool)
    checkpoint: str = _key(
        "",
        "weights file (.safetensors, .pt or .pth), relative to the recipe; empty: timm downloads its own",
        path=True,
    )
    image_size: int = _key(
        192, "side of the square input, pixels", "32 to 1024", lambda v: 32 <= v <= 1024
    )
    patch_size: int = _key(16, "side of a patch, pixels", "4 to 64", lambda v: 4 <= v <= 64)


@dataclass(frozen=True)
class Data:
    """The labelled photographs: one folder a class in each of the two folders."""

    train: str = _key(
        "", "folder of training images, relative to the recipe", "a folder", bool, True
    )
    val: str = _key(
        "", "folder of validation images, which nothing is fitted on", "a folder", bool, True
    )
    crop: str = _one_of("center", "how a photograph becomes a square", "center", "squash")
    skip_corrupt: bool = _key(False, "leave out images that can't be read, and say how many")


@dataclass(frozen=True)
class Train:
    """How the exit heads learn. The backbone is frozen; heads are fitted on cached features."""

    mode: str = _one_of("heads", "what is trained", "heads")
    folds: int = _key(
        5,
        "cross-fitting folds: each training image gets a prediction by heads that never saw it",
        "2 to 20",
        lambda v: 2 <= v <= 20,
    )
    seed: int = _key(0, "seed of every random choice", "0 or more", lambda v: v >= 0)


@dataclass(frozen=True)
class Prune:
    """What is removed from the backbone."""

    mode: str = _one_of("none", "what is pruned", "none")


@dataclass(frozen=True)
class Quantize:
    """How the graphs become INT8."""

    mode: str = _one_of("static", "post-training quantization", "static", "none")
    calibration_images: int = _key(
        128,
        "training images whose activations give the ranges, spread evenly over the classes",
        "1 to 100000",
        lambda v: 1 <= v <= 100_000,
    )
    calibrator: str = _one_of(
        "auto",
        "how a range follows from the values; auto: the one whose INT8 agrees best with the float model",
        "auto",
        "min-max",
        "percentile-99.999",
        "percentile-99.99",
        "percentile-99.9",
        "entropy",
        "mse",
    )


@dataclass(frozen=True)
class Exits:
    """Where a frame may leave early."""

    blocks: Tuple[int, ...] = _key(
        (6, 9),
        "early exits sit after these blocks, counted from 1; the final head is not named",
        "rising whole numbers of at least 1",
        lambda v: all(b >= 1 for b in v) and list(v) == sorted(set(v)),
    )
    max_lost: float = _key(
        0.0025,
        "largest share of held-out training images that exits may turn from right to wrong",
        "0 to 1",
        lambda v: 0 <= v <= 1,
    )


@dataclass(frozen=True)
class Target:
    """Where the bundle will run."""

    engine: str = _one_of(
        "auto", "engine that evaluates the bundle here", "auto", "openvino", "onnxruntime"
    )
    threads: int = _key(0, "CPU threads; 0: all cores", "0 to 256", lambda v: 0 <= v <= 256)
    check_images: int = _key(
        64,
        "validation images stored in the bundle, for benchmarks and self-tests on the device",
        "0 to 1000",
        lambda v: 0 <= v <= 1000,
    )


@dataclass(frozen=True)
class Budget:
    """What may be lost."""

    max_drop_points: float = _key(
        1.0,
        "largest loss of top-1 against the float model, in percentage points, on the val folder",
        "0 to 100",
        lambda v: 0 <= v <= 100,
    )


@dataclass(frozen=True)
class Recipe:
    """What to make. ``source`` is the file it was read from."""

    model: Model
    data: Data
    train: Train = Train()
    prune: Prune = Prune()
    quantize: Quantize = Quantize()
    exits: Exits = Exits()
    target: Target = Target()
    budget: Budget = Budget()
    source: str = field(default="", compare=False)

    def to_json(self) -> Dict[str, Any]:
        value = dataclasses.asdict(self)
        del value["source"]
        return value


SECTIONS: Dict[str, type] = {
    "model": Model,
    "data": Data,
    "train": Train,
    "prune": Prune,
    "quantize": Quantize,
    "exits": Exits,
    "target": Target,
    "budget": Budget,
}


def load_recipe(path: Union[str, Path], overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe file, then apply overrides of the form ``section.key=value``.

    Paths in the file are relative to the file; paths in an override are relative to the working
    directory. Raises :class:`RecipeError` for anything that can't be meant.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows put a mark first
    except OSError as error:
        raise RecipeError(
            f"can't read the recipe {path}: {error.strerror}; give the path of a .toml file"
        ) from None
    except UnicodeDecodeError:
        raise RecipeError(f"{path} is not UTF-8 text; give the path of a .toml file") from None
    tables = _parse_toml(text, str(path))
    origin = _Origin(path, text)
    base = path.resolve().parent
    values: Dict[str, Dict[str, Any]] = {}
    for section, table in tables.items():
        if section not in SECTIONS:
            raise RecipeError(f"{origin.of(section)}: {_unknown(section, SECTIONS, 'section')}")
        if not isinstance(table, dict):
            raise RecipeError(f"{origin.of(section)}: write [{section}] as a section of its own")
        values[section] = {}
        for key, value in table.items():
            where = origin.of(section, key)
            values[section][key] = _checked(section, key, value, where, base)
    for override in overrides:
        section, key, value = _parse_override(override)
        values.setdefault(section, {})[key] = _checked(
            section, key, value, f"--set {override}", Path.cwd()
        )
    for section, key in (("model", "name"), ("data", "train"), ("data", "val")):
        if key not in values.get(section, {}):
            raise RecipeError(f"{path}: {section}.{key} is missing; add it below [{section}]")
    sections = {name: cls(**values.get(name, {})) for name, cls in SECTIONS.items()}
    recipe = Recipe(source=str(path), **sections)
    if recipe.model.image_size % recipe.model.patch_size:
        raise RecipeError(
            f"{origin.of('model', 'image_size')}: model.image_size {recipe.model.image_size} is not "
            f"a multiple of model.patch_size {recipe.model.patch_size}; change one of them"
        )
    return recipe


def _parse_toml(text: str, name: str) -> Dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError:  # a device, which reads bundles and no recipes
            raise RecipeError(
                f"can't read {name}: before Python 3.11 that needs 'tomli'; "
                "pip install 'edgevit[workstation]'"
            ) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{name} is not valid TOML: {error}") from None
    except RecursionError:
        raise RecipeError(f"{name} is not valid TOML: nested too deeply") from None


def _parse_override(override: str) -> Tuple[str, str, Any]:
    match = re.fullmatch(r"\s*(\w+)\.(\w+)\s*=\s*(.*)", override, re.DOTALL)
    if not match:
        raise RecipeError(f"--set {override}: write it as section.key=value")
    section, key, raw = match.groups()
    if section not in SECTIONS:
        raise RecipeError(f"--set {override}: {_unknown(section, SECTIONS, 'section')}")
    try:
        table = _parse_toml(f"value = {raw}", "")
    except RecipeError:
        return section, key, raw  # a bare word: the shell has eaten the quotes
    return section, key, table["value"] if len(table) == 1 else raw


def _unknown(name: str, known: Iterable[str], kind: str) -> str:
    close = difflib.get_close_matches(name, list(known), 1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    return f"unknown {kind} '{name}'{hint} Allowed: {', '.join(known)}"


def _checked(section: str, key: str, value: Any, where: str, base: Path) -> Any:
    """``value`` as the dataclass holds it, or a RecipeError that starts with ``where``."""
    cls = SECTIONS[section]
    fields = {f.name: f for f in dataclasses.fields(cls)}
    if key not in fields:
        raise RecipeError(f"{where}: {_unknown(key, fields, 'key')}")
    kind = typing.get_type_hints(cls)[key]
    metadata = fields[key].metadata
    dotted = f"{section}.{key}"
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind == Tuple[int, ...]:
        right = isinstance(value, list) and all(type(v) is int for v in value)
        value, name = (tuple(value), "") if right else (value, "a list of whole numbers")
    else:
        right = type(value) is kind
        name = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}[
            kind
        ]
    if not right:
        raise RecipeError(f"{where}: {dotted} must be {name}, not {value!r}")
    if metadata["check"] is not None and not metadata["check"](value):
        raise RecipeError(
            f"{where}: {dotted} = {value!r} is not allowed; use {metadata['allowed']}"
        )
    if metadata["path"] and value:
        try:
            value = str((base / Path(value).expanduser()).resolve())
        except (RuntimeError, ValueError) as error:  # ~nobody; a zero byte
            raise RecipeError(f"{where}: {dotted} = {value!r} is no path: {error}") from None
    return value


@dataclass(frozen=True)
class _Origin:
    """Finds the line of a section or key, for messages: TOML readers do not keep it."""

    path: Path
    text: str

    def of(self, section: str, key: str = "") -> str:
        """Where ``section.key`` is written, or else its section, or else the file alone."""
        wanted = [section, key] if key else [section]
        table: List[str] = []
        best_number, best_depth = 0, 0
        for number, line in enumerate(self.text.splitlines(), 1):
            header = re.match(r"\s*\[+([^\]=]+)\]", line)
            assigned = re.match(r"([^=#\[]+)=", line)
            if header:
                name = table = _parts(header.group(1))
            elif assigned:
                name = table + _parts(assigned.group(1))
            else:
                continue
            depth = min(len(name), len(wanted))
            if depth > best_depth and name[:depth] == wanted[:depth]:
                best_number, best_depth = number, depth
        return f"{self.path}, line {best_number}" if best_number else str(self.path)


def _parts(dotted: str) -> List[str]:
    return [part.strip(" \t\"'") for part in dotted.split(".")]
