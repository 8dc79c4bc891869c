"""Messages of compiled programs are counted, including those in loops, branches, collectives, and to oneself."""

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


def test_messages_in_a_row_are_counted_with_their_elements():
    found = traffic(program(permute("a"), permute("b", "bf16[1,2,4,8]{3,2,1,0}")))
    assert (found.messages, found.elements) == (2, 128)
    assert not (found.others or found.in_branch or found.turns_unknown)


def test_those_in_a_loop_count_once_for_each_turn_and_loops_multiply():
    found = traffic(
        program(loop("outer", 3), outer=permute("a") + "\n" + loop("inner", 2), inner=permute("b"))
    )
    assert found.messages == 3 + 6


def test_loops_that_send_are_listed_with_one_turn_of_each():
    found = traffic(
        program(loop("body", 3), loop("still", 5), body=permute("a"), still="  %n = f32[1] negate(%p)")
    )
    assert found.loops == [(64, 3)]
    assert not traffic(program(loop("body", None), body=permute("a"))).loops


def test_a_message_to_oneself_is_none_and_who_sends_most_counts():
    assert traffic(program(permute("a", pairs="source_target_pairs={{0,0}}"))).messages == 0
    some = program(
        permute("a", pairs="source_target_pairs={{0,1}}"), permute("b", pairs="source_target_pairs={{2,1}}")
    )
    assert traffic(some).messages == 1


def test_several_tensors_in_one_message_are_several():
    both = "(f32[2,4]{1,0}, f32[8]{0})"
    assert (traffic(program(permute("a", both))).messages, traffic(program(permute("a", both))).elements) == (
        2,
        16,
    )


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


def test_computations_that_are_never_called_send_nothing_and_those_called_do():
    assert traffic(program(unused=permute("a"))).messages == 0
    called = program("  %r = f32[1] call(%x), to_apply=%inner", inner=permute("a"))
    assert traffic(called).messages == 1


def test_other_collectives_are_named():
    gather = "  %g = f32[4,2]{1,0} all-gather(%x), channel_id=1, dimensions={0}"
    reduce = "  %s = f32[2]{0} all-reduce(%x), to_apply=%add"
    assert set(traffic(program(gather, reduce)).others) == {"all-gather", "all-reduce"}


def test_a_condition_is_asked_once_more_than_its_loop_turns():
    asks = loop("body", 3, "asks")
    assert traffic(program(asks, body="  %n = f32[1] negate(%p)", asks=permute("a"))).messages == 4
    assert traffic(program(loop("body", None, "asks"), body="", asks=permute("a"))).turns_unknown


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
