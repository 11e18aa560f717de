"""The network interfaces of this host that GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose. Standard library only."""

import os
import socket
from collections.abc import Collection, Mapping

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def interfaces() -> list[str]:
    """Names of this host's network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def chosen(variable: str, value: str, here: Collection[str]) -> list[str]:
    """The interfaces among `here` that a variable's value chooses.

    Gloo takes whole names. NCCL takes beginnings of names; after `=` it takes whole names, and after `^` the value
    lists what is excluded.
    """
    excluded, value = variable == NCCL and value.startswith("^"), value.removeprefix("^" if variable == NCCL else "")
    whole, value = variable == GLOO or value.startswith("="), value.removeprefix("=")
    words = [word for word in value.split(",") if word]
    named = [name for name in here if any(name == word if whole else name.startswith(word) for word in words)]
    return [name for name in here if name not in named] if excluded else named


def unknown_interfaces(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables, with their values, that choose no interface of this host, or for gloo also a missing interface."""
    here, wrong = interfaces(), {}
    for variable in (GLOO, NCCL):
        if value := environment.get(variable, ""):
            names = chosen(variable, value, here)
            if not names or (variable == GLOO and set(value.split(",")) - set(names)):
                wrong[variable] = value
    return wrong


def interface_fault(environment: Mapping[str, str] = os.environ) -> str:
    """What is wrong with this host's choice, in one line; empty if nothing is."""
    wrong = " ".join(f"{name}={value}" for name, value in unknown_interfaces(environment).items())
    have = " ".join(interfaces())
    return wrong and f"{wrong}: host {socket.gethostname()} has no such network interface; it has: {have}"


def route_text(environment: Mapping[str, str] = os.environ) -> str:
    """How gloo chooses its address on this host, and which variable changes that."""
    if name := environment.get(GLOO):
        return f"by {GLOO}={name}"
    host = socket.gethostname()
    try:
        address = socket.getaddrinfo(host, None)[0][4][0]
    except OSError:
        address = "no address"
    return f"by its host name, which is {address} here; {GLOO} chooses an interface ({' '.join(interfaces())})"
