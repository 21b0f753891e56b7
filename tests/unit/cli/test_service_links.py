"""Variables that Kubernetes injects for a service are not options, whatever the service is called."""

from __future__ import annotations

import pytest

from stridelm.cli.main import build_parser
from stridelm.cli.serve import PREFIX, read_configs
from stridelm.cli.service_links import service_links

SERVICES = ("stride", "stride-gateway", "stride-2", "stride-port", "stride-served-model-name", "stride-service")
PORTS = ((80, "TCP", ""), (8000, "TCP", "http"), (53, "UDP", "dns-udp"), (9, "SCTP", ""))


def injected(service: str, address: str = "10.0.0.1") -> dict[str, str]:
    """As the kubelet makes them: the first port's under the service's name alone, then each port's by number."""

    def name(word: str) -> str:
        return word.upper().replace("-", "_")

    own, (first, protocol, _) = name(service), PORTS[0]
    found = {
        f"{own}_SERVICE_HOST": address,
        f"{own}_SERVICE_PORT": str(first),
        f"{own}_PORT": f"{protocol.lower()}://{address}:{first}",
    }
    for number, kind, called in PORTS:
        if called:
            found[f"{own}_SERVICE_PORT_{name(called)}"] = str(number)
        at = f"{own}_PORT_{number}_{kind}"
        found |= {at: f"{kind.lower()}://{address}:{number}", f"{at}_PROTO": kind.lower()}
        found |= {f"{at}_PORT": str(number), f"{at}_ADDR": address}
    return found


@pytest.mark.parametrize("address", ["10.0.0.1", "fd00::1"])
@pytest.mark.parametrize("service", SERVICES)
def test_a_service_changes_nothing(service: str, address: str) -> None:
    """All of a service's variables are recognised as such, and the server is configured as if they were absent."""
    args, links = build_parser("serve").parse_args(["serve"]), injected(service, address)
    assert service_links(links, PREFIX) == sorted(links)
    assert read_configs(args, links) == read_configs(args, {})
    assert read_configs(args, {**links, "STRIDE_HOST": "::1"})[0].host == "::1"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("STRIDE_PORT", "8001"),
        ("STRIDE_PROT", "tcp://10.0.0.1:80"),
        ("STRIDE_SERVICE", "10.0.0.1"),
        ("STRIDE_SERVICE_PORT", "many"),
        ("STRIDE_PORT_80_TCP", "80"),
        ("STRIDE_PORT_80", "tcp://10.0.0.1:80"),
        ("OTHER_PORT", "tcp://10.0.0.1:80"),
    ],
)
def test_other_variables(name: str, value: str) -> None:
    """Options, misspelt ones, and unrelated variables."""
    assert service_links({name: value}, PREFIX) == []


@pytest.mark.parametrize("name", ["STRIDE_PROT", "STRIDE_SERVICE", "STRIDE_PORT_80", "STRIDE_HOSTS_SERVICE"])
def test_unknown_options_are_refused_beside_them(name: str) -> None:
    args = build_parser("serve").parse_args(["serve"])
    with pytest.raises(ValueError, match="unknown option"):
        read_configs(args, {**injected("stride"), name: "1"})
