"""By which network interface a machine reaches another one. Standard library only."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""


def interface_toward(host: str) -> str:
    """The interface by which this machine reaches ``host`` (a name or an IPv4 address), such as
    ``eth0``. Empty: it cannot be found, or ``host`` is this machine by its loopback address."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # UDP: nothing is sent, the kernel picks the source address
            own = str(probe.getsockname()[0])
    except OSError:
        return ""
    if ipaddress.ip_address(own).is_loopback:
        return ""
    return next((name for _, name in socket.if_nameindex() if own == _address(name)), "")


def _address(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:  # it has none
            return ""
    return socket.inet_ntoa(answer[20:24])


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What gloo and NCCL have to be told to meet where the ranks meet (``MASTER_ADDR``): left to
    themselves they take the interface of the host's name, or the first one. Whatever ``environ``
    (the node's, and ``cluster.env``) says already stays.
    """
    missing = [name for name in (GLOO, NCCL) if name not in environ]
    if not missing or "MASTER_ADDR" not in environ:
        return {}
    interface = interface_toward(environ["MASTER_ADDR"])
    exactly = {GLOO: interface, NCCL: f"={interface}"}  # NCCL takes it for the beginning of names
    return {name: exactly[name] for name in missing} if interface else {}
