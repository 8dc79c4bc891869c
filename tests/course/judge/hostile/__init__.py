"""Submissions that cheat for points, or try to do harm, by kind and name."""

from __future__ import annotations

from tests.course.judge.hostile import answers, endings, reaching, resources, verdict

BY_KIND: dict[str, dict[str, str]] = {
    kind: group
    for theme in (verdict, answers, endings, resources, reaching)
    for kind, group in theme.SUBMISSIONS.items()
}
HOSTILE = {name: source for group in BY_KIND.values() for name, source in group.items()}
KIND_OF = {name: kind for kind, group in BY_KIND.items() for name in group}
