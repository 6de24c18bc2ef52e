"""The program that Spark starts as PySpark's daemon: it has the preloaded process fork the daemon with its streams, and waits until that ends."""

import os
import socket
import sys

with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(os.environ["LOOKUPCACHE_TESTS_DAEMONS"])
    socket.send_fds(connection, [b"\0"], [0, 1, 2])
    variables = [name + b"=" + value for name, value in os.environb.items()]
    # Spark 3.5 does not tell a daemon which module its workers run.
    connection.sendall(b"\0".join([os.getcwdb(), os.fsencode(" ".join(sys.argv[1:])), *variables]))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
