"""The processes of one node find each other: the same checks on every rank, one verdict for all, then the lines."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...control import Control
from ...transport import TransportError
from .lines import Board, Lines, Listener, node_id
from .regions import Context, Flags


class Card(NamedTuple):
    """What one rank says of itself."""

    members: tuple[int, ...] = ()
    problem: str | None = None
    node: str = ""
    host: str = ""
    pci_id: str = ""  # of its device
    unreadable: tuple[str, ...] = ()  # devices that its device cannot read
    address: str = ""  # where it listens

    @classmethod
    def of(cls, members: Sequence[int], *others: Any) -> Card:
        """From JSON, which has no tuples."""
        return cls(tuple(members), *others)


def join_node(
    control: Control,
    rank: int,
    members: Sequence[int],
    device: torch.device,
    *,
    missing: str | None,
    first: int,
    timeout: float,
) -> tuple[Context, Flags, Lines]:
    """This rank's context, the flags that the members share, all at `first`, and its lines to the other members.

    Every rank of `control` calls it together, whatever its `members`; `missing` is why this rank cannot take part.

    Raises:
        TransportError: on every rank that has to do with the cause, naming the ranks.
    """
    context, joined = None, None
    try:
        with Listener() as listener:
            context, card = _card(members, device, missing, listener)
            node = control.fresh_scope("cards")
            node.publish(str(rank), tuple(card))
            peers = {peer: str(peer) for peer in members}
            told: list[Any] = node.collect(peers, what="who is on this node", timeout=timeout)
            cards = {peer: Card.of(*one) for peer, one in zip(members, told, strict=True)}
            problem = problem_of(members, cards)
            if problem is None and context is not None:
                try:
                    addresses = {peer: cards[peer].address for peer in members}
                    joined = _join(context, rank, listener, addresses, first, timeout)
                except (OSError, TransportError) as error:
                    problem = f"rank {rank} cannot join its node's other ranks ({error}): do they share one container?"
            # Twice: a rank that others do not reach has waited for them by now.
            problems = control.gather(problem, what="whether the ranks of a node are joined", timeout=2 * timeout)
        failed = [str(found) for peer, found in enumerate(problems) if peer in members and found]
        if context is None or joined is None or failed:
            raise TransportError(f'transport "copy_engine": {"; ".join(dict.fromkeys(failed))}')
        return context, *joined
    except BaseException:
        if context is not None:
            _give_back(context, joined)
        raise


def _give_back(context: Context, joined: tuple[Flags, Lines] | None) -> None:
    if joined is not None:
        flags, lines = joined
        lines.close()
        with context.current():
            flags.close()
    context.release()


def _join(
    context: Context, rank: int, listener: Listener, addresses: Mapping[int, str], first: int, timeout: float
) -> tuple[Flags, Lines]:
    sockets: dict[int, socket.socket] = {}
    try:
        listener.connect(rank, addresses, sockets, timeout)
        board = Board.shared(rank, sockets, 2 * len(addresses) ** 2, first)
        try:
            with context.current():
                return Flags(context.driver, board), Lines(sockets)
        except BaseException:
            board.close()
            raise
    except BaseException:
        for line in sockets.values():
            line.close()
        raise


def problem_of(members: Sequence[int], cards: Mapping[int, Card]) -> str | None:
    """Why these ranks cannot copy from each other, None where they can: the same words on every one of them."""
    mine = {rank: cards[rank] for rank in members}
    for rank, card in mine.items():
        if card.problem:
            return f"on rank {rank} {card.problem}"
    if len({card.members for card in mine.values()}) > 1:
        told = ", ".join(f"rank {rank}: {list(card.members)}" for rank, card in mine.items())
        return f"the ranks disagree on members ({told})"
    if len({card.node for card in mine.values()}) > 1:
        told = ", ".join(f"rank {rank} on {card.host}" for rank, card in mine.items())
        return f"it copies between GPUs of one node, and the ranks are on several ({told})"
    for rank, card in mine.items():
        for peer, other in mine.items():
            if other.pci_id in card.unreadable:
                return f"the device of rank {rank} ({card.pci_id}) cannot read that of rank {peer} ({other.pci_id})"
    return None


def _card(
    members: Sequence[int], device: torch.device, missing: str | None, listener: Listener
) -> tuple[Context | None, Card]:
    """What this rank says of itself; also where it fails, for the others would wait."""
    card = Card(tuple(members), missing, node_id(), socket.gethostname(), address=listener.address)
    if missing:
        return None, card
    driver: Any = importlib.import_module("cuda.bindings.driver")
    try:
        context = Context(driver, device)
        card = card._replace(problem=context.problem(), pci_id=context.pci_id(), unreadable=context.unreadable())
        return context, card
    except (TransportError, RuntimeError) as error:  # RuntimeError: cuda-bindings finds no driver
        return None, card._replace(problem=str(error))
