"""What `describe` says of the network, from the files of a made-up machine."""

import socket

from zaya_jax.lab.measure.network_devices import Traffic, describe_network


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_interfaces_ports_and_plugins_are_listed(tmp_path):
    write(tmp_path, {
        "sys/class/net/eth0/operstate": "up\n", "sys/class/net/eth0/speed": "400000\n",
        "sys/class/net/eth0/device/vendor": "", "sys/class/net/eth1/operstate": "down\n",
        "sys/class/net/eth1/speed": "-1\n", "sys/class/net/eth1/device/vendor": "",
        "sys/class/net/lo/operstate": "unknown\n",
        "sys/class/infiniband/ionic_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
        "sys/class/infiniband/ionic_0/ports/1/link_layer": "Ethernet\n",
        "sys/class/infiniband/ionic_0/ports/1/state": "4: ACTIVE\n",
        "opt/rocm-7.0/lib/librccl-anp.so.1": "", "plugins/libnccl-net.so": "",
        "proc/self/maps": "7f00-7f01 r-xp 00000000 00:00 0 /opt/rocm-7.0/lib/librccl-anp.so.1\n",
    })  # fmt: skip
    network = describe_network(tmp_path, {"LD_LIBRARY_PATH": "/plugins:"})
    assert network["interfaces"] == {
        "eth0": {"state": "up", "speed": 400_000},
        "eth1": {"state": "down", "speed": None},
    }
    assert network["rdma"] == {
        "ionic_0/1": {"link_layer": "Ethernet", "state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)"}}  # fmt: skip
    assert network["plugins"] == {
        "librccl-anp.so": {"files": [f"{tmp_path}/opt/rocm-7.0/lib/librccl-anp.so.1"], "loaded": True},
        "libnccl-net.so": {"files": [f"{tmp_path}/plugins/libnccl-net.so"], "loaded": False},
    }


def test_a_machine_without_any_has_empty_lists(tmp_path):
    assert describe_network(tmp_path, {}) == {"interfaces": {}, "rdma": {}, "plugins": {}}


def test_what_carries_traffic_is_counted(tmp_path):
    net, port = "sys/class/net/eth0/statistics", "sys/class/infiniband/ionic_0/ports/1/counters"
    idle = {"sys/class/net/eth1/statistics/tx_bytes": "9", "sys/class/net/eth1/statistics/rx_bytes": "9"}
    write(tmp_path, idle | {f"{net}/tx_bytes": "5", f"{net}/rx_bytes": "7\n",
                            f"{port}/port_xmit_data": "100", f"{port}/port_rcv_data": "100"})  # fmt: skip
    traffic = Traffic(tmp_path)
    assert (traffic.bytes(), traffic.line("nothing ran")) == ({}, "")
    write(tmp_path, {f"{net}/rx_bytes": "1007", f"{port}/port_xmit_data": "1000100"})
    assert traffic.bytes() == {"ionic_0/1": 4_000_000, "eth0": 1000}  # words of four bytes
    assert traffic.line("gathering") == "The network carried, while gathering: ionic_0/1 4.0 MB, eth0 0.0 MB."


def test_traffic_of_this_machine_is_seen():
    """A megabyte over the loopback interface."""
    traffic = Traffic()
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()) as client:
        receiver, _ = server.accept()
        with receiver:
            client.sendall(bytes(1_000_000))
            received = 0
            while received < 1_000_000:
                received += len(receiver.recv(65536))
    assert traffic.bytes().get("lo", 0) >= 1_000_000
