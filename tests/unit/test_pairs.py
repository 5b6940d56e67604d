"""Which ranks meet when, and who is blamed for slow links."""

from collections.abc import Callable

import pytest

from paceline.check.links import plan_pairs, plan_rounds
from paceline.check.slow_links import slow_pairs, usual_gb_per_s
from paceline.machine.measures import PairSpeed
from paceline.records import Finding

GOOD, BAD = 10.0, 1.0


def speeds(num_ranks: int, speed: Callable[[int, int], float]) -> list[PairSpeed]:
    """Every pair of ranks, a < b, with the bandwidth that `speed(a, b)` gives in GB/s."""
    return [
        PairSpeed(a=a, b=b, num_bytes=10**9, one_way_s=1 / speed(a, b), gb_per_s=speed(a, b))
        for a in range(num_ranks)
        for b in range(a + 1, num_ranks)
    ]


def named(findings: list[Finding]) -> list[str]:
    return [finding.where for finding in findings]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 16])
def test_few_ranks_all_meet(num_ranks: int) -> None:
    assert len(plan_pairs(num_ranks)) == num_ranks * (num_ranks - 1) // 2


def test_many_ranks_meet_at_powers_of_two() -> None:
    pairs = plan_pairs(24)
    distances = {min(b - a, 24 - (b - a)) for a, b in pairs}
    # 16 steps one way round are 8 the other way.
    assert distances == {1, 2, 4, 8}
    assert all(sum(rank in pair for pair in pairs) == 8 for rank in range(24))
    assert len(plan_pairs(1024)) == 9 * 1024 + 512


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8, 16, 17, 24, 100])
def test_nobody_is_in_two_pairs_of_a_round(num_ranks: int) -> None:
    pairs = plan_pairs(num_ranks)
    rounds = plan_rounds(pairs)
    assert sorted(pair for each in rounds for pair in each) == pairs
    for each in rounds:
        ranks = [rank for pair in each for rank in pair]
        assert len(ranks) == len(set(ranks))
    assert len(rounds) <= 31


def test_rounds_of_all_pairs_keep_hosts_of_eight_apart() -> None:
    rounds = plan_rounds(plan_pairs(16))
    assert len(rounds) == 15
    for number, each in enumerate(rounds, start=1):
        assert {a ^ b for a, b in each} == {number}
        assert {a // 8 == b // 8 for a, b in each} == {number < 8}


def test_even_links_are_all_right() -> None:
    assert slow_pairs(speeds(4, lambda a, b: GOOD + a + b), ["a"] * 4) == []


@pytest.mark.parametrize("num_ranks", [0, 1, 2])
def test_one_link_has_nothing_to_be_compared_with(num_ranks: int) -> None:
    assert slow_pairs(speeds(num_ranks, lambda a, b: BAD), ["a"] * num_ranks) == []


def test_one_slow_link_is_named() -> None:
    pairs = speeds(4, lambda a, b: BAD if (a, b) == (1, 3) else GOOD)
    (finding,) = slow_pairs(pairs, ["a"] * 4)
    assert finding.where == "link of rank 1 and rank 3 on host a"
    assert finding.severity == "warning" and finding.cause == "cluster"
    assert "1 GB/s, where 10 is usual" in finding.what


def test_half_the_usual_is_not_slow_and_less_is() -> None:
    for bandwidth, expected in ((5.0, 0), (4.99, 1)):
        pairs = speeds(4, lambda a, b, slow=bandwidth: slow if (a, b) == (0, 1) else GOOD)
        assert len(slow_pairs(pairs, ["a"] * 4)) == expected


@pytest.mark.parametrize("num_ranks", [3, 4, 8])
def test_a_slow_rank_is_named_instead_of_its_links(num_ranks: int) -> None:
    """At 3 ranks two of three links are slow, and the median link would be a slow one."""
    pairs = speeds(num_ranks, lambda a, b: BAD if 2 in (a, b) else GOOD)
    (finding,) = slow_pairs(pairs, ["a"] * num_ranks)
    assert finding.where == "rank 2 on host a"
    assert f"{num_ranks - 1} of its {num_ranks - 1} links inside its host" in finding.what


def test_two_slow_ranks_do_not_drag_their_neighbours_in() -> None:
    """With 2 and 3 bad, two of the three links of rank 0 are slow, and it is not to blame."""
    pairs = speeds(5, lambda a, b: BAD if {2, 3} & {a, b} else GOOD)
    assert sorted(named(slow_pairs(pairs, ["a"] * 5))) == ["rank 2 on host a", "rank 3 on host a"]


def test_a_slow_rank_and_a_slow_link_elsewhere() -> None:
    pairs = speeds(6, lambda a, b: BAD if 0 in (a, b) or (a, b) == (3, 4) else GOOD)
    assert named(slow_pairs(pairs, ["a"] * 6)) == [
        "rank 0 on host a",
        "link of rank 3 and rank 4 on host a",
    ]


def test_links_between_hosts_are_compared_with_each_other() -> None:
    """A network tenfold slower than NVLink is no fault."""
    hosts = ["a", "a", "b", "b"]
    pairs = speeds(4, lambda a, b: GOOD if hosts[a] == hosts[b] else BAD)
    assert slow_pairs(pairs, hosts) == []


def test_a_slow_link_between_hosts_names_both() -> None:
    hosts = ["a", "a", "b", "b"]
    pairs = speeds(4, lambda a, b: 0.1 if (a, b) == (0, 3) else BAD)
    assert named(slow_pairs(pairs, hosts)) == ["link of rank 0 and rank 3 on host a and b"]


def test_a_slow_host_is_named_instead_of_its_ranks() -> None:
    hosts = ["a", "a", "b", "b", "c", "c"]
    pairs = speeds(6, lambda a, b: BAD if hosts[a] != hosts[b] and b > 3 else GOOD)
    (finding,) = slow_pairs(pairs, hosts)
    assert finding.where == "host c"
    assert "8 of its 8 links to other hosts" in finding.what


def test_a_host_slow_inside_is_named_too() -> None:
    hosts = ["a"] * 3 + ["b"] * 3 + ["c"] * 3
    pairs = speeds(9, lambda a, b: BAD if hosts[a] == hosts[b] == "b" else GOOD)
    (finding,) = slow_pairs(pairs, hosts)
    assert finding.where == "host b" and "3 of its 3 links inside its host" in finding.what


def test_one_ranks_own_network_card() -> None:
    """Its links to other hosts are slow, those inside its host are not; its host is not blamed."""
    hosts = ["a", "a", "b", "b", "c", "c"]
    pairs = speeds(6, lambda a, b: BAD if 2 in (a, b) and hosts[a] != hosts[b] else GOOD)
    (finding,) = slow_pairs(pairs, hosts)
    assert finding.where == "rank 2 on host b"
    assert "4 of its 4 links to other hosts" in finding.what


def test_a_host_with_one_rank_is_named_by_its_rank() -> None:
    pairs = speeds(3, lambda a, b: BAD if b == 2 else GOOD)
    assert named(slow_pairs(pairs, ["a", "b", "c"])) == ["rank 2 on host c"]


def test_of_two_hosts_neither_can_be_blamed() -> None:
    """All links but one between them are slow: rank by rank, whoever explains the most."""
    hosts = ["a", "a", "b", "b"]
    pairs = speeds(4, lambda a, b: BAD if hosts[a] != hosts[b] and (a, b) != (0, 2) else GOOD)
    assert all(not where.startswith("host") for where in named(slow_pairs(pairs, hosts)))


def test_a_large_world_of_sampled_pairs() -> None:
    hosts = [f"n{rank // 8}" for rank in range(64)]
    pairs = [
        PairSpeed(a=a, b=b, num_bytes=1, one_way_s=1, gb_per_s=BAD if 9 in (a, b) else GOOD)
        for a, b in plan_pairs(64)
    ]
    assert set(named(slow_pairs(pairs, hosts))) == {"rank 9 on host n1"}


def test_usual_is_the_median_of_the_best() -> None:
    # The best links of ranks 0 to 3 are 4, 4, 3 and 2 GB/s.
    table = {(0, 1): 4.0, (0, 2): 3.0, (0, 3): 2.0, (1, 2): 1.0, (1, 3): 1.0, (2, 3): 1.0}
    assert usual_gb_per_s(speeds(4, lambda a, b: table[a, b])) == 3.5
