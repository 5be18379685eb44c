"""A cluster that does not answer is an error at once; needs no Ray."""

from __future__ import annotations

import socket

import pytest

from auto_research.execution.cluster import RayExecutor, check_reachable
from auto_research.runtime.errors import UserError


@pytest.mark.parametrize("form", ["{}", "ray://{}"])
def test_an_address_where_nothing_listens(form: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = form.format(f"127.0.0.1:{listener.getsockname()[1]}")
        check_reachable(address)
    for attempt in (check_reachable, RayExecutor):
        with pytest.raises(UserError, match=r"does not answer .*check --address"):
            attempt(address)


@pytest.mark.parametrize("address", ["auto", "local", "session_2026", "host:name"])
def test_other_forms_are_left_to_ray(address: str) -> None:
    check_reachable(address)


def test_a_port_that_is_no_port() -> None:
    with pytest.raises(UserError, match="does not answer"):
        check_reachable("127.0.0.1:99999")
