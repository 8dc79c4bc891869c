"""A law is worth as much as what it refutes: every law is shown to hold for the real thing and to fail for a mutant."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def refute(law: Callable[..., None], real: Any, mutant: Any, examples: Iterable[tuple[Any, ...]]) -> None:
    """Fail unless `law(mutant, *example)` fails for one of the examples, where `law(real, *example)` holds.

    Only an AssertionError refutes: a mutant that crashes would be caught without the law.
    """
    for example in examples:
        law(real, *example)
        try:
            law(mutant, *example)
        except AssertionError:
            return
    raise AssertionError(f"{law.__name__} does not notice {getattr(mutant, '__name__', mutant)}")
