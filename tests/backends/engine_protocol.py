"""The engine's rings as processes and counters: a warp that fetches operands and one that fetches
what the epilogue reads, copies that land in any order, and warpgroups that multiply. A schedule is
a random order of all that may happen; each one is checked for slots that are overwritten while
somebody needs them, waits that mistake one round of a slot for another (a barrier's parity tells
neighbours apart only), and deadlock."""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass, field

from onchip.backends.cuda.geometry import Geometry
from onchip.backends.cuda.parts import at_once

Wait = tuple["Barrier", int]  # until its phase of this number is complete
Place = tuple[int, int]  # (tile, chunk or step of it)


class Wrong(Exception):
    """What a schedule ran into."""


@dataclass
class Barrier:
    """An mbarrier: a phase is complete when all arrivals of it have come."""

    arrivals: int
    complete: int = 0
    arrived: int = 0

    def arrive(self) -> None:
        self.arrived += 1
        if self.arrived == self.arrivals:
            self.complete, self.arrived = self.complete + 1, 0

    def passes(self, phase: int) -> bool:
        """try_wait.parity: whether the phase before the current one has the phase's parity."""
        return (self.complete - 1) % 2 == phase % 2


@dataclass
class Slot:
    full: Barrier
    empty: Barrier
    holds: Place | None = None
    readers: int = 0  # that have not let go of it


@dataclass
class Ring:
    """`count` slots; each is read by `readers` warpgroups."""

    count: int
    readers: int
    slots: list[Slot] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = [Slot(Barrier(1), Barrier(self.readers)) for _ in range(self.count)]

    def slot(self, number: int) -> Slot:
        return self.slots[number % self.count]


class Rings:
    """One program of `tiles` tiles. turns: a team begins a tile's products when those of the tile
    before have ended; in_place: a tile of reads is free when its team has the next one. Of programs
    that share a tile, the `part`-th, which has one tile; with slots for all of it, two threads
    fetch, one each operand."""

    def __init__(self, g: Geometry, tiles: int, turns: bool, part: int = 0) -> None:
        c = g.config
        self.teams, self.split, self.tiles, self.turns = c.teams, c.split, tiles, turns
        self.in_place = g.in_place
        first, last = (n * g.steps // c.k_split for n in (part, part + 1))
        # the steps of each chunk and phase, numbered from 0
        taps, walk, end = [len(phase.taps) for phase in g.phases], [], 0
        for n in taps * g.chunks:
            begin, end = end, end + n
            walk.append(range(max(begin, first) - first, min(end, last) - first))
        self.walk = [steps for steps in walk if len(steps)]
        self.chunks, self.steps = len(self.walk), last - first
        self.apart = at_once(g)
        self.r = Ring(g.r_stages, c.split) if g.r_stages else None
        self.x = Ring(c.x_stages, c.split)
        self.w = Ring(c.w_stages, c.split) if c.w_stages else None
        self.copies: list[tuple[Slot, Place]] = []
        self.multiplied = [0] * tiles  # warpgroups that have gone through the tile's products

    def fill(self, ring: Ring, number: int, what: Place) -> Generator[Wait]:
        slot = ring.slot(number)
        yield slot.empty, number // ring.count - 1
        if slot.readers:
            raise Wrong(f"{what} overwrites {slot.holds}")
        slot.holds, slot.readers = None, ring.readers
        self.copies.append((slot, what))

    def producer(self, inputs: bool = True, weights: bool = True) -> Generator[Wait]:
        for tile in range(self.tiles):
            for chunk in range(self.chunks):
                if inputs:
                    yield from self.fill(self.x, tile * self.chunks + chunk, (tile, chunk))
                for step in self.walk[chunk]:
                    if self.w and weights:
                        yield from self.fill(self.w, tile * self.steps + step, (tile, step))

    def reader(self) -> Generator[Wait]:
        for tile in range(self.tiles):
            if self.r:
                yield from self.fill(self.r, tile, (tile, 0))

    def held(self, ring: Ring, number: int, what: Place) -> Generator[Wait, None, Slot]:
        slot = ring.slot(number)
        yield slot.full, number // ring.count
        if slot.holds != what:
            raise Wrong(f"waited for {what}, found {slot.holds}")
        return slot

    def free(self, slot: Slot, what: Place) -> None:
        if slot.holds != what:
            raise Wrong(f"{what} was overwritten by {slot.holds} while it was read")
        slot.readers -= 1
        slot.empty.arrive()

    def warpgroup(self, team: int) -> Generator[Wait | int]:
        before = None
        for tile in range(team, self.tiles, self.teams):
            if self.turns and tile:
                yield tile - 1
            last_x = last_w = None
            for chunk in range(self.chunks):
                x = yield from self.held(self.x, tile * self.chunks + chunk, (tile, chunk))
                for step in self.walk[chunk]:
                    w = None
                    if self.w:
                        w = yield from self.held(self.w, tile * self.steps + step, (tile, step))
                    # the step before has been multiplied when this one has been issued
                    if last_w:
                        self.free(*last_w)
                    last_w = (w, (tile, step)) if w else None
                    if last_x and last_x[0] is not x:
                        self.free(*last_x)
                    last_x = (x, (tile, chunk))
            assert last_x
            self.free(*last_x)
            if last_w:
                self.free(*last_w)
            self.multiplied[tile] += 1
            if self.r:
                r = yield from self.held(self.r, tile, (tile, 0))
                if before:
                    self.free(*before)
                before = (r, (tile, 0))
                if not self.in_place:
                    self.free(*before)
                    before = None

    def ready(self, wait: Wait | int) -> bool:
        if isinstance(wait, int):
            return self.multiplied[wait] == self.split
        return wait[0].passes(wait[1])

    def play(self, seed: int) -> None:
        """One schedule: processes and copies by random preference, which changes now and then, so
        that some fall far behind. Raises Wrong."""
        chance = random.Random(seed)
        each = [(True, False), (False, True)] if self.apart else [(True, True)]
        processes: list[Generator[Wait | int]] = [self.producer(*who) for who in each]
        processes += [self.reader()] * bool(self.r)
        processes += [self.warpgroup(t) for t in range(self.teams) for _ in range(self.split)]
        waits: dict[Generator, Wait | int] = {p: next(p) for p in processes}
        order: list[Generator] = list(processes)
        newest = bool(seed % 2)  # copies land in turn, or the last one first
        slow = chance.random()  # how seldom copies land
        while waits:
            if chance.random() < 0.05:
                chance.shuffle(order)
            able = [p for p in order if p in waits and self.ready(waits[p])]
            if self.copies and (not able or chance.random() > slow):
                slot, what = self.copies.pop(-1 if newest else 0)
                slot.holds = what
                slot.full.arrive()
            elif able:
                process = able[0]
                try:
                    waits[process] = next(process)
                except StopIteration:
                    del waits[process]
            else:
                raise Wrong(f"deadlock: {len(waits)} processes wait")
        if self.multiplied != [self.split] * self.tiles:
            raise Wrong("tiles that nobody multiplied")
