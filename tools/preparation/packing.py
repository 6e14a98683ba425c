"""Records into rows of one length, several whole records in a row: best fit, the longest first."""
import array
import bisect
import itertools
from collections import Counter


def zeros(count):
    """An array of so many numbers of 32 bits."""
    return array.array("I", bytes(4 * count))


def longest_first(lengths):
    """Numbers of the records by length; records of one length stay in their order."""
    counts, place, behind = Counter(lengths), {}, 0
    for length in sorted(counts, reverse=True):
        place[length], behind = behind, behind + counts[length]
    order = zeros(len(lengths))
    for number, length in enumerate(lengths):
        order[place[length]] = number
        place[length] += 1
    return order


def best_fit(lengths, row_length):
    """Row of each record, and of each row the record that was put there first. A record goes where it leaves the least space;
    only where it fits nowhere it begins a row."""
    row_of, openers = zeros(len(lengths)), array.array("I")
    rows, spaces = {}, []  # rows by the space left in them, and the spaces that some row has, ascending
    for number in longest_first(lengths):
        length = lengths[number]
        at = bisect.bisect_left(spaces, length)
        if at < len(spaces):
            space = spaces[at]
            row = rows[space].pop()
            if not rows[space]:
                del spaces[at]
        else:
            space, row = row_length, len(openers)
            openers.append(number)
        row_of[number] = row
        left = space - length
        if left:
            alike = rows.setdefault(left, array.array("I"))
            if not alike:
                bisect.insort(spaces, left)
            alike.append(row)
    return row_of, openers


def pack(lengths, row_length):
    """Arrays (members, ends): row r holds the records members[ends[r - 1]:ends[r]], by number. None may be longer than a row.
    Records of a row are in their order, and rows in that of their longest records, so that a file does not begin with the
    longest. They depend on lengths and row length alone."""
    row_of, openers = best_fit(lengths, row_length)
    renumbered, sizes, rows = zeros(len(openers)), zeros(len(openers)), 0
    for number, row in enumerate(row_of):
        if openers[row] == number:
            renumbered[row], rows = rows, rows + 1
    for number, row in enumerate(row_of):
        row_of[number] = renumbered[row]
        sizes[row_of[number]] += 1
    ends = array.array("I", itertools.accumulate(sizes))
    place, members = array.array("I", [0]) + ends[:-1], zeros(len(lengths))
    for number, row in enumerate(row_of):
        members[place[row]] = number
        place[row] += 1
    return members, ends
