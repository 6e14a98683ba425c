"""Division of a module into units: the parts whose weights come and go together, each a layer of the engine."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from ..errors import MisuseError
from .taken_gradient import TakenGradient

#: A list of blocks has at least so many.
_FEWEST_BLOCKS = 2


@dataclasses.dataclass(eq=False)
class Place:
    """Module and name under which a parameter is held."""

    owner: torch.nn.Module
    name: str


@dataclasses.dataclass(eq=False)
class Member:
    """One parameter of a unit. `full_name` is that of the engine's layout, `gradient` the type of its gradient there, "" where it is
    frozen; several places where the unit ties it to itself."""

    parameter: torch.nn.Parameter
    name: str
    places: list[Place]
    full_name: str = ""
    short_name: str = ""
    gradient: str = ""
    blank: torch.Tensor | None = None  # one element in the parameter's shape, which leaves have when their weights have gone
    taken: TakenGradient | None = None  # stand-in in `.grad`, the same one each time

    def put(self, value: torch.nn.Parameter) -> None:
        """Puts a parameter where modules look for this one."""
        for place in self.places:
            place.owner._parameters[place.name] = value

    def replace(self, value: torch.nn.Parameter) -> None:
        """Makes another parameter this member, and puts it in its places."""
        self.parameter, self.blank, self.taken = value, None, None
        self.put(value)

    def blank_on(self, device: torch.device) -> torch.Tensor:
        """Its blank, on the device of its leaves."""
        if self.blank is None:
            self.blank = torch.empty((), dtype=self.parameter.dtype, device=device).expand(self.parameter.shape)
        return self.blank

    def mark_taken(self) -> None:
        """Leaves a stand-in in `.grad`, where there is none."""
        if self.parameter.grad is None:
            if self.taken is None:
                self.taken = TakenGradient(self.parameter)
            self.parameter.grad = self.taken


@dataclasses.dataclass(eq=False)
class Unit:
    """A module whose forward uses its parameters and nobody else does. `module` None: the loose parameters, which lie in modules that
    contain units, or in resident modules."""

    name: str
    module: torch.nn.Module | None
    members: list[Member]
    layer: int = -1


def _is_list(module: torch.nn.Module) -> bool:
    """Whether a module is a row of parts that are called one by one."""
    return isinstance(module, torch.nn.ModuleList | torch.nn.Sequential | torch.nn.ModuleDict)


def _contains_blocks(module: torch.nn.Module) -> bool:
    """Whether a list of parts with parameters lies anywhere within a module."""
    return any(_is_list(part) and sum(next(p.parameters(), None) is not None for p in part.children()) >= _FEWEST_BLOCKS
               for part in module.modules())


def _divide(module: torch.nn.Module, name: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules that become units, in the order of registration: parts of lists, and what lies beside lists. A part of a list is
    not divided further, unless it is a list itself."""
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        if next(child.parameters(), None) is None:
            continue
        in_list = _is_list(module)
        if _is_list(child) or (not in_list and _contains_blocks(child)):
            yield from _divide(child, full)
        else:
            yield full, child


def _by_names(module: torch.nn.Module, names: Sequence[str], option: str) -> Iterator[tuple[str, torch.nn.Module]]:
    for name in names:
        try:
            yield name, module.get_submodule(name)
        except AttributeError:
            raise MisuseError(f"{option}: the module has no part '{name}'") from None


def find_units(module: torch.nn.Module, names: list[str] | None, resident: Sequence[str] = ()) -> list[Unit]:
    """The units of a module, with all of its parameters. `names`: modules that are to be units; None: blocks of module lists and
    what lies beside them. `resident`: modules whose parameters are loose, wherever else these are used. Raises MisuseError where
    there is no such module, units lie within each other, or nothing is left to be one."""
    kept = {id(inner) for _, part in _by_names(module, resident, "resident") for inner in part.modules()}
    parts = [(name, part) for name, part in (_divide(module, "") if names is None else _by_names(module, names, "units"))
             if id(part) not in kept]
    if not parts:
        raise MisuseError("the module has no parts that could be streamed one after another: name them by units=[...]")
    full_names = {id(p): n for n, p in module.named_parameters()}
    owner_of: dict[int, str] = {}
    for name, part in parts:
        for inner in part.modules():
            if owner_of.setdefault(id(inner), name) != name:
                raise MisuseError(f"units '{owner_of[id(inner)]}' and '{name}' have a module in common")
    loose = {id(p) for m in module.modules() if id(m) not in owner_of or id(m) in kept for p in m.parameters(recurse=False)}
    units = [Unit(name, part, members) for name, part in parts
             if (members := [member for member in _members(part.modules(), full_names) if id(member.parameter) not in loose])]
    if loose:
        members = [member for member in _members(module.modules(), full_names) if id(member.parameter) in loose]
        units.insert(0, Unit("loose", None, members))
    return units


def owners_of(units: list[Unit]) -> dict[int, Member]:
    """The first member of each parameter, by the parameter's id, in the order of units: the others are tied to it."""
    owners: dict[int, Member] = {}
    for unit in units:
        for member in unit.members:
            owners.setdefault(id(member.parameter), member)
    return owners


def _members(modules: Iterator[torch.nn.Module], names: dict[int, str]) -> list[Member]:
    found: dict[int, Member] = {}
    for owner in modules:
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            member = found.setdefault(id(parameter), Member(parameter, names[id(parameter)], []))
            member.places.append(Place(owner, name))
    return list(found.values())
