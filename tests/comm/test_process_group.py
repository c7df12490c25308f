"""Groups, where placements lie in them, and ranks that agree or fail together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from tests.cases import chunks
from tests.comm.sent_messages import sent

from shardwise import ChunkShardingSpec, validation
from shardwise.comm.agreement.headers import room
from shardwise.comm.agreement.steps import in_step, in_step_sharing, in_step_telling, notify_if_alone
from shardwise.comm.group import backend
from shardwise.comm.group.members import current_process_group, listed, load_with_process_group
from shardwise.comm.group.placing import locate_all, outside, parse_and_validate_remote_device, places_from_texts
from shardwise.errors import RankMismatchError, RpcError, ShardCountError
from shardwise.layout.placement import parse_placement
from shardwise.testing import ranks


def world() -> Any:
    """The default group."""
    return dist.group.WORLD


@ranks(4)
def test_work_that_goes_well_everywhere_gives_its_value() -> None:
    """To each rank its own."""
    assert in_step(world(), lambda: (dist.get_rank(), {"size": (2, 3)})) == dist.get_rank()
    value, brought = in_step_sharing(
        world(), lambda: ("mine", {}, {"rank": dist.get_rank(), "x": [None] * dist.get_rank()})
    )
    assert value == "mine"
    assert brought == [{"rank": rank, "x": [None] * rank} for rank in range(4)]


@ranks(4)
def test_one_rank_that_fails_fails_all_with_the_same_error() -> None:
    """Same type, same text, and the group can be used afterwards."""

    def work() -> tuple[None, dict[str, object]]:
        if dist.get_rank() == 2:
            raise ShardCountError("three apples, not four")
        return None, {}

    with pytest.raises(ShardCountError, match="three apples, not four") as caught:
        in_step(world(), work)
    texts: list[str] = [""] * 4
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1
    assert "found on rank 2" in texts[0]
    assert in_step(world(), lambda: (1, {})) == 1


@ranks(4)
def test_errors_of_any_kind_travel() -> None:
    """Builtins keep their type; what is unknown here becomes a RuntimeError that names it."""

    def fail(error: Exception) -> Any:
        def work() -> Any:
            raise error

        return work

    with pytest.raises(ZeroDivisionError, match="by zero"):
        in_step(world(), fail(ZeroDivisionError("by zero")))
    with pytest.raises(RuntimeError, match="PicklingError: no"):
        in_step(world(), fail(__import__("pickle").PicklingError("no")))
    with pytest.raises(RuntimeError, match="UnicodeDecodeError"):
        in_step(world(), fail(UnicodeDecodeError("utf-8", b"x", 0, 1, "bad")))
    with pytest.raises(KeyError, match="found on rank 0 and 3 more"):
        in_step_sharing(world(), fail(KeyError("k")))


@ranks(4)
def test_ranks_that_disagree_are_told_who_and_about_what() -> None:
    """On every rank the same."""
    fields = {"dtype": "float32", "global_size": [4, 4 if dist.get_rank() != 3 else 5]}
    message = (
        r"ShardedTensor global_size property does not match from different ranks! "
        r"global_size=\[4, 4\] on rank:0 does not match with global_size=\[4, 5\] on rank:3"
    )
    with pytest.raises(RankMismatchError, match=message):
        in_step(world(), lambda: (None, fields))
    with pytest.raises(ValueError, match=message):
        in_step_sharing(world(), lambda: (None, fields, "something"))


@ranks(4)
def test_different_verbs_at_the_same_time_are_found_out() -> None:
    """Instead of reading each other's messages."""
    here = dist.get_rank()
    verb: Any = in_step if here < 2 else in_step_sharing
    work = (None, {"verb": "zeros"}) if here < 2 else (None, {"verb": "init"}, list(range(300)))
    with pytest.raises(RankMismatchError, match="verb property does not match"):
        verb(world(), lambda: work)


@ranks(4)
def test_sub_groups_agree_among_themselves() -> None:
    """The error names global ranks; outsiders are not asked."""
    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        with pytest.raises(RankMismatchError, match="x=1 on rank:1 does not match with x=3 on rank:3"):
            in_step(group, lambda: (None, {"x": dist.get_rank()}))
    else:
        assert in_step(group, lambda: ("alone", {"x": 9})) == "alone"


@ranks(2)
def test_validation_can_be_switched_off() -> None:
    """Then nothing is compared, and nothing travels."""
    with validation(False):
        if dist.get_rank() == 0:  # nobody answers, nobody is asked
            assert in_step(world(), lambda: (5, {"x": 0})) == 5
        with validation(True), pytest.raises(RankMismatchError):
            in_step(world(), lambda: (5, {"x": dist.get_rank()}))


@ranks(4)
def test_placements_are_found_in_the_group() -> None:
    """Ranks are global; a rank that is not in the group, and a worker without RPC, are errors."""
    group = dist.new_group([1, 2])
    assert parse_and_validate_remote_device(world(), parse_placement("rank:3/cpu"))[0] == 3
    assert parse_and_validate_remote_device(world(), parse_placement("cpu"))[0] is None
    if dist.get_rank() in (1, 2):
        with pytest.raises(ValueError, match="Global rank 3 does not exist in input process group"):
            parse_and_validate_remote_device(group, parse_placement("rank:3/cpu"))
    else:
        assert parse_and_validate_remote_device(group, parse_placement("rank:3/cpu"))[0] == 3
    with pytest.raises(ValueError, match="remote device is None"):
        parse_and_validate_remote_device(world(), None)
    with pytest.raises(RpcError, match="RPC framework needs to be initialized for using worker names"):
        parse_and_validate_remote_device(world(), parse_placement("worker/cpu"))


@ranks(2)
def test_the_current_group_is_the_one_of_the_context() -> None:
    """One at a time, and gone afterwards, also after an error."""
    group = dist.new_group([0, 1])
    assert current_process_group() is world()
    with load_with_process_group(group):
        assert current_process_group() is group
        with pytest.raises(RuntimeError, match="already set"), load_with_process_group(world()):
            pass
    with pytest.raises(KeyError), load_with_process_group(group):
        raise KeyError
    assert current_process_group() is world()


@ranks(3)
def test_verbs_within_verbs_fail_together() -> None:
    """A rank that fails between two verbs of its work stops the others in theirs, and nobody waits for anybody."""
    group = dist.group.WORLD
    assert group is not None

    def verb(name: str) -> str:
        return in_step(group, lambda: (name, {"verb": name}))

    def work() -> tuple[None, dict[str, object]]:
        verb("one")
        if dist.get_rank() == 1:
            raise ValueError("not on this rank")
        verb("two")
        return None, {"verb": "all"}

    with pytest.raises(ValueError, match=r"not on this rank\n.found on rank 1"):
        in_step(group, work)
    assert verb("three") == "three"  # and all are in step again


def verb(name: str, group: Any = None) -> str:
    """What ranks do together: its name, or the error that it raises."""
    try:
        return in_step(group or world(), lambda: (name, {"verb": name}))
    except Exception as error:
        return f"{type(error).__name__} {error}"


@ranks(3)
def test_an_error_of_one_rank_alone_reaches_the_others() -> None:
    """At their next meeting, whether or not that rank comes; each raises it once, and then all are in step."""
    told = "ZeroDivisionError alone\n(found on rank 1; every rank of the group stops)"
    here = dist.get_rank()
    for number in range(2):  # the same verb again, as in a loop
        if here == 1:
            notify_if_alone(world(), ZeroDivisionError("alone"))
            notify_if_alone(world(), ValueError("and again"))  # before the first one is told: of no account
            if number == 0:
                store().get("raised")  # until the others have heard of it
        else:
            assert verb("one") == told
            store().set("raised", "")
        assert verb("one") == "one"
    notify_if_alone(world(), ZeroDivisionError("everywhere"))
    assert verb("two") == "two"  # all ranks have raised it by themselves
    if here == 1:
        notify_if_alone(world(), ZeroDivisionError("alone"))
    assert verb("three").partition("=")[0] == (told if here != 1 else MISMATCH).partition("=")[0]  # one verb too many
    if here != 1:
        assert verb("four").startswith(MISMATCH)
    assert verb("five") == "five"


MISMATCH = "RankMismatchError ShardedTensor verb property does not match from different ranks! verb"


def store() -> Any:
    """By which ranks wait for each other without a meeting."""
    return dist.distributed_c10d._world.pg_map[world()][1]


@ranks(3)
def test_word_is_left_for_those_whom_it_concerns() -> None:
    """The ranks of the group, unless they know already, or can tell by themselves, or do not compare."""
    group, here = dist.new_group([0, 1]), dist.get_rank()
    if here == 1:
        notify_if_alone(group, ZeroDivisionError("alone"))
    assert verb("world") == "world"
    if here < 2:
        assert here == 1 or verb("pair", group).startswith("ZeroDivisionError alone")
        assert verb("pair", group) == "pair"
    if here == 1:
        notify_if_alone(world(), ShardCountError("found by what all ranks know"))
        notify_if_alone(None, ZeroDivisionError("without a group"))
        with validation(False):
            notify_if_alone(world(), ZeroDivisionError("not compared"))
    assert verb("world") == "world"
    with pytest.raises(ValueError, match="told to all") as caught:
        in_step(world(), lambda: raised(ValueError("told to all")))
    notify_if_alone(world(), caught.value)
    assert verb("world") == "world"
    notify_if_alone(world(), TypeError("of all ranks alike"))
    assert verb("world") == "world"
    notify_if_alone(world(), TypeError(f"of all ranks, and on each of them another: {here}"))
    assert verb("world") == "world"


def raised(error: Exception) -> Any:
    """As work that fails."""
    raise error


# Groups of many ranks, in which nobody writes to each of the others ---------------------------------------------------


def in_large_groups(*tests: Any) -> None:
    """Do these tests on this rank, where every group counts as a large one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "MOST_EACH", 1)
        for test in tests:
            test.on_this_rank()


@ranks(4)
def test_in_large_groups_ranks_agree_and_differ_alike() -> None:
    """With the same values and the same errors as in small ones."""
    in_large_groups(
        test_work_that_goes_well_everywhere_gives_its_value,
        test_one_rank_that_fails_fails_all_with_the_same_error,
        test_errors_of_any_kind_travel,
        test_ranks_that_disagree_are_told_who_and_about_what,
        test_different_verbs_at_the_same_time_are_found_out,
        test_sub_groups_agree_among_themselves,
    )


@ranks(3)
def test_in_large_groups_ranks_that_fail_alone_are_heard_of() -> None:
    """Whether they come to the next meeting or not."""
    in_large_groups(
        test_verbs_within_verbs_fail_together,
        test_an_error_of_one_rank_alone_reaches_the_others,
        test_word_is_left_for_those_whom_it_concerns,
    )


@ranks(3)
def test_what_agreeing_costs() -> None:
    """A header for each of the others; in large groups a few words a round, and what ranks bring where it differs."""
    here, group = dist.get_rank(), world()
    assert room(group) == 128 - 25
    assert sent(lambda: in_step(group, lambda: (1, {"x": 2}))) == [128] * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "MOST_EACH", 2)
        assert room(group) == 0
        assert sent(lambda: in_step(group, lambda: (1, {"x": 2}))) == [56] * 2
        told: list[Any] = []
        assert sent(lambda: told.extend(in_step_sharing(group, lambda: (1, {}, ["a"] * 99))[1])) == [56] * 2
        assert told == [["a"] * 99] * 3
        brought = b"x" * (200 * here)

        def tell() -> None:
            told[:] = in_step_telling(group, lambda: (1, {}, brought))[1]

        assert sent(tell) == [56] * 2 + [408] * 2
        assert told == [b"", b"x" * 200, b"x" * 400]
        brought = b"" if here == 2 else b"\0"  # which differ in their length alone
        tell()
        assert told == [b"\0", b"\0", b""]


@ranks(4)
def test_in_large_groups_of_any_size_all_is_told_in_order() -> None:
    """Of large groups of any size: what each rank brings comes in the order of the group, whatever its ranks."""
    groups = [dist.new_group(members) for members in ([3, 1, 0], [2, 0, 1, 3], [1, 2])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "MOST_EACH", 1)
        for group in groups:
            if dist.get_rank(group) >= 0:
                told = in_step_sharing(group, lambda: (1, {}, dist.get_rank()))[1]
                assert told == dist.get_process_group_ranks(group)


def test_devices_are_told_by_convention() -> None:
    """The ranks that keep to it say the same, whoever counts other devices says so, and others name theirs."""
    said, number = ["cuda:rank%4", "cuda:7", "cuda:rank%2"], np.array([0, 0, 1, 2, 2, 0])
    places = places_from_texts(np.array([4, 1, 2, 9, 8, 3]), said, number)
    assert [str(place) for place in places] == [
        "rank:4/cuda:0",
        "rank:1/cuda:1",
        "rank:2/cuda:7",
        "rank:9/cuda:1",
        "rank:8/cuda:0",
        "rank:3/cuda:3",
    ]
    assert places.ranks.tolist() == [4, 1, 2, 9, 8, 3]
    assert [str(place) for place in places_from_texts(np.arange(2), ["cpu"], np.zeros(2, dtype=np.int64))] == [
        "rank:0/cpu",
        "rank:1/cpu",
    ]


@ranks(4)
def test_layouts_are_looked_up_in_the_group() -> None:
    """All their ranks at once, whatever the order and the numbers of those of the group."""
    group = dist.new_group([3, 1])
    layout = chunks(0, 1, 3, 1).layout((6, 2))
    assert locate_all(layout, group) is layout
    for wrong, missing in ((chunks(0, 1, 2, 3), 2), (chunks(0, 3, 7), 7)):
        if dist.get_rank() in (1, 3):
            with pytest.raises(ValueError, match=f"Global rank {missing} does not exist in input process group"):
                locate_all(wrong.layout((6, 2)), group)
            assert outside(wrong.layout((6, 2)).ranks, group).tolist() == [missing]
        else:  # who is outside does not know
            locate_all(wrong.layout((6, 2)), group)
    with pytest.raises(ValueError, match="names no rank, so no process would hold its shard"):
        locate_all(ChunkShardingSpec(0, ["rank:1/cpu", "cpu"]).layout((6, 2)), world())


def test_texts_name_a_few_of_many_ranks() -> None:
    """And say how many there are."""
    assert listed(range(16)) == str(list(range(16)))
    assert listed(range(100, 16484)) == "[100, 101, 102, 103, 104, 105, 106, 107, ... 16384 in all]"
