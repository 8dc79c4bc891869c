"""Messages of compiled programs are counted, also in loops, branches and collectives, and from a device to itself."""

from __future__ import annotations

import pytest

from ringlab_course.mesh.compiled import UnknownForm, traffic

RING = "source_target_pairs={{0,1},{1,2},{2,0}}"


def permute(name: str, shape: str = "f32[1,2,4,8]{3,2,1,0}", pairs: str = RING) -> str:
    return f'  %{name} = {shape} collective-permute(%x), channel_id=1, {pairs}, metadata={{op_name="a"}}'


def program(*entry: str, **others: str) -> str:
    named = [f"%{name} (p: f32[1]) -> f32[1] {{\n{body}\n}}" for name, body in others.items()]
    return "\n\n".join(["HloModule jit_f", *named, "ENTRY %main.1 (a: f32[1]) -> f32[1] {", *entry, "}"])


def loop(body: str, turns: int | None, condition: str = "c") -> str:
    known = f', backend_config={{"known_trip_count":{{"n":"{turns}"}}}}' if turns is not None else ""
    return f"  %w = (s32[], f32[1]) while(%t), condition=%{condition}, body=%{body}{known}"


def test_a_message_in_a_branch_is_found_also_below_a_loop():
    fork = "  %c = f32[1] conditional(%i, %x, %x), branch_computations={%one, %two}"
    assert traffic(program(fork, one="  %n = f32[1] negate(%p)", two=permute("a"))).in_branch
    assert traffic(program(fork, one="", two=loop("body", 2), body=permute("a"))).in_branch
    assert not traffic(program(fork, permute("b"), one="", two="")).in_branch
    old = "  %c = f32[1] conditional(%i, %x, %x), true_computation=%one, false_computation=%two"
    assert traffic(program(old, one="", two=permute("a"))).in_branch


def test_a_loop_of_unknown_length_matters_only_with_a_message():
    assert traffic(program(loop("body", None), body=permute("a"))).turns_unknown
    assert not traffic(
        program(loop("body", None), permute("b"), body="  %n = f32[1] negate(%p)")
    ).turns_unknown


@pytest.mark.parametrize(
    "text",
    [
        "",
        program(permute("a")).replace("ENTRY %main.1", "ENTRY main.1"),
        program(permute("a").replace("source_target_pairs", "pairs")),
        program(loop("body", 2).replace("body=%", "do=%"), body=permute("a")),
    ],
    ids=["empty", "names otherwise", "pairs otherwise", "loops otherwise"],
)
def test_what_cannot_be_read_does_not_count_as_nothing_sent(text):
    with pytest.raises(UnknownForm):
        traffic(text)
