"""Every error that edgevit raises on purpose.

    EdgevitError                 exit status 1
    ├── UserError                exit status 2: the user can mend it, and the message says how
    │   ├── RecipeError          a recipe that can't be meant
    │   ├── DataError            an image, a folder or a video that can't be used
    │   ├── ModelError           a checkpoint or a backbone that can't be used
    │   ├── BundleError          a bundle that is damaged, altered or from another version
    │   └── EngineUnavailableError   an engine that this machine lacks
    ├── ParityError              a converted graph that does not compute what the model computes
    └── BudgetExceededError           exit status 3: the bundle loses more accuracy than the recipe allows

A message names the thing that is wrong (file, key, line, tensor) and then what to do about it.
"""

from __future__ import annotations


class EdgevitError(Exception):
    """Base of all; ``exit_status`` is what the command line ends with."""

    exit_status = 1


class UserError(EdgevitError):
    exit_status = 2


class RecipeError(UserError):
    pass


class DataError(UserError):
    pass


class ModelError(UserError):
    pass


class BundleError(UserError):
    pass


class EngineUnavailableError(UserError):
    pass


class ParityError(EdgevitError):
    pass


class BudgetExceededError(EdgevitError):
    exit_status = 3
