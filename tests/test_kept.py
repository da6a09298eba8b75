"""What is kept to be used again: the last results, within a bound on what they hold."""

from gpipe_sim.base.kept import kept


def counted(room: int, most: int, least: int = 2):
    """A function that notes what it was asked for."""
    asked: list[int] = []

    @kept(lambda number: number, room=room, most=most, least=least)
    def same(number: int) -> int:
        asked.append(number)
        return number

    return same, asked


def test_what_is_kept_is_not_made_again():
    same, asked = counted(room=100, most=3)
    assert [same(n) for n in (1, 2, 1, 2, 3, 1)] == [1, 2, 1, 2, 3, 1]
    assert asked == [1, 2, 3]
    same.cache_clear()
    same(1)
    assert asked == [1, 2, 3, 1]


def test_what_was_not_used_longest_is_forgotten_when_there_are_too_many_or_they_hold_too_much():
    same, _ = counted(room=100, most=3)
    for number in (1, 2, 3, 1, 4):
        same(number)
    assert same.held_cells() == 3 + 1 + 4
    same(99)
    same(200)
    assert same.held_cells() == 99 + 200, "the last two, however large they are"
    same(5)
    assert same.held_cells() == 200 + 5
    same(6)
    assert same.held_cells() == 5 + 6
